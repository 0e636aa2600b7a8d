"""The command line: `llm-latency`. Each command is a few lines over a function of the library."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

app = typer.Typer(help="Make a language model answer faster, one measured step at a time.", no_args_is_help=True)
console = Console()
errors = Console(stderr=True)


def _fail(error: Exception) -> typer.Exit:
    """Print an expected error as one sentence; a traceback helps nobody whose folder is full."""
    errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
    return typer.Exit(1)


@app.command()
def fetch() -> None:
    """Fetch and prepare the course's model once (93 MB); quick when that has been done."""
    from llm_latency import models

    try:
        folder = models.prepare()
    except RuntimeError as error:
        raise _fail(error) from error
    console.print(f"model ready in {folder}", highlight=False)


@app.command()
def doctor(
    self_check: Annotated[bool, typer.Option("--self-check", help="Check the timer and `measure` themselves.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure this machine's ceilings anew.")] = False,
    classroom: Annotated[bool, typer.Option("--class", help="Also check what a class needs of each seat.")] = False,
) -> None:
    """Say what this machine is, how fast it could be, and what works on it. Exit 1 if the course cannot run."""
    from llm_latency import hardware
    from llm_latency.doctor import checks, class_checks

    found = checks() + (class_checks() if classroom else [])
    table = Table(title="What works here", title_justify="left")
    for header in ("what", "works", "found", "remedy"):
        table.add_column(header, overflow="fold")
    for check in found:
        table.add_row(check.name, "yes" if check.works else "NO" if check.needed else "no", escape(check.found),
                       "" if check.works else escape(check.remedy))  # fmt: skip
    console.print(table)
    console.print(
        "Machine: " + ", ".join(f"{k} {v}" for k, v in hardware.machine_facts().items() if v), highlight=False
    )
    console.print("Measuring the ceilings (once, some seconds) ...", style="dim")
    c = hardware.ceilings(refresh=refresh)
    limits = Table(title=f"Measured ceilings of {c.name}, {c.threads} threads", title_justify="left")
    for header in ("what", "float32", *[name for name in c.gemv_gbps if name != "float32"]):
        limits.add_column(header, justify="right")
    limits.add_row("memory read / copy (GB/s)", f"{c.read_gbps:.1f} / {c.copy_gbps:.1f}")
    limits.add_row("matrix x vector (GB/s)", *(f"{v:.1f}" for v in c.gemv_gbps.values()))
    rates = [c.matmul_gflops.get(name) for name in c.gemv_gbps]
    limits.add_row("matrix x matrix (GFLOP/s)", *("-" if rate is None else f"{rate:.0f}" for rate in rates))
    console.print(limits)
    if self_check:
        from llm_latency.timing import self_check as run_self_check

        console.print(run_self_check().report(), highlight=False)
    if any(check.needed and not check.works for check in found):
        raise typer.Exit(1)


@app.command()
def run(
    rungs: Annotated[str | None, typer.Option(help="Comma-separated rung names; default all.")] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", "--model", help="Profile, or a model's directory.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plots and the HTML report.")] = Path("run"),
    rounds: Annotated[int, typer.Option(help="Processes per rung, order alternated.")] = 2,
    repeats: Annotated[int, typer.Option(help="Measured answers per process.")] = 5,
    warmup: Annotated[int, typer.Option(help="Discarded answers per process.")] = 3,
) -> None:
    """Measure the ladder on this machine: table, JSON, plots, HTML report. Exit 1 if a rung failed."""
    from llm_latency.experiment import report, run_ladder

    folder = out / datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
    names = [name.strip() for name in rungs.split(",")] if rungs else None
    try:
        with Progress(
            SpinnerColumn(), *Progress.get_default_columns()[:2], TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(), console=errors,
        ) as bar:  # fmt: skip
            task = bar.add_task("ladder", total=None)
            result = run_ladder(
                folder, names=names, profile=profile, rounds=rounds, warmup=warmup, repeats=repeats,
                progress=lambda title, done, of: bar.update(task, description=title, completed=done, total=of),
            )  # fmt: skip
    except (ValueError, RuntimeError, OSError) as error:  # OSError: a folder that is a file, read-only or full
        raise _fail(error) from error
    page = report.write(result, folder)
    # Thirteen columns: squeezed into 80 characters nobody could read them, so a narrow terminal scrolls or wraps.
    Console(width=max(console.width, 180)).print(report.table(result))
    console.print(f"The stages leave out at most {report.unaccounted(result):.2%} of the wall clock.", highlight=False)
    console.print(f"Report: {page}", highlight=False)
    if any(rung["status"] == "failed" for rung in result["rungs"]):
        raise typer.Exit(1)


@app.command("gpu-check")
def gpu_check(out: Annotated[Path, typer.Option(help="Folder for the dated JSON.")] = Path("results")) -> None:
    """Run the CUDA tests, the kernels' benchmarks and the ladder on this machine's GPU. Exit 2 without CUDA."""
    from llm_latency.gpu_check import main

    raise typer.Exit(main(out))


@app.command()
def peers(out: Annotated[Path, typer.Option(help="Folder for the dated JSON.")] = Path("results")) -> None:
    """Measure ours beside HF generate, llama.cpp and torchao on the same weights, interleaved."""
    from llm_latency.peers import main

    raise typer.Exit(main(out))


if __name__ == "__main__":
    app()
