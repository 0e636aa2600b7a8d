"""`InferenceBenchmark`: whole requests, stage by stage, over several prompts; `BenchmarkResult`: one prompt's times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from llm_latency.arguments import check_count
from llm_latency.benchmark.respond import respond
from llm_latency.generation import Stepper, as_stepper
from llm_latency.timing import LatencyBreakdown
from llm_latency.timing.measure import garbage_collector_at_rest

_ROWS = {
    "tokenise": "tokenize_ms",
    "prefill": "prefill_ms",
    "decode": "decode_ms",
    "detokenise": "detokenize_ms",
    "unaccounted": "unaccounted_ms",
    "total": "total_ms",
    "time to first token": "time_to_first_token_ms",
    "time per output token": "time_per_output_token_ms",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile of repeats."""

    median: float
    p10: float
    p90: float


def _median_of(name: str) -> property:
    def read(result: BenchmarkResult) -> float | None:
        spread = result.spread(name)
        return None if spread is None else spread.median

    return property(read, doc=f"Median of `{name}` over the repeats; None where it is undefined.")


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """What `InferenceBenchmark` found for one prompt.

    Its figures bear the names of `LatencyBreakdown` and are medians over the repeats. Medians of parts need not add up
    to the median of the whole; each of `breakdowns` does.

    Args:
        prompt: the text. breakdowns: one per repeat, in order.

    Raises:
        ValueError: no breakdown, or repeats that differ in length (their times could not be pooled).
    """

    prompt: str
    breakdowns: tuple[LatencyBreakdown, ...]

    def __post_init__(self) -> None:
        if not self.breakdowns:
            raise ValueError("breakdowns is empty; expected one per repeat")
        lengths = {(b.prompt_tokens, b.tokens_generated) for b in self.breakdowns}
        if len(lengths) > 1:
            raise ValueError(f"repeats differ in (prompt, generated) tokens: {sorted(lengths)}; decode greedily")

    @property
    def prompt_tokens(self) -> int:
        return self.breakdowns[0].prompt_tokens

    @property
    def tokens_generated(self) -> int:
        return self.breakdowns[0].tokens_generated

    tokenize_ms = _median_of("tokenize_ms")
    prefill_ms = _median_of("prefill_ms")
    decode_ms = _median_of("decode_ms")
    detokenize_ms = _median_of("detokenize_ms")
    unaccounted_ms = _median_of("unaccounted_ms")
    total_ms = _median_of("total_ms")
    time_to_first_token_ms = _median_of("time_to_first_token_ms")
    time_per_output_token_ms = _median_of("time_per_output_token_ms")
    tokens_per_second = _median_of("tokens_per_second")

    def spread(self, name: str) -> Spread | None:
        """Median, p10 and p90 of one figure of `LatencyBreakdown`, such as "decode_ms"; None where it is undefined.

        Raises KeyError for any other name.
        """
        known = (*_ROWS.values(), "tokens_per_second")
        if name not in known:
            raise KeyError(f"{name!r} is no figure of a breakdown; known: {', '.join(known)}")
        values = [getattr(breakdown, name) for breakdown in self.breakdowns]
        if None in values:
            return None
        return Spread(*(float(value) for value in np.percentile(values, (50, 10, 90))))

    def report(self) -> str:
        """A table for `print`: each stage's median with p10 and p90, TTFT, TPOT, tokens per second."""
        lines = [
            f"{self.prompt_tokens} tokens in, {self.tokens_generated} out, {len(self.breakdowns)} repeats",
            f"{'':<22}{'median':>13}{'p10':>13}{'p90':>13}",
        ]
        for title, name in _ROWS.items():
            spread = self.spread(name)
            if spread is None:
                cells = f"{'undefined':>13}"
            else:
                cells = "".join(f"{ms:>10.2f} ms" for ms in (spread.median, spread.p10, spread.p90))
            lines.append(f"{title:<22}{cells}")
        lines.append(f"{self.tokens_per_second:.1f} tok/s over the whole request")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()


class InferenceBenchmark:
    """Answers prompts greedily again and again and says where the time went.

    Args:
        model: a transformers model, or a stepper.
        tokenizer: the model's tokenizer.
        eos_token_id: where an answer ends; None lets every answer have its full length.

    Raises:
        TypeError: model is neither.
    """

    def __init__(self, model: PreTrainedModel | Stepper, tokenizer, *, eos_token_id: int | None = None) -> None:
        self.stepper = as_stepper(model)
        self.tokenizer = tokenizer
        self.eos_token_id = eos_token_id

    def run(
        self, prompts: Sequence[str], *, max_new_tokens: int, warmup: int = 3, repeats: int = 10
    ) -> list[BenchmarkResult]:
        """Answer each prompt `warmup` times unseen and `repeats` times measured; one result per prompt, in order.

        The prompts take turns, so that a machine that slows down does not fall upon one of them alone.

        Args:
            prompts: texts that already carry their chat template (`request.chat_text`).
            max_new_tokens: length of each answer, 1 or more, unless `eos_token_id` ends it.

        Raises:
            TypeError: prompts is a single string, or not of strings; a count is not an integer. ValueError: no prompt,
                an empty one, one that does not fit the model; a count too small.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise TypeError(f"prompts is a {type(prompts).__name__}; expected a list of strings")
        if not prompts:
            raise ValueError("prompts is empty; expected at least one prompt")
        check_count("max_new_tokens", max_new_tokens, least=1)
        check_count("warmup", warmup, least=0)
        check_count("repeats", repeats, least=1)
        measured: list[list[LatencyBreakdown]] = [[] for _ in prompts]
        with garbage_collector_at_rest():
            for turn in range(warmup + repeats):
                for prompt, breakdowns in zip(prompts, measured, strict=True):
                    breakdown = self._answer(prompt, max_new_tokens)
                    if turn >= warmup:
                        breakdowns.append(breakdown)
        return [
            BenchmarkResult(prompt, tuple(breakdowns)) for prompt, breakdowns in zip(prompts, measured, strict=True)
        ]

    def _answer(self, prompt: str, max_new_tokens: int) -> LatencyBreakdown:
        response = respond(self.stepper, self.tokenizer, prompt, max_new_tokens, eos_token_id=self.eos_token_id)
        return response.breakdown
