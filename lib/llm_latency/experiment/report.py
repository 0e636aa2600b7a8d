"""What a run of the ladder shows: a table, a waterfall, and an HTML page that stands alone."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import jinja2
from matplotlib.figure import Figure
from rich.table import Table

from llm_latency import files, plots
from llm_latency.experiment.record import RungRecord
from llm_latency.experiment.runner import records_of
from llm_latency.timing.measurement import percentile

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
]


def rows(run: dict) -> list[list[str]]:
    """The table's rows, one per rung, times in ms. An unavailable or failed rung says why in place of figures."""
    records = records_of(run)
    by_name = {record.name: record for record in records}
    baseline = by_name[run["baseline"]]
    return [_row(record, baseline) for record in records]


def _row(record: RungRecord, baseline: RungRecord) -> list[str]:
    if record.status != "measured":
        words = "not available here" if record.status == "unavailable" else "FAILED"
        return [record.title, f"{words}: {record.reason}"] + [""] * (len(HEADERS) - 2)
    total = record.samples_ms["wall"]
    speed_up = "-"
    if baseline.status == "measured":
        speed_up = f"{baseline.median_ms('wall') / record.median_ms('wall'):.2f}"
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in record.share_of_limit.items())
    return [
        record.title,
        *(f"{record.median_ms(stage):.{2 if stage.endswith('tokenise') else 0}f}" for stage in plots.STAGES),
        f"{record.median_ms('wall'):.0f} ({percentile(total, 10):.0f} to {percentile(total, 90):.0f})",
        f"{record.tokens_per_second:.1f}",
        speed_up,
        *(f"{record.predicted[s]:.0f}" if s in record.predicted else "-" for s in ("prefill", "decode")),
        shares or "-",
        "-" if record.perplexity is None else f"{record.perplexity:.2f}",
        "-" if record.agreement is None else f"{record.agreement:.1%}",
    ]


def caption(run: dict) -> str:
    """One line that names what was measured, where and when."""
    machine, settings = run["machine"], run["settings"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    note = " RANDOM WEIGHTS: timing only." if run["profile"].endswith("-shape") else ""
    return (
        f"{run['profile']} on {where}, torch {machine['torch']}, {run['date']}. Medians in ms over "
        f"{settings['rounds']} processes a rung; speed-up against {run['baseline']}; prediction from this machine's "
        f"measured ceilings.{note}"
    )


def table(run: dict) -> Table:
    """The ladder as a rich table."""
    result = Table(title="The ladder: one request, rung by rung", caption=caption(run), title_justify="left")
    for i, header in enumerate(HEADERS):
        result.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows(run):
        result.add_row(*row)
    return result


def unaccounted(run: dict) -> float:
    """Largest share of the wall clock that a rung's stages leave out."""
    return max((abs(r.unaccounted_share) for r in records_of(run) if r.status == "measured"), default=0.0)


def path_records(run: dict) -> list[RungRecord]:
    """Measured rungs on the cumulative way, in order."""
    return [record for record in records_of(run) if record.on_path and record.status == "measured"]


def stages_figure(run: dict) -> Figure:
    """The measured rungs as bars cut into the four stages."""
    plots.use_style()
    measured = [record for record in records_of(run) if record.status == "measured"]
    fig = Figure(figsize=(11, 1.8 + 0.75 * len(measured)), layout="constrained")
    ax = fig.subplots()
    plots.stage_bar(ax, {record.title: record.stages() for record in measured})
    ax.set_title("Where the time goes, rung by rung")
    return fig


def waterfall_figure(run: dict) -> Figure:
    """Milliseconds that each rung of the way took away. Raises ValueError with fewer than two measured rungs on it."""
    plots.use_style()
    records = path_records(run)
    fig = Figure(figsize=(11, 5), layout="constrained")
    ax = fig.subplots()
    plots.waterfall(ax, [record.title for record in records], [record.median_ms("wall") for record in records])
    ax.set_title("One request: what each step took away")
    return fig


def waterfall_alt(run: dict) -> str:
    """Alternative text for the waterfall, with its figures."""
    records = path_records(run)
    steps = ", ".join(f"{record.title} {record.median_ms('wall'):.0f} ms" for record in records)
    return f"Waterfall of the standard request's time on one machine: {steps}."


def write(run: dict, folder: Path) -> Path:
    """Write waterfall.png, stages.png and report.html into `folder`; return the path of the page.

    The page needs no network: its pictures stand inside.
    """
    images = {}
    figures = {
        "stages": (stages_figure(run), "Bars of the rungs, each cut into tokenise, prefill, decode, detokenise.")
    }
    if len(path_records(run)) >= 2:
        figures["waterfall"] = (waterfall_figure(run), waterfall_alt(run))
    for name, (fig, alt) in figures.items():
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", dpi=100)
        (folder / f"{name}.png").write_bytes(buffer.getvalue())
        images[name] = {"png": base64.b64encode(buffer.getvalue()).decode(), "alt": alt}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("llm_latency.experiment", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
        run=run,
        headers=HEADERS,
        rows=rows(run),
        caption=caption(run),
        images=images,
        records=records_of(run),
        unaccounted=unaccounted(run),
    )
    path = folder / "report.html"
    files.write_atomically(path, page)
    return path
