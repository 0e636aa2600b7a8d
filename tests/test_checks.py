"""Whatever a learner's object does, the check answers in one readable sentence."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from typer.testing import CliRunner

from every_millisecond import cli
from every_millisecond.checks import STUB, CheckFailed, call, call_raising, exercise, expect, progress, registered, zoo
from every_millisecond.checks.draw import Draw
from every_millisecond.checks.time_limit import OutOfTime, run_within


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_PROGRESS", str(tmp_path / "progress.json"))


@pytest.fixture
def check(monkeypatch):
    """A check that wants the double of a number; not among the course's own."""
    monkeypatch.setattr(sys.modules["every_millisecond.checks.exercise"], "_REGISTERED", {})

    @exercise("00_test", "doubling")
    def check_double(learners, draw):
        x = draw.integer(3, 9)
        expect.near(call(learners, x), 2 * x, "the double", mistakes={"Is it the square?": x * x})

    return check_double


def message(fn, *args, **kwargs) -> str:
    with pytest.raises(CheckFailed) as caught:
        fn(*args, **kwargs)
    return str(caught.value)


def test_passing_prints_one_line_and_is_noted(check, capsys):
    """A learner must see that it passed, and `progress` must know."""
    check(lambda x: x + x)
    assert capsys.readouterr().out == "passed: doubling\n"
    assert list(progress.passed()["00_test"]) == ["check_double"]


def test_failing_names_the_mistake_and_is_not_noted(check):
    """A wrong answer must not count as passed."""
    assert message(check, lambda x: x * x, seed=1).endswith("Is it the square?")
    assert progress.passed() == {}


def test_a_seed_repeats_a_failure(check):
    """A failure that cannot be drawn again cannot be looked into."""
    with pytest.raises(CheckFailed) as caught:
        check(lambda x: x + 1000)
    assert message(check, lambda x: x + 1000, seed=caught.value.seed) == str(caught.value)


@pytest.mark.parametrize(
    ("learners", "part"),
    [
        (3, "expected a function, got 3"),
        (None, "expected a function, got None"),
        (lambda: 1, "raised TypeError"),
        (lambda x: None, "is None: is a `return` missing?"),
        (lambda x: "6", "(str); expected a number"),
        (lambda x: [x], "(list); expected a number"),
        (lambda x: float("nan"), "is nan; expected a finite number"),
        (lambda x: x / 0, "raised ZeroDivisionError: division by zero, in your line"),
        (lambda x: torch.ones(2), "expected a number"),
        (lambda x: True, "expected a number"),
        (expect.that, "is the library's own"),
    ],
)
def test_bad_objects_are_named(check, learners, part):
    """A wrong type, NaN, nothing returned, an exception: each must say what came and what was expected."""
    assert part in message(check, learners)


def test_a_stub_is_not_an_error_of_the_learner(check):
    """The unsolved exercise, and torch's own NotImplementedError, which is one."""

    def stub(x):
        raise NotImplementedError(STUB)

    def lacking(x):
        raise NotImplementedError("no such kernel")

    assert message(check, stub).startswith(f"{STUB}: ")
    assert "raised NotImplementedError: no such kernel, in your line" in message(check, lacking)


def test_printing_is_shown_and_bounded(check, capsys):
    """Prints help a learner; a million lines of them freeze the browser."""

    def chatty(x):
        for i in range(300):
            print("step", i)
        return 2 * x

    check(chatty)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 0" and lines[-2] == "... and 292 more lines printed by your code"
    assert lines[-1] == "passed: doubling"


def test_an_endless_loop_ends(check):
    """A check that never returns takes the notebook with it."""

    def endless(x):
        while True:
            pass

    began = time.perf_counter()
    assert "does a loop never end?" in message(call, endless, 1, limit_s=0.2)
    assert time.perf_counter() - began < 3


def test_an_endless_loop_ends_on_another_thread_too():
    """Where signals do not work (Windows, subshells), the loop must end as well, and its thread with it."""
    outcome = []

    def endless():
        while True:
            pass

    def elsewhere():
        try:
            run_within(0.2, endless)
        except OutOfTime:
            outcome.append("out of time")
        outcome.append(run_within(1, lambda: 5))
        with pytest.raises(ZeroDivisionError):
            run_within(1, lambda: 1 / 0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert outcome == ["out of time", 5]
    deadline = time.monotonic() + 5
    while any(t.name == "check" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "check" for t in threading.enumerate())


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ([3, 1, 2], lambda x: x.sort()),
        ({"a": [1.0]}, lambda x: x["a"].append(2.0)),
        (torch.tensor([1.0, torch.nan]), lambda x: x.mul_(2)),
        (torch.ones(2, 3), lambda x: x.resize_(6)),
        ({1, 2}, lambda x: x.add(3)),
    ],
)
def test_a_changed_argument_is_seen(argument, change):
    """Work in place passes a test of the result and destroys the caller's data."""
    assert "changed its argument 1" in message(call, change, argument)
    call(lambda x: None, argument)
    call(change, argument, may_change=True)


def test_tensors_are_compared_in_every_respect():
    """Shape, dtype, device, NaN and infinities each have a message; a wrong value says where."""
    want = torch.arange(6.0).reshape(2, 3)
    for found, part in [
        (None, "is a `return` missing?"),
        ([1, 2], "expected a tensor"),
        (want.T, "has shape [3, 2]; expected [2, 3]"),
        (want.double(), "has dtype torch.float64; expected torch.float32"),
        (want.where(want != 4, torch.nan), "holds NaN, 1 of 6"),
        (want.where(want != 4, torch.inf), "holds infinities, 1 of 6"),
        (want.where(want != 4, 40), "most at [1, 1]: 40 where 4 was expected"),
        (want + 1, "Is it one too many?"),
    ]:
        assert part in message(expect.close, found, want, "x", mistakes={"Is it one too many?": want + 1})
    expect.close(want + 1e-7, want, "x")
    assert "lies on meta" in message(expect.tensor, torch.ones(1, device="meta"), "x", device="cpu")


def test_an_expected_error_must_come():
    """An edge case that asks for ValueError: nothing, or another error, is named."""
    assert isinstance(call_raising(ValueError, int, "x", why="not a number"), ValueError)
    assert "returned 3; expected ValueError: a reason" in message(call_raising, ValueError, int, "3", why="a reason")
    assert "raised TypeError" in message(call_raising, ValueError, lambda: int([]), why="a reason")


def test_the_message_stands_alone_in_a_notebook():
    """IPython asks the exception for its own traceback: no page of library code under the sentence."""
    assert CheckFailed("one sentence")._render_traceback_() == ["✗ one sentence"]


def test_odd_sizes_are_odd():
    """Round sizes hide swapped dimensions."""
    draw = Draw(3)
    for low, high in ((4, 10), (5, 9), (7, 7)):
        sizes = {draw.odd(low, high) for _ in range(60)}
        assert sizes == set(range(low + (low + 1) % 2, high + 1, 2))


def test_a_learners_test_is_tested():
    """A test that cannot fail, fails always, crashes or returns a verdict proves nothing."""

    def judge(test):
        zoo.check_test(test, broken={"adds one": lambda x: x + 1}, right={"plain": lambda x: x})

    def asserts_identity(program):
        assert program(3) == 3

    def crashes_on_broken(program):
        {3: 0}[program(3)]

    def never(program):
        raise AssertionError("no")

    judge(asserts_identity)
    assert "The fault that it misses: adds one" in message(judge, lambda program: None)
    assert "fails on a program that is right (plain): no" in message(judge, never)
    assert "crashed on the broken program (KeyError" in message(judge, crashes_on_broken)
    assert "crashed on a right program" in message(judge, lambda program: program(1, 2))
    assert "a test speaks by `assert`" in message(judge, lambda program: program(3) == 3)


def test_progress_command_shows_what_has_passed(monkeypatch):
    """`llm-latency progress` lists every exercise with a check, and ticks those that passed."""
    chapter, checks = next(iter(registered().items()))
    name = next(iter(checks))
    progress.record(chapter, name)
    output = CliRunner().invoke(cli.app, ["progress"], env={"COLUMNS": "120"}).output
    assert f"{chapter}: 1 of {len(checks)}" in output and f"[x] {checks[name]}" in output
    assert f"1 of {sum(map(len, registered().values()))} checks passed" in output


def test_progress_survives_a_broken_or_forbidden_file(tmp_path, monkeypatch, check):
    """A read-only container must not fail a right answer; a broken file is named by the command."""
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    monkeypatch.setenv("LLM_LATENCY_PROGRESS", str(broken))
    check(lambda x: 2 * x)
    result = CliRunner().invoke(cli.app, ["progress"])
    assert result.exit_code == 1 and "not valid JSON" in result.output
    monkeypatch.setenv("LLM_LATENCY_PROGRESS", str(broken / "below-a-file.json"))
    check(lambda x: 2 * x)
