"""Speculation for several requests at once, in the kernel: all requests' guesses are rows of one pass.

Greedy, from prompts that all arrive at the beginning; whoever is done leaves the pass. With gamma 0 it is plain
decoding in a batch, by the same loop, so that the two can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llm_latency.arguments import check_count
from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.engine.kernel_rows import BLOCK
from llm_latency.sampling import SamplingRule
from llm_latency.speculative import Draft, verify_greedy


@dataclass(frozen=True, slots=True)
class Together:
    """texts: the new ids of each request. decode_ms: from the first tokens to the last. passes: of the target, the
    prompts' not counted."""

    texts: list[list[int]]
    decode_ms: float
    passes: int

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together; the first tokens, which the prompts' passes give, are left out."""
        return 1e3 * sum(len(text) - 1 for text in self.texts) / self.decode_ms


@torch.inference_mode()
def decode_together(
    decoder: KernelDecoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    gamma: int = 0,
    drafts: Sequence[Draft] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Together:
    """Decode `new_tokens` for each prompt, `gamma` guesses a request and pass.

    decoder: its pool must hold all texts at once. drafts: one for each prompt if gamma is above 0; they guess one after
    another.

    Raises ValueError for no prompts, too few drafts, counts out of range, or a pool that is too small.
    """
    check_count("new_tokens", new_tokens, 2)
    check_count("gamma", gamma, 0)
    if not prompts or (gamma and len(drafts) < len(prompts)):
        raise ValueError(f"expected a prompt, and a draft for each; got {len(prompts)} prompts, {len(drafts)} drafts")
    width = -(-(max(map(len, prompts)) + new_tokens) // BLOCK)
    if len(prompts) * width > decoder.kernel.blocks:
        raise ValueError(f"{len(prompts) * width} blocks are needed; the pool has {decoder.kernel.blocks}")
    tables = torch.arange(len(prompts) * width).view(-1, width)
    rule, texts = SamplingRule(decoder.vocab_size), [list(prompt) for prompt in prompts]
    ends = [len(prompt) + new_tokens for prompt in prompts]
    begun = []
    for i, text in enumerate(texts):
        n = len(text)
        logits = decoder.rows(text, range(n), tables[i].expand(n, -1), wanted=[n - 1])
        text.append(int(logits.argmax()))
        begun.append(decoder.features)
    start, passes = clock(), 0
    if gamma:
        for i, text in enumerate(texts):
            drafts[i].begin(torch.tensor([text[:-1]]), text[-1], ends[i], begun[i])
    while live := [i for i, text in enumerate(texts) if len(text) < ends[i]]:
        guesses = {i: _guess(drafts[i], min(gamma, ends[i] - len(texts[i]) - 1), rule) if gamma else [] for i in live}
        tokens, positions, owners = [], [], []
        for i in live:
            first = len(texts[i]) - 1  # of the newest token, which nobody has read
            tokens += [texts[i][-1], *guesses[i]]
            positions += range(first, first + 1 + len(guesses[i]))
            owners += [i] * (1 + len(guesses[i]))
        choices, row = decoder.rows(tokens, positions, tables[owners]).argmax(-1), 0
        for i in live:
            after = row + 1 + len(guesses[i])
            accepted, following = verify_greedy(torch.tensor(guesses[i], dtype=torch.int64), choices[row:after])
            added = [*guesses[i][:accepted], following]
            texts[i] += added  # what was refused is overwritten by the next pass
            if gamma:
                drafts[i].commit(added, decoder.features[row:after])
            row = after
        passes += 1
    return Together([text[len(p) :] for text, p in zip(texts, prompts, strict=True)], 1e3 * (clock() - start), passes)


def _guess(draft: Draft, count: int, rule: SamplingRule) -> list[int]:
    return draft.propose(count, rule).tokens.tolist() if count else []
