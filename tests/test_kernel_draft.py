"""The conditioned draft in the kernel against the same layer in PyTorch."""

from __future__ import annotations

import kernel_toys
import pytest
import torch

from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.engine.kernel_weights import round_weight
from llm_latency.generation import generate
from llm_latency.sampling import SamplingRule
from llm_latency.speculative import SpeculativeDecoder
from llm_latency.speculative.conditioned_draft import ConditionedDraft
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape, load_feature_layer
from llm_latency.speculative.kernel_draft import KernelDraft

pytestmark = kernel_toys.needs_kernel()


@pytest.fixture(scope="module")
def llama():
    return kernel_toys.make_toy("llama")


def make_layer(model, bits: int) -> FeatureLayer:
    """A random layer for a toy, its matrices already rounded, so that PyTorch computes what the kernel does."""
    torch.manual_seed(21)
    layer = FeatureLayer(FeatureShape.of_config(model.config), torch.arange(0, 97, 3)).eval().requires_grad_(False)
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            parameter.copy_(round_weight(parameter * 3, bits).dequantize()[:, : parameter.shape[1]])
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("bits", [4, 8])
def test_its_guesses_and_features_are_pytorchs(llama, bits):
    """Guards against a norm applied to the wrong half, positions off by one, or guesses that stay in the memory."""
    layer = make_layer(llama, bits)
    ours, theirs = KernelDraft(layer, llama, bits=bits, threads=2), ConditionedDraft.for_model(layer, llama)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 97, (1, 90), generator=generator)
    features = torch.randn(90, 96, generator=generator)
    rule = SamplingRule(97)
    for draft in (ours, theirs):
        draft.begin(prompt, 11, 200, features)
    for committed in ([5], [6, 7, 8], [9, 10]):
        mine, other = ours.propose(4, rule), theirs.propose(4, rule)
        assert torch.equal(mine.tokens, other.tokens)
        assert (mine.largest - other.largest).abs().max() < 0.01 * other.largest.abs().max()
        more = torch.randn(len(committed), 96, generator=generator)
        for draft in (ours, theirs):
            draft.commit(committed, more)
        assert ours.length == theirs.length
        expected = theirs.ahead[0]
        assert (ours.ahead[1] - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_with_it_gives_the_plain_text(llama, temperature):
    """Guards against a target whose features are those of another pass: the text is the target's, guesses or not."""
    target = KernelDecoder.from_model(llama, max_length=128)
    decoder = SpeculativeDecoder(target, KernelDraft(make_layer(llama, 8), llama, max_length=128), num_speculative=3)
    ids = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(2))
    output = decoder.generate(ids, 50, temperature=temperature, generator=torch.Generator().manual_seed(3))
    assert output.sequences.shape == (1, 62)
    if temperature == 0:
        assert torch.equal(output.sequences, generate(target, ids, 50).sequences)


@pytest.mark.model
def test_the_shipped_layer_guesses_as_well_as_in_pytorch(target, tokenizer):
    """Guards against a draft whose acceptance the kernel's rounding would cost: same text, nearly as many accepted."""
    reader = KernelDecoder.from_model(target, max_length=256)
    layer = load_feature_layer()
    prompt = "<|im_start|>user\nHow do I sort a list in Python?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    drafts = [ConditionedDraft.for_model(layer, target), *(KernelDraft(layer, target, bits=bits) for bits in (8, 4))]
    outputs = [SpeculativeDecoder(reader, draft, num_speculative=3).generate(ids, 60) for draft in drafts]
    assert all(torch.equal(output.sequences, outputs[0].sequences) for output in outputs)
    exact, eight, four = (output.accepted for output in outputs)
    assert eight >= 0.9 * exact and four >= 0.75 * exact > 0


def test_bad_input(llama):
    """Guards against options and features that would be read beyond their end."""
    layer = make_layer(llama, 8)
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        KernelDraft(layer, llama, bits=3)
    with pytest.raises(ValueError, match="activations must be"):
        KernelDraft(layer, llama, activations="fp8")
    with pytest.raises(ValueError, match="max_length=600; expected 1 to 512"):
        KernelDraft(layer, llama, max_length=600)
    draft = KernelDraft(layer, llama, max_length=40)
    with pytest.raises(ValueError, match="features are 64 wide and this draft's 96"):
        draft.begin(torch.tensor([[5, 6]]), 7, 20, torch.zeros(2, 64))
    with pytest.raises(ValueError, match="may grow to 41 tokens"):
        draft.begin(torch.tensor([[5, 6]]), 7, 41, torch.zeros(2, 96))
    with pytest.raises(ValueError, match="activations hold NaN"):
        draft.begin(torch.tensor([[5, 6]]), 7, 20, torch.full((2, 96), torch.nan))
