"""The ledger: every claim with the roof's word, this machine's, the recorded machines', and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from every_millisecond.claims.check import CHECKS, CONDITION, HOLDS, IMPOSSIBLE, NOT_MEASURED, VERDICTS, ClaimCheck
from every_millisecond.claims.sources import Findings

HEADERS = ("id", "claim", "what the roof allows", "measured here", "recorded", "verdict")


@dataclass(frozen=True, slots=True)
class Row:
    """One claim in the ledger. verdict: from this machine's figures where there are any, else from the newest recorded
    ones, else from arithmetic and published figures."""

    id: str
    claim: str
    allowed: str
    here: tuple[str, ...]
    recorded: tuple[str, ...]
    verdict: str
    settled_by: str  # "here", "recorded", "arithmetic" or "nothing"
    arithmetic: tuple[str, ...]

    def cells(self) -> list[str]:
        """The row's cells in the order of `HEADERS`."""
        by = {"here": "measured here", "recorded": "recorded", "arithmetic": "arithmetic"}.get(self.settled_by)
        verdict = f"{self.verdict} ({by})" if by else self.verdict
        return [
            self.id,
            self.claim,
            self.allowed,
            "; ".join(self.here) or "-",
            "; ".join(self.recorded) or "-",
            verdict,
        ]

    def report(self) -> str:
        """The row in full, for `print`: what the table leaves out is the arithmetic."""
        lines = [f"{self.id}: {self.cells()[-1]}", f"    claim:   {self.claim}", f"    allowed: {self.allowed}"]
        lines += [f"      {line}" for line in self.arithmetic]
        lines += [f"    measured here: {line}" for line in self.here]
        return "\n".join(lines + [f"    recorded: {line}" for line in self.recorded])


def ledger(findings: Iterable[Findings] = ()) -> list[Row]:
    """Every claim judged. findings: in order of age; a later one of the same kind (here, recorded) takes precedence.

    Raises KeyError for figures of a claim that the articles do not make.
    """
    findings = list(findings)
    unknown = sorted({claim for entry in findings for claim in entry.values} - set(CHECKS))
    if unknown:
        raise KeyError(f"figures for unknown claims: {', '.join(unknown)}")
    return [_row(check(), findings, check) for check in CHECKS.values()]


def _row(bare: ClaimCheck, findings: Sequence[Findings], check) -> Row:
    own: dict[str, float] = {}
    for entry in findings:
        if entry.here:
            own |= entry.values.get(bare.id, {})
    others = [entry for entry in findings if not entry.here and entry.values.get(bare.id)]
    judged = check(own) if own else None
    words = [f"{entry.date}, {entry.machine}: {'; '.join(check(entry.values[bare.id]).measured)}" for entry in others]
    if judged is not None:
        final, settled_by = judged, "here"
    elif others:
        final, settled_by = check(others[-1].values[bare.id]), "recorded"
    else:
        final, settled_by = bare, "nothing" if bare.verdict == NOT_MEASURED else "arithmetic"
    here = judged.measured if judged is not None else ()
    return Row(bare.id, bare.claim, final.allowed, here, tuple(words), final.verdict, settled_by, bare.arithmetic)


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many claims got each verdict, in the order holds, under a condition, impossible, not measured."""
    found = Counter(row.verdict for row in rows)
    return {verdict: found[verdict] for verdict in VERDICTS}


def table(rows: Sequence[Row]) -> Table:
    """The ledger as a rich table."""
    colours = {HOLDS: "green", CONDITION: "yellow", IMPOSSIBLE: "red", NOT_MEASURED: "dim"}
    shown = Table(title="Claims of the two source articles", title_justify="left", show_lines=True)
    for header in HEADERS:
        shown.add_column(header, overflow="fold", no_wrap=header == "id")
    for row in rows:
        cells = row.cells()
        shown.add_row(*map(escape, cells[:-1]), f"[{colours[row.verdict]}]{escape(cells[-1])}[/]")
    return shown
