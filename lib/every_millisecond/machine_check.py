"""One thing that the doctor asks of a machine, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was asked: its name, whether it works, what was found, and what to do if it does not."""

    name: str
    works: bool
    found: str
    remedy: str = ""
    needed: bool = False  # the course's default notebooks cannot do without it


@dataclass(frozen=True, slots=True)
class Row:
    """A question of the doctor's. remedy: for when asking it fails by itself, which is an answer, too."""

    name: str
    ask: Callable[[], Check]
    remedy: str
    needed: bool = False

    def check(self) -> Check:
        try:
            return self.ask()
        except Exception as error:  # whatever is broken here is what the doctor is for
            return Check(self.name, False, f"{type(error).__name__}: {error}", self.remedy, self.needed)
