"""`attend`: one call for every attention backend. `cannot`: why a backend cannot do a request.

`backend_facts` asks the machine what it has: `triton_problem` gives the reason why Triton cannot run, or None;
`flash_attn_function` gives the installed package's function and its name, or None and the reason why there is none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llm_latency.attention.backend_facts import BACKENDS, flash_attn_function, triton_problem
from llm_latency.attention.checks import check_request
from llm_latency.attention.flash import FlashAttention
from llm_latency.attention.reference import attention_reference, broadcast_mask, visible_pairs

_blocked = FlashAttention()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str = "auto",
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention by the named backend; for the other arguments and the result see `attention_reference`.

    All backends behave alike: causal aligns the last query with the last key, a row that may attend to nothing is
    zeros, and a masked key has no effect, whatever its value.

    backend:
        "auto": flash-attn if it is installed and can do this request, else SDPA (`cannot("flash_attn", q, mask=mask)`
            says why).
        "reference": the whole score matrix, in FP32. "flash": the blocked module in plain PyTorch.
        "triton": our kernels; on a machine without CUDA, interpreted on the CPU: correct, but very slow.
        "sdpa": PyTorch's scaled_dot_product_attention, which picks among its own kernels.
        "flash_attn": the flash-attn package.

    Raises:
        ValueError: an unknown backend, one that is not available here, or one that cannot do this request.
        TypeError, ValueError: as `attention_reference`.
    """
    scale = check_request(q, k, v, causal, mask, scale)  # None becomes 1 / sqrt(head_dim)
    if backend == "auto":
        backend = "sdpa" if cannot("flash_attn", q, mask=mask) else "flash_attn"
    elif problem := cannot(backend, q, mask=mask):
        raise ValueError(f"backend {backend!r} cannot do this request: {problem}")
    if backend == "reference":
        return attention_reference(q, k, v, causal=causal, mask=mask, scale=scale)
    if backend == "flash":
        return _blocked(q, k, v, causal=causal, mask=mask, scale=scale)
    if backend == "triton":
        return _triton(q, k, v, causal, mask, scale)
    run = _sdpa if backend == "sdpa" else _flash_attn
    out = run(q, k, v, causal, mask, scale)
    # Both let NaN and infinities leak out of masked keys (0 * NaN is NaN; so is NaN + -inf). That is rare and shows in
    # the output, so we look there, and let the blocked module compute such a request again.
    if (causal or mask is not None) and not bool(out.isfinite().all()):
        return _blocked(q, k, v, causal=causal, mask=mask, scale=scale)
    return out


def cannot(backend: str, q: Tensor, *, mask: Tensor | None = None) -> str | None:
    """Why a backend cannot attend with these queries on this machine; None if it can. ValueError: an unknown name."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    head_dim = q.shape[-1]
    if backend == "triton":
        if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"the kernels take float32, float16 or bfloat16; the tensors are {q.dtype}"
        if head_dim > 256:
            return f"the kernels take a head_dim of up to 256; it is {head_dim}"
        problem = triton_problem(q.device)
        if problem is None and q.is_cuda and q.dtype == torch.bfloat16:
            major, minor = torch.cuda.get_device_capability(q.device)
            if major < 8:
                return f"bfloat16 needs CUDA capability 8.0 or more; this device has {major}.{minor}"
        return problem
    if backend == "flash_attn":
        function, reason = flash_attn_function()
        if function is None:
            return reason
        if not q.is_cuda:
            return f"it takes CUDA tensors; these are on {q.device}"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"it takes float16 or bfloat16; the tensors are {q.dtype}"
        if mask is not None:
            return "it takes no boolean mask"
        major, minor = torch.cuda.get_device_capability(q.device)
        if major < 8:
            return f"it needs CUDA capability 8.0 or more; this device has {major}.{minor}"
        if head_dim > 256 or head_dim % 8:
            return f"it takes a head_dim of up to 256 that is a multiple of 8; it is {head_dim}"
    return None


def _triton(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    # Imported at the first use: the kernels need Triton, and the interpreter must be chosen before it is imported.
    from llm_latency.attention.triton_block import InferenceOnly
    from llm_latency.attention.triton_decode import MAX_ROWS, decode
    from llm_latency.attention.triton_prefill import prefill

    # The prefill kernel shares the queries among programs, the decode kernel the cache. Up to MAX_ROWS = 64 rows
    # (queries times heads per KV head) are too few to fill a GPU with; without a cache there is nothing to split.
    rows = q.shape[1] * (q.shape[2] // k.shape[2])
    kernel = decode if rows <= MAX_ROWS and q.shape[1] < k.shape[1] else prefill
    # In training, raise at the backward pass, instead of passing on no gradient.
    return InferenceOnly.apply(lambda q, k, v: kernel(q, k, v, causal, mask, scale), q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    seq_q, seq_k, heads, kv_heads = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    if q.numel() == 0 or seq_k == 0:
        return torch.zeros_like(q)
    # SDPA's is_causal aligns top-left: it may be used only where both alignments are the same.
    is_causal = causal and mask is None and seq_q == seq_k
    allowed = mask if is_causal or seq_q == 1 else visible_pairs(q, k, causal, mask)  # a lone query sees every key
    if allowed is not None:
        allowed = broadcast_mask(allowed, q, k)  # [batch, heads, seq_q, seq_k]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, seq, head_dim]
    grouped = heads != kv_heads
    if grouped and allowed is not None and q.is_cuda:
        # With a mask, only SDPA's slowest kernel takes grouped heads on CUDA, and it stores all the scores.
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    if allowed is not None:  # what SDPA gives for a row without keys is not defined
        out = out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    return out.transpose(1, 2)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    if q.numel() == 0 or k.shape[1] == 0:
        return torch.zeros_like(q)
    function, _ = flash_attn_function()
    # The package wants the last dimension contiguous; since release 2.1 its causal aligns as ours does.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = function(q, k, v, softmax_scale=scale, causal=causal)
    return out[0] if isinstance(out, tuple) else out  # the CuTe release also returns the log of the sums
