"""The clocks of the timers: the host's, a CUDA device's, or one that the caller brings."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

import torch

from llm_latency.arguments import check_device


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

    Raises TypeError or ValueError as `check_device`.
    """
    if isinstance(device, Clock):
        return device
    checked = check_device(device)
    if checked.type == "cpu":
        return HostClock()
    index = torch.cuda.current_device() if checked.index is None else checked.index
    return CudaClock(torch.device("cuda", index))
