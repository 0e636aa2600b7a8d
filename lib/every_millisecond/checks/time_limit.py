"""A time limit for code that may loop for ever."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class OutOfTime(BaseException):
    """Raised inside the running code. Not an Exception, so that a learner's `except Exception` lets it through."""


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """What `work()` returns or raises; OutOfTime if it takes longer than `seconds`.

    On the main thread a timer signal ends it, wherever the interpreter is. Elsewhere (Windows, a kernel's subshell) it
    runs on a thread of its own that is asked to end, and is left behind if it sits in compiled code.
    """
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        with _alarm(seconds):
            return work()
    return _on_a_thread(seconds, work)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(signum, frame):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _on_a_thread(seconds: float, work: Callable[[], T]) -> T:
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="check", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(OutOfTime))
        raise OutOfTime
    if errors:
        raise errors[0]
    return values[0]
