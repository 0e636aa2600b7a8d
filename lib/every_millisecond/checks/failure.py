"""What a failed check raises: one readable message, and no page of traceback under it."""

from __future__ import annotations


class CheckFailed(AssertionError):
    """A learner's answer is not right yet; the message says what was found, what was expected, what to look at.

    IPython shows only the message. nbgrader sees an error and gives no points.
    """

    seed: int | None = None  # set by `exercise`: the same check with this seed draws the same numbers

    def _render_traceback_(self) -> list[str]:
        return [f"✗ {self}"]
