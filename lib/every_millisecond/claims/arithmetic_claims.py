"""Claims that arithmetic alone can judge. A check is generous to the claim wherever it has a choice."""

from __future__ import annotations

from every_millisecond.claims.check import (
    A100,
    CONDITION,
    HOLDS,
    IMPOSSIBLE,
    MODEL,
    ClaimCheck,
    Figures,
    claim,
    ffn_compute_bound,
    least_number,
    quadratic_share,
)
from llm_latency import hardware, roofline
from llm_latency.roofline import total


@claim("A3", "prefill 850 to 120 ms, decode 980 to 80 ms, for 256 new tokens of a 7B model on one A100")
def decode_in_80_ms(here: Figures) -> ClaimCheck:
    peak, decode_ms, tokens, gamma, acceptance = roofline.gpu_peak(A100), 80, 256, 5, 0.85
    stages = roofline.predict_request(MODEL, peak, prompt_tokens=256, new_tokens=tokens)
    bf16_ms = stages["decode"].ms / (tokens - 1)
    int4_ms = roofline.SHAPES[MODEL].parameters / 2 / peak.bandwidth_bytes_per_s * 1e3
    needed = {name: tokens * ms / decode_ms for name, ms in (("BF16", bf16_ms), ("INT4", int4_ms))}
    best = (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
    flops = stages["prefill"].work.flops
    shares = [flops / ms * 1e3 / peak.flops_per_s for ms in (850, 120)]
    if needed["BF16"] <= best:
        verdict = HOLDS
    else:
        verdict = CONDITION if needed["INT4"] <= best else IMPOSSIBLE
    return ClaimCheck(
        f"{best:.1f} tokens per pass at the articles' own acceptance of {acceptance} and gamma {gamma}, the draft free",
        verdict,
        (
            f"stages as given: before 15 + 850 + 980 + 10 = {15 + 850 + 980 + 10} ms, after {3 + 120 + 80 + 2} ms",
            f"BF16: a pass takes {bf16_ms:.2f} ms at least, {decode_ms / bf16_ms:.1f} fit into "
            f"{decode_ms} ms, each must yield {needed['BF16']:.1f} tokens",
            f"before, in BF16 and one token a pass: 980 ms is {980 / stages['decode'].ms:.0%} of the least time",
            f"INT4, scales and cache for nothing: {int4_ms:.2f} ms, {decode_ms / int4_ms:.1f} fit, "
            f"{needed['INT4']:.1f} tokens each",
            f"prefill of 256 tokens is {flops / 1e12:.1f} TFLOP, {stages['prefill'].compute_ms:.1f} ms at peak: "
            f"850 ms is {shares[0]:.1%} of the machine, 120 ms is {shares[1]:.1%}",
            f"best published, 245 tok/s (gpt-fast, PyTorch blog 2023-11-30): {tokens / 245 * 1e3:.0f} ms",
        ),
    )


@claim("A4", "prefill time grows with the square of the prompt length", "power", "longest")
def prefill_grows_with_the_square(here: Figures) -> ClaimCheck:
    prompt = 256
    shares = {n: quadratic_share(MODEL, n) for n in (prompt, 1024, 4096, 16384)}
    crossover = least_number(lambda n: quadratic_share(MODEL, n) >= 0.5)
    doubled = total(roofline.prefill_work(MODEL, 2 * prompt)).flops / total(roofline.prefill_work(MODEL, prompt)).flops
    return ClaimCheck(
        f"the quadratic part outweighs the linear one from {crossover:,} tokens on",
        HOLDS if crossover <= prompt or here.get("power", 1) >= 1.8 else CONDITION,
        (
            "attention's share of the FLOPs by tokens: " + ", ".join(f"{n:,}: {s:.1%}" for n, s in shares.items()),
            f"from {prompt} to {2 * prompt} tokens the FLOPs grow {doubled:.2f}x; a square would give 4x",
        ),
        (f"time grows with the power {here['power']:.2f} of the length, up to {here.get('longest', 512):.0f} tokens",)
        if "power" in here
        else (),
    )


@claim("A8", "decode time per token is set by model size and memory bandwidth", "limit_share", "launch_share")
def bandwidth_sets_decode(here: Figures) -> ClaimCheck:
    peak = roofline.gpu_peak(A100)
    steps = {name: roofline.predict_request(name, peak, new_tokens=2)["decode"] for name in roofline.SHAPES}
    weights = {name: step.work.weight_bytes / step.work.bytes for name, step in steps.items()}
    batch = least_number(lambda n: ffn_compute_bound(MODEL, peak, 1, batch=n))
    if any(step.bound != "bandwidth" for step in steps.values()):
        verdict = IMPOSSIBLE
    else:
        verdict = HOLDS if batch == 1 and here.get("limit_share", 1) >= 0.5 else CONDITION
    return ClaimCheck(
        f"for one request; from a batch of {batch} on, arithmetic binds the FFN (A100, BF16)",
        verdict,
        tuple(
            f"{name}: {step.ms:.2f} ms a token, {step.bound} bound, arithmetic alone {step.compute_ms:.3f} ms, "
            f"weights are {weights[name]:.0%} of the bytes"
            for name, step in steps.items()
        ),
        tuple(
            f"{here[name]:.0%} of a measured step is {text}"
            for name, text in (("limit_share", "the time of its bytes"), ("launch_share", "issuing operators"))
            if name in here
        ),
    )


@claim("B2", "prefill of 512 tokens, 7B in BF16 on an A100: 46 ms (embedding 0.5, blocks 45, head 0.3)")
def prefill_in_46_ms(here: Figures) -> ClaimCheck:
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
        f"{prefill.ms:.1f} ms: the total is plausible at {prefill.ms / 46:.0%} of the limit; "
        "a part more than 10x above its own roof is not bound by its work",
        verdict,
        tuple(
            f"{part}: {claimed[part]} ms claimed, {least[part]:.3f} ms at the roof, {slower[part]:.1f}x above it"
            for part in claimed
        ),
    )


@claim("B4", "decode 6.2 ms a step, 256 steps in 1589 ms, 7B in BF16 on an A100")
def a_step_in_6_ms(here: Figures) -> ClaimCheck:
    peak, step_ms = roofline.gpu_peak(A100), 6.2
    shape = roofline.SHAPES[MODEL]
    everything = roofline.parameter_bytes(shape)
    least = everything - 2 * shape.vocab * shape.hidden
    rates = [nbytes / step_ms * 1e3 / 1e12 for nbytes in (everything, least)]
    roof = peak.bandwidth_bytes_per_s / 1e12
    return ClaimCheck(
        f"{roof:.2f} TB/s: {least / peak.bandwidth_bytes_per_s * 1e3:.2f} ms a step at least",
        IMPOSSIBLE if rates[1] > roof else HOLDS,
        (
            f"{everything / 1e9:.2f} GB of parameters in {step_ms} ms: {rates[0]:.2f} TB/s",
            f"without the embedding table and the cache, {least / 1e9:.2f} GB: {rates[1]:.2f} TB/s",
            f"256 steps in 1589 ms are {1589 / 256:.2f} ms each: the same figure",
        ),
    )


@claim("B6", "prefill is compute-bound, O(T d^2); decode is bandwidth-bound", "prefill_share", "decode_share")
def compute_bound_and_bandwidth_bound(here: Figures) -> ClaimCheck:
    peak = roofline.gpu_peak(A100)
    stages = roofline.predict_request(MODEL, peak, prompt_tokens=512, new_tokens=256)
    prompt = least_number(lambda n: ffn_compute_bound(MODEL, peak, n))
    as_stated = stages["prefill"].bound == "compute" and stages["decode"].bound == "bandwidth"
    if not as_stated:
        verdict = IMPOSSIBLE
    else:
        verdict = CONDITION if prompt > 1 else HOLDS
    return ClaimCheck(
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


@claim("B16", "FP8 on Hopper: another 2-3x over BF16")
def fp8_doubles_or_triples(here: Figures) -> ClaimCheck:
    sheet, claimed = hardware.datasheet_peak("H100-SXM"), (2.0, 3.0)
    rates, nbytes = sheet.fp8_tflops / sheet.bf16_tflops, 2 / 1
    most = max(rates, nbytes)
    if claimed[1] <= most:
        verdict = HOLDS
    else:
        verdict = IMPOSSIBLE
    return ClaimCheck(
        f"at most {most:.2f}x, in either stage, before anything is lost to scales, cache and launches",
        verdict,
        (
            f"prefill: {sheet.fp8_tflops} over {sheet.bf16_tflops} TFLOP/s dense is {rates:.2f}x",
            f"decode: 2 bytes a weight over 1 is {nbytes:.2f}x",
            f"the claim's lower end is {claimed[0]:.0f}x, its upper end {claimed[1]:.0f}x",
        ),
    )
