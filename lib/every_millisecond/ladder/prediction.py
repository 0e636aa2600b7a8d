"""What each rung's stages should take on this machine's own ceilings, and what share of the limit was reached."""

from __future__ import annotations

from dataclasses import replace

from every_millisecond.laboratory.counting import matmul_rate
from every_millisecond.ladder.record import RungRecord
from llm_latency import models
from llm_latency.hardware import Ceilings
from llm_latency.roofline import (
    forward_work,
    measured_peak,
    number_format,
    parameter_bytes,
    predict_request,
    predict_stage,
)


def add_predictions(records: list[RungRecord], profile: str, ceilings: Ceilings) -> None:
    """Fill in weight_bytes, predicted and share_of_limit of measured records.

    The limit is memory and arithmetic alone; `share_of_limit` is its share of the measured time. The prediction adds
    the time of issuing the operators, where the narrow twin of that kind of decoder was measured. Decode is held to the
    bandwidth of a matrix times one vector, prefill to the rate that this model's own matrices reach at the prompt's
    length: a square product would promise more than narrow matrices can keep. A speculative decoder's passes yield
    several tokens each; its draft counts for nothing here.
    """
    config = models.load_config(profile)
    rates: dict[str, float] = {}
    for record in records:
        dtype = number_format(record.weights).compute
        for name in (dtype, "float32"):
            if name not in rates:
                rates[name] = matmul_rate(config, record.prompt_tokens, name, ceilings.device)
        rate = max(rates[dtype], rates["float32"])  # as `measured_peak` has it
        peak = measured_peak(ceilings, record.weights)

        def stages(launch_ms: float, record=record, peak=peak, rate=rate) -> dict[str, float]:
            found = predict_request(
                config,
                peak,
                prompt_tokens=record.prompt_tokens,
                new_tokens=record.new_tokens,
                weights=record.weights,
                cache=None if record.cache == "none" else record.cache,
                kv_cache=record.cache != "none",
                prefill_peak=replace(peak, flops_per_s=rate),
                launch_ms_per_pass=launch_ms,
            )
            ms = {name: stage.ms for name, stage in found.items()}
            if record.kept_tokens:
                rest = record.prompt_tokens - record.kept_tokens
                work = forward_work(
                    config, rest, context=record.kept_tokens, weights=record.weights, cache=record.cache
                )
                at_shape = replace(peak, flops_per_s=rate)
                ms["prefill"] = predict_stage("prefill", work, at_shape, launch_ms=launch_ms).ms
            return ms | {"decode": ms["decode"] / (record.tokens_per_pass or 1.0)}

        record.weight_bytes = parameter_bytes(config, record.weights)
        record.predicted = stages(record.launch_ms or 0.0)
        record.share_of_limit = {name: ms / record.median_ms(name) for name, ms in stages(0.0).items()}
