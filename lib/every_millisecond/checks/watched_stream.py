"""A simulated device that keeps a log, so that a check sees what a learner did and not only what came out."""

from __future__ import annotations

from collections.abc import Callable

from every_millisecond.laboratory.simulated_stream import SimulatedEvent, SimulatedStream


class Work:
    """Work of a duration in milliseconds that only a `WatchedStream` knows: it must be measured, not looked up."""

    def __init__(self, ms: float) -> None:
        self.__ms = ms

    def launch_on(self, stream: SimulatedStream) -> None:
        SimulatedStream.launch(stream, self.__ms)


class WatchedStream(SimulatedStream):
    """A `SimulatedStream` whose `log` lists "launch", "wait" and "elapsed", in order, as the host called them.

    `synchronize` records an event and waits for it, so it is logged by its event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def launch(self, work: float | Callable[[], object] | Work) -> None:
        self.log.append("launch")
        if isinstance(work, Work):
            work.launch_on(self)
        else:
            super().launch(work)

    def query(self) -> bool:
        self.log.append("wait")  # asking again and again is waiting
        return super().query()

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        return super().record_event(_WatchedEvent(self.log) if event is None else event)

    @property
    def waits_inside(self) -> int:
        """How often the host waited before its last launch."""
        launches = [place for place, what in enumerate(self.log) if what == "launch"]
        return self.log[: launches[-1]].count("wait") if launches else 0


class _WatchedEvent(SimulatedEvent):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def synchronize(self) -> None:
        self._log.append("wait")
        super().synchronize()

    def elapsed_time(self, end: SimulatedEvent) -> float:
        self._log.append("elapsed")
        return super().elapsed_time(end)
