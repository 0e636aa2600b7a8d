"""Claims about prompts and load: shorter prompts, batches, the clock that orders and does not wait, other servers."""

from __future__ import annotations

from every_millisecond.claims.arithmetic_claims import prefill_ms
from every_millisecond.claims.check import A100, MODEL, ON_CUDA, Arithmetic, Part, claim, least_number
from every_millisecond.claims.published import PUBLISHED
from llm_latency import hardware, roofline


def _step_ms(batch: int, context: int = 280) -> float:
    work = roofline.forward_work(MODEL, 1, context=context, batch=batch)
    return roofline.predict_stage("step", work, roofline.gpu_peak(A100)).ms


def _batch_gain(batch: int) -> float:
    return batch * _step_ms(1) / _step_ms(batch)


@claim(
    "A7",
    "compress the prompt (statement and format rules) to 256 tokens or fewer: the first token comes sooner",
    Part("first_512_over_256", "the first token takes {v} as long after 512 tokens as after 256", 1, same=1),
    notes={"ms_per_token": "{v:.2f} ms a prompt token"},
    setting="nothing of the prompt cached",
)
def shorter_prompts() -> Arithmetic:
    saved, floor = prefill_ms(400) / prefill_ms(256), prefill_ms(128) / prefill_ms(64)
    return Arithmetic(
        "possible" if saved > 1 else "impossible",
        f"400 tokens take {saved:.2f}x as long as 256 at the roof",
        (
            f"at the roof of an A100: {prefill_ms(400):.1f} ms for 400 tokens, {prefill_ms(256):.1f} ms for 256",
            f"128 tokens take only {floor:.2f}x as long as 64: there the weights must be read all the same",
        ),
    )


@claim(
    "A13",
    "continuous batching raises throughput and may slow one request a little",
    Part("throughput", "eight requests at once get {v} as many tokens a second as one alone", 1, same=1),
    Part("slower", "a token takes {v} as long among eight requests as alone", high=1.5),
    setting="the same decoder on both sides",
)
def continuous_batching() -> Arithmetic:
    gain, slower = _batch_gain(8), _step_ms(8) / _step_ms(1)
    return Arithmetic(
        "possible" if gain > 1 else "impossible",
        f"8 requests at once give {gain:.1f}x the throughput, each {slower:.2f}x slower, until arithmetic binds",
        (
            f"a step of 8 requests at the roof (A100): {_step_ms(8):.2f} ms, of one {_step_ms(1):.2f} ms",
            "later the requests' caches outgrow the weights",
        ),
    )


@claim(
    "B12",
    "batching or continuous batching: 3-10x throughput",
    Part("gain", "eight requests at once get {v} as many tokens a second as one at a time", 3, 10, same=1),
    setting="the same decoder on both sides",
)
def batching_gains() -> Arithmetic:
    least = least_number(lambda n: _batch_gain(n) >= 3, limit=1 << 10)
    return Arithmetic(
        "only if" if least > 1 else "possible",
        f"{least} requests or more share a step (7B on an A100)",
        (
            f"8 requests in one step: {_batch_gain(8):.1f}x at the roof",
            f"32 requests: {_batch_gain(32):.1f}x",
            str(PUBLISHED["vllm"]),
            str(PUBLISHED["orca"]),
        ),
    )


@claim(
    "B1",
    f"wall clock without synchronising read 2.34 ms where 12.56 ms was true ({12.56 / 2.34:.2f} times)",
    Part("flattery", "the work takes {v} as long as the clock that does not wait reads", 5, same=1),
    needs=(ON_CUDA,),
    setting="a real device: a simulated one settles nothing",
)
def a_clock_without_waiting() -> Arithmetic:
    launches_ms = 468 * 5e-3
    return Arithmetic(
        "possible",
        "any factor, for the wrong clock adds up launches, whatever the work behind them takes",
        (
            f"468 launches of 5 us are {launches_ms:.2f} ms",
            f"12.56 ms of work behind them: {12.56 / launches_ms:.2f}x",
        ),
    )


@claim(
    "B17",
    "TensorRT-LLM comes closest to the hardware's limit",
    Part("lead", "TensorRT-LLM decodes {v} as many tokens a second as the best other engine", 1, same=1),
    needs=(ON_CUDA,),
    setting="the same weights, request and GPU for every engine",
)
def tensorrt_is_closest() -> Arithmetic:
    sheet = hardware.datasheet_peak("H200-SXM")
    rate, shape = 11_819, roofline.SHAPES["llama-2-13b"]
    share = rate * 2 * shape.parameters / (sheet.fp8_tflops * 1e12)
    return Arithmetic(
        "says nothing",
        "whoever is closest is still below the roof",
        (
            "why the course does not measure it: it needs an NVIDIA GPU, a build of its own and the others beside it",
            f"source: NVIDIA's own figure, {rate:,} tok/s with Llama-2-13B in FP8, 1,024 requests at once on one H200 "
            "(TensorRT-LLM 0.5.0, docs/source/blogs/H200launch.md)",
            f"that is {share:.0%} of the FP8 arithmetic; such a batch is not bound by bandwidth alone",
        ),
    )
