"""The reader's own table, growing through the course: my guess, what physics says, what was measured.

Kept in the cache folder, on this machine only. A guess is made before the measurement and cannot be changed after it.
"""

from __future__ import annotations

import math
from pathlib import Path

from llm_latency import files


def path() -> Path:
    """Where the table is kept: LLM_LATENCY_SCORECARD lets tests run the notebooks without touching a learner's own."""
    return files.path_from_environment("LLM_LATENCY_SCORECARD") or files.cache_folder() / "scorecard.json"


def _load() -> dict[str, dict]:
    return files.read_json(path(), default={})


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r}; expected a finite number")
    return float(value)


def guess(key: str, value: float, unit: str, question: str) -> None:
    """Commit your guess for a question. Making it again begins the row anew.

    key: notebook number and a word, such as "00-answer". Raises ValueError for a value that is not a finite number.
    """
    row = {"question": question, "unit": unit, "guess": _number("value", value)}
    files.update_json(path(), lambda rows: rows | {key: row}, default={})
    print(f"{question} My guess: {value:g} {unit}")


def physics(key: str, value: float) -> None:
    """Add what the roofline predicts. Raises KeyError if there is no guess yet."""
    _add(key, "physics", value)


def measured(key: str, value: float) -> None:
    """Add what was measured. Raises KeyError if there is no guess yet."""
    _add(key, "measured", value)


def _add(key: str, column: str, value: float) -> None:
    def add(rows: dict[str, dict]) -> dict[str, dict]:
        if key not in rows:
            raise KeyError(f"no guess for {key!r} yet; run the cell that calls scorecard.guess({key!r}, ...) first")
        return rows | {key: rows[key] | {column: _number("value", value)}}

    files.update_json(path(), add, default={})


def table(*keys: str) -> None:
    """Print the rows for `keys`, or all rows so far: guess, physics and measurement, and how far off the guess was.

    Off from the measurement, or from physics where nothing was measured.
    """
    rows = _load()
    for key in keys:
        if key not in rows:
            raise KeyError(f"no guess for {key!r} yet; known: {', '.join(rows) or 'none'}")
    chosen = [rows[key] for key in keys or sorted(rows)]
    width = max((len(row["question"]) for row in chosen), default=8)
    print(f"{'question':{width}} {'my guess':>12} {'physics':>12} {'measured':>12}  off by")
    for row in chosen:
        cells = [_cell(row.get(column), row["unit"]) for column in ("guess", "physics", "measured")]
        print(f"{row['question']:{width}} {cells[0]:>12} {cells[1]:>12} {cells[2]:>12}  {_off(row)}")


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def _off(row: dict) -> str:
    guessed, found = row["guess"], row.get("measured", row.get("physics"))
    if found is None or guessed <= 0 or found <= 0:
        return "-"
    return f"{max(guessed / found, found / guessed):.1f} times"
