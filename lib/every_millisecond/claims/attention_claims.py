"""Claims about attention: its memory, its share of the prefill, and what a fused kernel gains by length."""

from __future__ import annotations

from every_millisecond.claims.check import A100, CONTEXT, MODEL, ON_CUDA, Arithmetic, Need, Part, claim, least_number
from every_millisecond.claims.published import PUBLISHED
from llm_latency import roofline

# By hand, the scores are written, read and written by the mask, read and written by softmax, and read by the second
# matmul. FP32, generous to whoever claims a gain from not doing so.
SCORE_PASSES, SCORE_BYTES = 6, 4
ABOUT_TWO = (1.6, 2.5)  # "about 2 times"


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


def _whole(figure: str, tokens: str, *limits: float, **rest) -> Part:
    return Part(figure, f"{tokens} tokens: the prefill takes {{v}} as long by hand as fused", *limits, **rest)


@claim(
    "A5",
    "FlashAttention: memory n instead of n^2, exact, 2-3x faster prefill; the first optimisation to do",
    Part(
        "memory_less",
        "at 4,096 tokens attention by hand takes {v} the blocked form's memory",
        10,
        form=".1f times",
    ),
    Part("max_error", "the blocked form is off by {v} from the FP32 reference", high=1e-4, form=".1e"),
    _whole("gain_256", "256", 2, 3, same=1),
    _whole("gain_1024", "1,024", 2, 3, same=1, needed=False),
    setting="the whole prefill, not attention alone",
)
def flash_attention() -> Arithmetic:
    doubles = least_number(lambda n: fused_gain(n) >= 2, limit=1 << 16)
    scores = {n: roofline.SHAPES[MODEL].heads * n**2 * SCORE_BYTES for n in (256, 8192)}
    return Arithmetic(
        "possible" if doubles <= 256 else "only if" if doubles <= CONTEXT else "impossible",
        f"the prompt has {doubles:,} tokens or more (7B on an A100; memory is saved at every length)",
        (
            f"scores of one layer: {scores[256] / 1e6:.0f} MB at 256 tokens, {scores[8192] / 1e9:.1f} GB at 8,192; "
            "a block of 128 by 128 does not grow",
            f"whole prefill, scores for nothing: at most {fused_gain(256):.2f}x at 256 tokens, "
            f"{fused_gain(1024):.2f}x at 1,024, {fused_gain(8192):.2f}x at 8,192",
        ),
    )


@claim(
    "A11",
    "FlashAttention pays above 512 tokens, is invisible at 128, about 2x at 200-400",
    _whole("whole_128", "128", 0.95, 1.05),
    _whole("whole_256", "256", *ABOUT_TWO, same=1),
    _whole("whole_1024", "1,024", 1, same=1),
    notes={"alone_256": "attention alone at 256 tokens: {v:.2f} times"},
    setting="the whole prefill, not attention alone",
)
def flash_attention_by_length() -> Arithmetic:
    possible = {
        "pays at 1,024": fused_gain(1024) > 1,
        "invisible at 128": fused_gain(128) <= 1.05,
        "about 2 times at 400": fused_gain(400) >= ABOUT_TWO[0],
    }
    return Arithmetic(
        "possible" if all(possible.values()) else "impossible",
        f"at 400 tokens the whole prefill gains {fused_gain(400):.2f}x at most (7B on an A100)",
        (
            *(f"{what}: {'yes' if able else 'no'}" for what, able in possible.items()),
            f"attention alone at 256 tokens: up to {fused_gain(256, alone=True):.1f}x",
        ),
    )


@claim(
    "B3",
    "attention about 60%, FFN about 40% of a block's prefill time (512 tokens)",
    Part("attention_share", "attention takes {v} of the time of attention and FFN together", 0.55, 0.65, form=".0%"),
    needs=(Need("tokens", "a prompt of 512 tokens", 512, 512),),
    setting="attention with its four projections",
)
def attention_is_60_percent() -> Arithmetic:

    def share(n: int) -> float:
        work = roofline.prefill_work(MODEL, n)
        attention = work["projections"].flops + work["attention"].flops
        return attention / (attention + work["ffn"].flops)

    least, pace = least_number(lambda n: share(n) >= 0.55), share(512) / (1 - share(512)) * 0.45 / 0.55
    return Arithmetic(
        "possible" if pace >= 1 else "only if",
        f"attention does its FLOPs at {pace:.2f} of the FFN's rate or less (7B)",
        (
            f"by FLOPs, projections and scores together: {share(512):.0%} at 512 tokens, {share(8192):.0%} at 8,192",
            f"the FFN is {1 - share(512):.0%} at 512 tokens; at equal rates attention is 55% from {least:,} tokens on, "
            f"and the model stops at {CONTEXT:,}",
        ),
    )


def _saved(tokens: int, **rest) -> Part:
    says = f"at {tokens:,} tokens SDPA saves {{v}} of the time that attention by hand takes"
    return Part(f"saved_{tokens}", says, 0.2, 0.4, 0, form=".0%", **rest)


@claim(
    "B10",
    "SDPA instead of hand-written attention saves 20-40% of the attention time",
    _saved(512),
    *(_saved(n, needed=False) for n in (256, 1024, 2048)),
    notes={f"saved_{n}": f"{{v:.0%}} at {n} tokens" for n in (64, 128)},
    setting="attention alone, at every length that was measured",
)
def sdpa_saves() -> Arithmetic:
    most = 1 - 1 / fused_gain(512, alone=True)
    return Arithmetic(
        "possible" if most >= 0.2 else "impossible",
        f"up to {most:.0%} at 512 tokens, and more with every token: the traffic that it saves grows with the square",
        tuple(
            f"{n} tokens: the scores' traffic alone is {1 - 1 / fused_gain(n, alone=True):.0%} of attention by hand "
            "at the roof (7B, A100)"
            for n in (128, 1024)
        ),
    )


@claim(
    "B13",
    "FlashAttention-2 and FlashDecoding make attention 2-4x faster",
    Part(
        "prefill_gain",
        "in prefill, attention with its scores in memory takes {v} as long as the best kernel",
        2,
        4,
        same=1,
    ),
    Part(
        "decode_gain",
        "in decode, attention with its scores in memory takes {v} as long as the best kernel",
        2,
        4,
        same=1,
    ),
    needs=(ON_CUDA,),
    setting="16 bits, attention alone",
)
def flash_attention_2() -> Arithmetic:
    most = fused_gain(2048, alone=True)
    return Arithmetic(
        "possible" if most >= 2 else "impossible",
        f"up to {most:.0f}x over scores in memory at 2,048 tokens (7B, A100)",
        (str(PUBLISHED["flash2"]), str(PUBLISHED["flash3"]), "needs a GPU: `make gpu` measures it there"),
    )
