"""The fast decoder: a Llama-family model reduced to the operators that a decode step needs.

Compared with the transformers model it drops the module tree, fuses Q, K, V into one matrix and gate, up into another,
writes the KV cache in place, and takes the weights in FP32, BF16, INT8 or INT4. It computes the same function: in FP32
its logits are the model's. The design is gpt-fast's (PyTorch blog, 2023-11-30).

`weights.py` reads a layer into two norm weights and four matrices (`qkv`, `output`, `gate_up`, `down`), each with
`product`: rows [k, in] -> [k, out] in the format asked for. `attention.py` holds the static KV cache (`store` writes k
tokens at their positions, `read` returns the first `span` slots) and `rotate`, which applies rotary positions (RoPE).
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

SPAN_STEP = 128  # a compiled step attends over a multiple of this many slots: few shapes, each compiled once
SMALL_STEP = 8  # tokens: a step of at most so many runs compiled or as a graph, and never uses the BF16 copies
SCORE_CHUNK = 64  # tokens per pass when a text is scored in FP32 or BF16


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Options of a FastDecoder. Raises ValueError if they do not fit together."""

    weights: str = "float32"
    """Format of the layers' matrices: "float32", "bfloat16", "int8", "int4", or "int8_dynamic", which rounds the
    activations to INT8 as well (CPU only)."""

    head: str | None = None
    """Format of the output head. None: that of `weights`, except INT8 for INT4: four bits hurt the head most."""

    compile: bool = False
    """torch.compile the steps of up to SMALL_STEP tokens."""

    max_length: int | None = None
    """Slots of the KV cache, prompt and answer together. None: 2048, or the model's own limit if that is lower."""

    cache: str | None = None
    """Format of the KV cache: "int8", or None for the dtype of the activations."""

    keep_bfloat16: bool = True
    """Keep BF16 copies of INT8 and INT4 matrices: prefill, a matmul of many rows, is faster with them."""

    cuda_graphs: bool | None = None
    """Replay a step of up to SMALL_STEP tokens as one CUDA graph. None: yes on CUDA."""

    head_ids: Tensor | None = None
    """The token ids whose rows the head keeps, int64 [n]; logits are then [..., n], in this order. None: all of them.
    For drafts: the head is most of a tiny model's cost, and a draft may leave rare tokens to the target."""

    calibration: Tensor | None = None
    """Ids [1, n] of a typical text: "int8_dynamic" measures on it which activations are outliers, and scales them down
    (SmoothQuant). None: it does not."""

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
    """Decodes one request at a time, as a `Stepper`. Build it with `from_model`.

    features: [k, hidden], the head's input for each of the last call's k tokens.
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
        # On a CPU without BF16 instructions SDPA converts to FP32 at every call: eight times slower than an FP32 cache.
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
        floor = (config.hidden_size * config.rms_norm_eps) ** 0.5  # what eps adds to a vector's length: see _normalise
        self.norm_floor = torch.tensor(floor, dtype=torch.float32, device=self.device)
        kind = StaticKV if options.cache is None else StaticInt8KV
        size = (self.kv_heads, self.max_positions, self.head_dim)
        self.caches = [kind(*size, self.cache_dtype, self.device) for _ in self.layers]
        # A compiled step or a CUDA graph is made for one shape: its span is rounded up, and a mask hides the rest.
        self._fixed_shapes = options.compile or on_cuda
        self._run = torch.compile(self._forward, dynamic=False) if options.compile else self._forward
        graphs = on_cuda if options.cuda_graphs is None else options.cuda_graphs
        self._graph = GraphedStep(self._run, self.device) if graphs else None

    @classmethod
    def from_model(cls, model, weights: str = "float32", compile: bool = False, **options) -> FastDecoder:
        """Take the weights of a transformers Llama, Qwen2 or Mistral model; `options` as in `DecoderOptions`.

        Raises ValueError for a model that it cannot compute exactly (another family, sliding windows), and ValueError
        or TypeError for options that do not fit.
        """
        return cls(model, DecoderOptions(weights=weights, compile=compile, **options))

    # -- the methods of a stepper ---------------------------------------------------------------------------------

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
        """Logits [1, n, vocab] FP32 of a whole text [1, n], in pieces small enough for the kernels of decoding."""
        self.length = 0
        chunk = SMALL_STEP if self.weights in ("int8", "int4") else SCORE_CHUNK
        return torch.cat([self._advance(piece) for piece in input_ids.split(chunk, dim=1)])[None]

    def crop_to(self, length: int) -> None:
        """Forget every token after the first `length`. Nothing is erased: later steps overwrite those slots, and no
        token attends beyond its own slot."""
        self.length = check_count("crop_to", length, 0, self.length)

    def keep_features(self) -> None:
        """Nothing to do: every call sets `features`."""

    # -- the model ------------------------------------------------------------------------------------------------

    def _advance(self, token_ids: Tensor, last_only: bool = False) -> Tensor:
        """Read the next tokens [1, k]: logits [k, vocab] FP32, or [1, vocab] with last_only."""
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
            # Eager: the exact span, and a mask only where some of the k tokens must not see others.
            logits, self.features = self._forward(ids, positions, end, start > 0 and tokens > 1, last_only)
        self.length = end
        return logits

    def _forward(
        self, ids: Tensor, positions: Tensor, span: int, masked: bool, last_only: bool
    ) -> tuple[Tensor, Tensor]:
        """Read ids [k] at positions [k], attending over the first `span` slots of the cache.

        Returns logits [k, vocab] FP32, or [1, vocab] with last_only, and the head's input, the features [k, hidden].
        Without `masked`, ids are a single token, which sees the whole span, or a prompt from slot 0, for which SDPA's
        own causal mask is right.
        """
        tokens, rotated = ids.shape[0], self.heads + self.kv_heads
        # Queries and keys are rotated. Values are not, so they get cos = 1 and sin = 0: one call of `rotate` for all.
        shape = (self.kv_heads, tokens, self.head_dim)  # cos, sin: [heads + 2 * kv_heads, k, head_dim]
        cos = torch.cat((self.cos[positions].expand(rotated, -1, -1), self.cos.new_ones(shape)))
        sin = torch.cat((self.sin[positions].expand(rotated, -1, -1), self.sin.new_zeros(shape)))
        mask = causal_mask(positions, span) if masked else None  # bool [1, 1, k, span]
        # F.embedding, because plain indexing would accept a negative id and take a row from the end.
        x = F.embedding(ids, self.embedding).float()  # [k, hidden]: the residual stream stays in FP32
        for layer, cache in zip(self.layers, self.caches, strict=True):
            qkv = layer.qkv.product(self._normalise(x, layer.attention_norm)).to(self.cache_dtype)
            qkv = qkv.view(1, tokens, -1, self.head_dim).transpose(1, 2)  # [1, heads + 2 * kv_heads, k, head_dim]
            q, kv = rotate(qkv, cos, sin).split((self.heads, 2 * self.kv_heads), dim=1)
            cache.store(kv, positions)  # keys and values at once, [1, 2 * kv_heads, k, head_dim]
            y = attend_grouped(q, *cache.read(span), mask, causal=tokens > 1 and not masked)  # [1, heads, k, head_dim]
            x = x + layer.output.product(y.transpose(1, 2).reshape(tokens, -1).to(self.dtype))
            gate, up = layer.gate_up.product(self._normalise(x, layer.ffn_norm)).chunk(2, dim=-1)  # [k, intermediate]
            x = x + layer.down.product(F.silu(gate) * up)
        features = self._normalise(x, self.norm)
        return self.head.product(features[-1:] if last_only else features).float(), features

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of x [k, hidden] FP32, rounded to the matrices' dtype."""
        if self.weights == "float32":  # in the order of transformers, so that results are equal to the bit
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps))
        # The same with fewer operators: sqrt(mean(x^2) + eps) is sqrt(|x|^2 + hidden * eps) / sqrt(hidden), where
        # norm_floor is sqrt(hidden * eps) and `weight` has been multiplied by sqrt(hidden).
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
