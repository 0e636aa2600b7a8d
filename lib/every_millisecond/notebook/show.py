"""What the notebooks show: the library's own source, figures with alternative text, facts of this machine."""

from __future__ import annotations

import base64
import html
import inspect
import io
import textwrap

from IPython.display import Code, display
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from every_millisecond.notebook.outcome import Interval, against_physics, choose, miss, outcome
from llm_latency import hardware

__all__ = [
    "Interval",
    "against_physics",
    "choose",
    "figure",
    "here",
    "in_run",
    "machine",
    "miss",
    "outcome",
    "source",
]


def source(*objects: object) -> None:
    """Display the source of functions or classes as it stands in the library, so that text and code cannot drift."""
    for obj in objects:
        display(Code(textwrap.dedent(inspect.getsource(obj)), language="python"))


def figure(fig: Figure, *, alt: str, here: str = "") -> None:
    """Display a matplotlib figure with alternative text, then close it.

    `alt` says what the figure shows ("memory grows as a parabola for one curve, as a line for the other"), not what it
    is, and is true on every machine; `here` is the part that this machine's figures choose (see `choose`). Both stand
    in the output as text, too, so that a screen reader, a terminal and nbval see them.

    Raises ValueError if `alt` is too short to tell anything.
    """
    if len(alt.split()) < 5:
        raise ValueError(f"alt={alt!r}: say in a sentence what the figure shows")
    if here:
        alt = f"{alt.rstrip('.')}; on this machine: {here}"
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    png = base64.b64encode(buffer.getvalue()).decode()
    # JupyterLab prefers HTML, which can carry the alternative text; viewers without HTML fall back to the PNG.
    bundle = {
        "text/html": f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{png}" style="max-width: 100%">',
        "image/png": png,
        "text/plain": f"[figure] {alt}",
    }
    display(bundle, raw=True)
    plt.close(fig)


def here(text: str) -> None:
    """Print a line that is true on this machine only. (nbval compares nothing after the colon.)"""
    print(f"on this machine: {text}")


def in_run(text: str) -> None:
    """Print a line of the recorded run that a notebook has chosen: which one depends on the machine, and so does the
    line. (nbval compares nothing after the colon.)"""
    print(f"in this run: {text}")


def machine() -> dict[str, str | int | float | bool | None]:
    """Print which machine all figures of a notebook come from; returns `hardware.machine_facts()`. From then on PyTorch
    has no more threads than cores are granted."""
    hardware.limit_threads()
    facts = hardware.machine_facts()
    name = facts["gpu"] or f"{facts['cpu']} ({facts['cpu_capability']})"
    here(f"{name}, {facts['threads']} thread{'s' * (facts['threads'] != 1)}, torch {facts['torch']}")
    return facts
