"""Peak memory against sizes that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch

from every_millisecond.notebook.memory import peak_extra_bytes
from llm_latency.attention import FlashAttention, attention_reference

MB = 2**20


def close(measured: int, expected: int) -> bool:
    return expected <= measured <= expected + 4096  # a few scalars


def test_a_result_and_a_temporary_are_both_counted():
    """Guards against reporting the result's size, or the sum of all allocations, instead of the peak."""
    x = torch.ones(MB // 4)  # 1 MB
    assert close(peak_extra_bytes(lambda: x + 1, device="cpu"), MB)
    assert close(peak_extra_bytes(lambda: (x + 1) + 1, device="cpu"), 2 * MB)
    assert close(peak_extra_bytes(lambda: [(x + 1).sum() for _ in range(5)], device="cpu"), MB)
    assert close(peak_extra_bytes(lambda: [x + 1 for _ in range(5)], device="cpu"), 5 * MB)


def test_memory_inside_an_operator_is_counted():
    """Guards against seeing only the tensors that Python sees: a sum over BF16 as FP32 may copy inside."""
    x = torch.randn(256, 256)
    values = peak_extra_bytes(lambda: torch.linalg.svdvals(x), device="cpu")
    assert values > x.nbytes  # the factorisation overwrites a copy that Python never holds


def test_nothing_and_views_cost_nothing():
    """Guards against counting what was there before."""
    x = torch.ones(1000)
    assert peak_extra_bytes(lambda: None, device="cpu") == 0
    assert peak_extra_bytes(lambda: x.view(10, 100).t(), device="cpu") == 0
    assert peak_extra_bytes(lambda: x.add_(1), device="cpu") < 100


def test_the_blocked_module_grows_by_the_line_and_the_formula_by_the_square():
    """The benchmark of FlashAttention's promise: doubling the length doubles one peak and quadruples the other."""

    def peaks(attention) -> list[int]:
        found = []
        for n in (512, 1024, 2048):
            q, k = torch.zeros(1, n, 2, 32), torch.zeros(1, n, 1, 32)
            found.append(peak_extra_bytes(lambda q=q, k=k: attention(q, k, k, causal=True), device="cpu"))
        return found

    square, line = peaks(attention_reference), peaks(FlashAttention(64, 64))
    assert 3.7 < square[2] / square[1] < 4.1
    assert line[2] / line[1] < 2.1 and line[2] - line[1] == pytest.approx(2 * (line[1] - line[0]), rel=0.05)
    assert line[2] < square[2] / 20


@pytest.mark.parametrize("arguments, error", [((3,), TypeError), ((lambda: None, "tpu"), ValueError)])
def test_bad_arguments(arguments, error):
    """Guards against a result measured by mistake (`peak(fn())`), and a device that is not there."""
    with pytest.raises(error):
        peak_extra_bytes(arguments[0], **({"device": arguments[1]} if len(arguments) > 1 else {}))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_its_own_allocator():
    """Guards against reading the CPU's allocations for work on the GPU."""
    x = torch.ones(MB, device="cuda")
    assert peak_extra_bytes(lambda: (x + 1) + 1, device="cuda") == pytest.approx(8 * MB, rel=0.01)
