"""Many lines about this machine that only some readers want: each folded behind its own title."""

from __future__ import annotations

import html
from collections.abc import Sequence

from IPython.display import display


def here(title: str, entries: Sequence[tuple[str, str]]) -> None:
    """Display entries (summary, text), each to be opened by a click; a viewer without HTML gets the summaries.

    All of it stands on one line that begins "on this machine:", since none of it holds on another. Raises ValueError
    without an entry.
    """
    if not entries:
        raise ValueError(f"{title}: nothing to fold")
    page = "".join(
        f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>"
        for summary, text in entries
    ).replace("\n", "&#10;")
    plain = " | ".join(summary for summary, _ in entries)
    display(
        {
            "text/html": f"<b>on this machine: {html.escape(title)}</b>{page}",
            "text/plain": f"on this machine: {title}: {plain}",
        },
        raw=True,
    )
