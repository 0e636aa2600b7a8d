"""The fast decoder: a Llama-family model reduced to the operators that a decode step needs.

Against a transformers model it drops the module tree, fuses Q, K, V and gate, up, keeps the KV cache in place, and
takes the weights in FP32, BF16, INT8 or INT4. It computes the same function: in FP32 its logits are the model's.
After gpt-fast (PyTorch blog, 2023-11-30).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llm_latency.engine.attention import attend_grouped, causal_mask, rotary_tables, rotate
from llm_latency.engine.graphs import GraphedStep
from llm_latency.engine.static_cache import StaticInt8KV, StaticKV
from llm_latency.engine.weights import Layer, WeightOptions, check_model, head_rows, make_matrix, read_layers, read_norm
from llm_latency.hardware import bf16_is_native
from llm_latency.quantization import ffn_smoothing

SPAN_STEP = 128  # a compiled step attends over multiples of this many slots: few shapes, each compiled once
SMALL_STEP = 8  # tokens: up to here a step runs compiled or as a graph, and INT8 and INT4 use the kernels of decoding
SCORE_CHUNK = 64  # tokens per pass when a text is scored in FP32 or BF16


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Options of a FastDecoder.

    weights: "float32", "bfloat16", "int8", "int4", or "int8_dynamic", with INT8 activations as well (CPU only).
    head: format of the output head; None means the same as weights, but INT8 beside INT4, since the head is the matrix
    that four bits hurt most. calibration: ids [1, n] of a text like those to come, from which "int8_dynamic" learns its
    outliers; None: it does not.
    compile: torch.compile the step. max_length: slots of the KV cache, None for 2048 or the model's own limit if lower.
    cache: "int8" for an INT8 KV cache, None for one in the dtype of the activations.
    group_size: of INT4 blocks. keep_bfloat16: BF16 copies of INT8 and INT4 weights for prefill.
    cuda_graphs: replay a decode step as one CUDA graph; None means yes on CUDA, True elsewhere raises ValueError.
    head_ids: the token ids whose rows the head keeps, int64 [n]; None for all. Logits are then [.., n], in this order.
    For drafts: the head is most of a tiny model's cost, and a draft may leave rare tokens to the target.
    """

    weights: str = "float32"
    head: str | None = None
    compile: bool = False
    max_length: int | None = None
    cache: str | None = None
    group_size: int = 32
    keep_bfloat16: bool = True
    cuda_graphs: bool | None = None
    head_ids: Tensor | None = None
    calibration: Tensor | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}")
        if self.cache not in (None, "int8"):
            raise ValueError(f"cache must be None or 'int8', got {self.cache!r}")
        if self.calibration is not None and self.weights != "int8_dynamic":
            raise ValueError(f"calibration is for weights='int8_dynamic', not {self.weights!r}")


class FastDecoder:
    """Decodes one request at a time. Build it with `from_model`."""

    def __init__(self, model, options: DecoderOptions) -> None:
        check_model(model)
        config = model.config
        self.options = options
        self.device = model.device
        on_cuda = self.device.type == "cuda"
        if options.cuda_graphs and not on_cuda:
            raise ValueError(f"cuda_graphs=True needs a model on CUDA; this one is on {self.device}")
        self.vocab_size = config.vocab_size
        limit = config.max_position_embeddings
        self.max_positions = min(options.max_length or 2048, limit)
        if options.max_length is not None and options.max_length > limit:
            raise ValueError(f"max_length {options.max_length} is beyond the model's {limit} positions")
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.weights = options.weights
        stored = WeightOptions(
            weights=options.weights,
            head=options.head or ("int8" if options.weights == "int4" else options.weights),
            group_size=options.group_size,
            keep_bfloat16=options.keep_bfloat16,
            prepack=not options.compile,  # torch.compile cannot see into oneDNN's packed layout
        )
        self.dtype = stored.dtype
        # A CPU that widens BF16 to FP32 does so in SDPA at every call, eight times slower than FP32 from the start.
        self.cache_dtype = self.dtype if bf16_is_native(self.device) else torch.float32
        with torch.no_grad():
            self.embedding = model.model.embed_tokens.weight.detach().to(self.dtype)  # [vocab, hidden]
            smoothing = None if options.calibration is None else ffn_smoothing(model, options.calibration)
            self.layers: list[Layer] = read_layers(model, stored, smoothing)
            self.norm = read_norm(model.model.norm, stored)
            self.head = make_matrix(*head_rows(model.lm_head, options.head_ids), stored.head, stored)
            self.cos, self.sin = (table.to(self.cache_dtype) for table in rotary_tables(model, self.max_positions))
        self.norm_eps = config.rms_norm_eps
        floor = (config.hidden_size * config.rms_norm_eps) ** 0.5
        self.norm_floor = torch.tensor(floor, dtype=torch.float32, device=self.device)
        kind = StaticKV if options.cache is None else StaticInt8KV
        size = (self.kv_heads, self.max_positions, self.head_dim)
        self.caches = [kind(*size, self.cache_dtype, self.device) for _ in self.layers]
        self.length = 0  # tokens stored
        self._prefix: Tensor | None = None  # ids [1, n] that `keep_prefix` read
        self._prefix_features: Tensor | None = None  # [n, hidden]; None: the prefix's slots were written over
        self.features: Tensor | None = None  # [k, hidden]: what the head read in the last call, for every token of it
        self._fixed_shapes = options.compile or on_cuda
        self._run = torch.compile(self._forward, dynamic=False) if options.compile else self._forward
        graphs = on_cuda if options.cuda_graphs is None else options.cuda_graphs
        self._graph = GraphedStep(self._run, self.device) if graphs else None

    @classmethod
    def from_model(cls, model, weights: str = "float32", compile: bool = False, **options) -> FastDecoder:
        """Take the weights of a transformers Llama, Qwen2 or Mistral model; `options` as in `DecoderOptions`.

        Raises ValueError for a model it would not compute right, or options that do not fit.
        """
        return cls(model, DecoderOptions(weights=weights, compile=compile, **options))

    # -- the stepper protocol -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        """Forget everything, read input_ids [1, n], return the last position's logits [1, vocab] FP32."""
        _check_ids(input_ids)
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
        """Logits [1, n, vocab] FP32 of a whole text [1, n], in pieces through the kernels that decoding uses."""
        self.length = 0
        chunk = SMALL_STEP if self.weights in ("int8", "int4") else SCORE_CHUNK
        return torch.cat([self._advance(piece) for piece in input_ids.split(chunk, dim=1)])[None]

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
        if not isinstance(length, int) or isinstance(length, bool):
            raise TypeError(f"crop_to({length!r}); expected an int")
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length} tokens; {self.length} are stored")
        self.length = length

    # -- bytes ----------------------------------------------------------------------------------------------------

    @property
    def step_bytes(self) -> int:
        """Weight bytes that one decode step reads: every matrix once, the norms, one row of the embedding."""
        matrices = sum(matrix.nbytes for layer in self.layers for matrix in layer.matrices) + self.head.nbytes
        norms = (2 * len(self.layers) + 1) * self.norm.nbytes
        return matrices + norms + self.embedding[0].nbytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of the BF16 copies kept for prefill."""
        return sum(m.copy_nbytes for layer in self.layers for m in layer.matrices) + self.head.copy_nbytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache as allocated."""
        return sum(cache.nbytes for cache in self.caches)

    # -- the model ------------------------------------------------------------------------------------------------

    def _begins_with_prefix(self, input_ids: Tensor) -> bool:
        """Whether a prompt [1, n] begins with the kept prefix and goes on behind it."""
        kept = self.prefix_tokens
        if kept == 0 or input_ids.shape[1] <= kept:
            return False
        return torch.equal(input_ids[:, :kept].to(self.device), self._prefix)

    def _advance(self, token_ids: Tensor, last_only: bool = False) -> Tensor:
        _check_ids(token_ids)
        start, tokens = self.length, token_ids.shape[1]
        end = start + tokens
        if end > self.max_positions:
            raise ValueError(f"{end} tokens do not fit into a KV cache of max_length {self.max_positions}")
        if start < self.prefix_tokens:
            self._prefix_features = None  # this call writes over the prefix's slots
        ids = token_ids[0].to(self.device)
        positions = torch.arange(start, end, device=self.device)
        if self._fixed_shapes and start > 0 and tokens <= SMALL_STEP:
            span = min(-(-end // SPAN_STEP) * SPAN_STEP, self.max_positions)
            logits, self.features = (self._graph or self._run)(ids, positions, span, True, last_only)
        else:
            # Eager: the exact span, and no mask where there is nothing to hide.
            logits, self.features = self._forward(ids, positions, end, start > 0 and tokens > 1, last_only)
        self.length = end
        return logits

    def _forward(
        self, ids: Tensor, positions: Tensor, span: int, masked: bool, last_only: bool
    ) -> tuple[Tensor, Tensor]:
        """Read ids [k] at positions [k], attending over the first `span` slots: logits [k or 1, vocab] FP32 and the
        features [k, hidden] that the head reads.

        Without a mask, k tokens are either one, which sees the whole span, or a prompt that begins at slot 0.
        """
        tokens, turned = ids.shape[0], self.heads + self.kv_heads
        # Queries and keys are rotated, values are not: in their rows the tables hold 1 and 0. One operator serves all.
        shape = (self.kv_heads, tokens, self.head_dim)  # cos, sin: [heads + 2 * kv_heads, k, head_dim]
        cos = torch.cat((self.cos[positions].expand(turned, -1, -1), self.cos.new_ones(shape)))
        sin = torch.cat((self.sin[positions].expand(turned, -1, -1), self.sin.new_zeros(shape)))
        mask = causal_mask(positions, span) if masked else None
        # [k, hidden]: the residual stream stays in FP32. Plain indexing would take a negative id from the end.
        x = F.embedding(ids, self.embedding).float()
        for layer, cache in zip(self.layers, self.caches, strict=True):
            qkv = layer.qkv.product(self._normalise(x, layer.attention_norm)).to(self.cache_dtype)
            qkv = qkv.view(1, tokens, -1, self.head_dim).transpose(1, 2)  # [1, heads + 2 * kv_heads, k, head_dim]
            q, kv = rotate(qkv, cos, sin).split((self.heads, 2 * self.kv_heads), dim=1)
            cache.store(kv, positions)
            y = attend_grouped(q, *cache.read(span), mask, causal=tokens > 1 and not masked)  # [1, heads, k, head_dim]
            x = x + layer.output.product(y.transpose(1, 2).reshape(tokens, -1).to(self.dtype))
            gate, up = layer.gate_up.product(self._normalise(x, layer.ffn_norm)).chunk(2, dim=-1)
            x = x + layer.down.product(F.silu(gate) * up)
        features = self._normalise(x, self.norm)
        return self.head.product(features[-1:] if last_only else features).float(), features

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of x [k, hidden] FP32, in the matrices' dtype."""
        if self.weights == "float32":  # the formula of transformers, to the bit
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps))
        # The same by way of the vector's length; `weight` holds the factor sqrt(hidden). Fewer operators, less time.
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.norm_floor)
        return (x / length * weight).to(self.dtype)


def _check_ids(token_ids: Tensor) -> None:
    """Raise ValueError or TypeError unless they are integers [1, k], k at least 1."""
    if token_ids.ndim != 2 or token_ids.shape[0] != 1 or token_ids.shape[1] == 0:
        raise ValueError(f"expected token ids of shape [1, k], k at least 1; got {list(token_ids.shape)}")
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token ids are {token_ids.dtype}; expected int64 or int32")
