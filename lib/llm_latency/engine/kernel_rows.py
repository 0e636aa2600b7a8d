"""Passes through the kernel: rows of tokens over a pool of blocks of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_weights import KernelWeights

BLOCK = 16  # tokens of a block, as kernel.h has it and as `kv_cache.BlockManager` counts by default
MAX_ROWS = 64  # rows of one pass
ACTIVATIONS = ("int16", "int8")
TOKEN, POSITION, TABLE, TWICE = 1, 2, 3, 4  # what kernel_pass returns, with 8 * row added; 5: numbers not finite


class KernelRows:
    """A model's weights and a pool of blocks, and what the kernel computes of them.

    activations: "int16" or "int8". threads: None for torch's number. cache: None for FP16 keys and values, or "int8".

    Attributes:
        keys, values: the pool, FP16 [layers, blocks, kv_heads, head_dim, 16] and [layers, blocks, kv_heads, 16,
            head_dim]; or INT8, with key_scales and value_scales FP32 [layers, blocks, kv_heads, 16] beside it.
    """

    def __init__(
        self, weights: KernelWeights, blocks: int, *, activations: str, threads: int | None, cache: str | None
    ) -> None:
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations must be 'int16' or 'int8', got {activations!r}")
        if cache not in (None, "int8"):
            raise ValueError(f"cache must be None or 'int8', got {cache!r}")
        self.weights, self.blocks, self.threads = weights, blocks, threads or torch.get_num_threads()
        self._library, self._model = kernel_library.load(), weights.struct
        size = (self._model.layers, blocks, self._model.kv_heads)
        dtype = torch.float16 if cache is None else torch.int8
        self.keys = torch.zeros(*size, self._model.head_dim, BLOCK, dtype=dtype)
        self.values = torch.zeros(*size, BLOCK, self._model.head_dim, dtype=dtype)
        self.key_scales, self.value_scales = (None if cache is None else torch.zeros(*size, BLOCK) for _ in range(2))
        self._cache = kernel_library.Cache(blocks=blocks)
        for name in ("keys", "values", "key_scales", "value_scales"):
            tensor = getattr(self, name)
            setattr(self._cache, name, None if tensor is None else tensor.data_ptr())
        self._scratch = torch.zeros(self._library.kernel_scratch(self._model))
        self._call = kernel_library.Pass(two_digits=activations == "int16", scratch=self._scratch.data_ptr())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(part.nbytes for part in parts if part is not None)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks int64 [n] of all layers to others."""
        for part in (self.keys, self.values, self.key_scales, self.value_scales):
            if part is not None:
                part[:, targets] = part[:, sources]

    def compute(
        self, token_ids: Tensor, positions: Tensor, tables: Tensor, wanted: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits FP32 [m, outputs] of the wanted rows, and features FP32 [n, hidden] of all.

        token_ids, positions int64 [n]; tables int64 [n, blocks]; wanted int64 [m], numbers of rows; given FP32
        [n, hidden], the features that a conditioned draft reads: contiguous all. More than `MAX_ROWS` rows are several
        passes, so that of one request the earlier must come first. Raises ValueError, naming the row.
        """
        n, call = token_ids.shape[0], self._call
        features = torch.empty(n, self._model.hidden)
        logits = torch.empty(wanted.shape[0], self._model.outputs)
        call.table_width, call.threads = tables.shape[1], kernel_library.usable_threads(self.threads)
        for start in range(0, n, MAX_ROWS):
            call.rows = min(n - start, MAX_ROWS)
            here, into = wanted, logits
            if n > MAX_ROWS:
                mine = (wanted >= start) & (wanted < start + call.rows)
                here = wanted[mine] - start
                into = torch.empty(here.shape[0], self._model.outputs)
            call.wanted_rows, call.wanted, call.logits = here.shape[0], here.data_ptr(), into.data_ptr()
            call.tokens, call.positions = token_ids[start:].data_ptr(), positions[start:].data_ptr()
            call.tables, call.features = tables[start:].data_ptr(), features[start:].data_ptr()
            call.given = None if given is None else given[start:].data_ptr()
            answer = self._library.kernel_pass(self._model, self._cache, call)
            if answer:
                row = answer // 8 + start
                raise ValueError(
                    self._complaint(answer % 8, row, int(token_ids[row]), int(positions[row]), tables[row])
                )
            if into is not logits:
                logits[mine] = into
        return logits, features

    def _complaint(self, error: int, row: int, token: int, position: int, table: Tensor) -> str:
        if error == TOKEN:
            return f"row {row}: token id {token}; expected 0 to {self._model.vocab - 1}"
        if error == POSITION:
            limit = min(self._model.positions, table.shape[0] * BLOCK)
            return f"row {row}: position {position}; expected 0 to {limit - 1}, what max_length and its table hold"
        if error == TABLE:
            blocks = table[: position // BLOCK + 1].tolist()
            return f"row {row}: blocks {blocks}; expected block numbers from 0 to {self.blocks - 1}"
        if error == TWICE:
            block = int(table[position // BLOCK])
            return f"row {row}: position {position} in block {block} is written by an earlier row of this pass, too"
        return "the activations hold NaN, infinity or a number beyond FP16 (are the weights sound?)"
