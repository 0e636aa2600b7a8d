"""Claims about prompts and load: shorter prompts, batches, the clock that orders and does not wait, other servers."""

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
    least_number,
    part_lines,
    within,
)
from every_millisecond.claims.published import PUBLISHED
from every_millisecond.laboratory.simulated_stream import SimulatedStream
from llm_latency import hardware, roofline
from llm_latency.timing import measure


def _prefill_ms(tokens: int) -> float:
    return roofline.predict_request(MODEL, roofline.gpu_peak(A100), prompt_tokens=tokens)["prefill"].ms


def _step_ms(batch: int, context: int = 280) -> float:
    work = roofline.forward_work(MODEL, 1, context=context, batch=batch)
    return roofline.predict_stage("step", work, roofline.gpu_peak(A100)).ms


@claim(
    "A7",
    "compress the prompt (statement and format rules) to 256 tokens or fewer: the first token comes sooner",
    "ms_per_token",
    "first_64",
    "first_512",
)
def shorter_prompts(here: Figures) -> ClaimCheck:
    saved, floor = _prefill_ms(400) / _prefill_ms(256), _prefill_ms(128) / _prefill_ms(64)
    sooner = saved > 1.05 if "ms_per_token" not in here else here["ms_per_token"] > 0
    if "first_64" in here and "first_512" in here:
        sooner = sooner and here["first_512"] > 1.05 * here["first_64"]
    measured = [f"{here['ms_per_token']:.2f} ms a prompt token"] if "ms_per_token" in here else []
    measured += [f"first token after {here[f'first_{n}']:.0f} ms at {n}" for n in (64, 512) if f"first_{n}" in here]
    return ClaimCheck(
        f"400 to 256 tokens: {saved:.2f}x of the prefill at the roof, until the weights' bytes bind",
        HOLDS if sooner else IMPOSSIBLE,
        (
            f"at the roof of an A100: {_prefill_ms(400):.1f} ms for 400 tokens, {_prefill_ms(256):.1f} ms for 256",
            f"from 128 to 64 tokens only {floor:.2f}x: there the weights must be read all the same",
        ),
        tuple(measured),
    )


@claim("A13", "continuous batching raises throughput and may slow one request a little", "throughput", "slower")
def continuous_batching(here: Figures) -> ClaimCheck:
    slower = here.get("slower", _step_ms(8) / _step_ms(1))
    throughput = here.get("throughput", 8 * _step_ms(1) / _step_ms(8))
    parts = {"more throughput (over 1.5 times)": throughput > 1.5, "a little slower each (under 2.5)": slower < 2.5}
    return ClaimCheck(
        "until arithmetic binds, or the requests' caches outgrow the weights",
        from_parts(parts) if throughput > 1 else IMPOSSIBLE,
        (
            f"a step of 8 requests at the roof (A100): {_step_ms(8):.2f} ms, of one {_step_ms(1):.2f} ms",
            f"{8 * _step_ms(1) / _step_ms(8):.1f}x the throughput, each {_step_ms(8) / _step_ms(1):.2f}x slower",
        ),
        (*part_lines(parts), f"{throughput:.1f} times the throughput, a token {slower:.1f} times as long")
        if here
        else (),
    )


@claim("B12", "batching or continuous batching: 3-10x throughput", "gain")
def batching_gains(here: Figures) -> ClaimCheck:
    least = least_number(lambda n: n * _step_ms(1) / _step_ms(n) >= 3, limit=1 << 10)
    if "gain" in here:
        verdict = HOLDS if within(here["gain"], 3, 10) else CONDITION
    else:
        verdict = HOLDS if least == 1 else CONDITION
    return ClaimCheck(
        f"from {least} requests at once on (7B on an A100); who it is compared with decides the rest",
        verdict,
        (
            f"8 requests in one step: {8 * _step_ms(1) / _step_ms(8):.1f}x at the roof",
            f"32 requests: {32 * _step_ms(1) / _step_ms(32):.1f}x",
            str(PUBLISHED["vllm"]),
            str(PUBLISHED["orca"]),
        ),
        (f"{here['gain']:.2f} times one at a time, 8 places",) if here else (),
    )


def simulated_flattery(true_ms: float = 12.56, launches: int = 468) -> float:
    """How many times too short a clock that does not wait reads, on a simulated asynchronous device."""
    with SimulatedStream(launch_us=5) as stream:
        found = measure(
            lambda: [stream.launch(true_ms / launches) for _ in range(launches)], device=stream, repeats=5, warmup=1
        )
    return found.median_ms / found.launch_ms


CLAIMED_FLATTERY = 12.56 / 2.34


@claim(
    "B1",
    f"wall clock without synchronising read 2.34 ms where 12.56 ms was true ({CLAIMED_FLATTERY:.2f} times)",
    "flattery",
)
def a_clock_without_waiting(here: Figures) -> ClaimCheck:
    # Whatever the work takes, the launches take the same: so any factor can be had, this one included.
    longest = 468 * 5e-3
    factor = here.get("flattery", CLAIMED_FLATTERY)
    return ClaimCheck(
        "any factor: the wrong clock adds up launches, whatever the work behind them takes",
        HOLDS if factor > 5 else CONDITION if factor > 1 else IMPOSSIBLE,
        (
            f"468 launches of 5 us are {longest:.2f} ms",
            f"12.56 ms of work behind them: {12.56 / longest:.2f}x",
        ),
        (f"the wrong clock was off by {factor:.0f} times",) if here else (),
    )


@claim("B17", "TensorRT-LLM comes closest to the hardware's limit")
def tensorrt_is_closest(here: Figures) -> ClaimCheck:
    sheet = hardware.datasheet_peak("H200-SXM")
    rate, shape = 11_819, roofline.SHAPES["llama-2-13b"]
    share = rate * 2 * shape.parameters / (sheet.fp8_tflops * 1e12)
    return ClaimCheck(
        "at most 1: whoever is closest is still below the roof",
        NOT_MEASURED,
        (
            "why: it needs an NVIDIA GPU, a build of its own and the others beside it on the same weights",
            f"source: NVIDIA's own figure, {rate:,} tok/s with Llama-2-13B in FP8, 1,024 requests at once on one H200 "
            "(TensorRT-LLM 0.5.0, docs/source/blogs/H200launch.md)",
            f"that is {share:.0%} of the FP8 arithmetic; such a batch is not bound by bandwidth alone",
        ),
    )
