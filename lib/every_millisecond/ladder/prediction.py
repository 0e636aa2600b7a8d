"""What physics allows a rung on this machine, and what its own parts, each timed alone, add up to."""

from __future__ import annotations

from dataclasses import replace

from every_millisecond.laboratory.counting import matmul_rate
from every_millisecond.ladder.record import RungRecord
from llm_latency import models
from llm_latency.hardware import Ceilings
from llm_latency.roofline import (
    Peak,
    Work,
    decode_work,
    forward_work,
    measured_peak,
    number_format,
    parameter_bytes,
    predict_stage,
    total,
)


def add_predictions(records: list[RungRecord], profile: str, ceilings: Ceilings) -> None:
    """Fill in weight_bytes, predicted and share_of_limit of measured records.

    The limit is physics, memory and arithmetic alone; `share_of_limit` is its share of the measured time. Bytes are
    held to the bandwidth of plain reading, whatever the format: a matrix times one vector shows a kernel's own rate.
    Arithmetic is held to the rate that this model's own matrices reach at the prompt's length, in PyTorch or in the
    rung's own decoder, whichever is higher: a square product would promise more than narrow matrices can keep.

    The prediction is no physics: it adds up what the rung's kind of decoder does, as its twins showed. That is its own
    matrix kernels' rate at the number of rows that a pass has, a matrix times one vector at the rate of that kernel,
    and the time of issuing the operators. A speculative decoder's passes check several tokens, and beside them stand
    the draft's guesses, its reading of the prompt, and their launches.
    """
    config = models.load_config(profile)
    rates: dict[str, float] = {}
    for record in records:
        dtype = number_format(record.weights).compute
        for name in (dtype, "float32"):
            if name not in rates:
                rates[name] = matmul_rate(config, record.prompt_tokens, name, ceilings.device)
        torch_rate = max(rates[dtype], rates["float32"])  # as `measured_peak` has it
        peak = measured_peak(ceilings, record.weights)
        if record.activations:
            peak = replace(peak, bandwidth_bytes_per_s=ceilings.read_gbps * 1e9)
        best = dict.fromkeys(("prefill", "pass"), max([torch_rate, *record.rates.values()]))
        memory = max(ceilings.read_gbps, *ceilings.gemv_gbps.values()) * 1e9
        limit = _stages(record, config, replace(peak, bandwidth_bytes_per_s=memory), best, launches=False)
        own = {"prefill": torch_rate, "pass": torch_rate} | record.rates
        record.weight_bytes = parameter_bytes(config, record.weights)
        record.predicted = _stages(record, config, peak, own, launches=True)
        record.share_of_limit = {name: ms / record.median_ms(name) for name, ms in limit.items()}


def _stages(
    record: RungRecord, config: object, peak: Peak, rates: dict[str, float], *, launches: bool
) -> dict[str, float]:
    """ms of prefill and decode, with FLOP/s of "prefill" and "pass"; without launches the draft, too, is left out."""
    launch_ms = (record.launch_ms or 0.0) if launches else 0.0
    for_prompt, for_pass = (replace(peak, flops_per_s=rates[name]) for name in ("prefill", "pass"))
    options = dict(weights=record.weights, cache=None if record.cache == "none" else record.cache)
    rest = record.prompt_tokens - record.kept_tokens
    prompt = _as_counted(record, forward_work(config, rest, context=record.kept_tokens, **options))
    prefill = predict_stage("prefill", prompt, for_prompt, launch_ms=launch_ms)
    steps = record.new_tokens - 1
    if record.cache == "none":
        answer = decode_work(config, record.prompt_tokens, record.new_tokens, kv_cache=False, **options)
        decode = predict_stage("decode", answer, for_prompt, launch_ms=launch_ms * steps)
        return {"prefill": prefill.ms, "decode": decode.ms}
    passes, rows = steps / (record.tokens_per_pass or 1.0), round(record.rows_per_pass or 1)
    middle = record.prompt_tokens + steps // 2  # what is read grows with the text, evenly
    work = _as_counted(record, forward_work(config, rows, context=middle, logits="all", **options))
    one = predict_stage("decode", work, for_pass, launch_ms=launch_ms).ms
    if not launches:
        return {"prefill": prefill.ms, "decode": passes * one}
    guess_ms = (record.draft_bytes or 0) / peak.bandwidth_bytes_per_s * 1e3
    draft_ms = passes * (rows - 1) * guess_ms + (record.draft_prefill_ms or 0.0)
    return {"prefill": prefill.ms, "decode": passes * one + draft_ms}


def _as_counted(record: RungRecord, parts: dict[str, Work]) -> dict[str, Work]:
    """Parts of a pass with as many weight bytes as the decoder counts: the formula knows one format for all matrices,
    and a decoder may keep its head in a wider one."""
    if record.step_bytes is None:
        return parts
    missing = record.step_bytes - total(parts).weight_bytes
    head = parts["head"]
    return parts | {"head": replace(head, weight_bytes=max(0, head.weight_bytes + missing))}
