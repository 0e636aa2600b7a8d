"""A device whose time is counted and not spent, so that a check is exact however busy the machine is."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

from every_millisecond.laboratory import simulated_stream

_HOST_MS = {"launch": 0.0005, "wait": 0.001, "read": 0.00005}  # what these cost the host: see `only_launched`
_CLOCKS = {  # of Python's module time: units in a second
    "perf_counter": 1, "perf_counter_ns": 10**9, "monotonic": 1, "monotonic_ns": 10**9, "time": 1, "time_ns": 10**9,
}  # fmt: skip


def only_launched(found: float, ms: float) -> bool:
    """Whether a measured time is the host's, around the launch of work of 2 ms or more.

    That is at most 0.3 thousandths of the work, and seconds in place of milliseconds are one thousandth: neither can be
    taken for the other.
    """
    return 0 <= found < ms / 2000


class Work:
    """Work whose duration only its stream knows: it must be measured, not looked up."""


class VirtualEvent:
    """A mark in a `VirtualStream`, with the methods of `torch.cuda.Event(enable_timing=True)`."""

    def __init__(self, stream: VirtualStream) -> None:
        self._stream = stream
        self._at_ms = max(stream.free_ms, stream.now_ms)

    def query(self) -> bool:
        self._stream.host("wait")  # asking again and again is waiting
        return self._stream.now_ms >= self._at_ms

    def synchronize(self) -> None:
        self._stream.host("wait")
        self._stream.now_ms = max(self._stream.now_ms, self._at_ms)

    def elapsed_time(self, end: VirtualEvent) -> float:
        self._stream.log.append("elapsed")
        for which, event in (("start", self), ("end", end)):
            if self._stream.now_ms < event._at_ms:
                raise RuntimeError(f"the {which} event is not reached yet: synchronise before reading elapsed_time")
        return end._at_ms - self._at_ms


class Host:
    """The time of whoever launches."""

    now_ms = 0.0


class VirtualStream:
    """The methods of a `SimulatedStream`; `log` lists "launch", "wait", "read" (of a clock) and "elapsed" in order.

    `now_ms` is the host's time, `free_ms` when the device will have done all that was launched.

    host: the host of another stream, for streams that share a clock.
    """

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()
        self.free_ms = self.now_ms
        self.log: list[str] = []
        self.launched: list[float | Work] = []
        self._ms: dict[Work, float] = {}

    def work(self, ms: float) -> Work:
        """Work that takes so long."""
        work = Work()
        self._ms[work] = ms
        return work

    @property
    def now_ms(self) -> float:
        return self._host.now_ms

    @now_ms.setter
    def now_ms(self, ms: float) -> None:
        self._host.now_ms = ms

    def launch(self, work: float | Work | Callable[[], object]) -> None:
        if callable(work):  # its time is the device's, not the host's
            began_ms = self.now_ms
            work()
            ms, self.now_ms = self.now_ms - began_ms, began_ms
        else:
            ms = self._ms[work] if isinstance(work, Work) else float(work)
        self.host("launch")
        self.launched.append(work)
        self.free_ms = max(self.free_ms, self.now_ms) + ms

    def record_event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.record_event().query()

    def host(self, what: str) -> None:
        """The host does something: note it, and count its time."""
        self.log.append(what)
        self.now_ms += _HOST_MS[what]

    def __enter__(self) -> VirtualStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.synchronize()

    @property
    def waits_between(self) -> int:
        """How often the host waited between its first launch and its last."""
        launches = [place for place, what in enumerate(self.log) if what == "launch"]
        return self.log[launches[0] : launches[-1]].count("wait") if launches else 0

    def on_its_clock(self, fn: Callable) -> Callable:
        """fn, for which Python's clocks and time.sleep go by this stream's time while it runs, on its thread only."""

        @functools.wraps(fn)
        def timed(*args: object, **kwargs: object) -> object:
            with self._clocks(getattr(fn, "__globals__", {})):
                return fn(*args, **kwargs)

        return timed

    @contextlib.contextmanager
    def _clocks(self, names: dict[str, object]) -> Iterator[None]:
        """names: the globals of the learner's function, for `from time import perf_counter`."""
        thread, began_ms = threading.get_ident(), self.now_ms

        def counted(real: Callable, units: int) -> Callable:
            began = real()

            def read() -> float:
                if threading.get_ident() != thread:
                    return real()
                self.host("read")
                return began + type(began)((self.now_ms - began_ms) * units / 1000)

            return read

        def sleep(seconds: float) -> None:
            if threading.get_ident() != thread:
                return real_sleep(seconds)
            self.now_ms += 1000 * seconds

        real_sleep = time.sleep
        ours = {getattr(time, name): counted(getattr(time, name), units) for name, units in _CLOCKS.items()}
        ours[real_sleep] = sleep
        places = [
            (namespace, name, value)
            for namespace in (vars(time), names)
            for name, value in namespace.items()
            if callable(value) and _is_key(value, ours)
        ]
        for namespace, name, value in places:
            namespace[name] = ours[value]
        try:
            yield
        finally:
            for namespace, name, value in places:
                namespace[name] = value


def on_a_virtual_device(test: Callable) -> Callable:
    """test, for which each `SimulatedStream` that it makes is virtual, and Python's clocks then are their host's.

    So a learner's test that bounds a time from above passes on a busy machine, too. A stream that was made before, and
    so is real, goes by the real clocks.
    """
    real = simulated_stream.SimulatedStream

    @functools.wraps(test)
    def judged(program: Callable) -> object:
        names, first = getattr(test, "__globals__", {}), VirtualStream()
        with contextlib.ExitStack() as undo:

            def make(*, launch_us: float = 5.0) -> VirtualStream:
                if not first.log:
                    undo.enter_context(first._clocks(names))
                first.log.append("made")
                return VirtualStream(first._host)

            for namespace in (vars(simulated_stream), names):
                for name in [name for name, value in namespace.items() if value is real]:
                    namespace[name] = make
                    undo.callback(namespace.__setitem__, name, real)
            return test(program)

    return judged


def _is_key(value: object, table: dict) -> bool:
    try:
        return value in table
    except TypeError:  # cannot be hashed
        return False
