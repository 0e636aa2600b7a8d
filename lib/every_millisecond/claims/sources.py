"""Where the figures of a claim come from: the learner's notebooks, a run of the ladder, dated files in results/."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from every_millisecond.claims.check import CHECKS, Figure, Figures, storable
from every_millisecond.ladder import contributions
from every_millisecond.ladder.record import MEASURED, RungRecord
from every_millisecond.notebook import scorecard, show
from every_millisecond.notebook.outcome import Interval
from llm_latency import files, roofline

KIND = "claims"


@dataclass(frozen=True, slots=True)
class Findings:
    """What one machine found on one day: figures by claim.

    values: {"A4": {"power": 0.77}}. here: they are this machine's and this learner's own, not a recorded run's.
    """

    source: str
    machine: str
    date: str
    values: Mapping[str, Figures]
    here: bool = False

    def __str__(self) -> str:
        return f"{'measured here' if self.here else 'recorded'}, {self.date}, {self.machine} ({self.source})"


def _own_file() -> Path:
    return scorecard.path().with_name("claims.json")


def _known(stored: Mapping[str, Mapping]) -> dict[str, dict]:
    """What this edition's claims take; an earlier edition kept figures under names that are no more."""
    return {
        id: {"date": entry["date"], "figures": {k: v for k, v in entry["figures"].items() if k in CHECKS[id].figures}}
        for id, entry in stored.items()
        if id in CHECKS
    }


def settle(claim: str, **figures: Figure) -> None:
    """Judge a claim by figures just measured, print the verdict, and keep the figures for the ledger of notebook 13.

    A figure is a number or, better, what was measured with its spread: a `Ratio` or an `Interval`. Kept beside the
    scorecard, on this machine only; figures of the same name are replaced. Raises KeyError for an unknown claim or
    figure, ValueError for a figure that is not finite.
    """
    if claim not in CHECKS:
        raise KeyError(f"no claim {claim!r}; known: {', '.join(CHECKS)}")
    CHECKS[claim](figures)  # refuses a wrong figure before anything is kept

    def add(stored: dict) -> dict:
        stored = _known(stored)
        found = stored.get(claim, {}).get("figures", {}) | {name: storable(value) for name, value in figures.items()}
        return stored | {claim: {"date": datetime.date.today().isoformat(), "figures": found}}

    kept = {id: entry["figures"] for id, entry in files.update_json(_own_file(), add, default={}).items()}
    show.here(CHECKS[claim](kept[claim], kept).line)


def own() -> Findings:
    """What this learner's notebooks have found so far, with the date of the latest."""
    stored = _known(files.read_json(_own_file(), default={}))
    latest = max((entry["date"] for entry in stored.values()), default="-")
    values = {claim: entry["figures"] for claim, entry in stored.items()}
    return Findings("your notebooks", "this machine", latest, values, here=True)


def machine_name(machine: Mapping[str, object]) -> str:
    """One short name of a record's machine, with its threads."""
    kind = f" ({machine['cpu_capability']})" if machine.get("cpu_capability") else ""
    return str(machine.get("gpu") or f"{machine['cpu']}{kind}, {machine['threads']} threads")


def from_ladder(run: Mapping, *, source: str = "ladder", here: bool = False) -> Findings:
    """The figures that a run of the ladder holds for the claims."""
    machine = run["machine"]
    gpu = str(machine.get("gpu") or "")
    rungs = {entry["name"]: RungRecord(**entry) for entry in run["rungs"] if entry["status"] == MEASURED}
    values: dict[str, dict[str, Figure]] = {}

    def put(claim: str, **figures: Figure | None) -> None:
        found = {
            name: value if isinstance(value, Interval) else float(value)
            for name, value in figures.items()
            if value is not None
        }
        if found:
            values.setdefault(claim, {}).update(found)

    def gain(slow: str, fast: str, stage: str) -> Interval | None:
        return _gain(rungs[slow], rungs[fast], stage) if {slow, fast} <= set(rungs) else None

    baseline = rungs.get(run["baseline"])
    if baseline is not None:
        best = contributions.best(list(rungs.values()))
        put("A2", speedup=gain(baseline.name, best.name, "wall"), perplexity_change=_change(baseline, best))
        put("A2", baseline_ms=baseline.median_ms("wall"), best_ms=best.median_ms("wall"))
        put("A2", new_tokens=baseline.new_tokens, tokens_per_pass=best.tokens_per_pass, a100="A100" in gpu)
        if run["profile"] in roofline.SHAPES:
            put("A2", parameters=roofline.SHAPES[run["profile"]].parameters)
        put("A14", ends_share=_ends(baseline), ends_share_best=_ends(best))
        decode_share = baseline.median_ms("decode") / baseline.median_ms("wall")
        put("B5", decode_share=decode_share, new_tokens=baseline.new_tokens)
        shares = baseline.share_of_limit
        put("A8", limit_share=shares.get("decode"), launch_share=_launch_share(baseline))
        put("B6", prefill_share=shares.get("prefill"), decode_share=shares.get("decode"))
    put("B9", prefill_gain=gain("sdpa", "half", "prefill"), decode_gain=gain("sdpa", "half", "decode"))
    if "B9" in values:
        put("B9", prefill_tokens=rungs["half"].prompt_tokens or None)
    put("B8", gain=gain("half", "compiled", "decode"))
    if "compiled" in rungs and rungs["compiled"].first_ms:
        compiled = rungs["compiled"]
        step_ms = compiled.median_ms("decode") / (compiled.new_tokens - 1)
        put("B8", first_call_ms=compiled.first_ms, step_ms=step_ms, cuda=bool(gpu))
    if "fast" in rungs and "int4" in rungs:
        fewer = (rungs[name].weight_bytes for name in ("int4", "fast"))
        int4_bytes, bf16_bytes = fewer
        put("B11", decode_gain=gain("fast", "int4", "decode"), loss=_change(rungs["fast"], rungs["int4"]))
        if int4_bytes and bf16_bytes:
            put("B11", smaller=1 - int4_bytes / bf16_bytes)
    speculation = _speculation(list(rungs.values()))
    put("A9", **speculation)
    put("B14", **{name: value for name, value in speculation.items() if name != "gamma"})
    put("A10", **{name: value for name, value in speculation.items() if name not in ("gain", "gamma")})
    return Findings(source, machine_name(machine), run["date"], values, here)


def _gain(slow: RungRecord, fast: RungRecord, stage: str) -> Interval:
    """How many times as long one rung's stage takes as another's; their spreads as far apart and as near as can be."""
    (slow_low, slow_high), (fast_low, fast_high) = slow.spread_ms(stage), fast.spread_ms(stage)
    return Interval(slow.median_ms(stage) / fast.median_ms(stage), slow_low / fast_high, slow_high / fast_low)


def _speculation(records: list[RungRecord]) -> dict[str, Figure | None]:
    """Of the speculative rung that gains most over the fastest plain one with the same weights: its gain in decode."""
    best: dict[str, Figure | None] = {}
    for record in records:
        plain = [
            other
            for other in records
            if other.acceptance is None
            and (other.weights, other.cache, other.activations) == (record.weights, record.cache, record.activations)
        ]
        if record.acceptance is None or record.own_request or not plain:
            continue
        gain = _gain(min(plain, key=lambda other: other.median_ms("decode")), record, "decode")
        if not best or gain.median > best["gain"].median:
            gamma = None if record.rows_per_pass is None else record.rows_per_pass - 1
            best = {"gain": gain, "acceptance": record.acceptance, "cost_ratio": record.draft_cost, "gamma": gamma}
    return best


def _launch_share(record: RungRecord) -> float | None:
    if record.launch_ms is None:
        return None
    return record.launch_ms * (record.new_tokens - 1) / record.median_ms("decode")


def _ends(record: RungRecord) -> float:
    return (record.median_ms("tokenise") + record.median_ms("detokenise")) / record.median_ms("wall")


def _change(before: RungRecord, after: RungRecord) -> float | None:
    if before.perplexity is None or after.perplexity is None:
        return None
    return after.perplexity / before.perplexity - 1


def from_gpu_check(report: Mapping, *, source: str) -> Findings:
    """B13 from a run of `make gpu`: the best kernel over SDPA's "math", which keeps the scores in memory."""
    gains: dict[str, list[float]] = {"prefill": [], "decode": []}
    for row in report.get("kernels", []):
        times = row.get("median_ms", {})
        if "sdpa:math" in times and len(times) > 1 and not row.get("interpreted"):
            gains[row["case"]["kind"]].append(times["sdpa:math"] / min(times.values()))
    found = {f"{kind}_gain": sorted(ratios)[len(ratios) // 2] for kind, ratios in gains.items() if ratios}
    values = {"B13": found | {"cuda": 1.0}} if found else {}
    return Findings(source, machine_name(report["machine"]), report["date"], values)


def recorded(folder: Path) -> list[Findings]:
    """What the dated files of a results folder hold for the claims, oldest first. Other files are passed over.

    Raises ValueError that names a file which is not JSON.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        content = files.read_json(path, default={})
        if not isinstance(content, dict):
            continue
        if content.get("kind") == KIND:
            found.append(Findings(path.name, machine_name(content["machine"]), content["date"], content["figures"]))
        elif "kernels" in content:
            found.append(from_gpu_check(content, source=path.name))
        elif "rungs" in content and not content["profile"].endswith("-shape"):
            found.append(from_ladder(content, source=path.name))
    return sorted((entry for entry in found if entry.values), key=lambda entry: (entry.date, entry.source))


def results_folder() -> Path:
    """The checkout's results/, which may not be there where the library is installed elsewhere."""
    return Path(__file__).resolve().parents[3] / "results"
