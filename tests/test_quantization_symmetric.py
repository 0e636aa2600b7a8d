"""Symmetric quantisation as plain functions: the error bound, zeros, scales, groups, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import property_settings

from llm_latency.quantization.rounding import dequantize, largest_code, quantize_symmetric, round_symmetric


def test_by_hand():
    """Guards against a scale over 128 instead of 127, and against codes rounded towards zero."""
    codes, scales = quantize_symmetric(torch.tensor([[127.0, -63.6, 0.4, 0.6]]), dim=-1)
    assert codes.tolist() == [[127, -64, 0, 1]]
    assert scales.tolist() == [[1.0]]
    assert dequantize(codes, scales).tolist() == [[127.0, -64.0, 0.0, 1.0]]


def test_four_bits_by_hand():
    """Guards against 8 as the largest code of four bits: its mirror image would not fit."""
    codes, _ = quantize_symmetric(torch.tensor([7.0, -7.0, 3.4, 0.0]), dim=0, bits=4)
    assert codes.tolist() == [7, -7, 3, 0]
    assert largest_code(4) == 7


@property_settings(60)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 70),
    bits=st.integers(2, 8),
    dim=st.sampled_from([-1, -2]),
    exponent=st.integers(-35, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_at_most_half_a_scale(seed, tokens, bits, dim, exponent, dtype):
    """Guards against any group whose error exceeds the format's: at all magnitudes, bits and both ways to group."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, 3, tokens, 5, generator=generator) * 10.0**exponent).to(dtype)
    codes, scales = quantize_symmetric(x, dim=dim, bits=bits)
    top = largest_code(bits)
    assert codes.dtype == torch.int8 and int(codes.abs().max()) <= top
    error = (dequantize(codes, scales).double() - x.double()).abs()
    assert (error <= scales.double() * 0.5 * (1 + 1e-5)).all()
    # The scale itself is no larger than it must be, but for its rounding to BF16.
    assert torch.allclose(scales.double(), x.double().abs().amax(dim, keepdim=True) / top, rtol=2**-8, atol=1e-37)


def test_zeros_stay_exact_zeros():
    """Case 15: an all-zero group divides by zero in many implementations; here it gives zeros, and no NaN."""
    x = torch.randn(1, 2, 9, 8)
    x[:, :, :, 3] = 0.0
    for dim in (-1, -2):
        read = dequantize(*quantize_symmetric(x, dim=dim))
        assert (read[..., 3] == 0).all() and torch.isfinite(read).all()
    read = dequantize(*quantize_symmetric(torch.zeros(1, 1, 4, 4), dim=-1))
    assert torch.equal(read, torch.zeros(1, 1, 4, 4))


def test_tiny_groups_do_not_underflow():
    """Guards against FP16 scales: a group of 1e-6 has the scale 8e-9, which FP16 rounds to zero."""
    x = torch.full((1, 1, 2, 4), 1e-6)
    read = dequantize(*quantize_symmetric(x, dim=-1))
    assert torch.allclose(read, x, rtol=2**-8)


def test_largest_fp16_number_survives():
    """Guards against a rounded-up scale that lifts 65504 to infinity in FP16."""
    x = torch.tensor([[65504.0, -65504.0, 1.0]], dtype=torch.float16)
    read = dequantize(*quantize_symmetric(x, dim=-1), dtype=torch.float16)
    assert torch.isfinite(read).all()
    assert read[0, 0] >= 65504 * (1 - 1 / 254)


def test_not_contiguous_equals_contiguous():
    """Guards against kernels that read memory in order instead of by strides."""
    x = torch.randn(6, 5, 7).transpose(0, 2)
    for a, b in zip(quantize_symmetric(x, dim=1), quantize_symmetric(x.contiguous(), dim=1), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(bad):
    """Guards against a NaN that becomes an ordinary code, and an infinite scale that makes all others zero."""
    x = torch.ones(2, 3)
    x[1, 2] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_symmetric(x, dim=-1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unchecked_rounding_hides_no_nan(bad, dtype):
    """Guards against a NaN that becomes an ordinary number where nobody looks for it, as on a GPU: its group is NaN."""
    x = torch.ones(2, 3, dtype=dtype)
    x[1, 2] = bad
    codes, scales = round_symmetric(x, dim=-1)
    read = dequantize(codes.to(torch.int8), scales, dtype)
    assert read[0].isfinite().all() and not read[1].isfinite().any()


def test_finite_numbers_whose_sum_overflows_are_accepted():
    """Guards against the quick test for NaN, a sum, taking large finite numbers for infinite ones."""
    x = torch.full((1, 8), 1e38)
    assert torch.allclose(dequantize(*quantize_symmetric(x, dim=-1)), x, rtol=2**-8)


def test_bad_arguments():
    """Guards against silent truncation: integers quantised again, empty groups, bits that do not fit int8."""
    with pytest.raises(TypeError, match="int64"):
        quantize_symmetric(torch.ones(2, 2, dtype=torch.int64), dim=-1)
    with pytest.raises(ValueError, match="empty"):
        quantize_symmetric(torch.ones(2, 0), dim=-1)
    with pytest.raises(ValueError, match="bits=9"):
        quantize_symmetric(torch.ones(2, 2), dim=-1, bits=9)
    with pytest.raises(ValueError, match="bits=1"):
        quantize_symmetric(torch.ones(2, 2), dim=-1, bits=1)
    with pytest.raises(TypeError, match="bits=True"):
        quantize_symmetric(torch.ones(2, 2), dim=-1, bits=True)
