"""transformers models as steppers: without a cache, with one that grows, with one of fixed size, and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from llm_latency.arguments import check_count
from llm_latency.compat import with_cache
from llm_latency.generation.loop import Stepper

SCORE_CHUNK = 64  # tokens per pass when a text is scored through a cache


class TransformersStepper(Stepper):
    """A transformers model decoding through one of its caches.

    make_cache: a function without arguments that returns a fresh Cache for each request; None means DynamicCache.
    """

    def __init__(self, model: PreTrainedModel, make_cache: Callable[[], Cache] | None = None):
        self.model = model
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        self.max_positions = model.config.max_position_embeddings
        self.make_cache = make_cache or (lambda: DynamicCache(config=model.config))
        self.cache: Cache | None = None
        self._keeps_features = False

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        self._forget()
        # Only the last position's logits are wanted: the head of 49k rows over 256 positions would be wasted work.
        return self._forward(input_ids, logits_to_keep=1)[:, -1]  # [1, vocab]

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> Tensor:
        if self.length == 0:
            raise RuntimeError("step() before prefill(): there is no request to continue")
        return self._forward(token_ids)  # [1, k, vocab]

    @torch.inference_mode()
    def score(self, input_ids: Tensor) -> Tensor:
        self._forget()
        return torch.cat([self._forward(piece) for piece in input_ids.split(SCORE_CHUNK, dim=1)], dim=1)

    def crop_to(self, length: int) -> None:
        dropped = self.length - check_count("crop_to", length, 0, self.length)
        if dropped:
            self.cache.crop(-dropped)  # a number below 0 is what means the same to every release of transformers
        self.length = length

    def keep_features(self) -> None:
        self._keeps_features = True

    @property
    def step_bytes(self) -> int:
        """Every weight but an embedding table that is not the head as well: of that a step reads one row."""
        embedding = self.model.get_input_embeddings().weight
        tied = embedding is self.model.get_output_embeddings().weight
        return sum(parameter.nbytes for parameter in self.model.parameters()) - (0 if tied else embedding.nbytes)

    def _forget(self) -> None:
        self.cache, self.length = self.make_cache(), 0

    def _forward(self, input_ids: Tensor, **options: int) -> Tensor:
        """Read more tokens [1, k]: logits [1, k or `logits_to_keep`, vocab]."""

        def note(module, arguments, output) -> None:
            self.features = output.last_hidden_state[0]  # [k, hidden]

        # A hook, because the model's own answer leaves them out.
        watch = self.model.base_model.register_forward_hook(note) if self._keeps_features else contextlib.nullcontext()
        with watch:
            output = self.model(input_ids=input_ids, use_cache=True, **with_cache(self.cache), **options)
        self.length += input_ids.shape[1]
        return output.logits


class RecomputeStepper(Stepper):
    """A transformers model without a KV cache: every token reads the whole text again. Rung 0 of the ladder."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        self.max_positions = model.config.max_position_embeddings
        self.ids: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.ids is None else self.ids.shape[1]

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        self.ids = input_ids
        return self.model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[:, -1]

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> Tensor:
        if self.ids is None:
            raise RuntimeError("step() before prefill(): there is no request to continue")
        self.ids = torch.cat([self.ids, token_ids], dim=1)
        return self.model(input_ids=self.ids, use_cache=False, logits_to_keep=token_ids.shape[1]).logits

    @torch.inference_mode()
    def score(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits

    def crop_to(self, length: int) -> None:
        check_count("crop_to", length, 0, self.length)
        self.ids = None if length == 0 else self.ids[:, :length]


class StaticStepper(TransformersStepper):
    """A transformers model decoding through one StaticCache that serves every request.

    A cache that grows changes a tensor's shape at every token, and a compiled kernel is made for one shape. So this one
    is allocated once, at its largest, and a mask hides what is not filled yet. Every step's attention reads all of its
    `max_tokens` slots, prompt and answer together, filled or not: more than needed costs time.

    Raises TypeError or ValueError for max_tokens below 1 or beyond the model's positions.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int = 512):
        super().__init__(model)
        self.max_positions = check_count("max_tokens", max_tokens, 1, self.max_positions)
        self.cache = StaticCache(config=model.config, max_cache_len=max_tokens)

    def _forget(self) -> None:
        # The same tensors serve again: compiled code and CUDA graphs are bound to their addresses.
        self.cache.reset()
        self.length = 0

    def _forward(self, input_ids: Tensor, **options: int) -> Tensor:
        self._check_room(input_ids)
        return super()._forward(input_ids, **options)

    def _check_room(self, input_ids: Tensor) -> None:
        # Writing past the end is an IndexError on a CPU and a lost CUDA context on a GPU: ask first.
        wanted = self.length + input_ids.shape[1]
        if wanted > self.max_positions:
            raise ValueError(f"{wanted} tokens do not fit the static cache of max_tokens={self.max_positions}")


class CompiledStepper(StaticStepper):
    """The same, with the step of one token compiled; prefill and steps of several tokens run uncompiled.

    Each new shape would be compiled anew, and a prompt's length is a new shape with nearly every request. The first
    step of one token compiles, for some tens of seconds. On CUDA torch.compile also records the step's launches as one
    CUDA graph ("reduce-overhead"); on a CPU there are no launches to save.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int = 512):
        super().__init__(model, max_tokens)
        self.uses_graphs = self.device.type == "cuda"
        mode = "reduce-overhead" if self.uses_graphs else "default"
        # fullgraph: a break in the graph would quietly give back what compiling gains; let it be an error instead.
        self.compiled = torch.compile(model.forward, mode=mode, fullgraph=True, dynamic=False)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)

    def _forward(self, input_ids: Tensor, **options: int) -> Tensor:
        if self.length == 0 or input_ids.shape[1] > 1:
            return super()._forward(input_ids, **options)
        self._check_room(input_ids)
        # A piece of a longer tensor keeps that one's strides, which would count as a new shape: use one tensor always.
        self.token.copy_(input_ids)
        if self.uses_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        logits = self.compiled(input_ids=self.token, use_cache=True, **with_cache(self.cache)).logits  # [1, 1, vocab]
        self.length += 1
        # A CUDA graph writes its result to the same place at each replay: hand out a copy.
        return logits.clone() if self.uses_graphs else logits

    # One by one, slow as that is: a pass of 64 tokens would score the uncompiled model.
    score = Stepper.score

    # A hook would break the graph.
    keep_features = Stepper.keep_features


def as_stepper(model: PreTrainedModel | Stepper, make_cache: Callable[[], Cache] | None = None) -> Stepper:
    """The model itself if it is a stepper; a transformers model as one, with `make_cache` as in `TransformersStepper`.

    Raises TypeError for anything else.
    """
    if isinstance(model, Stepper):
        return model
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a transformers model, a FastDecoder or another `Stepper`"
        )
    return TransformersStepper(model, make_cache)
