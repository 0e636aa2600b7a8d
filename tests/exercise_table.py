"""The table that ends a test run: how many exercises proved themselves, and by what."""

from __future__ import annotations

from collections import Counter


def lines(reports) -> list[str]:
    """Rows for the terminal from the reports of passed tests; empty if no exercise was tested."""
    counts: dict[str, Counter] = {}
    for report in reports:
        for name, value in getattr(report, "user_properties", []):
            if name in ("planted", "accepted"):
                chapter, number = value
                counts.setdefault(chapter, Counter())[name] += number
                counts[chapter]["exercises"] += name == "planted"
    if not counts:
        return []
    counts = dict(sorted(counts.items())) | {"all": sum(counts.values(), Counter())}
    columns = {"exercises": "exercises", "planted": "planted mistakes caught", "accepted": "alternatives accepted"}
    width = max(map(len, counts))
    rows = [" " * width + "".join(f"  {title:>{len(title)}}" for title in columns.values())]
    for chapter, row in counts.items():
        rows.append(f"{chapter:{width}}" + "".join(f"  {row[key]:{len(title)}}" for key, title in columns.items()))
    return rows
