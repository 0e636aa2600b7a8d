"""Perplexity: how surprised a model is by a text, in "as if it chose among so many equally likely tokens"."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

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
    a text longer than the model's positions (see `windowed_perplexity`), a cache that already holds tokens, a cache
    given along with a stepper (which has its own), and for logits that hold NaN.
    """
    input_ids = check_ids(input_ids)
    check_fits(model, input_ids, input_ids.shape[1])
    _check_chunk(chunk_size)
    n = input_ids.shape[1]
    if isinstance(model, Stepper):
        if cache is not None:
            raise ValueError("cache was given along with a stepper, which decodes through a cache of its own")
        pieces = [(0, model.score(input_ids.to(model.device)))]
    elif cache is None and n <= ONE_PASS:
        pieces = [(0, _one_pass(model, input_ids))]
    else:
        pieces = ((start, out.logits) for start, out in outputs_in_chunks(model, input_ids, cache, chunk_size))
    total = 0.0
    for start, logits in pieces:
        targets = input_ids[:, start + 1 : start + 1 + logits.shape[1]]
        total += float(negative_log_likelihoods(logits[:, : targets.shape[1]], targets).double().sum())
    return _exp(total / (n - 1))


def windowed_perplexity(model: PreTrainedModel, input_ids: Tensor, *, window: int, stride: int) -> float:
    """Perplexity of a text longer than the model's positions, read in windows that begin every `stride` tokens.

    Each window scores only the tokens that no earlier window has scored, so each token counts exactly once, with at
    least `window - stride` tokens before it once the first window is full. The mean is over tokens, not over windows.

    Raises TypeError or ValueError for ids as `perplexity` does, for a window longer than the model's positions, and
    unless 1 <= stride < window.
    """
    input_ids = check_ids(input_ids)
    for name, value in (("window", window), ("stride", stride)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}; expected an int")
    # At stride = window the first token of each window would have nothing before it, and could not be scored.
    if not 1 <= stride < window:
        raise ValueError(f"window={window}, stride={stride}; expected 1 <= stride < window")
    n, scored, total = input_ids.shape[1], 1, 0.0  # the first token is given
    check_fits(model, input_ids, min(window, n))
    for start in range(0, n, stride):
        end = min(start + window, n)
        if end <= scored:
            continue
        logits = _one_pass(model, input_ids[:, start:end])
        # logits at position i score token i + 1: those of the tokens scored..end - 1
        wanted = logits[:, scored - start - 1 : end - start - 1]
        total += float(negative_log_likelihoods(wanted, input_ids[:, scored:end]).double().sum())
        scored = end
    return _exp(total / (n - 1))


def _exp(mean: float) -> float:
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


def check_ids(input_ids: Tensor) -> Tensor:
    """input_ids as int64 [1, n]. Raises TypeError or ValueError unless it is int64 [1, n] or [n] with n >= 2."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype != torch.int64:
        kind = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids is {kind}; expected an int64 tensor of shape [1, n]")
    if input_ids.dim() == 1:
        input_ids = input_ids.unsqueeze(0)
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [1, n], one text at a time")
    if input_ids.shape[1] < 2:
        raise ValueError(f"input_ids holds {input_ids.shape[1]} tokens; expected at least 2, for the first is given")
    return input_ids


def check_fits(model: PreTrainedModel | Stepper, input_ids: Tensor, length: int) -> None:
    """Raise ValueError for ids outside the vocabulary, or more tokens in one piece than the model has positions."""
    if isinstance(model, Stepper):
        vocab_size, positions = model.vocab_size, model.max_positions
    else:
        vocab_size, positions = model.config.vocab_size, model.config.max_position_embeddings
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids holds {low if low < 0 else high}; expected ids from 0 to {vocab_size - 1}")
    if length > positions:
        raise ValueError(f"{length} tokens to read in one piece; this model has {positions} positions")


def _check_chunk(chunk_size: int) -> None:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size={chunk_size!r}; expected an int")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}; expected at least 1")
