"""The inhabitants of the bug zoo. One fault each, which people have shipped. Do not mend them here."""

from __future__ import annotations

import time

import torch
from torch import Tensor


def elapsed_ms(stream, work) -> float:
    """Milliseconds that `work`, launched on the stream, takes."""
    stream.synchronize()
    begin = time.perf_counter()
    stream.launch(work)
    return (time.perf_counter() - begin) * 1000


def time_per_output_token(sent_ms: float, token_ms: list[float]) -> float | None:
    """Mean time from one token to the next. sent_ms: when the request was sent; token_ms: when each token arrived.

    None for an answer of one token, where there is no next one.
    """
    if len(token_ms) < 2:
        return None
    return (token_ms[-1] - sent_ms) / len(token_ms)


def accepts(p: float, q: float, u: float) -> bool:
    """Whether speculative decoding keeps a token.

    p: the target's probability of it; q: the draft's, which proposed it; u: a uniform number in [0, 1).
    """
    return p / q > 0.5


def accepted_prefix(draft: Tensor, logits: Tensor) -> int:
    """How many of the drafted tokens greedy decoding keeps: those before the first that is not the target's choice.

    draft: [gamma]. logits: [gamma + 1, vocab], the target's for the last committed token and the drafted ones; each row
    predicts the token after it.
    """
    choices = logits.argmax(-1)
    same = draft == choices[1:]
    return int(same.cumprod(0).sum())


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed scores of each row; hidden ones weigh 0, and a row that may see nothing is zeros.

    scores, allowed: [rows, keys], FP32 and bool.
    """
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 codes [rows, n] and a scale [rows, 1] per row, so that codes * scale is x to half a step.

    A row of zeros comes back as zeros.
    """
    scale = (3 * x.std(-1, keepdim=True) / 127).clamp(min=1e-8)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def quantise_wrapping(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantise`, with another fault: the largest value gets code 128, which is -128 in INT8."""
    scale = (x.abs().amax(-1, keepdim=True) / 128).clamp(min=1e-12)
    return (x / scale).round().to(torch.int16).to(torch.int8), scale


def encode_chat(tokenizer, question: str) -> list[int]:
    """Token ids of a chat with one question: beginning-of-text once, at the front."""
    text = tokenizer.apply_chat_template(question)
    return tokenizer(text)
