"""`llm-latency load URL`: a server under several rates, as a record with every request's times and a plot."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from every_millisecond.claims.sources import results_folder
from every_millisecond.notebook import plots
from every_millisecond.serving.client import check_url
from every_millisecond.serving.load import LoadResult, open_load
from llm_latency import files, hardware

# What the requests ask where nobody says: as many questions as it takes for none to be in a server's cache when it
# comes again.
TOPICS = (
    "recursion",
    "hashing",
    "sorting",
    "caching",
    "threads",
    "paging",
    "rounding",
    "parsing",
    "logging",
    "testing",
)
VERBS = ("Explain {} to a beginner.", "Give an example of {}.", "What is hard about {}?", "Who needs {}, and why?",
         "Write a short poem about {}.")  # fmt: skip
QUESTIONS = tuple(verb.format(topic) for verb in VERBS for topic in TOPICS)


def conversations(questions: Sequence[str] = QUESTIONS) -> list[list[dict[str, str]]]:
    """Each question as the one message of a chat."""
    return [[{"role": "user", "content": question}] for question in questions]


async def first_model(url: str) -> str:
    """The name of the first model that a server offers.

    Raises RuntimeError with the reason if it does not say: not up, no such page, no model.
    """
    address = check_url(url)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            async with session.get(f"{address}/v1/models") as response:
                if response.status != 200:
                    raise RuntimeError(f"{url}/v1/models answers HTTP {response.status}; name the model with --model")
                offered = await response.json(content_type=None)
        return str(offered["data"][0]["id"])
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise RuntimeError(f"no server answers at {url}: {error or type(error).__name__}") from error
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise RuntimeError(f"{url}/v1/models names no model; name it with --model") from error


def run(
    url: str,
    *,
    rates: Sequence[float],
    requests: int,
    max_tokens: int,
    model: str | None = None,
    questions: Sequence[str] = QUESTIONS,
    limits_ms: tuple[float, float] = (1000.0, 100.0),
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda title, done, of: None,
) -> list[LoadResult]:
    """Measure a server at each rate, after one request that warms it up.

    Raises ValueError for an address or rates that make no sense, RuntimeError if the server is not up or the warm-up
    fails. From then on errors are counted, not raised.
    """
    if not rates:
        raise ValueError("rates is empty; expected requests a second, such as 0.5,1,2")

    async def all_rates() -> list[LoadResult]:
        name = model or await first_model(url)
        common = dict(model=name, max_tokens=max_tokens, limits_ms=limits_ms, seed=seed)
        asks = conversations(questions)
        warm = await open_load(url, asks, rate=100.0, requests=1, **common)
        if warm.errors():
            raise RuntimeError(f"the first request failed: {warm.answers[0].error}")
        return [
            await open_load(
                url, asks, rate=rate, requests=requests, **common,
                progress=lambda done, rate=rate: progress(f"{rate:g} requests/s", done, requests),
            )
            for rate in rates
        ]  # fmt: skip

    return asyncio.run(all_rates())


def write(url: str, results: Sequence[LoadResult], folder: Path, name: str | None = None) -> tuple[Path, Path]:
    """Store the raw times and the plot, dated and named after the server; returns both paths.

    name: what the server is, in a few words; None takes its address.
    """
    today = datetime.date.today().isoformat()
    where = re.sub(r"[^a-z0-9.]+", "-", (name or urlsplit(url).netloc).lower()).strip("-")
    record = {
        "kind": "server load",
        "date": today,
        "url": url,
        "server": name or url,
        "client": hardware.machine_facts(),
        "loads": [result.record() for result in results],
    }
    data = folder / f"{today}-{where}-load.json"
    files.write_atomically(data, json.dumps(record, indent=1))
    picture = data.with_suffix(".png")
    fig = figure(results, f"{name or url} under load")
    fig.savefig(picture, dpi=120)
    plt.close(fig)
    return data, picture


def figure(results: Sequence[LoadResult], title: str) -> Figure:
    """Time to first token and per output token by rate: the median, and the 99th percentile above it."""
    fig, panels = plt.subplots(1, 2, figsize=(11, 4))
    for ax, (what, name) in zip(
        panels, (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")), strict=True
    ):
        points = [(result.rate, result.quantiles(name)) for result in results if result.quantiles(name)]
        for number, q in enumerate((50, 99)):
            colour = plots.METHOD_COLOURS[number]
            ax.plot([rate for rate, _ in points], [found[q] for _, found in points], color=colour)
            if points:
                ax.annotate(f"p{q}", (points[-1][0], points[-1][1][q]), (6, 0), textcoords="offset points",
                            color=colour, va="center")  # fmt: skip
        ax.set(title=what, xlabel="requests sent (1/s)", ylabel="time (ms)", ylim=0)
    fig.suptitle(title, x=0.01, ha="left")
    return fig


def stored_lines(folder: Path | None = None) -> list[str]:
    """What the stored runs of `llm-latency load URL` found, a few lines each; folder: None is the course's results/."""
    lines = []
    for path in sorted((folder or results_folder()).glob("*-load.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if run.get("kind") != "server load":
            continue
        lines.append(f"{run.get('server', run['url'])}, {run['date']}, {run['client']['cpu']}:")
        for load in run["loads"]:
            whole = [r["arrivals_ms"] for r in load["requests"] if r["error"] is None]
            paces = [(ms[-1] - ms[0]) / (len(ms) - 1) for ms in whole if len(ms) > 1]
            found = f"{load['rate']:g} requests/s, {len(whole)} of {len(load['requests'])} whole"
            for name, values in (("TTFT", [ms[0] for ms in whole]), ("TPOT", paces)):
                if values:
                    last = "p99" if len(values) >= 100 else "slowest"  # of forty, that percentile is the slowest one
                    p50, late = np.percentile(values, (50, 99 if last == "p99" else 100))
                    found += f"; {name} p50 {p50:.0f} ms, {last} {late:.0f} ms"
            lines.append(f"  {found}")
    return lines or ["no stored run of a server is here; llm-latency load URL makes one"]
