"""The kernel against the FP32 model whose weights it took."""

from __future__ import annotations

import math
import subprocess
import sys

import kernel_toys
import pytest
import torch

from llm_latency.engine.kernel_decoder import KernelDecoder, PrefixKernelDecoder
from llm_latency.engine.kernel_weights import pack, round_weight
from llm_latency.generation import generate
from llm_latency.quality import perplexity
from llm_latency.speculative import PromptLookupDraft, SpeculativeDecoder

pytestmark = kernel_toys.needs_kernel()


@pytest.fixture(scope="module", params=sorted(kernel_toys.TOYS))
def toy(request):
    return kernel_toys.make_toy(request.param)


@pytest.fixture(scope="module")
def llama():
    return kernel_toys.make_toy("llama")


def ids_of(model, count: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(seed))


def exact_logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_within_half_a_step_and_rounding_again_changes_nothing(bits):
    """Guards against a grid that is not the one stored, and against a model from a GGUF file being rounded twice."""
    weight = torch.randn(13, 80, generator=torch.Generator().manual_seed(1))
    codes = round_weight(weight, bits)
    assert codes.q.shape == (13, 96) and codes.scales.shape == (13, 3)
    back = codes.dequantize()[:, :80]
    step = codes.scales.float().repeat_interleave(32, dim=1)[:, :80]
    assert ((back - weight).abs() <= step * (0.5 + 15 * 2**-11)).all()
    assert torch.equal(round_weight(back, bits).dequantize()[:, :80], back)


def test_rounding_holds_constant_and_empty_groups():
    """Guards against a division by a scale of zero."""
    weight = torch.zeros(2, 64)
    weight[1] = 0.25
    assert torch.equal(round_weight(weight, 4).dequantize(), weight)
    assert torch.equal(round_weight(weight[:1], 8).dequantize(), weight[:1])


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_packing_puts_every_code_where_the_kernel_reads_it(lanes, bits):
    """Guards against a transposed tile: every element is looked up by the formula in kernel.h."""
    codes = round_weight(torch.randn(19, 64, generator=torch.Generator().manual_seed(2)), bits)
    q, scales = pack(codes, lanes)
    for row in range(19):
        tile, lane = divmod(row, lanes)
        for column in range(64):
            group, inside = divmod(column, 32)
            if bits == 4:
                nibble, inside = divmod(inside, 16)
                code = int(q[tile, group, inside // 4, lane, inside % 4]) >> (4 * nibble) & 15
                assert scales[tile, group, 1, lane] == codes.minima[row, group]
                scale = scales[tile, group, 0, lane]
            else:
                code, scale = int(q[tile, group, inside // 4, lane, inside % 4]), scales[tile, group, lane]
            assert code == codes.q[row, column] and scale == codes.scales[row, group]


@pytest.mark.model
def test_the_bundled_model_loses_not_a_bit(target):
    """Guards against a second rounding: its weights lie on the GGUF's grid, and the codes must mean just these."""
    for name, weight in target.named_parameters():
        if weight.dim() == 2:
            bits = 8 if "embed" in name else 4
            assert torch.equal(round_weight(weight, bits).dequantize(), weight), name


# -- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 150])
def test_logits_and_features_are_the_models(toy, length):
    """Guards against any difference of the mathematics: GQA 1 to 7, biases, scaled RoPE, odd sizes, blocks, chunks."""
    ids = ids_of(toy, length)
    decoder = KernelDecoder.from_model(toy, threads=2)
    exact = exact_logits(toy, ids)
    logits = decoder.score(ids)
    assert logits.shape == exact.shape and logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 4e-3 * exact.abs().max()
    with torch.inference_mode():
        hidden = toy.model(ids).last_hidden_state[0]
    assert (decoder.features - hidden).abs().max() < 4e-3 * hidden.abs().max()
    last = decoder.prefill(ids)
    assert torch.equal(last, logits[:, -1]) and decoder.length == length


def test_greedy_text_is_the_models(toy):
    """Guards against a decoding loop that drifts: each of 60 tokens is the model's choice after the ones before."""
    ids = ids_of(toy, 9)
    text = generate(KernelDecoder.from_model(toy), ids, 60).sequences
    exact = exact_logits(toy, text)[0, 8:-1]  # [60, vocab]
    chosen = exact.gather(1, text[0, 9:, None])[:, 0]
    assert (exact.amax(dim=1) - chosen <= 4e-3 * exact.abs().max()).all()  # a near tie may go either way
    assert (exact.argmax(dim=1) == text[0, 9:]).float().mean() > 0.95


@pytest.mark.parametrize(("options", "bound"), [(dict(activations="int8"), 0.06), (dict(cache="int8"), 0.03)])
def test_the_lossy_choices_lose_little(toy, options, bound):
    """Guards against a scale that is wrong but not absurd: the relative error of INT8 is of this order."""
    ids = ids_of(toy, 100)
    decoder = KernelDecoder.from_model(toy, **options)
    exact = exact_logits(toy, ids)
    error = (decoder.score(ids) - exact).norm() / exact.norm()
    assert 1e-5 < error < bound


@pytest.mark.long
@pytest.mark.model
def test_the_bundled_models_text_is_fp32s(target, tokenizer):
    """Guards against a fault that only real activations show: 8 prompts, 40 tokens each, all ids equal."""
    decoder = KernelDecoder.from_model(target, max_length=256)
    prompts = ["The capital of France is", "def add(a, b):", "1 + 1 =", "Once upon a time,", "Dear Sir,"]
    prompts += ["The three laws of motion are", "Water boils at", "<|im_start|>user\nWhat is a cache?<|im_end|>\n"]
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        text = generate(decoder, ids, 40).sequences
        choices = exact_logits(target, text)[0].argmax(dim=-1)
        assert torch.equal(choices[ids.shape[1] - 1 : -1], text[0, ids.shape[1] :]), prompt


@pytest.mark.model
def test_perplexity_is_fp32s(target, tokenizer):
    """Guards against a loss that greedy text hides: perplexity differs by less than one part in two thousand."""
    ids = torch.tensor(
        [tokenizer(" ".join(["It was a bright cold day, and all the clocks were wrong."] * 8))["input_ids"]]
    )
    ours = perplexity(KernelDecoder.from_model(target, max_length=256), ids)
    exact = perplexity(target, ids)
    assert math.isclose(ours, exact, rel_tol=5e-4)


# -- a stepper like any other -----------------------------------------------------------------------------------------


def test_steps_rollback_and_prefix(llama):
    """Guards against rejected tokens that stay visible, and a kept prefix that is not the one read."""
    ids = ids_of(llama, 40)
    decoder = PrefixKernelDecoder.from_model(llama, max_length=64)
    whole = decoder.score(ids)
    decoder.prefill(ids[:, :20])
    decoder.step(ids[:, 3:9])
    decoder.crop_to(20)
    assert torch.equal(decoder.step(ids[:, 20:23])[0], whole[0, 20:23])
    decoder.keep_prefix(ids[:, :30])
    assert decoder.prefix_tokens == 30
    assert torch.equal(decoder.prefill(ids), whole[:, -1]) and decoder.features.shape[0] == 40
    assert torch.equal(decoder.prefill(ids[:, 5:]), KernelDecoder.from_model(llama).prefill(ids[:, 5:]))
    assert torch.equal(decoder.prefill(ids), whole[:, -1])  # read anew, since the other prompt lay over it
    for bad in (-1, 41):
        with pytest.raises(ValueError, match=f"crop_to={bad}; expected 0 to 40"):
            decoder.crop_to(bad)
    with pytest.raises(TypeError, match=r"crop_to=1\.5; expected an int"):
        decoder.crop_to(1.5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_gives_the_plain_text(llama, temperature):
    """Guards against a verification whose logits are not those of decoding: with INT8 activations, too, the greedy
    text is equal, not nearly; a sampled one is drawn from the same distributions, so it only has to run."""
    ids = ids_of(llama, 6).repeat(1, 4)
    for activations in ("int16", "int8"):
        decoder = KernelDecoder.from_model(llama, activations=activations)
        plain = generate(decoder, ids, 80).sequences
        speculative = SpeculativeDecoder(decoder, PromptLookupDraft(), num_speculative=4)
        generator = torch.Generator().manual_seed(3)
        output = speculative.generate(ids, 80, temperature=temperature, generator=generator)
        assert output.sequences.shape == plain.shape
        if temperature == 0:
            assert torch.equal(output.sequences, plain)


def test_bytes_are_those_of_the_codes(llama):
    """Guards against a roofline computed from the wrong bytes: 20 a group of 32 at 4 bits, 34 at 8."""
    decoder = KernelDecoder.from_model(llama, max_length=100)
    lanes = decoder.kernel.weights.lanes
    head = -(-97 // lanes) * lanes * 3 * 34
    layer = (128 * 3 + 96 * 2 + 2 * 128 * 3 + 96 * 4) * 20  # qkv, output, gate and up (filled up to 128), down
    assert decoder.step_bytes == 2 * layer + head + (2 * 2 + 1) * 4 * 96 + 4 * 96
    assert (
        decoder.cache_bytes == 2 * 2 * 7 * 2 * 16 * 16 * 2
    )  # layers, keys and values, blocks, KV heads, block, head_dim
    assert KernelDecoder.from_model(llama, max_length=100, cache="int8").cache_bytes < 0.7 * decoder.cache_bytes


# -- bad input --------------------------------------------------------------------------------------------------------


def test_bad_options(llama, tiny_llama):
    """Guards against an option or a model that is taken silently and computed wrong."""
    for options, message in (
        (dict(activations="int4"), "activations must be"),
        (dict(cache="fp8"), "cache must be"),
        (dict(max_length=0), "max_length=0; expected 1 to 512"),
        (dict(threads=0), "threads=0; expected at least 1"),
        (dict(max_length=513), "max_length=513; expected 1 to 512"),
    ):
        with pytest.raises(ValueError, match=message):
            KernelDecoder.from_model(llama, **options)
    with pytest.raises(TypeError, match=r"threads=1\.5"):
        KernelDecoder.from_model(llama, threads=1.5)
    with pytest.raises(ValueError, match="hidden size divisible by 32; this model has 48"):
        KernelDecoder.from_model(tiny_llama)


def test_bad_requests(llama):
    """Guards against memory read beyond its end: ids, positions and blocks are checked before anything is computed."""
    decoder = KernelDecoder.from_model(llama, max_length=40)
    with pytest.raises(RuntimeError, match="before prefill"):
        decoder.step(torch.tensor([[5]]))
    for ids, message in (
        (torch.tensor([[5, 97]]), "row 1: token id 97; expected 0 to 96"),
        (torch.tensor([[-1]]), "row 0: token id -1"),
        (torch.zeros(1, 41, dtype=torch.int64), "41 tokens do not fit"),
        (torch.zeros(1, 0, dtype=torch.int64), r"shape \[1, k\]"),
        (torch.zeros(2, 3, dtype=torch.int64), r"shape \[1, k\]"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.prefill(ids)
    with pytest.raises(TypeError, match=r"torch\.float32"):
        decoder.prefill(torch.zeros(1, 3))
    for rows, message in (
        (([], [], []), "n at least 1"),
        (([5], [0, 1], [[0]]), "n at least 1"),
        (([5], [40], [[0, 1, 2]]), "row 0: position 40; expected 0 to 39"),
        (([5], [-1], [[0]]), "row 0: position -1"),
        (([5], [16], [[0]]), "row 0: position 16; expected 0 to 15"),
        (([5, 6], [0, 17], [[0, 0], [1, 3]]), r"row 1: blocks \[1, 3\]"),
        (([5], [0], [[-1]]), r"row 0: blocks \[-1\]"),
        (([5, 6, 7], [3, 4, 3], [[0], [0], [0]]), "row 2: position 3 in block 0"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.rows(*rows)
    with pytest.raises(ValueError, match="wanted must be row numbers"):
        decoder.rows([5], [0], [[0]], wanted=[1])
    with pytest.raises(TypeError, match=r"positions are torch\.float32"):
        decoder.rows([5], [0.0], [[0]])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_an_error_not_words(value):
    """Guards against text made of NaN: in a weight it is refused at packing, in a norm or embedding when computed."""
    model = kernel_toys.make_toy("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        KernelDecoder.from_model(model)
    for place in ("model.norm.weight", "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"):
        model = kernel_toys.make_toy("llama")
        with torch.no_grad():
            model.get_parameter(place)[..., 7] = value
        with pytest.raises(ValueError, match="activations hold NaN"):
            KernelDecoder.from_model(model, threads=2).prefill(torch.tensor([[5, 6, 7]]))


def test_keys_beyond_fp16_are_an_error():
    """Guards against infinity in the cache, which a block of another request would later read."""
    model = kernel_toys.make_toy("biased")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.fill_(7e4)
    with pytest.raises(ValueError, match="beyond FP16"):
        KernelDecoder.from_model(model).prefill(torch.tensor([[5, 6]]))


FORK = """
import os, sys
import kernel_toys, torch
from llm_latency.engine.kernel_decoder import KernelDecoder
decoder = KernelDecoder.from_model(kernel_toys.make_toy("llama"), threads=2)
ids = torch.tensor([[5, 6, 7, 8]])
here = decoder.prefill(ids)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(decoder.prefill(ids), here) else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert torch.equal(decoder.prefill(ids), here)
sys.exit(status)
"""


@pytest.mark.long
def test_after_a_fork_both_go_on(tmp_path):
    """Guards against a child that waits for ever for threads which stayed behind in its parent."""
    path = [entry for entry in sys.path if entry.endswith("tests")][:1]
    code = f"import sys; sys.path[:0] = {path!r}\n{FORK}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
