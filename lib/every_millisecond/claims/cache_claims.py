"""Claims about the KV cache: what it saves, its bytes in INT8, and its pages."""

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
    from_parts,
    least_number,
    part_lines,
    within,
)
from every_millisecond.claims.published import PUBLISHED
from every_millisecond.laboratory.paged_waste import count_waste
from llm_latency import roofline
from llm_latency.roofline import total

HALF = 0.55  # "half", scales counted, to the claim's own precision


def _bytes_ratio() -> float:
    return roofline.cache_bytes(MODEL, 1024, cache="int8") / roofline.cache_bytes(MODEL, 1024)


def _step_gain(context: int) -> float:
    """How many times faster a decode step is with an INT8 cache than with a BF16 one, at the roof."""
    peak = roofline.gpu_peak(A100)
    ms = [
        roofline.predict_stage("step", roofline.forward_work(MODEL, 1, context=context, cache=kind), peak).ms
        for kind in ("bfloat16", "int8")
    ]
    return ms[0] / ms[1]


@claim(
    "A6",
    "an INT8 KV cache halves the memory and makes computing faster",
    "bytes_ratio",
    "step_ratio_256",
    "step_ratio_4096",
)
def int8_cache_halves(here: Figures) -> ClaimCheck:
    ratio, tenth = here.get("bytes_ratio", _bytes_ratio()), least_number(lambda n: _step_gain(n) >= 1.1)
    parts = {f"half the memory (at most {HALF} of it)": ratio <= HALF}
    for n in (256, 4096):
        if f"step_ratio_{n}" in here:
            parts[f"faster steps at {n} tokens"] = here[f"step_ratio_{n}"] < 1
    if ratio > HALF:
        verdict = IMPOSSIBLE
    else:
        verdict = from_parts(parts) if len(parts) > 1 else CONDITION if tenth > 1 else HOLDS
    return ClaimCheck(
        f"a tenth of a step from {tenth:,} tokens on (7B on an A100): where reading the cache matters",
        verdict,
        (
            f"bytes with one 16-bit scale a token and head: {_bytes_ratio():.3f} of BF16",
            f"a step at the roof: {_step_gain(256):.2f}x at 256 tokens, {_step_gain(4096):.2f}x at 4,096, "
            f"{_step_gain(65536):.2f}x at 65,536",
        ),
        (*part_lines(parts), *(f"{name.replace('_', ' ')}: {value:.2f} times BF16's" for name, value in here.items()))
        if here
        else (),
    )


@claim("A12", "INT8 KV cache: 50% of the memory, 1-2% loss", "bytes_ratio", "loss")
def int8_cache_loss(here: Figures) -> ClaimCheck:
    ratio, published = here.get("bytes_ratio", _bytes_ratio()), PUBLISHED["cache-loss"]
    loss = here.get("loss", published.value / 100)
    parts = {f"half the memory (at most {HALF})": ratio <= HALF, "a loss of 1-2%": within(loss, 0.01, 0.02)}
    measured = []
    if "bytes_ratio" in here:
        measured.append(f"{ratio:.3f} of the bytes")
    if "loss" in here:
        measured.append(f"perplexity {loss:+.2%}, decoded through the cache")
    return ClaimCheck(
        "half and the scales; the loss is a matter of model and scales, and may be far smaller",
        from_parts(parts) if ratio <= HALF else IMPOSSIBLE,
        (f"bytes: {_bytes_ratio():.3f} of BF16", str(published)),
        part_lines(parts) + tuple(measured) if here else (),
    )


@claim("B7", "a decode step passes over the whole sequence", "growth_without", "growth_with")
def a_step_reads_the_whole_sequence(here: Figures) -> ClaimCheck:

    def flops(n: int, cached: bool) -> int:
        new, context = (1, n - 1) if cached else (n, 0)
        return total(roofline.forward_work(MODEL, new, context=context)).flops

    growth = {cached: flops(512, cached) / flops(64, cached) for cached in (False, True)}
    without, with_cache = here.get("growth_without", growth[False]), here.get("growth_with", growth[True])
    if with_cache > 3:
        verdict = HOLDS
    else:
        verdict = CONDITION if without > 3 else IMPOSSIBLE
    return ClaimCheck(
        "without a KV cache only",
        verdict,
        (
            f"FLOPs of a step at 512 tokens over one at 64: {growth[False]:.2f}x without a cache",
            f"with a cache {growth[True]:.2f}x (7B)",
        ),
        (f"8 times the tokens: {without:.1f} times the ms without a cache, {with_cache:.1f} with one",) if here else (),
    )


def _waste() -> dict[str, float]:
    return {name: use.waste for name, use in count_waste().items()}


@claim("A15", "PagedAttention: fixed-size pages end fragmentation", "waste_contiguous", "waste_paged")
def pages_end_fragmentation(here: Figures) -> ClaimCheck:
    counted, limit = _waste(), PUBLISHED["vllm-waste"].value / 100
    waste = here.get("waste_paged", counted["paged"])
    before = here.get("waste_contiguous", counted["contiguous"])
    if waste <= limit:
        verdict = HOLDS
    else:
        verdict = CONDITION if waste < before else IMPOSSIBLE
    return ClaimCheck(
        f"less than one page a request is left empty; {limit:.0%} of all slots is the published bound",
        verdict,
        (
            f"counted, 1,000 requests, room for 256 new tokens: contiguous {counted['contiguous']:.1%} empty",
            f"the same in pages of 16: {counted['paged']:.1%} empty",
            str(PUBLISHED["vllm-waste"]),
        ),
        (f"{before:.1%} empty before, {waste:.1%} in pages",) if here else (),
    )


@claim("B15", "PagedAttention ends cache fragmentation and lets more requests run at once", "held_ratio")
def more_requests_at_once(here: Figures) -> ClaimCheck:
    uses = count_waste()
    ratio = here.get("held_ratio", uses["contiguous"].held / uses["paged"].held)
    parts = {
        "more requests in the same memory": ratio > 1,
        "fragmentation ended (A15)": pages_end_fragmentation().verdict == HOLDS,
    }
    return ClaimCheck(
        "as many more as the reservation was too long",
        from_parts(parts) if ratio > 1 else IMPOSSIBLE,
        (
            f"the same 1,000 requests hold {uses['contiguous'].held:,} slots contiguous, {uses['paged'].held:,} paged",
            f"{ratio:.2f}x as many fit",
            *part_lines(parts),
        ),
        (f"{ratio:.2f} times as many requests",) if here else (),
    )
