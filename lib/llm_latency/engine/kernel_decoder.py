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
from llm_latency.engine.kernel_weights import KernelWeights
from llm_latency.generation import Stepper

BLOCK = 16  # tokens of a block, as kernel.cpp has it and as `kv_cache.BlockManager` counts by default
MAX_ROWS = 64  # rows of one pass
ACTIVATIONS = ("int16", "int8")
TOKEN, POSITION, TABLE, TWICE, NOT_FINITE = 1, 2, 3, 4, 5  # what kernel_pass returns, with 8 * row added


class KernelDecoder(Stepper):
    """Decodes one request at a time as a stepper, or rows of many requests by `rows`. Build it with `from_model`.

    Attributes:
        keys, values: the pool of blocks, FP16 [layers, blocks, kv_heads, head_dim, 16] and [layers, blocks, kv_heads,
            16, head_dim]; or INT8, with key_scales and value_scales FP32 [layers, blocks, kv_heads, 16] beside it.
        length: tokens stored of the stepper's request.
        features: FP32 [k, hidden], the hidden states that the head read for each token of the last call.
    """

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
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations must be 'int16' or 'int8', got {activations!r}")
        if cache not in (None, "int8"):
            raise ValueError(f"cache must be None or 'int8', got {cache!r}")
        for name, value in (("max_length", max_length), ("threads", threads), ("blocks", blocks)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r}; expected an int or None")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        limit = model.config.max_position_embeddings
        if max_length is not None and max_length > limit:
            raise ValueError(f"max_length {max_length} is beyond the model's {limit} positions")
        self._library = kernel_library.load()
        self.device = torch.device("cpu")
        self.activations, self.threads = activations, threads or torch.get_num_threads()
        self.vocab_size = model.config.vocab_size
        self.max_positions = min(max_length or 2048, limit)
        with torch.no_grad():
            self.weights = KernelWeights.from_model(model, self._library.kernel_lanes(), self.max_positions)
        self._struct = self.weights.struct
        self.blocks = blocks or -(-self.max_positions // BLOCK)
        self._make_pool(torch.float16 if cache is None else torch.int8)
        self._scratch = torch.zeros(self._library.kernel_scratch(self._struct))
        self._call = kernel_library.Pass(two_digits=activations == "int16", scratch=self._scratch.data_ptr())
        self._table = torch.arange(self.blocks)[None]  # the stepper's own request: every block, in order
        self.length = 0
        self.features: Tensor | None = None
        self._prefix: Tensor | None = None  # ids [1, n] that `keep_prefix` read
        self._prefix_features: Tensor | None = None  # [n, hidden]; None: the prefix's slots were written over

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

    # -- the stepper protocol -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        """Forget everything, read input_ids [1, n], return the last position's logits [1, vocab] FP32."""
        check_step_ids(input_ids)
        features = None
        if self._begins_with_prefix(input_ids):
            if self._prefix_features is None:
                self.keep_prefix(self._prefix)
            features = self._prefix_features
        self.length = 0 if features is None else features.shape[0]
        logits = self._advance(input_ids[:, self.length :], last_only=True)
        if features is not None:
            self.features = torch.cat((features, self.features))  # [n, hidden], as if all had been read just now
        return logits

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

    @torch.inference_mode()
    def keep_prefix(self, input_ids: Tensor) -> None:
        """Read ids [1, n] once for all: a later prefill that begins with them reads only what comes behind.

        A prompt that begins otherwise is read whole, over the prefix, which is then read anew when next wanted.
        """
        self.length = 0
        self._advance(input_ids, last_only=True)
        self._prefix, self._prefix_features = input_ids.to(self.device, copy=True), self.features.clone()

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix that `keep_prefix` read; 0 without one."""
        return 0 if self._prefix is None else self._prefix.shape[1]

    def crop_to(self, length: int) -> None:
        """Forget every token after the first `length`. What stands behind is overwritten by the next step."""
        self.length = check_count("crop_to", length, 0, self.length)

    def keep_features(self) -> None:
        """It always does."""

    # -- bytes --------------------------------------------------------------------------------------------------------

    @property
    def step_bytes(self) -> int:
        """Weight bytes that one decode step reads: every matrix once, the norms, one row of the embedding."""
        return self.weights.step_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool of blocks."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(part.nbytes for part in parts if part is not None)

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
                must come first; each sees the blocks' tokens up to itself.
            block_tables: [n, blocks], the blocks of each row's request in order, as `BlockManager.table` lists them.
                Shorter ones are filled up with anything.
            wanted: the rows whose logits are wanted, None for all.

        It shares its blocks with the stepper: use one or the other.

        Raises:
            ValueError: no rows, an id outside the vocabulary, a position beyond `max_positions` or the table, a block
                that is not in the pool, two rows in one slot of a block, numbers that are not finite.
        """
        token_ids, positions, tables = (
            _integers(name, x)
            for name, x in (("token_ids", token_ids), ("positions", positions), ("block_tables", block_tables))
        )
        n = token_ids.numel()
        if token_ids.dim() != 1 or n == 0 or positions.shape != (n,) or tables.dim() != 2 or tables.shape[0] != n:
            raise ValueError(
                f"expected token_ids [n], positions [n] and block_tables [n, blocks], n at least 1; got "
                f"{list(token_ids.shape)}, {list(positions.shape)} and {list(tables.shape)}"
            )
        wanted = torch.arange(n) if wanted is None else _integers("wanted", wanted)
        if wanted.dim() != 1 or (wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < n):
            raise ValueError(f"wanted must be row numbers [m] from 0 to {n - 1}, got {wanted.tolist()}")
        self._prefix_features = None  # nobody knows what these rows write over
        return self._compute(token_ids, positions, tables, wanted)

    def _compute(self, token_ids: Tensor, positions: Tensor, tables: Tensor, wanted: Tensor) -> Tensor:
        """Rows in passes of at most MAX_ROWS: token_ids, positions [n], tables [n, blocks], wanted [m], all int64."""
        n, width = token_ids.shape[0], tables.shape[1]
        features = torch.empty(n, self._struct.hidden)
        logits = torch.empty(wanted.shape[0], self._struct.outputs)
        call = self._call
        call.table_width, call.threads = width, kernel_library.usable_threads(self.threads)
        for start in range(0, n, MAX_ROWS):
            count = min(n - start, MAX_ROWS)
            if n <= MAX_ROWS:
                here, into = wanted, logits
            else:
                mine = (wanted >= start) & (wanted < start + count)
                here = wanted[mine] - start
                into = torch.empty(here.shape[0], self._struct.outputs)
            call.rows, call.wanted_rows = count, here.shape[0]
            call.tokens, call.positions = token_ids[start:].data_ptr(), positions[start:].data_ptr()
            call.tables, call.wanted = tables[start:].data_ptr(), here.data_ptr()
            call.features, call.logits = features[start:].data_ptr(), into.data_ptr()
            answer = self._library.kernel_pass(self._struct, self._cache, call)
            if answer:
                row = answer // 8 + start
                raise ValueError(self._complaint(answer % 8, row, token_ids, positions, tables))
            if into is not logits:
                logits[mine] = into
        self.features = features
        return logits

    def _advance(self, token_ids: Tensor, last_only: bool = False) -> Tensor:
        """The next tokens [1, k] of the stepper's request: logits [k or 1, vocab]."""
        check_step_ids(token_ids)
        start, count = self.length, token_ids.shape[1]
        end = start + count
        if end > self.max_positions or end > self.blocks * BLOCK:
            limit = min(self.max_positions, self.blocks * BLOCK)
            raise ValueError(f"{end} tokens do not fit into a KV cache of max_length {limit}")
        if start < self.prefix_tokens:
            self._prefix_features = None  # this call writes over the prefix's slots
        tables = self._table[:, : -(-end // BLOCK)].expand(count, -1).contiguous()
        wanted = torch.arange(count - 1 if last_only else 0, count)
        logits = self._compute(_integers("token_ids", token_ids[0]), torch.arange(start, end), tables, wanted)
        self.length = end
        return logits

    def _begins_with_prefix(self, input_ids: Tensor) -> bool:
        """Whether a prompt [1, n] begins with the kept prefix and goes on behind it."""
        kept = self.prefix_tokens
        return 0 < kept < input_ids.shape[1] and torch.equal(input_ids[:, :kept].to(self.device), self._prefix)

    def _make_pool(self, dtype: torch.dtype) -> None:
        struct = self._struct
        size = (struct.layers, self.blocks, struct.kv_heads)
        self.keys = torch.zeros(*size, struct.head_dim, BLOCK, dtype=dtype)
        self.values = torch.zeros(*size, BLOCK, struct.head_dim, dtype=dtype)
        self.key_scales, self.value_scales = (
            torch.zeros(*size, BLOCK) if dtype == torch.int8 else None for _ in range(2)
        )
        self._cache = kernel_library.Cache(blocks=self.blocks)
        for name, tensor in (
            ("keys", self.keys),
            ("values", self.values),
            ("key_scales", self.key_scales),
            ("value_scales", self.value_scales),
        ):
            setattr(self._cache, name, None if tensor is None else tensor.data_ptr())

    def _complaint(self, error: int, row: int, token_ids: Tensor, positions: Tensor, tables: Tensor) -> str:
        if error == TOKEN:
            return f"row {row}: token id {int(token_ids[row])}; expected 0 to {self.vocab_size - 1}"
        position = int(positions[row])
        if error == POSITION:
            limit = min(self.max_positions, tables.shape[1] * BLOCK)
            return f"row {row}: position {position}; expected 0 to {limit - 1}, what max_length and its table hold"
        if error == TABLE:
            table = tables[row, : position // BLOCK + 1].tolist()
            return f"row {row}: blocks {table}; expected block numbers from 0 to {self.blocks - 1}"
        if error == TWICE:
            block = int(tables[row, position // BLOCK])
            return f"row {row}: position {position} in block {block} is written by an earlier row of this pass, too"
        return "the activations hold NaN, infinity or a number beyond FP16 (are the weights sound?)"


def _integers(name: str, values) -> Tensor:
    """As a contiguous int64 tensor on the CPU. Raises TypeError for anything but integers."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if tensor.dtype not in (torch.int64, torch.int32) and tensor.numel():
        raise TypeError(f"{name} are {tensor.dtype}; expected integers (int64 or int32)")
    return tensor.to("cpu", torch.int64).contiguous()
