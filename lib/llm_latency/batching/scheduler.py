"""Who runs in the next step, and with how many tokens.

Continuous batching (Orca, Yu et al. 2022, OSDI): the batch is put together anew before every step, so that a request
joins as soon as there is room and leaves the moment it is done. Chunked prefill (Sarathi, Agrawal et al. 2023,
arXiv 2308.16369): a long prompt is read in pieces between the others' decode steps, so that it delays them by a bounded
time.
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
        token_budget: tokens in a step, decode and prefill together; the length of a step, and with it everybody's time
            per output token, is bounded by it.

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
    """So many tokens of a request, beginning at `start`, to be computed in this step."""

    request: Request
    start: int
    count: int


@dataclass(slots=True)
class Plan:
    """One step: pieces of one token (decode) first, then pieces of prompts; and what the page pool must do before."""

    decodes: list[Piece] = field(default_factory=list)
    prefills: list[Piece] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)

    @property
    def pieces(self) -> list[Piece]:
        return [*self.decodes, *self.prefills]


class Scheduler:
    """Waiting, running and preempted requests over one pool of blocks; first come, first served.

    When the pool is empty, the newest running request gives its blocks back and waits at the front of the queue. Its
    tokens are kept, and its blocks often still lie in the prefix cache when it comes back. The oldest is never
    preempted for a newer one, and any request fits the pool alone, so every step moves something forward.
    """

    def __init__(self, manager: BlockManager, options: SchedulerOptions):
        self.manager = manager
        self.options = options
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is; its blocks return to the pool."""
        if request in self.running:
            self.running.remove(request)
            self.manager.free(request.id)
        else:
            self.waiting.remove(request)

    def schedule(self) -> Plan:
        """Puts the next step together and reserves its blocks."""
        preempted = False
        while True:
            plan = Plan()
            preempted |= self._plan_decodes(plan)
            budget = self.options.token_budget - len(plan.decodes)
            budget = self._plan_prefills(plan, budget)
            if not preempted:
                self._admit(plan, budget)
            if plan.pieces or not self.running:
                return plan
            self._preempt(self.running[-1])  # several half-read prompts have filled the pool: one must go,
            preempted = True  # and not come back in the same step

    def _plan_decodes(self, plan: Plan) -> bool:
        """One token for each request that has read its prompt; returns whether somebody had to go for it."""
        preempted = False
        for request in [r for r in self.running if r.to_compute == 1]:
            while request in self.running and not self._reserve(plan, plan.decodes, request, 1):
                self._preempt(self.running[-1])
                preempted = True
        return preempted

    def _plan_prefills(self, plan: Plan, budget: int) -> int:
        for request in [r for r in self.running if r.to_compute > 1]:
            count = min(request.to_compute, budget)
            if count and self._reserve(plan, plan.prefills, request, count):
                budget -= count
        return budget

    def _admit(self, plan: Plan, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.options.max_running:
            request = self.waiting[0]
            found = self.manager.open(request.id, request.tokens)
            missing = self.manager.blocks_for(request.length) - self.manager.blocks_for(found)
            if missing > self.manager.num_free:
                self.manager.free(request.id)
                return  # the first in the queue waits for room, and nobody overtakes it
            self.waiting.popleft()
            if request.state is State.WAITING:
                request.cached_tokens = found
            request.state, request.stored = State.RUNNING, found
            self.running.append(request)
            self.running.sort(key=lambda r: r.id)
            count = min(request.to_compute, budget)
            if count and self._reserve(plan, plan.prefills, request, count):
                budget -= count

    def _reserve(self, plan: Plan, pieces: list[Piece], request: Request, count: int) -> bool:
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
