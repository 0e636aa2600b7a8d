"""`LatencyBreakdown`: where the milliseconds of one request went."""

from __future__ import annotations

from dataclasses import dataclass

from llm_latency.arguments import check_count, check_number

# Stages and total come from different clocks (GPU events, host); beyond this their sum cannot be a rounding matter.
_CLOCK_SKEW_MS = 0.05
_CLOCK_SKEW_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class LatencyBreakdown:
    """The four stages of one request, in milliseconds, and its length in tokens.

    `prefill_ms` runs until the first token is chosen: the forward pass over the prompt and its sampling. `decode_ms` is
    all that follows, so it pays for `tokens_generated - 1` tokens.

    Args:
        tokenize_ms, prefill_ms, decode_ms, detokenize_ms: the stages.
        total_ms: the wall clock around the whole request.
        prompt_tokens: ids that went in. tokens_generated: ids that came out, the end-of-text token included.

    Raises:
        TypeError: not a number. ValueError: negative, infinite or NaN; no prompt; a total of 0; or stages that add up
            to more than the total (by over 2% and 0.05 ms, which two clocks may differ by).
    """

    tokenize_ms: float
    prefill_ms: float
    decode_ms: float
    detokenize_ms: float
    total_ms: float
    prompt_tokens: int
    tokens_generated: int

    def __post_init__(self) -> None:
        for name in ("tokenize_ms", "prefill_ms", "decode_ms", "detokenize_ms", "total_ms"):
            check_number(name, getattr(self, name), least=0)
        check_count("prompt_tokens", self.prompt_tokens, least=1)
        check_count("tokens_generated", self.tokens_generated, least=0)
        if self.total_ms == 0:
            raise ValueError("total_ms is 0; expected the wall clock around the request")
        stages = sum(self.stages_ms.values())
        if stages > self.total_ms + max(_CLOCK_SKEW_MS, _CLOCK_SKEW_SHARE * self.total_ms):
            raise ValueError(f"the stages add up to {stages:.3f} ms, more than total_ms {self.total_ms:.3f}")

    @property
    def stages_ms(self) -> dict[str, float]:
        """The four stages by their display names, in order."""
        return {
            "tokenise": self.tokenize_ms,
            "prefill": self.prefill_ms,
            "decode": self.decode_ms,
            "detokenise": self.detokenize_ms,
        }

    @property
    def unaccounted_ms(self) -> float:
        """The total less the four stages: Python between them. Slightly negative where the clocks disagree."""
        return self.total_ms - sum(self.stages_ms.values())

    @property
    def time_to_first_token_ms(self) -> float | None:
        """TTFT: tokenising and prefill. None if no token was generated."""
        return self.tokenize_ms + self.prefill_ms if self.tokens_generated else None

    @property
    def time_per_output_token_ms(self) -> float | None:
        """TPOT: decode time over the tokens that decoding made, all but the first, which is prefill's.

        Undefined, hence None, for fewer than two tokens: no interval between tokens was seen.
        """
        return self.decode_ms / (self.tokens_generated - 1) if self.tokens_generated > 1 else None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole request's seconds, the prompt's time included."""
        return self.tokens_generated / (self.total_ms / 1000)

    def report(self) -> str:
        """A table for `print`: each stage with ms and share of the total, then lengths, TTFT, TPOT and tokens/s."""
        rows = {**self.stages_ms, "unaccounted": self.unaccounted_ms, "total": self.total_ms}
        lines = [f"{'stage':<12}{'time':>13}{'share':>10}"]
        lines += [f"{name:<12}{ms:>10.2f} ms{100 * ms / self.total_ms:>8.1f} %" for name, ms in rows.items()]
        lines += [
            f"{self.prompt_tokens} tokens in, {self.tokens_generated} out, {self.tokens_per_second:.1f} tok/s",
            f"time to first token  {_ms_or_undefined(self.time_to_first_token_ms)}",
            f"time per output token  {_ms_or_undefined(self.time_per_output_token_ms)}",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()


def _ms_or_undefined(ms: float | None) -> str:
    return "undefined (too few tokens)" if ms is None else f"{ms:.2f} ms"
