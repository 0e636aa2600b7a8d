"""Claims that a datasheet bounds. Wherever there is a choice, the arithmetic is generous to the claim."""

from __future__ import annotations

from collections.abc import Mapping

from every_millisecond.claims.check import (
    A100,
    CONTEXT,
    INFINITY,
    MODEL,
    ON_A100,
    SEVEN_B,
    Arithmetic,
    Need,
    Part,
    claim,
    ffn_compute_bound,
    least_number,
    quadratic_share,
)
from llm_latency import hardware, roofline
from llm_latency.roofline import total

NEW_TOKENS = 256  # of the articles' request
ACCEPTANCE, GAMMA = 0.85, 5  # article A's best
TOKENS_PER_PASS = (1 - ACCEPTANCE ** (GAMMA + 1)) / (1 - ACCEPTANCE)  # at that acceptance, the draft for nothing
MARGIN = 1.05  # of a measured ceiling: what was reached once may be passed by a little


def int4_pass_ms() -> float:
    """ms that one pass over the articles' model takes at least on an A100: INT4, scales and cache for nothing."""
    return roofline.SHAPES[MODEL].parameters / 2 / roofline.gpu_peak(A100).bandwidth_bytes_per_s * 1e3


def prefill_ms(tokens: int) -> float:
    """ms of a prefill of the articles' model at the roof of an A100."""
    return roofline.predict_request(MODEL, roofline.gpu_peak(A100), prompt_tokens=tokens)["prefill"].ms


def least_decode_ms(here: Mapping[str, float]) -> float:
    """ms that the articles' answer takes at least, by the tokens that a pass yielded."""
    return NEW_TOKENS / here.get("tokens_per_pass", TOKENS_PER_PASS) * int4_pass_ms()


def _own_limit(here: Mapping[str, float]) -> tuple[float, float]:
    return 0.0, MARGIN


@claim(
    "A3",
    "prefill 850 to 120 ms, decode 980 to 80 ms, for 256 new tokens of a 7B model on one A100",
    Part("decode_ms", "decoding 256 tokens takes {v}", high=80.5, form=".0f ms"),
    Part("prefill_ms", "reading the prompt takes {v}", high=120.5, form=".0f ms"),
    needs=(SEVEN_B, ON_A100, Need("new_tokens", "256 new tokens", NEW_TOKENS, NEW_TOKENS)),
    notes={"tokens_per_pass": "{v:.1f} tokens a pass"},
    physics={"decode_ms": lambda here: (least_decode_ms(here), INFINITY)},
)
def decode_in_80_ms() -> Arithmetic:
    peak, decode_ms = roofline.gpu_peak(A100), 80
    stages = roofline.predict_request(MODEL, peak, prompt_tokens=256, new_tokens=NEW_TOKENS)
    bf16_ms, int4_ms = stages["decode"].ms / (NEW_TOKENS - 1), int4_pass_ms()
    needed = {name: NEW_TOKENS * ms / decode_ms for name, ms in (("BF16", bf16_ms), ("INT4", int4_ms))}
    flops = stages["prefill"].work.flops
    shares = [flops / ms * 1e3 / peak.flops_per_s for ms in (850, 120)]
    if needed["BF16"] <= TOKENS_PER_PASS:
        word = "possible"
    else:
        word = "only if" if needed["INT4"] <= TOKENS_PER_PASS else "impossible"
    return Arithmetic(
        word,
        "the weights are INT4"
        if word == "only if"
        else f"{TOKENS_PER_PASS:.1f} tokens a pass at the article's own acceptance of {ACCEPTANCE} and gamma {GAMMA}, "
        f"the draft free; {needed['INT4']:.1f} are needed even in INT4",
        (
            f"stages as given: before 15 + 850 + 980 + 10 = {15 + 850 + 980 + 10} ms, after {3 + 120 + 80 + 2} ms",
            f"BF16: a pass takes {bf16_ms:.2f} ms at least, {decode_ms / bf16_ms:.1f} fit into "
            f"{decode_ms} ms, each must yield {needed['BF16']:.1f} tokens",
            f"before, in BF16 and one token a pass: 980 ms is {980 / stages['decode'].ms:.0%} of the least time",
            f"INT4, scales and cache for nothing: {int4_ms:.2f} ms, {decode_ms / int4_ms:.1f} fit, "
            f"{needed['INT4']:.1f} tokens each",
            f"prefill of 256 tokens is {flops / 1e12:.1f} TFLOP, {stages['prefill'].compute_ms:.1f} ms at peak: "
            f"850 ms is {shares[0]:.1%} of the machine, 120 ms is {shares[1]:.1%}",
            f"best published, 245 tok/s (gpt-fast, PyTorch blog 2023-11-30): {NEW_TOKENS / 245 * 1e3:.0f} ms",
        ),
    )


@claim(
    "A4",
    "prefill time grows with the square of the prompt length",
    Part(
        "power",
        "from 64 tokens to the longest prompt, time grows with the length to the power of {v}",
        1.8,
        2.2,
        form=".2f",
    ),
    needs=(Need("longest", "prompts of 512 tokens and more", 512, INFINITY),),
)
def prefill_grows_with_the_square() -> Arithmetic:
    prompt = 256
    shares = {n: quadratic_share(MODEL, n) for n in (prompt, 1024, 4096, 16384)}
    crossover = least_number(lambda n: quadratic_share(MODEL, n) >= 0.5)
    doubled = total(roofline.prefill_work(MODEL, 2 * prompt)).flops / total(roofline.prefill_work(MODEL, prompt)).flops
    too_long = f"the quadratic part is the larger one from {crossover:,} tokens on, and the model stops at {CONTEXT:,}"
    return Arithmetic(
        "impossible" if crossover > CONTEXT else "only if",
        too_long if crossover > CONTEXT else f"the prompt has {crossover:,} tokens or more",
        (
            "attention's share of the FLOPs by tokens: " + ", ".join(f"{n:,}: {s:.1%}" for n, s in shares.items()),
            f"from {prompt} to {2 * prompt} tokens the FLOPs grow {doubled:.2f}x; a square would give 4x",
        ),
    )


@claim(
    "A8",
    "decode time per token is set by model size and memory bandwidth",
    Part("limit_share", "at this machine's bandwidth its bytes account for {v} of a step", 0.5, form=".0%"),
    notes={"launch_share": "issuing operators takes {v:.0%} of a step"},
    setting="one request at a time",
    physics={"limit_share": _own_limit},
)
def bandwidth_sets_decode() -> Arithmetic:
    peak = roofline.gpu_peak(A100)
    steps = {name: roofline.predict_request(name, peak, new_tokens=2)["decode"] for name in roofline.SHAPES}
    weights = {name: step.work.weight_bytes / step.work.bytes for name, step in steps.items()}
    batch = least_number(lambda n: ffn_compute_bound(MODEL, peak, 1, batch=n))
    bound = all(step.bound == "bandwidth" for step in steps.values())
    return Arithmetic(
        "only if" if bound else "impossible",
        f"fewer than {batch} requests share a step (7B in BF16 on an A100)" if bound else "arithmetic binds the step",
        tuple(
            f"{name}: {step.ms:.2f} ms a token, {step.bound} bound, arithmetic alone {step.compute_ms:.3f} ms, "
            f"weights are {weights[name]:.0%} of the bytes"
            for name, step in steps.items()
        ),
    )


@claim(
    "B2",
    "prefill of 512 tokens, 7B in BF16 on an A100: 46 ms (embedding 0.5, blocks 45, head 0.3)",
    Part("prefill_ms", "a prefill takes {v}", 41, 51, form=".0f ms"),
    Part("embedding_ms", "its embedding takes {v}", 0.45, 0.55, form=".2f ms"),
    Part("head_ms", "its head takes {v}", 0.25, 0.35, form=".2f ms"),
    needs=(SEVEN_B, ON_A100, Need("tokens", "a prompt of 512 tokens", 512, 512)),
    physics={"prefill_ms": lambda here: (prefill_ms(512), INFINITY)},
)
def prefill_in_46_ms() -> Arithmetic:
    prefill = roofline.predict_request(MODEL, roofline.gpu_peak(A100), prompt_tokens=512)["prefill"]
    least = {part.name: part.ms for part in prefill.parts if part.name in ("embedding", "head")}
    least["blocks"] = prefill.ms - sum(least.values())
    claimed = {"embedding": 0.5, "head": 0.3, "blocks": 45.0}
    slower = {part: claimed[part] / least[part] for part in claimed}
    return Arithmetic(
        "impossible" if min(slower.values()) < 1 or prefill.ms > 46 else "possible",
        f"{prefill.ms:.1f} ms at the roof, {prefill.ms / 46:.0%} of the claim's; but what takes over 10x its own roof "
        "(the embedding) is not spending its time on its bytes",
        tuple(
            f"{part}: {claimed[part]} ms claimed, {least[part]:.3f} ms at the roof, {slower[part]:.1f}x above it"
            for part in claimed
        ),
    )


def _least_step() -> tuple[int, int, float]:
    """Bytes of the parameters; the same without the embedding table; ms to read the latter on an A100."""
    shape = roofline.SHAPES[MODEL]
    everything = roofline.parameter_bytes(shape)
    least = everything - 2 * shape.vocab * shape.hidden
    return everything, least, least / roofline.gpu_peak(A100).bandwidth_bytes_per_s * 1e3


@claim(
    "B4",
    "decode 6.2 ms a step, 256 steps in 1589 ms, 7B in BF16 on an A100",
    Part("step_ms", "a decode step takes {v}", 6.15, 6.25, form=".2f ms"),
    needs=(SEVEN_B, ON_A100),
    setting="BF16 weights, one request",
    physics={"step_ms": lambda here: (_least_step()[2], INFINITY)},
)
def a_step_in_6_ms() -> Arithmetic:
    everything, least, least_ms = _least_step()
    step_ms, roof = 6.2, roofline.gpu_peak(A100).bandwidth_bytes_per_s / 1e12
    rates = [nbytes / step_ms * 1e3 / 1e12 for nbytes in (everything, least)]
    return Arithmetic(
        "impossible" if rates[1] > roof else "possible",
        f"at {roof:.2f} TB/s a step takes {least_ms:.2f} ms at least",
        (
            f"{everything / 1e9:.2f} GB of parameters in {step_ms} ms: {rates[0]:.2f} TB/s",
            f"without the embedding table and the cache, {least / 1e9:.2f} GB: {rates[1]:.2f} TB/s",
            f"256 steps in 1589 ms are {1589 / 256:.2f} ms each: the same figure",
        ),
    )


@claim(
    "B6",
    "prefill is compute-bound, O(T d^2); decode is bandwidth-bound",
    Part("prefill_share", "at this machine's own rate its FLOPs account for {v} of a prefill", 0.5, form=".0%"),
    Part("decode_share", "at its own bandwidth its bytes account for {v} of a step", 0.5, form=".0%"),
    setting="one request at a time",
    physics={"prefill_share": _own_limit, "decode_share": _own_limit},
)
def compute_bound_and_bandwidth_bound() -> Arithmetic:
    peak = roofline.gpu_peak(A100)
    stages = roofline.predict_request(MODEL, peak, prompt_tokens=512, new_tokens=256)
    prompt = least_number(lambda n: ffn_compute_bound(MODEL, peak, n))
    bounds = {name: stage.bound for name, stage in stages.items()}
    as_stated = bounds["prefill"] == "compute" and bounds["decode"] == "bandwidth"
    return Arithmetic(
        "only if" if as_stated else "impossible",
        f"the prompt has {prompt} tokens or more and fewer than {prompt} requests share a step (7B, BF16, A100)"
        if as_stated
        else ", ".join(f"{name} is {bound} bound" for name, bound in bounds.items()),
        (
            f"the ridge: {peak.ridge:.0f} FLOP per byte",
            *(
                f"{name}: {stage.work.intensity:.1f} FLOP per byte, {stage.bound} bound"
                for name, stage in stages.items()
            ),
            f"T d^2 leaves out attention, {quadratic_share(MODEL, 512):.1%} of the FLOPs at 512 tokens",
        ),
    )


def _most_of_fp8() -> tuple[float, float]:
    """How many times more FP8 allows than BF16 on an H100: FLOPs a second, weights a byte."""
    sheet = hardware.datasheet_peak("H100-SXM")
    return sheet.fp8_tflops / sheet.bf16_tflops, 2 / 1


@claim(
    "B16",
    "FP8 on Hopper: another 2-3x over BF16",
    Part("gain", "BF16 takes {v} as long as FP8", 2, 3, same=1),
    needs=(Need("hopper", "a Hopper GPU"), Need("bf16_share", "BF16 at half of its own roof or more", 0.5, MARGIN)),
    physics={"gain": lambda here: (0.0, MARGIN * max(_most_of_fp8()) / here["bf16_share"])},
)
def fp8_doubles_or_triples() -> Arithmetic:
    (rates, nbytes), sheet = _most_of_fp8(), hardware.datasheet_peak("H100-SXM")
    most = max(rates, nbytes)
    return Arithmetic(
        "possible" if most >= 3 else "impossible",
        f"at most {most:.2f}x with both at their roofs, before anything is lost to scales, cache and launches",
        (
            f"prefill: {sheet.fp8_tflops} over {sheet.bf16_tflops} TFLOP/s dense is {rates:.2f}x",
            f"decode: 2 bytes a weight over 1 is {nbytes:.2f}x",
            "the claim's lower end is 2x, its upper end 3x; a larger gain measures a BF16 kernel far from its roof",
        ),
    )
