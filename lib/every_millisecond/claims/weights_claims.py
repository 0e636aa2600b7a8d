"""Claims about fewer bits and about compiling: BF16, INT4, torch.compile."""

from __future__ import annotations

from every_millisecond.claims.attention_claims import ABOUT_TWO
from every_millisecond.claims.check import A100, MODEL, ON_CUDA, Arithmetic, Part, claim, least_number
from every_millisecond.claims.published import PUBLISHED
from llm_latency import hardware, roofline


@claim(
    "B8",
    'torch.compile(mode="reduce-overhead"): 10-30% faster, slow first call',
    Part("gain", "a decode step takes {v} as long without compiling", 1.1, 1.3, same=1),
    Part("first_call_ms", "the first call takes {v} as long as a later step", 10, over="step_ms", form=",.0f times"),
    needs=(ON_CUDA,),
    setting="a whole decode step; the mode replays a CUDA graph, which a CPU does not have",
)
def compile_gains() -> Arithmetic:
    published = PUBLISHED["compiled"].value / PUBLISHED["eager"].value
    return Arithmetic(
        "only if",
        f"{1 - 1 / 1.1:.0%} to {1 - 1 / 1.3:.0%} of a step is no work: Python, launches, traffic between operators",
        (
            f"{PUBLISHED['compiled']}",
            f"that is {published:.1f}x over {PUBLISHED['eager'].value} tok/s: launches were most of the step",
        ),
    )


@claim(
    "B9",
    "BF16 about 2x over FP32",
    Part(
        "prefill_gain",
        "in 16 bits a prefill{of} is {v} as fast as in FP32",
        *ABOUT_TWO,
        same=1,
        length="prefill_tokens",
    ),
    Part("decode_gain", "in 16 bits a decode step is {v} as fast as in FP32", *ABOUT_TWO, same=1),
    setting="the same attention and the same tokens on both sides",
)
def bf16_doubles() -> Arithmetic:
    sheet = hardware.datasheet_peak(A100)
    limits = {
        "prefill": sheet.bf16_tflops / sheet.fp32_tflops,
        "decode": roofline.parameter_bytes(MODEL, "float32") / roofline.parameter_bytes(MODEL, "bfloat16"),
    }
    return Arithmetic(
        "only if" if min(limits.values()) >= ABOUT_TWO[0] else "impossible",
        f"the device itself multiplies 16 bits, {ABOUT_TWO[0]:g} times as fast as 32 or more",
        (
            f"decode: 4 bytes a weight over 2 is {limits['decode']:.2f}x",
            f"prefill: {sheet.bf16_tflops:g} over {sheet.fp32_tflops:g} TFLOP/s is {limits['prefill']:.1f}x",
        ),
    )


@claim(
    "B11",
    "INT4 weights: 75% smaller, 20-50% faster when memory-bound, under 2% loss",
    Part("smaller", "the weights are {v} smaller than in BF16, scales counted", 0.74, 0.76, form=".0%"),
    Part("decode_gain", "a decode step in BF16 takes {v} as long as in INT4", 1.2, 1.5, same=1),
    Part("loss", "perplexity changes by {v}", high=0.02, form="+.1%"),
    setting="one request at a time",
)
def int4_weights() -> Arithmetic:
    smaller = 1 - roofline.parameter_bytes(MODEL, "int4") / roofline.parameter_bytes(MODEL, "bfloat16")
    group = least_number(lambda n: 1 - (4 + 32 / n) / 16 >= 0.74)  # a 16-bit scale and a 16-bit zero for n weights
    gain = PUBLISHED["int4"].value / PUBLISHED["compiled"].value
    return Arithmetic(
        "only if",
        f"{group} weights or more share a scale and a zero, and the quality lasts",
        (
            f"bits alone: {1 - 4 / 16:.0%} smaller; in blocks of 32 with scale and zero {smaller:.0%}, "
            f"{1 / (1 - smaller):.1f}x faster at the roof",
            f"one request on {roofline.gpu_peak(A100).name}: {PUBLISHED['int4'].value} over "
            f"{PUBLISHED['compiled'].value} tok/s is {gain:.2f}x ({PUBLISHED['int4'].source})",
        ),
    )
