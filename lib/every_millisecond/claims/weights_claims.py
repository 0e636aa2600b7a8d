"""Claims about fewer bits and about compiling: BF16, INT4, torch.compile."""

from __future__ import annotations

from every_millisecond.claims.check import (
    A100,
    CONDITION,
    HOLDS,
    IMPOSSIBLE,
    MODEL,
    NOT_MEASURED,
    ClaimCheck,
    Figures,
    claim,
    from_parts,
    part_lines,
    within,
)
from every_millisecond.claims.published import PUBLISHED
from llm_latency import hardware, roofline


@claim(
    "B8",
    'torch.compile(mode="reduce-overhead"): 10-30% faster, slow first call',
    "gain",
    "first_call_ms",
    "step_ms",
)
def compile_gains(here: Figures) -> ClaimCheck:
    published = PUBLISHED["compiled"].value / PUBLISHED["eager"].value
    parts = {}
    if "gain" in here:
        parts["10 to 30% faster"] = within(here["gain"], 1.1, 1.3)
    if "first_call_ms" in here and "step_ms" in here:
        parts["slow first call (over 10 steps)"] = here["first_call_ms"] > 10 * here["step_ms"]
    measured = [f"{here['gain']:.2f} times as fast"] if "gain" in here else []
    if "first_call_ms" in here:
        measured.append(f"first call {here['first_call_ms'] / 1e3:.1f} s")
    return ClaimCheck(
        "whatever share of a step is not work: Python and launches, and traffic between fused operators",
        from_parts(parts) if "gain" in here else CONDITION if not within(published, 1.1, 1.3) else NOT_MEASURED,
        (
            f"{PUBLISHED['compiled']}",
            f"that is {published:.1f}x over {PUBLISHED['eager'].value} tok/s: launches were most of the step",
        ),
        part_lines(parts) + tuple(measured),
    )


@claim("B9", "BF16 about 2x over FP32", "prefill_gain", "decode_gain")
def bf16_doubles(here: Figures) -> ClaimCheck:
    sheet = hardware.datasheet_peak(A100)
    limits = {
        "prefill": sheet.bf16_tflops / sheet.fp32_tflops,
        "decode": roofline.parameter_bytes(MODEL, "float32") / roofline.parameter_bytes(MODEL, "bfloat16"),
    }
    gains = {stage: here[f"{stage}_gain"] for stage in limits if f"{stage}_gain" in here} or limits
    parts = {f"about 2 times in {stage} (1.6 to 2.5)": within(gain, 1.6, 2.5) for stage, gain in gains.items()}
    verdict = from_parts(parts)
    if max(limits.values()) < 1.6:
        verdict = IMPOSSIBLE
    return ClaimCheck(
        f"decode {limits['decode']:.1f}x by its bytes, prefill {limits['prefill']:.0f}x by its multipliers (A100)",
        verdict,
        (
            f"decode: 4 bytes a weight over 2 is {limits['decode']:.2f}x",
            f"prefill: {sheet.bf16_tflops:g} over {sheet.fp32_tflops:g} TFLOP/s is {limits['prefill']:.1f}x",
        ),
        (part_lines(parts) + tuple(f"{stage} {gain:.2f} times" for stage, gain in gains.items())) if here else (),
    )


@claim(
    "B11", "INT4 weights: 75% smaller, 20-50% faster when memory-bound, under 2% loss", "decode_gain", "loss", "smaller"
)
def int4_weights(here: Figures) -> ClaimCheck:
    whole = roofline.parameter_bytes(MODEL, "bfloat16")
    smaller = here.get("smaller", 1 - roofline.parameter_bytes(MODEL, "int4") / whole)
    bare = 1 - 4 / 16
    peak = roofline.gpu_peak(A100)
    limit = 1 / (1 - smaller)
    parts = {"75% smaller, scales counted": smaller >= bare - 0.01}
    if "decode_gain" in here:
        parts["at least 20% faster"] = here["decode_gain"] >= 1.2
    if "loss" in here:
        parts["under 2% loss"] = here["loss"] < 0.02
    verdict = from_parts(parts) if any(parts.values()) or not here else IMPOSSIBLE
    if not here:
        verdict = HOLDS if all(parts.values()) else CONDITION
    gain = PUBLISHED["int4"].value / PUBLISHED["compiled"].value
    return ClaimCheck(
        f"{limit:.1f}x faster at the roof; the loss depends on the method and on where the weights come from",
        verdict,
        (
            f"bits alone: {bare:.0%} smaller; in blocks of 32 with scale and zero {smaller:.0%}",
            f"one request on {peak.name}: {PUBLISHED['int4'].value} over {PUBLISHED['compiled'].value} tok/s is "
            f"{gain:.2f}x ({PUBLISHED['int4'].source})",
        ),
        (
            part_lines(parts)
            + tuple(
                text.format(here[name])
                for name, text in (("decode_gain", "decode {:.2f} times as fast"), ("loss", "perplexity {:+.1%}"))
                if name in here
            )
        )
        if here
        else (),
    )
