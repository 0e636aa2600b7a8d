"""nbgrader for this course: solutions/ holds the masters, exercises/ what is handed out. See docs/classroom.md."""

from nbconvert.preprocessors import TagRemovePreprocessor

c = get_config()  # noqa: F821  nbgrader defines it

c.CourseDirectory.course_id = "every-millisecond"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"

# An unsolved function raises exactly this, and the checks answer "not solved yet" (every_millisecond.checks.STUB).
c.ClearSolutions.code_stub = {
    "python": '# Your lines here, in place of the next one.\nraise NotImplementedError("not solved yet")'
}
c.ClearSolutions.text_stub = "*Your answer here.*"

# A cell tagged "why" explains a solution: it stays in solutions/ and is left out of exercises/.
c.GenerateAssignment.preprocessors.append(TagRemovePreprocessor)
c.TagRemovePreprocessor.enabled = True
c.TagRemovePreprocessor.remove_cell_tags = {"why"}

c.ExecutePreprocessor.timeout = 120

# nbgrader zip_collect: the student is the folder (or the archive) that holds the notebook, or stands before the set's
# name, and Moodle's addition to it is left out: anna/01_correct_timing.ipynb, anna_01_correct_timing.ipynb,
# "Anna Berg_4711_assignsubmission_file_/01_correct_timing.ipynb".
_SET = r"\d\d_[a-z0-9_]+|bug_zoo"
c.FileNameCollectorPlugin.named_regexp = (
    rf".*[/\\](?!{_SET})(?P<student_id>[^/\\]+?)(?:_\d+_assignsubmission_file_?)?[/\\_]"
    rf"(?:(?:{_SET})[/\\])?(?P<file_id>{_SET})\.ipynb$"
)
