"""Article B's claims that arithmetic alone can judge. A check is generous to the claim wherever it has a choice."""

from __future__ import annotations

from every_millisecond.claims.check import (
    A100,
    CONDITION,
    HOLDS,
    IMPOSSIBLE,
    MODEL,
    ClaimCheck,
    Figures,
    ffn_compute_bound,
    implied_bandwidth,
    least_number,
    quadratic_share,
    takes,
)
from llm_latency import hardware, roofline


@takes()
def check_B2(here: Figures) -> ClaimCheck:
    """Prefill of 512 tokens in 46 ms, with its parts."""
    peak = roofline.gpu_peak(A100)
    prefill = roofline.predict_request(MODEL, peak, prompt_tokens=512)["prefill"]
    least = {part.name: part.ms for part in prefill.parts if part.name in ("embedding", "head")}
    least["blocks"] = prefill.ms - sum(least.values())
    claimed = {"embedding": 0.5, "head": 0.3, "blocks": 45.0}
    slower = {part: claimed[part] / least[part] for part in claimed}
    if min(slower.values()) < 1 or prefill.ms > 46:
        verdict = IMPOSSIBLE
    else:
        verdict = CONDITION if max(slower.values()) > 10 else HOLDS
    return ClaimCheck(
        "B2",
        "prefill of 512 tokens, 7B in BF16 on an A100: 46 ms (embedding 0.5, blocks 45, head 0.3)",
        f"{prefill.ms:.1f} ms: the total is plausible at {prefill.ms / 46:.0%} of the limit; "
        "a part more than 10x above its own roof is not bound by its work",
        verdict,
        tuple(
            f"{part}: {claimed[part]} ms claimed, {least[part]:.3f} ms at the roof, {slower[part]:.1f}x above it"
            for part in claimed
        ),
    )


@takes()
def check_B4(here: Figures) -> ClaimCheck:
    """A decode step in 6.2 ms."""
    peak, step_ms = roofline.gpu_peak(A100), 6.2
    shape = roofline.SHAPES[MODEL]
    everything = roofline.parameter_bytes(shape)
    least = everything - 2 * shape.vocab * shape.hidden
    rates = [implied_bandwidth(nbytes, step_ms) / 1e12 for nbytes in (everything, least)]
    roof = peak.bandwidth_bytes_per_s / 1e12
    return ClaimCheck(
        "B4",
        "decode 6.2 ms a step, 256 steps in 1589 ms, 7B in BF16 on an A100",
        f"{roof:.2f} TB/s: {least / peak.bandwidth_bytes_per_s * 1e3:.2f} ms a step at least",
        IMPOSSIBLE if rates[1] > roof else HOLDS,
        (
            f"{everything / 1e9:.2f} GB of parameters in {step_ms} ms: {rates[0]:.2f} TB/s",
            f"without the embedding table and the cache, {least / 1e9:.2f} GB: {rates[1]:.2f} TB/s",
            f"256 steps in 1589 ms are {1589 / 256:.2f} ms each: the same figure",
        ),
    )


@takes("prefill_share", "decode_share")
def check_B6(here: Figures) -> ClaimCheck:
    """Prefill is compute-bound, decode bandwidth-bound."""
    peak = roofline.gpu_peak(A100)
    stages = roofline.predict_request(MODEL, peak, prompt_tokens=512, new_tokens=256)
    prompt = least_number(lambda n: ffn_compute_bound(MODEL, peak, n))
    as_stated = stages["prefill"].bound == "compute" and stages["decode"].bound == "bandwidth"
    if not as_stated:
        verdict = IMPOSSIBLE
    else:
        verdict = CONDITION if prompt > 1 else HOLDS
    return ClaimCheck(
        "B6",
        "prefill is compute-bound, O(T d^2); decode is bandwidth-bound",
        f"prefill from {prompt} tokens on, decode for fewer than {prompt} requests at once (7B in BF16 on an A100)",
        verdict,
        (
            f"the ridge: {peak.ridge:.0f} FLOP per byte",
            *(
                f"{name}: {stage.work.intensity:.1f} FLOP per byte, {stage.bound} bound"
                for name, stage in stages.items()
            ),
            f"T d^2 leaves out attention, {quadratic_share(MODEL, 512):.1%} of the FLOPs at 512 tokens",
        ),
        tuple(
            f"{name.removesuffix('_share')}: {value:.0%} of the time at its own limit" for name, value in here.items()
        ),
    )


@takes()
def check_B16(here: Figures) -> ClaimCheck:
    """FP8 on Hopper is another 2-3x over BF16."""
    sheet, claimed = hardware.datasheet_peak("H100-SXM"), (2.0, 3.0)
    rates, nbytes = sheet.fp8_tflops / sheet.bf16_tflops, 2 / 1
    most = max(rates, nbytes)
    if claimed[1] <= most:
        verdict = HOLDS
    else:
        verdict = IMPOSSIBLE
    return ClaimCheck(
        "B16",
        "FP8 on Hopper: another 2-3x over BF16",
        f"at most {most:.2f}x, in either stage, before anything is lost to scales, cache and launches",
        verdict,
        (
            f"prefill: {sheet.fp8_tflops} over {sheet.bf16_tflops} TFLOP/s dense is {rates:.2f}x",
            f"decode: 2 bytes a weight over 1 is {nbytes:.2f}x",
            f"the claim's lower end is {claimed[0]:.0f}x, its upper end {claimed[1]:.0f}x",
        ),
    )
