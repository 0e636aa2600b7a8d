"""`InferenceBenchmark`: whole requests, stage by stage, over several prompts."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from llm_latency.arguments import check_count
from llm_latency.benchmark.benchmark_result import BenchmarkResult
from llm_latency.benchmark.respond import respond
from llm_latency.generation import Stepper, as_stepper
from llm_latency.timing import LatencyBreakdown
from llm_latency.timing.measure import garbage_collector_at_rest


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
