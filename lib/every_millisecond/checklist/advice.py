"""The items of article B's checklist, each with what it should gain for one model on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from every_millisecond.doctor import compile_unavailable
from every_millisecond.laboratory.paged_waste import count_waste
from every_millisecond.laboratory.speculation import measure_costs
from every_millisecond.ladder import speculation
from every_millisecond.subject import RequestTimes, Subject, quick_ms
from llm_latency import hardware, models, roofline
from llm_latency.generation import RecomputeStepper, TransformersStepper
from llm_latency.speculative import Draft, PromptLookupDraft

MEASURED, PREDICTED, NOT_HERE = "measured", "predicted", "cannot be measured here"
NONE = "none: exact"
ROUNDING = "none but rounding"  # the same sums in another order
GAMMA, SPECULATED_TOKENS = 4, 24  # of the answers that speculation is judged by
AS_FAST = "times as fast"  # the unit of a gain for one request


@dataclass(frozen=True, slots=True)
class Advice:
    """One item. gain: how many times as fast the standard request is done with it as without it; for many requests at
    once where `unit` says so; None where nothing can be said. how: measured, predicted or cannot be measured here."""

    title: str
    priority: int
    notebook: str
    gain: float | None
    how: str
    why: str
    quality: str
    unit: str = AS_FAST
    in_use: bool = False  # the model as transformers loads it has it already; the gain is what it would lose without


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of the checklist, and how to judge it for a subject."""

    title: str
    priority: int
    notebook: str
    judge: Callable[[Subject], Advice]

    def advise(self, subject: Subject) -> Advice:
        """Judge it; what a model or machine refuses is said, and does not stop the other items."""
        try:
            found = self.judge(subject)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            found = _not_here(str(error).splitlines()[0])
        return replace(found, title=self.title, priority=self.priority, notebook=self.notebook)


def _advice(gain: float | None, how: str, why: str, quality: str = NONE, **more) -> Advice:
    return Advice("", 0, "", gain, how, why, quality, **more)


def _not_here(why: str, quality: str = "-") -> Advice:
    return _advice(None, NOT_HERE, why, quality)


def _how(times: RequestTimes) -> str:
    return PREDICTED if times.extrapolated else MEASURED


def _kv_cache(subject: Subject) -> Advice:
    without = RecomputeStepper(subject.model)
    without.prefill(subject.ids)
    step = quick_ms(lambda: without.step(subject.token), without.device, repeats=2)
    times = RequestTimes(subject.times.prefill_ms, step)
    why = f"a step without one takes {step:.0f} ms, with one {subject.times.step_ms:.0f} ms"
    return _advice(1 / subject.gain(times), MEASURED, why, ROUNDING, in_use=True)


def _sdpa(subject: Subject) -> Advice:
    eager = models.load_target(subject.profile, dtype=subject.model.dtype, attn_implementation="eager")
    times = subject.times_of(TransformersStepper(eager))
    why = f"prefill by hand {times.prefill_ms:.0f} ms, fused {subject.times.prefill_ms:.0f} ms"
    return _advice(1 / subject.gain(times), MEASURED, why, ROUNDING, in_use=True)


def _half(subject: Subject) -> Advice:
    half = hardware.half_dtype()
    if subject.model.dtype == half:
        return _advice(None, NOT_HERE, f"it is in {subject.weights} already", in_use=True)
    stepper = TransformersStepper(models.load_target(subject.profile, dtype=half))
    times = subject.times_of(stepper)
    native = "native" if hardware.bf16_is_native() else "widened in software"
    why = f"prefill {times.prefill_ms:.0f} ms, step {times.step_ms:.1f} ms; 16-bit products are {native} here"
    return _advice(subject.gain(times), _how(times), why, subject.quality_cost(stepper, times))


def _compile(subject: Subject) -> Advice:
    reason = compile_unavailable()
    if reason:
        return _not_here(reason)
    launch_ms = subject.launch_ms
    saved = min(launch_ms, 0.9 * subject.times.step_ms)
    times = RequestTimes(subject.times.prefill_ms, subject.times.step_ms - saved)
    why = f"at most the {launch_ms:.1f} ms a step that issue operators; the first call compiles for up to a minute"
    return _advice(subject.gain(times), PREDICTED, why, ROUNDING)


def _int4(subject: Subject) -> Advice:
    from llm_latency.engine import FastDecoder

    decoder = FastDecoder.from_model(subject.model, "int4")
    times = subject.times_of(decoder)
    why = f"the fast decoder: {decoder.step_bytes / 1e6:.0f} MB a step, {times.step_ms:.1f} ms"
    return _advice(subject.gain(times), _how(times), why, subject.quality_cost(decoder, times))


def _batching(subject: Subject) -> Advice:
    many = 8
    wide = subject.rows_ms(many)
    gain = many * subject.times.step_ms / wide
    why = (
        f"a pass over {many} rows takes {wide:.0f} ms, over one {subject.times.step_ms:.0f}; a lone request gains none"
    )
    unit = "times the throughput with 8 requests"
    return _advice(gain, MEASURED, why, "none; in 16 bits near ties may turn", unit=unit)


def _flash(subject: Subject) -> Advice:
    work = roofline.prefill_work(subject.shape, subject.ids.shape[1])
    share = work["attention"].flops / roofline.total(work).flops
    times = RequestTimes(subject.times.prefill_ms * (1 - share), subject.times.step_ms)
    why = f"attention is {share:.0%} of the prefill's FLOPs at {subject.ids.shape[1]} tokens; SDPA fuses it already"
    return _advice(subject.gain(times), PREDICTED, f"at most: {why}", ROUNDING)


def _export(subject: Subject) -> Advice:
    return _not_here("GGUF needs llama.cpp, ONNX its runtime; `make peers` races llama.cpp", "that of the format")


def _speculation(subject: Subject) -> Advice:
    draft, name = _draft(subject)
    target = subject.stepper
    costs = measure_costs(target, draft, [subject.ids], gammas=(1, GAMMA), max_new_tokens=SPECULATED_TOKENS)
    gamma, factor = costs.best()
    times = RequestTimes(subject.times.prefill_ms, subject.times.step_ms / factor)
    why = (
        f"{name}: acceptance {costs.alpha:.2f} measured on this request; reading {gamma + 1} tokens takes "
        f"{costs.pass_ms(gamma + 1) / costs.pass_ms(1):.1f} times as long as one, a guess {costs.cost_ratio:.2f} of a "
        f"step; best gamma {gamma}"
    )
    return _advice(subject.gain(times), PREDICTED, why, "none: the distribution is the target's")


def _draft(subject: Subject) -> tuple[Draft, str]:
    """The draft that this model has: the one distilled for it, or what stands in its own prompt."""
    try:
        return speculation.load_draft(subject.profile, subject.model, "conditioned"), "its distilled draft"
    except (ValueError, FileNotFoundError):
        return PromptLookupDraft(), "prompt lookup, which needs no draft"


def _paging(subject: Subject) -> Advice:
    uses = count_waste()
    gain = uses["contiguous"].held / uses["paged"].held
    token = roofline.cache_bytes(subject.shape, 1, cache=subject.weights)
    waste = f"{uses['paged'].waste:.0%} of the slots empty instead of {uses['contiguous'].waste:.0%}"
    why = f"counted over 1,000 requests: {waste}; {token:,} bytes a token"
    return _advice(gain, PREDICTED, why, unit="times as many requests in the same memory")


def _fp8(subject: Subject) -> Advice:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        share = roofline.parameter_bytes(subject.shape, "int8") / roofline.parameter_bytes(subject.shape, "bfloat16")
        why = f"half the bytes and twice the rate of BF16 at most: {1 / share:.1f} times in decode"
        return _advice(min(2.0, 1 / share), PREDICTED, why, "usually small; test it")
    return _not_here("needs a GPU with FP8 units (Hopper, Ada)", "usually small; test it")


def _server(subject: Subject) -> Advice:
    return _not_here("vLLM, SGLang and TensorRT-LLM need an NVIDIA GPU and a build of their own", "that of the format")


ITEMS: tuple[Item, ...] = (
    Item("torch.compile with a static cache", 1, "05", _compile),
    Item("16 bits instead of 32", 1, "05", _half),
    Item("SDPA instead of attention by hand", 1, "06", _sdpa),
    Item("KV cache", 1, "04", _kv_cache),
    Item("INT4 weights, lean decoder", 2, "08", _int4),
    Item("batching, one pass of eight rows", 2, "11", _batching),
    Item("FlashAttention-2", 2, "06", _flash),
    Item("export formats (GGUF, ONNX)", 2, "14", _export),
    Item("speculative decoding", 3, "10", _speculation),
    Item("PagedAttention", 3, "11", _paging),
    Item("FP8", 3, "08", _fp8),
    Item("TensorRT-LLM, vLLM, SGLang", 3, "14", _server),
)
