"""A transformers model in other formats: a GGUF file, an exported program, and the ONNX graph made from that.

The exporters are the formats' own (gguf, torch.export, torch.onnx); what stands here is what they leave to the caller:
which rows move, which metadata a reader needs, how a KV cache becomes inputs and outputs of a graph.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from llm_latency import files
from llm_latency.compat import with_cache

KINDS = {"F16": gguf.LlamaFileType.MOSTLY_F16, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


# -- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(
    weights: Mapping[str, Tensor],
    config: PretrainedConfig,
    source: Path | gguf.GGUFReader,
    path: Path,
    kind: str = "F16",
) -> Path:
    """Write a Llama model as a GGUF file, which holds weights, sizes, tokenizer and chat template; returns `path`.

    weights: under transformers' names. config: the model's, for its sizes. source: a GGUF file of the same family, or
    its reader; its tokenizer and descriptions are taken over. kind: "F16" or "Q8_0" (8-bit blocks of 32 with one FP16
    scale), for matrices; vectors stay FP32, as llama.cpp's own converter leaves them.

    Raises ValueError for an unknown kind or architecture, scaled positions, a tensor that is missing, unknown or of
    another shape, and a vocabulary that is not the source's.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; expected {' or '.join(KINDS)}")
    if config.model_type != "llama":
        raise ValueError(f"architecture {config.model_type!r}; expected 'llama': others have other names and rows")
    if (scaled := config.rope_parameters.get("rope_type", "default")) != "default":
        raise ValueError(f"positions are scaled by {scaled!r}; expected 'default': that would need tensors of its own")
    weights = _checked(weights, config)
    reader = source if isinstance(source, gguf.GGUFReader) else gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, reader, config, kind)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in weights.items():
        array = weight.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave(array, config.head_dim)
        form = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        if array.shape[-1] % (block := gguf.GGML_QUANT_SIZES[form][0]):
            raise ValueError(f"{name} has rows of {array.shape[-1]} weights; {kind} needs a multiple of {block}")
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(array, form), raw_dtype=form)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return path


@dataclass(frozen=True, slots=True)
class Said:
    """What llama.cpp answered: token ids, ms until its file was loaded, ms a token by its own clock (without HTTP)."""

    tokens: list[int]
    load_ms: float
    step_ms: float


def ask_llama_cpp(path: Path, ids: list[int], count: int, threads: int) -> Said:
    """Greedy tokens after `ids` from llama.cpp, whose own server runs in this process for as long as this call.

    Raises RuntimeError if it cannot read the file.
    """
    import xllamacpp

    settings, begin = xllamacpp.CommonParams(), time.perf_counter()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.verbosity = str(path), 512, 1, -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    load_ms = 1e3 * (time.perf_counter() - begin)
    body = {"prompt": ids, "n_predict": count, "temperature": 0, "ignore_eos": True}
    body = json.dumps(body | {"return_tokens": True, "cache_prompt": False}).encode()
    for _ in range(2):  # the first warms up
        with urllib.request.urlopen(f"{server.listening_address}/completion", body, timeout=120) as answer:
            said = json.load(answer)
    return Said(said["tokens"], load_ms, said["timings"]["predicted_per_token_ms"])


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a query or key projection [heads * head_dim, hidden] in GGUF's order for Llama.

    transformers rotates row i of a head together with row i + head_dim / 2, llama.cpp rotates neighbours: so the halves
    are interleaved. Attention's scores are the same, for queries and keys move alike.
    """
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _checked(weights: Mapping[str, Tensor], config: PretrainedConfig) -> dict[str, Tensor]:
    """The weights that a GGUF file of this model holds, in their order. ValueError for any that does not fit."""
    expected = _shapes(config)
    if config.tie_word_embeddings:  # the head is the embedding: readers take that where there is none
        weights = {name: weight for name, weight in weights.items() if name != HEAD}
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}; expected {len(expected)}")
    if unknown:
        raise ValueError(f"{len(unknown)} tensors are unknown to this architecture, such as {unknown[0]}")
    for name, weight in weights.items():
        if tuple(weight.shape) != expected[name]:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}; by its config.json expected {expected[name]}")
    return dict(weights)


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama model without biases, by transformers' name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    layer = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes if config.tie_word_embeddings else shapes | {HEAD: (config.vocab_size, hidden)}


def _describe(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, config: PretrainedConfig, kind: str) -> None:
    """The source's metadata in its order, with the sizes of this model. ValueError if they cannot belong together."""
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise ValueError(f"the source is of architecture {architecture!r}; expected 'llama', as the weights are")
    tokens = reader.fields["tokenizer.ggml.tokens"].data
    if len(tokens) != config.vocab_size:
        raise ValueError(f"the source's tokenizer has {len(tokens)} tokens, the model's vocabulary {config.vocab_size}")
    own = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "general.file_type": int(KINDS[kind]),
    }
    lacking = sorted(own.keys() - reader.fields.keys())
    if lacking:
        raise ValueError(f"the source lacks {', '.join(lacking)}; expected a whole model's metadata")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":  # the writer's own
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, own.get(name, field.contents()), field.types[0], sub_type=inner)


# -- graphs -----------------------------------------------------------------------------------------------------------


class CacheAsTensors(torch.nn.Module):
    """A transformers model whose KV cache is plain tensors that go in and come out, as a graph needs it."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """input_ids int64 [batch, n]; past: two a layer, key and value [batch, kv_heads, stored, head_dim].

        Returns the last position's logits [batch, 1, vocab] and the cache [batch, kv_heads, stored + n, head_dim].
        """
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        output = self.model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **with_cache(cache))
        return output.logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def empty_past(config: PretrainedConfig, stored: int = 0, batch: int = 1) -> list[Tensor]:
    """A cache of `stored` zeros, as `CacheAsTensors` takes it; with 0, the one that a prompt begins with."""
    shape = (batch, config.num_key_value_heads, stored, config.head_dim)
    return [torch.zeros(shape) for _ in range(2 * config.num_hidden_layers)]


def past_names(config: PretrainedConfig, before: str = "past_key_values") -> list[str]:
    """The names that ONNX models of decoders give the cache: past_key_values.0.key, past_key_values.0.value, ..."""
    return [f"{before}.{i}.{what}" for i in range(config.num_hidden_layers) for what in ("key", "value")]


def export_program(model: PreTrainedModel) -> torch.export.ExportedProgram:
    """The model's graph as torch.export records it, for any batch, any number of new tokens and any stored ones."""
    batch, new, stored = (torch.export.Dim(name, min=least, max=2**20) for name, least in
                          (("batch", 1), ("new", 1), ("stored", 0)))  # fmt: skip
    example = (torch.zeros(2, 3, dtype=torch.int64), empty_past(model.config, stored=5, batch=2))
    free = ({0: batch, 1: new}, [{0: batch, 2: stored}] * len(example[1]))
    with torch.no_grad():
        return torch.export.export(CacheAsTensors(model), example, dynamic_shapes=free)


def write_onnx(program: torch.export.ExportedProgram, config: PretrainedConfig, path: Path) -> Path:
    """Translate an exported program into ONNX and save it, weights in a file beside it; returns `path`."""
    names = dict(
        input_names=["input_ids", *past_names(config)], output_names=["logits", *past_names(config, "present")]
    )
    # It warns of a package for images that is not there, and torch warns of itself.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        translated = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False, **names)
    translated.save(path, external_data=True)
    return path


@dataclass(frozen=True, slots=True)
class KeptExport:
    """An ONNX file, how many seconds its export took, and whether that was now or in an earlier run."""

    path: Path
    seconds: float
    fresh: bool


def kept_onnx(model: PreTrainedModel, weights: Path) -> KeptExport:
    """The ONNX file of a model, exported at the first call and then kept in the course's cache folder.

    weights: the file that the model was loaded from. Its hash and the exporters' releases name what is kept, so
    that another model or another release never gets this one's graph.
    """
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    for package in ("torch", "transformers", "onnx", "onnxscript"):
        digest.update(f"{package} {version(package)}\n".encode())
    final = files.cache_folder() / f"onnx-{digest.hexdigest()[:24]}"
    path, note = final / "model.onnx", final / "export.json"
    with files.locked(final):
        if fresh := not note.exists():
            shutil.rmtree(final, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
            try:
                begin = time.perf_counter()
                write_onnx(export_program(model), model.config, work / path.name)
                (work / note.name).write_text(json.dumps({"seconds": time.perf_counter() - begin}))
                work.chmod(0o755)
                work.rename(final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return KeptExport(path, json.loads(note.read_text())["seconds"], fresh)
