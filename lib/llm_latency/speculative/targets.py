"""What speculation asks of a model: read several tokens at once, and forget the last ones again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from llm_latency.generation import TransformersStepper


@runtime_checkable
class Reader(Protocol):
    """A stepper that can take tokens back. The fast decoder is one as it stands; a transformers model becomes one.

    length: tokens stored. features: the hidden states after the final norm [k, hidden] of the last call's k tokens (of
    the whole prompt after `prefill`), which a conditioned draft reads.
    """

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_positions: int
    length: int

    def prefill(self, input_ids: Tensor) -> Tensor:
        """Forget everything, read input_ids [1, n], return the last position's logits [1, vocab]."""

    def step(self, token_ids: Tensor) -> Tensor:
        """Read k more tokens [1, k], return the logits after each [1, k, vocab]."""

    def crop_to(self, length: int) -> None:
        """Forget every token after the first `length`."""


def column_ids(reader: Reader) -> Tensor | None:
    """The ids that the columns of its logits stand for, int64 [n]; None if column i is id i.

    A FastDecoder made with `head_ids` has a head of few rows: right for a draft, too little for a target.
    """
    return getattr(getattr(reader, "options", None), "head_ids", None)


def as_reader(model) -> Reader:
    """The model itself if it is a Reader, a transformers model wrapped; TypeError for anything else."""
    if isinstance(model, PreTrainedModel):
        return CroppableStepper(model)
    # Not isinstance(model, Reader): that would ask for `features`, which only a conditioned draft needs.
    missing = [name for name in ("prefill", "step", "crop_to", *SIZES) if not hasattr(model, name)]
    if missing:
        raise TypeError(
            f"{type(model).__name__} lacks {', '.join(missing)}; expected a transformers model, a FastDecoder, or "
            "anything else with prefill, step and crop_to"
        )
    return model


SIZES = ("length", "vocab_size", "max_positions", "device")


class CroppableStepper(TransformersStepper):
    """A transformers model that decodes through a cache and can take tokens back.

    make_cache: as for `TransformersStepper`, of a kind whose `crop` is exact. By default a DynamicCache that keeps
    every token even of a model with a sliding window: what the window has dropped could not be brought back.
    keep_features: also keep the final hidden states of each call.
    """

    def __init__(
        self, model: PreTrainedModel, make_cache: Callable[[], Cache] | None = None, *, keep_features: bool = False
    ) -> None:
        super().__init__(model, make_cache or DynamicCache)
        self.dtype = model.dtype
        self.keep_features = keep_features
        self.features: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens stored."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    def prefill(self, input_ids: Tensor) -> Tensor:
        with self._watched():
            return super().prefill(input_ids)

    def step(self, token_ids: Tensor) -> Tensor:
        with self._watched():
            return super().step(token_ids)

    def crop_to(self, length: int) -> None:
        stored = self.length
        if not isinstance(length, int) or isinstance(length, bool):
            raise TypeError(f"crop_to({length!r}); expected an int")
        if not 0 <= length <= stored:
            raise ValueError(f"cannot crop to {length} tokens; {stored} are stored")
        # crop(-n) with n > 0 is the one call that means the same in every release of transformers.
        if length < stored:
            self.cache.crop(length - stored)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Keep the features of the calls inside. A hook, because the model's own answer leaves them out."""
        if not self.keep_features:
            yield
            return

        def keep(module, arguments, output) -> None:
            self.features = output.last_hidden_state[0]  # [k, hidden]

        handle = self.model.base_model.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()
