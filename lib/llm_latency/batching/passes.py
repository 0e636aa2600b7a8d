"""What the engine asks of a model and its pool of blocks: one pass over the rows of a plan. Two kinds of model can."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm_latency.batching.paged_attention import make_batch, paged_model
from llm_latency.batching.scheduler import Plan
from llm_latency.compat import check_rope
from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.engine.kernel_rows import BLOCK
from llm_latency.kv_cache.block_manager import BlockManager, Reservation
from llm_latency.kv_cache.paged import PagedKVCache


class Blocks(Protocol):
    """A pool of blocks: who owns which, and what must be done to them before a pass writes."""

    manager: BlockManager

    def prepare(self, reservation: Reservation) -> None:
        """Copy what is shared and about to be written, and make fresh blocks fit to be read."""


class Pass(Protocol):
    """A model over its pool. max_positions: tokens of the longest text. device: where its logits lie."""

    cache: Blocks
    vocab_size: int
    max_positions: int
    device: torch.device

    def read(self, plan: Plan) -> Tensor:
        """Read the plan's pieces: logits [ends, vocab] behind each piece that ends with its request's last token."""


class TransformersPass:
    """A transformers model, its attention replaced for the length of a pass by one over blocks."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        check_rope(model.config)
        self.model, self.device = model, model.device
        self.vocab_size, self.max_positions = model.config.vocab_size, model.config.max_position_embeddings
        self.cache = PagedKVCache(
            model.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
            prefix_caching=prefix_caching,
        )

    @torch.inference_mode()  # whoever calls: views of the pool are written to
    def read(self, plan: Plan) -> Tensor:
        batch = make_batch(self.cache, plan)
        with paged_model(self.model):
            return self.model(
                input_ids=batch.token_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.ends,
                paged_batch=batch,
            ).logits[0]


class KernelBlocks:
    """The blocks of a kernel's pool, whose keys and values the kernel itself writes and reads."""

    def __init__(self, decoder: KernelDecoder, prefix_caching: bool) -> None:
        self.kernel = decoder.kernel
        self.manager = BlockManager(self.kernel.blocks, BLOCK, prefix_caching=prefix_caching)

    def prepare(self, reservation: Reservation) -> None:
        """Copies only: the kernel stores no NaN, and reads no slot behind a row's position."""
        if reservation.copies:
            sources, targets = torch.tensor(reservation.copies).unbind(1)
            self.kernel.copy_blocks(sources, targets)


class KernelPass:
    """A decoder that is one function: its rows are a plan's tokens, and give the same bits in any company."""

    def __init__(self, decoder: KernelDecoder, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        if (num_blocks, block_size) != (decoder.kernel.blocks, BLOCK):
            raise ValueError(
                f"the options ask for {num_blocks} blocks of {block_size} tokens; the kernel's pool has "
                f"{decoder.kernel.blocks} of {BLOCK}"
            )
        self.decoder, self.device = decoder, decoder.device
        self.vocab_size = decoder.vocab_size
        self.max_positions = decoder.max_positions
        self.cache = KernelBlocks(decoder, prefix_caching)

    def read(self, plan: Plan) -> Tensor:
        for reservation in plan.reservations:
            self.cache.prepare(reservation)
        tokens: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for piece in plan.pieces:
            stop = piece.start + piece.count
            tokens.extend(piece.request.tokens[piece.start : stop])
            positions.extend(range(piece.start, stop))
            if stop == piece.request.length:
                ends.append(len(tokens) - 1)
        tables = [self.cache.manager.table(piece.request.id) for piece in plan.pieces]
        width = max(map(len, tables))
        filled = torch.tensor([table + [0] * (width - len(table)) for table in tables])
        counts = torch.tensor([piece.count for piece in plan.pieces])
        return self.decoder.rows(tokens, positions, filled.repeat_interleave(counts, dim=0), wanted=ends)
