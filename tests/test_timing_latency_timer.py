"""LatencyTimer: nesting, repeats, units, misuse; on the CPU, on a simulated device and on CUDA."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from every_millisecond.laboratory.simulated_stream import SimulatedStream
from llm_latency.timing import LatencyTimer


def timer_with_marks(*milliseconds: float) -> LatencyTimer:
    """A CPU timer whose clock reads the given times, one per mark."""
    timer = LatencyTimer("cpu")
    readings = iter(milliseconds)
    timer._mark = lambda: round(next(readings) * 1e6)
    return timer


def test_nested_stages_inclusive_and_exclusive():
    """Guards against a parent that counts its child's time twice, or not at all."""
    timer = timer_with_marks(0, 1, 4, 5, 7, 10)  # outer 0..10 holds inner 1..4 and inner 5..7
    with timer.stage("outer"):
        for _ in range(2):
            with timer.stage("inner"):
                pass
    assert timer.get_elapsed_ms("outer") == pytest.approx(10)
    assert timer.get_elapsed_ms("outer", exclusive=True) == pytest.approx(5)
    assert timer.get_elapsed_ms("inner") == timer.get_elapsed_ms("inner", exclusive=True) == pytest.approx(5)
    assert timer.get_count("inner") == 2
    assert timer.get_samples_ms("inner") == pytest.approx([3, 2])
    assert timer.stages == ("outer", "inner")


def test_exclusive_leaves_out_direct_children_only_once():
    """Guards against subtracting grandchildren from the grandparent a second time."""
    timer = timer_with_marks(0, 1, 2, 5, 7, 10)  # a 0..10 > b 1..7 > c 2..5
    with timer.stage("a"), timer.stage("b"), timer.stage("c"):
        pass
    exclusive = {name: timer.get_elapsed_ms(name, exclusive=True) for name in "abc"}
    assert exclusive == pytest.approx({"a": 4, "b": 3, "c": 3})


trees = st.recursive(st.just([]), lambda children: st.lists(children, max_size=4), max_leaves=25)


@given(tree=trees, gaps=st.lists(st.integers(0, 10**12), min_size=300, max_size=300))
def test_exclusive_times_add_up_to_the_whole(tree, gaps):
    """Guards against any time being lost or counted twice, in any nesting (closed form: the clock)."""
    timer = LatencyTimer("cpu")
    now, remaining = 0, iter(gaps)

    def mark() -> int:
        nonlocal now
        now += next(remaining)
        return now

    timer._mark = mark
    first = None

    def walk(node: list, depth: int) -> None:
        nonlocal first
        with timer.stage(f"level {depth}"):
            first = now if first is None else first
            for child in node:
                walk(child, depth + 1)

    walk(tree, 0)
    total = sum(timer.get_elapsed_ms(name, exclusive=True) for name in timer.stages)
    assert total == pytest.approx((now - first) / 1e6, rel=1e-9, abs=1e-6)


def test_same_stage_100_times_is_summed_and_counted():
    """Guards against a repeat that overwrites the former one (case 21)."""
    timer = timer_with_marks(*range(200))
    for _ in range(100):
        timer.mark_start("step")
        timer.mark_end("step")
    assert timer.get_elapsed_ms("step") == pytest.approx(100)
    assert timer.get_count("step") == 100


def test_known_sleep_reads_in_milliseconds():
    """Guards against seconds or microseconds passed off as milliseconds (cases 20 and 21)."""
    timer = LatencyTimer("cpu")
    with timer.stage("sleep"):
        time.sleep(0.020)
    assert 19.99 <= timer.get_elapsed_ms("sleep") < 2000


def test_reading_an_open_or_unknown_stage_names_it():
    """Guards against an unfinished stage read as 0 ms, or as its former repeat (case 20)."""
    timer = LatencyTimer("cpu")
    with pytest.raises(KeyError, match=r"'prefill' was never started; known: none"):
        timer.get_elapsed_ms("prefill")
    with timer.stage("decode"):
        pass
    timer.mark_start("decode")
    for read in (timer.get_elapsed_ms, timer.get_samples_ms, timer.get_count):
        with pytest.raises(RuntimeError, match=r"'decode' is still open"):
            read("decode")
    timer.mark_end("decode")
    assert timer.get_count("decode") == 2


def test_closing_twice_or_unopened_names_the_stage():
    """Guards against an end mark without its start mark that passes silently."""
    timer = LatencyTimer("cpu")
    with pytest.raises(RuntimeError, match=r"'decode' is not open: never started"):
        timer.mark_end("decode")
    with timer.stage("decode"):
        pass
    with pytest.raises(RuntimeError, match=r"'decode' is already closed"):
        timer.mark_end("decode")


def test_opening_twice_and_overlapping_are_refused():
    """Guards against a second start that loses the first, and against exclusive times that mean nothing."""
    timer = LatencyTimer("cpu")
    timer.mark_start("outer")
    with pytest.raises(RuntimeError, match=r"'outer' is already open"):
        timer.mark_start("outer")
    timer.mark_start("inner")
    with pytest.raises(RuntimeError, match=r"'inner' was opened inside 'outer'"):
        timer.mark_end("outer")
    timer.mark_end("inner")
    timer.mark_end("outer")
    assert timer.get_elapsed_ms("outer") >= timer.get_elapsed_ms("inner")


@pytest.mark.parametrize(("name", "error"), [(3, TypeError), (None, TypeError), ("", ValueError)])
def test_a_stage_needs_a_name(name, error):
    """Guards against stages that nobody can read again."""
    with pytest.raises(error, match="stage's name"):
        LatencyTimer("cpu").mark_start(name)


def test_an_exception_closes_the_stages_it_leaves():
    """Guards against a timer stuck with open stages, or an error about the timer that hides the real one."""
    timer = LatencyTimer("cpu")
    with pytest.raises(ZeroDivisionError), timer.stage("outer"):
        timer.mark_start("inner")
        raise ZeroDivisionError
    assert timer.get_count("outer") == timer.get_count("inner") == 1
    with timer.stage("outer"):
        pass
    assert timer.get_count("outer") == 2


def test_reset_forgets_everything():
    """Guards against times of an earlier request in a later one's sum."""
    timer = LatencyTimer("cpu")
    with timer.stage("done"):
        timer.mark_start("open")
        timer.reset()
        timer.mark_start("done")
    assert timer.stages == ("done",)
    assert timer.get_count("done") == 1


@pytest.mark.parametrize("device", ["tpu9", "meta", "cuda:99", "mps", ""])
def test_unknown_device_is_named(device):
    """Guards against a silent fallback to a clock that does not see the work."""
    with pytest.raises(ValueError, match=repr(device)):
        LatencyTimer(device)


def test_device_of_another_type_is_refused():
    """Guards against a device number or a whole model taken for a device."""
    with pytest.raises(TypeError, match="device=0"):
        LatencyTimer(0)


def test_unawaited_work_is_timed_in_full():
    """Guards against the launch time passed off as the work's (case 19)."""
    with SimulatedStream() as stream:
        timer = LatencyTimer(stream)
        with timer.stage("outer"):
            stream.launch(4)
            with timer.stage("inner"):
                stream.launch(6)
        assert timer.get_elapsed_ms("inner") >= 6
        assert timer.get_elapsed_ms("outer") >= 10
        assert timer.get_elapsed_ms("outer", exclusive=True) >= 4 - 1e-9


def test_marks_do_not_wait_and_reading_waits_once():
    """Guards against one synchronise per stage, which changes what is measured."""
    with SimulatedStream() as stream:
        timer = LatencyTimer(stream)
        waits = []
        true_synchronize = timer._clock.synchronize
        timer._clock.synchronize = lambda: (waits.append(1), true_synchronize())
        for _ in range(20):
            with timer.stage("step"):
                stream.launch(1)
        assert not waits
        assert timer.get_elapsed_ms("step") >= 20
        timer.get_elapsed_ms("step", exclusive=True)
        assert len(waits) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: events cannot be recorded")
def test_cuda_events_see_unawaited_kernels():
    """Guards against host time around asynchronous kernels (case 19), on the real thing."""
    timer = LatencyTimer("cuda")
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with timer.stage("outer"):
        begin = time.perf_counter()
        with timer.stage("inner"):
            for _ in range(20):
                a @ a
        launched_ms = (time.perf_counter() - begin) * 1000
    assert timer.get_elapsed_ms("inner") > launched_ms
    assert timer.get_elapsed_ms("outer") >= timer.get_elapsed_ms("inner")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: no streams")
def test_cuda_events_follow_the_current_stream():
    """Guards against marks on the default stream while the work runs on another."""
    timer = LatencyTimer("cuda")
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        with timer.stage("side"):
            for _ in range(20):
                a @ a
    reference = timer.get_elapsed_ms("side")
    begin = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    assert reference > 0.5 * (time.perf_counter() - begin) * 1000
