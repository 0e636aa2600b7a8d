"""One request on its way through the engine, and what it tells when it is done."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from llm_latency.sampling import check_sampling


class RequestRefused(ValueError):
    """A request that can never be served here; said at submission, so that the others go on."""


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again: its blocks were needed, its tokens are kept
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen. Its own seed makes them independent of who else is in the batch.

    Raises ValueError for a value out of range, and for a temperature without a seed.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def check(self, vocab_size: int) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, vocab_size)
        if self.temperature > 0 and self.seed is None:
            raise ValueError(f"temperature={self.temperature} needs a seed, so that the answer can be repeated")


@dataclass(slots=True, eq=False)
class Request:
    """prompt ids, what was generated, how many of both are stored in the cache, and when things happened (seconds)."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    eos_token_id: int | None
    arrival_s: float
    state: State = State.WAITING
    generated: list[int] = field(default_factory=list)
    stored: int = 0
    cached_tokens: int = 0  # tokens of the prompt found in the prefix cache at first admission
    preemptions: int = 0
    token_times_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    error: str | None = None
    generator: torch.Generator | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.generated]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def to_compute(self) -> int:
        """Tokens that are known but not stored yet: the rest of the prompt, or the newest token."""
        return self.length - self.stored

    @property
    def wanted(self) -> bool:
        """Whether another token is still to come."""
        stopped = self.generated and self.generated[-1] == self.eos_token_id
        return not stopped and len(self.generated) < self.max_new_tokens

    # --- latency, as the one who asked sees it: waiting in the queue counts ---

    @property
    def time_to_first_token_ms(self) -> float:
        """From arrival to the first token. Raises ValueError if none came."""
        if not self.token_times_s:
            raise ValueError(f"request {self.id} ({self.state.value}) has no token")
        return 1e3 * (self.token_times_s[0] - self.arrival_s)

    @property
    def time_per_output_token_ms(self) -> float | None:
        """Mean time between tokens after the first; None with fewer than two, where there is no such time."""
        gaps = len(self.token_times_s) - 1
        return 1e3 * (self.token_times_s[-1] - self.token_times_s[0]) / gaps if gaps > 0 else None

    @property
    def end_to_end_ms(self) -> float:
        """From arrival to the end. Raises ValueError while the request is under way."""
        if self.end_s is None:
            raise ValueError(f"request {self.id} is not done ({self.state.value})")
        return 1e3 * (self.end_s - self.arrival_s)
