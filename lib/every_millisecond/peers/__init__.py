"""`make peers`: the fast decoder beside what a user would pick instead, on the same weights, in one run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from every_millisecond.peers.contenders import CONTENDERS, Contender, contender, guesses
from every_millisecond.peers.race import BASELINE, MEASURED, PeerRecord, run_race
from every_millisecond.request import NEW_TOKENS, standard_prompt
from llm_latency import files, models
from llm_latency.text.prompt import encode_prompt

__all__ = ["CONTENDERS", "Contender", "PeerRecord", "contender", "guesses", "main", "run_race", "table"]


def table(result: dict) -> Table:
    """The race as a table: medians, and the decode ratio against HF FP32 and llama.cpp."""
    machine = result["machine"]
    where = machine["gpu"] or machine["cpu"]
    shown = Table(title=f"{where}, {machine['threads']} threads, {result['date']}", title_justify="left")
    against = [peer for peer in (BASELINE, "llama-cpp", "llama-cpp-plain") if peer in result["ratios"]]
    for header in ("", "prefill (ms)", "decode (tok/s)", *(f"decode against {peer}" for peer in against)):
        shown.add_column(header, justify="left" if not header else "right")
    for peer in result["peers"]:
        if peer["status"] != MEASURED:
            shown.add_row(peer["title"], escape(f"{peer['status']}: {peer['reason']}"))
            continue
        found = result["ratios"][peer["name"]]
        cells = [found[f"decode_vs_{other}"] for other in against]
        shown.add_row(
            peer["title"],
            f"{median(peer['prefill_ms']):.1f}",
            f"{found['tokens_per_second']:.1f}",
            *(f"{c['median']:.2f} times ({c['low']:.2f} to {c['high']:.2f})" for c in cells),
        )
    return shown


def main(out: Path = Path("results"), profile: str | None = None, names: list[str] | None = None) -> int:
    """Run the race on the standard request, print its table, write a dated JSON into `out`. Returns the exit status:
    1 if one of ours failed, else 0; a peer that is not installed is reported and fails nothing."""
    console = Console()
    if profile is None or not Path(profile).is_dir():
        profile = models.choose_profile(profile)[0].name
    tokenizer = models.load_tokenizer(profile)
    prompt = encode_prompt(tokenizer, standard_prompt(tokenizer))
    chosen = CONTENDERS if names is None else [contender(name) for name in names]
    result = run_race(
        chosen,
        prompt,
        NEW_TOKENS,
        profile=profile,
        progress=lambda text: console.print(text, style="dim", markup=False),
    )
    console.print(table(result))
    machine = result["machine"]
    label = f"{machine['gpu'] or machine['cpu']} {machine['threads']} threads".lower()
    label = re.sub(r"[^a-z0-9]+", "-", label).strip("-")
    path = out / f"{result['date']}-{label}-peers.json"
    files.write_atomically(path, json.dumps(result, indent=1))
    console.print(f"written to {path}", highlight=False, markup=False)
    return int(any(peer["ours"] and peer["status"] != MEASURED for peer in result["peers"]))
