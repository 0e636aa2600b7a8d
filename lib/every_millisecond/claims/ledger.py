"""The ledger: every claim with its premise, arithmetic's word, this machine's figures, recorded ones, the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.markup import escape
from rich.table import Table

from every_millisecond.claims.check import CHECKS, FALSE, NOT_MEASURED, TIE, TRUE, VERDICTS, Claim, Figures, Judged
from every_millisecond.claims.sources import Findings

HEADERS = ("id", "claim", "premise", "by arithmetic", "measured here", "recorded", "verdict")


def ledger(findings: Iterable[Findings] = ()) -> list[Judged]:
    """Every claim judged. findings: in order of age; a later figure of the same kind (here, recorded) takes precedence.

    Raises KeyError for figures of a claim that the articles do not make.
    """
    findings = list(findings)
    unknown = sorted({claim for entry in findings for claim in entry.values} - set(CHECKS))
    if unknown:
        raise KeyError(f"figures for unknown claims: {', '.join(unknown)}")
    own: dict[str, Figures] = {}
    for entry in findings:
        if entry.here:
            for id, figures in entry.values.items():
                own[id] = {**own.get(id, {}), **figures}
    if "limit_share" in own.get("A8", {}):  # what A8 measured of a decode step is what B6 says of one
        own["B6"] = {"decode_share": own["A8"]["limit_share"], **own.get("B6", {})}
    return [_row(check, own, [entry for entry in findings if not entry.here]) for check in CHECKS.values()]


def _row(check: Claim, own: Mapping[str, Figures], others: Sequence[Findings]) -> Judged:
    judged = check(own.get(check.id), own)
    there = [(entry, check(entry.values[check.id], entry.values)) for entry in others if entry.values.get(check.id)]
    words = tuple(
        f"{entry.date}, {entry.machine}: {found.verdict.replace('here', 'there')}: {found.alarm or found.reason}"
        for entry, found in there
    )
    settled_by = "here" if judged.verdict != NOT_MEASURED else "nothing"
    if settled_by == "nothing" and any(found.verdict != NOT_MEASURED for _, found in there):
        settled_by = "recorded"
    return replace(judged, recorded=words, settled_by=settled_by)


def counts(rows: Sequence[Judged]) -> dict[str, int]:
    """How many claims got each verdict, in the order true, false, no difference, not measured."""
    found = Counter(row.verdict for row in rows)
    return {verdict: found[verdict] for verdict in VERDICTS}


def table(rows: Sequence[Judged]) -> Table:
    """The ledger as a rich table."""
    colours = {TRUE: "green", FALSE: "red", TIE: "yellow", NOT_MEASURED: "dim"}
    shown = Table(title="Claims of the two source articles", title_justify="left", show_lines=True)
    for header in HEADERS:
        shown.add_column(header, overflow="fold", no_wrap=header == "id")
    for row in rows:
        cells = row.cells()
        shown.add_row(*map(escape, cells[:-1]), f"[{colours[row.verdict]}]{escape(cells[-1])}[/]")
    return shown
