"""Article A's claims that arithmetic alone can judge. A check is generous to the claim wherever it has a choice."""

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
    implied_flop_rate,
    least_number,
    passes_that_fit,
    quadratic_share,
    takes,
)
from llm_latency import roofline
from llm_latency.roofline import total


@takes()
def check_A3(here: Figures) -> ClaimCheck:
    """Decode of 256 tokens in 80 ms."""
    peak, decode_ms, tokens, gamma, acceptance = roofline.gpu_peak(A100), 80, 256, 5, 0.85
    stages = roofline.predict_request(MODEL, peak, prompt_tokens=256, new_tokens=tokens)
    bf16_ms = stages["decode"].ms / (tokens - 1)
    int4_ms = roofline.SHAPES[MODEL].parameters / 2 / peak.bandwidth_bytes_per_s * 1e3
    needed = {name: tokens / passes_that_fit(decode_ms, ms) for name, ms in (("BF16", bf16_ms), ("INT4", int4_ms))}
    best = (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
    flops = stages["prefill"].work.flops
    shares = [implied_flop_rate(flops, ms) / peak.flops_per_s for ms in (850, 120)]
    if needed["BF16"] <= best:
        verdict = HOLDS
    else:
        verdict = CONDITION if needed["INT4"] <= best else IMPOSSIBLE
    return ClaimCheck(
        "A3",
        "prefill 850 to 120 ms, decode 980 to 80 ms, for 256 new tokens of a 7B model on one A100",
        f"{best:.1f} tokens per pass at the articles' own acceptance of {acceptance} and gamma {gamma}, the draft free",
        verdict,
        (
            f"stages as given: before 15 + 850 + 980 + 10 = {15 + 850 + 980 + 10} ms, after {3 + 120 + 80 + 2} ms",
            f"BF16: a pass takes {bf16_ms:.2f} ms at least, {passes_that_fit(decode_ms, bf16_ms):.1f} fit into "
            f"{decode_ms} ms, each must yield {needed['BF16']:.1f} tokens",
            f"before, in BF16 and one token a pass: 980 ms is {980 / stages['decode'].ms:.0%} of the least time",
            f"INT4, scales and cache for nothing: {int4_ms:.2f} ms, {passes_that_fit(decode_ms, int4_ms):.1f} fit, "
            f"{needed['INT4']:.1f} tokens each",
            f"prefill of 256 tokens is {flops / 1e12:.1f} TFLOP, {stages['prefill'].compute_ms:.1f} ms at peak: "
            f"850 ms is {shares[0]:.1%} of the machine, 120 ms is {shares[1]:.1%}",
            f"best published, 245 tok/s (gpt-fast, PyTorch blog 2023-11-30): {tokens / 245 * 1e3:.0f} ms",
        ),
    )


@takes("power", "longest")
def check_A4(here: Figures) -> ClaimCheck:
    """Prefill time grows with the square of the prompt length."""
    prompt = 256
    shares = {n: quadratic_share(MODEL, n) for n in (prompt, 1024, 4096, 16384)}
    crossover = least_number(lambda n: quadratic_share(MODEL, n) >= 0.5)
    doubled = total(roofline.prefill_work(MODEL, 2 * prompt)).flops / total(roofline.prefill_work(MODEL, prompt)).flops
    return ClaimCheck(
        "A4",
        "prefill time grows with the square of the prompt length",
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


@takes("limit_share", "launch_share")
def check_A8(here: Figures) -> ClaimCheck:
    """Decode time per token is set by model size and memory bandwidth."""
    peak = roofline.gpu_peak(A100)
    steps = {name: roofline.predict_request(name, peak, new_tokens=2)["decode"] for name in roofline.SHAPES}
    weights = {name: step.work.weight_bytes / step.work.bytes for name, step in steps.items()}
    batch = least_number(lambda n: ffn_compute_bound(MODEL, peak, 1, batch=n))
    if any(step.bound != "bandwidth" for step in steps.values()):
        verdict = IMPOSSIBLE
    else:
        verdict = HOLDS if batch == 1 and here.get("limit_share", 1) >= 0.5 else CONDITION
    return ClaimCheck(
        "A8",
        "decode time per token is set by model size and memory bandwidth",
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
