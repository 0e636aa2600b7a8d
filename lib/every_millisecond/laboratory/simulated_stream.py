"""An asynchronous device made of a thread, so that the classic timing mistakes can be made and mended without a GPU."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable

_STOP = object()


class SimulatedEvent:
    """What `torch.cuda.Event(enable_timing=True)` is to a CUDA stream, for a `SimulatedStream`.

    It is recorded into a stream, and reached when the stream has done everything launched before it. Recorded again, it
    stands for the newer mark.
    """

    def __init__(self) -> None:
        self._reached: threading.Event | None = None
        self._time_ns: list[int] = []

    def record(self, stream: SimulatedStream) -> None:
        """Queue the mark behind all work launched on `stream` so far."""
        # A fresh pair for each recording: the stream's thread may still be on its way to the former one.
        self._reached, self._time_ns = threading.Event(), []
        stream._enqueue_mark(self._reached, self._time_ns)

    def query(self) -> bool:
        """True when the mark has been reached; RuntimeError if the event was never recorded."""
        return self._recorded().is_set()

    def synchronize(self) -> None:
        """Wait until the mark is reached; RuntimeError if the event was never recorded."""
        self._recorded().wait()

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds on the device between this mark and `end`; RuntimeError unless both are recorded and reached.

        As with CUDA, reading too early is an error and not a wait.
        """
        for which, event in (("start", self), ("end", end)):
            if not event.query():
                raise RuntimeError(f"the {which} event is not reached yet: synchronise before reading elapsed_time")
        return (end._time_ns[0] - self._time_ns[0]) / 1e6

    def _recorded(self) -> threading.Event:
        if self._reached is None:
            raise RuntimeError("the event was never recorded: call record(stream) first")
        return self._reached


class SimulatedStream:
    """One in-order queue of work on a thread of its own, with the manners of a `torch.cuda.Stream`.

    `launch` returns after microseconds, long before the work is done; `synchronize` waits for the work; events mark
    places in the queue and carry the device's time.

    Args:
        launch_us: what a launch costs the caller, in microseconds, at least (a CUDA launch costs about 5).

    An error raised by launched work surfaces at the next `synchronize`, as it does with CUDA. Work launched after the
    failed one still runs. The thread ends with `close`, with the `with` block, or when the stream is collected.

    Raises:
        ValueError: launch_us is negative or not finite.
    """

    def __init__(self, *, launch_us: float = 5.0) -> None:
        if not (math.isfinite(launch_us) and launch_us >= 0):
            raise ValueError(f"launch_us is {launch_us!r}; expected a finite number of microseconds, 0 or more")
        self.launch_us = launch_us
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._queued, self._done = 0, [0]
        self._errors: list[Exception] = []
        # The thread holds the queue and the lists, not the stream, so that a forgotten stream can be collected.
        work = (self._queue, self._done, self._errors)
        self._thread = threading.Thread(target=_work_through, args=work, name="simulated-stream", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._queue.put, _STOP)

    def launch(self, work: float | Callable[[], object]) -> None:
        """Queue `work` and return at once: a duration in milliseconds, or a function that the stream's thread calls.

        A duration is kept exactly on the device's clock, whatever the operating system's sleep makes of it.

        Raises:
            TypeError: work is neither a number nor callable. ValueError: a negative or non-finite duration.
            RuntimeError: the stream is closed.
        """
        begin = time.perf_counter_ns()
        if callable(work):
            item = work
        elif isinstance(work, bool) or not isinstance(work, (int, float)):
            raise TypeError(f"work is {work!r}; expected milliseconds or a function without arguments")
        elif not (math.isfinite(work) and work >= 0):
            raise ValueError(f"work is {work!r} ms; expected a finite duration, 0 or more")
        else:
            item = round(work * 1e6)
        self._put("work", item)
        while time.perf_counter_ns() - begin < self.launch_us * 1000:
            pass

    def synchronize(self) -> None:
        """Wait until everything launched so far is done; raise the first error that the work raised since last time."""
        self.record_event().synchronize()
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error

    def query(self) -> bool:
        """True when everything launched so far is done."""
        return self._done[0] == self._queued

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """Record `event`, or a new one, behind everything launched so far, and return it."""
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event

    # A stream is the clock of its own device, so that LatencyTimer, measure and compare take it as `device`.
    name = "simulated"

    def mark(self) -> SimulatedEvent:
        return self.record_event()

    def elapsed_ms(self, start: SimulatedEvent, end: SimulatedEvent) -> float:
        return start.elapsed_time(end)

    def close(self) -> None:
        """Finish the work launched so far and end the thread. Closing twice is harmless."""
        self._stop()
        self._thread.join()

    def __enter__(self) -> SimulatedStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _enqueue_mark(self, reached: threading.Event, time_ns: list[int]) -> None:
        self._put("mark", (reached, time_ns))

    def _put(self, kind: str, item: object) -> None:
        if not self._stop.alive:
            raise RuntimeError("the simulated stream is closed")
        self._queued += 1
        self._queue.put((kind, time.perf_counter_ns(), item))


def _work_through(jobs: queue.SimpleQueue, done: list[int], errors: list[Exception]) -> None:
    """The device: take one item after the other, and keep the device's clock, in nanoseconds of perf_counter."""
    clock = 0
    while (job := jobs.get()) is not _STOP:
        kind, queued_ns, item = job
        # An item starts when it was queued or when the one before it ended: never later because the thread overslept.
        clock = max(clock, queued_ns)
        if kind == "mark":
            reached, time_ns = item
            time_ns.append(clock)
            reached.set()
        elif callable(item):
            try:
                item()
            except Exception as error:
                errors.append(error)
            clock = time.perf_counter_ns()
        else:
            clock += item
            while (left_ns := clock - time.perf_counter_ns()) > 0:
                time.sleep(left_ns / 1e9)
        done[0] += 1
