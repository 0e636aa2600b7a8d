"""The ladder: every way of answering the standard request that the course measures, one entry each.

To add a rung, write a function that builds its stepper and append an entry to `RUNGS`; nothing else needs to change.
Builders import what they need themselves, so that a rung of a later chapter costs an earlier one nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from every_millisecond.doctor import compile_unavailable
from every_millisecond.ladder.record import RungRecord
from every_millisecond.request import quoting_prompt, standard_prompt
from llm_latency import hardware, models
from llm_latency.arguments import dtype_name
from llm_latency.generation import CompiledStepper, RecomputeStepper, StaticStepper, Stepper, TransformersStepper

BASELINE = "kv-cache"  # rung 1: the baseline of every ratio


def _always() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to answer the request.

    name: for the command line and the JSON. title: for tables and plots. build: profile name to a ready stepper.
    weights, cache: format of the bytes a decode step reads, as `roofline` names it; cache "none" computes every key and
    value again. activations: what the kernel rounds them to, "" for other decoders.
    on_path: part of the cumulative path from the baseline to the fastest, each rung of which changes as little as it
    can; a rung off the path is measured against the baseline alone. alone: name of the rung that adds this one's step
    to the baseline alone, where there is one; or to another rung than the one before it on the path, which `over` then
    names.
    unavailable: returns why this machine cannot run it, or None. exact: promises the baseline's greedy ids. prompt:
    makes the request of a tokenizer; another than the standard one must be as long, so that times compare.
    """

    name: str
    title: str
    notebook: str
    build: Callable[[str | None], Stepper]
    weights: str = "float32"
    cache: str = "float32"
    activations: str = ""
    on_path: bool = False
    exact: bool = False
    alone: str = ""
    over: str = BASELINE
    unavailable: Callable[[], str | None] = _always
    prompt: Callable[..., str] = standard_prompt

    def record(self, status: str, **found) -> RungRecord:
        """What was found of this rung, with what is known of it beforehand."""
        return RungRecord(
            self.name, self.title, self.notebook, status, weights=self.weights, cache=self.cache,
            activations=self.activations, on_path=self.on_path, exact=self.exact, alone=self.alone, over=self.over,
            own_request=self.prompt is not standard_prompt, **found,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace(".", "").isalnum():
            raise ValueError(f"rung name {self.name!r}; expected letters, digits and hyphens")


def _plain(stepper: type[Stepper], attention: str = "eager", *, half: bool = False) -> Callable[[str | None], Stepper]:
    """transformers' own model under one of our loops, in FP32 or in the 16 bits of this machine."""

    def build(profile: str | None) -> Stepper:
        dtype = hardware.half_dtype() if half else torch.float32
        return stepper(models.load_target(profile, dtype=dtype, attn_implementation=attention))

    return build


def _flash(profile: str | None) -> Stepper:
    import llm_latency.attention  # noqa: F401  (registers the implementation)

    return _plain(TransformersStepper, "llm_latency_flash")(profile)


def _int8_cache(profile: str | None) -> Stepper:
    from llm_latency.kv_cache import Int8KVCache

    model = models.load_target(profile, dtype=hardware.half_dtype(), attn_implementation="int8_kv")
    return TransformersStepper(model, lambda: Int8KVCache(model.config))


def _quantised_alone(weights: str) -> Callable[[str | None], Stepper]:
    def build(profile: str | None) -> Stepper:
        from llm_latency.quantization import quantize_

        model = models.load_target(profile, dtype=torch.bfloat16)
        quantize_(model, weights, skip=["lm_head"] if weights == "int4" else [], keep_bfloat16=True)
        return TransformersStepper(model)

    return build


def _fast(weights: str, **options) -> Callable[[str | None], Stepper]:
    def build(profile: str | None) -> Stepper:
        from every_millisecond.ladder.speculation import load_fast

        return load_fast(profile, weights, **options)[0]

    return build


def _speculative(weights: str, draft: str = "conditioned", **options) -> Callable[[str | None], Stepper]:
    def build(profile: str | None) -> Stepper:
        from every_millisecond.ladder.speculation import build as build_speculative

        return build_speculative(profile, weights, draft, **options)

    return build


def _kernel(draft: str = "", **options) -> Callable[[str | None], Stepper]:
    def build(profile: str | None) -> Stepper:
        from every_millisecond.ladder.speculation import build_kernel, load_kernel

        return build_kernel(profile, draft, **options) if draft else load_kernel(profile, **options)[0]

    return build


def _no_kernel() -> str | None:
    from every_millisecond.ladder.speculation import kernel_unavailable

    return kernel_unavailable()


def _no_kernel_or_draft() -> str | None:
    return _no_kernel() or _no_draft()


def _no_draft() -> str | None:
    from every_millisecond.ladder.speculation import unavailable

    return unavailable("conditioned")


def _gpu() -> str | None:
    return "INT8 activations are rounded on the CPU alone here" if torch.cuda.is_available() else None


def _gpu_or_no_draft() -> str | None:
    return _gpu() or _no_draft()


_HALF = dtype_name(hardware.half_dtype())  # FP16 on a GPU without BF16 units
# A CPU without BF16 units computes in FP32 whatever it stores: there the path leaves 16 bits out, and the fast decoder
# joins it in FP32, so that no step bundles a decoder with a format.
_SIXTEEN_BITS = torch.cuda.is_available() or hardware.bf16_is_native()
_FAST_TITLE = "+ fast decoder" if _SIXTEEN_BITS else "fast decoder, BF16"
_HALF_TITLE = {"bfloat16": "BF16", "float16": "FP16"}[_HALF]
HALF = dict(weights=_HALF, cache=_HALF)
BF16 = dict(weights="bfloat16", cache="bfloat16")
INT8, INT4 = BF16 | dict(weights="int8"), BF16 | dict(weights="int4")
KERNEL = dict(weights="int4", cache="float16", activations="int16", unavailable=_no_kernel)
DYNAMIC = dict(weights="int8", unavailable=_gpu)  # INT8 x INT8

RUNGS: list[Rung] = [
    Rung("no-cache", "FP32, no KV cache", "04", _plain(RecomputeStepper), cache="none", on_path=True, exact=True),
    Rung(BASELINE, "KV cache", "04", _plain(TransformersStepper), on_path=True, exact=True),
    Rung("static-cache", "static cache alone", "04", _plain(StaticStepper), exact=True),
    Rung("half-alone", f"{_HALF_TITLE} alone", "05", _plain(TransformersStepper, half=True), **HALF),
    Rung(
        "compiled-alone",
        "static + compile alone",
        "05",
        _plain(CompiledStepper),
        exact=True,
        unavailable=compile_unavailable,
    ),
    Rung("sdpa", "+ SDPA", "05", _plain(TransformersStepper, "sdpa"), on_path=True, exact=True),
    Rung(
        "half",
        f"+ {_HALF_TITLE}",
        "05",
        _plain(TransformersStepper, "sdpa", half=True),
        **HALF,
        on_path=_SIXTEEN_BITS,
        alone="half-alone",
    ),
    Rung(
        "compiled",
        "+ static cache, compile",
        "05",
        _plain(CompiledStepper, "sdpa", half=True),
        **HALF,
        on_path=_SIXTEEN_BITS,
        alone="compiled-alone",
        unavailable=compile_unavailable,
    ),
    Rung("flash-alone", "our FlashAttention alone", "06", _flash, exact=True),
    Rung("int8-cache", "INT8 KV cache alone", "07", _int8_cache, weights=_HALF, cache="int8"),
    Rung("int8-alone", "INT8 weights alone", "08", _quantised_alone("int8"), **INT8),
    Rung("int4-alone", "INT4 weights alone", "08", _quantised_alone("int4"), **INT4),
    Rung(
        "fast-fp32",
        "fast decoder alone" if _SIXTEEN_BITS else "+ fast decoder",
        "08",
        _fast("float32"),
        on_path=not _SIXTEEN_BITS,
        exact=True,
    ),
    Rung("fast", _FAST_TITLE, "08", _fast("bfloat16"), **BF16, on_path=_SIXTEEN_BITS, alone="fast-fp32"),
    Rung("int8", "fast decoder, INT8", "08", _fast("int8"), **INT8),
    Rung("int4", "+ INT4 weights", "08", _fast("int4"), **INT4, on_path=True, alone="int4-alone"),
    Rung("int8-dynamic", "INT8 x INT8 instead of INT4", "08", _fast("int8_dynamic"), **DYNAMIC),
    Rung("prefix", "INT8 x INT8, exercise text cached", "12", _fast("int8_dynamic", keep_prefix=True), **DYNAMIC),
    Rung(
        "speculation-fp32",
        "fast decoder, FP32 + speculation",
        "10",
        _speculative("float32"),
        exact=True,
        unavailable=_no_draft,
    ),
    Rung("speculation", "fast decoder + speculation", "10", _speculative("bfloat16"), **BF16, unavailable=_no_draft),
    Rung("speculation-int4", "INT4 + speculation", "10", _speculative("int4"), **INT4, unavailable=_no_draft),
    Rung(
        "int4-everything",
        "INT4 + speculation, exercise text cached",
        "12",
        _speculative("int4", keep_prefix=True),
        **INT4,
        unavailable=_no_draft,
    ),
    Rung(
        "speculation-int8",
        "INT8 x INT8 + speculation",
        "10",
        _speculative("int8_dynamic"),
        weights="int8",
        unavailable=_gpu_or_no_draft,
    ),
    Rung(
        "everything",
        "INT8 x INT8 + speculation, exercise text cached",
        "12",
        _speculative("int8_dynamic", keep_prefix=True),
        weights="int8",
        unavailable=_gpu_or_no_draft,
    ),
    Rung("kernel", "+ one kernel", "09", _kernel(), **KERNEL, on_path=True),
    Rung(
        "kernel-int8",
        "one kernel, INT8 activations",
        "09",
        _kernel(activations="int8"),
        **KERNEL | dict(activations="int8"),
    ),
    Rung(
        "kernel-speculation",
        "one kernel, with guesses",
        "10",
        _kernel("conditioned"),
        **KERNEL | dict(unavailable=_no_kernel_or_draft),
    ),
    Rung("kernel-prefix", "one kernel, exercise text kept", "12", _kernel(keep_prefix=True), **KERNEL, on_path=True),
    # Last, because it may lose: then the path without it is the path to the rung before.
    Rung(
        "kernel-everything",
        "one kernel, exercise text kept, with guesses",
        "12",
        _kernel("conditioned", keep_prefix=True),
        **KERNEL | dict(unavailable=_no_kernel_or_draft),
        on_path=True,
        alone="kernel-speculation",
        over="kernel",
    ),
    Rung("lookup", "fast decoder + prompt lookup", "10", _speculative("bfloat16", "lookup"), **BF16),
    Rung(
        "lookup-quote",
        "prompt lookup, a request that quotes its prompt",
        "10",
        _speculative("bfloat16", "lookup"),
        **BF16,
        prompt=quoting_prompt,
    ),
]


def rung(name: str) -> Rung:
    """The entry of that name. Raises ValueError that lists the known ones."""
    for entry in RUNGS:
        if entry.name == name:
            return entry
    raise ValueError(f"unknown rung {name!r}; expected one of {', '.join(entry.name for entry in RUNGS)}")


def choose(names: list[str] | None) -> list[Rung]:
    """The rungs to run, in the ladder's order: all, or those named; the baseline always runs with them."""
    if names is None:
        return list(RUNGS)
    wanted = {rung(name).name for name in names} | {BASELINE}
    return [entry for entry in RUNGS if entry.name in wanted]
