"""Many requests on one model: they join and leave between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm_latency.batching.paged_attention import make_batch, paged_model
from llm_latency.batching.request import Request, RequestRefused, Sampling, State
from llm_latency.batching.scheduler import Piece, Plan, Scheduler, SchedulerOptions
from llm_latency.kv_cache.paged import PagedKVCache
from llm_latency.sampling import check_end, probabilities, sample


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Size of the page pool, and the scheduler's limits.

    Raises ValueError for sizes below 1.
    """

    num_pages: int = 512
    page_size: int = 16
    prefix_caching: bool = True
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)

    def __post_init__(self) -> None:
        if self.num_pages < 1 or self.page_size < 1:
            raise ValueError(f"num_pages={self.num_pages} and page_size={self.page_size} must be at least 1")


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token as it comes out of a step; `last` tells that its request is done."""

    request_id: int
    token_id: int
    last: bool


class BatchingEngine:
    """Runs a transformers model over a paged cache: submit requests at any time, call `step` again and again.

    Each step is one forward pass over the tokens of all running requests, laid out in one flat row without padding:
    a token for each that decodes, a chunk for each whose prompt is being read. In FP32 a request's tokens are those it
    gets when it runs alone; in half precision the batch's size may tip a near tie, as it does in every server.

    Args:
        model: a decoder whose layers call transformers' attention interface (Llama, Qwen2 and their like), no sliding
            window.
        clock: seconds; tests put their own here.

    Attributes:
        done: requests by id that are finished, cancelled or failed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: EngineOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model = model
        self.options = options or EngineOptions()
        self.clock = clock
        self.cache = PagedKVCache(
            model.config,
            num_pages=self.options.num_pages,
            page_size=self.options.page_size,
            dtype=model.dtype,
            device=model.device,
            prefix_caching=self.options.prefix_caching,
        )
        self.scheduler = Scheduler(self.cache.manager, self.options.scheduler)
        self.done: dict[int, Request] = {}
        self._live: dict[int, Request] = {}

    def submit(
        self,
        input_ids: Sequence[int] | Tensor,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        eos_token_id: int | None = None,
        arrival_s: float | None = None,
    ) -> int:
        """Queues a request and returns its id.

        Args:
            input_ids: prompt ids, a list or a tensor [n] or [1, n].
            arrival_s: when it came, on the engine's clock; now if not given.

        Raises:
            RequestRefused: more tokens than the pool or the model's positions hold.
            ValueError, TypeError: an empty prompt, ids outside the vocabulary, max_new_tokens below 1.
        """
        prompt = self.check_request(input_ids, max_new_tokens)
        sampling = sampling or Sampling()
        sampling.check(self.model.config.vocab_size)
        check_end(eos_token_id, self.model.config.vocab_size)
        request = Request(
            id=len(self.done) + len(self._live),
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_id=eos_token_id,
            arrival_s=self.clock() if arrival_s is None else arrival_s,
        )
        if sampling.temperature > 0:
            request.generator = torch.Generator(self.model.device).manual_seed(sampling.seed)
        self._live[request.id] = request
        self.scheduler.add(request)
        return request.id

    def check_request(self, input_ids: Sequence[int] | Tensor, max_new_tokens: int) -> tuple[int, ...]:
        """The prompt as a tuple, if this engine can serve it with so many new tokens. Raises as `submit`."""
        prompt = self._check_prompt(input_ids)
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
            raise TypeError(f"max_new_tokens={max_new_tokens!r}; expected an int")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}; expected at least 1")
        needed, positions = len(prompt) + max_new_tokens, self.model.config.max_position_embeddings
        if needed > positions:
            raise RequestRefused(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need {needed} positions; "
                f"this model has {positions}"
            )
        pages = self.cache.manager.pages_for(needed - 1)  # the last token is chosen, never stored
        if pages > self.options.num_pages:
            raise RequestRefused(f"{needed} tokens need {pages} pages; the whole pool has {self.options.num_pages}")
        return prompt

    def cancel(self, request_id: int) -> bool:
        """Ends a request where it stands and returns its pages; False if it was done already.

        Raises KeyError for an unknown id.
        """
        if request_id in self.done:
            return False
        if request_id not in self._live:
            raise KeyError(f"no request {request_id}; ids so far go to {len(self.done) + len(self._live) - 1}")
        self._end(self._live[request_id], State.CANCELLED)
        return True

    @property
    def busy(self) -> bool:
        """Whether any request is under way."""
        return bool(self._live)

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """One forward pass; the tokens that came out of it, at most one per request.

        A pass that raises, or is interrupted, ends the requests that were in it as failed; those that wait stay.
        """
        plan = self.scheduler.schedule()
        if not plan.pieces:
            return []
        try:
            logits = self._forward(plan)  # [ends, vocab]
        except BaseException as error:
            # Their slots are reserved, but nobody knows what lies in them: nothing of this step may be used again.
            for piece in plan.pieces:
                self._end(piece.request, State.FAILED, f"{type(error).__name__}: {error}")
            raise
        ending = self._commit(plan.pieces)
        chosen = self._choose(logits.float(), ending)
        now = self.clock()
        new = []
        for request, token in zip(ending, chosen, strict=True):
            if token is None:
                self._end(request, State.FAILED, "the logits hold NaN or infinity", now)
                continue
            request.generated.append(token)
            request.token_times_s.append(now)
            if not request.wanted:
                self._end(request, State.FINISHED, None, now)
            new.append(NewToken(request.id, token, last=not request.wanted))
        return new

    def run(self) -> dict[int, Request]:
        """Steps until nobody waits or runs; returns `done`."""
        while self.busy:
            self.step()
        return self.done

    def _check_prompt(self, input_ids: Sequence[int] | Tensor) -> tuple[int, ...]:
        if isinstance(input_ids, Tensor):
            if input_ids.dim() == 2 and input_ids.shape[0] == 1:
                input_ids = input_ids[0]
            if input_ids.dim() != 1:
                raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [n] or [1, n], one request")
            input_ids = input_ids.tolist()
        prompt = tuple(input_ids)
        if not prompt:
            raise ValueError("input_ids is empty; expected at least one prompt token")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"input_ids holds {token!r}; expected integers")
            if not 0 <= token < self.model.config.vocab_size:
                raise ValueError(f"input_ids holds {token}; expected 0 to {self.model.config.vocab_size - 1}")
        return prompt

    def _forward(self, plan: Plan) -> Tensor:
        """Logits [ends, vocab] behind the last known token of each request that has got there."""
        batch = make_batch(self.cache, plan)
        with paged_model(self.model):
            return self.model(
                input_ids=batch.token_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.ends,
                paged_batch=batch,
            ).logits[0]

    def _commit(self, pieces: Iterable[Piece]) -> list[Request]:
        """Notes what is stored now; returns the requests whose last known token was read, in order of their rows."""
        ending = []
        for piece in pieces:
            self.cache.manager.commit(piece.request.id)
            piece.request.stored += piece.count
            if piece.request.to_compute == 0:
                ending.append(piece.request)
        return ending

    def _choose(self, logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """The next token of each row of logits [rows, vocab]; None where the largest is NaN or infinite."""
        if not requests:
            return []
        best, greedy = logits.max(dim=-1)  # NaN is larger than anything to max
        broken = ~torch.isfinite(best)
        chosen: list[int | None] = []
        for row, (request, token, bad) in enumerate(zip(requests, greedy.tolist(), broken.tolist(), strict=True)):
            if bad:
                chosen.append(None)
            elif request.generator is None:
                chosen.append(token)
            else:
                s = request.sampling
                probs = probabilities(logits[row : row + 1], s.temperature, s.top_k, s.top_p)
                chosen.append(int(sample(probs, request.generator)))
        return chosen

    def _end(self, request: Request, state: State, error: str | None = None, now: float | None = None) -> None:
        self.scheduler.remove(request)
        request.state, request.error = state, error
        request.end_s = self.clock() if now is None else now
        self.done[request.id] = self._live.pop(request.id)
