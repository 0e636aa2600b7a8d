"""Perplexity and drift: each token once, decoded through the cache, against values counted by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import property_settings
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from every_millisecond.laboratory.cache_peers import (
    held_bytes,
    late_token_error,
    operations_that_work,
    quantised_caches,
)
from llm_latency.generation import TransformersStepper
from llm_latency.kv_cache import Int8KVCache
from llm_latency.quality import drift, perplexity, reading_text
from llm_latency.quality.perplexity import outputs_in_chunks


class Prescribed(torch.nn.Module):
    """A model that gives token t the log-likelihood -losses[t], whatever comes before it; it sees no positions.

    Its ids count 1, 2, 3, ... so that it knows which token comes next.
    """

    device = torch.device("cpu")

    def __init__(self, losses):
        super().__init__()
        self.losses = losses
        self.config = SimpleNamespace(vocab_size=len(losses) + 2, max_position_embeddings=2048)
        self.scored: list[int] = []

    def forward(self, input_ids, **kwargs):
        vocabulary = len(self.losses) + 2
        logits = torch.zeros(*input_ids.shape, vocabulary)
        for i, token in enumerate(input_ids[0].tolist()):
            following = token + 1
            if following < len(self.losses):
                p = math.exp(-self.losses[following])
                logits[0, i] = math.log((1 - p) / (vocabulary - 1))
                logits[0, i, following] = math.log(p)
        return SimpleNamespace(logits=logits)


def test_perplexity_is_over_tokens():
    """Case 24: three tokens at 1 nat and one at 3 give exp(6 / 4) = 4.4817."""
    assert perplexity(Prescribed([0.0, 1.0, 1.0, 1.0, 3.0]), torch.arange(5)) == pytest.approx(4.4817, abs=1e-3)


@property_settings(50)
@given(n=st.integers(2, 40))
def test_each_token_counts_exactly_once(n):
    """Guards against a first or last token that is left out, or counted twice."""
    losses = [0.0] + [0.1 * (1 + i % 7) for i in range(n - 1)]
    expected = math.exp(sum(losses) / (n - 1))
    assert perplexity(Prescribed(losses), torch.arange(n)) == pytest.approx(expected, 1e-4)


@pytest.mark.parametrize("n", [2, 3, 9, 100, 131])
def test_with_and_without_a_cache(tiny_llama, n):
    """Guards against an off-by-one at the borders of chunks: an exact cache changes nothing, whatever the chunks."""
    ids = torch.randint(3, 97, (1, n), generator=torch.Generator().manual_seed(n))
    with torch.no_grad():
        logits = tiny_llama(ids).logits[0, :-1].double()
    expected = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp())
    assert perplexity(tiny_llama, ids) == pytest.approx(expected, 1e-5)
    for chunk in (1, 7, 64):
        through = perplexity(tiny_llama, ids, cache=DynamicCache(config=tiny_llama.config), chunk_size=chunk)
        assert through == pytest.approx(expected, 1e-4)
    assert perplexity(TransformersStepper(tiny_llama), ids) == pytest.approx(expected, 1e-4)


def test_a_long_text_without_a_cache_is_read_in_chunks(tiny_llama, monkeypatch):
    """Guards against one pass over a long text, whose logits would fill gigabytes."""
    ids = torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(3))
    whole = perplexity(tiny_llama, ids)
    monkeypatch.setitem(perplexity.__globals__, "ONE_PASS", 100)
    assert perplexity(tiny_llama, ids) == pytest.approx(whole, 1e-4)


def test_reading_in_chunks_leaves_gradients_as_they_were(tiny_llama):
    """Guards against a generator that hands its caller inference mode, to stay when two are read in step."""
    ids = torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(3))
    drift(tiny_llama, ids, lambda: DynamicCache(config=tiny_llama.config))
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    unfinished = outputs_in_chunks(tiny_llama, ids, None)
    next(unfinished)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


class FirstUpdateExact(DynamicLayer):
    """As transformers' quantised layers: the first update hands its input back, later ones see rounded tokens."""

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            super().update(key_states, value_states)
            returned = self.keys, self.values
        else:
            keys, values = super().update(key_states, value_states)
            returned = keys, values
        self.keys, self.values = self.keys.round(), self.values.round()
        return returned


@pytest.mark.parametrize("n", [20, 60, 300])
def test_a_quantised_cache_is_decoded_through(tiny_llama, n):
    """Case 25: in one forward pass this cache, which rounds to whole numbers, shows no loss at all."""
    ids = torch.randint(3, 97, (1, n), generator=torch.Generator().manual_seed(n))

    def coarse():
        cache = DynamicCache(config=tiny_llama.config)
        cache.layers = [FirstUpdateExact() for _ in cache.layers]
        return cache

    exact = perplexity(tiny_llama, ids)
    assert perplexity(tiny_llama, ids, cache=coarse()) != pytest.approx(exact, 1e-2)
    sizes = [output.logits.shape[1] for _, output in outputs_in_chunks(tiny_llama, ids, coarse())]
    assert len(sizes) >= 8 and sum(sizes) == n


def test_perplexity_refuses_bad_input(tiny_llama):
    """Guards against a used cache, padding counted as text, ids as floats, and NaN that averages away."""
    ids = torch.arange(3, 13).unsqueeze(0)
    used = DynamicCache(config=tiny_llama.config)
    perplexity(tiny_llama, ids, cache=used)
    with pytest.raises(ValueError, match="already holds 10 tokens"):
        perplexity(tiny_llama, ids, cache=used)
    with pytest.raises(TypeError, match="float32"):
        perplexity(tiny_llama, ids.float())
    with pytest.raises(TypeError, match="list"):
        perplexity(tiny_llama, ids.tolist())
    with pytest.raises(ValueError, match="one text at a time"):
        perplexity(tiny_llama, ids.repeat(2, 1))
    with pytest.raises(ValueError, match="at least 2"):
        perplexity(tiny_llama, ids[:, :1])
    with pytest.raises(ValueError, match="chunk_size=0"):
        perplexity(tiny_llama, ids, cache=DynamicCache(config=tiny_llama.config), chunk_size=0)
    with pytest.raises(ValueError, match="stepper"):
        perplexity(TransformersStepper(tiny_llama), ids, cache=DynamicCache(config=tiny_llama.config))
    with torch.no_grad():
        tiny_llama.model.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        perplexity(tiny_llama, ids)


@pytest.mark.parametrize("wrap", [lambda model: model, TransformersStepper])
def test_perplexity_stays_within_vocabulary_and_positions(tiny_llama, wrap):
    """Guards against a figure from positions that the model never learnt, and against "index out of range in self"."""
    long = torch.ones(1, 513, dtype=torch.int64)
    with pytest.raises(ValueError, match="513 tokens to read in one piece; this model has 512 positions"):
        perplexity(wrap(tiny_llama), long)
    with pytest.raises(ValueError, match="513 tokens"):
        perplexity(tiny_llama, long, cache=DynamicCache(config=tiny_llama.config))
    with pytest.raises(ValueError, match="513 tokens"):
        drift(tiny_llama, long, lambda: DynamicCache(config=tiny_llama.config))
    for bad in (-1, 97):
        with pytest.raises(ValueError, match=f"holds {bad}; expected ids from 0 to 96"):
            perplexity(wrap(tiny_llama), torch.tensor([[3, bad]]))


def test_a_hopeless_model_has_infinite_perplexity():
    """Guards against an OverflowError where a model is wrong beyond what exp can hold."""
    model = Prescribed([0.0, 1.0, 1.0])
    model.forward = lambda input_ids, **kwargs: SimpleNamespace(logits=torch.tensor([[[0.0, 0.0, 9e4]] * 3]))
    assert perplexity(model, torch.tensor([[0, 1, 0]])) == math.inf


def test_no_drift_through_an_exact_cache(tiny_llama):
    """Guards against comparing different positions, or reporting rounding of the report itself."""
    ids = torch.randint(3, 97, (1, 75), generator=torch.Generator().manual_seed(3))
    report = drift(tiny_llama, ids, lambda: DynamicCache(config=tiny_llama.config))
    assert report.layer_error.shape == (3,) and report.position_error.shape == (75,)
    assert report.kl.shape == (75,) and report.agrees.shape == (75,)
    assert report.agreement == 1.0 and report.mean_kl < 1e-9
    assert float(report.layer_error.max()) == 0.0 and float(report.position_error.max()) == 0.0


def test_drift_grows_as_bits_shrink(tiny_llama):
    """Guards against a report that mixes up its two runs or its two axes."""
    ids = torch.randint(3, 97, (1, 90), generator=torch.Generator().manual_seed(4))
    eight, three = (
        drift(tiny_llama, ids, lambda bits=bits: Int8KVCache(tiny_llama.config, residual_length=30, bits=bits))
        for bits in (8, 3)
    )
    assert 0 < float(eight.layer_error.max()) < float(three.layer_error.max())
    assert 0 < eight.mean_kl < three.mean_kl
    assert eight.agreement >= three.agreement
    # While everything still lies in the window, nothing drifts.
    assert float(three.position_error[:22].max()) == 0.0 and float(three.position_error[60:].min()) > 0.0
    assert "of 90 positions" in str(eight)


def test_drift_refuses_a_used_cache(tiny_llama):
    """Guards against a factory that hands out the same cache twice."""
    cache = Int8KVCache(tiny_llama.config)
    ids = torch.arange(3, 43).unsqueeze(0)
    drift(tiny_llama, ids, lambda: cache)
    with pytest.raises(ValueError, match="already holds 40 tokens"):
        drift(tiny_llama, ids, lambda: cache)


@pytest.mark.model
def test_the_shipped_text_is_long_enough(tokenizer):
    """Guards against a shortened text: the benchmark scores 4,096 tokens of it."""
    text = reading_text()
    assert len(tokenizer(text)["input_ids"]) >= 4300
    assert text.isascii() and "\t" not in text


def test_which_operations_a_cache_survives(tiny_llama):
    """Guards against a table that takes "raised no error" for "worked": a crop without effect is no crop."""
    caches, missing = quantised_caches(tiny_llama.config)
    assert all(operations_that_work(caches["ours, 8 bits"], tiny_llama.config).values())
    assert all(operations_that_work(caches["BF16"], tiny_llama.config).values())

    assert late_token_error(caches["BF16"], tiny_llama.config) == 0.0
    assert late_token_error(caches["ours, 8 bits"], tiny_llama.config) < 0.01

    class Lame(FirstUpdateExact):
        def crop(self, tokens_to_remove):
            pass

    def lame():
        cache = DynamicCache(config=tiny_llama.config)
        cache.layers = [Lame() for _ in cache.layers]
        return cache

    assert operations_that_work(lame, tiny_llama.config)["crop"] is False
    for name in ("transformers, FP8", "quanto, 4 bits", "HQQ, 8 bits"):
        assert (name in caches) != (name in missing)


def test_held_bytes(tiny_llama):
    """Guards against counting a view's own bytes instead of the memory it keeps alive, and shared memory twice."""
    cache = DynamicCache(config=tiny_llama.config)
    keys = torch.zeros(1, 2, 100, 8)
    cache.update(keys, keys, 0)
    del cache.layers[1:]
    assert held_bytes(cache) == 2 * keys.nbytes
    cache.crop(-90)
    assert held_bytes(cache) == 2 * keys.nbytes  # a crop by slicing frees nothing
    ours = Int8KVCache(tiny_llama.config)
    ours.update(keys, keys, 0)
    assert held_bytes(ours) == ours.nbytes


def test_the_bench_measures_the_same_work(tiny_llama):
    """Guards against a benchmark whose two sides differ in tokens, heads or shape; and reads its byte target."""
    from transformers import LlamaConfig

    from every_millisecond.laboratory import cache_bench

    shape = dict(num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=576, num_hidden_layers=1)
    assert cache_bench.bytes_ratio(LlamaConfig(**shape)) <= 0.53
    comparison = cache_bench.reading_times(tiny_llama.config, 100, batch=2, rounds=1)
    assert list(comparison.median_ms) == [
        "BF16 cache", "INT8 cache", "INT8, copied to BF16 first", "BF16, attention alone", "INT8, attention alone"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="attention is 'sdpa'"):
        cache_bench.step_times(tiny_llama, 50, rounds=1)
    tiny_llama.set_attn_implementation("int8_kv")
    assert list(cache_bench.step_times(tiny_llama, 50, rounds=1).median_ms) == ["BF16 cache", "INT8 cache"]
