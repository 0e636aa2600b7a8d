"""The command line: `llm-latency`. Each command is a few lines over a function of the library."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from every_millisecond import openmp

for name, value in openmp.WAITING.items():  # before a command imports torch
    os.environ.setdefault(name, value)
app = typer.Typer(help="Make a language model answer faster, one measured step at a time.", no_args_is_help=True)
console = Console()
errors = Console(stderr=True)


def _fail(error: Exception) -> typer.Exit:
    """Print an expected error as one sentence; a traceback helps nobody whose folder is full."""
    errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
    return typer.Exit(1)


def say(where: Console, text: str) -> None:
    """Print text that may hold a path or an error: brackets in it are no markup."""
    where.print(text, highlight=False, markup=False)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(), *Progress.get_default_columns()[:2], TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), console=errors,
    )  # fmt: skip


@app.command()
def fetch() -> None:
    """Fetch and prepare the course's model once (93 MB); quick when that has been done."""
    from llm_latency import models

    try:
        folder = models.prepare()
    except RuntimeError as error:
        raise _fail(error) from error
    say(console, f"model ready in {folder}")


@app.command()
def doctor(
    self_check: Annotated[bool, typer.Option("--self-check", help="Check the timer and `measure` themselves.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure this machine's ceilings anew.")] = False,
    classroom: Annotated[bool, typer.Option("--class", help="Also check what a class needs of each seat.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, to be attached to a report.")] = False,
) -> None:
    """Say what this machine is, how fast it could be, and what works on it. Exit 1 if the course cannot run."""
    from every_millisecond import doctor as doctors

    found = doctors.checks() + (doctors.class_checks() if classroom else [])
    if not as_json:
        console.print(doctors.table(found))
        say(errors, "Measuring the ceilings (once, some seconds) ...")
    limits, last = doctors.ceilings(refresh=refresh)
    found.append(last)
    whole = doctors.report(found, limits)
    if as_json:
        print(json.dumps(whole, indent=1))
    else:
        say(console, "Machine: " + ", ".join(f"{name} {value}" for name, value in whole["machine"].items() if value))
        console.print(doctors.table([last]) if limits is None else doctors.limits_table(limits))
    if self_check:
        from every_millisecond.laboratory.self_check import self_check as run_self_check

        say(errors if as_json else console, run_self_check().report())
    if any(check.needed and not check.works for check in found):
        raise typer.Exit(1)


@app.command()
def run(
    rungs: Annotated[str | None, typer.Option(help="Comma-separated rung names; default all.")] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", "--model", help="Profile, or a model's directory.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plots and the HTML report.")] = Path("run"),
    rounds: Annotated[int, typer.Option(help="Rounds of fresh processes, order alternated.")] = 2,
    repeats: Annotated[int, typer.Option(help="Measured answers per process, as far as its time allows.")] = 5,
    warmup: Annotated[int, typer.Option(help="Discarded short answers per process.")] = 2,
    new_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 50,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not continue a run that was interrupted.")] = False,
) -> None:
    """Measure the ladder on this machine: table, JSON, plots, HTML report. Exit 1 if a rung failed.

    A run that was interrupted is continued, if model, machine, versions and options are still the same.
    """
    from every_millisecond.ladder import report, resume, run_ladder, runner, tables

    names = [name.strip() for name in rungs.split(",")] if rungs else None
    options = dict(rounds=rounds, repeats=repeats, warmup=warmup, new_tokens=new_tokens)
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
    names_of_folders = (stamp if n == 1 else f"{stamp}-{n}" for n in itertools.count(1))  # two runs in one second
    folder = next(out / name for name in names_of_folders if not (out / name).exists())
    try:
        wanted = runner.settings_of(names, profile, **options)
        out.mkdir(parents=True, exist_ok=True)
        with resume.alone(out), _progress() as bar:
            begun = None if fresh else resume.unfinished(out)
            changed = [] if begun is None else resume.differences(resume.stored(begun), wanted)
            if changed:
                say(errors, f"{begun} was interrupted but is another run ({'; '.join(changed)}): starting anew")
            elif begun is not None:
                folder = begun
                say(errors, f"continuing {begun}: {resume.finished_parts(begun)} processes are done")
            task = bar.add_task("ladder", total=None)
            result = run_ladder(
                folder, names=names, profile=profile, **options,
                progress=lambda title, done, of: bar.update(task, description=title, completed=done, total=of),
            )  # fmt: skip
            page = report.write(result, folder)
    except KeyboardInterrupt:
        done = resume.finished_parts(folder)
        say(errors, f"interrupted: {done} finished processes are kept in {folder}; the same command continues there")
        raise typer.Exit(130) from None
    except (ValueError, RuntimeError, OSError) as error:  # OSError: a folder that is a file, read-only or full
        raise _fail(error) from error
    # Many columns: squeezed into 80 characters nobody could read them, so a narrow terminal scrolls or wraps.
    wide = Console(width=max(console.width, 190))
    wide.print(tables.table(result))
    if tables.step_rows(result):
        wide.print(tables.step_table(result))
    say(console, f"The stages leave out at most {tables.unaccounted(result):.2%} of the wall clock.")
    say(console, f"Report: {page}")
    failed = [rung for rung in result["rungs"] if rung["status"] == "failed"]
    for rung in failed:
        say(errors, f"not finished here: {rung['name']}: {rung['reason']}")
    if failed:
        raise typer.Exit(1)


@app.command()
def claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claims to show in full, such as A3; default a table.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what can be measured here first (2 min).")
    ] = False,
    run: Annotated[Path | None, typer.Option(help="A run of the ladder on this machine: its folder or file.")] = None,
    results: Annotated[Path | None, typer.Option(help="Folder of recorded runs; default the checkout's.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --measure: folder for a dated JSON.")] = None,
) -> None:
    """Every claim of the two source articles with its verdict, computed from figures."""
    from every_millisecond import claims as ledgers
    from every_millisecond.claims import measuring
    from every_millisecond.ladder import load_run

    try:
        findings = [*ledgers.recorded(results or ledgers.results_folder()), ledgers.own()]
        if run is not None:
            findings.append(ledgers.from_ladder(load_run(run), source=str(run), here=True))
        if measure:
            with _progress() as bar:
                task = bar.add_task("claims", total=None)
                found = measuring.measure_claims(
                    progress=lambda name, done, of: bar.update(task, description=name, completed=done, total=of)
                )
            findings.append(found)
            if out is not None:
                say(errors, f"written to {measuring.write(found, out)}")
        rows = ledgers.ledger(findings)
        unknown = sorted(set(ids or []) - {row.id for row in rows})
        if unknown:
            raise ValueError(f"no claim {unknown[0]!r}; expected one of {', '.join(row.id for row in rows)}")
    except (ValueError, RuntimeError, OSError) as error:
        raise _fail(error) from error
    if ids:
        for row in rows:
            if row.id in ids:
                say(console, row.report())
        return
    Console(width=max(console.width, 160)).print(ledgers.table(rows))
    say(console, ", ".join(f"{n} {verdict}" for verdict, n in ledgers.counts(rows).items()))


@app.command()
def regress(
    rung: Annotated[str, typer.Option(help="The optimised one: a rung of the ladder.")] = "int4",
    model: Annotated[str | None, typer.Option("--profile", "--model", help="Profile, or a model's directory.")] = None,
    optimized_model: Annotated[
        str | None, typer.Option(help="Build the rung from this directory instead: weights made smaller elsewhere.")
    ] = None,
    exact: Annotated[bool | None, typer.Option(help="Demand the same greedy text; default: if the rung does.")] = None,
    perplexity: Annotated[float, typer.Option(help="Relative increase allowed.")] = 0.05,
    kl: Annotated[float, typer.Option(help="Mean KL allowed, in nats.")] = 0.1,
    agreement: Annotated[float, typer.Option(help="Least share of equal first choices.")] = 0.9,
    speedup: Annotated[float | None, typer.Option(help="Least speed-up; default: time decides nothing.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed answers per case, in turns.")] = 3,
    samples: Annotated[int, typer.Option(help="Continuations to sample for a test of the distribution.")] = 0,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit report for a CI.")] = None,
) -> None:
    """The regression gate: baseline against an optimised rung. Exit 1 if it fails."""
    from every_millisecond.ladder.gate import gate, table
    from llm_latency.quality import Thresholds

    try:
        limits = Thresholds(perplexity_increase=perplexity, kl=kl, agreement=agreement, speedup=speedup)
        report = gate(rung, profile=model, optimized_model=optimized_model, thresholds=limits, exact=exact,
                      rounds=rounds, samples=samples, junit=junit)  # fmt: skip
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise _fail(error) from error
    Console(width=max(console.width, 130)).print(table(report))
    for where, what in report.failures:
        say(errors, f"failed: {where}: {what}")
    raise typer.Exit(int(not report.passed))


@app.command()
def diagnose(
    profile: Annotated[str | None, typer.Argument(help="Profile; default the one for this machine.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model's directory instead.")] = None,
) -> None:
    """Measure a model for half a minute: what binds each stage here, and the checklist by expected gain."""
    from every_millisecond import checklist

    try:
        with _progress() as bar:
            task = bar.add_task("diagnose", total=None)
            found = checklist.diagnose(
                profile if model is None else str(model),
                progress=lambda name, done, of: bar.update(task, description=name, completed=done, total=of),
            )
    except (ValueError, RuntimeError, OSError) as error:
        raise _fail(error) from error
    say(console, found.summary())
    Console(width=max(console.width, 150)).print(found.table())


@app.command()
def speculate(
    draft: Annotated[
        str, typer.Option(help="conditioned, plain, lookup, or the directory of a small model.")
    ] = "conditioned",
    weights: Annotated[str, typer.Option(help="Of the target: float32, bfloat16, int8 or int4.")] = "bfloat16",
    profile: Annotated[
        str | None, typer.Option("--profile", "--model", help="Profile, or a model's directory.")
    ] = None,
    question: Annotated[list[str] | None, typer.Option(help="What to ask; give it again for more.")] = None,
    gammas: Annotated[str, typer.Option(help="Comma-separated numbers of drafted tokens per cycle.")] = "1,2,3,4,5",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    tokens: Annotated[int, typer.Option(help="New tokens per answer.")] = 48,
    rounds: Annotated[int, typer.Option(help="Measured turns.")] = 3,
) -> None:
    """Measure whether speculative decoding pays for a target and a draft on this machine, and say why."""
    from every_millisecond.ladder.speculation import explain_here

    try:
        found = explain_here(
            profile, weights=weights, draft=draft, questions=question, temperature=temperature, max_new_tokens=tokens,
            gammas=tuple(int(gamma) for gamma in gammas.split(",")), rounds=rounds,
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError, OSError) as error:  # OSError: a draft that is not there
        raise _fail(error) from error
    console.print(found.table())
    say(console, found.report())


@app.command("gpu-check")
def gpu_check(
    out: Annotated[Path, typer.Option(help="Folder for the dated JSON and the pages.")] = Path("results"),
    minutes: Annotated[float, typer.Option(help="Time budget; the next call continues.")] = 15.0,
    profile: Annotated[str | None, typer.Option(help="Of ladder and notebooks; the largest downloaded.")] = None,
) -> None:
    """Run CUDA tests, kernels, ladder and notebooks on this machine's GPU, most valuable first. Exit 2 without CUDA."""
    from every_millisecond.gpu_check import main

    try:
        code = main(out, minutes=minutes, profile=profile)
    except (ValueError, OSError) as error:
        raise _fail(error) from error
    raise typer.Exit(code)


@app.command()
def load(
    url: Annotated[
        str | None, typer.Argument(help="An OpenAI-compatible server; without one, the engine in this process.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests at each load.")] = 1000,
    rates: Annotated[str, typer.Option(help="Of a server: requests a second, comma-separated.")] = "0.5,1,2",
    tokens: Annotated[int, typer.Option(help="Of a server: tokens an answer may have.")] = 50,
    model: Annotated[str | None, typer.Option(help="Of a server: the model's name; default its first.")] = None,
    name: Annotated[str | None, typer.Option(help="Of a server: what it is, for title and file name.")] = None,
    first_ms: Annotated[float, typer.Option(help="Of a server: first token within, for goodput.")] = 1000.0,
    pace_ms: Annotated[float, typer.Option(help="Of a server: time per output token within, for goodput.")] = 100.0,
    loads: Annotated[str, typer.Option(help="Of the engine: comma-separated; 1 is where it saturates.")] = (
        "0.4,0.6,0.8,1.0,1.3"
    ),
    slots: Annotated[int, typer.Option(help="Of the engine: requests that share a step.")] = 8,
    profile: Annotated[str | None, typer.Option(help="Of the engine: profile, or a model's directory.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the dated JSON with every request's times.")] = Path("results"),
) -> None:
    """Load a server over HTTP, or the batching engine in this process, at rising rates: latencies, goodput, errors."""
    from every_millisecond.laboratory import load_test
    from every_millisecond.serving import report

    try:
        with _progress() as bar:
            task = bar.add_task("starting", total=None)

            def show(title: str, done: int, of: int) -> None:
                bar.update(task, description=title, completed=done, total=of)

            if url is not None:
                found = report.run(
                    url, rates=_numbers("rates", rates), requests=requests, max_tokens=tokens, model=model,
                    limits_ms=(first_ms, pace_ms), progress=show,
                )  # fmt: skip
                lines, kept = [result.report() for result in found], report.write(url, found, out, name)
            else:
                batched, vocab_size = load_test.load_model(profile, slots)
                result = load_test.run_load_test(
                    batched, vocab_size=vocab_size, requests=requests, slots=slots, loads=_numbers("loads", loads),
                    progress=show,
                )  # fmt: skip
                lines, kept = load_test.lines(result), [load_test.write(result, out)]
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise _fail(error) from error
    say(console, "\n".join(lines))
    say(console, f"Every request's times: {kept[0]}")


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers separated by commas. Raises ValueError that names the option."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} {text!r}; expected numbers separated by commas") from None


@app.command()
def peers(out: Annotated[Path, typer.Option(help="Folder for the dated JSON.")] = Path("results")) -> None:
    """Measure ours beside HF generate, llama.cpp and torchao on the same weights, interleaved."""
    from every_millisecond.peers import main

    raise typer.Exit(main(out))


@app.command()
def progress() -> None:
    """Show which exercises' checks have passed on this machine. Nothing leaves it."""
    from every_millisecond.checks import progress as kept
    from every_millisecond.checks import registered

    try:
        lines = kept.report(registered())
    except (ValueError, RuntimeError) as error:
        raise _fail(error) from error
    say(console, "\n".join(lines))


if __name__ == "__main__":
    app()
