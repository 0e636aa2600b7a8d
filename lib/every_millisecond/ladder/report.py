"""The pictures of a run, and an HTML page that stands alone."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

from every_millisecond import claims
from every_millisecond.ladder import contributions
from every_millisecond.ladder.record import records_of
from every_millisecond.ladder.tables import HEADERS, STEP_HEADERS, caption, rows, step_rows, unaccounted
from every_millisecond.notebook import plots
from every_millisecond.processes import printable
from llm_latency import files


def stages_figure(run: dict) -> Figure:
    """The measured rungs as bars cut into the four stages."""
    plots.use_style()
    measured = [record for record in records_of(run) if record.measured]
    fig = Figure(figsize=(11, 1.8 + 0.75 * len(measured)), layout="constrained")
    ax = fig.subplots()
    plots.stage_bar(ax, {record.title: record.stages() for record in measured})
    ax.set_title("Where the time goes, rung by rung")
    return fig


def waterfall_figure(run: dict) -> Figure:
    """ms that each step of the way took away from the baseline; hatched where a step shares its gain or loses.

    Raises ValueError with fewer than two measured rungs on the way.
    """
    plots.use_style()
    records = records_of(run)
    path = contributions.way(records, run["baseline"])
    found = contributions.steps(records, run["baseline"])
    fig = Figure(figsize=(11, 5), layout="constrained")
    ax = fig.subplots()
    hatched = [False, *(step.overlaps or step.loses for step in found)]
    plots.waterfall(
        ax, [record.title for record in path], [record.median_ms("wall") for record in path], overlaps=hatched
    )
    ax.set_title("One request: what each step took away")
    if any(hatched):
        ax.set_xlabel("hatched: alone it saves more than here, or it loses here", fontsize=10)
    return fig


def waterfall_alt(run: dict) -> str:
    """Alternative text for the waterfall, with its figures."""
    records = records_of(run)
    path = contributions.way(records, run["baseline"])
    totals = ", ".join(f"{record.title} {record.median_ms('wall'):.0f} ms" for record in path)
    hatched = [s.title for s in contributions.steps(records, run["baseline"]) if s.overlaps or s.loses]
    tail = f" Hatched, since they share a gain or lose: {', '.join(hatched)}." if hatched else ""
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
    path = folder / "report.html"
    files.write_atomically(path, printable(page))
    return path
