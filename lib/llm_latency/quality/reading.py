"""The text that quality is measured on."""

from __future__ import annotations

from importlib.resources import files


def reading_text() -> str:
    """Explanations of programming exercises in plain English, written for this course: about 4,400 tokens.

    The bundled model has not seen it, and it is the kind of text the course's request is about.
    """
    return files("llm_latency").joinpath("data", "reading.txt").read_text(encoding="utf-8")
