"""Claims about the KV cache: what it saves, its bytes in INT8, and its pages."""

from __future__ import annotations

from every_millisecond.claims.check import A100, CONTEXT, MODEL, Arithmetic, Part, claim, least_number
from every_millisecond.claims.published import PUBLISHED
from every_millisecond.laboratory.paged_waste import count_waste
from llm_latency import roofline
from llm_latency.roofline import total

HALF = 0.55  # "half", scales counted, to the claim's own precision
BYTES = Part("bytes_ratio", "the INT8 cache takes {v} of the bytes of a BF16 one", high=HALF, form=".0%")
EMPTY = PUBLISHED["vllm-waste"].value / 100  # fragmentation is over when no more of the slots is empty


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


def _int8_step(context: int, **rest) -> Part:
    says = f"at {context:,} tokens a step takes {{v}} as long with the INT8 cache as with the 16-bit one"
    return Part(f"step_ratio_{context}", says, high=1, same=1, **rest)


@claim(
    "A6",
    "an INT8 KV cache halves the memory and makes computing faster",
    BYTES,
    _int8_step(256),
    _int8_step(4096, needed=False),
    setting="both caches read by the best attention there is for them",
)
def int8_cache_halves() -> Arithmetic:
    tenth = least_number(lambda n: _step_gain(n) >= 1.1)
    return Arithmetic(
        "possible" if _bytes_ratio() <= HALF else "impossible",
        f"but a tenth of a step is saved from {tenth:,} tokens on (7B on an A100; the model stops at {CONTEXT:,})",
        (
            f"bytes with one 16-bit scale a token and head: {_bytes_ratio():.3f} of BF16",
            f"a step at the roof: {_step_gain(256):.2f}x at 256 tokens, {_step_gain(4096):.2f}x at 4,096, "
            f"{_step_gain(65536):.2f}x at 65,536",
        ),
    )


@claim(
    "A12",
    "INT8 KV cache: 50% of the memory, 1-2% loss",
    BYTES,
    Part("loss", "perplexity changes by {v}", 0.01, 0.02, form="+.2%"),
    setting="perplexity decoded through the cache",
)
def int8_cache_loss() -> Arithmetic:
    return Arithmetic(
        "possible" if _bytes_ratio() <= HALF else "impossible",
        "half and the scales; the loss is a matter of model and scales, and may be far smaller",
        (f"bytes: {_bytes_ratio():.3f} of BF16", str(PUBLISHED["cache-loss"])),
    )


@claim(
    "B7",
    "a decode step passes over the whole sequence",
    Part("growth_with", "a step at 512 tokens takes {v} as long as one at 64 with a KV cache", 3),
    notes={"growth_without": "{v:.2f} times as long without a cache"},
    setting="decoding with a KV cache",
)
def a_step_reads_the_whole_sequence() -> Arithmetic:

    def flops(n: int, cached: bool) -> int:
        new, context = (1, n - 1) if cached else (n, 0)
        return total(roofline.forward_work(MODEL, new, context=context)).flops

    growth = {cached: flops(512, cached) / flops(64, cached) for cached in (False, True)}
    return Arithmetic(
        "only if" if growth[True] < 3 else "possible",
        "there is no KV cache",
        (
            f"FLOPs of a step at 512 tokens over one at 64: {growth[False]:.2f}x without a cache",
            f"with a cache {growth[True]:.2f}x (7B)",
        ),
    )


RESERVED = "as with room reserved for 256 new tokens each"  # which the ratio depends on
COUNTED = "1,000 requests of mixed lengths, counted, pages of 16"
WASTE = Part("waste_paged", "{v} of the slots held in pages are empty", high=EMPTY, form=".1%")


@claim(
    "A15",
    "PagedAttention: fixed-size pages end fragmentation",
    WASTE,
    notes={"waste_contiguous": "{v:.1%} empty in one stretch a request"},
    setting=COUNTED,
)
def pages_end_fragmentation() -> Arithmetic:
    waste = {name: use.waste for name, use in count_waste().items()}
    return Arithmetic(
        "possible" if waste["paged"] <= EMPTY else "impossible",
        f"less than one page a request is left empty; {EMPTY:.0%} of all slots is the published bound",
        (
            f"counted, 1,000 requests, room for 256 new tokens: contiguous {waste['contiguous']:.1%} empty",
            f"the same in pages of 16: {waste['paged']:.1%} empty",
            str(PUBLISHED["vllm-waste"]),
        ),
    )


@claim(
    "B15",
    "PagedAttention ends cache fragmentation and lets more requests run at once",
    Part("held_ratio", f"in pages of 16, {{v}} as many requests fit into the same memory {RESERVED}", 1, same=1),
    WASTE,
    setting=COUNTED,
    contains=("A15",),
)
def more_requests_at_once() -> Arithmetic:
    uses = count_waste()
    ratio = uses["contiguous"].held / uses["paged"].held
    return Arithmetic(
        "possible" if ratio > 1 else "impossible",
        f"{ratio:.2f}x as many fit: as many more as the reservation was too long",
        (
            f"the same 1,000 requests hold {uses['contiguous'].held:,} slots contiguous, {uses['paged'].held:,} paged",
            f"fragmentation ended (A15): {pages_end_fragmentation.arithmetic().word}",
        ),
    )
