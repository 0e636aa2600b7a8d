"""What a run of the ladder shows: tables, pictures, and an HTML page that stands alone."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import jinja2

from every_millisecond.ladder import contributions
from every_millisecond.ladder.figures import (
    prediction_alt,
    prediction_figure,
    stages_alt,
    stages_figure,
    waterfall_alt,
    waterfall_figure,
)
from every_millisecond.ladder.runner import records_of
from every_millisecond.ladder.tables import (
    HEADERS,
    STEP_HEADERS,
    caption,
    rows,
    step_rows,
    step_table,
    table,
    unaccounted,
)
from llm_latency import files

__all__ = [
    "HEADERS", "STEP_HEADERS", "caption", "prediction_alt", "prediction_figure", "rows", "stages_alt", "stages_figure",
    "step_rows", "step_table", "table", "unaccounted", "waterfall_alt", "waterfall_figure", "write",
]  # fmt: skip


def write(run: dict, folder: Path) -> Path:
    """Write the pictures and report.html into `folder`; return the path of the page.

    The page needs no network: its pictures stand inside. Without a measured rung it shows what failed, and no picture.
    """
    from every_millisecond import claims  # it reads ladders itself

    records = records_of(run)
    figures = {}
    if any(record.status == "measured" for record in records):
        figures["stages"] = (stages_figure(run), stages_alt(run))
    if any(record.status == "measured" and "decode" in record.predicted for record in records):
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
    files.write_atomically(path, page)
    return path
