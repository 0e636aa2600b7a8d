"""The attention backends on a GPU: compiled kernels instead of interpreted ones.

`make gpu` runs this on a real GPU. Plain pytest runs it on a pretend one, where Triton's kernels are interpreted again,
a program a millisecond: there the sizes are small.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from attention_oracle import assert_as_good_as_peer, tensors

from every_millisecond.notebook.memory import peak_extra_bytes
from llm_latency.attention import FlashAttention, attend, attention_reference, backends
from llm_latency.attention.dispatch import cannot

pytestmark = pytest.mark.cuda
HALF = [torch.float16, torch.bfloat16]


def cuda(*shapes, **sizes):
    """`tensors` on the GPU, strides kept."""
    return tuple(x.cuda() for x in tensors(*shapes, **sizes))


def kernel_runs(backend: str, q, mask=None) -> None:
    problem = cannot(backend, q, mask=mask)
    if problem:
        pytest.skip(f"{backend}: {problem}")


def test_this_gpu_has_every_backend_or_a_reason():
    """Guards against a capability guessed from a name instead of asked of the device."""
    q, k, v = cuda(dtype=torch.float16, head_dim=64)
    for backend, problem in backends().items():
        assert problem or attend(q, k, v, backend=backend).is_cuda
    assert attend(q, k, v).is_cuda


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            "triton", marks=pytest.mark.silicon("races, pipelining and tensor cores are the compiled kernel's")
        ),
        "sdpa",
        pytest.param("flash_attn", marks=pytest.mark.silicon("flash-attn has no kernel for anything else")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("seq_q, seq_k", [(1000, 1000), (37, 1037), (129, 65), (1, 4097), (5, 3000)])
def test_prefill_and_decode_as_good_as_the_peer(backend, dtype, head_dim, seq_q, seq_k, gpu):
    """Guards against anything that the interpreter cannot show: races, pipelining, tensor-core rounding."""
    if gpu and (seq_q == 1000 or head_dim > 80):
        pytest.skip("the large sizes test the numerics of CUDA's kernels, and the CPU's would answer")
    q, k, v = cuda(seq_q=seq_q, seq_k=seq_k, heads=8, kv_heads=2, head_dim=head_dim, dtype=dtype, batch=2)
    kernel_runs(backend, q)
    for causal in (False, True):
        assert_as_good_as_peer(attend(q, k, v, backend=backend, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.long if seed >= 24 else ()) for seed in range(60)]
)
def test_random_requests(seed, gpu):
    """Guards against a shape, mask or layout at which the compiled kernels differ from the interpreted ones.

    Drawn by hand: gpu-check needs no hypothesis.
    """
    draw = random.Random(seed)
    kv_heads = draw.randint(1, 3)
    seq_q, seq_k = draw.randint(0, 300), draw.randint(0, 400)
    q, k, v = cuda(
        batch=draw.randint(1, 3),
        seq_q=seq_q,
        seq_k=seq_k,
        heads=kv_heads * draw.randint(1, 4),
        kv_heads=kv_heads,
        head_dim=draw.choice([8, 40, 64, 72, 128]),
        dtype=draw.choice([torch.float32, *HALF]),
        layout=draw.choice(["plain", "heads first", "every second", "slice", "expanded"]),
        seed=seed,
    )
    mask = None
    if draw.random() < 0.5:
        full = (q.shape[0], q.shape[2], seq_q, seq_k)
        shape = [n if draw.random() < 0.5 else 1 for n in full]
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).cuda() < 0.7
    arguments = dict(causal=draw.random() < 0.5, mask=mask)
    few = q.shape[0] * q.shape[2] * seq_q * seq_k < 20_000
    for backend in ("triton", "flash", "sdpa", "auto") if few or gpu is None else ("flash", "sdpa", "auto"):
        if backend == "auto" or cannot(backend, q, mask=mask) is None:
            assert_as_good_as_peer(attend(q, k, v, backend=backend, **arguments), q, k, v, **arguments)


@pytest.mark.parametrize("backend", ["flash", "triton", "sdpa"])
def test_rows_that_see_nothing_and_poison_in_masked_slots(backend, gpu):
    """Guards against NaN from an empty softmax, and from 0 * NaN in a tensor core.

    SDPA leaks NaN, and the blocked module then answers: equal to a rounding, not to the bit.
    """
    n = 70 if gpu and backend == "triton" else 200
    q, k, v = cuda(seq_q=n, seq_k=n, heads=4, kv_heads=2, head_dim=64, dtype=torch.float16)
    kernel_runs(backend, q)
    mask = torch.rand(n, n, generator=torch.Generator().manual_seed(7)).cuda() < 0.5
    mask[3] = False
    mask[:, [5, n - 50]] = False
    clean = attend(q, k, v, backend=backend, mask=mask)
    assert not clean[:, 3].any()
    for poison in (math.nan, math.inf, -math.inf):
        k[:, [5, n - 50]], v[:, [5, n - 50]] = poison, poison
        poisoned = attend(q, k, v, backend=backend, mask=mask)
        assert torch.allclose(poisoned, clean, rtol=0, atol=2e-3 if backend == "sdpa" else 0)
        assert torch.equal(attend(q[:, :1], k, v, backend=backend, mask=mask[:1]).isfinite(), clean[:, :1].isfinite())
    causal = attend(q, k, v, backend=backend, causal=True)
    assert causal[:, :5].isfinite().all()
    assert torch.equal(causal.isnan(), attention_reference(q, k, v, causal=True).isnan())


@pytest.mark.parametrize("backend", ["flash", "triton", "sdpa", "flash_attn"])
@pytest.mark.parametrize("seq_q", [1, 100])
def test_large_bf16_values_come_back_exactly(backend, seq_q):
    """Guards against the compiler fusing a subtraction into the scaling, which it may do on a GPU only."""
    full = torch.full((1, 100, 2, 64), 133120.0, dtype=torch.bfloat16, device="cuda")
    kernel_runs(backend, full)
    assert torch.equal(attend(full[:, :seq_q], full, full, backend=backend, causal=True), full[:, :seq_q])


def test_fp16_scores_beyond_65504_stay_finite():
    """Guards against scores kept in FP16."""
    q, k, v = cuda(head_dim=64, seq_q=50, seq_k=80, dtype=torch.float16)
    q, k = q.sign() * 60, k.sign() * 60
    truth = attention_reference(q.double(), k.double(), v.double(), scale=1.0)
    for backend in ("flash", "triton"):
        assert torch.allclose(attend(q, k, v, backend=backend, scale=1.0).double(), truth, atol=4e-3)


@pytest.mark.parametrize("splits", [1, 7, 64, None])
def test_a_long_cache_split_in_any_number(splits, gpu, monkeypatch):
    """Guards against splits that lose or repeat keys at 32k."""
    from llm_latency.attention import triton_decode

    keys = 700 if gpu else 32_768
    q, k, v = cuda(seq_q=1, seq_k=keys + 5, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    kernel_runs("triton", q)
    if splits is not None:
        monkeypatch.setattr(triton_decode, "choose_splits", lambda *sizes: splits)
    assert_as_good_as_peer(triton_decode.decode(q, k, v, True, None, 128**-0.5), q, k, v, causal=True)


def test_memory_grows_by_the_line(gpu):
    """Guards against a matrix of scores, which in FP32 takes n / 32 times the bytes of q."""
    n, heads = (512, 2) if gpu else (16_384, 8)
    q, k, v = cuda(seq_q=n, seq_k=n, heads=heads, kv_heads=heads, head_dim=64, dtype=torch.bfloat16)
    kernel_runs("triton", q)
    for backend in ("triton", "flash"):
        extra = peak_extra_bytes(lambda b=backend: attend(q, k, v, backend=b, causal=True), device="cuda")
        assert extra < 8 * q.nbytes, f"{backend}: {extra} bytes"


def test_wrong_device_is_named():
    """Guards against an illegal memory access where CPU tensors meet a compiled kernel."""
    q, k, v = tensors()
    with pytest.raises(ValueError, match="devices differ"):
        attend(q.cuda(), k, v)
    if cannot("triton", q):
        with pytest.raises(ValueError, match="TRITON_INTERPRET"):
            attend(q, k, v, backend="triton")


@pytest.mark.parametrize("implementation", ["llm_latency_flash", "llm_latency_triton"])
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param(dict(cache_implementation="static", disable_compile=True), marks=pytest.mark.long)],
    ids=str,
)
def test_greedy_ids_equal_eager(tiny_llama, implementation, options, gpu):
    """Guards against kernels that are right alone and wrong behind a model's layouts, masks and caches."""
    kernel_runs("triton", torch.zeros(1, 1, 1, 16, device="cuda"))
    model = tiny_llama.cuda()
    tokens, new = (14, 3) if gpu and implementation == "llm_latency_triton" else (40, 20)
    ids = torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(1)).cuda()
    attention_mask = torch.ones_like(ids)
    ids[0, :9], attention_mask[0, :9] = 2, 0
    found = {}
    for name in ("eager", implementation):
        model.set_attn_implementation(name)
        found[name] = model.generate(
            ids, attention_mask=attention_mask, max_new_tokens=new, do_sample=False, eos_token_id=None, **options
        )
    assert torch.equal(found["eager"], found[implementation])


def test_the_module_in_any_block_size(gpu):
    """Guards against block sizes that only work on the CPU."""
    seq_q, seq_k = (17, 40) if gpu else (77, 130)
    q, k, v = cuda(seq_q=seq_q, seq_k=seq_k, head_dim=72, dtype=torch.bfloat16)
    for block in (1, 33, 512):
        assert_as_good_as_peer(FlashAttention(block, block)(q, k, v, causal=True), q, k, v, causal=True)
