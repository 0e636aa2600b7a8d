"""What decides FLOPs and bytes: a model's sizes, from a config or known by name, and how its numbers are stored."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llm_latency.arguments import check_count
from llm_latency.compat import head_dim

ARCHITECTURES = ("llama", "qwen2", "mistral")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of pre-norm blocks: RMS norm, attention with grouped heads, RMS norm, gated FFN (SwiGLU).

    layers, hidden, ffn, heads, kv_heads, head_dim, vocab: sizes. tied: the head is the embedding table.
    qkv_bias, output_bias, ffn_bias: which projections carry biases. sliding_window: the furthest that attention looks
    back, None where it sees everything.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                check_count(f"{self.name}: {field.name}", getattr(self, field.name))
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.sliding_window is not None:
            check_count(f"{self.name}: sliding_window", self.sliding_window)

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied head counted once."""
        matrices = sum(rows * columns for rows, columns in self.layer_matrices())
        per_layer = matrices + self.layer_bias_values() + 2 * self.hidden
        return (1 if self.tied else 2) * self.vocab * self.hidden + self.layers * per_layer + self.hidden

    def attention_matrices(self) -> list[tuple[int, int]]:
        """(out, in) of a layer's query, key, value and output projections."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [(query, self.hidden), (key, self.hidden), (key, self.hidden), (self.hidden, query)]

    def ffn_matrices(self) -> list[tuple[int, int]]:
        """(out, in) of a layer's gate, up and down projections."""
        return [(self.ffn, self.hidden), (self.ffn, self.hidden), (self.hidden, self.ffn)]

    def layer_matrices(self) -> list[tuple[int, int]]:
        """(out, in) of all seven matrices of one layer."""
        return self.attention_matrices() + self.ffn_matrices()

    def attention_bias_values(self) -> int:
        """Bias values of one layer's attention."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return qkv * self.qkv_bias + self.hidden * self.output_bias

    def ffn_bias_values(self) -> int:
        """Bias values of one layer's FFN."""
        return (2 * self.ffn + self.hidden) * self.ffn_bias

    def layer_bias_values(self) -> int:
        """Bias values of one layer."""
        return self.attention_bias_values() + self.ffn_bias_values()


# From the models' published config.json files.
SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, tied=True),
        ModelShape("smollm2-1.7b", 24, 2048, 8192, 32, 32, 64, 49152, tied=True),
        ModelShape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000),
        ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True),
        ModelShape("llama-2-13b", 40, 5120, 13824, 40, 40, 128, 32000),
        ModelShape("llama-3-70b", 80, 8192, 28672, 64, 8, 128, 128256),
    )
}


def shape_of(model: object) -> ModelShape:
    """The shape of a transformers config (LlamaConfig, Qwen2Config, MistralConfig), of a model that carries one, of a
    name in `SHAPES`, or of a `ModelShape` itself.

    Raises KeyError for an unknown name, ValueError for another architecture (its FLOPs would be counted wrongly), and
    TypeError for what is neither.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, str):
        if model not in SHAPES:
            raise KeyError(f"no shape named {model!r}; known: {', '.join(SHAPES)}")
        return SHAPES[model]
    config = getattr(model, "config", model)
    kind = getattr(config, "model_type", None)
    if kind is None:
        raise TypeError(f"{type(model).__name__} has no model_type; expected a transformers config or a name in SHAPES")
    if kind not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {kind!r}; the roofline can count {', '.join(ARCHITECTURES)}")
    # The three architectures differ in their biases alone: Qwen2 always has them on q, k and v; Llama by two options.
    llama_bias = bool(getattr(config, "attention_bias", False))
    return ModelShape(
        name=config.name_or_path or kind,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        qkv_bias=kind == "qwen2" or llama_bias,
        output_bias=llama_bias,
        ffn_bias=bool(getattr(config, "mlp_bias", False)),
        sliding_window=getattr(config, "sliding_window", None),
    )


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How the values of a matrix row (of weights) or of one head's vector (in a cache) are stored.

    bits: of one value. group_size: values of a row that share a scale; 0 means the whole row shares one.
    group_bytes: bytes of what a group shares: 0 for floating point, 2 for a scale, 4 for a scale and a zero point in
    16 bits each. compute: the dtype in which products of such values are computed.
    """

    name: str
    bits: int
    group_size: int = 0
    group_bytes: int = 0
    compute: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16, 32):
            raise ValueError(f"bits={self.bits!r}: expected 4, 8, 16 or 32")
        if self.group_size < 0 or self.group_bytes < 0:
            raise ValueError(f"group_size={self.group_size} and group_bytes={self.group_bytes} must not be negative")

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of `rows` rows of `columns` values. Groups lie along a row; a last, shorter one has its own scale."""
        if rows < 0 or columns < 0:
            raise ValueError(f"a matrix of {rows} rows and {columns} columns: sizes must not be negative")
        groups = -(-columns // (self.group_size or columns)) if columns else 0
        return rows * (-(-columns * self.bits // 8) + groups * self.group_bytes)


# INT8: one 16-bit scale for each row (output channel, or token and head). INT4: 16-bit scale and zero point for every
# 32 values, the layout of `torch.ops.aten._weight_int4pack_mm_for_cpu`. Both are unpacked and multiplied in BF16.
FORMATS: dict[str, NumberFormat] = {
    "float32": NumberFormat("float32", 32, compute="float32"),
    "bfloat16": NumberFormat("bfloat16", 16, compute="bfloat16"),
    "float16": NumberFormat("float16", 16, compute="float16"),
    "int8": NumberFormat("int8", 8, group_bytes=2),
    "int4": NumberFormat("int4", 4, group_size=32, group_bytes=4),
}


def number_format(dtype: str | NumberFormat) -> NumberFormat:
    """A format by its dtype's name, or the format itself where one is given. Raises ValueError for an unknown name."""
    if isinstance(dtype, NumberFormat):
        return dtype
    if dtype not in FORMATS:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(FORMATS)} or a NumberFormat")
    return FORMATS[dtype]
