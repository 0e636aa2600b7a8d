"""Loads Triton so that its kernels run here: compiled where there is CUDA, else through its interpreter on the CPU.

Triton decides between the two when `@triton.jit` meets a function, by the environment variable TRITON_INTERPRET. This
module is imported only when a Triton kernel is first asked for, sets the variable where torch sees no CUDA device, and
then imports Triton. Setting TRITON_INTERPRET=1 before starting Python interprets on a GPU machine too.
"""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import torch

from llm_latency.attention.backend_facts import triton_problem

if importlib.util.find_spec("triton") is None:
    raise ImportError(triton_problem())

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret


def _interpret_standard_functions() -> None:
    """Make tl.max, tl.sum and their like interpretable when Triton was imported before the variable was set.

    torch.compile imports Triton on its own. Its standard functions are then fixed as compiled ones, which an
    interpreted kernel cannot call; wrapped anew, they are what a fresh process would have got.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    renewed: dict[int, InterpretedFunction] = {}  # by id: hashing a JITFunction reads all that it refers to
    for module in (tl.standard, tl):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, renewed.setdefault(id(value), InterpretedFunction(value.fn)))


if INTERPRETED:
    _interpret_standard_functions()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def padded(size: int) -> int:
    """The next power of two, at least 16: the sizes that Triton's blocks and matrix products can have."""
    return max(16, triton.next_power_of_2(size))


def launching(tensor: torch.Tensor):
    """Launch on the tensor's own GPU, which need not be the current one; interpreted, keep NumPy quiet about NaN."""
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    return np.errstate(invalid="ignore", over="ignore")


def positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """The kernels take the largest raw score of a row as the largest scaled one: true for a positive scale only."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


class InferenceOnly(torch.autograd.Function):
    """Marks a kernel's result so that a backward pass says there is none, instead of training on no gradient."""

    @staticmethod
    def forward(ctx, run, *tensors):
        return run(*tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("the Triton kernels are for inference and have no backward pass; use another backend")
