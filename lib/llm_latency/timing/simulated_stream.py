"""An asynchronous device made of a thread, so that the classic timing mistakes can be made and mended without a GPU."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable

from llm_latency.timing.simulated_event import SimulatedEvent

_STOP = object()


class SimulatedStream:
    """One in-order queue of work on a thread of its own, with the manners of a `torch.cuda.Stream`.

    `launch` returns after microseconds, long before the work is done; `synchronize` waits for the work; events mark
    places in the queue and carry the device's time. Two streams run side by side; `wait_event` orders them.

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

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let work launched here from now on wait for `event`, on whichever stream that was recorded."""
        self._put("wait", (event._recorded(), event._time_ns))

    def wait_stream(self, other: SimulatedStream) -> None:
        """Let work launched here from now on wait for everything launched on `other` so far."""
        self.wait_event(other.record_event())

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
        elif kind == "wait":
            reached, time_ns = item
            reached.wait()
            clock = max(clock, time_ns[0])
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
