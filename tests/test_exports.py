"""Formats for shipping (every_millisecond.serving.exports): what is written, others read back as the same model."""

import gguf
import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config

from every_millisecond.serving import exports
from llm_latency.generation import TransformersStepper, generate

VOCABULARY = 96


def config(**changes):
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5)
    return LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": True, **changes})


def tiny(**changes):
    torch.manual_seed(5)
    model = LlamaForCausalLM(config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # initial weights answer every prompt alike
    return model


@pytest.fixture(scope="module")
def model():
    return tiny()


def make_source(path, *, architecture="llama", tokens=VOCABULARY, without=()):
    """A GGUF file without tensors: the tokenizer and the sizes of some other model."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("a name that is taken over")
    numbers = ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
    for name in [*numbers, "attention.head_count_kv", "rope.dimension_count", "vocab_size"]:
        if name not in without:
            writer.add_uint32(f"{architecture}.{name}", 7)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 0.5)
    writer.add_float32(f"{architecture}.rope.freq_base", 3.0)
    writer.add_file_type(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(tokens)])
    writer.add_token_merges(["t o"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source.gguf")


def greedy(model, count=16):
    ids = torch.tensor([[5, 17, 42, 8, 90, 3, 61]])
    return generate(TransformersStepper(model), ids, count).sequences[0, ids.shape[1] :].tolist()


def rounded(model, kind):
    """A copy whose matrices are what a GGUF file of this kind gives back."""
    copy = LlamaForCausalLM(model.config).eval()
    copy.load_state_dict(model.state_dict())
    form = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), form), form)))
    return copy


@pytest.mark.parametrize("kind", exports.KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_the_gguf_as_the_same_model(tmp_path, source, kind, tied):
    """Guards against rows of queries or keys left in place, a norm rounded, a head lost: tokens would differ."""
    model = tiny(tie_word_embeddings=tied)
    exports.write_gguf(model.state_dict(), model.config, source, tmp_path / "model.gguf", kind)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    like = rounded(model, kind)
    want, got = like.state_dict(), read.state_dict()
    assert want.keys() == got.keys()
    for name, weight in want.items():
        assert torch.equal(weight, got[name]), name
    assert greedy(read) == greedy(like)
    assert len(set(greedy(like))) > 3  # the prompt decides, so equal tokens mean something


def test_the_interleaving_is_what_transformers_undoes():
    """Guards against one that is its own inverse: two heads of six rows are enough to tell."""
    rows = np.arange(12).reshape(12, 1)
    assert exports.interleave(rows, 6).ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_sizes_are_the_models_and_the_rest_is_the_sources(tmp_path, model, source):
    """Guards against sizes copied from the file that only lends its tokenizer."""
    exports.write_gguf(model.state_dict(), model.config, source, tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert fields["llama.block_count"] == 2
    assert fields["llama.embedding_length"] == 64
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.rope.freq_base"] == pytest.approx(10000.0)
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    assert fields["general.name"] == "a name that is taken over"
    assert fields["tokenizer.ggml.tokens"][95] == "token95"


def test_bad_input_is_named(tmp_path, model, source):
    """Guards against a file that is written all the same, and answers nonsense or not at all wherever it is read."""
    weights, path = model.state_dict(), tmp_path / "model.gguf"
    lacking = {name: weight for name, weight in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    turned = {**weights, "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 96)}
    extra = {**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    for given, said in (
        (lacking, "1 tensors are missing, such as model.layers.1.mlp.up_proj"),
        (turned, r"up_proj.weight has shape \(64, 96\); by its config.json expected \(96, 64\)"),
        (extra, "1 tensors are unknown to this architecture, such as model.layers.0.self_attn.q_proj.bias"),
        ({}, "tensors are missing"),
    ):
        with pytest.raises(ValueError, match=said):
            exports.write_gguf(given, model.config, source, path)
    with pytest.raises(ValueError, match=r"kind='Q9'; expected F16 or Q8_0"):
        exports.write_gguf(weights, model.config, source, path, "Q9")
    with pytest.raises(ValueError, match="architecture 'qwen2'; expected 'llama'"):
        exports.write_gguf(weights, Qwen2Config(), source, path)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="positions are scaled by 'linear'"):
        exports.write_gguf(weights, config(rope_parameters=scaled), source, path)
    for other, said in (
        (dict(architecture="gpt2"), "source is of architecture 'gpt2'; expected 'llama'"),
        (dict(tokens=95), "source's tokenizer has 95 tokens, the model's vocabulary 96"),
        (dict(without=("block_count",)), "source lacks llama.block_count"),
    ):
        with pytest.raises(ValueError, match=said):
            exports.write_gguf(weights, model.config, make_source(tmp_path / "other.gguf", **other), path)
    assert not path.exists()


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path, source):
    """Guards against a last block of fewer than 32 weights, which no reader could find."""
    model = tiny(hidden_size=48)
    with pytest.raises(ValueError, match="rows of 48 weights; Q8_0 needs a multiple of 32"):
        exports.write_gguf(model.state_dict(), model.config, source, tmp_path / "model.gguf", "Q8_0")


@pytest.fixture(scope="module")
def graphs(model, tmp_path_factory):
    program = exports.export_program(model)
    path = exports.write_onnx(program, model.config, tmp_path_factory.mktemp("onnx") / "model.onnx")
    return program.module(), onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def feed(names, ids, past):
    return {"input_ids": ids.numpy(), **dict(zip(names, (tensor.numpy() for tensor in past), strict=True))}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("stored", [0, 1, 7])
@pytest.mark.parametrize("new", [1, 7, 33])
def test_graphs_give_the_models_logits_and_cache(model, graphs, new, stored, batch):
    """Guards against a length, a position or a mask that the export took for a constant of its example."""
    exported, session = graphs
    generator = torch.Generator().manual_seed(100 * new + 10 * stored + batch)
    ids = torch.randint(0, VOCABULARY, (batch, new), generator=generator)
    empty = exports.empty_past(model.config, stored, batch)
    past = [torch.randn(tensor.shape, generator=generator) for tensor in empty]
    with torch.no_grad():
        want, cache = exports.CacheAsTensors(model)(ids, past)
        got, kept = exported(ids, past)
    logits, *present = session.run(None, feed(exports.past_names(model.config), ids, past))
    assert torch.allclose(got, want, atol=1e-5)
    assert np.abs(logits - want.numpy()).max() < 1e-4
    for tensors in (kept, [torch.from_numpy(array) for array in present]):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(tensors, cache, strict=True))


def test_onnx_decodes_the_models_tokens(model, graphs):
    """Guards against a cache that comes out in another order than it goes in: wrong only from the second token on."""
    _, session = graphs
    ids, past = torch.tensor([[5, 17, 42, 8, 90, 3, 61]]), exports.empty_past(model.config)
    tokens = []
    for _ in range(16):
        logits, *present = session.run(None, feed(exports.past_names(model.config), ids, past))
        ids, past = torch.from_numpy(logits[:, -1:].argmax(-1)), [torch.from_numpy(array) for array in present]
        tokens.append(int(ids))
    assert tokens == greedy(model)


def test_inputs_and_outputs_have_the_names_that_other_tools_expect(model, graphs):
    """Guards against names that change with torch's release."""
    _, session = graphs
    assert [value.name for value in session.get_inputs()][:3] == [
        "input_ids",
        "past_key_values.0.key",
        "past_key_values.0.value",
    ]
    assert [value.name for value in session.get_outputs()][-1] == "present.1.value"


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Exports that take no time, and a cache folder of the test's own; counts them."""
    calls = []

    def write(program, config, path):
        calls.append(path)
        path.write_text("a graph")
        return path

    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(exports, "export_program", lambda model: None)
    monkeypatch.setattr(exports, "write_onnx", write)
    return calls


def test_an_export_is_kept_for_the_same_weights_alone(quick, model, tmp_path):
    """Guards against another model's graph under this one's name, and against an old one called new."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one model")
    first, again = exports.kept_onnx(model, weights), exports.kept_onnx(model, weights)
    assert (first.fresh, again.fresh) == (True, False)
    assert first.path == again.path and first.path.read_text() == "a graph"
    assert first.seconds == again.seconds
    weights.write_bytes(b"another model")
    other = exports.kept_onnx(model, weights)
    assert other.fresh and other.path != first.path
    assert len(quick) == 2


def test_an_export_that_fails_leaves_nothing(quick, model, tmp_path, monkeypatch):
    """Guards against half a file that the next run takes for a whole one."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one model")

    def fail(program, config, path):
        path.write_text("half a graph")
        raise RuntimeError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(exports, "write_onnx", fail)
        with pytest.raises(RuntimeError, match="no space left"):
            exports.kept_onnx(model, weights)
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    assert exports.kept_onnx(model, weights).path.read_text() == "a graph"
