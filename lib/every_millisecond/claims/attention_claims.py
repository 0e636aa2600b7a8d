"""Claims about attention: its memory, its share of the prefill, and what a fused kernel gains by length."""

from __future__ import annotations

from itertools import pairwise

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
    least_number,
    part_lines,
    within,
)
from every_millisecond.claims.published import PUBLISHED
from llm_latency import roofline

# By hand, the scores are written, read and written by the mask, read and written by softmax, and read by the second
# product. FP32, generous to whoever claims a gain from not doing so.
SCORE_PASSES, SCORE_BYTES = 6, 4


def scores_ms(tokens: int) -> float:
    """ms that the traffic of all scores of a prefill takes at the roof (7B on an A100)."""
    shape, peak = roofline.SHAPES[MODEL], roofline.gpu_peak(A100)
    nbytes = shape.layers * shape.heads * tokens**2 * SCORE_PASSES * SCORE_BYTES
    return nbytes / peak.bandwidth_bytes_per_s * 1e3


def fused_gain(tokens: int, *, alone: bool = False) -> float:
    """How many times faster a kernel that keeps the scores on the chip makes a prefill, or its attention, at most."""
    prefill = roofline.predict_request(MODEL, roofline.gpu_peak(A100), prompt_tokens=tokens)["prefill"]
    ms = next(part.ms for part in prefill.parts if part.name == "attention") if alone else prefill.ms
    return (ms + scores_ms(tokens)) / ms


def _by_length(here: Figures, prefix: str) -> dict[int, float]:
    found = {int(name.removeprefix(prefix)): value for name, value in here.items() if name.startswith(prefix)}
    return dict(sorted(found.items()))


@claim(
    "A5",
    "FlashAttention: memory n instead of n^2, exact, 2-3x faster prefill; the first optimisation to do",
    "memory_less",
    "max_error",
    "gain_256",
    "gain_1024",
)
def flash_attention(here: Figures) -> ClaimCheck:
    doubles = least_number(lambda n: fused_gain(n) >= 2, limit=1 << 16)
    scores = {n: roofline.SHAPES[MODEL].heads * n**2 * SCORE_BYTES for n in (256, 8192)}
    gains = _by_length(here, "gain_")
    parts = {}
    if "memory_less" in here:
        parts["memory of a line, not of a square (over 10 times less at 4,096 tokens)"] = here["memory_less"] > 10
    if "max_error" in here:
        parts["exact (within 1e-4 of the reference)"] = here["max_error"] < 1e-4
    for n, gain in gains.items():
        parts[f"prefill at least 2 times faster at {n} tokens"] = gain >= 2
    if here.get("memory_less", 11) <= 10 or here.get("max_error", 0) >= 1e-4:
        verdict = IMPOSSIBLE
    else:
        verdict = from_parts(parts) if gains else CONDITION if doubles > 256 else HOLDS
    return ClaimCheck(
        f"twice the prefill from {doubles:,} tokens on (7B on an A100), memory at every length",
        verdict,
        (
            f"scores of one layer: {scores[256] / 1e6:.0f} MB at 256 tokens, {scores[8192] / 1e9:.1f} GB at 8,192; "
            "a block of 128 by 128 does not grow",
            f"whole prefill, scores for nothing: at most {fused_gain(256):.2f}x at 256 tokens, "
            f"{fused_gain(1024):.2f}x at 1,024, {fused_gain(8192):.2f}x at 8,192",
        ),
        part_lines(parts) + tuple(f"{gain:.2f} times at {n} tokens" for n, gain in gains.items()),
    )


@claim(
    "A11",
    "FlashAttention pays above 512 tokens, is invisible at 128, about 2x at 200-400",
    "whole_128",
    "whole_256",
    "whole_1024",
    "alone_256",
)
def flash_attention_by_length(here: Figures) -> ClaimCheck:
    parts = {}
    if "whole_1024" in here:
        parts["pays above 512 tokens (1,024: over 5%)"] = here["whole_1024"] > 1.05
    if "whole_128" in here:
        parts["invisible at 128 (within 5%)"] = here["whole_128"] <= 1.05
    if "whole_256" in here:
        parts["about 2 times at 256, the prefill"] = within(here["whole_256"], 1.7, 2.3)
    possible = {
        "pays at 1,024": fused_gain(1024) > 1.05,
        "invisible at 128": fused_gain(128) <= 1.05,
        "about 2 times at 400": fused_gain(400) >= 1.7,
    }
    verdict = from_parts(parts or possible)
    if not any((parts or possible).values()):
        verdict = IMPOSSIBLE
    words = {"whole_128": "prefill, 128", "whole_256": "prefill, 256", "whole_1024": "prefill, 1,024",
             "alone_256": "attention alone, 256"}  # fmt: skip
    return ClaimCheck(
        f"about 2x of attention alone; of the whole prefill at most {fused_gain(400):.2f}x at 400 tokens (7B, A100)",
        verdict,
        (*part_lines(possible), f"attention alone at 256 tokens: up to {fused_gain(256, alone=True):.1f}x"),
        part_lines(parts) + tuple(f"{text} tokens: {here[n]:.2f} times" for n, text in words.items() if n in here),
    )


@claim("B3", "attention about 60%, FFN about 40% of a block's prefill time (512 tokens)", "attention_share", "tokens")
def attention_is_60_percent(here: Figures) -> ClaimCheck:

    def share(n: int) -> float:
        work = roofline.prefill_work(MODEL, n)
        attention = work["projections"].flops + work["attention"].flops
        return attention / (attention + work["ffn"].flops)

    least = least_number(lambda n: share(n) >= 0.55)
    found = here.get("attention_share", share(512))
    return ClaimCheck(
        f"from {least:,} tokens on, by FLOPs (7B)",
        HOLDS if found >= 0.55 else CONDITION,
        (
            f"by FLOPs, projections and scores together: {share(512):.0%} at 512 tokens, {share(8192):.0%} at 8,192",
            f"the FFN is {1 - share(512):.0%} at 512 tokens",
        ),
        (f"attention is {found:.0%} of the two, {here.get('tokens', 256):.0f} tokens",) if here else (),
    )


SAVED = tuple(f"saved_{n}" for n in (64, 128, 256, 512, 1024, 2048))


@claim("B10", "SDPA instead of hand-written attention saves 20-40% of the attention time", *SAVED)
def sdpa_saves(here: Figures) -> ClaimCheck:
    saved = _by_length(here, "saved_")
    inside = [n for n, share in saved.items() if within(share, 0.2, 0.4)]
    crossed = [f"between {a} and {b}" for a, b in pairwise(saved) if saved[a] < 0.2 and saved[b] > 0.4]
    if not saved:
        verdict = NOT_MEASURED
    elif len(inside) == len(saved):
        verdict = HOLDS
    else:
        verdict = CONDITION if inside or crossed or max(saved.values()) > 0.4 else IMPOSSIBLE
    where = [str(n) for n in inside] + crossed
    return ClaimCheck(
        "more with every token: the traffic that it saves grows with the square",
        verdict,
        tuple(
            f"{n} tokens: the scores' traffic alone is {1 - 1 / fused_gain(n, alone=True):.0%} of attention by hand "
            "at the roof (7B, A100)"
            for n in (128, 1024)
        ),
        tuple(f"{n} tokens: {share:.0%} saved" for n, share in saved.items())
        + ((f"in the range at: {', '.join(where) or 'no length that was measured'}",) if saved else ()),
    )


@claim("B13", "FlashAttention-2 and FlashDecoding make attention 2-4x faster", "prefill_gain", "decode_gain")
def flash_attention_2(here: Figures) -> ClaimCheck:
    parts = {
        f"{name.removesuffix('_gain')} at least 2 times faster than the reference": value >= 2
        for name, value in here.items()
    }
    return ClaimCheck(
        f"up to {fused_gain(2048, alone=True):.0f}x over scores in memory at 2,048 tokens (7B, A100)",
        from_parts(parts),
        (str(PUBLISHED["flash2"]), str(PUBLISHED["flash3"]), "needs a GPU: `make gpu` measures it there"),
        part_lines(parts) + tuple(f"{name}: {value:.1f} times" for name, value in here.items()),
    )
