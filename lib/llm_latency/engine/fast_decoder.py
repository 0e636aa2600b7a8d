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

from llm_latency.arguments import check_count, check_step_ids
from llm_latency.compat import head_dim
from llm_latency.engine.attention import StaticInt8KV, StaticKV, attend_grouped, causal_mask, rotary_tables, rotate
from llm_latency.engine.graphs import GraphedStep
from llm_latency.engine.weights import (
    FORMATS,
    check_model,
    compute_dtype,
    head_rows,
    make_matrix,
    read_layers,
    read_norm,
)
from llm_latency.generation import Stepper
from llm_latency.hardware import bf16_is_native
from llm_latency.quantization import ffn_smoothing

SPAN_STEP = 128  # a compiled step attends over multiples of this many slots: few shapes, each compiled once
SMALL_STEP = 8  # tokens: up to here a step runs compiled or as a graph, and INT8 and INT4 use the kernels of decoding
SCORE_CHUNK = 64  # tokens per pass when a text is scored in FP32 or BF16


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Options of a FastDecoder. Raises ValueError or TypeError for those that do not fit together."""

    weights: str = "float32"
    """Format of the layers' matrices: "float32", "bfloat16", "int8", "int4", or "int8_dynamic", which rounds the
    activations to INT8 as well (CPU only)."""

    head: str | None = None
    """Format of the output head. None: that of `weights`, but INT8 beside INT4, whose four bits hurt the head most."""

    compile: bool = False
    """torch.compile the steps of few tokens."""

    max_length: int | None = None
    """Slots of the KV cache, prompt and answer together. None: 2048, or the model's own limit if that is lower."""

    cache: str | None = None
    """Format of the KV cache: "int8", or None for the dtype of the activations."""

    keep_bfloat16: bool = True
    """Keep BF16 copies of INT8 and INT4 matrices, which prefill multiplies faster."""

    cuda_graphs: bool | None = None
    """Replay a step of few tokens as one CUDA graph. None: on CUDA, yes."""

    head_ids: Tensor | None = None
    """The token ids whose rows the head keeps, int64 [n]; logits are then [.., n], in this order. None: all of them.
    For drafts: the head is most of a tiny model's cost, and a draft may leave rare tokens to the target."""

    calibration: Tensor | None = None
    """Ids [1, n] of a text like those to come, from which "int8_dynamic" learns its outliers. None: it does not."""

    def __post_init__(self) -> None:
        for name, value in (("weights", self.weights), ("head", self.head_format)):
            if value not in FORMATS:
                raise ValueError(f"{name} must be one of {', '.join(FORMATS)}, got {value!r}")
        if compute_dtype(self.weights) != compute_dtype(self.head_format):
            raise ValueError(
                f"a head reads what the layers compute in: weights {self.weights!r} compute in "
                f"{compute_dtype(self.weights)}, and a head in {self.head_format!r} does not"
            )
        if self.cache not in (None, "int8"):
            raise ValueError(f"cache must be None or 'int8', got {self.cache!r}")
        if self.calibration is not None and self.weights != "int8_dynamic":
            raise ValueError(f"calibration is for weights='int8_dynamic', not {self.weights!r}")

    @property
    def head_format(self) -> str:
        return self.head or ("int8" if self.weights == "int4" else self.weights)


class FastDecoder(Stepper):
    """Decodes one request at a time. Build it with `from_model`.

    features: [k, hidden], what the head read for each of the last call's k tokens.
    """

    def __init__(self, model, options: DecoderOptions) -> None:
        check_model(model)
        config, rotary = model.config, model.model.rotary_emb
        self.options, self.weights, self.head_ids = options, options.weights, options.head_ids
        self.device = model.device
        on_cuda = self.device.type == "cuda"
        if options.cuda_graphs and not on_cuda:
            raise ValueError(f"cuda_graphs=True needs a model on CUDA; this one is on {self.device}")
        self.vocab_size, limit = config.vocab_size, config.max_position_embeddings
        self.max_positions = min(2048, limit)
        if options.max_length is not None:
            self.max_positions = check_count("max_length", options.max_length, 1, limit)
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim(config),
        )
        self.dtype = compute_dtype(options.weights)
        # A CPU that widens BF16 to FP32 does so in SDPA at every call, eight times slower than FP32 from the start.
        self.cache_dtype = self.dtype if bf16_is_native(self.device) else torch.float32
        # torch.compile cannot see into the layout of oneDNN's packed BF16.
        storage = dict(keep_bfloat16=options.keep_bfloat16, prepack=not options.compile)
        with torch.no_grad():
            self.embedding = model.model.embed_tokens.weight.detach().to(self.dtype)  # [vocab, hidden]
            smoothing = None if options.calibration is None else ffn_smoothing(model, options.calibration)
            self.layers = read_layers(model, options.weights, smoothing, **storage)
            self.norm = read_norm(model.model.norm, options.weights)
            self.head = make_matrix(*head_rows(model.lm_head, options.head_ids), options.head_format, **storage)
            tables = rotary_tables(rotary.inv_freq, self.max_positions, rotary.attention_scaling)
            self.cos, self.sin = (table.to(self.cache_dtype) for table in tables)  # [positions, head_dim]
        self.norm_eps = config.rms_norm_eps
        floor = (config.hidden_size * config.rms_norm_eps) ** 0.5
        self.norm_floor = torch.tensor(floor, dtype=torch.float32, device=self.device)
        kind = StaticKV if options.cache is None else StaticInt8KV
        size = (self.kv_heads, self.max_positions, self.head_dim)
        self.caches = [kind(*size, self.cache_dtype, self.device) for _ in self.layers]
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

    # -- a stepper ------------------------------------------------------------------------------------------------

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
        """Logits [1, n, vocab] FP32 of a whole text [1, n], in pieces through the kernels that decoding uses."""
        self.length = 0
        chunk = SMALL_STEP if self.weights in ("int8", "int4") else SCORE_CHUNK
        return torch.cat([self._advance(piece) for piece in input_ids.split(chunk, dim=1)])[None]

    def crop_to(self, length: int) -> None:
        """Forget every token after the first `length`. What stands behind is overwritten by the next step."""
        self.length = check_count("crop_to", length, 0, self.length)

    def keep_features(self) -> None:
        """It always does."""

    # -- the model ------------------------------------------------------------------------------------------------

    def _advance(self, token_ids: Tensor, last_only: bool = False) -> Tensor:
        """Read the next tokens [1, k]: logits [k or 1, vocab] FP32."""
        check_step_ids(token_ids)
        start, tokens = self.length, token_ids.shape[1]
        end = start + tokens
        if end > self.max_positions:
            raise ValueError(f"{end} tokens do not fit into a KV cache of max_length {self.max_positions}")
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
