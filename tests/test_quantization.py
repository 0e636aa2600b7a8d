"""Weight-only INT8 and INT4: the rounding, the packed kernels, the modules, whole models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from properties import property_settings
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from llm_latency.quantization import (
    MANY_ROWS,
    Int4Linear,
    Int8Linear,
    PrepackedWeight,
    dequantize,
    kernels,
    quantize_,
    quantize_blocks,
    quantize_rows,
)

KINDS = [(Int8Linear, {}), (Int4Linear, {"group_size": 32})]


def _weight(out: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(seed))


def _rows_and_back(weight: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_rows(weight)
    return dequantize(codes, scales[:, None])


def _check_product(layer, x: torch.Tensor) -> None:
    """Our error against FP32 is at most twice that of the honest peer: a BF16 linear with the dequantised weight."""
    weight = layer.dequantize()
    bias = None if layer.bias is None else layer.bias.float()
    exact = F.linear(x.to(torch.bfloat16).float(), weight, bias)
    peer = F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16), layer.bias).float()
    error = (layer(x).float() - exact).abs().max()
    assert error <= 2 * (peer - exact).abs().max() + 1e-2 * exact.abs().max().clamp(min=1e-6)


# -- rounding -----------------------------------------------------------------------------------------------------


def test_int8_by_hand():
    """Guards against a scale per tensor, per column, or a grid of 255 steps: the values are worked out by hand."""
    weight = torch.tensor([[1.0, -127.0, 64.4], [0.0, 254.0, -3.0]])
    q, scales = quantize_rows(weight)
    assert q.tolist() == [[1, -127, 64], [0, 127, -2]]  # -1.5 rounds to even
    assert scales.tolist() == [1.0, 2.0]
    assert torch.equal(_rows_and_back(weight), torch.tensor([[1.0, -127.0, 64.0], [0.0, 254.0, -4.0]]))


def test_int4_by_hand():
    """Guards against an off-by-one in the zero: weight = (q - 8) * scale + zero, lowest code 0, highest 15."""
    weight = torch.tensor([[0.0, 15.0, 7.4, 7.6], [-30.0, 0.0, -15.9, -2.0]])
    blocks = quantize_blocks(weight, bits=4, group_size=4)
    assert blocks.scales.tolist() == [[1.0], [2.0]]
    assert blocks.zeros.tolist() == [[8.0], [-14.0]]
    assert blocks.q.tolist() == [[0, 15, 7, 8], [0, 15, 7, 14]]
    assert blocks.bits_per_weight == 4 + 32 / 4
    assert torch.equal(blocks.dequantize()[1], torch.tensor([-30.0, 0.0, -16.0, -2.0]))


@property_settings(40)
@given(
    out=st.integers(1, 9),
    blocks=st.integers(1, 4),
    group=st.integers(1, 9),
    bits=st.integers(2, 8),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_rounding_error_is_at_most_half_a_step(out, blocks, group, bits, scale, seed):
    """Guards against codes chosen on another grid than the one stored: every weight lands on its nearest point.

    The block's ends may lie outside the grid after its scale and zero were rounded to BF16, by a little.
    """
    weight = _weight(out, blocks * group, seed) * scale
    rounded = quantize_blocks(weight, bits=bits, group_size=group)
    step = rounded.scales.float().repeat_interleave(group, dim=1)
    offset = rounded.zeros.float().abs().repeat_interleave(group, dim=1)
    slack = 2.0**-8 * (offset + 2**bits * step)
    constant = group == 1  # a block of one value is held by its zero alone
    bound = slack if constant else step / 2 + slack
    assert ((rounded.dequantize() - weight).abs() <= bound).all()


def test_values_on_the_grid_come_back_exactly():
    """Guards against a loss where there need be none: a checkpoint that lies on this very grid."""
    q = torch.randint(0, 16, (7, 64), generator=torch.Generator().manual_seed(3))
    q[:, ::32], q[:, 1::32] = 0, 15  # every block uses its ends, as GGUF's Q4_1 blocks do
    weight = (q.float() - 8) * 0.25 + 1.5
    assert torch.equal(quantize_blocks(weight).dequantize(), weight)


def test_zero_and_constant_blocks():
    """Guards against 0 / 0: all-zero rows give exact zeros, constant blocks their constant, and never NaN."""
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    assert torch.equal(quantize_blocks(weight).dequantize(), weight)
    assert torch.equal(_rows_and_back(weight)[0], weight[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_strides(dtype):
    """Guards against code that assumes FP32 or a contiguous matrix."""
    weight = _weight(64, 6).to(dtype).t()  # [6, 64], not contiguous
    assert torch.equal(quantize_blocks(weight).q, quantize_blocks(weight.float().contiguous()).q)
    assert torch.equal(quantize_rows(weight)[0], quantize_rows(weight.float().contiguous())[0])


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.int32), TypeError, "int32"),
        (torch.zeros(4, 4, dtype=torch.float64), TypeError, "float64"),
        ([[1.0]], TypeError, "list"),
        (torch.zeros(4), ValueError, "shape"),
        (torch.zeros(0, 4), ValueError, "shape"),
        (torch.full((2, 4), float("nan")), ValueError, "NaN"),
        (torch.zeros(4, 4, device="meta"), ValueError, "meta"),
    ],
)
def test_bad_weights_are_refused(weight, error, message):
    """Guards against garbage that is quantised without a word."""
    for quantise in (quantize_rows, lambda w: quantize_blocks(w, group_size=4)):
        with pytest.raises(error, match=message):
            quantise(weight)


def test_group_must_divide_the_row():
    """Guards against a last block that is cut short or reads into the next row."""
    with pytest.raises(ValueError, match="group_size 32 does not divide the row width 48"):
        quantize_blocks(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="bits"):
        quantize_blocks(torch.zeros(2, 32), bits=1)


# -- modules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_bfloat16", [False, True])
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize(("out", "width"), [(1, 32), (37, 64), (130, 96), (16, 160)])
def test_modules_equal_their_dequantised_form(kind, options, out, width, keep_bfloat16):
    """Guards against a wrong packing, padded channels that leak out, and odd numbers of rows."""
    linear = nn.Linear(width, out)
    layer = kind.from_linear(linear, keep_bfloat16=keep_bfloat16, **options)
    for rows in (0, 1, 3, MANY_ROWS - 1, MANY_ROWS, 33):
        x = torch.randn(rows, width)
        assert layer(x).shape == (rows, out) and layer(x).dtype == torch.float32
        if rows:
            _check_product(layer, x)
    assert layer(torch.randn(2, 3, width)).shape == (2, 3, out)
    assert layer(torch.randn(width)).shape == (out,)
    assert layer(torch.randn(2, width, dtype=torch.bfloat16)).dtype == torch.bfloat16
    _check_product(layer, torch.randn(width, 5).t())
    step = (linear.weight.amax(1) - linear.weight.amin(1)).max() / (15 if kind is Int4Linear else 127)
    assert (layer.dequantize() - linear.weight).abs().max() <= step


@pytest.mark.parametrize("width", [1, 8, 37, 100])
def test_int8_of_any_width(width):
    """Guards against the packed kernel itself, which gives wrong sums or crashes where 16 does not divide the width."""
    layer = Int8Linear.from_linear(nn.Linear(width, 5))
    _check_product(layer, torch.randn(7, width))


def test_int4_in_groups_that_no_kernel_takes():
    """Guards against a silent error of the kernel: the plain path serves, and the layer says so."""
    layer = Int4Linear.from_linear(nn.Linear(48, 10), group_size=16)
    assert layer.kernel == kernels.PLAIN and kernels.PLAIN in repr(layer)
    _check_product(layer, torch.randn(3, 48))


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_without_any_kernel(kind, options, monkeypatch):
    """Guards against a machine whose torch lacks the kernels: the plain path gives the same answers."""
    linear = nn.Linear(64, 20)
    x = torch.randn(5, 64)
    fast = kind.from_linear(linear, **options)
    monkeypatch.setattr(kernels, "int8_kernel", lambda device: kernels.PLAIN)
    monkeypatch.setattr(kernels, "int4_kernel", lambda device, width, group: kernels.PLAIN)
    plain = kind.from_linear(linear, **options)
    assert plain.kernel == kernels.PLAIN
    _check_product(plain, x)
    plain.load_state_dict(fast.state_dict())  # a file from a machine with the kernel
    assert torch.equal(plain.dequantize(), fast.dequantize())


def test_a_lying_kernel_is_not_used(monkeypatch):
    """Guards against a layout that differs from what we pack: a kernel whose check fails is not taken."""
    monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda x, q, scales: torch.ones(x.shape[0], q.shape[0]))
    kernels.int8_kernel.cache_clear()
    assert kernels.int8_kernel("cpu") == kernels.PLAIN
    monkeypatch.undo()
    kernels.int8_kernel.cache_clear()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_state_dict_round_trip(kind, options, tmp_path):
    """Guards against a processor's own layout in a file, lost biases, and a load that leaves the old BF16 copy."""
    saved = kind.from_linear(nn.Linear(64, 37), keep_bfloat16=True, **options)
    torch.save(saved.state_dict(), tmp_path / "layer.pt")
    loaded = kind.from_linear(nn.Linear(64, 37), keep_bfloat16=True, **options)
    loaded.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    for rows in (1, 40):
        x = torch.randn(rows, 64)
        assert torch.equal(loaded(x), saved(x))
    state = saved.state_dict()
    with pytest.raises(RuntimeError, match="scales"):
        loaded.load_state_dict({name: value for name, value in state.items() if name != "scales"})
    with pytest.raises(RuntimeError, match="expected"):
        loaded.load_state_dict(state | {"scales": state["scales"].float()})
    with pytest.raises(RuntimeError, match="weight"):
        loaded.load_state_dict(state | {"weight": torch.zeros(3)})


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_bias_that_is_missing_or_of_another_size(kind, options):
    """Guards against codes left out with a missing bias under strict=False, and a bias of one broadcast over all."""
    saved, loaded = (kind.from_linear(nn.Linear(64, 10), **options) for _ in range(2))
    state = saved.state_dict()
    kept = loaded.bias.clone()
    report = loaded.load_state_dict({name: code for name, code in state.items() if name != "bias"}, strict=False)
    assert report.missing_keys == ["bias"] and torch.equal(loaded.bias, kept)
    assert torch.equal(loaded.dequantize(), saved.dequantize())
    other = kind.from_linear(nn.Linear(64, 10), **options)
    before = other.dequantize()
    for size in (1, 7):
        with pytest.raises(RuntimeError, match=rf"bias: expected \[10\], got \[{size}\]"):
            other.load_state_dict(state | {"bias": torch.zeros(size)})
        with pytest.raises(ValueError, match=rf"bias of shape \[10\], got \[{size}\]"):
            kind.from_weight(_weight(10, 64), torch.zeros(size), **options)
    assert torch.equal(other.dequantize(), before)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_copies_and_casts_leave_the_codes(kind, options):
    """Guards against `.float()` or `.to(dtype)` changing the grid, and deepcopy failing on packed data."""
    layer = kind.from_linear(nn.Linear(64, 8), keep_bfloat16=True, **options)
    before = layer.dequantize()
    assert torch.equal(copy.deepcopy(layer).dequantize(), before)
    layer.float().to(torch.float64).half()
    assert torch.equal(layer.dequantize(), before)


def test_bytes_are_counted():
    """Guards against a table that forgets scales and zeros."""
    int8 = Int8Linear.from_linear(nn.Linear(64, 32, bias=False))
    int4 = Int4Linear.from_linear(nn.Linear(64, 32, bias=False), group_size=32, keep_bfloat16=True)
    assert int8.nbytes == 64 * 32 + 2 * 32
    assert int4.nbytes == 64 * 32 // 2 + 2 * 2 * 32 * 2
    assert int4.copy_nbytes == 2 * 64 * 32


def test_layers_that_cannot_be_quantised():
    """Guards against a wrong width found at the first call, and a layer quantised twice."""
    with pytest.raises(ValueError, match="divide the row width"):
        Int4Linear.from_linear(nn.Linear(48, 8))
    with pytest.raises(TypeError, match="Int8Linear"):
        Int4Linear.from_linear(Int8Linear.from_linear(nn.Linear(32, 8)))
    with pytest.raises(ValueError, match="width 32, got 31"):
        Int8Linear.from_linear(nn.Linear(32, 8))(torch.zeros(2, 31))
    with pytest.raises(TypeError, match="int64"):  # the answer, cast to the input's dtype, would be cut to integers
        Int8Linear.from_linear(nn.Linear(32, 8))(torch.ones(2, 32, dtype=torch.int64))
    for kind, _ in KINDS:
        with pytest.raises(ValueError, match="at least one element"):
            kind.from_weight(torch.zeros(8, 0))
    with pytest.raises(ValueError, match="even number"):  # two codes share a byte
        Int4Linear.from_linear(nn.Linear(9, 8), group_size=3)


@pytest.mark.parametrize("shape", [(1, 1), (37, 53), (64, 96)])
def test_prepacked_weight(shape):
    """Guards against a packed layout that suits only some shapes, and copies that lose it."""
    weight = _weight(*shape).to(torch.bfloat16)
    packed = copy.deepcopy(PrepackedWeight(weight))
    assert torch.equal(packed.dense(), weight)
    for rows in (0, 1, 5, 40):
        x = torch.randn(rows, shape[1]).to(torch.bfloat16)
        expected = F.linear(x.float(), weight.float())
        assert torch.allclose(packed.matmul(x).float(), expected, rtol=0.02, atol=0.02)


# -- models -------------------------------------------------------------------------------------------------------


def test_a_tied_head_leaves_the_embedding(tiny_llama):
    """Guards against a quantised head that drags the embedding along, or is tied to it again when saved or loaded."""
    embedding = tiny_llama.model.embed_tokens.weight
    before = embedding.clone()
    assert tiny_llama.lm_head.weight is embedding
    report = quantize_(tiny_llama, "int8")
    assert isinstance(tiny_llama.lm_head, Int8Linear)
    assert tiny_llama.model.embed_tokens.weight is embedding and torch.equal(embedding, before)
    assert tiny_llama.config.tie_word_embeddings is False
    tiny_llama.tie_weights()
    assert isinstance(tiny_llama.lm_head, Int8Linear)
    assert report.layers == 3 * 7 + 1 and report.skipped == ()
    # each of the 22 matrices: four bytes per weight before, one byte and a BF16 scale per channel after (48 -> 64 wide)
    assert report.linear_bytes_before == 4 * (3 * (48 * (48 * 2 + 16 * 2) + 3 * 48 * 112) + 97 * 48)
    assert report.linear_bytes_after == 3 * (64 * (48 * 2 + 16 * 2 + 2 * 112) + 128 * 48) + 64 * 97 + 2 * (
        3 * (48 * 3 + 16 * 2 + 2 * 112) + 97
    )


@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 0.05), ("int4", 0.35)])
def test_quantised_models_stay_close(tiny_qwen2, weights, tolerance):
    """Guards against biases lost, layers mixed up, or a layout that only looks right on one layer."""
    ids = torch.arange(40)[None] % 97
    with torch.inference_mode():
        exact = tiny_qwen2(ids).logits
        quantize_(tiny_qwen2, weights, group_size=16)
        error = (tiny_qwen2(ids).logits - exact).norm() / exact.norm()
    assert error < tolerance


def test_skip_by_name_and_pattern(tiny_llama):
    """Guards against patterns that match nothing and are passed over in silence."""
    report = quantize_(tiny_llama, "int4", skip=["lm_head", "*.down_proj", "model.layers.0.*"], group_size=16)
    assert report.layers == 2 * 6
    assert isinstance(tiny_llama.lm_head, nn.Linear) and isinstance(tiny_llama.model.layers[1].mlp.up_proj, Int4Linear)
    assert tiny_llama.config.tie_word_embeddings is True


def test_bad_requests_leave_the_model_alone(tiny_llama):
    """Guards against a model half quantised when an error comes late."""
    before = [type(module) for module in tiny_llama.modules()]
    with pytest.raises(ValueError, match="no linear layer"):
        quantize_(tiny_llama, "int8", skip=["lm_heda"])
    with pytest.raises(TypeError, match="skip='lm_head'"):
        quantize_(tiny_llama, "int8", skip="lm_head")
    with pytest.raises(ValueError, match="leaves no layer"):
        quantize_(tiny_llama, "int8", skip=["*"])
    with pytest.raises(ValueError, match=r"layer 'model.layers.0.self_attn.q_proj': .*32.*48"):
        quantize_(tiny_llama, "int4")  # width 48 in blocks of 32
    with pytest.raises(ValueError, match="int3"):
        quantize_(tiny_llama, "int3")
    with pytest.raises(TypeError, match="float64"):
        quantize_(copy.deepcopy(tiny_llama).double(), "int8")
    assert [type(module) for module in tiny_llama.modules()] == before


def test_quantising_twice_is_refused(tiny_llama):
    """Guards against rounding the rounded."""
    quantize_(tiny_llama, "int8", skip=["lm_head"])
    with pytest.raises(ValueError, match="quantised already"):
        quantize_(tiny_llama, "int4", group_size=16)


def test_model_state_dict_round_trip(tiny_llama, tmp_path):
    """Guards against a quantised model that cannot be saved, or loads with other weights."""
    other = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    for model in (tiny_llama, other):
        quantize_(model, "int4", group_size=16)
    torch.save(tiny_llama.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(other(ids).logits, tiny_llama(ids).logits)


def test_models_with_conv1d_layers():
    """Guards against GPT-2's layers, which hold their weight the other way round."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=32)).eval()
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        exact = model(ids).logits
        quantize_(model, "int8")
        assert (model(ids).logits - exact).norm() / exact.norm() < 0.05


def test_a_shared_config_stays_another_models(tmp_path):
    """Guards against a second model of the same config that saves without its tied head, and loads a random one."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    one, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    ids = torch.arange(5)[None]
    before = other(ids).logits
    quantize_(one, "int8")
    assert not one.config.tie_word_embeddings and other.config.tie_word_embeddings
    other.save_pretrained(tmp_path)
    torch.testing.assert_close(LlamaForCausalLM.from_pretrained(tmp_path)(ids).logits, before)


def test_a_bare_layer_and_a_layer_of_two_names():
    """Guards against a report of success where nothing, or half, was replaced."""
    with pytest.raises(ValueError, match="a bare Linear"):
        quantize_(torch.nn.Linear(32, 32), "int8")
    both = torch.nn.Module()
    both.a = both.b = torch.nn.Linear(32, 32)
    assert quantize_(both, "int8").layers == 1
    assert both.a is both.b and isinstance(both.a, Int8Linear)
