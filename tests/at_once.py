"""Several processes that do one thing at the same moment."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from typing import Any


def _begin(barrier, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    barrier.wait(60)
    work(*arguments)


def run_at_once(work: Callable[..., None], *arguments: Sequence[Any], seconds: float = 300) -> None:
    """Call `work` (a module's function) in a process for each of `arguments`, all at once; each must end with 0.

    On Linux they are forks: a process of its own would spend seconds on imports, and the two would hardly meet.
    """
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    barrier = context.Barrier(len(arguments))
    processes = [context.Process(target=_begin, args=(barrier, work, one)) for one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(codes), codes
