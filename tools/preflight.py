"""Look through a class's submissions before autograding: one that nbgrader cannot read ends it for all that follow.

    python tools/preflight.py 01_correct_timing          # says what is wrong; ends with 1 if anything is
    python tools/preflight.py 01_correct_timing --mend   # mends what it can, sets the rest aside

A graded cell that was copied and pasted is the common case: two cells then have one grade id. Mending makes plain cells
of the copies: they run as before, in their places, so the answer that counts is the one that the student sees. The
notebook as it was handed in is kept beside it. What cannot be read at all is moved from submitted/ to set_aside/.

Autograding that was killed leaves a notebook of which nothing has run in autograded/, and nbgrader passes over whoever
has one there. Mending removes it, so that the next autograding grades that student.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import nbformat
from nbgrader import nbgraderformat

from llm_latency import files

ROOT = Path(__file__).resolve().parents[1]


def copies(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells whose grade id a cell above them has."""
    seen: set[str] = set()
    found = []
    for cell in notebook.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        if grade_id in seen:
            found.append(cell)
        elif grade_id:
            seen.add(grade_id)
    return found


def unreadable(path: Path) -> str | None:
    """What nbgrader says that makes it stop, or None."""
    try:
        nbgraderformat.read(str(path), as_version=4)
    except Exception as error:  # whatever it is, autograding would end with it
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def half_graded(path: Path, mend: bool) -> str | None:
    """One sentence on a submission that nbgrader was killed over, or None."""
    graded = path.parents[3] / "autograded" / path.relative_to(path.parents[2])
    if not graded.parent.exists():
        return None
    try:
        if any(cell.get("execution_count") for cell in nbformat.read(graded, as_version=4).cells):
            return None
    except Exception:  # not there, or half written
        pass
    if not mend:
        return "its grading was interrupted (--mend lets nbgrader grade it anew)"
    shutil.rmtree(graded.parent)
    return "its interrupted grading is removed: nbgrader will grade it anew"


def examine(path: Path, mend: bool) -> str | None:
    """One sentence on a submission that is not in order, or None; mends it or sets it aside if asked to."""
    reason = unreadable(path)
    if reason is None:
        return half_graded(path, mend)
    try:
        notebook = nbformat.read(path, as_version=4)
        repeated = copies(notebook)
    except Exception:  # no notebook, or no JSON
        repeated = []
    if repeated:
        names = ", ".join(sorted({cell.metadata.nbgrader.grade_id for cell in repeated}))
        if not mend:
            return f"graded cells were copied: {names} (--mend makes plain cells of the copies)"
        shutil.copy2(path, path.with_name(f"{path.name}.as-submitted"))
        for cell in repeated:
            del cell.metadata["nbgrader"]
        files.write_atomically(path, nbformat.writes(notebook))
        reason = unreadable(path)
        if reason is None:
            return f"mended: copies of {names} are plain cells now"
    if not mend:
        return f"cannot be graded: {reason} (--mend sets it aside)"
    student = path.parents[1].name
    aside = path.parents[3] / "set_aside" / student / path.parent.name
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path.parent, aside)
    return f"set aside in {aside.relative_to(path.parents[3])}: {reason}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the set, such as 01_correct_timing")
    parser.add_argument("--mend", action="store_true")
    options = parser.parse_args(arguments)
    paths = sorted((root / "submitted").glob(f"*/{options.name}/*.ipynb"))
    said = {path.parents[1].name: text for path in paths if (text := examine(path, options.mend))}
    for student, text in said.items():
        print(f"{student}: {text}")
    print(f"{len(paths)} submissions, {len(said)} not in order")
    return 1 if said and not options.mend else 0


if __name__ == "__main__":
    sys.exit(main())
