"""What each rung's stages should take on this machine's own ceilings, and what share of the limit was reached."""

from __future__ import annotations

from dataclasses import replace

from llm_latency import models
from llm_latency.experiment.record import RungRecord
from llm_latency.hardware import Ceilings
from llm_latency.roofline import matmul_rate, measured_peak, number_format, parameter_bytes, predict_request


def add_all(records: list[RungRecord], profile: str, ceilings: Ceilings) -> None:
    """Fill in weight_bytes, predicted and share_of_limit of measured records.

    The prediction is the limit of memory and arithmetic alone, without the time that Python and the operators' launches
    take. Decode is held to the bandwidth of a matrix times one vector, prefill to the rate that this model's own
    matrices reach at the prompt's length: a square product would promise more than narrow matrices can keep.
    """
    config = models.load_config(profile)
    rates: dict[str, float] = {}
    for record in records:
        dtype = number_format(record.weights).compute
        if dtype not in rates:
            rates[dtype] = matmul_rate(config, record.prompt_tokens, dtype, ceilings.device)
        peak = measured_peak(ceilings, record.weights)
        stages = predict_request(
            config,
            peak,
            prompt_tokens=record.prompt_tokens,
            new_tokens=record.new_tokens,
            weights=record.weights,
            cache=None if record.cache == "none" else record.cache,
            kv_cache=record.cache != "none",
            prefill_peak=replace(peak, flops_per_s=rates[dtype]),
        )
        record.weight_bytes = parameter_bytes(config, record.weights)
        record.predicted = {name: stage.ms for name, stage in stages.items()}
        record.share_of_limit = {name: stage.ms / record.median_ms(name) for name, stage in stages.items()}
