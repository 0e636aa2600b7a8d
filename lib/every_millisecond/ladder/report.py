"""The pictures of a run, and an HTML page that stands alone."""

from __future__ import annotations

import base64
import io
from itertools import pairwise
from pathlib import Path

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from every_millisecond import claims
from every_millisecond.ladder import contributions
from every_millisecond.ladder.record import REPORT, RungRecord, records_of
from every_millisecond.ladder.tables import HEADERS, STEP_HEADERS, caption, rows, step_rows, unaccounted
from every_millisecond.notebook import plots
from every_millisecond.notebook.waterfall import Fall, waterfall
from every_millisecond.processes import printable
from llm_latency import files

NOISE = 0.01  # of perplexity, and of the first choices: over some hundred tokens less tells nothing


def stages_figure(run: dict) -> Figure:
    """The measured rungs as bars cut into the four stages."""
    plots.use_style()
    measured = [record for record in records_of(run) if record.measured]
    fig = Figure(figsize=(11, 1.8 + 0.75 * len(measured)), layout="constrained")
    ax = fig.subplots()
    plots.stage_bar(ax, {record.title: record.stages() for record in measured})
    ax.set_title("Where the time goes, rung by rung")
    return fig


def falls(run: dict) -> list[Fall]:
    """The steps of the path, each with what it costs in quality: perplexity above the baseline's by more than noise, or
    fewer of the baseline's first choices, where that is worse than the step before."""
    records = records_of(run)
    path = contributions.way(records, run["baseline"])
    found = contributions.steps(records, run["baseline"])
    return [
        Fall(
            step.title,
            step.before_ms,
            step.after_ms,
            step.overlaps and not step.loses,
            _cost(path[0], before, after),
            judged=before is path[0] or step.alone_ms is not None,  # the first step is alone where it stands
            spread=_spread(before, after),
        )
        for step, (before, after) in zip(found, pairwise(path), strict=True)
    ]


def _spread(before: RungRecord, after: RungRecord) -> tuple[float, float]:
    """10th and 90th percentile of every sample after the step less every sample before it, in ms."""
    low, high = np.percentile(np.subtract.outer(after.samples("wall"), before.samples("wall")), (10, 90))
    return float(low), float(high)


def _cost(baseline: RungRecord, before: RungRecord, after: RungRecord) -> str:
    words = []
    if None not in (baseline.perplexity, before.perplexity, after.perplexity):
        if after.perplexity / before.perplexity - 1 > NOISE:
            words.append(f"perplexity {after.perplexity / baseline.perplexity - 1:+.1%}")
    if None not in (before.agreement, after.agreement) and before.agreement - after.agreement > NOISE:
        words.append(f"same choice {after.agreement:.1%}")
    return ", ".join(words)


def waterfall_figure(run: dict) -> Figure:
    """ms that each step of the path took away from the baseline; hatched where a step shares them with an earlier one.

    Raises ValueError with fewer than two measured rungs on the path.
    """
    plots.use_style()
    path = contributions.way(records_of(run), run["baseline"])
    steps = falls(run)
    fig = Figure(figsize=(12, 2 + 0.42 * len(path)), layout="constrained")
    waterfall(fig, path[0].title if path else "", steps)
    fig.suptitle("One request: what each step took away", x=0.01, ha="left", fontsize=14, fontweight="bold")
    return fig


def waterfall_alt(run: dict) -> str:
    """Alternative text for the waterfall, with its figures."""
    records = records_of(run)
    path = contributions.way(records, run["baseline"])
    totals = ", ".join(f"{record.title} {record.median_ms('wall'):.0f} ms" for record in path)
    found = falls(run)
    hatched = [fall.title for fall in found if fall.overlaps]
    tail = f" Hatched, since they share milliseconds with an earlier step: {', '.join(hatched)}." if hatched else ""
    unsure = [fall.title for fall in found if fall.unsure]
    tail += f" Cannot be told from no change: {', '.join(unsure)}." if unsure else ""
    costs = [f"{fall.title} ({fall.quality})" for fall in found if fall.quality]
    tail += f" Quality is paid at: {', '.join(costs)}." if costs else ""
    return f"Waterfall of the standard request's time on one machine: {totals}.{tail}"


def prediction_figure(run: dict) -> Figure:
    """Predicted beside measured decode time of the measured rungs."""
    plots.use_style()
    measured = [r for r in records_of(run) if r.measured and "decode" in r.predicted]
    fig = Figure(figsize=(11, 1.8 + 0.5 * len(measured)), layout="constrained")
    ax = fig.subplots()
    for y, record in enumerate(measured):
        ends = record.predicted["decode"], record.median_ms("decode")
        ax.plot(ends, (y, y), color=plots.OTHER_COLOUR, marker="", linewidth=1.5)
        ax.plot(ends[0], y, "o", markerfacecolor="white", markeredgecolor="black", markersize=9)
        ax.plot(ends[1], y, "s", color=plots.STAGE_COLOURS["decode"], markersize=9)
    ax.plot(
        [], [], "o", markerfacecolor="white", markeredgecolor="black", label="predicted: bytes, arithmetic, launches"
    )
    ax.plot([], [], "s", color=plots.STAGE_COLOURS["decode"], label="measured")
    ax.set_yticks(range(len(measured)), [r.title for r in measured])
    ax.invert_yaxis()
    ax.set_xlabel("time of decode (ms, log axis: the rung without a cache is far out)")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    ax.grid(axis="y", visible=False)
    ax.set_title("Decode: predicted and measured")
    fig.legend(loc="outside lower center", ncols=2, fontsize=10)
    return fig


def prediction_alt(run: dict) -> str:
    """Alternative text for the figure of predictions, with its figures."""
    found = [
        f"{r.title} {r.predicted['decode']:.0f} and {r.median_ms('decode'):.0f} ms"
        for r in records_of(run)
        if r.measured and "decode" in r.predicted
    ]
    return f"Pairs of marks, decode time predicted and measured: {', '.join(found)}."


def stages_alt(run: dict) -> str:
    """Alternative text for the figure of stages, with its figures."""
    found = [f"{r.title} {r.median_ms('wall'):.0f} ms" for r in records_of(run) if r.measured]
    return f"Bars cut into tokenise, prefill, decode and detokenise, one for each rung: {', '.join(found)}."


def write(run: dict, folder: Path) -> Path:
    """Write the pictures and report.html into `folder`; return the path of the page.

    The page needs no network: its pictures stand inside. Without a measured rung it shows what failed, and no picture.
    """
    records = records_of(run)
    figures = {}
    if any(record.measured for record in records):
        figures["stages"] = (stages_figure(run), stages_alt(run))
    if any(record.measured and "decode" in record.predicted for record in records):
        figures["prediction"] = (prediction_figure(run), prediction_alt(run))
    if len(contributions.way(records, run["baseline"])) >= 2:
        figures = {"waterfall": (waterfall_figure(run), waterfall_alt(run))} | figures
    images = {}
    for name, (fig, alt) in figures.items():
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", dpi=100)
        (folder / f"{name}.png").write_bytes(buffer.getvalue())
        images[name] = {"png": base64.b64encode(buffer.getvalue()).decode(), "alt": alt}
    findings = claims.recorded(claims.results_folder())
    if not run["profile"].endswith("-shape"):  # random weights settle nothing
        findings.append(claims.from_ladder(run, source="this run", here=True))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("every_millisecond.ladder", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
        run=run,
        headers=HEADERS,
        rows=rows(run),
        step_headers=STEP_HEADERS,
        step_rows=step_rows(run),
        best=contributions.best(records),
        order=[record.title for record in contributions.best_order(records, run["baseline"])],
        caption=caption(run),
        images=images,
        records=records,
        unaccounted=unaccounted(run),
        claim_headers=claims.HEADERS,
        claim_rows=[row.cells() for row in claims.ledger(findings)],
    )
    path = folder / REPORT
    files.write_atomically(path, printable(page))
    return path
