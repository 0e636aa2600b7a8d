"""The beginning that many prompts share, read once: its keys and values stay in the first slots of the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.arguments import check_step_ids
from llm_latency.engine.fast_decoder import FastDecoder
from llm_latency.generation import Stepper


class PrefixCaching(Stepper):
    """In front of a decoder with `_advance`: after `keep_prefix`, a prompt that begins with it is read from there on.

    A prompt that begins otherwise is read whole, over the prefix, which is then read anew when next wanted.
    """

    _prefix: Tensor | None = None  # ids [1, n]
    _prefix_features: Tensor | None = None  # [n, hidden]; None: the prefix's slots were written over

    @torch.inference_mode()
    def keep_prefix(self, input_ids: Tensor) -> None:
        """Read ids [1, n] once and for all."""
        super().prefill(input_ids)
        self._prefix, self._prefix_features = input_ids.to(self.device, copy=True), self.features.clone()

    @property
    def prefix_tokens(self) -> int:
        return 0 if self._prefix is None else self._prefix.shape[1]

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        check_step_ids(input_ids)
        if not self._begins_with_prefix(input_ids):
            self._prefix_features = None
            return super().prefill(input_ids)
        if self._prefix_features is None:
            self.keep_prefix(self._prefix)
        self.length = self.prefix_tokens
        logits = self._advance(input_ids[:, self.length :], last_only=True)
        self.features = torch.cat((self._prefix_features, self.features))  # [n, hidden], as if all had been read now
        return logits

    def score(self, input_ids: Tensor) -> Tensor:
        self._prefix_features = None
        return super().score(input_ids)

    def crop_to(self, length: int) -> None:
        super().crop_to(length)
        if length < self.prefix_tokens:
            self._prefix_features = None  # the next step will write over its slots

    def _begins_with_prefix(self, input_ids: Tensor) -> bool:
        """Whether a prompt [1, n] begins with the kept prefix and goes on behind it."""
        kept = self.prefix_tokens
        return 0 < kept < input_ids.shape[1] and torch.equal(input_ids[:, :kept].to(self.device), self._prefix)


class PrefixDecoder(PrefixCaching, FastDecoder):
    """A FastDecoder that keeps a prefix."""
