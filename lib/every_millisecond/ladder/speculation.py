"""Speculative decoders for the ladder and the command line: which target, which draft, and on which prompts."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from every_millisecond.laboratory.speculation import Explanation, explain
from every_millisecond.request import shared_prefix, standard_prompt
from llm_latency import models
from llm_latency.engine import FastDecoder, kernel_library
from llm_latency.engine.kernel_decoder import KernelDecoder, PrefixKernelDecoder
from llm_latency.engine.prefix import PrefixDecoder
from llm_latency.models import drafts
from llm_latency.speculative import ModelDraft, PromptLookupDraft, SpeculativeDecoder
from llm_latency.speculative.conditioned_draft import ConditionedDraft
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape, load_feature_layer
from llm_latency.speculative.kernel_draft import KernelDraft
from llm_latency.text.prompt import chat_text, encode_prompt

DRAFTS = ("conditioned", "plain", "lookup")
OWN_DRAFT = "conditioned-draft.safetensors"  # in a model's folder: a conditioned draft that was distilled for it
GAMMA = {"conditioned": 3, "plain": 3, "lookup": 5}

# Beside the standard request: topics that no shipped draft was trained on.
QUESTIONS = (
    "Explain to a beginner how this exercise is solved: validating a Sudoku board.",
    "Explain why the ocean is salty in simple words.",
)


def load_pair(profile: str | None, weights: str, draft: str) -> tuple[FastDecoder, object]:
    """A fast decoder with `weights` as target and a draft for it.

    draft: "conditioned" or "plain" (shipped with the course, for the default profile), "lookup", or a directory with a
    small model. Of another profile, "plain" is the profile's own draft model.

    Raises ValueError for an unknown draft, or one that this profile has not.
    """
    target, model = load_fast(profile, weights)
    return target, load_draft(profile, model, draft)


def load_fast(
    profile: str | None, weights: str, *, keep_prefix: bool = False, **options
) -> tuple[FastDecoder, torch.nn.Module]:
    """A fast decoder of the profile's target, and the transformers model that it was made from.

    "int8_dynamic" is calibrated with the standard request. keep_prefix: what all requests about the exercise have in
    common is read once, here. options: further ones of `FastDecoder.from_model`.
    """
    # From FP32 on a CPU, which rounds once, and eager: compiling takes minutes and gains a tenth there. On CUDA from
    # the profile's own dtype, compiled and recorded as graphs.
    on_gpu = torch.cuda.is_available()
    model = models.load_target(profile, dtype=None if on_gpu else torch.float32)
    if weights == "int8_dynamic":
        tokenizer = models.load_tokenizer(profile)
        options["calibration"] = _ids(encode_prompt(tokenizer, standard_prompt(tokenizer)), model)
    kind = PrefixDecoder if keep_prefix else FastDecoder
    decoder = kind.from_model(model, weights, compile=on_gpu, **options)
    if keep_prefix:
        decoder.keep_prefix(_ids(shared_prefix(models.load_tokenizer(profile)), model))
    return decoder, model


def load_kernel(profile: str | None, *, keep_prefix: bool = False, **options) -> tuple[KernelDecoder, torch.nn.Module]:
    """As `load_fast`, the decoder whose step is one function. options: of `KernelDecoder.from_model`."""
    model = models.load_target(profile, dtype=torch.float32)
    decoder = (PrefixKernelDecoder if keep_prefix else KernelDecoder).from_model(model, **options)
    if keep_prefix:
        decoder.keep_prefix(_ids(shared_prefix(models.load_tokenizer(profile)), model))
    return decoder, model


def _ids(ids: list[int], model) -> Tensor:
    """Ids [1, n] that the model knows: the ladder's twins know few, and any will do for them."""
    return torch.tensor([ids], device=model.device) % model.config.vocab_size


def load_draft(profile: str | None, model, draft: str):
    """The draft of that name for a transformers model, the target's; see `load_pair`."""
    if draft == "lookup":
        return PromptLookupDraft()
    if draft not in DRAFTS:
        return ModelDraft(_fast(models.load_draft(draft)))
    if draft == "plain":
        return ModelDraft(_fast(models.load_draft(profile), drafts.frequent_ids() if _is_default(profile) else None))
    layer = _conditioned_layer(profile, model)
    return ConditionedDraft.for_model(layer, model, weights="int8" if model.device.type == "cpu" else None)


def _conditioned_layer(profile: str | None, model) -> FeatureLayer:
    own = Path(profile or "") / OWN_DRAFT
    if profile and own.exists():
        tensors = load_file(own, device=str(model.device))
        layer = FeatureLayer(FeatureShape.of_config(model.config), tensors["head_ids"])
        layer.load_state_dict(tensors)
        return layer.to(model.device).eval().requires_grad_(False)
    if not _is_default(profile):
        raise ValueError(f"the conditioned draft was distilled for smollm2-135m, not {profile}; use plain or lookup")
    return load_feature_layer(device=model.device)


def _has_conditioned(profile: str | None) -> bool:
    return _is_default(profile) or bool(profile and (Path(profile) / OWN_DRAFT).exists())


def unavailable(draft: str) -> str | None:
    """Why a shipped draft cannot be used here, or None."""
    try:
        drafts.draft_path(draft)
    except FileNotFoundError:
        return f"the {draft} draft's weights are missing: install the package again, or run tools/distil_draft.py"
    return None


def kernel_unavailable() -> str | None:
    """Why the kernel cannot serve here, with the remedy; or None."""
    if torch.cuda.is_available():
        return "the kernel runs on the CPU, and this machine's models are on its GPU; hide it to see the kernel"
    return kernel_library.problem()


def _is_default(profile: str | None) -> bool:
    """Whether this is the profile whose drafts are shipped."""
    if profile and Path(profile).is_dir():
        return False
    return models.choose_profile(profile)[0].name == "smollm2-135m"


def build(profile: str | None, weights: str, draft: str, *, keep_prefix: bool = False) -> SpeculativeDecoder:
    """A rung's stepper: the fast decoder with `weights`, sped up by `draft`; by the profile's own small model where no
    conditioned draft was distilled for it."""
    if draft == "conditioned" and not _has_conditioned(profile):
        draft = "plain"
    target, model = load_fast(profile, weights, keep_prefix=keep_prefix)
    return SpeculativeDecoder(target, load_draft(profile, model, draft), GAMMA.get(draft, 3))


def build_kernel(
    profile: str | None, draft: str, *, keep_prefix: bool = False, activations: str = "int16"
) -> SpeculativeDecoder:
    """The same with the kernel as target, and a conditioned draft in the kernel, too."""
    target, model = load_kernel(profile, keep_prefix=keep_prefix, activations=activations)
    guesser = load_kernel_draft(profile, model, draft, activations=activations)
    return SpeculativeDecoder(target, guesser, GAMMA.get(draft, 3))


def load_kernel_draft(profile: str | None, model, draft: str, **options):
    """As `load_draft`, with the conditioned draft in the kernel; options: of `KernelDraft`."""
    if draft == "conditioned":
        return KernelDraft(_conditioned_layer(profile, model), model, **options)
    return load_draft(profile, model, draft)


def explain_here(
    profile: str | None = None,
    *,
    weights: str = "bfloat16",
    draft: str = "conditioned",
    questions: list[str] | None = None,
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5),
    max_new_tokens: int = 48,
    rounds: int = 3,
    temperature: float = 0.0,
) -> Explanation:
    """Measure whether speculation pays on this machine, and why; see `speculative.explain`.

    questions: what to ask; None asks the standard request and two questions on topics that the drafts have not seen.
    """
    tokenizer = models.load_tokenizer(profile)
    texts = [chat_text(tokenizer, question) for question in questions or QUESTIONS]
    if not questions:
        texts.insert(0, standard_prompt(tokenizer))
    prompts = [torch.tensor([encode_prompt(tokenizer, text)]) for text in texts]
    target, guesser = load_pair(profile, weights, draft)
    sampling = dict(temperature=temperature, generator=_generator(target, temperature))
    return explain(
        target, guesser, prompts, gammas=gammas, max_new_tokens=max_new_tokens, rounds=rounds,
        eos_token_id=tokenizer.eos_token_id, **sampling,
    )  # fmt: skip


def _generator(target: FastDecoder, temperature: float) -> torch.Generator | None:
    return torch.Generator(device=target.device).manual_seed(0) if temperature > 0 else None


def _fast(model, head_ids: Tensor | None = None) -> FastDecoder:
    # In INT8 on a CPU: what rounding costs in acceptance is less than what the bytes cost in time.
    on_gpu = model.device.type == "cuda"
    return FastDecoder.from_model(model, "bfloat16" if on_gpu else "int8", compile=on_gpu, head_ids=head_ids)
