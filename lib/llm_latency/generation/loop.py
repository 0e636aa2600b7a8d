"""The plain loop: prefill once, then one token after another.

A *stepper* is a model together with its KV cache: `prefill` reads a prompt, `step` reads more tokens, `crop_to` forgets
the last ones. A transformers model becomes one in `TransformersStepper`; the fast decoder and the speculative decoder
are steppers themselves. Everything that generates, measures, scores or speculates takes a stepper.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llm_latency.arguments import check_count, check_token_ids
from llm_latency.sampling import SamplingRule, check_end

if TYPE_CHECKING:
    from llm_latency.timing import LatencyTimer


class Stepper(ABC):
    """A model with its own KV cache, which holds one request."""

    device: torch.device
    vocab_size: int
    max_positions: int  # tokens that a request may have, prompt and answer together
    length: int = 0  # tokens stored; 0 before the first prefill
    head_ids: Tensor | None = None  # int64 [n]: column i of its logits is token head_ids[i]; None: it is token i
    features: Tensor | None = None  # [k, hidden], the head's input for the last call's k tokens; see `keep_features`
    step_bytes: int | None = None  # bytes of weights that one decode step reads; None if it cannot tell
    prefix_tokens: int = 0  # length of a prefix kept in the cache: a prompt that begins with it is read from there on

    @abstractmethod
    def prefill(self, input_ids: Tensor) -> Tensor:
        """Forget everything, read input_ids int64 [1, n], return the last position's logits [1, vocab]."""

    @abstractmethod
    def step(self, token_ids: Tensor) -> Tensor:
        """Read k more tokens int64 [1, k], return the logits after each [1, k, vocab]."""

    @abstractmethod
    def crop_to(self, length: int) -> None:
        """Forget every token after the first `length`. TypeError or ValueError unless that many are stored."""

    def score(self, input_ids: Tensor) -> Tensor:
        """Logits [1, n, vocab] of a whole text [1, n], decoded through this stepper's own cache."""
        first = self.prefill(input_ids[:, :1])[:, None]  # [1, 1, vocab]
        return torch.cat([first, *(self.step(input_ids[:, i : i + 1]) for i in range(1, input_ids.shape[1]))], dim=1)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options) -> GenerationOutput:
        """`generate` with this stepper; a speculative decoder, which has a loop of its own, overrides this."""
        return generate(self, input_ids, max_new_tokens, **options)

    def keep_features(self) -> None:
        """From now on, set `features` in every call. TypeError for a stepper that cannot give its hidden states."""
        raise TypeError(f"{type(self).__name__} has no `features`, the hidden states that its head reads")


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """sequences: int64 [1, prompt + new], end-of-text included if it was reached; tokens_generated: the new ones."""

    sequences: Tensor
    tokens_generated: int


def generate(
    stepper: Stepper,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    generator: torch.Generator | None = None,
    timer: LatencyTimer | None = None,
) -> GenerationOutput:
    """Generate up to `max_new_tokens` after input_ids [1, n]; stops after `eos_token_id` if one is given.

    Temperature 0 always takes the most likely token. Above 0 tokens are sampled, with random numbers from `generator`
    (None: torch's own), among the top_k most likely and, of these, the fewest whose probabilities add up to top_p.

    With a timer, the stage "prefill" is reading the prompt and choosing the first token, "decode" all that follows.
    The last token is chosen but never read by the model, so n new tokens take n - 1 decode steps.

    Raises ValueError or TypeError for a request out of range, and ValueError for NaN logits.
    """
    check_request(stepper, input_ids, max_new_tokens, eos_token_id)
    rule = SamplingRule(stepper.vocab_size, temperature, top_k, top_p, generator)
    input_ids = input_ids.to(stepper.device)
    with stage(timer, "prefill"):
        tokens = [rule.choose(stepper.prefill(input_ids))]  # choose: logits [1, vocab] to an int
    with stage(timer, "decode"):
        while len(tokens) < max_new_tokens and tokens[-1] != eos_token_id:
            last = torch.full((1, 1), tokens[-1], device=stepper.device)  # torch.tensor would wait for the device
            tokens.append(rule.choose(stepper.step(last)[:, -1]))
    new = torch.tensor([tokens], device=stepper.device)
    return GenerationOutput(torch.cat([input_ids, new], dim=1), len(tokens))


def check_request(stepper: Stepper, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | None = None) -> None:
    """Raise TypeError or ValueError, naming the value, for a request that this stepper cannot serve."""
    check_token_ids(input_ids, stepper.vocab_size)
    check_count("max_new_tokens", max_new_tokens)
    check_end(eos_token_id, stepper.vocab_size)
    needed = input_ids.shape[1] + max_new_tokens
    if needed > stepper.max_positions:
        raise ValueError(
            f"{input_ids.shape[1]} prompt tokens and {max_new_tokens} new ones need {needed} positions; "
            f"this model has {stepper.max_positions}"
        )


def stage(timer: LatencyTimer | None, name: str) -> contextlib.AbstractContextManager:
    """A context that the timer measures under this name; without a timer, one that does nothing."""
    return timer.stage(name) if timer else contextlib.nullcontext()
