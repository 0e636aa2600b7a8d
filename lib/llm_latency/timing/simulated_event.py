"""An event of a simulated asynchronous device: a mark in a stream's queue, with the device's time of day."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_latency.timing.simulated_stream import SimulatedStream


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
