"""The decorator that turns a function into an exercise's check."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
import pkgutil
import random
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from every_millisecond.checks.draw import Draw, NoSuchDraw
from every_millisecond.checks.failure import CheckFailed, describe
from every_millisecond.checks.progress import record

_SHOWN_LINES = 8
_SHOWN_LETTERS = 100_000  # a loop that prints for ever must not fill the memory
_REGISTERED: dict[str, dict[str, str]] = {}


def exercise(chapter: str, title: str) -> Callable[[Callable], Callable[..., None]]:
    """Make `check(*learners_objects, draw)` an exercise's check, called in the notebook as `check(*learners_objects)`.

    Passing prints one line and is noted for `llm-latency progress`; failing raises CheckFailed. What the learner's code
    prints is shown, the first lines of it. A check that stumbles over a result says so as CheckFailed, too.

    Args:
        chapter: the set's name, such as "01_correct_timing". title: what is shown on passing.
    """

    def decorate(check: Callable) -> Callable[..., None]:
        _REGISTERED.setdefault(chapter, {})[check.__name__] = title

        @functools.wraps(check)
        def checked(*objects: object, seed: int | None = None) -> None:
            seed = secrets.randbits(32) if seed is None else seed
            try:
                with _shown_on_stdout(), _seeded(seed):
                    for learners in objects:
                        _not_the_librarys(learners)
                    check(*objects, Draw(seed))
            except NoSuchDraw:
                raise
            except Exception as error:
                failure = _as_failure(error)
                failure.seed = seed
                raise failure from None
            record(chapter, check.__name__)
            print(f"passed: {title}")

        return checked

    return decorate


def registered() -> dict[str, dict[str, str]]:
    """All exercises with a check: chapter -> name of the check -> title."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith("ch") or module.name == "bug_zoo":
            importlib.import_module(f"{__package__}.{module.name}")
    return {chapter: dict(_REGISTERED[chapter]) for chapter in sorted(_REGISTERED)}


def _as_failure(error: Exception) -> CheckFailed:
    if isinstance(error, CheckFailed):
        return error
    return CheckFailed(
        f"what your code returned cannot be compared ({type(error).__name__}: {error}); "
        "does it have the type and shape that the docstring asks for?"
    )


def _not_the_librarys(learners: object) -> None:
    """A check must judge what the learner wrote: the library's own function would always pass."""
    if str(getattr(learners, "__module__", "")).startswith(("llm_latency", "every_millisecond")):
        raise CheckFailed(f"{describe(learners)} is the library's own; hand in the one you wrote in the cell above")


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The seed also draws what a learner's own torch.randn, numpy.random and random draw; theirs goes on afterwards."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002  learners use it
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.default_generator.set_state(before[2])


@contextlib.contextmanager
def _shown_on_stdout() -> Iterator[None]:
    """Show what is printed inside afterwards, the first lines of it, all on stdout.

    nbgrader gives no points to a cell with anything on stderr, and a right answer may well make PyTorch warn: by
    `warnings`, by a logger that has kept the stream of old, or from C++ to the file descriptor.
    """
    printed = _Capped()
    try:
        with contextlib.redirect_stdout(printed), _loggers_on(printed), _descriptor_2_on(printed):
            with contextlib.redirect_stderr(printed):
                yield
    finally:
        printed.show()


@contextlib.contextmanager
def _loggers_on(printed: io.StringIO) -> Iterator[None]:
    loggers = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    moved = [
        (handler, handler.stream)
        for handler in {handler for logger in loggers for handler in logger.handlers}
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__)
    ]
    for handler, _ in moved:
        handler.setStream(printed)
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


@contextlib.contextmanager
def _descriptor_2_on(printed: io.StringIO) -> Iterator[None]:
    try:
        kept = os.dup(2)
    except OSError:  # closed, as under pythonw
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            printed.write(file.read(_SHOWN_LETTERS).decode(errors="replace"))


class _Capped(io.StringIO):
    """Keeps the beginning of what is printed."""

    def write(self, text: str) -> int:
        if self.tell() < _SHOWN_LETTERS:
            super().write(text)
        return len(text)

    def show(self) -> None:
        lines = self.getvalue().splitlines()
        print(*lines[:_SHOWN_LINES], sep="\n", end="\n" if lines else "")
        if len(lines) > _SHOWN_LINES:
            print(f"... and {len(lines) - _SHOWN_LINES} more lines printed by your code")
