"""The clocks of the timers: the host's, a CUDA device's, or one that the caller brings."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Clock(Protocol):
    """Marks are cheap and may still be on their way; `synchronize` waits for the device; then marks can be compared."""

    name: str

    def mark(self) -> object: ...

    def elapsed_ms(self, start: object, end: object) -> float: ...

    def synchronize(self) -> None: ...


class HostClock:
    """perf_counter_ns: monotonic, nanoseconds. On a CPU a call returns when its work is done: nothing to wait for."""

    name = "cpu"
    mark = staticmethod(time.perf_counter_ns)

    def elapsed_ms(self, start: int, end: int) -> float:
        return (end - start) / 1e6

    def synchronize(self) -> None:
        pass


class CudaClock:
    """CUDA events on the current stream of one device, which the GPU itself stamps (resolution about 0.5 us)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


Device = str | torch.device | Clock | None


def clock_for(device: Device) -> Clock:
    """The clock that tells the truth about work on `device`.

    Args:
        device: "cpu", "cuda", "cuda:1", a torch.device, a `Clock`, or None for the GPU where there is one and
            the CPU elsewhere.

    Raises:
        ValueError: an unknown device, a kind without a clock here, or a GPU that this machine lacks. TypeError: any
            other type.
    """
    if isinstance(device, Clock):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device is {device!r}; expected a string, a torch.device, a Clock or None")
    expected = 'expected "cpu", "cuda", "cuda:N", a Clock, or None'
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; {expected}") from None
    if parsed.type == "cpu":
        return HostClock()
    if parsed.type != "cuda":
        raise ValueError(f"device {device!r} has no clock here; {expected}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = parsed.index if parsed.index is not None else (torch.cuda.current_device() if gpus else 0)
    if index >= gpus:
        raise ValueError(f"device {device!r} is not there: torch sees {gpus} CUDA device(s) on this machine")
    return CudaClock(torch.device("cuda", index))
