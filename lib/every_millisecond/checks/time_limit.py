"""A time limit for code that may loop for ever, and may catch whatever is raised to end it."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable
from time import process_time  # not through the module: a check may give Python's clocks another time
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 6  # what only waits has so many times the limit
AGAIN_S = 0.02  # from one look to the next, and from one strike to the next
GIVE_UP_S = 1.0  # a thread that has survived so many strikes is left behind


class OutOfTime(BaseException):
    """Raised inside the running code. Not an Exception, so that a learner's `except Exception` lets it through."""


def run_within(seconds: float, work: Callable[[], T], *, own: Callable[[FrameType], bool] = lambda frame: True) -> T:
    """What `work()` returns or raises; OutOfTime if it computes for more than `seconds`, or waits for six times that.

    The limit is the processor's time, so that right code passes on a busy machine, and on one that slept meanwhile.

    On the main thread a timer signal ends it, wherever the interpreter is. Elsewhere (Windows, a kernel's subshell) it
    runs on a thread of its own that is asked to end, and is left behind if it sits in compiled code.

    A bare `except:` swallows what is raised, so it is raised again and again; and from the second time on, on the main
    thread, also at the next line of each frame that is `own`: that line stands in the handler, outside its `try`.
    """
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        return _on_the_main_thread(seconds, work, own)
    return _on_a_thread(seconds, work)


class _Limit:
    """Whether the time is over. Waiting is counted in looks, not on a clock: a process that is halted takes none."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._waited, self._began = seconds, seconds, process_time()

    def is_over(self) -> bool:
        """To be asked after `seconds`, and from then on each AGAIN_S."""
        self._waited += AGAIN_S
        return process_time() - self._began >= self._seconds or self._waited >= PATIENCE * self._seconds


def _on_the_main_thread(seconds: float, work: Callable[[], T], own: Callable[[FrameType], bool]) -> T:
    over, strikes, tracing, limit = False, 0, sys.gettrace(), _Limit(seconds)

    def ring(signum: int, frame: FrameType | None) -> None:
        nonlocal strikes
        if over or frame is None or frame.f_code is _on_the_main_thread.__code__:
            return  # it has just ended
        if not strikes and not limit.is_over():
            return
        strikes += 1
        if strikes > 1:
            sys.settrace(lambda *_: None)  # switches tracing on; the frames below have a trace function of their own
            while frame is not None and frame.f_code is not _on_the_main_thread.__code__:
                if own(frame):
                    frame.f_trace = _strike
                frame = frame.f_back
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        return work()
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if strikes:
            sys.settrace(tracing)


def _strike(frame: FrameType, event: str, arg: object) -> Callable:
    if event == "line":  # not at "exception", which is still inside the `try`
        raise OutOfTime
    return _strike


def _on_a_thread(seconds: float, work: Callable[[], T]) -> T:
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(work())
        except BaseException as error:
            errors.append(error)

    def run_to_the_end() -> None:
        try:
            run()
        except OutOfTime:  # a strike that came late
            errors.append(OutOfTime())

    thread = threading.Thread(target=run_to_the_end, name="check", daemon=True)
    limit = _Limit(seconds)
    thread.start()
    thread.join(seconds)
    while thread.is_alive() and not limit.is_over():
        thread.join(AGAIN_S)
    late = thread.is_alive()
    deadline = time.monotonic() + GIVE_UP_S
    while thread.is_alive() and time.monotonic() < deadline:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(OutOfTime))
        thread.join(AGAIN_S)
    if late:
        raise OutOfTime
    if errors:
        raise errors[0]
    return values[0]
