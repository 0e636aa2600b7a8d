"""FLOPs and bytes of a forward pass, part by part: what a stage must compute and must move, whatever the machine.

The FLOP convention is that of `torch.utils.flop_counter`: a product of [m, k] and [k, n] counts 2 m n k; attention
counts its two products over the full square of queries and keys, the half that a causal mask hides included; everything
elementwise (norms, rotary embedding, softmax, activation) counts nothing. The norms' bytes count.

Bytes are the least that must move: every weight read once per pass, every stored key and value read once per pass,
every matrix's input read and output written once. Scores of attention stay on the chip, as in SDPA or FlashAttention.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from llm_latency.arguments import check_count
from llm_latency.roofline.shapes import NumberFormat, number_format, shape_of

PARTS = ("embedding", "norms", "projections", "attention", "ffn", "head")


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs, and bytes by what they are. Add two with `+`."""

    flops: int = 0
    weight_bytes: int = 0
    cache_read_bytes: int = 0
    cache_write_bytes: int = 0
    activation_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All bytes read and written."""
        return self.weight_bytes + self.cache_read_bytes + self.cache_write_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved; 0 for work that moves nothing."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Work)))


def total(parts: dict[str, Work]) -> Work:
    """The sum over all parts."""
    return sum(parts.values(), Work())


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        check_count(name, value, least=0 if name in ("context", "tokens") else 1)


def parameter_bytes(model: object, weights: str | NumberFormat = "bfloat16") -> int:
    """Bytes of a model's stored parameters.

    A floating-point dtype applies to everything. A quantised format applies to the matrices of the layers and to the
    head; embedding table, norms and biases stay in its compute dtype, and a tied head becomes a quantised copy of its
    own beside the embedding table, for a table in packed blocks can no longer be looked up by row.
    """
    shape, stored = shape_of(model), number_format(weights)
    plain = number_format(stored.compute)
    matrices = sum(stored.nbytes(rows, columns) for rows, columns in shape.layer_matrices())
    vectors = plain.nbytes(1, shape.layer_bias_values() + 2 * shape.hidden)
    own_head = not (shape.tied and stored == plain)
    head = stored.nbytes(shape.vocab, shape.hidden) if own_head else 0
    embedding_and_norm = plain.nbytes(shape.vocab + 1, shape.hidden)
    return embedding_and_norm + shape.layers * (matrices + vectors) + head


def cache_bytes(model: object, tokens: int, *, batch: int = 1, cache: str | NumberFormat = "bfloat16") -> int:
    """Bytes of the keys and values of `tokens` tokens in each of `batch` sequences, over all layers."""
    _check_sizes(tokens=tokens, batch=batch)
    shape = shape_of(model)
    return 2 * shape.layers * number_format(cache).nbytes(batch * tokens * shape.kv_heads, shape.head_dim)


def forward_work(
    model: object,
    new_tokens: int,
    *,
    context: int = 0,
    batch: int = 1,
    weights: str | NumberFormat = "bfloat16",
    cache: str | NumberFormat | None = None,
    logits: Literal["last", "all"] = "last",
) -> dict[str, Work]:
    """Work of one pass of `new_tokens` tokens after `context` cached ones, by part (see `PARTS`).

    Prefill is many new tokens on an empty context, a decode step is one new token. cache=None: the cache is kept in
    the weights' compute dtype. logits="last": the head runs on the last position of each sequence only.

    Raises ValueError for sizes below 1 (context: below 0), for unknown formats, and beyond a model's sliding window,
    where attention no longer reads the whole context.
    """
    _check_sizes(new_tokens=new_tokens, context=context, batch=batch)
    if logits not in ("last", "all"):
        raise ValueError(f"logits={logits!r}: expected 'last' or 'all'")
    shape, stored = shape_of(model), number_format(weights)
    plain = number_format(stored.compute)
    kept = plain if cache is None else number_format(cache)
    keys = context + new_tokens
    if shape.sliding_window is not None and keys > shape.sliding_window:
        raise ValueError(f"{keys} tokens exceed the sliding window of {shape.sliding_window}: not counted here")
    rows = batch * new_tokens

    def matrices(pairs: list[tuple[int, int]], times: int, rows: int, bias_values: int = 0) -> Work:
        return Work(
            flops=times * sum(2 * rows * out * into for out, into in pairs),
            weight_bytes=times * (sum(stored.nbytes(*pair) for pair in pairs) + plain.nbytes(1, bias_values)),
            activation_bytes=times * sum(plain.nbytes(rows, out + into) for out, into in pairs),
        )

    norms = 2 * shape.layers + 1
    heads_width = shape.heads * shape.head_dim
    return {
        "embedding": Work(  # a gather: only the rows asked for are read, then written
            activation_bytes=2 * plain.nbytes(rows, shape.hidden)
        ),
        "norms": Work(
            weight_bytes=norms * plain.nbytes(1, shape.hidden),
            activation_bytes=norms * 2 * plain.nbytes(rows, shape.hidden),
        ),
        "projections": matrices(shape.attention_matrices(), shape.layers, rows, shape.attention_bias_values()),
        "attention": Work(
            flops=shape.layers * 4 * rows * keys * heads_width,
            cache_read_bytes=cache_bytes(shape, keys, batch=batch, cache=kept),
            cache_write_bytes=cache_bytes(shape, new_tokens, batch=batch, cache=kept),
            activation_bytes=shape.layers * 2 * plain.nbytes(rows, heads_width),
        ),
        "ffn": matrices(shape.ffn_matrices(), shape.layers, rows, shape.ffn_bias_values()),
        "head": matrices([(shape.vocab, shape.hidden)], 1, rows if logits == "all" else batch),
    }


def prefill_work(model: object, prompt_tokens: int, **options: object) -> dict[str, Work]:
    """Work of reading a prompt, which also yields the first new token. Options as in `forward_work`."""
    _check_sizes(prompt_tokens=prompt_tokens)
    return forward_work(model, prompt_tokens, **options)


def decode_work(
    model: object, prompt_tokens: int, new_tokens: int, *, kv_cache: bool = True, **options: object
) -> dict[str, Work]:
    """Work of all decode steps of an answer: new_tokens - 1 passes, for the first token comes out of the prefill.

    With kv_cache=False every step reads the whole sequence again. Options as in `forward_work`.
    """
    _check_sizes(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    parts, steps = dict.fromkeys(PARTS, Work()), new_tokens - 1
    if kv_cache and steps:  # every count grows by as much from step to step: the sum is that of a line
        first, last = (forward_work(model, 1, context=prompt_tokens + done, **options) for done in (0, steps - 1))
        return {part: _sum_of_line(first[part], last[part], steps) for part in PARTS}
    for done in range(prompt_tokens, prompt_tokens + steps):
        step = forward_work(model, done + 1, **options)
        parts = {part: parts[part] + step[part] for part in PARTS}
    return parts


def _sum_of_line(first: Work, last: Work, steps: int) -> Work:
    """The sum of `steps` works, each of which is as much larger than the one before."""
    return Work(*((getattr(first, field.name) + getattr(last, field.name)) * steps // 2 for field in fields(Work)))
