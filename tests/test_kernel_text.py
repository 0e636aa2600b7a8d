"""The kernel's greedy text is that of the FP32 model whose weights it took, plain and with speculation."""

from __future__ import annotations

import kernel_toys
import pytest
import torch

from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.generation import generate
from llm_latency.speculative import SpeculativeDecoder
from llm_latency.speculative.feature_layer import load_feature_layer
from llm_latency.speculative.kernel_draft import KernelDraft
from llm_latency.text.prompt import chat_text, encode_prompt

pytestmark = [pytest.mark.model, kernel_toys.needs_kernel()]
NEW_TOKENS = 50
TOPICS = (
    "reversing a linked list", "binary search in a sorted list", "the sieve of Eratosthenes", "merge sort",
    "checking whether a word is a palindrome", "counting the vowels in a sentence", "the greatest common divisor",
    "the Tower of Hanoi", "why the ocean is salty", "how a bicycle stays upright", "what a database index is for",
    "why leaves change their colour in autumn", "how vaccines work", "the rules of chess", "baking bread at home",
)  # fmt: skip
QUESTIONS = (
    "Explain {} to a beginner.",
    "Write a short poem about {}.",
    "Name three facts about {}.",
    "{}: is it hard?",
)
# Every tenth in `make test`, the others in `make test-long`. Of the sixty one differs:
# at its 21st token FP32's two best logits, 26.069 and 26.064, are nearer to each other than the kernel is to FP32.
NEAR_TIE = "Write a short poem about how vaccines work."
PROMPTS = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
CHOSEN = [pytest.param(prompt, marks=pytest.mark.long if i % 10 else ()) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def decoder(target):
    return KernelDecoder.from_model(target, max_length=256)


@pytest.fixture(scope="module")
def speculative(target, decoder):
    draft = KernelDraft(load_feature_layer(), target, max_length=256)
    return SpeculativeDecoder(decoder, draft, num_speculative=3)


@pytest.mark.parametrize("question", CHOSEN)
def test_greedy_text_is_fp32s(question, target, tokenizer, decoder, speculative):
    """Guards against activations that are rounded too far: one token that differs is another text. Each token must be
    the FP32 model's choice behind those before it, which is the same as its own greedy text."""
    ids = torch.tensor([encode_prompt(tokenizer, chat_text(tokenizer, question))])
    text = generate(decoder, ids, NEW_TOKENS).sequences
    assert torch.equal(speculative.generate(ids, NEW_TOKENS).sequences, text)
    with torch.inference_mode():
        exact = target(text[:, :-1]).logits[0, ids.shape[1] - 1 :]  # [50, vocab]
    same = torch.equal(exact.argmax(dim=1), text[0, ids.shape[1] :])
    if not same and question == NEAR_TIE:
        pytest.xfail("FP32 itself leads by 0.005 of 26 there")
    assert same
