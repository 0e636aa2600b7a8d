"""How often the host waits for the device. Counted on the pretend GPU: a real one does not say.

Each wait costs a round trip (some 10 us on an idle GPU), and the launches behind it start late: a decode loop is
allowed the one in which it reads the token that it has to decide on.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from cuda_toys import like, prompt, tiny
from transformers import DynamicCache

from llm_latency.engine import FastDecoder
from llm_latency.generation import TransformersStepper, generate
from llm_latency.kv_cache import Int8KVCache
from llm_latency.speculative import PromptLookupDraft, SpeculativeDecoder

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU counts no waits")]


@pytest.fixture
def model():
    return tiny(11).cuda()


def waits(gpu, run) -> Counter:
    """The host's waits in `run`, by their reason. It has run once before: recordings and checks are made."""
    run()
    before = len(gpu.syncs)
    run()
    return Counter(gpu.syncs[before:])


def waits_per_token(gpu, run) -> float:
    """Waits per token of `run(new_tokens)`, from the difference of two lengths: a request's own fall out."""
    few, many = (waits(gpu, lambda n=n: run(n)).total() for n in (4, 12))
    return (many - few) / 8


@pytest.mark.parametrize("options", [{}, {"cache": "int8"}, {"weights": "int4"}], ids=str)
def test_the_fast_decoder_waits_once_a_token(model, gpu, options):
    """Guards against a second wait in the decode loop: a NaN check, a position, a token sent to the device anew."""
    decoder = FastDecoder.from_model(model, **options)
    ids = prompt(7, 1).cuda()
    assert waits_per_token(gpu, lambda n: generate(decoder, ids, n)) <= 1
    assert gpu.replays > 0, "the steps must have been graphs"


def test_a_planted_wait_is_counted(model, gpu, monkeypatch):
    """Guards against a count that misses what it is there for."""
    decoder = FastDecoder.from_model(model)
    step = FastDecoder.step

    def asks(self, token_ids):
        logits = step(self, token_ids)
        assert logits.isfinite().all()
        return logits

    monkeypatch.setattr(FastDecoder, "step", asks)
    assert waits_per_token(gpu, lambda n: generate(decoder, prompt(7, 1).cuda(), n)) == 2


@pytest.mark.parametrize("lookup", [False, True])
def test_speculation_waits_once_a_cycle(model, gpu, lookup):
    """Guards against waits for each drafted token, for each flag, or for ids copied to the device."""
    small = like(model, 0.08).cuda()
    draft = PromptLookupDraft() if lookup else FastDecoder.from_model(small)
    decoder = SpeculativeDecoder(FastDecoder.from_model(model), draft, 3)
    ids = prompt(7, 1).cuda()
    cycles = {n: len(decoder.generate(ids, n).cycles) for n in (10, 30)}
    few, many = (waits(gpu, lambda n=n: decoder.generate(ids, n)) for n in (10, 30))
    assert many.total() - few.total() <= cycles[30] - cycles[10], many - few


def test_the_int8_cache_waits_for_nothing(model, gpu):
    """Guards against a check of every layer's keys and values at every token: 60 waits with 30 layers."""
    ids = prompt(20, 1).cuda()
    found = {}
    for name, make in (("exact", DynamicCache), ("int8", lambda: Int8KVCache(model.config, residual_length=8))):
        stepper = TransformersStepper(model, make)
        found[name] = waits_per_token(gpu, lambda n, s=stepper: generate(s, ids, n))
    assert found["int8"] == found["exact"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_the_int8_cache_gives_back_what_is_not_finite(model, bad, where):
    """Guards against a NaN that an INT8 code hides: on a GPU nobody looks for it when it is stored."""
    heads, dim = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    new = [torch.randn(1, heads, 80, dim, generator=torch.Generator().manual_seed(i)).cuda() for i in (0, 1)]
    new[where][0, 0, 3, 2] = bad
    read = Int8KVCache(model.config, residual_length=8).update(*new, 0)
    assert read[where][0, 0, 3, 2].isnan() and not read[1 - where].isnan().any()


def test_a_copy_planted_into_a_captured_step_is_refused(model, monkeypatch):
    """Guards against a graph with a table made on the host: a real capture would fail, or replay what stood there."""
    from llm_latency.engine import fast_decoder

    mask = fast_decoder.causal_mask

    def from_the_host(positions, span):
        return mask(positions, span) & torch.ones(span, dtype=torch.bool).to(positions.device)

    monkeypatch.setattr(fast_decoder, "causal_mask", from_the_host)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        generate(FastDecoder.from_model(model), prompt(7, 1).cuda(), 3)
