"""Speculative decoding on CUDA, where steps are graphs and draft tokens stay on the device.

`make gpu` runs this on a real GPU, plain pytest on a pretend one.
"""

from __future__ import annotations

import pytest
import torch
from cuda_toys import like, prompt, tiny

from every_millisecond.laboratory.replay import replay
from llm_latency.engine import FastDecoder
from llm_latency.generation import TransformersStepper, generate
from llm_latency.speculative import Cycle, ModelDraft, PromptLookupDraft, SpeculativeDecoder
from llm_latency.speculative.conditioned_draft import ConditionedDraft
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape

pytestmark = pytest.mark.cuda


@pytest.fixture
def pair():
    target = tiny(11).cuda()
    return target, like(target, 0.08).cuda()


@pytest.fixture(autouse=True)
def exact_products():
    """TF32 rounds FP32 products to ten bits; greedy texts would then differ by shape."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("fast", [False, True])
def test_greedy_equals_plain_decoding(pair, fast, gpu):
    """Graphs return copies of their results and read positions that were taken back: the text must be the target's."""
    target, small = pair
    make = FastDecoder.from_model if fast else (lambda model: model)
    decoder = SpeculativeDecoder(make(target), make(small), 4)
    for seed in range(1 if gpu else 10):  # the pretend device issues ten thousand operators a second
        ids = prompt(5 + seed, seed)
        output = decoder.generate(ids, 24)
        assert torch.equal(output.sequences, generate(TransformersStepper(target), ids, 24).sequences)
        assert all(ms > 0 for name, ms in output.stage_ms.items() if name != "draft prefill")


def test_conditioned_draft_and_prompt_lookup(pair):
    """Features come from a graph's memory; what the draft keeps must not change with the next replay."""
    target, _ = pair
    torch.manual_seed(0)
    layer = FeatureLayer(FeatureShape.of_config(target.config), torch.arange(0, 97, 2)).eval().cuda()
    ids = prompt(9, 3)
    plain = generate(TransformersStepper(target), ids, 30).sequences
    for draft in (ConditionedDraft.for_model(layer, target), PromptLookupDraft()):
        decoder = SpeculativeDecoder(FastDecoder.from_model(target), draft, 3)
        assert torch.equal(decoder.generate(ids, 30).sequences, plain)


def test_sampling_with_a_generator_on_the_device(pair):
    """The same seed, the same text, within the filters' reach."""
    decoder = SpeculativeDecoder(*(FastDecoder.from_model(model) for model in pair), 3)
    texts = [
        decoder.generate(
            prompt(6, 1), 20, temperature=1.0, top_k=20, generator=torch.Generator("cuda").manual_seed(seed)
        ).sequences.tolist()
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_models_on_two_devices_are_refused(pair):
    """The target on the GPU and the draft left on the CPU is the usual mistake."""
    target, small = pair
    with pytest.raises(ValueError, match="the draft is on cpu and the target on cuda:0"):
        SpeculativeDecoder(target, ModelDraft(small.cpu()))


def test_replay(pair):
    """A recording timed by events on the device."""
    found = replay(
        *(FastDecoder.from_model(m) for m in pair), [Cycle(3, 2, 3), Cycle(3, 3, 4)], prompt_tokens=20, rounds=2
    )
    assert found.tokens == 8 and found.speedup.median > 0
