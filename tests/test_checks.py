"""Whatever a learner's object does, the check answers in one readable sentence."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from at_once import run_at_once
from typer.testing import CliRunner

from every_millisecond import cli
from every_millisecond.checks import (
    STUB,
    CheckFailed,
    call,
    call_raising,
    exercise,
    expect,
    programs,
    progress,
    registered,
    time_limit,
    zoo,
)  # fmt: skip
from every_millisecond.checks.draw import Draw, NoSuchDraw
from every_millisecond.checks.time_limit import OutOfTime, run_within
from every_millisecond.checks.virtual_device import VirtualStream, on_a_virtual_device, only_launched
from every_millisecond.laboratory import simulated_stream


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
        (lambda x: None, "None. Is a `return` missing?"),
        (lambda x: "6", "(str); expected a number"),
        (lambda x: [x], "(list); expected a number"),
        (lambda x: float("nan"), ": nan; expected a finite number"),
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

    assert "was stopped after 0.2 s of work, or 1.2 s of waiting: does a loop never end?" in message(
        call, endless, 1, limit_s=0.2
    )


@pytest.mark.parametrize("on_the_main_thread", [True, False])
def test_a_limit_goes_by_the_processors_time(monkeypatch, on_the_main_thread):
    """Kind 34: right code was "stopped after 5 s" because the machine was busy, or its lid closed for a while."""
    used = [0.0]
    monkeypatch.setattr(time_limit, "process_time", lambda: used[0])
    monkeypatch.setattr(time_limit, "PATIENCE", 1000)
    outcome = []

    def slow():
        time.sleep(0.3)  # three times the limit, of which the process has had nothing
        return "right"

    def slow_then_endless():
        time.sleep(0.3)
        used[0] = 1.0
        while True:
            time.sleep(0)

    def run():
        outcome.append(run_within(0.1, slow))
        try:
            run_within(0.1, slow_then_endless)
        except OutOfTime:
            outcome.append(used[0])

    if on_the_main_thread:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
    assert outcome == ["right", 1.0]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no process can be halted here")
def test_a_halted_process_loses_no_time():
    """Kind 34: a laptop that slept for longer than a check may wait."""
    code = (
        "import time\n"
        "from every_millisecond.checks import time_limit\n"
        "def work():\n"
        "    print('began', flush=True)\n"
        "    time.sleep(0.5)\n"
        "    return 'right'\n"
        "print(time_limit.run_within(0.2, work), flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # more than its patience
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "right\n"


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


def stubborn(swallowed: list[int], nap: float) -> None:
    while True:
        try:
            while True:
                time.sleep(nap)
        except:  # noqa: E722
            swallowed.append(1)


@pytest.mark.parametrize("nap", [0, 60])
def test_a_bare_except_does_not_swallow_the_limit(nap):
    """Kind 35: a learner's `except:` catches what is raised to end the loop, and the autograding hangs."""
    swallowed: list[int] = []
    began = time.perf_counter()
    assert "does a loop never end?" in message(call, stubborn, swallowed, nap, limit_s=0.2, may_change=True)
    assert swallowed and time.perf_counter() - began < 60  # not after a nap
    assert sys.gettrace() is None or "check" not in str(sys.gettrace())
    assert call(lambda: 5) == 5


def test_a_bare_except_does_not_hold_up_another_thread():
    """Kind 35, where there are no signals: the waiter goes on, and the loop is asked to end again and again."""
    outcome = []

    def elsewhere():
        try:
            run_within(0.2, lambda: stubborn([], 0))
        except OutOfTime:
            outcome.append("out of time")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert outcome == ["out of time"]


def test_leaving_is_an_error_like_others():
    """Kind 51: `exit()` in a learner's function ends the check with a sentence, not the notebook."""
    assert "raised SystemExit: 3, in your line" in message(call, lambda: sys.exit(3))


def test_events_of_cuda_are_explained():
    """Without CUDA torch says "Tried to instantiate dummy base class Event", which helps nobody."""

    def learners():
        raise RuntimeError("Tried to instantiate dummy base class Event")

    assert "the exercise brings its own: stream.record_event()" in message(call, learners)


def test_a_warning_is_no_failure(check, capfd):
    """Kind 34: nbgrader gives no points to a cell with text on stderr; all that goes there must come out on stdout."""
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("some.library")
    logger.addHandler(handler)

    def chatty(x):
        logger.warning("by a logger that has kept its stream")
        print("by print", file=sys.stderr)
        os.write(2, b"by C++ to the descriptor\n")
        return 2 * x

    check(chatty)  # `warnings` itself is pytest's here: tests/test_nbgrader.py tries it
    logger.removeHandler(handler)
    printed = capfd.readouterr()
    assert printed.err == "" and handler.stream is not None
    for words in ("kept its stream", "by print", "by C++ to the descriptor", "passed: doubling"):
        assert words in printed.out


def test_the_seed_covers_what_a_learner_draws(check):
    """A learner's own torch.randn, numpy and random: a failure must come again with the seed; theirs go on after."""
    seen = []

    def draws(x):
        seen.append((torch.randn(1).item(), np.random.rand(), random.random()))  # noqa: NPY002
        return 2 * x

    before = torch.get_rng_state(), random.getstate()
    for seed in (5, 5, 6):
        check(draws, seed=seed)
    assert seen[0] == seen[1] != seen[2]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_a_draw_tells_all_answers_apart():
    """Kind 54: a planted mistake whose value happens to be another's, or the right one, is named wrongly or passes."""
    for draw in map(Draw, range(30)):
        a, b = draw.until(
            lambda draw=draw: (draw.integer(1, 3), draw.integer(1, 3)),
            lambda case: [(case[0] + case[1], {"product": case[0] * case[1], "power": case[0] ** case[1]})],
        )
        assert len({a + b, a * b, a**b}) == 3
    with pytest.raises(NoSuchDraw, match=r"the right answer \| the same"):
        Draw(1).until(lambda: 1, lambda case: [(torch.ones(3), {"the same": torch.ones(3) + 1e-6})], tries=5)


def test_a_program_under_test_has_no_name(monkeypatch):
    """A learner's test that asks a program for its name, docstring or source, or counts calls, proves nothing."""
    seen = []

    def curious(program):
        """Says what it is."""
        seen.append((program.__name__, program.__qualname__, program.__doc__, program.__module__, repr(program)[:18]))
        seen[-1] += (program.__code__.co_filename, program.__code__.co_name)
        with pytest.raises((OSError, TypeError)):
            inspect.getsource(program)
        assert program(1) == 1

    broken = {f"adds {n}": lambda x, n=n: x + n for n in range(1, 6)}
    zoo.check_test(curious, Draw(3), broken=broken, right={"plain": lambda x: x})
    assert len(seen) == 12 and len(set(seen)) == 1
    orders = set()
    for seed in range(4):
        called = []
        zoo.check_test(judged(called), Draw(seed), broken=broken, right={"plain": lambda x: x})
        orders.add(tuple(called))
    assert len(orders) > 1


@pytest.mark.parametrize("seed", range(12))
def test_counting_calls_never_passes(seed):
    """Fault (the soak found it): a test that fails on its third call passed whenever the broken program came last."""
    calls = itertools.count(1)

    def counting(program):
        assert next(calls) < 3

    right = {"plain": lambda x: x, "by hand": lambda x: +x}
    with pytest.raises(CheckFailed, match="A test asserts only what is true of every right program"):
        zoo.check_test(counting, Draw(seed), broken={"adds one": lambda x: x + 1}, right=right)


def judged(called):
    def test(program):
        called.append(program(0))
        assert program(0) == 0

    return test


def test_yes_and_no_and_lists_come_in_many_types():
    """Right answers that failed: numpy's bool, 1 and 0, a tensor of one element; arrays and tensors as lists."""
    for value in (True, 1, np.True_, torch.tensor(True), torch.tensor([1])):
        assert expect.truth(value, "x") is True
    assert "expected True or False" in message(expect.truth, 0.4, "x")
    for value in ([1, 2], (1, 2), torch.tensor([1, 2]), np.array([1, 2])):
        assert expect.items(value, 2, "x", "a, b") == [1, 2]
    assert "expected list or tuple" in message(expect.sequence, torch.ones(2, 2), "x")
    assert "5809213; expected 5809213.4" in message(expect.near, 5809213, 5809213.4, "x", rel=1e-9)


def test_a_virtual_device_is_exact_and_its_clock_the_learners():
    """Timing checks must not depend on the machine, and must see a clock that is imported by its name."""
    stream = VirtualStream()
    namespace: dict = {}
    exec("from time import perf_counter as clock\ndef timed(s, w):\n a = clock(); s.launch(w); s.synchronize()\n"
         " return clock() - a", namespace)  # fmt: skip
    real = time.perf_counter
    assert call(stream.on_its_clock(namespace["timed"]), stream, stream.work(40)) == pytest.approx(0.04, rel=1e-3)
    assert time.perf_counter is real and namespace["clock"] is real
    begin = stream.record_event()
    stream.launch(stream.work(7))
    end = stream.record_event()
    with pytest.raises(RuntimeError, match="end event is not reached yet"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(7.0005)
    with pytest.raises(TypeError):
        float(stream.work(3))


def test_a_learners_test_of_a_clock_is_judged_by_a_virtual_one():
    """Fault (the soak found it): `long - short > 20`, of 40 and 10 ms of work, is right, and failed on a busy machine
    where waiting for 10 ms took 25."""
    real, clock = simulated_stream.SimulatedStream, time.perf_counter
    namespace: dict = {"SimulatedStream": real, "seen": []}
    exec(
        "def test(program):\n"
        "    for work in (10, lambda: __import__('time').sleep(0.01)):\n"
        "        with SimulatedStream(launch_us=5) as stream, SimulatedStream() as other:\n"
        "            other.launch(500)\n"
        "            seen.append(program(stream, work))\n",
        namespace,
    )
    for program in (programs.elapsed_by_waiting, programs.elapsed_by_events, programs.elapsed_ms):
        on_a_virtual_device(namespace["test"])(program)
    assert namespace["seen"][:4] == pytest.approx([10, 10, 10, 10], rel=1e-3) and max(namespace["seen"][4:]) < 0.001
    assert namespace["SimulatedStream"] is simulated_stream.SimulatedStream is real and time.perf_counter is clock
    with real() as made_before:
        found = []
        on_a_virtual_device(lambda program: found.append(program(made_before, 20)))(programs.elapsed_by_waiting)
    assert found[0] > 15


@pytest.mark.parametrize("ms", [2.0, 5.42387, 5.5, 9.0, 27.0])
def test_a_launch_is_never_taken_for_seconds(ms):
    """Fault (the soak found it): work of 5.42 ms is 0.00542 s, and its launch took 0.0055 ms: neither was named."""
    stream = VirtualStream()

    def around_the_launch():
        begin = time.perf_counter()
        stream.launch(ms)
        return 1000 * (time.perf_counter() - begin)

    assert only_launched(call(stream.on_its_clock(around_the_launch)), ms)
    assert not only_launched(ms / 1000, ms)


def note_passes(name: str) -> None:
    for i in range(20):
        progress.record(name, f"check_{i}")


def test_progress_of_two_writers_and_of_others(tmp_path, monkeypatch):
    """Kind 36: two processes that note a pass lose nothing, and the file's mode follows the umask."""
    path = tmp_path / "shared.json"
    monkeypatch.setenv("LLM_LATENCY_PROGRESS", str(path))
    run_at_once(note_passes, ("a",), ("b",))
    assert {name: len(checks) for name, checks in progress.passed().items()} == {"a": 20, "b": 20}
    umask = os.umask(0)
    os.umask(umask)
    assert os.name == "nt" or path.stat().st_mode & 0o777 == 0o666 & ~umask


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
    """Shape, dtype, NaN and infinities each have a message; a wrong value says where."""
    want = torch.arange(6.0).reshape(2, 3)
    for found, part in [
        (None, "Is a `return` missing?"),
        ([1, 2], "expected a tensor"),
        (want.T, "x: shape [3, 2]; expected [2, 3]"),
        (want.double(), "x: dtype torch.float64; expected torch.float32"),
        (want.where(want != 4, torch.nan), "NaN in 1 of 6"),
        (want.where(want != 4, torch.inf), "infinity in 1 of 6"),
        (want.where(want != 4, 40), "most at [1, 1]: 40 where 4 was expected"),
        (want + 1, "Is it one too many?"),
    ]:
        assert part in message(expect.close, found, want, "x", mistakes={"Is it one too many?": want + 1})
    expect.close(want + 1e-7, want, "x")


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
        zoo.check_test(test, Draw(1), broken={"adds one": lambda x: x + 1}, right={"plain": lambda x: x})

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
