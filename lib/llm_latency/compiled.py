"""A transformers model over a cache of fixed size, and the same model's decode step compiled by torch.compile.

A cache that grows changes a tensor's shape at every token, and a compiled kernel is made for one shape. So the cache
is allocated once, at its largest; a mask hides what is not filled yet (`StaticCache` of transformers).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from llm_latency.compat import with_cache
from llm_latency.generation import SCORE_CHUNK


class StaticStepper:
    """A transformers model decoding through one StaticCache that serves every request.

    max_tokens: slots of the cache, prompt and answer together. Every step's attention reads all of them, filled or not,
    so more than needed costs time. Raises ValueError for max_tokens below 1 or beyond the model's positions.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int = 512):
        positions = model.config.max_position_embeddings
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not 1 <= max_tokens <= positions:
            raise ValueError(f"max_tokens={max_tokens!r}; expected a whole number from 1 to {positions}")
        self.model = model
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        self.max_positions = max_tokens
        self.cache = StaticCache(config=model.config, max_cache_len=max_tokens)
        self.length = 0  # tokens stored; 0 also means: no request yet

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        self._forget()
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

    def _forget(self) -> None:
        # The same tensors serve again: compiled code and CUDA graphs are bound to their addresses.
        self.cache.reset()
        self.length = 0

    def _forward(self, input_ids: Tensor, **options: int) -> Tensor:
        self._reserve(input_ids)
        return self.model(input_ids=input_ids, use_cache=True, **with_cache(self.cache), **options).logits

    def _reserve(self, input_ids: Tensor) -> None:
        # Writing past the end is an IndexError on a CPU and a lost CUDA context on a GPU: ask first.
        wanted = self.length + input_ids.shape[1]
        if wanted > self.max_positions:
            raise ValueError(f"{wanted} tokens do not fit the static cache of max_tokens={self.max_positions}")
        self.length = wanted


class CompiledStepper(StaticStepper):
    """The same, with the step of one token compiled; prefill and steps of several tokens run uncompiled.

    Each new shape would be compiled anew, and a prompt's length is a new shape with nearly every request. The first
    step of one token compiles, for some tens of seconds.

    mode: as in torch.compile. None takes "reduce-overhead" on CUDA, which also records the step's launches as one CUDA
    graph, and "default" on a CPU, where there are no launches to save.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int = 512, mode: str | None = None):
        super().__init__(model, max_tokens)
        on_gpu = self.device.type == "cuda"
        self.mode = mode or ("reduce-overhead" if on_gpu else "default")
        self.uses_graphs = on_gpu and self.mode in ("reduce-overhead", "max-autotune")
        # fullgraph: a break in the graph would quietly give back what compiling gains; let it be an error instead.
        self.compiled = torch.compile(model.forward, mode=self.mode, fullgraph=True, dynamic=False)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> Tensor:
        if self.length == 0:
            raise RuntimeError("step() before prefill(): there is no request to continue")
        return self._one(token_ids) if token_ids.shape[1] == 1 else self._forward(token_ids)

    @torch.inference_mode()
    def score(self, input_ids: Tensor) -> Tensor:
        # One by one, slow as that is: a pass of 64 tokens would score the uncompiled model.
        first = self.prefill(input_ids[:, :1])[:, None]  # [1, 1, vocab]
        return torch.cat([first, *(self._one(token) for token in input_ids[:, 1:].split(1, dim=1))], dim=1)

    def _one(self, token_ids: Tensor) -> Tensor:
        self._reserve(token_ids)
        # A piece of a longer tensor keeps that one's strides, which would count as a new shape: use one tensor always.
        self.token.copy_(token_ids)
        if self.uses_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        logits = self.compiled(input_ids=self.token, use_cache=True, **with_cache(self.cache)).logits  # [1, 1, vocab]
        # A CUDA graph writes its result to the same place at each replay: hand out a copy.
        return logits.clone() if self.uses_graphs else logits
