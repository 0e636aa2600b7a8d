"""The decorator that turns a function into an exercise's check."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pkgutil
import secrets
from collections.abc import Callable

import every_millisecond.checks
from every_millisecond.checks import progress
from every_millisecond.checks.describe import describe
from every_millisecond.checks.draw import Draw
from every_millisecond.checks.failure import CheckFailed

_SHOWN_LINES = 8
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
            draw = Draw(secrets.randbits(32) if seed is None else seed)
            printed = _Capped()
            try:
                with contextlib.redirect_stdout(printed):
                    for learners in objects:
                        _not_the_librarys(learners)
                    check(*objects, draw)
            except Exception as error:
                failure = _as_failure(error)
                failure.seed = draw.seed
                raise failure from None
            finally:
                printed.show()
            progress.record(chapter, check.__name__)
            print(f"passed: {title}")

        return checked

    return decorate


def registered() -> dict[str, dict[str, str]]:
    """All exercises with a check: chapter -> name of the check -> title."""
    for module in pkgutil.iter_modules(every_millisecond.checks.__path__):
        if module.name.startswith("ch"):
            importlib.import_module(f"every_millisecond.checks.{module.name}")
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
    if str(getattr(learners, "__module__", "")).startswith("llm_latency"):
        raise CheckFailed(f"{describe(learners)} is the library's own; hand in the one you wrote in the cell above")


class _Capped(io.StringIO):
    """Keeps the beginning of what is printed: a loop that prints for ever must not fill the memory."""

    def write(self, text: str) -> int:
        if self.tell() < 100_000:
            super().write(text)
        return len(text)

    def show(self) -> None:
        lines = self.getvalue().splitlines()
        print(*lines[:_SHOWN_LINES], sep="\n", end="\n" if lines else "")
        if len(lines) > _SHOWN_LINES:
            print(f"... and {len(lines) - _SHOWN_LINES} more lines printed by your code")
