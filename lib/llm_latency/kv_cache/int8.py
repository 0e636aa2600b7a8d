"""`Int8KVCache`: a transformers cache in half the bytes of BF16, the newest tokens exact."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from llm_latency.arguments import check_count
from llm_latency.compat import head_dim
from llm_latency.kv_cache.stores import ChannelStore, TokenStore
from llm_latency.quantization.rounding import check_finite

ATTENTION_NAME = "int8_kv"  # the attn_implementation that reads the codes themselves; see `int8_attention`


class Int8CacheLayer(CacheLayerMixin):
    """One layer: a store of quantised keys, one of quantised values, and a window of exact tokens.

    `keys` and `values` [batch, kv_heads, window, head_dim] are the window, as in transformers' own quantised layers.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, config, residual_length: int, group_size: int, bits: int, key_scales: str):
        super().__init__()
        self.config = config
        self.heads, self.head_dim = config.num_key_value_heads, head_dim(config)
        self.residual_length = residual_length
        self.options = group_size, bits, key_scales
        self.reset()

    def reset(self) -> None:
        group_size, bits, key_scales = self.options
        by_channel = key_scales == "channel"
        self.key_store = ChannelStore(group_size=group_size, bits=bits) if by_channel else TokenStore(bits=bits)
        self.value_store = TokenStore(bits=bits)
        self.keys = self.values = None
        self.is_initialized = False
        self.mark: Tensor | None = None  # on a GPU: 0, or NaN if NaN or infinity came; see `Int8KVCache`

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states[:, :, :0].detach().clone()
        self.values = value_states[:, :, :0].detach().clone()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Store new tokens [batch, kv_heads, n, head_dim], return all tokens as they are now stored.

        The new tokens come back as the cache holds them, quantised where they do not fit the window: what a later step
        will read is what this step sees, in a prompt's first pass too. With the model's attn_implementation set to
        "int8_kv" this layer itself comes back, twice, instead of two full-precision tensors.
        """
        self.store(key_states, value_states)
        reads_codes = getattr(self.config, "_attn_implementation", None) == ATTENTION_NAME
        return (self, self) if reads_codes and isinstance(self.key_store, ChannelStore) else self.dequantize()

    def store(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store new tokens without reading anything back."""
        self._check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        leaving = self.keys.shape[-2] + key_states.shape[-2] - self.residual_length
        self.keys = _slide(self.keys, key_states.detach(), leaving, self.key_store)
        self.values = _slide(self.values, value_states.detach(), leaving, self.value_store)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """All keys and all values, [batch, kv_heads, length, head_dim] each, in the dtype they came in."""
        both = []
        for store, window in ((self.key_store, self.keys), (self.value_store, self.values)):
            batch, heads, newest, head_dim = window.shape
            out = window.new_empty(batch, heads, store.length + newest, head_dim)
            store.read_into(out[:, :, : store.length])
            out[:, :, store.length :] = window
            both.append(out)
        return both[0], both[1]

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = list(key_states.shape)
        if key_states.dim() != 4 or key_states.shape != value_states.shape:
            raise ValueError(
                f"keys have shape {shape}, values {list(value_states.shape)}; "
                "expected the same [batch, kv_heads, n, head_dim]"
            )
        if key_states.dtype != value_states.dtype:
            raise ValueError(f"keys are {key_states.dtype}, values {value_states.dtype}; expected the same dtype")
        heads, head_dim = self.heads, self.head_dim
        if shape[1] != heads or shape[3] != head_dim:
            raise ValueError(f"keys have {shape[1]} heads of {shape[3]}; this model has {heads} KV heads of {head_dim}")
        if self.is_initialized:
            if shape[0] != self.keys.shape[0]:
                raise ValueError(
                    f"a batch of {shape[0]} came to a cache that holds a batch of {self.keys.shape[0]}; "
                    "use batch_select_indices or batch_repeat_interleave to change it, or reset"
                )
            if key_states.dtype != self.dtype:
                raise ValueError(f"keys are {key_states.dtype}; this cache was begun with {self.dtype}")
        if key_states.is_cuda:  # 0 * NaN and 0 * infinity are NaN, and stay in a sum
            mark = key_states.detach().mul(0).add_(value_states.detach(), alpha=0).sum(dtype=torch.float32)
            self.mark = mark if self.mark is None else self.mark + mark
        else:
            check_finite(key_states, "key_states")
            check_finite(value_states, "value_states")

    @property
    def quantized(self) -> int:
        """Tokens that are codes."""
        return self.key_store.length

    def get_seq_length(self) -> int:
        return self.key_store.length + self.keys.shape[-2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1  # grows without bound

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; see `Int8KVCache.crop`."""
        count = tokens_to_crop(tokens_to_remove, self.get_seq_length())
        if count == 0:
            return
        from_window = min(count, self.keys.shape[-2])
        left = self.keys.shape[-2] - from_window
        self.keys, self.values = self.keys[:, :, :left].clone(), self.values[:, :, :left].clone()
        if count > from_window:
            self.key_store.drop(count - from_window)
            self.value_store.drop(count - from_window)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._for_each_row(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._for_each_row(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._for_each_row(lambda x: x[indices.to(x.device)])

    def _for_each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.key_store.for_each_row(change)
            self.value_store.for_each_row(change)

    @property
    def nbytes(self) -> int:
        window = self.keys.nbytes + self.values.nbytes if self.is_initialized else 0
        return self.key_store.nbytes + self.value_store.nbytes + window


def _slide(window: Tensor, new: Tensor, leaving: int, store: ChannelStore | TokenStore) -> Tensor:
    """Append new tokens to a window, put the `leaving` oldest of both into the store, and return the new window."""
    if leaving <= 0:
        return torch.cat([window, new], dim=-2)
    if leaving <= window.shape[-2]:
        store.append(window[:, :, :leaving])
        return torch.cat([window[:, :, leaving:], new], dim=-2)
    store.append(torch.cat([window, new[:, :, : leaving - window.shape[-2]]], dim=-2))
    # A copy: a view of the last few tokens would keep a whole prompt's keys alive.
    return new[:, :, leaving - window.shape[-2] :].clone()


class Int8KVCache(Cache):
    """A KV cache with one byte per number instead of two, for any Llama- or Qwen2-like model.

        model.generate(**inputs, cache=Int8KVCache(model.config))  # past_key_values= before transformers 5.20

    Keys are quantised per channel, in groups of `group_size` tokens, values per token: a few channels of the keys are
    many times larger than the others in every token, and a scale per token would be theirs alone (KIVI, Liu et al.
    2024; `stores` says more). Symmetric INT8 with BF16 scales. The newest `residual_length` tokens stay exact, always
    that many, however they arrived; `crop` may leave fewer until new ones come.

    config: the model's; its layers must all be full attention (a sliding window has nothing to save here).
    residual_length: exact tokens, 0 or more. A speculative decoder that rejects up to so many tokens leaves no trace.
    group_size: tokens that share a key channel's scale.
    bits, key_scales: 8 and "channel"; others are there for the experiment of notebook 07. Codes of fewer bits still
        take a byte each.

    Not for training: what is stored is detached. Not compilable as a whole: its length is a Python number.

    Raises TypeError or ValueError for an option out of range, ValueError for a configuration that does not fit, and on
    `update` ValueError for another batch size, head count, head size or dtype than before.

    NaN or infinity in keys or values is a ValueError too. On a CPU `update` raises it before anything is stored. A GPU
    would have to be waited for in every layer, so there each layer leaves a mark on the device; the marks are sent to
    the host whenever a length is asked for, as every forward pass does, and the first question after their arrival
    raises: a pass or two late. Until then what is read is NaN and never a number, since a group's scale is NaN as soon
    as one of its numbers is.
    """

    def __init__(
        self,
        config,
        residual_length: int = 32,
        *,
        group_size: int = 64,
        bits: int = 8,
        key_scales: Literal["channel", "token"] = "channel",
    ):
        config = config.get_text_config(decoder=True)
        check_config(config)
        check_count("residual_length", residual_length, least=0)
        check_count("group_size", group_size)
        if key_scales not in ("channel", "token"):
            raise ValueError(f"key_scales={key_scales!r}; expected 'channel' or 'token'")
        layers = range(config.num_hidden_layers)
        super().__init__([Int8CacheLayer(config, residual_length, group_size, bits, key_scales) for _ in layers])
        self._told: tuple[Tensor, Tensor] | None = None  # on a GPU: the sum of all marks, there and on the host

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self._look_at_marks()
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self._look_at_marks()
        return super().get_mask_sizes(query_length, layer_idx)

    def reset(self) -> None:
        super().reset()
        self._told = None

    @torch.inference_mode()
    def _look_at_marks(self) -> None:
        """Raise if the host has been told of NaN or infinity, and send it what is new. Waits for nothing."""
        if self._told is not None and self._told[1].isnan():
            raise ValueError("key_states or value_states of an earlier pass hold NaN or infinity")
        marked = [layer for layer in self.layers if layer.mark is not None]
        if not marked:
            return
        if self._told is None:
            self._told = torch.zeros_like(marked[0].mark), torch.zeros((), pin_memory=True)
        on_device, on_host = self._told
        # Layers may lie on several devices.
        on_device += torch.stack([layer.mark.to(on_device.device) for layer in marked]).sum()
        on_host.copy_(on_device, non_blocking=True)  # 0 stands there until NaN arrives, and NaN stays
        for layer in marked:
            layer.mark = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens: -n removes n, 0 nothing, as in transformers.

        Tokens cropped from the window, or from the group that is still open, leave no trace. A crop beyond them keeps
        the older tokens as they were read until now, and a group of keys that it cuts in half keeps its scales until
        new tokens join it.

        Raises ValueError for a positive number (once "keep so many", now refused by transformers too) and for more
        tokens than are stored, before anything is changed.
        """
        # A layer that nothing was ever written to has nothing to remove; transformers' layers take it so, too.
        written = [layer for layer in self.layers if layer.is_initialized]
        tokens_to_crop(tokens_to_remove, min((layer.get_seq_length() for layer in written), default=0))
        for layer in written:
            layer.crop(tokens_to_remove)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers: codes, scales, the window, and the open group's exact keys."""
        return sum(layer.nbytes for layer in self.layers)


def tokens_to_crop(tokens_to_remove: int, stored: int) -> int:
    """How many tokens `crop(tokens_to_remove)` takes from `stored` ones. Raises as `Int8KVCache.crop` says."""
    try:
        if isinstance(tokens_to_remove, bool):
            raise TypeError
        tokens_to_remove = operator.index(tokens_to_remove)  # assisted generation hands over an integer tensor
    except TypeError:
        raise TypeError(f"crop({tokens_to_remove!r}); expected an int") from None
    if tokens_to_remove > 0:
        raise ValueError(f"crop({tokens_to_remove}); expected a negative number: crop(-n) removes the n newest tokens")
    if -tokens_to_remove > stored:
        raise ValueError(f"crop({tokens_to_remove}) from a cache that holds {stored} tokens")
    return -tokens_to_remove


def check_config(config) -> None:
    """Raise ValueError, naming the numbers, unless config is a plain full-attention decoder with fitting heads."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        raise ValueError(f"hidden_size={config.hidden_size} is no multiple of num_attention_heads={heads}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"layer types {sorted(kinds)}; this cache knows full_attention only")
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
        raise ValueError(f"sliding_window={config.sliding_window}; this cache knows full attention only")
