"""The ladder: every way of answering the standard request that the course measures, one entry each.

To add a rung, write a function that builds its stepper and append an entry to `RUNGS`; nothing else needs to change.
Builders import what they need themselves, so that a rung of a later chapter costs an earlier one nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from every_millisecond import doctor
from every_millisecond.request import quoting_prompt, standard_prompt
from llm_latency import hardware, models
from llm_latency.arguments import dtype_name
from llm_latency.generation import RecomputeStepper, Stepper, TransformersStepper

BASELINE = "kv-cache"  # rung 1: the baseline of every ratio


def _always() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to answer the request.

    name: for the command line and the JSON. title: for tables and plots. build: profile name to a ready stepper.
    weights, cache: format of the bytes a decode step reads, as `roofline` names it; cache "none" computes every key and
    value again. on_path: part of the cumulative
    way from the baseline to the fastest; a rung off the path is measured against the baseline alone.
    alone: name of the rung that adds this one's step to the baseline alone, where there is one; or to another rung than
    the one before it on the path, which `over` then names.
    unavailable: returns why this machine cannot run it, or None. exact: promises the baseline's greedy ids.
    prompt: makes the request of a tokenizer; another than the standard one must be as long, so that times compare.
    """

    name: str
    title: str
    notebook: str
    build: Callable[[str | None], Stepper]
    weights: str = "float32"
    cache: str = "float32"
    on_path: bool = False
    exact: bool = False
    alone: str = ""
    over: str = BASELINE
    unavailable: Callable[[], str | None] = _always
    prompt: Callable[..., str] = standard_prompt

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace(".", "").isalnum():
            raise ValueError(f"rung name {self.name!r}; expected letters, digits and hyphens")


def _no_cache(profile: str | None) -> Stepper:
    return RecomputeStepper(models.load_target(profile, dtype=torch.float32, attn_implementation="eager"))


def _kv_cache(profile: str | None) -> Stepper:
    return TransformersStepper(models.load_target(profile, dtype=torch.float32, attn_implementation="eager"))


def _static_cache(profile: str | None) -> Stepper:
    from llm_latency.generation import StaticStepper

    return StaticStepper(models.load_target(profile, dtype=torch.float32, attn_implementation="eager"))


def _sdpa(profile: str | None) -> Stepper:
    return TransformersStepper(models.load_target(profile, dtype=torch.float32, attn_implementation="sdpa"))


def _half_eager(profile: str | None) -> Stepper:
    model = models.load_target(profile, dtype=hardware.half_dtype(), attn_implementation="eager")
    return TransformersStepper(model)


def _half_sdpa(profile: str | None) -> Stepper:
    return TransformersStepper(models.load_target(profile, dtype=hardware.half_dtype(), attn_implementation="sdpa"))


def _compiled_fp32(profile: str | None) -> Stepper:
    from llm_latency.generation import CompiledStepper

    return CompiledStepper(models.load_target(profile, dtype=torch.float32, attn_implementation="eager"))


def _compiled_half(profile: str | None) -> Stepper:
    from llm_latency.generation import CompiledStepper

    return CompiledStepper(models.load_target(profile, dtype=hardware.half_dtype(), attn_implementation="sdpa"))


def _int8_cache(profile: str | None) -> Stepper:
    from llm_latency.kv_cache import Int8KVCache

    model = models.load_target(profile, dtype=hardware.half_dtype(), attn_implementation="int8_kv")
    return TransformersStepper(model, lambda: Int8KVCache(model.config))


def _fast(weights: str, **options) -> Callable[[str | None], Stepper]:
    def build(profile: str | None) -> Stepper:
        from every_millisecond.ladder import speculation

        return speculation.load_fast(profile, weights, **options)[0]

    return build


def _quantised_alone(weights: str) -> Callable[[str | None], Stepper]:
    def build(profile: str | None) -> Stepper:
        from llm_latency.quantization import quantize_

        model = models.load_target(profile, dtype=torch.bfloat16)
        quantize_(model, weights, skip=["lm_head"] if weights == "int4" else [], keep_bfloat16=True)
        return TransformersStepper(model)

    return build


def _speculative(weights: str, draft: str, **options) -> Callable[[str | None], Stepper]:
    def build(profile: str | None) -> Stepper:
        from every_millisecond.ladder import speculation

        return speculation.build(profile, weights, draft, **options)

    return build


def _no_draft() -> str | None:
    from every_millisecond.ladder import speculation

    return speculation.unavailable("conditioned")


def _gpu() -> str | None:
    return "INT8 activations are rounded on the CPU alone here" if torch.cuda.is_available() else None


def _gpu_or_no_draft() -> str | None:
    return _gpu() or _no_draft()


def _flash(profile: str | None) -> Stepper:
    import llm_latency.attention  # noqa: F401  (registers the implementation)

    return TransformersStepper(
        models.load_target(profile, dtype=torch.float32, attn_implementation="llm_latency_flash")
    )


def _no_compiler() -> str | None:
    return doctor.compile_unavailable()


_HALF = dtype_name(hardware.half_dtype())  # FP16 on a GPU without BF16 units
_HALF_TITLE = {"bfloat16": "BF16", "float16": "FP16"}[_HALF]

RUNGS: list[Rung] = [
    Rung("no-cache", "FP32, no KV cache", "04", _no_cache, cache="none", on_path=True, exact=True),
    Rung(BASELINE, "KV cache", "04", _kv_cache, on_path=True, exact=True),
    Rung("static-cache", "static cache alone", "04", _static_cache, exact=True),
    Rung("half-alone", f"{_HALF_TITLE} alone", "05", _half_eager, weights=_HALF, cache=_HALF),
    Rung("compiled-alone", "static + compile alone", "05", _compiled_fp32, exact=True, unavailable=_no_compiler),
    Rung("sdpa", "+ SDPA", "05", _sdpa, on_path=True, exact=True, alone="sdpa"),
    Rung("half", f"+ {_HALF_TITLE}", "05", _half_sdpa, weights=_HALF, cache=_HALF, on_path=True, alone="half-alone"),
    Rung(
        "compiled",
        "+ static cache, compile",
        "05",
        _compiled_half,
        weights=_HALF,
        cache=_HALF,
        on_path=True,
        alone="compiled-alone",
        unavailable=_no_compiler,
    ),
    Rung("flash-alone", "our FlashAttention alone", "06", _flash, exact=True),
    Rung("int8-cache", "INT8 KV cache alone", "07", _int8_cache, weights=_HALF, cache="int8"),
    Rung("int8-alone", "INT8 weights alone", "08", _quantised_alone("int8"), weights="int8", cache="bfloat16"),
    Rung("int4-alone", "INT4 weights alone", "08", _quantised_alone("int4"), weights="int4", cache="bfloat16"),
    Rung("fast-fp32", "fast decoder alone", "08", _fast("float32"), exact=True),
    Rung(
        "fast",
        "+ fast decoder",
        "08",
        _fast("bfloat16"),
        weights="bfloat16",
        cache="bfloat16",
        on_path=True,
        alone="fast-fp32",
    ),
    Rung("int8", "fast decoder, INT8", "08", _fast("int8"), weights="int8", cache="bfloat16"),
    Rung(
        "int4",
        "+ INT4 weights",
        "08",
        _fast("int4"),
        weights="int4",
        cache="bfloat16",
        on_path=True,
        alone="int4-alone",
    ),
    Rung(
        "int8-dynamic",
        "INT8 x INT8 instead of INT4",
        "08",
        _fast("int8_dynamic"),
        weights="int8",
        on_path=True,
        unavailable=_gpu,
    ),
    Rung(
        "prefix",
        "INT8 x INT8, exercise text cached",
        "11",
        _fast("int8_dynamic", keep_prefix=True),
        weights="int8",
        unavailable=_gpu,
    ),
    Rung(
        "speculation-fp32",
        "fast decoder, FP32 + speculation",
        "09",
        _speculative("float32", "conditioned"),
        exact=True,
        unavailable=_no_draft,
    ),
    Rung(
        "speculation",
        "fast decoder + speculation",
        "09",
        _speculative("bfloat16", "conditioned"),
        weights="bfloat16",
        cache="bfloat16",
        unavailable=_no_draft,
    ),
    Rung(
        "speculation-int4",
        "INT4 + speculation",
        "09",
        _speculative("int4", "conditioned"),
        weights="int4",
        cache="bfloat16",
        unavailable=_no_draft,
    ),
    Rung(
        "int4-everything",
        "INT4 + speculation, exercise text cached",
        "12",
        _speculative("int4", "conditioned", keep_prefix=True),
        weights="int4",
        cache="bfloat16",
        unavailable=_no_draft,
    ),
    Rung(
        "speculation-int8",
        "+ speculation",
        "09",
        _speculative("int8_dynamic", "conditioned"),
        weights="int8",
        on_path=True,
        alone="speculation-fp32",
        over="fast-fp32",
        unavailable=_gpu_or_no_draft,
    ),
    Rung(
        "everything",
        "+ exercise text cached",
        "12",
        _speculative("int8_dynamic", "conditioned", keep_prefix=True),
        weights="int8",
        on_path=True,
        alone="prefix",
        over="int8-dynamic",
        unavailable=_gpu_or_no_draft,
    ),
    Rung(
        "lookup",
        "fast decoder + prompt lookup",
        "09",
        _speculative("bfloat16", "lookup"),
        weights="bfloat16",
        cache="bfloat16",
    ),
    Rung(
        "lookup-quote",
        "prompt lookup, a request that quotes its prompt",
        "09",
        _speculative("bfloat16", "lookup"),
        weights="bfloat16",
        cache="bfloat16",
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
