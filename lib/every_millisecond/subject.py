"""The model that is measured: loaded once, in each of the forms that are asked for, with the standard request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from every_millisecond.laboratory.counting import narrow_twin
from every_millisecond.request import NEW_TOKENS, standard_prompt
from llm_latency import hardware, models, quality, roofline
from llm_latency.arguments import check_device, dtype_name
from llm_latency.generation import Stepper, TransformersStepper
from llm_latency.text.prompt import encode_prompt
from llm_latency.timing import measure

QUALITY_TOKENS = 256
SLOW_MS = 500.0  # of a call: measured once
PROBE_TOKENS = 8
LONG_MS = 10_000.0  # of a prefill: extrapolated


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Median ms of reading the standard prompt and of one further token after it.

    extrapolated: the prefill is that of a few tokens times their share, since the whole one would take too long.
    """

    prefill_ms: float
    step_ms: float
    extrapolated: bool = False

    def total_ms(self, new_tokens: int = NEW_TOKENS) -> float:
        """An answer of so many tokens without the request's two ends."""
        return self.prefill_ms + (new_tokens - 1) * self.step_ms


def quick_ms(fn: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median ms of `repeats` calls; of a single one where it takes long, for a diagnosis is no benchmark."""
    single = measure(fn, warmup=0, repeats=1, device=device).median_ms
    if single > SLOW_MS:
        return single
    return measure(fn, warmup=0, repeats=repeats, device=device).median_ms


class Subject:
    """A profile's or a folder's model. `model` is as transformers loads it: the device's usual dtype, SDPA."""

    def __init__(self, profile: str | None = None) -> None:
        self.profile = profile
        self.device = check_device()
        self.tokenizer = models.load_tokenizer(profile)
        self.prompt = standard_prompt(self.tokenizer)
        self.ids = torch.tensor([encode_prompt(self.tokenizer, self.prompt)], device=self.device)  # [1, 256]
        self.token = self.ids[:, -1:]

    @cached_property
    def model(self) -> PreTrainedModel:
        return models.load_target(self.profile)

    @cached_property
    def fp32(self) -> PreTrainedModel:
        return models.load_target(self.profile, dtype=torch.float32)

    def half(self, attention: str = "sdpa") -> PreTrainedModel:
        return models.load_target(self.profile, dtype=torch.bfloat16, attn_implementation=attention)

    def text(self, tokens: int) -> Tensor:
        """The first tokens of the text that the course ships for measuring quality: int64 [1, tokens]."""
        return torch.tensor([encode_prompt(self.tokenizer, quality.reading_text())[:tokens]], device=self.device)

    @property
    def sixteen_bit_tokens(self) -> int:
        """Prompt tokens that 16 bits are measured with: a processor without BF16 products takes minutes over 256."""
        return self.ids.shape[1] if hardware.bf16_is_native() else 8

    # What is known of `model`, each measured when it is first asked for.

    @cached_property
    def stepper(self) -> TransformersStepper:
        return TransformersStepper(self.model)

    @property
    def weights(self) -> str:
        return dtype_name(self.model.dtype)

    @cached_property
    def shape(self) -> roofline.ModelShape:
        return roofline.shape_of(self.model)

    @cached_property
    def times(self) -> RequestTimes:
        return self.times_of(self.stepper)

    @cached_property
    def perplexity(self) -> float:
        return quality.perplexity(self.stepper, self.text(QUALITY_TOKENS))

    @cached_property
    def launch_ms(self) -> float:
        """A step of the narrow twin: what issuing the operators takes."""
        twin = TransformersStepper(narrow_twin(self.model))
        twin.prefill(self.ids % twin.vocab_size)
        token = self.token % twin.vocab_size
        return measure(lambda: twin.step(token), warmup=3, repeats=10, device=self.device).median_ms

    def times_of(self, stepper: Stepper) -> RequestTimes:
        """Measure a stepper on the standard prompt; its prefill on a few tokens where a processor has no hardware for
        its products and the whole one would take long."""
        few = self.ids[:, :PROBE_TOKENS]
        share = self.ids.shape[1] / PROBE_TOKENS
        probe = quick_ms(lambda: stepper.prefill(few), stepper.device, repeats=1) * share
        if probe > LONG_MS:
            step_ms = quick_ms(lambda: stepper.step(self.token), stepper.device, repeats=3)
            return RequestTimes(probe, step_ms, extrapolated=True)
        prefill_ms = quick_ms(lambda: stepper.prefill(self.ids), stepper.device, repeats=3)
        return RequestTimes(prefill_ms, quick_ms(lambda: stepper.step(self.token), stepper.device, repeats=8))

    def rows_ms(self, count: int) -> float:
        """Median ms of one pass over so many tokens after the standard prompt."""
        rows = self.ids[:, :count]
        self.stepper.prefill(self.ids)
        return quick_ms(lambda: self.stepper.step(rows), self.device, repeats=5)

    def gain(self, times: RequestTimes) -> float:
        """How many times sooner the standard request is done in other times than `model`'s."""
        return self.times.total_ms() / times.total_ms()

    def quality_cost(self, stepper: Stepper, times: RequestTimes) -> str:
        """The change of perplexity, in words."""
        if times.extrapolated:
            return "not measured: too slow here"
        change = quality.perplexity(stepper, self.text(QUALITY_TOKENS)) / self.perplexity - 1
        return f"perplexity {change:+.1%} over {QUALITY_TOKENS} tokens"
