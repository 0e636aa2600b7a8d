"""Right programs for the cages of the bug zoo, two ways each: a test must pass on both, and they are the oracles."""

from __future__ import annotations

import itertools
import statistics
import time

import torch
from torch import Tensor


def elapsed_by_events(stream, work) -> float:
    begin = stream.record_event()
    stream.launch(work)
    end = stream.record_event()
    end.synchronize()
    return begin.elapsed_time(end)


def elapsed_by_waiting(stream, work) -> float:
    stream.synchronize()
    begin = time.perf_counter()
    stream.launch(work)
    stream.synchronize()
    return (time.perf_counter() - begin) * 1000


def tpot(sent_ms: float, token_ms: list[float]) -> float | None:
    return (token_ms[-1] - token_ms[0]) / (len(token_ms) - 1) if len(token_ms) > 1 else None


def tpot_by_gaps(sent_ms: float, token_ms: list[float]) -> float | None:
    gaps = [later - sooner for sooner, later in itertools.pairwise(token_ms)]
    return statistics.fmean(gaps) if gaps else None


def prefix(draft: Tensor, logits: Tensor) -> int:
    count = 0
    while count < len(draft) and draft[count] == logits[count].argmax():
        count += 1
    return count


def prefix_at_once(draft: Tensor, logits: Tensor) -> int:
    return int((draft == logits[:-1].argmax(-1)).long().cumprod(0).sum())


def softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0)


def softmax_by_sums(scores: Tensor, allowed: Tensor) -> Tensor:
    hidden = scores.masked_fill(~allowed, -torch.inf)
    top = hidden.amax(-1, keepdim=True).nan_to_num(neginf=0)
    weights = (hidden - top).exp()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).round().to(torch.int8), scale


def quantise_otherwise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().max(dim=-1)[0][:, None].clamp(min=1e-12) / 127
    return torch.clamp(torch.round(x / scale), -127, 127).char(), scale


def encode(tokenizer, question: str) -> list[int]:
    return tokenizer(tokenizer.apply_chat_template(question), add_special_tokens=False)


def encode_stripped(tokenizer, question: str) -> list[int]:
    return tokenizer(tokenizer.apply_chat_template(question).removeprefix(tokenizer.bos_token))
