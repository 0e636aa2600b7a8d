"""A run of the ladder as rows of text: rung by rung, and step by step along the path."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from every_millisecond.ladder import contributions
from every_millisecond.ladder.record import RungRecord, records_of
from every_millisecond.notebook import plots

HEADERS = [
    "rung",
    "tokenise",
    "prefill",
    "decode",
    "detokenise",
    "total (p10 to p90)",
    "tok/s",
    "speed-up",
    "predicted prefill",
    "predicted decode",
    "share of limit",
    "perplexity",
    "top-1 same",
    "same text",
]
STEP_HEADERS = ["step", "before", "after", "gives", "share of the baseline", "alone it gives", "note"]


def rows(run: dict) -> list[list[str]]:
    """The table's rows, one per rung, times in ms. A rung that was not measured says why in place of figures."""
    records = records_of(run)
    by_name = {record.name: record for record in records}
    baseline = by_name[run["baseline"]]
    return [_row(record, baseline) for record in records]


def _row(record: RungRecord, baseline: RungRecord) -> list[str]:
    if not record.measured:
        return [record.title, record.not_finished] + [""] * (len(HEADERS) - 2)
    low, high = record.spread_ms()
    speed_up, same = "-", "-"
    if baseline.measured:
        speed_up = f"{baseline.median_ms('wall') / record.median_ms('wall'):.2f}"
        if not record.own_request:
            same = f"{sum(a == b for a, b in zip(record.ids, baseline.ids, strict=False))} of {len(baseline.ids)}"
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in record.share_of_limit.items())
    return [
        record.title,
        *(f"{record.median_ms(stage):.{2 if stage.endswith('tokenise') else 0}f}" for stage in plots.STAGES),
        f"{record.median_ms('wall'):.0f} ({low:.0f} to {high:.0f})",
        f"{record.tokens_per_second:.1f}",
        speed_up,
        *(_predicted(record, stage) for stage in ("prefill", "decode")),
        shares or "-",
        "-" if record.perplexity is None else f"{record.perplexity:.2f}",
        "-" if record.agreement is None else f"{record.agreement:.1%}",
        f"{same}{' (promised)' if record.exact else ''}",
    ]


def _predicted(record: RungRecord, stage: str) -> str:
    if stage not in record.predicted:
        return "-"
    return f"{record.predicted[stage]:.0f}{'' if record.explains(stage) else ' (unexplained)'}"


def caption(run: dict) -> str:
    """One line that names what was measured, where and when."""
    machine, settings = run["machine"], run["settings"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    note = " RANDOM WEIGHTS: timing only." if run["profile"].endswith("-shape") else ""
    return (
        f"{run['profile']} on {where}, torch {machine['torch']}, {run['date']}. Medians in ms over "
        f"{settings['rounds']} rounds in fresh processes; speed-up against {run['baseline']}; predicted: the "
        "rung's own matrix kernels and the issuing of its operators, each timed alone; limit: its bytes at this "
        f"machine's bandwidth of plain reading, its arithmetic at the best rate found.{note}"
    )


def table(run: dict) -> Table:
    """The ladder as a rich table."""
    result = Table(title="The ladder: one request, rung by rung", caption=escape(caption(run)), title_justify="left")
    for i, header in enumerate(HEADERS):
        result.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows(run):
        result.add_row(*map(escape, row))
    return result


def step_rows(run: dict) -> list[list[str]]:
    """One row per step of the path, and the total that the steps' gains add up to. Empty with fewer than two rungs."""
    found = contributions.steps(records_of(run), run["baseline"])
    result = []
    for step in found:
        alone = "-" if step.alone_gain_ms is None else f"{step.alone_gain_ms:.0f} ms ({step.alone_factor:.2f} times)"
        alone += f" on {step.over}" if step.over and step.alone_gain_ms is not None else ""
        notes = ["loses"] * step.loses + ["shares its gain with a step before it"] * (step.overlaps and not step.loses)
        result.append(
            [
                step.title,
                f"{step.before_ms:.0f} ms",
                f"{step.after_ms:.0f} ms",
                f"{step.gain_ms:.0f} ms",
                f"{step.share:.1%}",
                alone,
                "; ".join(notes),
            ]
        )
    if found:
        first, last = found[0].before_ms, found[-1].after_ms
        gain = sum(step.gain_ms for step in found)
        result.append(
            ["together", f"{first:.0f} ms", f"{last:.0f} ms", f"{gain:.0f} ms", f"{gain / first:.1%}",
             _product(found), f"{first / last:.2f} times"]
        )  # fmt: skip
    return result


def _product(found: list[contributions.Step]) -> str:
    try:
        product, together = contributions.product_of_factors(found)
    except ValueError:
        return "-"
    return f"factors multiply to {product:.2f}, reached {together:.2f}"


def step_table(run: dict) -> Table:
    """The steps of the path as a rich table."""
    result = Table(title="What each step gave", title_justify="left")
    for i, header in enumerate(STEP_HEADERS):
        result.add_column(header, justify="right" if 0 < i < 5 else "left", overflow="fold")
    for row in step_rows(run):
        result.add_row(*map(escape, row))
    return result


def unaccounted(run: dict) -> float:
    """Largest share of the wall clock that a rung's stages leave out."""
    return max((abs(r.unaccounted_share) for r in records_of(run) if r.measured), default=0.0)
