"""The GPU memory that each notebook holds at its fullest, counted from the shapes of what its cells make.

Nothing is loaded and no GPU is needed: a model's weights, a decoder's copies, a cache are closed forms of the model's
shape. Each function `_NN` below follows a notebook's cells in order, with the cells' numbers; a test compares what it
counts with the calls that stand in the notebook, and the closed forms with the allocator of a (pretended) GPU.

Counted: weights and their copies in every format, caches, drafts, what is in the way while a matrix is rounded, logits
of scored texts, attention's scores where they are stored, and the models of child processes. Not counted, but allowed
for with `RESERVE` in each process: CUDA's context, workspaces of kernels, activations of a short pass, the allocator's
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from every_millisecond.request import NEW_TOKENS, PROMPT_TOKENS
from llm_latency import hardware, models, roofline
from llm_latency.models.loading import BORROWED_VOCABULARY
from llm_latency.models.loading import SHAPES as RANDOM
from llm_latency.roofline import FORMATS, ModelShape

RESERVE = 750_000_000  # bytes of a process that no tensor of ours accounts for
GOALS_GB = {"smollm2-135m": 4, "smollm2-1.7b": 15, "qwen2.5-7b": 40, "llama-7b-shape": 40}
CARD_OF = {"smollm2-135m": "T4", "smollm2-1.7b": "T4", "qwen2.5-7b": "A100-40GB-SXM", "llama-7b-shape": "A100-40GB-SXM"}
OLD = ("T4",)  # cards that do not multiply BF16: a fast decoder's cache is FP32 there
READING = 512  # tokens of the text that quality is read from
SLOTS = 2048  # of a fast decoder's cache, unless the model's own limit is lower
# While a matrix is rounded, FP32 intermediates lie beside it: so many times its FP32 bytes, at most.
ROUNDING = {"int8": 1.75, "int4": 2.75}

PAIRS: dict[str, tuple[ModelShape, ModelShape]] = {
    "smollm2-135m": (
        roofline.SHAPES["smollm2-135m"],
        ModelShape("its shipped draft", 1, 576, 1536, 9, 3, 64, 49152, tied=True),
    ),
    "smollm2-1.7b": (roofline.SHAPES["smollm2-1.7b"], roofline.SHAPES["smollm2-135m"]),
    "qwen2.5-7b": (
        roofline.SHAPES["qwen2.5-7b"],
        ModelShape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, tied=True, qkv_bias=True),
    ),
    "llama-7b-shape": tuple(
        ModelShape(
            name,
            layers=sizes["num_hidden_layers"],
            hidden=sizes["hidden_size"],
            ffn=sizes["intermediate_size"],
            heads=sizes["num_attention_heads"],
            kv_heads=sizes["num_attention_heads"],
            head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
            vocab=BORROWED_VOCABULARY,
        )
        for name, sizes in RANDOM.items()
    ),
}


# -- closed forms -----------------------------------------------------------------------------------------------------


def model_bytes(shape: ModelShape, dtype: str) -> int:
    """A transformers model's parameters."""
    return roofline.parameter_bytes(shape, dtype)


def packed_bytes(rows: int, columns: int, weights: str, copies: bool) -> int:
    """A matrix [rows, columns] of the fast decoder in its format, with a BF16 copy for prefill if `copies`."""
    if weights == "int8":
        columns_read = -(-columns // 32) * 32
        return rows * columns_read + 2 * rows + 2 * rows * columns * copies
    if weights == "int4":
        rows_read = -(-rows // 16) * 16
        return FORMATS["int4"].nbytes(rows_read, columns) + 2 * rows * columns * copies
    return FORMATS[weights].nbytes(rows, columns)


def decoder_bytes(
    shape: ModelShape,
    weights: str,
    *,
    source: str,
    head: str | None = None,
    copies: bool = True,
    bf16: bool = True,
    slots: int = SLOTS,
) -> int:
    """What a FastDecoder adds to the model in dtype `source` that it is made from: its matrices, tables and caches.

    In the model's own dtype, what is fused with nothing else is the model's tensor, and no copy: embedding, head, and
    the last matrices of attention and FFN.
    """
    compute = "float32" if weights == "float32" else "bfloat16"
    head = head or ("int8" if weights == "int4" else weights)
    total = 0 if compute == source else FORMATS[compute].nbytes(shape.vocab, shape.hidden)  # the embedding
    if head != source:
        total += packed_bytes(shape.vocab, shape.hidden, head, copies)
    q, k, v, out = shape.attention_matrices()
    gate, up, down = shape.ffn_matrices()
    fused = [(q[0] + k[0] + v[0], shape.hidden), (gate[0] + up[0], shape.hidden)] + [out, down] * (weights != source)
    layer = sum(packed_bytes(*matrix, weights, copies) for matrix in fused)
    layer += shape.layer_bias_values() * FORMATS[compute].bits // 8 + 2 * shape.hidden * 4
    cache = FORMATS["float32" if compute == "float32" or not bf16 else "bfloat16"].bits // 8
    total += shape.layers * (layer + 2 * shape.kv_heads * slots * shape.head_dim * cache)
    return total + 4 * shape.hidden + 2 * slots * shape.head_dim * cache  # last norm, cos and sin


def rounding_bytes(shape: ModelShape, weights: str, head: str | None = None) -> int:
    """The most that lies in the way while a fast decoder's matrices are rounded."""
    head = head or ("int8" if weights == "int4" else weights)
    widest = 4 * shape.hidden * max(2 * shape.ffn, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    return int(max(ROUNDING.get(weights, 0) * widest, ROUNDING.get(head, 0) * 4 * shape.vocab * shape.hidden))


# -- the fullest moment -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Book:
    """What lies on the card while a notebook runs, by name, and the fullest moment that there was.

    calls: how often the notebook loads a target, loads a draft, makes a fast decoder, copies a model.
    """

    profile: str
    card_gb: float
    bf16: bool
    held: dict[str, int] = field(default_factory=dict)
    fullest: dict[str, int] = field(default_factory=dict)
    cell: int = 0
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CALLS, 0))

    @property
    def shape(self) -> ModelShape:
        return PAIRS[self.profile][0]

    @property
    def half(self) -> str:
        """The 16-bit format that the card multiplies. A fast decoder's is BF16 in any case."""
        return "bfloat16" if self.bf16 else "float16"

    @property
    def own(self) -> str:
        """The profile's own dtype."""
        return "float32" if self.profile == "smollm2-135m" else self.half

    @property
    def nbytes(self) -> int:
        """At the fullest moment, with the reserve of each process."""
        return sum(self.fullest.values())

    def hold(self, cell: int, name: str, nbytes: int) -> None:
        """From this cell on."""
        self.held[name] = nbytes
        self.passing(cell, {})

    def free(self, *names: str) -> None:
        for name in names:
            del self.held[name]

    def passing(self, cell: int, more: dict[str, int]) -> None:
        """What lies there for a moment beside what is held."""
        now = {"what no tensor accounts for": RESERVE} | self.held | more
        if sum(now.values()) > sum(self.fullest.values()):
            self.fullest, self.cell = now, cell

    # -- what cells do ------------------------------------------------------------------------------------------

    def target(self, cell: int, name: str, dtype: str) -> None:
        self.calls["load_target"] += 1
        self.hold(cell, name, model_bytes(self.shape, dtype))

    def draft(self, cell: int, name: str, dtype: str) -> None:
        self.calls["load_draft"] += 1
        self.hold(cell, name, model_bytes(PAIRS[self.profile][1], dtype))

    def decoder(self, cell: int, name: str, weights: str, source: str = "float32", **options) -> None:
        self.calls["from_model"] += 1
        way = rounding_bytes(self.shape, weights, options.get("head"))
        self.held[name] = decoder_bytes(self.shape, weights, source=source, bf16=self.bf16, **options)
        self.passing(cell, {"rounding": way})

    def copied(self, cell: int, name: str, source: str, dtype: str) -> None:
        """copy.deepcopy(model).to(dtype): the copy is there whole in the old dtype before it is narrowed."""
        self.calls["deepcopy"] += 1
        self.passing(cell, {f"{name}, still as it was": model_bytes(self.shape, source)})
        self.hold(cell, name, model_bytes(self.shape, dtype))

    def cache(self, cell: int, name: str, tokens: int, dtype: str) -> None:
        self.hold(cell, name, roofline.cache_bytes(self.shape, tokens, cache=dtype))

    def scored(self, cell: int, texts: int = 1, tokens: int = READING) -> None:
        """Logits of a text in FP32, and their logarithms beside them."""
        self.passing(cell, {"logits": 4 * tokens * self.shape.vocab * (1 + texts)})

    def scores(self, cell: int, tokens: int, dtype: str = "float32") -> None:
        """Attention by the formula: products, their mask applied, weights."""
        each = self.shape.heads * tokens * tokens * FORMATS[dtype].bits // 8
        self.passing(cell, {"attention's scores": 3 * each})

    def rung(self, cell: int, dtype: str, weights: str | None = None) -> None:
        """A process of the ladder: its model, and the fast decoder and the draft if it has one."""
        more = {"the rung's process": RESERVE, "the rung's model": model_bytes(self.shape, dtype)}
        if weights is not None:
            more["the rung's decoder"] = decoder_bytes(self.shape, weights, source=dtype, bf16=self.bf16)
            more["the rung's draft"] = 2 * model_bytes(PAIRS[self.profile][1], dtype)
            more["rounding"] = rounding_bytes(self.shape, weights)
        else:
            more["its logits"] = 2 * 4 * READING * self.shape.vocab
        self.passing(cell, more)


# The ways by which a cell brings a model's weights to the card, as a test finds them in the notebooks.
CALLS = ("load_target", "load_draft", "from_model", "deepcopy")
ANSWER = PROMPT_TOKENS + NEW_TOKENS


def _00(book: Book) -> None:
    book.target(10, "the model, FP32", "float32")
    book.cache(10, "its cache", ANSWER, "float32")
    book.cache(12, "the caches of `generate` and of the course's loop", 2 * ANSWER, "float32")
    book.free("the model, FP32", "its cache", "the caches of `generate` and of the course's loop")
    book.passing(17, {"the bar's model": model_bytes(book.shape, "float32")})
    book.rung(22, "float32")


def _01(book: Book) -> None:
    book.passing(4, {"the bar's model": model_bytes(book.shape, "float32")})
    book.target(14, "the model, FP32", "float32")
    book.cache(16, "its cache", ANSWER, "float32")


def _02(book: Book) -> None:
    book.target(7, "the model, FP32", "float32")
    book.cache(11, "its cache", 2 * PROMPT_TOKENS + 256, "float32")
    book.cache(24, "caches of three lengths", 64 + 256 + 512 + 18, "float32")
    book.scores(24, 512)


def _03(book: Book) -> None:
    book.target(7, "the model, FP32", "float32")
    book.hold(16, "memory to sum, and to multiply with", 4 * 2**26)
    book.cache(16, "its cache", 512, "float32")
    book.scores(16, 512)


def _04(book: Book) -> None:
    book.target(7, "the model, FP32", "float32")
    book.cache(17, "a static cache, 512 slots", 512, "float32")
    book.cache(19, "the cache that grows", 520, "float32")
    book.scores(19, 512)
    book.cache(21, "two more that grow", 64 + 512 + 32, "float32")
    book.cache(31, "a static cache, 4096 slots", 4096, "float32")


def _05(book: Book) -> None:
    book.target(8, "the model, FP32", "float32")
    book.target(8, "the model in 16 bits", book.half)
    layers = 4 * sum(out * into for out, into in book.shape.layer_matrices()) * 4
    book.passing(8, {"the matrices of four layers, FP32": layers})
    book.cache(18, "a static cache, 512 slots", 512, book.half)
    book.scored(20)
    book.cache(22, "caches that grow", 3 * ANSWER, "float32")
    gates = book.shape.layers * book.shape.ffn * book.shape.hidden
    book.hold(25, "gate matrices in the other 16-bit format", 2 * gates)


def _06(book: Book) -> None:
    book.passing(4, {"the bar's model": model_bytes(book.shape, "float32")})
    book.target(19, "the model in 16 bits", book.half)
    group = book.shape.heads // book.shape.kv_heads
    book.passing(21, {"scores of a KV head's queries, 4096 tokens": 4 * 4 * group * 4096**2})
    book.hold(24, "buffers for scores, five lengths", 3 * 2 * group * 2 * 2048**2)
    book.cache(28, "its cache", 1024, book.half)
    book.scores(28, 1024)


def _07(book: Book) -> None:
    book.passing(4, {"the bar's model": model_bytes(book.shape, "float32")})
    book.target(10, "the model in 16 bits", book.half)
    book.cache(10, "the cache that is looked at", PROMPT_TOKENS, book.half)
    book.cache(19, "the caches of `generate`", 2 * ANSWER, book.half)
    book.scored(23, tokens=513)
    book.cache(25, "one layer's caches", 4 * 8000 // book.shape.layers, "float32")
    book.calls["from_model"] += 1  # cell 27: on a CPU alone


def _08(book: Book) -> None:
    own, shape = book.own, book.shape
    book.target(10, "the model", own)
    book.calls["from_model"] += 1  # cell 14: all formats in one call, the last first
    kinds = {"INT4, head INT8": "int4", "INT4": "int4", "INT8": "int8", "BF16": "bfloat16"}
    kinds |= {"FP32": "float32"} if own == "float32" else {}
    for name, weights in kinds.items():
        head = "int4" if name == "INT4" else None
        book.held[name] = decoder_bytes(shape, weights, source=own, head=head, copies=False, bf16=book.bf16)
        book.passing(14, {"rounding": rounding_bytes(shape, weights, head)})
    # What is left of the model in cell 18: the tensors that a decoder in the model's dtype shares with it.
    shared = [(shape.vocab, shape.hidden)] * (1 if shape.tied else 2)
    shared += [shape.attention_matrices()[3], shape.ffn_matrices()[2]] * shape.layers
    book.held["the model"] = sum(FORMATS[own].nbytes(*matrix) for matrix in shared) * (own != "float16")
    if own != "bfloat16":
        book.hold(18, "the model, narrowed in place", model_bytes(shape, "bfloat16"))
        book.free("the model, narrowed in place")
    book.scored(24)
    book.free("the model", *kinds)
    book.target(25, "the model again", own)
    book.passing(25, {"a matrix being rounded, FP32": 4 * shape.vocab * shape.hidden * 3})
    book.calls["from_model"] += 1  # cell 28: all formats in one call
    for weights in ("int4", "int8", "bfloat16", *["float32"] * (own == "float32")):
        book.held[weights] = decoder_bytes(shape, weights, source=own, copies=False, bf16=book.bf16)
        book.passing(28, {"rounding": rounding_bytes(shape, weights)})
    book.calls["from_model"] += 1  # cell 29: on a CPU alone


def _09(book: Book) -> None:
    own, shape = book.own, book.shape
    book.target(8, "the model", own)
    book.decoder(8, "the lean decoder", "int4", own, copies=False)
    book.target(8, "the model again, to be quantised", own)
    book.free("the model again, to be quantised")
    matrices = shape.layers * sum(packed_bytes(*m, "int4", False) for m in shape.layer_matrices())
    ends = FORMATS[own].nbytes(shape.vocab, shape.hidden) + packed_bytes(shape.vocab, shape.hidden, "int8", False)
    book.hold(8, "the model in INT4", matrices + ends)
    book.calls["from_model"] += 1  # cell 21: the kernel, on a CPU alone
    book.decoder(24, "the lean decoder, compiled", "int4", own, copies=False)
    book.decoder(24, "the lean decoder as a graph", "int4", own, copies=False)
    book.hold(24, "as many bytes as a step reads", book.held["the lean decoder"])
    book.calls["from_model"] += 3  # cells 26, 28, 30: a twin 64 wide; the kernel and its rival, on a CPU alone


def _10(book: Book) -> None:
    draft, shape = PAIRS[book.profile][1], book.shape
    book.passing(3, {"the bar's model": model_bytes(shape, "float32")})
    book.hold(13, "the model", model_bytes(shape, book.own))
    added = decoder_bytes(shape, "bfloat16", source=book.own, bf16=book.bf16)
    book.hold(13, "our target, BF16", added)
    book.hold(13, "the draft that decodes", 2 * model_bytes(draft, book.own))
    rows = 4096 + 2 * shape.hidden  # the head's rows, and the matrix that joins embedding and feature
    layer = sum(out * into for out, into in shape.layer_matrices()) + rows * shape.hidden
    book.hold(13, "an untrained layer as draft", FORMATS[book.own].bits // 8 * layer)
    book.calls["from_model"] += 2  # cells 16 and 31: on a CPU alone
    book.free("the model", "our target, BF16", "the draft that decodes", "an untrained layer as draft")
    book.rung(35, book.own, "int4")


def _11(book: Book) -> None:
    book.passing(3, {"the bar's model": model_bytes(book.shape, "float32")})
    book.target(11, "the model", book.half)
    book.calls["load_target"] += 1  # cell 11: either the kernel's model or this one
    book.calls["from_model"] += 3  # cells 11 and 14: on a CPU alone
    book.cache(17, "its cache", ANSWER, book.half)
    book.cache(17, "pages of three engines", 3 * 512 * 16, book.half)


def _12(book: Book) -> None:
    book.passing(4, {"the bar's model": model_bytes(book.shape, "float32")})
    book.target(14, "the model in 16 bits", book.half)
    book.cache(14, "the kept beginning", PROMPT_TOKENS, book.half)
    for name in ("the decoder that reads all", "the decoder that keeps a beginning"):
        book.decoder(15, name, "bfloat16", source=book.half)
    book.calls["from_model"] += 2  # the kernel's, on a CPU alone


def _13(book: Book) -> None:
    book.passing(4, {"the bar's model": model_bytes(book.shape, "float32")})
    book.target(14, "the model in 16 bits", book.half)
    book.copied(14, "a copy in 4 bits", book.half, book.half)
    book.scored(14, texts=2)
    book.free("a copy in 4 bits")
    book.hold(17, "a copy in 2 bits", model_bytes(book.shape, book.half))
    book.scored(17, texts=2)
    book.free("a copy in 2 bits")
    book.decoder(17, "the decoder that miscounts", "bfloat16", source=book.half)
    book.free("the decoder that miscounts")
    book.hold(19, "the copy in 4 bits again", model_bytes(book.shape, book.half))
    book.cache(19, "ten answers", 10 * 128, book.half)
    book.free("the model in 16 bits", "the copy in 4 bits again", "ten answers")
    book.rung(30, book.own, "int4")


def _14(book: Book) -> None:
    # The default model, whichever the profile: its formats are written and read on the CPU.
    small = model_bytes(PAIRS["smollm2-135m"][0], "float32")
    book.calls["load_target"] += 2
    book.hold(20, "transformers' server, a process", RESERVE + small)
    book.calls["load_target"] += 1
    book.hold(25, "the same model in this process", small)


NOTEBOOKS: dict[str, Callable[[Book], None]] = {
    "00": _00, "01": _01, "02": _02, "03": _03, "04": _04, "05": _05, "06": _06,
    "07": _07, "08": _08, "09": _09, "10": _10, "11": _11, "12": _12, "13": _13, "14": _14,
}  # fmt: skip


def count(notebook: str, profile: str, *, card_gb: float | None = None, bf16: bool | None = None) -> Book:
    """The book of a notebook ("08") on a profile. card_gb, bf16: of the card; None takes the card of `CARD_OF`.

    Raises KeyError for an unknown notebook or profile.
    """
    if notebook not in NOTEBOOKS:
        raise KeyError(f"no notebook {notebook!r}; expected one of {', '.join(NOTEBOOKS)}")
    if profile not in PAIRS:
        raise KeyError(f"no shape of profile {profile!r}; expected one of {', '.join(PAIRS)}")
    card = CARD_OF[profile]
    card_gb = hardware.DATASHEET[card].memory_gb if card_gb is None else card_gb
    book = Book(profile, card_gb, card not in OLD if bf16 is None else bf16)
    NOTEBOOKS[notebook](book)
    return book


def needs(profile: str) -> dict[str, int]:
    """Bytes of each notebook on this machine's GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    bf16 = hardware.bf16_is_native("cuda")
    return {number: count(number, profile, card_gb=total / 1e9, bf16=bf16).nbytes for number in NOTEBOOKS}


def check_card(notebook: str, profile: str | None = None) -> None:
    """Raise RuntimeError if this machine's GPU cannot hold a notebook on a profile, before anything is loaded.

    Without a GPU there is nothing to say. What this process holds itself counts as free: a notebook frees it before it
    fills the card. None: the profile that would be chosen here.
    """
    if not torch.cuda.is_available():
        return
    name = models.choose_profile(profile)[0].name
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved()
    book = count(notebook, name, card_gb=total / 1e9, bf16=hardware.bf16_is_native("cuda"))
    if book.nbytes <= free:
        return
    largest = sorted(book.fullest, key=book.fullest.get, reverse=True)[:3]
    named = "; ".join(f"{part} {book.fullest[part] / 1e9:.1f} GB" for part in largest)
    others = f", of which {(total - free) / 1e9:.1f} GB are in use" if total - free > RESERVE else ""
    fitting = [other for other in GOALS_GB if not other.endswith("-shape") and needs(other)[notebook] <= free]
    remedy = f"set LLM_LATENCY_PROFILE={fitting[-1]}" if fitting else "run it on a larger card, or on the CPU"
    raise RuntimeError(
        f"notebook {notebook} on profile {name} needs {book.nbytes / 1e9:.1f} GB on the GPU in cell {book.cell} "
        f"({named}); {torch.cuda.get_device_name()} has {total / 1e9:.1f} GB{others}: {remedy}"
    )


def table(profiles: Iterable[str] = GOALS_GB) -> str:
    """The counted table in Markdown: GB at the fullest moment, and the cell. Bold: more than the profile's goal."""
    names = list(profiles)
    head = [f"{name} ({GOALS_GB[name]} GB, {CARD_OF[name]})" for name in names]
    lines = ["| notebook | " + " | ".join(head) + " |", "|---|" + "---:|" * len(names)]
    for notebook in NOTEBOOKS:
        cells = []
        for name in names:
            book = count(notebook, name)
            said = f"{book.nbytes / 1e9:.1f}"
            cells.append(f"{f'**{said}**' if book.nbytes > GOALS_GB[name] * 1e9 else said} in [{book.cell}]")
        lines.append(f"| {notebook} | " + " | ".join(cells) + " |")
    fits = [sum(count(n, name).nbytes <= GOALS_GB[name] * 1e9 for n in NOTEBOOKS) for name in names]
    lines.append("| fit | " + " | ".join(f"{n} of {len(NOTEBOOKS)}" for n in fits) + " |")
    return "\n".join(lines)
