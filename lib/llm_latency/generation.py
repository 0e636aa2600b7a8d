"""The plain loop: prefill once, then one token after another.

A *stepper* is anything that can do these two things; a transformers model becomes one by `TransformersStepper`, and the
fast decoder of notebook 08 is one as it stands. Everything that measures a model takes a stepper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from llm_latency.compat import with_cache
from llm_latency.sampling import check_end, check_sampling, probabilities, sample
from llm_latency.text import StreamingDetokenizer
from llm_latency.text.prompt import encode_prompt
from llm_latency.timing import LatencyBreakdown, LatencyTimer

SCORE_CHUNK = 64  # tokens per pass when a text is scored through a cache


class Stepper(Protocol):
    """A model with its own memory of one request."""

    device: torch.device
    vocab_size: int
    max_positions: int

    def prefill(self, input_ids: Tensor) -> Tensor:
        """Forget everything, read input_ids [1, n], return the last position's logits [1, vocab]."""

    def step(self, token_ids: Tensor) -> Tensor:
        """Read k more tokens [1, k], return the logits after each [1, k, vocab]."""

    def score(self, input_ids: Tensor) -> Tensor:
        """Logits [1, n, vocab] of a whole text [1, n], decoded through this stepper's own cache."""


class TransformersStepper:
    """A transformers model decoding through one of its caches.

    make_cache: a function without arguments that returns a fresh Cache for each request; None means DynamicCache.
    """

    def __init__(self, model: PreTrainedModel, make_cache: Callable[[], Cache] | None = None):
        self.model = model
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        self.max_positions = model.config.max_position_embeddings
        self.make_cache = make_cache or (lambda: DynamicCache(config=model.config))
        self.cache: Cache | None = None

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        self.cache = self.make_cache()
        # Only the last position's logits are wanted: the head of 49k rows over 256 positions would be wasted work.
        output = self.model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **with_cache(self.cache))
        return output.logits[:, -1]  # [1, vocab]

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> Tensor:
        if self.cache is None:
            raise RuntimeError("step() before prefill(): there is no request to continue")
        return self.model(input_ids=token_ids, use_cache=True, **with_cache(self.cache)).logits  # [1, k, vocab]

    @torch.inference_mode()
    def score(self, input_ids: Tensor) -> Tensor:
        self.cache = self.make_cache()
        pieces = [self.step(piece) for piece in input_ids.split(SCORE_CHUNK, dim=1)]
        return torch.cat(pieces, dim=1)


class RecomputeStepper:
    """A transformers model without a KV cache: every token reads the whole text again. Rung 0 of the ladder."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        self.max_positions = model.config.max_position_embeddings
        self.ids: Tensor | None = None

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        self.ids = input_ids
        return self.model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[:, -1]

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> Tensor:
        if self.ids is None:
            raise RuntimeError("step() before prefill(): there is no request to continue")
        self.ids = torch.cat([self.ids, token_ids], dim=1)
        return self.model(input_ids=self.ids, use_cache=False, logits_to_keep=token_ids.shape[1]).logits

    @torch.inference_mode()
    def score(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """sequences: int64 [1, prompt + new], end-of-text included if it was reached; tokens_generated: the new ones."""

    sequences: Tensor
    tokens_generated: int


def check_request(stepper: Stepper, input_ids: Tensor, max_new_tokens: int) -> None:
    """Raise TypeError or ValueError, naming the value, for a request that this stepper cannot serve."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype != torch.int64:
        kind = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids is {kind}; expected an int64 tensor of shape [1, n]")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [1, n], one request at a time")
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids is empty; expected at least one prompt token")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= stepper.vocab_size:
        raise ValueError(f"input_ids holds {low if low < 0 else high}; expected ids from 0 to {stepper.vocab_size - 1}")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
        raise TypeError(f"max_new_tokens={max_new_tokens!r}; expected an int")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; expected at least 1")
    needed = input_ids.shape[1] + max_new_tokens
    if needed > stepper.max_positions:
        raise ValueError(
            f"{input_ids.shape[1]} prompt tokens and {max_new_tokens} new ones need {needed} positions; "
            f"this model has {stepper.max_positions}"
        )


def _stage(timer: LatencyTimer | None, name: str):
    return timer.stage(name) if timer else contextlib.nullcontext()


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

    With a timer, "prefill" holds the reading of the prompt and the choice of the first token, "decode" everything
    after. The last token is chosen but never read by the model, so n new tokens take n - 1 decode steps.

    Raises ValueError or TypeError for a request out of range, and ValueError for NaN logits.
    """
    check_request(stepper, input_ids, max_new_tokens)
    check_sampling(temperature, top_k, top_p, stepper.vocab_size)
    check_end(eos_token_id, stepper.vocab_size)

    def choose(logits: Tensor) -> int:
        # logits [1, vocab]. Reading the id waits for the device: the loop cannot go on without it.
        if temperature > 0:
            return int(sample(probabilities(logits, temperature, top_k, top_p), generator))
        best, token = logits.float().max(dim=-1)  # NaN is larger than anything to max, so it cannot hide
        if torch.isnan(best):
            raise ValueError("the logits hold NaN; expected numbers (was the model loaded in a dtype it overflows in?)")
        return int(token)

    input_ids = input_ids.to(stepper.device)
    with _stage(timer, "prefill"):
        tokens = [choose(stepper.prefill(input_ids))]
    with _stage(timer, "decode"):
        while len(tokens) < max_new_tokens and tokens[-1] != eos_token_id:
            last = torch.tensor([[tokens[-1]]], device=stepper.device)
            tokens.append(choose(stepper.step(last)[:, -1]))
    new = torch.tensor([tokens], device=stepper.device)
    return GenerationOutput(torch.cat([input_ids, new], dim=1), len(tokens))


@dataclass(frozen=True, slots=True)
class Response:
    """One answered request: its text, its ids [1, prompt + new], and where the time went."""

    text: str
    sequences: Tensor
    breakdown: LatencyBreakdown


def respond(
    stepper: Stepper,
    tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    eos_token_id: int | None = None,
    timer: LatencyTimer | None = None,
    **sampling,
) -> Response:
    """Answer one prompt, greedily unless told otherwise, with every millisecond put to a stage.

    prompt: text that already carries its chat template (`request.chat_text`). A stepper with a `generate` method of its
    own (a speculative decoder) is asked to use it; everything else runs the plain loop. Further keyword arguments go
    to `generate`.

    Raises TypeError or ValueError for a prompt that is not text, is empty, or does not fit the model.
    """
    timer = timer or LatencyTimer(device=stepper.device)
    timer.reset()
    timer.mark_start("total")
    with timer.stage("tokenise"):
        ids = torch.tensor([encode_prompt(tokenizer, prompt)])
    if hasattr(stepper, "generate"):
        output = stepper.generate(ids, max_new_tokens, eos_token_id=eos_token_id, timer=timer, **sampling)
        count = output.sequences.shape[1] - ids.shape[1]
    else:
        output = generate(stepper, ids, max_new_tokens, eos_token_id=eos_token_id, timer=timer, **sampling)
        count = output.tokens_generated
    with timer.stage("detokenise"):
        detokenizer = StreamingDetokenizer(tokenizer)
        new = output.sequences[0, ids.shape[1] :].tolist()
        text = "".join(detokenizer.push(token) for token in new) + detokenizer.finish()
    timer.mark_end("total")
    breakdown = LatencyBreakdown(
        tokenize_ms=timer.get_elapsed_ms("tokenise"),
        prefill_ms=timer.get_elapsed_ms("prefill"),
        decode_ms=timer.get_elapsed_ms("decode"),
        detokenize_ms=timer.get_elapsed_ms("detokenise"),
        total_ms=timer.get_elapsed_ms("total"),
        prompt_tokens=ids.shape[1],
        tokens_generated=count,
    )
    return Response(text, output.sequences, breakdown)
