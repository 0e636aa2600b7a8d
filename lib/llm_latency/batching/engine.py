"""Many requests on one model: they join and leave between steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm_latency.arguments import check_count, check_token_id, check_token_ids
from llm_latency.batching.passes import Blocks, KernelPass, Pass, TransformersPass
from llm_latency.batching.request import Request, RequestRefused, Sampling, State
from llm_latency.batching.scheduler import Piece, Plan, Scheduler, SchedulerOptions
from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.sampling import check_end, probabilities, sample


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Size of the pool of blocks, and the scheduler's limits.

    Raises TypeError or ValueError for sizes below 1.
    """

    num_blocks: int = 512
    block_size: int = 16
    prefix_caching: bool = True
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)

    def __post_init__(self) -> None:
        check_count("num_blocks", self.num_blocks)
        check_count("block_size", self.block_size)


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token as it comes out of a step; `last` tells that its request is done."""

    request_id: int
    token_id: int
    last: bool


class BatchingEngine:
    """Runs a model over a paged cache: submit requests at any time, call `step` again and again.

    Each step is one forward pass over the tokens of all running requests, laid out in one flat row without padding:
    a token for each that decodes, a chunk for each whose prompt is being read. In the kernel a request's logits are to
    the bit those it gets when it runs alone. With a transformers model its tokens are the same in FP32, and in half
    precision the batch's size may tip a near tie, as it does in every server.

    Args:
        model: a `KernelDecoder`, whose pool of blocks the engine takes over; or a transformers decoder whose layers
            call its attention interface (Llama, Qwen2 and their like), no sliding window.
        options: their num_blocks and block_size must be those of the kernel's pool; None takes these.
        clock: seconds; tests put their own here.

    Attributes:
        cache: what a pass reads and writes, with its `manager` of blocks.
        done: requests by id that are finished, cancelled or failed. Whoever has read one may take it out.

    Raises:
        ValueError: RoPE whose factors depend on the longest text, since requests share passes and prefixes here; a pool
            of another size than the options'.
    """

    def __init__(
        self,
        model: PreTrainedModel | KernelDecoder,
        options: EngineOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        in_kernel = isinstance(model, KernelDecoder)
        self.options = options or (EngineOptions(num_blocks=model.kernel.blocks) if in_kernel else EngineOptions())
        sizes = self.options.num_blocks, self.options.block_size
        self.passes: Pass = (KernelPass if in_kernel else TransformersPass)(model, *sizes, self.options.prefix_caching)
        self.cache: Blocks = self.passes.cache
        self.clock = clock
        self.scheduler = Scheduler(self.cache.manager, self.options.scheduler)
        self.done: dict[int, Request] = {}
        self._live: dict[int, Request] = {}
        self._ids = itertools.count()  # of requests: never used again, though `done` may have been emptied

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
        sampling.check(self.passes.vocab_size)
        check_end(eos_token_id, self.passes.vocab_size)
        request = Request(
            id=next(self._ids),
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_id=eos_token_id,
            arrival_s=self.clock() if arrival_s is None else arrival_s,
        )
        if sampling.temperature > 0:
            request.generator = torch.Generator(self.passes.device).manual_seed(sampling.seed)
        self._live[request.id] = request
        self.scheduler.add(request)
        return request.id

    def check_request(self, input_ids: Sequence[int] | Tensor, max_new_tokens: int) -> tuple[int, ...]:
        """The prompt as a tuple, if this engine can serve it with so many new tokens. Raises as `submit`."""
        prompt = self._check_prompt(input_ids)
        check_count("max_new_tokens", max_new_tokens)
        needed, positions = len(prompt) + max_new_tokens, self.passes.max_positions
        if needed > positions:
            raise RequestRefused(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need {needed} positions; "
                f"this model has {positions}"
            )
        blocks = self.cache.manager.blocks_for(needed - 1)  # the last token is chosen, never stored
        if blocks > self.options.num_blocks:
            raise RequestRefused(f"{needed} tokens need {blocks} blocks; the whole pool has {self.options.num_blocks}")
        return prompt

    def cancel(self, request_id: int) -> bool:
        """Ends a request where it stands and returns its blocks; False if it was done already.

        Raises KeyError for an unknown id.
        """
        if request_id in self.done:
            return False
        if request_id not in self._live:
            raise KeyError(f"no request {request_id!r} is under way or in `done`")
        self._end(self._live[request_id], State.CANCELLED)
        return True

    @property
    def busy(self) -> bool:
        """Whether any request is under way."""
        return bool(self._live)

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """One forward pass; the tokens that came out of it, at most one per request.

        A step that raises, or is interrupted, ends the running requests as failed; those that wait stay.
        """
        try:
            return self._step()
        except BaseException as error:
            # Slots are reserved, but nobody knows what lies in them: nothing of this step may be used again.
            for request in self.scheduler.running.copy():
                self._end(request, State.FAILED, f"{type(error).__name__}: {error}")
            raise

    def _step(self) -> list[NewToken]:
        plan = self.scheduler.schedule()
        if not plan.pieces:
            return []
        logits = self._forward(plan)  # [ends, vocab]
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
        vocab_size = self.passes.vocab_size
        if isinstance(input_ids, Tensor):
            return tuple(check_token_ids(input_ids, vocab_size, flat=True)[0].tolist())
        if not input_ids:
            raise ValueError("input_ids is empty; expected at least one prompt token")
        return tuple(check_token_id(token, vocab_size) for token in input_ids)

    def _forward(self, plan: Plan) -> Tensor:
        """Logits [ends, vocab] behind the last known token of each request that has got there."""
        return self.passes.read(plan)

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
