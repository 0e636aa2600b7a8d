"""The decoder whose step is one C++ function: kernel.cpp, called through ctypes.

It takes the model that `FastDecoder` takes and does what that does, with weights in 4 bits and the head in 8, and it is
exact about company: a row's logits are the same to the bit whether it is computed alone, with the other guesses of a
speculative step, in a batch of other requests, or in a chunk of a prompt, on however many threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_latency.arguments import check_count, check_step_ids
from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_rows import BLOCK, KernelRows
from llm_latency.engine.kernel_weights import KernelWeights
from llm_latency.engine.prefix import PrefixCaching
from llm_latency.generation import Stepper


class KernelDecoder(Stepper):
    """Decodes one request at a time as a stepper, or rows of many requests by `rows`. Build it with `from_model`.

    kernel: the weights and the pool of blocks. features: FP32 [k, hidden], what the head read for each of the last
    call's k tokens.
    """

    device = torch.device("cpu")
    dtype = torch.float32  # of the features; inside, activations are integers

    def __init__(
        self,
        model,
        *,
        activations: str = "int16",
        max_length: int | None = None,
        threads: int | None = None,
        cache: str | None = None,
        blocks: int | None = None,
    ) -> None:
        limit = model.config.max_position_embeddings
        self.max_positions = check_count("max_length", min(2048, limit) if max_length is None else max_length, 1, limit)
        threads = None if threads is None else check_count("threads", threads)
        blocks = -(-self.max_positions // BLOCK) if blocks is None else check_count("blocks", blocks)
        self.vocab_size = model.config.vocab_size
        lanes = kernel_library.load().kernel_lanes()
        with torch.no_grad():
            weights = KernelWeights.from_model(model, lanes, self.max_positions)
        self.kernel = KernelRows(weights, blocks, activations=activations, threads=threads, cache=cache)
        self._table = torch.arange(blocks)[None]  # the stepper's own request: every block, in order

    @classmethod
    def from_model(
        cls,
        model,
        *,
        activations: str = "int16",
        max_length: int | None = None,
        threads: int | None = None,
        cache: str | None = None,
        blocks: int | None = None,
    ) -> KernelDecoder:
        """Take the weights of a transformers Llama, Qwen2 or Mistral model.

        activations: "int16", which gives FP32's text, or "int8", which is quicker for several rows and loses a little.
        max_length: tokens of the longest text, None for 2048 or the model's own limit if lower. threads: None for
        torch's number. cache: None for FP16, or "int8": half the bytes, which pays where the text is long.
        blocks: of 16 tokens, in the pool; None for as many as one text of `max_length` needs.

        Raises ValueError or TypeError for a model it would not compute right, or options that do not fit, and
        `KernelUnavailable` where the kernel cannot be built.
        """
        return cls(model, activations=activations, max_length=max_length, threads=threads, cache=cache, blocks=blocks)

    # -- a stepper ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        """Forget everything, read input_ids [1, n], return the last position's logits [1, vocab] FP32."""
        self.length = 0
        return self._advance(input_ids, last_only=True)

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> Tensor:
        """Read k more tokens [1, k], return the logits after each [1, k, vocab] FP32."""
        if self.length == 0:
            raise RuntimeError("step() before prefill(): there is no request to continue")
        return self._advance(token_ids)[None]

    @torch.inference_mode()
    def score(self, input_ids: Tensor) -> Tensor:
        """Logits [1, n, vocab] FP32 of a whole text [1, n]: to the bit what decoding it token by token gives."""
        self.length = 0
        return self._advance(input_ids)[None]

    def crop_to(self, length: int) -> None:
        """Forget every token after the first `length`. What stands behind is overwritten by the next step."""
        self.length = check_count("crop_to", length, 0, self.length)

    def keep_features(self) -> None:
        """It always does."""

    def _advance(self, token_ids: Tensor, last_only: bool = False) -> Tensor:
        """Read the next tokens [1, k]: logits [k or 1, vocab]."""
        check_step_ids(token_ids)
        start, count = self.length, token_ids.shape[1]
        end, room = start + count, min(self.max_positions, self.kernel.blocks * BLOCK)
        if end > room:
            raise ValueError(f"{end} tokens do not fit into a KV cache of max_length {room}")
        tables = self._table[:, : -(-end // BLOCK)].expand(count, -1).contiguous()
        wanted = torch.arange(count - 1 if last_only else 0, count)
        ids = _integers("token_ids", token_ids[0])
        logits, self.features = self.kernel.compute(ids, torch.arange(start, end), tables, wanted)
        self.length = end
        return logits

    # -- rows ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def rows(
        self,
        token_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        block_tables: Sequence[Sequence[int]] | Tensor,
        wanted: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Compute rows of whatever requests: logits FP32 [len(wanted), vocab].

        Args:
            token_ids, positions: integers [n], a token and its place in its text. Of one request's rows, the earlier
                must come first; each sees its blocks' tokens up to itself.
            block_tables: [n, blocks], the blocks of each row's request in order, as `BlockManager.table` lists them.
                Shorter ones are filled up with anything.
            wanted: the rows whose logits are wanted, None for all.

        It shares its blocks with the stepper: use one or the other.

        Raises:
            ValueError: no rows, an id outside the vocabulary, a position beyond `max_positions` or the table, a block
                that is not in the pool, two rows in one slot of a block, numbers that are not finite.
        """
        token_ids, positions = _integers("token_ids", token_ids), _integers("positions", positions)
        tables = _integers("block_tables", block_tables)
        n = token_ids.numel()
        if token_ids.dim() != 1 or n == 0 or positions.shape != (n,) or tables.dim() != 2 or tables.shape[0] != n:
            raise ValueError(
                f"expected token_ids [n], positions [n] and block_tables [n, blocks], n at least 1; got "
                f"{list(token_ids.shape)}, {list(positions.shape)} and {list(tables.shape)}"
            )
        wanted = torch.arange(n) if wanted is None else _integers("wanted", wanted)
        if wanted.dim() != 1 or (wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < n):
            raise ValueError(f"wanted must be row numbers [m] from 0 to {n - 1}, got {wanted.tolist()}")
        logits, self.features = self.kernel.compute(token_ids, positions, tables, wanted)
        return logits

    # -- bytes --------------------------------------------------------------------------------------------------------

    @property
    def step_bytes(self) -> int:
        """Weight bytes that one decode step reads: every matrix once, the norms, one row of the embedding."""
        return self.kernel.weights.step_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool of blocks."""
        return self.kernel.cache_bytes


class PrefixKernelDecoder(PrefixCaching, KernelDecoder):
    """A KernelDecoder that keeps a prefix: what is read from there on has the bits of the prompt read whole."""

    def rows(self, *arguments, **options) -> Tensor:
        """As `KernelDecoder.rows`. The prefix is read anew when next wanted: who knows what these rows write over."""
        self._prefix_features = None
        return super().rows(*arguments, **options)


def _integers(name: str, values: Sequence | Tensor) -> Tensor:
    """As a contiguous int64 tensor on the CPU. Raises TypeError for anything but integers."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if tensor.dtype not in (torch.int64, torch.int32) and tensor.numel():
        raise TypeError(f"{name} are {tensor.dtype}; expected integers (int64 or int32)")
    return tensor.to("cpu", torch.int64).contiguous()
