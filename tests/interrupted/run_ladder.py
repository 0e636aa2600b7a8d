"""`llm-latency run` of two rungs in two rounds: nothing is measured, drawn or judged, all the rest is done."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

from every_millisecond import cli
from every_millisecond.ladder import load_run, prediction, report, runner, twins
from every_millisecond.ladder.record import MEASURED, STAGES
from every_millisecond.ladder.rungs import BASELINE, rung
from llm_latency import hardware

CEILINGS = hardware.Ceilings("cpu", "a chip", 2, 20.0, 20.0, {"float32": 20.0}, {"float32": 20.0})
SIZES = dict(vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
MODEL = LlamaForCausalLM(LlamaConfig(**SIZES))


class Words:
    """Stands for the tokenizer that is saved beside a twin."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


class Instant:
    """Stands for a rung's process: it counts the measurements, and leaves what the baseline leaves."""

    def __init__(self, module: str, arguments: list[str]) -> None:
        self.name, self.folder = (json.loads(arguments[0])[key] for key in ("name", "folder"))

    def read(self, limit_s: float) -> dict:
        with (Path(self.folder).parent / "measured").open("a") as file:
            file.write(f"{self.name}\n")
        if self.name == BASELINE:
            twins.save_twins(MODEL, Words(), Path(self.folder))
        samples = {stage: [1.0] for stage in (*STAGES, "total", "wall")}
        record = rung(self.name).record(MEASURED, samples_ms=samples, prompt_tokens=256, new_tokens=50)
        return {"record": asdict(record)}

    def __enter__(self) -> Instant:
        return self

    def __exit__(self, *_: object) -> None:
        pass


runner.Worker, runner.check_model = Instant, lambda profile, new_tokens: profile
del twins.KINDS["shallow"]  # the narrow one is saved the same way
hardware.ceilings, prediction.matmul_rate = lambda *_, **__: CEILINGS, lambda *_: 1e11
report.stages_figure = report.waterfall_figure = report.prediction_figure = lambda run: Figure((1, 1))
report.claims.recorded, report.claims.ledger = lambda folder: [], lambda findings: []


def main(folder: Path) -> None:
    out = folder / "run"
    cli.run(rungs=f"{BASELINE},sdpa", profile="smollm2-135m", out=out)
    runs = list(out.glob("*/ladder.json"))  # two, where the kill fell behind the first one's report
    for run in runs:
        assert [len(entry["samples_ms"]["wall"]) for entry in load_run(run)["rungs"]] == [2, 2]
        assert run.with_name("report.html").read_text(encoding="utf-8").endswith("</html>")
    measured = (out / "measured").read_text().split()
    assert 4 <= len(measured) <= 4 * len(runs) + 1, "only what the kill fell on is measured again"
    left = [path.name for place in (out, *(run.parent for run in runs)) for path in place.iterdir()]
    assert not {".live.json", ".narrow"} & set(left), left


with tempfile.TemporaryDirectory() as once, contextlib.redirect_stdout(sys.stderr):
    main(Path(once))  # what is imported late is imported before the forks
