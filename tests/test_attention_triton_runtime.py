"""How Triton comes to run: in fresh processes, after torch.compile, and through the compiler for absent GPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from every_millisecond import doctor

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the kernels are compiled")

ATTEND = """
import torch
from llm_latency.attention import attend
q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 20, 1, 16)
for seq_q in (1, 3):
    for key in (k, k[:, :3]):
        out = attend(q[:, :seq_q], key, key, backend="triton", causal=True)
        truth = attend(q[:, :seq_q], key, key, backend="reference", causal=True)
        assert torch.allclose(out, truth, atol=1e-5)
print("right")
"""


def run(code: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@without_cuda
@pytest.mark.long
def test_a_fresh_process_interprets_without_being_told():
    """Guards against a learner who must know of TRITON_INTERPRET before the first import."""
    assert "right" in run(ATTEND)


@without_cuda
@pytest.mark.long
@pytest.mark.skipif(doctor.compile_unavailable() is not None, reason=f"compile: {doctor.compile_unavailable()}")
def test_triton_imported_earlier_and_compile_used_before_and_after():
    """Guards against tl.max fixed as a compiled function by an earlier import, and against breaking torch.compile."""
    compiled = """
import torch
import triton, triton.language as tl
assert type(tl.max).__name__ == "JITFunction"
double = torch.compile(lambda x: x * 2 + 1)
assert torch.equal(double(torch.ones(3)), torch.full((3,), 3.0))
"""
    after = """
half = torch.compile(lambda x: torch.softmax(x / 2, 0))
assert torch.allclose(half(torch.zeros(4)), torch.full((4,), 0.25))
print("still compiles")
"""
    assert "still compiles" in run(compiled + ATTEND + after)


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from llm_latency.attention import triton_decode, triton_prefill
from llm_latency.kv_cache import int8_triton

def compile(kernel, capability, dtype, **constants):
    pointers = {"Q": dtype, "K": dtype, "V": dtype, "Out": dtype, "Mask": "u8",
                "KeyWindow": dtype, "ValueWindow": dtype,
                "KeyCodes": "i8", "ValueCodes": "i8", "KeyScales": "bf16", "ValueScales": "bf16"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers or name.startswith("Part"):
            signature[name] = "*" + pointers.get(name, "fp32")
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
    source = ASTSource(kernel, signature, constexprs=constants)
    options = dict(num_warps=4, num_stages=2, enable_fp_fusion=True)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

common = dict(HEAD_DIM=96, BLOCK_D=128, UPCAST=False)
for capability, repair in ((80, True), (90, False)):
    kernel = compile(triton_prefill.prefill_kernel, capability, "bf16", CAUSAL=True, HAS_MASK=True, REPAIR=repair,
                     LENGTH_CLASS=1024, BLOCK_Q=64, BLOCK_K=32, **common)
    print(capability, "prefill", "mma" in kernel.asm["ptx"])
kernel = compile(triton_decode.split_kernel, 80, "fp16", CAUSAL=True, HAS_MASK=True, BLOCK_ROWS=16, BLOCK_K=64,
                 **common)
print(80, "split", "mma" in kernel.asm["ptx"])
for dtype in ("fp32", "fp16", "bf16"):
    kernel = compile(int8_triton.decode_kernel, 80, dtype, GROUP=64, ROWS=16, **common)
    print(80, "INT8 cache", dtype == "fp32" or "mma" in kernel.asm["ptx"])
compile(triton_decode.join_kernel, 80, "bf16", HEAD_DIM=96, BLOCK_D=128, BLOCK_ROWS=16, BLOCK_SPLITS=32)
print("all compiled")
"""


@pytest.mark.long
def test_the_compiler_accepts_the_kernels_for_a100_and_h100():
    """Guards against code that the interpreter runs and the compiler refuses; the compiler needs no GPU.

    It also asks that the products end in tensor-core instructions (mma).
    """
    output = run(COMPILE, TRITON_INTERPRET="0")
    assert "all compiled" in output and "False" not in output
