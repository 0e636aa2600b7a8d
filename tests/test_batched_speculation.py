"""Several requests' guesses in one pass of the kernel."""

from __future__ import annotations

import kernel_toys
import pytest
import torch
from test_kernel_draft import make_layer

from every_millisecond.laboratory.batched_speculation import decode_together
from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.generation import generate
from llm_latency.speculative import PromptLookupDraft
from llm_latency.speculative.kernel_draft import KernelDraft

pytestmark = kernel_toys.needs_kernel()


@pytest.fixture(scope="module")
def llama():
    return kernel_toys.make_toy("llama")


@pytest.mark.parametrize("gamma, kind", [(0, None), (1, "layer"), (3, "layer"), (4, "lookup")])
def test_each_text_is_that_of_a_lone_request(llama, gamma, kind):
    """Guards against rows that read another request's pages, and features that go to the neighbour's draft."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (9, 20, 33)]
    layer = make_layer(llama, 8)
    new = PromptLookupDraft if kind == "lookup" else lambda: KernelDraft(layer, llama, max_length=64)
    drafts = [new() for _ in prompts] if gamma else []
    together = decode_together(KernelDecoder.from_model(llama, blocks=12), prompts, 20, gamma=gamma, drafts=drafts)
    alone = KernelDecoder.from_model(llama, max_length=64)
    for prompt, text in zip(prompts, together.texts, strict=True):
        assert text == generate(alone, torch.tensor([prompt]), 20).sequences[0, len(prompt) :].tolist()
    assert 19 // (1 + gamma) <= together.passes <= 19
    assert together.passes == 19 or gamma
    assert together.tokens_per_second == pytest.approx(3 * 19 * 1e3 / together.decode_ms)


def test_what_cannot_be_served_is_named(llama):
    decoder = KernelDecoder.from_model(llama, blocks=2)
    with pytest.raises(ValueError, match="expected a prompt"):
        decode_together(decoder, [], 4)
    with pytest.raises(ValueError, match="1 prompts, 0 drafts"):
        decode_together(decoder, [[5]], 4, gamma=1)
    with pytest.raises(ValueError, match="3 blocks are needed"):
        decode_together(decoder, [[5] * 40], 4)
