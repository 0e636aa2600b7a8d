"""Broken programs of the chapters' own sets (07, 10, 11). One shipped fault each. Do not mend them."""

from __future__ import annotations

import torch
from torch import Tensor


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
