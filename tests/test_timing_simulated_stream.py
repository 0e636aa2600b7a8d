"""SimulatedStream and its events: asynchronous, in order, with the manners of torch.cuda's."""

from __future__ import annotations

import gc
import math
import threading
import time

import pytest

from every_millisecond.laboratory.simulated_stream import SimulatedEvent, SimulatedStream


@pytest.fixture
def stream():
    with SimulatedStream() as stream:
        yield stream


def test_launch_returns_before_the_work_is_done(stream):
    """Guards against a simulation that blocks, and so could not show the mistake it is for."""
    gate = threading.Event()
    stream.launch(gate.wait)
    stream.launch(1)
    assert not stream.query()
    gate.set()
    stream.synchronize()
    assert stream.query()


def test_events_measure_the_work_on_the_devices_clock(stream):
    """Guards against times that include the operating system's oversleeping, or leave out queued work."""
    stream.launch(1)  # keeps the device busy while the host queues the rest
    start = stream.record_event()
    for _ in range(10):
        stream.launch(0.5)
    end = stream.record_event()
    stream.synchronize()
    assert start.elapsed_time(end) >= 5
    again = stream.record_event()
    stream.launch(3)
    end.record(stream)  # an event may be recorded anew
    end.synchronize()
    assert again.elapsed_time(end) >= 3


def test_back_to_back_work_has_no_gaps(stream):
    """Guards against a device clock that waits for its thread to wake up between two queued items."""
    gate = threading.Event()
    stream.launch(gate.wait)
    start = stream.record_event()
    for _ in range(5):
        stream.launch(2)
    end = stream.record_event()
    gate.set()
    stream.synchronize()
    assert start.elapsed_time(end) == pytest.approx(10, abs=1e-6)


def test_work_runs_in_order_on_the_streams_thread(stream):
    """Guards against work that overtakes, or that runs on the caller's thread."""
    seen = []
    for i in range(50):
        stream.launch(lambda i=i: seen.append((i, threading.current_thread() is threading.main_thread())))
    stream.synchronize()
    assert seen == [(i, False) for i in range(50)]


def test_a_launch_costs_what_was_asked():
    """Guards against launches that cost nothing, which would hide launch-bound work."""
    with SimulatedStream(launch_us=3000) as stream:
        begin = time.perf_counter_ns()
        stream.launch(0)
        assert time.perf_counter_ns() - begin >= 3_000_000


def test_two_streams_run_side_by_side(stream):
    """Guards against streams that share a queue: the second would never be done while the first one waits."""
    with SimulatedStream() as other:
        gate, seen = threading.Event(), []
        stream.launch(gate.wait)
        stream.launch(lambda: seen.append("first"))
        other.launch(lambda: seen.append("beside"))
        other.synchronize()  # would never return if the streams were one
        gate.set()
        stream.synchronize()
        assert seen == ["beside", "first"]


def test_reading_too_early_is_an_error(stream):
    """Guards against a time read off an event that the device has not reached: with CUDA, too, this is an error."""
    gate = threading.Event()
    start = stream.record_event()
    stream.launch(gate.wait)
    end = stream.record_event()
    try:
        with pytest.raises(RuntimeError, match="end event is not reached yet"):
            start.synchronize()
            start.elapsed_time(end)
    finally:
        gate.set()


def test_an_event_that_was_never_recorded_is_an_error():
    """Guards against a wait for ever, or for nothing."""
    event = SimulatedEvent()
    for use in (event.query, event.synchronize):
        with pytest.raises(RuntimeError, match="never recorded"):
            use()


def test_an_error_of_the_work_surfaces_at_the_next_synchronize(stream):
    """Guards against failed work that passes for done; the stream goes on, as the caller may want to."""
    seen = []
    stream.launch(lambda: 1 / 0)
    stream.launch(lambda: seen.append("after"))
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    assert seen == ["after"]
    stream.synchronize()


@pytest.mark.parametrize(
    ("work", "error"),
    [(-1, ValueError), (math.nan, ValueError), (math.inf, ValueError), ("5", TypeError), (True, TypeError)],
)
def test_impossible_work_is_refused(stream, work, error):
    """Guards against a duration that the device would never finish, or take for 0."""
    with pytest.raises(error, match="work is"):
        stream.launch(work)


@pytest.mark.parametrize("launch_us", [-1, math.nan, math.inf])
def test_impossible_launch_cost_is_refused(launch_us):
    """Guards against a launch that never returns."""
    with pytest.raises(ValueError, match="launch_us"):
        SimulatedStream(launch_us=launch_us)


def test_close_finishes_the_work_and_refuses_more():
    """Guards against work lost at closing, and against work queued for a thread that is gone."""
    stream, seen = SimulatedStream(), []
    stream.launch(2)
    stream.launch(lambda: seen.append("done"))
    stream.close()
    stream.close()
    assert seen == ["done"]
    with pytest.raises(RuntimeError, match="closed"):
        stream.launch(1)


def test_a_forgotten_stream_ends_its_thread():
    """Guards against threads that pile up in a long notebook session."""
    stream = SimulatedStream()
    thread = stream._thread
    del stream
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
