"""The course on the pretend GPU: tiny models in the place of the profiles', and measurements of a round or two.

The tiny models keep what is awkward in the real ones: Qwen2.5's seven query heads on one KV head of 128, its biases, an
untied head, a vocabulary wider than its draft's, both wider than the tokenizer's; a 7B target without grouped queries;
FP16 on a card without BF16. The default profile is itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from pretend_gpu.card import CARDS
from pretend_gpu.patches import pretend

CARDS_OF = {
    "smollm2-135m": "T4",
    "smollm2-1.7b": "T4",
    "qwen2.5-7b": "A100-40GB",
    "llama-7b-shape": "A100-40GB",
}
LARGER = {"T4": "L4", "A100-40GB": "A100-80GB"}
TOKENIZER = 49_152  # ids of the bundled tokenizer, which every profile has here
NEW_TOKENS = 6
LONGEST = 12  # tokens of any other answer
READING = 3000  # characters of the text that perplexity is taken of, some 680 tokens
_QWEN = dict(hidden_size=896, max_position_embeddings=32_768, rms_norm_eps=1e-6)
_LLAMA = dict(vocab_size=TOKENIZER, max_position_embeddings=8192, tie_word_embeddings=True)


def tiny_config(name: str) -> PretrainedConfig:
    """The configuration that stands for a model of the hub. Raises KeyError for one that no profile names."""
    return {
        "Qwen/Qwen2.5-7B-Instruct": lambda: Qwen2Config(
            **_QWEN, intermediate_size=1184, num_hidden_layers=3, num_attention_heads=7, num_key_value_heads=1,
            vocab_size=TOKENIZER + 256, tie_word_embeddings=False,
        ),
        "Qwen/Qwen2.5-0.5B-Instruct": lambda: Qwen2Config(
            **_QWEN | dict(hidden_size=448), intermediate_size=608, num_hidden_layers=2, num_attention_heads=7,
            num_key_value_heads=1, vocab_size=TOKENIZER + 128, tie_word_embeddings=True,
        ),
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": lambda: LlamaConfig(
            **_LLAMA, hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4,
        ),
        "SmolLM2-135M-Instruct": lambda: LlamaConfig(  # as a draft
            **_LLAMA, hidden_size=192, intermediate_size=512, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1,
        ),
    }[name]()  # fmt: skip


SHAPES = {
    "llama-7b-shape": dict(num_hidden_layers=3, hidden_size=256, intermediate_size=688, num_attention_heads=4),
    "llama-160m-shape": dict(num_hidden_layers=2, hidden_size=128, intermediate_size=512, num_attention_heads=2),
}


@functools.cache
def _tiny(name: str) -> PreTrainedModel:
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)  # default initialisation gives nearly flat logits
    return model


def use_tiny_models(profile: str) -> None:
    """Let `llm_latency.models` answer with tiny models, but for the default profile's own."""
    from llm_latency.models import bundled, loading

    load, where, config = loading._load, loading._where, loading.load_config

    def small(source) -> bool:
        return getattr(source, "kind", None) == "hub" or (
            getattr(source, "kind", None) == "bundled" and profile != "smollm2-135m"
        )

    def tiny_load(source, dtype, attention, device):
        if not small(source):
            return load(source, dtype, attention, device)
        import copy

        model = copy.deepcopy(_tiny(source.name)).to(dtype)
        model.set_attn_implementation(attention or "sdpa")
        return model.to(device)

    def tiny_where(source, *, tokenizer: bool = False):
        if getattr(source, "kind", None) == "hub":
            return str(bundled.prepare()), {"local_files_only": True}
        return where(source, tokenizer=tokenizer)

    def tiny_load_config(profile: str | None = None):
        source, _ = loading._resolve(profile, "target")
        return tiny_config(source.name) if small(source) else config(profile)

    loading._load, loading._where = tiny_load, tiny_where
    loading.load_config = sys.modules["llm_latency.models"].load_config = tiny_load_config
    loading.SHAPES.update(SHAPES)


def use_short_measurements() -> None:
    """A warm-up and two rounds at most, answers of a few tokens, and ceilings from the datasheet."""
    import llm_latency.timing as timing
    from every_millisecond import request
    from llm_latency import hardware, quality

    def capped(function, **limits):
        @functools.wraps(function)
        def call(*args, **options):
            return function(*args, **options | {n: min(options.get(n, most), most) for n, most in limits.items()})

        return call

    for name, limits in (("measure", dict(warmup=1, repeats=2)), ("compare", dict(rounds=2))):
        short = capped(getattr(timing, name), **limits)
        setattr(timing, name, short)
        setattr(sys.modules[f"llm_latency.timing.{name}"], name, short)
    request.NEW_TOKENS = NEW_TOKENS
    text = quality.reading_text()[:READING]
    quality.reading_text = lambda: text
    rates = {"float32": 300.0, "bfloat16": 300.0, "float16": 300.0}
    fixed = hardware.Ceilings(
        "cuda", torch.cuda.get_device_name(), torch.get_num_threads(), 300.0, 300.0, rates, {n: 6e4 for n in rates}
    )
    hardware.ceilings = lambda *_, **__: fixed


def use_short_answers() -> None:
    """No answer of more than a dozen tokens: tiny models of random weights say nothing, and seldom guess right."""
    from every_millisecond.laboratory import workload
    from llm_latency import generation
    from llm_latency.speculative import SpeculativeDecoder

    def short(function):
        @functools.wraps(function)
        def call(first, second, new_tokens, *args, **options):
            return function(first, second, min(new_tokens, LONGEST), *args, **options)

        return call

    def mixed_asks(*args, new_tokens: tuple[int, int] = (4, NEW_TOKENS), **options) -> list[workload.Ask]:
        return asks(*args, new_tokens=(min(new_tokens[0], NEW_TOKENS), NEW_TOKENS), **options)

    asks, workload.mixed_asks = workload.mixed_asks, mixed_asks
    generation.generate = short(generation.generate)
    SpeculativeDecoder.generate = short(SpeculativeDecoder.generate)


def set_the_stage(profile: str, stack: contextlib.ExitStack) -> None:
    """Open the pretend device of a profile on the stack, and let the course play on it."""
    os.environ["LLM_LATENCY_PROFILE"] = profile
    stack.enter_context(pretend(os.environ.get("PRETEND_GPU_CARD") or CARDS_OF[profile]))
    use_tiny_models(profile)
    use_short_measurements()


def card_for(profile: str, number: str) -> str:
    """The profile's card; for a notebook that the true models do not fit there, the next larger one of ours."""
    from every_millisecond import gpu_memory

    card = CARDS_OF[profile]
    if number in gpu_memory.NOTEBOOKS and gpu_memory.count(number, profile).nbytes > CARDS[card].total_memory:
        return LARGER[card]
    return card


def child_environment(profile: str, card: str | None = None) -> dict[str, str]:
    """For processes that a notebook starts: they find themselves on the stage, too (`child/sitecustomize.py`)."""
    here = Path(__file__).parent
    paths = [str(here / "child"), str(here.parent), os.environ.get("PYTHONPATH", "")]
    own = {"PRETEND_GPU_PROFILE": profile, "PRETEND_GPU_CARD": card or CARDS_OF[profile]}
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
