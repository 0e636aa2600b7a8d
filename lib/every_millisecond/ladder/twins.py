"""What a prediction needs to know of a rung's kind of decoder, from two small models that the rung itself serves.

The narrow twin has the model's layers and next to no width: its time is what issuing the operators takes. The shallow
twin has the width and few layers: its rate is what that decoder's arithmetic reaches, at the rows that a pass has.
Neither is the model, so what they foretell of it is a prediction.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from every_millisecond.laboratory.counting import TWIN_IDS, narrow_twin, shallow_twin
from every_millisecond.ladder.record import RungRecord
from every_millisecond.ladder.speculation import OWN_DRAFT
from llm_latency import models
from llm_latency.generation import CompiledStepper, RecomputeStepper, Stepper
from llm_latency.roofline import forward_work, total
from llm_latency.speculative import SpeculativeDecoder
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape
from llm_latency.timing import measure

KINDS = {"narrow": narrow_twin, "shallow": shallow_twin}
ROUNDS = dict(warmup=3, repeats=15)
ANSWERS = 3  # of a speculative twin


def save_twins(model, tokenizer, folder: Path) -> None:
    """Write both twins of a transformers model as folders, each complete or not at all, with a draft of their own."""
    for name, make in KINDS.items():
        if (folder / name).exists():
            continue
        work = folder / f".{name}"  # one name, so that what a killed process left of it goes
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            twin = make(model)
            twin.save_pretrained(work)
            tokenizer.save_pretrained(work)
            draft = FeatureLayer(FeatureShape.of_config(twin.config), torch.arange(TWIN_IDS))
            save_file(draft.state_dict(), work / OWN_DRAFT)
            os.rename(work, folder / name)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def measure_twins(record: RungRecord, build: Callable[[str], Stepper], stepper: Stepper, folder: Path) -> None:
    """Fill in launch_ms, rates and draft_prefill_ms of a rung with the twins in `folder`; step_bytes of itself.

    What cannot be made or tells nothing is left out: compiled code would be compiled again, and a kernel may not take
    matrices so small.
    """
    record.step_bytes = stepper.step_bytes
    if isinstance(stepper, CompiledStepper):
        return
    rows = round(record.rows_per_pass or 1)
    try:
        narrow, layers = build(str(folder / "narrow")), models.load_config(str(folder / "narrow")).num_hidden_layers
        launch_ms = _pass_ms(narrow, record.prompt_tokens, rows)
        record.launch_ms = _speculative_ms(narrow, record)[0] if isinstance(narrow, SpeculativeDecoder) else launch_ms
        shallow, config = build(str(folder / "shallow")), models.load_config(str(folder / "shallow"))
        if isinstance(shallow, SpeculativeDecoder):
            record.draft_prefill_ms = _speculative_ms(shallow, record)[1]
        launch_ms *= config.num_hidden_layers / layers
        passes = {"prefill": (record.kept_tokens, record.prompt_tokens - record.kept_tokens)}
        if not isinstance(stepper, RecomputeStepper):
            passes["pass"] = (record.prompt_tokens, rows)
        for name, (context, count) in passes.items():
            work = forward_work(config, count, context=context, weights=record.weights)
            whole_ms = _pass_ms(shallow, context, count)
            record.rates[name] = total(work).flops / max(whole_ms - launch_ms, 0.1 * whole_ms) * 1e3
    except (ValueError, RuntimeError, OSError):
        return


def _pass_ms(stepper: Stepper, context: int, rows: int) -> float:
    """Time of reading `rows` tokens behind `context` others."""
    ids = torch.arange(context + rows, device=stepper.device)[None] % TWIN_IDS
    if isinstance(stepper, RecomputeStepper) or not context:
        return measure(lambda: stepper.prefill(ids), **ROUNDS, device=stepper.device).median_ms
    stepper.prefill(ids[:, :context])

    def read() -> None:
        stepper.step(ids[:, context:])
        stepper.crop_to(context)

    return measure(read, **ROUNDS, device=stepper.device).median_ms


def _speculative_ms(decoder: SpeculativeDecoder, record: RungRecord) -> tuple[float, float]:
    """Time of a cycle, and of the draft's reading of the prompt."""
    ids = torch.arange(record.prompt_tokens)[None] % TWIN_IDS
    outputs = [decoder.generate(ids, record.new_tokens) for _ in range(ANSWERS + 1)][1:]
    prompts = [output.stage_ms["draft prefill"] for output in outputs]
    cycles = [(sum(o.stage_ms.values()) - ms) / len(o.cycles) for o, ms in zip(outputs, prompts, strict=True)]
    return median(cycles), median(prompts)
