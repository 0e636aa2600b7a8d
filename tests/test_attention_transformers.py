"""Our attention inside real transformers models: same greedy ids as eager, with padding and every kind of cache."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, StaticCache

import llm_latency.attention  # noqa: F401  (registers the implementations)
from llm_latency.attention import IMPLEMENTATIONS, transformers_hook
from llm_latency.attention.dispatch import cannot

NO_TRITON = cannot("triton", torch.zeros(1, 1, 1, 16))


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def model(request):
    return request.getfixturevalue(request.param)


def padded_prompts(rows: int = 2, length: int = 13, pad: int = 5):
    """Token ids [rows, length] whose first row has `pad` tokens of padding on the left, and their attention mask."""
    ids = torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(ids)
    ids[0, :pad], attention_mask[0, :pad] = 2, 0
    return ids, attention_mask


def greedy(model, implementation: str, ids, attention_mask, new: int = 12, **options):
    model.set_attn_implementation(implementation)
    return model.generate(
        ids, attention_mask=attention_mask, max_new_tokens=new, do_sample=False, eos_token_id=None, **options
    )


@pytest.mark.parametrize("options", [{}, dict(cache_implementation="static"), dict(use_cache=False)], ids=str)
def test_greedy_ids_equal_eager_with_left_padding(model, options):
    """Guards against a mask that never arrives: padding and a static cache's empty slots would be attended to."""
    ids, attention_mask = padded_prompts()
    expected = greedy(model, "eager", ids, attention_mask, **options)
    assert torch.equal(greedy(model, "llm_latency_flash", ids, attention_mask, **options), expected)


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
def test_greedy_ids_equal_eager_through_the_interpreted_kernels(tiny_llama):
    """Guards against a decode kernel that is right alone and wrong behind a model's layouts and masks."""
    ids, attention_mask = padded_prompts(length=9, pad=3)
    expected = greedy(tiny_llama, "eager", ids, attention_mask, new=3)
    assert torch.equal(greedy(tiny_llama, "llm_latency_triton", ids, attention_mask, new=3), expected)


def test_one_padded_row_is_as_alone(model):
    """Guards against a batch whose padded row differs from the same prompt without padding."""
    ids, attention_mask = padded_prompts()
    together = greedy(model, "llm_latency_flash", ids, attention_mask)
    alone = greedy(model, "llm_latency_flash", ids[:1, 5:], attention_mask[:1, 5:])
    assert torch.equal(together[0, 5:], alone[0])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_within_twice_the_peers_error(model, dtype):
    """Guards against a small error per layer that adds up; the peer is eager in the same dtype, the truth FP64."""
    ids, _ = padded_prompts(length=40, pad=0)  # eager in FP64 has NaN in padded rows: its mask's minimum overflows

    def logits(dtype: torch.dtype, implementation: str):
        changed = copy.deepcopy(model).to(dtype)
        changed.set_attn_implementation(implementation)
        return changed(ids).logits.double()

    truth = logits(torch.float64, "eager")
    ours = (logits(dtype, "llm_latency_flash") - truth).abs().max()
    assert ours <= 2 * (logits(dtype, "eager") - truth).abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("make_cache", ["dynamic", "static"])
def test_a_chunk_after_a_cache(tiny_llama, make_cache):
    """Guards against top-left causality when several tokens follow a cache, as in speculative verification."""
    ids, _ = padded_prompts(rows=1, pad=0)
    logits = {}
    for implementation in ("eager", "llm_latency_flash"):
        tiny_llama.set_attn_implementation(implementation)
        cache = StaticCache(config=tiny_llama.config, max_cache_len=32) if make_cache == "static" else None
        output = None
        for chunk in ids.split([6, 1, 4, 2], dim=1):
            output = tiny_llama(chunk, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
        logits[implementation] = output.logits
    assert torch.allclose(logits["eager"], logits["llm_latency_flash"], atol=1e-3)


@torch.inference_mode()
def test_a_sliding_window_is_kept():
    """Guards against taking every causal model for a fully causal one."""
    torch.manual_seed(2)
    config = MistralConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, sliding_window=4, max_position_embeddings=64,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    ids, _ = padded_prompts(rows=1, pad=0)
    logits = {}
    for implementation in ("eager", "llm_latency_flash"):
        model.set_attn_implementation(implementation)
        logits[implementation] = model(ids).logits
    assert torch.allclose(logits["eager"], logits["llm_latency_flash"], atol=1e-5)


def test_registering_twice_changes_nothing(tiny_llama):
    """Guards against wrappers that pile up when a notebook reloads the module."""
    from transformers import modeling_utils

    before = modeling_utils.lazy_import_flash_attention
    importlib.reload(transformers_hook)
    assert modeling_utils.lazy_import_flash_attention is before
    for name in IMPLEMENTATIONS:
        tiny_llama.set_attn_implementation(name)
        assert tiny_llama.config._attn_implementation == name


def test_what_it_cannot_do_is_said(tiny_llama):
    """Guards against softcapping, dropout or attention weights that are asked for and silently left out."""
    ids, _ = padded_prompts()
    tiny_llama.set_attn_implementation("llm_latency_flash")
    with pytest.raises(ValueError, match="softcap"):
        tiny_llama(ids, softcap=30.0)
    tiny_llama.config.attention_dropout = 0.1
    for layer in tiny_llama.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout=0.1.*eval"):
        tiny_llama.train()(ids)
    tiny_llama.eval()
    float_mask = torch.zeros(2, 1, 13, 13)
    with pytest.raises(TypeError, match="bool"):
        tiny_llama(ids, attention_mask=float_mask)


@pytest.mark.long
@torch.inference_mode()
def test_a_compiled_model_gives_the_same(tiny_llama):
    """Guards against torch.compile tracing into the block loops."""
    ids, attention_mask = padded_prompts()
    tiny_llama.set_attn_implementation("llm_latency_flash")
    eager = tiny_llama(ids, attention_mask=attention_mask).logits
    compiled = torch.compile(tiny_llama, backend="eager")(ids, attention_mask=attention_mask).logits
    assert torch.allclose(eager, compiled, atol=1e-5)


@pytest.mark.long
@pytest.mark.model
def test_the_real_model_gives_the_same_ids(target, tokenizer):
    """Guards against an error that only real activations, 30 layers and head_dim 64 bring out."""
    model = copy.copy(target)
    before = model.config._attn_implementation
    texts = ["Why is the sky blue?", "Name three prime numbers and say in one sentence what they have in common."]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    try:
        expected = greedy(model, "eager", batch["input_ids"], batch["attention_mask"], new=16)
        found = greedy(model, "llm_latency_flash", batch["input_ids"], batch["attention_mask"], new=16)
    finally:
        model.set_attn_implementation(before)
    assert torch.equal(found, expected)
