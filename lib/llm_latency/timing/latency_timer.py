"""`LatencyTimer`: named stages, nested and repeated, timed on the clock of the device that does the work."""

from __future__ import annotations

from llm_latency.timing.clock import Device, clock_for


class LatencyTimer:
    """Times named stages without disturbing them.

    On a GPU each mark is an event on the current stream, and nothing waits until a time is read: then the timer
    synchronises once for all marks made so far. On a CPU a mark is one `perf_counter_ns`. A stage that computes on the
    host is measured rightly on a GPU timer too, as long as the stream is not still busy with earlier work.

    Stages may nest (`attention` inside `decode`) and repeat (their times add up); they may not overlap without nesting,
    and a stage may not contain itself. One timer belongs to one thread.

    Args:
        device: "cpu", "cuda", "cuda:N", a torch.device, a `Clock`; None takes the GPU where there is one.

    Raises:
        ValueError, TypeError: an unknown device.
    """

    def __init__(self, device: Device = None) -> None:
        self._clock = clock_for(device)
        self._mark = self._clock.mark
        self.reset()

    @property
    def device(self) -> str:
        """The name of the clock: "cpu", "cuda:0", "simulated"."""
        return self._clock.name

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of all stages ever started since the last reset, in order of their first start."""
        return tuple(self._samples_ms)

    def reset(self) -> None:
        """Forget all stages, open ones too."""
        self._open: dict[str, object] = {}  # name -> start mark; a dict keeps its order, so this is the stack too
        self._pending: list[tuple[str, str | None, object, object]] = []  # name, stage around it, start, end
        self._samples_ms: dict[str, list[float]] = {}
        self._inside_ms: dict[str, float] = {}  # time spent in the stages directly inside

    def mark_start(self, name: str) -> None:
        """Open stage `name`. RuntimeError: it is open already. TypeError, ValueError: not a name."""
        if name in self._open:
            raise RuntimeError(f"stage {name!r} is already open: close it before starting it again")
        if name not in self._samples_ms:
            if not isinstance(name, str):
                raise TypeError(f"a stage's name is a string, not {name!r}")
            if not name:
                raise ValueError("a stage's name is empty; expected at least one character")
            self._samples_ms[name] = []
            self._inside_ms[name] = 0.0
        self._open[name] = self._mark()

    def mark_end(self, name: str) -> None:
        """Close stage `name`, the one opened last. RuntimeError: it is not open, or one opened inside it still is."""
        end = self._mark()
        open_stages = self._open
        if name not in open_stages:
            closed_before = name in self._samples_ms
            raise RuntimeError(f"stage {name!r} is {'already closed' if closed_before else 'not open: never started'}")
        innermost = next(reversed(open_stages))
        if innermost != name:
            raise RuntimeError(f"stage {innermost!r} was opened inside {name!r} and is still open: close it first")
        start = open_stages.pop(name)
        around = next(reversed(open_stages)) if open_stages else None
        self._pending.append((name, around, start, end))

    def stage(self, name: str) -> _Stage:
        """`with timer.stage("prefill"): ...` opens and closes the stage, after an exception too."""
        return _Stage(self, name)

    def get_elapsed_ms(self, name: str, exclusive: bool = False) -> float:
        """Milliseconds in stage `name`, summed over its repeats; `exclusive` leaves out the stages inside it.

        Waits for the device once if marks are still on their way.

        Raises:
            KeyError: the stage was never started. RuntimeError: it is still open.
        """
        total = sum(self.get_samples_ms(name))
        return total - self._inside_ms[name] if exclusive else total

    def get_samples_ms(self, name: str) -> list[float]:
        """Milliseconds of each repeat of stage `name`, in order. Raises as `get_elapsed_ms`."""
        self._check_readable(name)
        self._resolve()
        return list(self._samples_ms[name])

    def get_count(self, name: str) -> int:
        """How many times stage `name` was closed. Raises as `get_elapsed_ms`."""
        return len(self.get_samples_ms(name))

    def _check_readable(self, name: str) -> None:
        if name not in self._samples_ms:
            raise KeyError(f"stage {name!r} was never started; known: {', '.join(self.stages) or 'none'}")
        if name in self._open:
            raise RuntimeError(f"stage {name!r} is still open: close it before reading its time")

    def _resolve(self) -> None:
        """Turn marks into milliseconds, with one synchronise for all of them."""
        if not self._pending:
            return
        self._clock.synchronize()
        for name, around, start, end in self._pending:
            elapsed = self._clock.elapsed_ms(start, end)
            self._samples_ms[name].append(elapsed)
            if around is not None:
                self._inside_ms[around] += elapsed
        self._pending.clear()

    def _unwind_to(self, name: str) -> None:
        """Close whatever an exception left open inside stage `name`."""
        while name in self._open and (innermost := next(reversed(self._open))) != name:
            self.mark_end(innermost)


class _Stage:
    """The context manager of `LatencyTimer.stage`; a class, because a generator would cost three times as much."""

    __slots__ = ("_name", "_timer")

    def __init__(self, timer: LatencyTimer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._timer.mark_start(self._name)

    def __exit__(self, error_type: type | None, *error: object) -> None:
        if error_type is not None:
            self._timer._unwind_to(self._name)
        self._timer.mark_end(self._name)
