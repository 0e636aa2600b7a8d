"""Our attention inside transformers: `attn_implementation="llm_latency_flash"` and `"llm_latency_triton"`.

Importing this registers both, and `register` takes others, such as the INT8 cache's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from llm_latency.attention.dispatch import attend

IMPLEMENTATIONS = {"llm_latency_flash": "flash", "llm_latency_triton": "triton"}


def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs,
) -> Tensor | None:
    """The mask for one forward pass: None where plain bottom-right causality says it all, else bool.

    The signature is transformers' own. attention_mask is the padding, bool [batch, kv_length or less]. A static cache
    hands over all its slots, filled or not, so its masks are always spelt out. Returns None or [batch, 1, q, kv].
    """
    plain = (
        allow_is_causal_skip
        and mask_function is causal_mask_function
        and isinstance(q_offset, int)
        and kv_offset + kv_length == q_offset + q_length
        and (attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())))
    )
    if plain:
        return None
    kwargs.pop("allow_is_bidirectional_skip", None)  # None must mean one thing only
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )


def attention_forward(backend: str) -> Callable:
    """The function that transformers calls in every layer, for one of our backends."""

    # A graph break, on purpose: the block loops and checks ask for sizes and values that a traced graph does not have.
    @torch.compiler.disable
    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        # query [batch, heads, seq_q, head_dim]; key, value [batch, kv_heads, seq_k, head_dim]
        for name in ("softcap", "position_bias", "s_aux", "output_attentions"):
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"this attention has no {name}; load the model with attn_implementation='eager'")
        if dropout:
            raise ValueError(f"dropout={dropout}: this attention is for inference; call model.eval()")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            backend=backend,
            causal=bool(causal) and attention_mask is None,  # a mask that is given holds causality already
            mask=attention_mask,
            scale=scaling,
        )
        return out, None  # [batch, seq_q, heads, head_dim]

    return forward


def register(name: str, forward: Callable, mask: Callable) -> None:
    """Make an attention known to transformers by a name, with the function that builds its masks.

    Without the second, transformers hands over no mask at all, and padding and causality of a chunk after a cache are
    lost without a word.
    """
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)


def _spare_our_names(lazy_import: Callable) -> Callable:
    """transformers takes any name with "flash" in it for the flash-attn package, and loads that: not for our names."""

    def load(implementation: str | None, *args, **kwargs):
        return None if implementation in IMPLEMENTATIONS else lazy_import(implementation, *args, **kwargs)

    return load


for _name, _backend in IMPLEMENTATIONS.items():
    register(_name, attention_forward(_backend), build_mask)
_lazy_import = getattr(modeling_utils, "lazy_import_flash_attention", None)
if _lazy_import is not None and _lazy_import.__module__ != __name__:  # ours already, where this module is reloaded
    modeling_utils.lazy_import_flash_attention = _spare_our_names(_lazy_import)
