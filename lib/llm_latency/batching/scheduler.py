"""Which requests run in the next step, and with how many tokens each.

Continuous batching (Orca, Yu et al. 2022, OSDI): the batch is put together anew before every step, so that a request
joins as soon as there is room and leaves the moment it is done. Chunked prefill (Sarathi, Agrawal et al. 2023,
arXiv 2308.16369): a long prompt is read in pieces between the others' decode steps, so that it delays them by a bounded
time.

Of a `Request`, `tokens` are its prompt and answer so far, `stored` says how many of them the KV cache holds, and
`to_compute` how many it does not: while decoding, the newest token alone; before that, what remains to be read of the
prompt (after a preemption, of prompt and answer).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from llm_latency.arguments import check_count
from llm_latency.batching.request import Request, State
from llm_latency.kv_cache.block_manager import BlockManager, OutOfBlocks, Reservation


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits of one step.

    Args:
        max_running: requests in a step.
        token_budget: tokens in a step, decode and prefill together; it bounds the duration of a step, and with it the
            time per output token of every request.

    Raises TypeError or ValueError for limits below 1, or a budget below max_running.
    """

    max_running: int = 16
    token_budget: int = 256

    def __post_init__(self) -> None:
        check_count("max_running", self.max_running)
        if check_count("token_budget", self.token_budget) < self.max_running:
            raise ValueError(
                f"token_budget={self.token_budget} cannot give each of max_running={self.max_running} requests a token"
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` tokens of a request, from position `start` on, to be computed in this step."""

    request: Request
    start: int
    count: int


@dataclass(slots=True)
class Plan:
    """One step: pieces of one token (decode), pieces of prompts (prefill), and what the block pool must do before."""

    decodes: list[Piece] = field(default_factory=list)
    prefills: list[Piece] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)

    @property
    def pieces(self) -> list[Piece]:
        return [*self.decodes, *self.prefills]


class Scheduler:
    """Waiting, running and preempted requests over one pool of blocks; first come, first served.

    When no block is free, the newest running request is preempted: it gives its blocks back and waits at the front of
    the queue. Its tokens are kept, and its blocks are often still in the prefix cache when it comes back. The oldest is
    never preempted for a newer one, and the engine refuses a request larger than the pool: every step makes progress.
    """

    def __init__(self, manager: BlockManager, options: SchedulerOptions):
        self.manager = manager
        self.options = options
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, waiting or running; its blocks return to the pool."""
        if request in self.running:
            self.running.remove(request)
            self.manager.free(request.id)
        else:
            self.waiting.remove(request)

    def schedule(self) -> Plan:
        """Put the next step together and reserve its blocks: decodes first, then started prompts, then new requests."""
        preempted = False
        while True:
            plan = Plan()
            preempted |= self._plan_decodes(plan)
            budget = self.options.token_budget - len(plan.decodes)
            budget = self._plan_prefills(plan, budget)
            if not preempted:  # else the preempted request would be the first to come back
                self._admit(plan, budget)
            if plan.pieces or not self.running:
                return plan
            # Half-read prompts have filled the pool and none can go on: preempt the newest and plan again.
            self._preempt(self.running[-1])
            preempted = True

    def _plan_decodes(self, plan: Plan) -> bool:
        """One token for each request that lacks only one; returns whether any was preempted to make room.

        The newest is last in the list, so a request that is preempted has no piece in the plan yet.
        """
        preempted = False
        for request in [r for r in self.running if r.to_compute == 1]:
            while request in self.running and not self._reserve(plan, plan.decodes, request, 1):
                self._preempt(self.running[-1])
                preempted = True
        return preempted

    def _plan_prefills(self, plan: Plan, budget: int) -> int:
        """As much of its prompt as the budget allows for each request still reading; returns what is left of it."""
        for request in [r for r in self.running if r.to_compute > 1]:
            count = min(request.to_compute, budget)
            if count and self._reserve(plan, plan.prefills, request, count):
                budget -= count
        return budget

    def _admit(self, plan: Plan, budget: int) -> None:
        """Start waiting requests while the budget lasts and all blocks of the next one's tokens can be had."""
        while self.waiting and budget > 0 and len(self.running) < self.options.max_running:
            request = self.waiting[0]
            found = self.manager.open(request.id, request.tokens)
            missing = self.manager.blocks_for(request.length) - self.manager.blocks_for(found)
            if missing > self.manager.num_free:
                self.manager.free(request.id)
                return  # the first in the queue waits for room, and none overtakes it
            self.waiting.popleft()
            if request.state is State.WAITING:  # not after a preemption: then the prefix found is mostly its own work
                request.cached_tokens = found
            request.state, request.stored = State.RUNNING, found
            self.running.append(request)
            self.running.sort(key=lambda r: r.id)  # a preempted one returns to its place by age
            count = min(request.to_compute, budget)  # at least 1, and its blocks are free: reserving cannot fail
            self._reserve(plan, plan.prefills, request, count)
            budget -= count

    def _reserve(self, plan: Plan, pieces: list[Piece], request: Request, count: int) -> bool:
        """Get blocks for the request's next `count` tokens and add them as a piece; False if the pool has too few."""
        tokens = request.tokens[request.stored : request.stored + count]
        try:
            plan.reservations.append(self.manager.append(request.id, tokens))
        except OutOfBlocks:
            return False
        pieces.append(Piece(request, request.stored, count))
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request.id)
        request.state, request.stored = State.PREEMPTED, 0
        request.preemptions += 1
        self.waiting.appendleft(request)
