"""Load a profile's target, draft and tokenizer; or any Llama/Qwen2-like model from a local directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from llm_latency.arguments import check_device, dtype_name
from llm_latency.models.bundled import prepare, split_digits
from llm_latency.models.checkpoint import (
    check_config,
    check_keys,
    check_quantisation,
    check_tokenizer,
    check_weights,
    quantisation_of,
)
from llm_latency.models.drafts import load_plain
from llm_latency.models.profiles import PROFILES, Source, choose_profile

# Llama-2-7B's published shape, and that of the 160M model often used as its draft. Their vocabulary is that of the
# tokenizer they borrow: with Llama's own 32,000 a prompt would hold ids that have no row. It is 2% more weights.
BORROWED_VOCABULARY = 49_152
SHAPES = {
    "llama-7b-shape": dict(num_hidden_layers=32, hidden_size=4096, intermediate_size=11008, num_attention_heads=32),
    "llama-160m-shape": dict(num_hidden_layers=12, hidden_size=768, intermediate_size=3072, num_attention_heads=12),
}


def load_target(
    profile: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """The target model of a profile, or of a local directory with safetensors, in evaluation mode.

    profile: a name of `profile_names()`, the path of a folder (a `Path`, or with "./" in front if it is called like a
    profile), or None (picked for this machine).
    dtype: None takes the profile's own (FP32 on a CPU). attn_implementation: as in transformers; None is "sdpa".
    device: None takes CUDA where there is one.

    Raises ValueError for an unknown profile, dtype or device, or weights that do not fit their configuration,
    FileNotFoundError for a file that a folder lacks, and RuntimeError if the model cannot be fetched.
    """
    source, own_dtype = _resolve(profile, "target")
    return _load(source, dtype or own_dtype, attn_implementation, check_device(device))


def load_draft(
    profile: str | None = None, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> PreTrainedModel:
    """The small model that guesses for a profile's target in speculative decoding.

    The default profile's is a plain Llama of a layer or two that comes with this package (docs/draft_model_card.md).

    Raises ValueError if the profile has none.
    """
    source, own_dtype = _resolve(profile, "draft")
    return _load(source, dtype or own_dtype, None, check_device(device))


def load_config(profile: str | None = None) -> PretrainedConfig:
    """The configuration of a profile's target, or of a local directory's model, without its weights."""
    source, _ = _resolve(profile, "target")
    if isinstance(source, Source) and source.kind == "shape":
        return _shape_config(source.name)
    if isinstance(source, Path):
        check_config(source)
    place, arguments = _where(source)
    return AutoConfig.from_pretrained(place, trust_remote_code=False, **arguments)


def load_tokenizer(profile: str | None = None):
    """The tokenizer of a profile or of a local directory.

    The `llama-7b-shape` profile has no text of its own and borrows the bundled model's tokenizer: its ids are valid
    there too. Raises ValueError or FileNotFoundError for a folder whose tokenizer is missing, cut or empty.
    """
    source, _ = _resolve(profile, "target")
    own = isinstance(source, Path)
    if own:
        check_tokenizer(source)
    place, arguments = _where(source, tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **arguments)
    if own and not tokenizer.encode("a", add_special_tokens=False):
        raise ValueError(f"the tokenizer in {place} makes no token of 'a'; expected one with a vocabulary")
    return tokenizer if own or source.kind == "hub" else split_digits(tokenizer)


def _resolve(profile: str | None, role: str) -> tuple[Source | Path, torch.dtype]:
    if profile is not None and not isinstance(profile, str | Path):
        raise TypeError(f"profile={profile!r} is a {type(profile).__name__}; expected a name, a directory or None")
    folder = Path(profile or "").expanduser()  # "" and None: the current folder, which nobody means
    if profile and profile not in PROFILES and folder.is_dir():
        on_gpu = torch.cuda.is_available()
        return folder, torch.bfloat16 if on_gpu else torch.float32
    if isinstance(profile, Path) or (profile and folder.name != profile):
        raise FileNotFoundError(f"profile={str(profile)!r} is no folder; expected one with a model, or a name")
    chosen, _ = choose_profile(profile)
    source = chosen.target if role == "target" else chosen.draft
    if source is None:
        raise ValueError(f"profile {chosen.name!r} has no draft model; use prompt lookup, or a directory as profile")
    return source, chosen.dtype


def _where(source: Source | Path, *, tokenizer: bool = False) -> tuple[str, dict]:
    """What from_pretrained wants: a place, and the arguments that pin it."""
    if isinstance(source, Path):
        return str(source), {"local_files_only": True}
    if source.kind == "bundled" or (source.kind == "shape" and tokenizer):
        return str(prepare()), {"local_files_only": True}
    return source.name, {"revision": source.revision}  # a commit: it fixes every file by its hash


def _load(source: Source | Path, dtype: torch.dtype, attention: str | None, device: torch.device) -> PreTrainedModel:
    dtype_name(dtype)  # raises for one that no part of the course knows
    attention = attention or "sdpa"
    if isinstance(source, Source) and source.kind == "shape":
        return random_model(source.name, dtype, attention, device)
    if isinstance(source, Source) and source.kind == "shipped":
        with _quiet():
            return load_plain(str(prepare()), dtype).to(device).eval()
    if isinstance(source, Path):
        check_config(source)
        check_weights(source)
    place, arguments = _where(source)
    config = AutoConfig.from_pretrained(place, trust_remote_code=False, **arguments)
    check_quantisation(config, device)
    with _quiet():
        model, loaded = AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,  # never a pickle
            ignore_mismatched_sizes=True,  # they are named below
            output_loading_info=True,
            trust_remote_code=False,
            **arguments,
        )
    if quantisation_of(config) is None:  # such a method renames tensors by rules of its own
        check_keys(place, loaded)
    return model.to(device).eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for a load that takes a second, and no table of keys: what is wrong is raised."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def random_model(name: str, dtype: torch.dtype, attention: str, device: torch.device) -> PreTrainedModel:
    """A model of a known shape with random weights, made on the device itself: right for timing, wrong for text."""
    config = _shape_config(name)
    config._attn_implementation = attention
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def _shape_config(name: str) -> LlamaConfig:
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; expected one of {', '.join(SHAPES)}")
    sizes = dict(vocab_size=BORROWED_VOCABULARY, max_position_embeddings=4096, tie_word_embeddings=False)
    return LlamaConfig(**sizes, **SHAPES[name])
