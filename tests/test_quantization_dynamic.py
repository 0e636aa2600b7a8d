"""INT8 weights times INT8 activations, against the same rounding written out in FP32."""

from __future__ import annotations

import pytest
import torch

from llm_latency.quantization import DynamicInt8Weight, dynamic, ffn_smoothing, kernels, quantize_rows


def _dense(weight):
    codes, scales = quantize_rows(weight, top=dynamic.WEIGHT_LIMIT, scale_dtype=torch.float32)
    return codes.float() * scales[:, None]


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize(("out", "width"), [(5, 3), (37, 53), (64, 192)])
def test_the_kernel_computes_the_rounding_it_promises(rows, out, width):
    """Guards against sums that overflow 16 bits, rows that share a scale, and padding read as weights."""
    generator = torch.Generator().manual_seed(rows * out)
    weight = torch.randn(out, width, generator=generator)
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    packed = DynamicInt8Weight(weight)
    got, expected = packed.matmul(x), dynamic.round_activations(x) @ _dense(weight).t()
    error = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.01  # a rounding that falls the other way at a tie
    assert packed.shape == (out, width) and packed.nbytes == out * width + 8 * out


def test_the_largest_sums_do_not_overflow():
    """Guards against the 16-bit overflow of full INT8 weights on processors without VNNI: a sign turned, no error."""
    weight, x = torch.ones(8, 256), torch.ones(1, 256)
    assert torch.allclose(DynamicInt8Weight(weight).matmul(x), torch.full((1, 8), 256.0), rtol=0.01)


def test_zero_rows_and_zero_channels():
    """Guards against 0 / 0 for an input of zeros or an output channel of zeros."""
    weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    x = torch.zeros(3, 9)
    x[1] = 1.5
    y = DynamicInt8Weight(weight).matmul(x)
    assert torch.equal(y[0], torch.zeros(6)) and torch.equal(y[2], torch.zeros(6)) and float(y[1, 2]) == 0
    assert torch.isfinite(y).all()


def test_without_the_kernel(monkeypatch):
    """Guards against a machine whose PyTorch lost the kernel: the same function, computed plainly."""
    weight, x = torch.randn(11, 13), torch.randn(4, 13)
    expected, bias = DynamicInt8Weight(weight).matmul(x), torch.randn(11)
    monkeypatch.setattr(dynamic, "dynamic_int8_kernel", lambda: kernels.PLAIN)
    plain = DynamicInt8Weight(weight)
    assert plain.kernel == kernels.PLAIN
    assert (plain.matmul(x) - expected).norm() / expected.norm() < 0.01
    assert torch.allclose(plain.matmul(x, bias), plain.matmul(x) + bias, atol=1e-5)


def test_bad_weights():
    """Guards against NaN or integers rounded into a weight."""
    with pytest.raises(ValueError, match="NaN"):
        DynamicInt8Weight(torch.full((2, 3), float("nan")))
    with pytest.raises(TypeError, match="int64"):
        DynamicInt8Weight(torch.ones(2, 3).long())


def test_smoothing_leaves_the_model_alone(tiny_llama):
    """Guards against hooks left behind, weights changed, and a channel without activations that divides by zero."""
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        tiny_llama.model.layers[1].mlp.up_proj.weight[4] = 0  # this channel never speaks
    before = {name: tensor.clone() for name, tensor in tiny_llama.state_dict().items()}
    factors = ffn_smoothing(tiny_llama, ids)
    assert len(factors) == len(tiny_llama.model.layers)
    assert all(torch.isfinite(f).all() and (f > 0).all() for f in factors) and float(factors[1][4]) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_llama.state_dict().items())
    assert not any(layer.mlp.down_proj._forward_pre_hooks for layer in tiny_llama.model.layers)


def test_many_rows_are_widened_where_bfloat16_is_slow(monkeypatch):
    """Guards against a prompt read five times slower than in FP32 on a CPU without BF16 instructions."""
    monkeypatch.setattr(kernels, "bf16_is_native", lambda device: False)
    monkeypatch.setattr(kernels, "_prepacking_works", lambda: False)
    weight = torch.randn(7, 12).to(torch.bfloat16)
    packed, bias = kernels.PrepackedWeight(weight), torch.randn(7).to(torch.bfloat16)
    calls = []
    real = kernels.F.linear
    monkeypatch.setattr(kernels.F, "linear", lambda x, w, b=None: calls.append(x.dtype) or real(x, w, b))
    for rows in (1, kernels.MANY_ROWS - 1, kernels.MANY_ROWS):
        x = torch.randn(rows, 12).to(torch.bfloat16)
        y = packed.matmul(x, bias)
        assert y.dtype == torch.bfloat16
        assert (y.float() - real(x.float(), weight.float(), bias.float())).abs().max() < 0.05
    assert calls == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_input_gives_no_numbers(rows, bad):
    """Guards against a model that overflowed and goes on talking fluently: the kernel alone makes numbers of NaN."""
    x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(3))
    x[-1, 5] = bad
    y = DynamicInt8Weight(torch.randn(8, 24)).matmul(x)
    assert y[-1].isnan().all() and y[:-1].isfinite().all()


def test_the_default_dtype_does_not_matter():
    """Guards against a kernel check that a learner's torch.set_default_dtype breaks."""
    dynamic.dynamic_int8_kernel.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert DynamicInt8Weight(torch.ones(4, 8, dtype=torch.float32)).kernel == dynamic.dynamic_int8_kernel()
    finally:
        torch.set_default_dtype(before)
        dynamic.dynamic_int8_kernel.cache_clear()
