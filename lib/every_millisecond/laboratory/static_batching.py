"""Static batching, as `generate` of transformers does it: one padded batch, nobody joins, nobody leaves early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from llm_latency.arguments import check_count, check_id_range
from llm_latency.compat import check_rope, with_cache


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts of different lengths as one batch: ids int64 [batch, longest] and attention mask of the same shape.

    Padding stands on the left, so that every row's last position is its last token: there the next token is read off.

    Raises ValueError for no prompts or an empty one.
    """
    if not prompts or not all(prompts):
        raise ValueError("expected at least one prompt, and at least one token in each")
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


@torch.inference_mode()
def generate_static(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    max_new_tokens: Sequence[int],
) -> list[list[int]]:
    """Each row's greedy tokens for a left-padded batch; all rows are computed until the longest answer is done.

    Args:
        input_ids, attention_mask: [batch, n]; see `left_pad`.
        max_new_tokens: one per row.

    Raises:
        ValueError: right padding (the next token would be read off a pad) or a mask of anything but 0 and 1, shapes
            that do not match, no row, a count below 1, ids outside the vocabulary, more tokens than the model has
            positions, rotary positions that change with the longest row. TypeError: a count that is no integer.
    """
    check_rope(model.config)
    if input_ids.shape != attention_mask.shape or input_ids.dim() != 2 or input_ids.shape[0] != len(max_new_tokens):
        raise ValueError(
            f"input_ids {list(input_ids.shape)}, attention_mask {list(attention_mask.shape)} and {len(max_new_tokens)} "
            "values of max_new_tokens do not belong together; expected [batch, n] twice and one value per row"
        )
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected at least one row and one token")
    attention_mask = attention_mask.long()  # of bools, the differences below would be an exclusive or
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError("attention_mask must hold 0 and 1 and nothing else")
    if not attention_mask[:, -1].all() or (attention_mask.diff(dim=1) < 0).any():
        raise ValueError("the batch is padded on the right; generation needs its padding on the left")
    for count in max_new_tokens:
        check_count("max_new_tokens", count, least=1)
    check_id_range(input_ids, model.config.vocab_size)
    # Every row is computed until the longest answer is done, but only the tokens that it wants are kept.
    needed = max(n + count for n, count in zip(attention_mask.sum(dim=1).tolist(), max_new_tokens, strict=True))
    if needed > model.config.max_position_embeddings:
        raise ValueError(f"{needed} positions are needed; this model has {model.config.max_position_embeddings}")
    input_ids, mask = input_ids.to(model.device), attention_mask.to(model.device)
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
    step, columns = input_ids, []
    while True:
        logits = model(
            input_ids=step,
            attention_mask=mask,
            position_ids=positions,
            **with_cache(cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # [batch, vocab]
        step = logits.float().argmax(dim=-1, keepdim=True)
        columns.append(step.tolist())
        if len(columns) == max(max_new_tokens):
            break
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return [[column[i][0] for column in columns[:count]] for i, count in enumerate(max_new_tokens)]
