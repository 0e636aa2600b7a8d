"""Perplexity: how surprised a model is by a text, in "as if it chose among so many equally likely tokens"."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from llm_latency.arguments import check_count, check_token_ids
from llm_latency.compat import with_cache
from llm_latency.generation import Stepper

ONE_PASS = 1024  # a longer text is read in chunks even without a cache: its logits, 49k numbers a token, would fill GBs
CHUNK = 64  # tokens per pass through a cache
FEWEST_CHUNKS = 8


def perplexity(
    model: PreTrainedModel | Stepper, input_ids: Tensor, *, cache: Cache | None = None, chunk_size: int = CHUNK
) -> float:
    """exp of the mean negative log-likelihood of each token after the first, given all tokens before it.

    model: a transformers model, or a stepper.
    input_ids: int64 [1, n] or [n], n at least 2. Each of the n - 1 tokens is scored exactly once.
    cache: a fresh cache for the model to decode through, `chunk_size` tokens at a time, and at least eight chunks: the
        first update of most quantised caches hands back its exact input, so a text read in one pass shows no loss at
        all. None means exact: one pass without a cache, or for a long text many through transformers' DynamicCache.

    Log-likelihoods are FP32, their sum is FP64.

    Raises TypeError or ValueError for ids of another type or shape, fewer than two tokens, ids outside the vocabulary,
    a text longer than the model's positions, a cache that already holds tokens, a cache given along with a stepper
    (which has its own), and for logits that hold NaN.
    """
    losses = token_losses(model, input_ids, cache=cache, chunk_size=chunk_size)
    return exponential(float(losses.double().sum()) / len(losses))


def token_losses(
    model: PreTrainedModel | Stepper, input_ids: Tensor, *, cache: Cache | None = None, chunk_size: int = CHUNK
) -> Tensor:
    """-log p of each token after the first, in nats: FP32 [n - 1]. Arguments and errors as in `perplexity`.

    Two of these for one text, subtracted, are the change of each token: their mean has a standard error.
    """
    input_ids = check_text(model, input_ids)
    check_count("chunk_size", chunk_size)
    n = input_ids.shape[1]
    if isinstance(model, Stepper):
        if cache is not None:
            raise ValueError("cache was given along with a stepper, which decodes through a cache of its own")
        pieces = [(0, model.score(input_ids.to(model.device)))]
    elif cache is None and n <= ONE_PASS:
        pieces = [(0, _one_pass(model, input_ids))]
    else:
        pieces = ((start, out.logits) for start, out in outputs_in_chunks(model, input_ids, cache, chunk_size))
    losses = []
    for start, logits in pieces:
        targets = input_ids[:, start + 1 : start + 1 + logits.shape[1]]
        losses.append(negative_log_likelihoods(logits[:, : targets.shape[1]], targets)[0])
    return torch.cat(losses)


def exponential(mean: float) -> float:
    """exp of a mean in nats: a perplexity, infinite where a model is wrong beyond what a float can hold."""
    try:
        return math.exp(mean)
    except OverflowError:  # above 709 nats per token: as bad as infinity
        return math.inf


def _one_pass(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=input_ids.to(model.device), use_cache=False).logits


def outputs_in_chunks(
    model: PreTrainedModel, input_ids: Tensor, cache: Cache | None, chunk_size: int = CHUNK, **arguments
) -> Iterator[tuple[int, ModelOutput]]:
    """Decode input_ids [1, n] through a cache; yields (start, the model's output for [1, chunk]) for each chunk.

    cache None: a DynamicCache. Further arguments go to the model. Raises ValueError if the cache already holds tokens.
    """
    cache = DynamicCache(config=model.config) if cache is None else cache
    held = cache.get_seq_length()
    if held:
        raise ValueError(f"the cache already holds {int(held)} tokens; expected a fresh one")
    n = input_ids.shape[1]
    size = min(chunk_size, max(1, n // FEWEST_CHUNKS))
    for start in range(0, n, size):
        piece = input_ids[:, start : start + size].to(model.device)
        with torch.inference_mode():
            output = model(input_ids=piece, use_cache=True, **with_cache(cache), **arguments)
        yield start, output  # not inside: a caller that stops early would be left in inference mode


def negative_log_likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target [1, n] under its logits [1, n, vocab], in FP32: [1, n].

    Raises ValueError if the logits hold NaN.
    """
    logits = logits.float()
    targets = targets.to(logits.device).unsqueeze(-1)
    losses = (logits.logsumexp(dim=-1, keepdim=True) - logits.gather(-1, targets)).squeeze(-1)
    if bool(torch.isnan(losses).any()):
        raise ValueError("the logits hold NaN; expected numbers (was the model loaded in a dtype it overflows in?)")
    return losses


def check_text(model: PreTrainedModel | Stepper, input_ids: Tensor) -> Tensor:
    """input_ids as int64 [1, n]. Raises TypeError or ValueError unless the model can read them as one text."""
    if isinstance(model, Stepper):
        vocab_size, positions = model.vocab_size, model.max_positions
    else:
        vocab_size, positions = model.config.vocab_size, model.config.max_position_embeddings
    input_ids = check_token_ids(input_ids, vocab_size, of="text", flat=True, least=2)  # the first token is given
    if input_ids.shape[1] > positions:
        raise ValueError(f"{input_ids.shape[1]} tokens to read in one piece; this model has {positions} positions")
    return input_ids
