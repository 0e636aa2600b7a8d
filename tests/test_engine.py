"""The fast decoder against the transformers model whose weights it took."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from every_millisecond import doctor, openmp
from every_millisecond.request import quoting_prompt, shared_prefix, standard_prompt
from llm_latency.engine import DecoderOptions, FastDecoder
from llm_latency.engine.attention import attend_grouped, causal_mask
from llm_latency.engine.prefix import PrefixDecoder
from llm_latency.engine.weights import compute_dtype, make_matrix
from llm_latency.generation import TransformersStepper, generate
from llm_latency.quantization import quantize_
from llm_latency.text.prompt import encode_prompt

FORMATS = ["bfloat16", "int8", "int4"]


@pytest.fixture
def ids():
    return torch.randint(3, 97, (1, 37), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def tiny_mha():
    """A random Llama without grouped queries, head_dim unlike hidden / heads, biases everywhere, scaled RoPE."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=12,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    return model


@pytest.fixture
def wide_llama():
    """A random Llama whose widths suit blocks of 32."""
    torch.manual_seed(4)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=512)).eval()


def _quantised_twin(model, weights: str):
    """The FP32 transformers model whose matrices hold the values that the decoder's codes stand for."""
    with torch.no_grad():
        if weights == "bfloat16":
            return model.to(torch.bfloat16).float()
        quantize_(model, weights, skip=["lm_head"])
    return model


# -- the same function --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2", "tiny_mha"])
def test_fp32_equals_the_model(name, ids, request):
    """Guards against any difference: GQA or not, biases, scaled RoPE, tied or own head, prefill and 200 steps."""
    model = request.getfixturevalue(name)
    decoder = FastDecoder.from_model(model)
    expected = generate(TransformersStepper(model), ids, 200).sequences
    assert torch.equal(generate(decoder, ids, 200).sequences, expected)
    with torch.inference_mode():
        logits = model(expected).logits
    assert (decoder.score(expected) - logits).abs().max() < 1e-4
    assert (decoder.prefill(expected) - logits[:, -1]).abs().max() < 1e-4


@pytest.mark.model
def test_fp32_equals_the_bundled_model(target, tokenizer):
    """Guards against a fault that only a real model's large activations show."""
    ids = torch.tensor([tokenizer("Two numbers add up to the target:", add_special_tokens=False)["input_ids"]])
    decoder = FastDecoder.from_model(target)
    ours = generate(decoder, ids, 80).sequences
    with torch.inference_mode():
        logits = target(ours).logits  # one pass, a tenth of the time of generating: the model would choose the same ids
    new = ours[0, ids.shape[1] :]
    assert len(new) == 80 and torch.equal(logits[0, ids.shape[1] - 1 : -1].argmax(-1), new)
    with torch.inference_mode():
        assert (decoder.score(ours[:, :64]) - target(ours[:, :64]).logits).abs().max() < 1e-4


@pytest.mark.parametrize("weights", FORMATS)
def test_other_formats_follow_the_same_precision_rule(wide_llama, ids, weights):
    """Guards against lost accuracy beyond the format's own: our error is at most twice that of the transformers model
    that computes in BF16 with the same rounded weights."""
    decoder = FastDecoder.from_model(wide_llama, weights, head="bfloat16")
    twin = _quantised_twin(wide_llama, weights)
    with torch.inference_mode():
        exact = twin(ids).logits
        peer = twin.to(torch.bfloat16)(ids).logits.float()
        score = decoder.score(ids)
    error, allowed = (score - exact).norm(), (peer - exact).norm()
    assert error <= 2 * allowed + 0.01 * exact.norm()


def test_many_tokens_take_the_bfloat16_copy(tiny_llama, ids):
    """Guards against a prefill that silently uses other weights than decoding does."""
    with_copy = FastDecoder.from_model(tiny_llama, "int8")
    without = FastDecoder.from_model(tiny_llama, "int8", keep_bfloat16=False)
    assert with_copy.copy_bytes > 0 and without.copy_bytes == 0
    assert with_copy.step_bytes == without.step_bytes
    a, b = with_copy.prefill(ids), without.prefill(ids)
    assert (a - b).norm() / b.norm() < 0.03


# -- steps, rollback, limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 5, 36])
def test_a_step_of_many_tokens_equals_single_steps(tiny_llama, ids, cut):
    """Guards against a verification step that sees the future, or counts its positions from 0."""
    decoder = FastDecoder.from_model(tiny_llama)
    with torch.inference_mode():
        expected = tiny_llama(ids).logits
    decoder.prefill(ids[:, : 37 - cut])
    together = decoder.step(ids[:, 37 - cut :])
    assert together.shape == (1, cut, 97)
    assert (together - expected[:, 37 - cut :]).abs().max() < 1e-4
    decoder.crop_to(37 - cut)
    singly = torch.cat([decoder.step(token) for token in ids[:, 37 - cut :].split(1, dim=1)], dim=1)
    assert (singly - expected[:, 37 - cut :]).abs().max() < 1e-4


def test_rollback_forgets(tiny_llama, ids):
    """Guards against rejected tokens that stay visible: after a rollback all is as if they had never been there."""
    decoder = FastDecoder.from_model(tiny_llama)
    decoder.prefill(ids[:, :20])
    decoder.step(ids[:, 1:6])
    decoder.crop_to(20)
    assert decoder.length == 20
    after = decoder.step(ids[:, 20:21])
    decoder.prefill(ids[:, :20])
    assert torch.equal(after, decoder.step(ids[:, 20:21]))
    assert decoder.length == 21
    decoder.prefill(ids[:, :3])  # a new request forgets the old one
    assert decoder.length == 3
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=f"crop_to={bad}; expected 0 to 3"):
            decoder.crop_to(bad)
    with pytest.raises(TypeError, match=r"crop_to=1\.5; expected an int"):
        decoder.crop_to(1.5)


def test_int8_cache(tiny_llama, ids):
    """Guards against scales of other tokens, codes left behind a rollback, and bytes that are not saved."""
    exact, small = FastDecoder.from_model(tiny_llama), FastDecoder.from_model(tiny_llama, cache="int8")
    assert small.cache_bytes == 3 * 2 * 2 * 512 * (8 + 2)  # layers, k and v, heads, slots, codes and a BF16 scale
    expected, got = exact.score(ids), small.score(ids)
    assert 0 < (got - expected).norm() / expected.norm() < 0.02
    small.prefill(ids[:, :20])
    small.step(ids[:, :5])
    small.crop_to(20)
    together = small.step(ids[:, 20:24])
    assert (together - expected[:, 20:24]).norm() / together.norm() < 0.02


def test_the_cache_is_full(tiny_llama, ids):
    """Guards against writes past the end, and a length that counts a refused step."""
    decoder = FastDecoder.from_model(tiny_llama, max_length=10)
    decoder.prefill(ids[:, :9])
    decoder.step(ids[:, :1])
    with pytest.raises(ValueError, match="11 tokens do not fit"):
        decoder.step(ids[:, :1])
    assert decoder.length == 10
    with pytest.raises(ValueError, match="do not fit"):
        decoder.prefill(ids)


def test_bad_calls(tiny_llama, ids):
    """Guards against calls out of order and shapes that would broadcast into nonsense."""
    decoder = PrefixDecoder.from_model(tiny_llama)
    with pytest.raises(RuntimeError, match="before prefill"):
        decoder.step(ids[:, :1])
    for bad in (ids[0], ids.repeat(2, 1), ids[:, :0]):
        for call in (decoder.prefill, decoder.keep_prefix):
            with pytest.raises(ValueError, match="shape"):
                call(bad)


@pytest.mark.parametrize("call", ["prefill", "score", "keep_prefix"])
def test_ids_that_are_no_ids(tiny_llama, ids, call):
    """Guards against -100, the mark of a masked label, read as the 100th token from the end; masks taken for ids."""
    decoder = PrefixDecoder.from_model(tiny_llama)
    for bad in (-1, -100, decoder.vocab_size):
        wrong = ids.clone()
        wrong[0, 1] = bad
        with pytest.raises(IndexError):
            getattr(decoder, call)(wrong)
    for dtype in (torch.bool, torch.uint8, torch.float32):
        with pytest.raises(TypeError, match=r"token ids are torch\."):
            getattr(decoder, call)(ids.to(dtype))


def test_what_is_handed_out_is_not_what_is_kept(tiny_llama, ids):
    """Guards against a caller's change to `features` that spoils the kept prefix's."""
    decoder = PrefixDecoder.from_model(tiny_llama)
    decoder.prefill(ids)
    expected = decoder.features.clone()
    with torch.inference_mode():
        decoder.keep_prefix(ids[:, :4])
        decoder.features.zero_()
        decoder.prefill(ids)
    torch.testing.assert_close(decoder.features, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int3"}, "int3"),
        ({"weights": "int8", "head": "float64"}, "float64"),
        ({"weights": "float32", "head": "int8"}, "compute in"),
        ({"max_length": 0}, "max_length"),
        ({"cache": "int4"}, "cache"),
        ({"max_length": 513}, "513"),
        ({"cuda_graphs": True}, "CUDA"),
        ({"weights": "int4"}, "divide"),  # a width of 48 in blocks of 32
    ],
)
def test_bad_options(tiny_llama, options, message):
    """Guards against options that are ignored in silence."""
    with pytest.raises(ValueError, match=message):
        FastDecoder.from_model(tiny_llama, **options)
    with pytest.raises(TypeError):
        FastDecoder.from_model(tiny_llama, wieghts="int8")


def test_models_it_would_compute_wrongly_are_refused(tiny_llama):
    """Guards against an architecture taken for a Llama by the names of its layers."""
    with pytest.raises(ValueError, match="gpt2"):
        FastDecoder.from_model(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)))
    mistral = MistralConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    assert mistral.sliding_window
    with pytest.raises(ValueError, match="sliding"):
        FastDecoder.from_model(MistralForCausalLM(mistral))
    scaled = copy.deepcopy(tiny_llama)
    for kind in ("dynamic", "longrope"):
        scaled.config.rope_parameters = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
        with pytest.raises(ValueError, match=f"RoPE is '{kind}'"):
            FastDecoder.from_model(scaled)
    tiny_llama.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="gelu"):
        FastDecoder.from_model(tiny_llama)
    tiny_llama.config.hidden_act = "silu"
    quantize_(tiny_llama, "int8", skip=["lm_head"])
    with pytest.raises(ValueError, match="quantised already"):
        FastDecoder.from_model(tiny_llama)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_features_are_the_models_own(tiny_llama, ids, weights):
    """Guards against features of another place (before the norm) or another time: a draft conditioned on them would
    guess worse, and no exact output would show it."""
    decoder = FastDecoder.from_model(tiny_llama, weights)
    with torch.inference_mode():
        expected = tiny_llama.model(ids).last_hidden_state[0]  # [37, hidden], behind the final norm
    decoder.prefill(ids[:, :30])
    first = decoder.features
    assert first.shape == expected[:30].shape
    decoder.step(ids[:, 30:])
    error = (torch.cat((first, decoder.features)).float() - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if weights == "float32" else 0.05)


def test_a_head_of_few_rows(tiny_llama, ids):
    """Guards against logits that stand at other ids than `head_ids` says."""
    chosen = torch.tensor([90, 2, 41])
    small, whole = FastDecoder.from_model(tiny_llama, head_ids=chosen), FastDecoder.from_model(tiny_llama)
    assert (small.score(ids) - whole.score(ids)[..., chosen]).abs().max() < 1e-5
    assert whole.step_bytes - small.step_bytes == 4 * 48 * (97 - 3)
    for bad in (
        torch.tensor([1, 97]),
        torch.tensor([-1]),
        torch.tensor([5, 5]),
        torch.tensor([1.0]),
        torch.empty(0).long(),
    ):
        with pytest.raises(ValueError, match="head_ids"):
            FastDecoder.from_model(tiny_llama, head_ids=bad)


@pytest.mark.parametrize("native", [True, False])
def test_the_cache_is_fp32_where_bfloat16_is_slow(tiny_llama, ids, native, monkeypatch):
    """Guards against BF16 attention on a CPU without BF16 instructions: eight times slower, and the same result."""
    monkeypatch.setattr("llm_latency.engine.fast_decoder.bf16_is_native", lambda device: native)
    decoder = FastDecoder.from_model(tiny_llama, "bfloat16")
    assert decoder.caches[0].both.dtype == (torch.bfloat16 if native else torch.float32)
    expected = FastDecoder.from_model(tiny_llama).score(ids)
    assert (decoder.score(ids) - expected).norm() / expected.norm() < 0.02


# -- the pieces ---------------------------------------------------------------------------------------------------


def test_int4_keeps_its_head_in_int8(wide_llama):
    """Guards against bytes that do not say what is stored: the head's default beside INT4 is INT8."""
    default = FastDecoder.from_model(wide_llama, "int4")
    all_int4 = FastDecoder.from_model(wide_llama, "int4", head="int4")
    assert default.head.nbytes == 97 * 64 + 2 * 97
    assert all_int4.head.nbytes == 112 * 64 // 2 + 112 * 2 * 2 * 2  # 97 rows are padded to the kernel's 112
    assert default.step_bytes - all_int4.step_bytes == default.head.nbytes - all_int4.head.nbytes


def test_step_bytes(tiny_llama):
    """Guards against a count that forgets a matrix: in FP32 it is every parameter but the unread embedding rows."""
    decoder = FastDecoder.from_model(tiny_llama)
    parameters = sum(p.numel() for p in tiny_llama.parameters())  # the tied head counts once, as the matrix it is
    assert decoder.step_bytes == 4 * (parameters + 48)
    assert decoder.cache_bytes == 3 * 2 * 2 * 512 * 8 * 4


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
def test_grouped_attention_off_the_cpu_path(heads, monkeypatch):
    """Guards against groups that are tiled instead of interleaved where the queries of a group become rows."""
    q, k, v = (torch.randn(1, n, t, 8) for n, t in ((heads[0], 3), (heads[1], 9), (heads[1], 9)))
    mask = causal_mask(torch.tensor([6, 7, 8]), 9)
    on_cpu = attend_grouped(q, k, v, mask)

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")

    elsewhere = attend_grouped(q.as_subclass(Elsewhere), k, v, mask)
    assert torch.allclose(torch.Tensor(elsewhere), on_cpu, atol=1e-6)


def test_matrices_know_their_kernel():
    """Guards against a report that names a kernel which is not used."""
    weight = torch.randn(32, 64)
    for name in ("float32", "bfloat16", "int8", "int4"):
        matrix = make_matrix(weight, None, name)
        x = torch.randn(2, 64).to(compute_dtype(name))
        assert (matrix.product(x).float() - x.float() @ weight.t()).abs().max() < (3.0 if name == "int4" else 0.3)
        assert matrix.kernel


@pytest.mark.long
@pytest.mark.skipif(doctor.compile_unavailable() is not None, reason=f"compile: {doctor.compile_unavailable()}")
@pytest.mark.skipif(sys.platform != "linux", reason="compiling on the CPU is tested on Linux only")
def test_compiled_in_a_process_with_one_openmp_runtime(tmp_path):
    """Guards against two OpenMP runtimes in one process, which make a compiled step several times slower than an eager
    one, and against a compiled step that computes something else or is compiled anew for every position."""
    script = tmp_path / "compiled.py"
    script.write_text(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from every_millisecond import openmp\n"
        "from llm_latency.engine import FastDecoder\n"
        "config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1,\n"
        "    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)\n"
        "model = LlamaForCausalLM(config).eval()\n"
        "ids = torch.arange(3, 40)[None]\n"
        "compiled, eager = (FastDecoder.from_model(model, 'int8', compile=c) for c in (True, False))\n"
        "for decoder in (compiled, eager): decoder.prefill(ids)\n"
        "errors = []\n"
        "for position in range(6):\n"
        "    token = ids[:, position : position + 1]\n"
        "    errors.append((compiled.step(token) - eager.step(token)).abs().max().item())\n"
        "    compiles = torch._dynamo.utils.counters['stats'].get('unique_graphs', 0)\n"
        "    first = compiles if position == 0 else first\n"
        "assert max(errors) < 0.05, errors\n"
        "assert compiles == first, (first, compiles)\n"
        "runtimes = openmp.loaded_runtimes()\n"
        "assert len(runtimes) == 1, runtimes\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], env=openmp.process_environment(), capture_output=True, text=True, timeout=600
    )
    if "InvalidCxxCompiler" in done.stderr:
        pytest.skip("torch.compile found no C++ compiler here")
    assert done.returncode == 0, done.stderr[-3000:]


def test_process_environment(monkeypatch):
    """Guards against losing what was preloaded before, and against a list that grows with every nested process."""
    library = openmp.torch_libgomp()
    if library is None:
        pytest.skip("this torch brings no libgomp of its own, so there is nothing to preload")
    assert library.is_file()
    library = openmp.preloadable()  # the same by a name without blanks
    monkeypatch.setenv("LD_PRELOAD", "")
    assert openmp.process_environment()["LD_PRELOAD"] == str(library)
    once = openmp.process_environment({"LD_PRELOAD": "other.so", "X": "1"})
    assert once == {"LD_PRELOAD": f"{library} other.so", "X": "1"} | openmp.WAITING
    assert openmp.process_environment(once) == once


def test_process_environment_without_libgomp(monkeypatch):
    """Guards against a preload of nothing on systems where torch brings no libgomp."""
    monkeypatch.setattr(openmp.platform, "system", lambda: "Darwin")
    assert openmp.process_environment({"X": "1"}) == {"X": "1"} | openmp.WAITING


def test_import_is_light():
    """Guards against openmp.py loading torch: the parent that only starts workers need not pay for it."""
    code = "import sys, every_millisecond.openmp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_are_frozen():
    """Guards against options changed after the weights were laid out by them."""
    with pytest.raises(AttributeError):
        DecoderOptions().weights = "int8"


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_kept_prefix_changes_nothing(tiny_llama, ids, weights):
    """Guards against a prefix cache that lies: other prompts, the prefix as prompt, features, overwritten slots."""
    plain, kept = FastDecoder.from_model(tiny_llama, weights), PrefixDecoder.from_model(tiny_llama, weights)
    kept.keep_prefix(ids[:, :20])
    other = ids.flip(1)
    for prompt in (ids, ids[:, :21], ids[:, :20], ids[:, :5], other, ids):
        expected, got = plain.prefill(prompt), kept.prefill(prompt)
        assert kept.length == prompt.shape[1]
        assert (got - expected).abs().max() < (1e-5 if weights == "float32" else 0.1)
        assert kept.features.shape == plain.features.shape
        assert (kept.features - plain.features).abs().max() < (1e-5 if weights == "float32" else 0.1)
        assert (kept.step(ids[:, :1]) - plain.step(ids[:, :1])).abs().max() < (1e-5 if weights == "float32" else 0.1)
    kept.prefill(ids)
    kept.crop_to(5)
    kept.step(other[:, :3])  # into the middle of the prefix
    assert (kept.prefill(ids) - plain.prefill(ids)).abs().max() < (1e-5 if weights == "float32" else 0.1)
    kept.score(other)
    assert (kept.prefill(ids) - plain.prefill(ids)).abs().max() < (1e-5 if weights == "float32" else 0.1)


def test_a_kept_prefix_is_not_read_again(tiny_llama, ids, monkeypatch):
    """Guards against a cache that is right because it is never used."""
    decoder = PrefixDecoder.from_model(tiny_llama)
    decoder.keep_prefix(ids[:, :20])
    read, advance = [], decoder._advance
    monkeypatch.setattr(decoder, "_advance", lambda piece, **kw: read.append(piece.shape[1]) or advance(piece, **kw))
    decoder.prefill(ids)
    decoder.prefill(ids.flip(1))
    decoder.prefill(ids)
    assert read == [17, 37, 20, 17]


@pytest.mark.model
def test_the_shared_prefix_of_the_standard_request(tokenizer):
    """Guards against a prefix that holds part of the learner's own solution, or ids that no request begins with."""
    whole = encode_prompt(tokenizer, standard_prompt(tokenizer))
    prefix = shared_prefix(tokenizer)
    assert whole[: len(prefix)] == prefix and 128 < len(prefix) < len(whole)
    text = tokenizer.decode(prefix)
    assert "add up to" in text and "def " not in text and "Solution" not in text
    quoting = encode_prompt(tokenizer, quoting_prompt(tokenizer))  # another question, another cut of the notes
    assert quoting[:100] == prefix[:100]


# -- INT8 activations ---------------------------------------------------------------------------------------------


@pytest.fixture
def outlier_llama(tiny_llama):
    """A tiny model with one FFN channel that towers over the rest, as real ones have."""
    with torch.no_grad():
        for layer in tiny_llama.model.layers:
            layer.mlp.up_proj.weight[7] *= 60
            layer.mlp.down_proj.weight[:, 7] /= 60
    return tiny_llama


def test_smoothing_saves_what_an_outlier_costs(outlier_llama, ids):
    """Guards against a factor that is divided out and not multiplied in, or that does not help."""
    exact = FastDecoder.from_model(outlier_llama).score(ids)

    def error(**options) -> float:
        got = FastDecoder.from_model(outlier_llama, "int8_dynamic", **options).score(ids)
        return float((got - exact).norm() / exact.norm())

    rough, smooth = error(), error(calibration=ids[:, :20])
    assert smooth < 0.05 and smooth < 0.7 * rough


def test_dynamic_rows_do_not_know_each_other(tiny_llama, ids):
    """Guards against one scale for several tokens: a loud one would leave the quiet ones without digits."""
    decoder = FastDecoder.from_model(tiny_llama, "int8_dynamic")
    together = decoder.score(ids)
    decoder.prefill(ids[:, :1])
    singly = torch.cat([decoder.step(ids[:, i : i + 1]) for i in range(1, ids.shape[1])], dim=1)
    assert (together[:, 1:] - singly).norm() / singly.norm() < 0.04


def test_calibration_is_checked(tiny_llama, ids):
    """Guards against calibration ignored in silence, and against ids of another shape or kind."""
    with pytest.raises(ValueError, match="int8_dynamic"):
        FastDecoder.from_model(tiny_llama, "int8", calibration=ids)
    with pytest.raises(ValueError, match="shape"):
        FastDecoder.from_model(tiny_llama, "int8_dynamic", calibration=ids[0])
    with pytest.raises(TypeError, match="int64"):
        FastDecoder.from_model(tiny_llama, "int8_dynamic", calibration=ids.float())
