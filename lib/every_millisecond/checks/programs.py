"""Programs that learners' tests are tried on: broken ones, each with a fault that people have shipped, and right ones.

Do not mend the broken ones here. The right ones are the oracles, too. Right and broken stand in one file, so that where
a program comes from does not tell which it is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

# The bug zoo: broken


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


# The bug zoo: right


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


def quantise_rightly(x: Tensor) -> tuple[Tensor, Tensor]:
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


# Chapters 07, 08, 11, 12: broken


def through_int8(chunks: list[Tensor]) -> Tensor:
    """What an INT8 cache reads back, [tokens, channels], after these chunks [n, channels] were stored one by one.

    Each number is a whole multiple (-127 to 127) of its token's step, and off by half a step at most. A token's step is
    its own largest magnitude / 127.
    """
    step = (chunks[0].abs().amax() / 127).clamp(min=1e-12)
    codes = [(chunk / step).round().clamp(-127, 127) for chunk in chunks]
    return torch.cat(codes) * step


def round_blocks(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """INT4 codes uint8 [out, in] in blocks of `group` along the row, with scales and lows BF16 [out, in / group].

    low is a block's smallest weight, scale a fifteenth of its span (largest less smallest), both rounded to BF16. Each
    code, 0 to 15, is the one whose point as it is stored, code * scale + low, lies nearest to the weight.
    """
    blocks = weight.unflatten(1, (-1, group))  # [out, in / group, group]
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-12)
    codes = ((blocks - low) / scale).round().to(torch.uint8)
    return codes.flatten(1), scale.squeeze(2).bfloat16(), low.squeeze(2).bfloat16()


def next_tokens(model, prompts: list[list[int]]) -> list[int]:
    """The model's next token for each prompt, in one pass: for each row the token that it would get alone."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    logits = model(ids)  # [batch, longest, vocab]
    return logits[:, -1].argmax(-1).tolist()


def encode_cached(tokenizer, cache: dict[str, list[int]], text: str) -> list[int]:
    """The ids that tokenizer(text) gives, without tokenising again what the cache holds.

    cache: texts that have been tokenised -> their ids. Where one of them begins the text, its ids are used again.
    """
    for length in range(len(text), 0, -1):
        if text[:length] in cache:
            return cache[text[:length]] + tokenizer(text[length:], add_special_tokens=False)
    return tokenizer(text)


# Chapter 10: acceptance rules
#
# A rule is called with the place in the draft, the drafted tokens and uniform numbers [cycles], the target's rows
# [gamma + 1, vocab] and the draft's [gamma, vocab]. It returns which tokens are kept, bool [cycles], and the
# distribution [vocab] that a refused one is replaced from.


def run_cycles(rule: Callable, target: Tensor, draft: Tensor, cycles: int, generator: torch.Generator) -> Tensor:
    """The tokens of many cycles, int64 [cycles, gamma + 1]; -1 stands after the last token of a cycle.

    target [gamma + 1, vocab] and draft [gamma, vocab] hold the same distributions in every cycle, whatever was drawn.
    """

    def draw(probs: Tensor) -> Tensor:
        return torch.multinomial(probs, cycles, replacement=True, generator=generator)

    out = torch.full((cycles, len(target)), -1)
    going_on = torch.ones(cycles, dtype=torch.bool)
    for place in range(len(draft)):
        tokens, uniforms = draw(draft[place]), torch.rand(cycles, generator=generator)
        kept, replacement = rule(place, tokens, uniforms, target, draft)
        out[going_on, place] = torch.where(kept, tokens, draw(replacement))[going_on]
        going_on = going_on & kept
    out[going_on, len(draft)] = draw(target[-1])[going_on]  # all kept: one more from the target
    return out


def left_over(p: Tensor, q: Tensor) -> Tensor:
    """The residual distribution of p and q [vocab]."""
    excess = (p - q).clamp(min=0)
    return excess / excess.sum() if excess.any() else p


def constant(place, tokens, uniforms, target, draft):
    p, q = target[place], draft[place]
    return p[tokens] / q[tokens] > 0.5, left_over(p, q)


def no_residual(place, tokens, uniforms, target, draft):
    p, q = target[place], draft[place]
    return uniforms * q[tokens] < p[tokens], p


def one_late(place, tokens, uniforms, target, draft):
    p, q = target[place + 1], draft[place]
    return uniforms * q[tokens] < p[tokens], left_over(p, q)
