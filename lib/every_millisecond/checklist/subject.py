"""The model under diagnosis: loaded once, and in the other forms as they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from every_millisecond.request import NEW_TOKENS, standard_prompt
from llm_latency import hardware, models, quality, roofline
from llm_latency.arguments import dtype_name
from llm_latency.generation import Stepper, TransformersStepper
from llm_latency.text.prompt import encode_prompt
from llm_latency.timing import measure

QUALITY_TOKENS = 256
SLOW_MS = 500.0  # of a call: measured once
PROBE_TOKENS = 8
LONG_MS = 10_000.0  # of a prefill: extrapolated


@dataclass(frozen=True, slots=True)
class Pace:
    """Median ms of reading the standard prompt and of one further token after it.

    extrapolated: the prefill is that of a few tokens times their share, since the whole one would take too long.
    """

    prefill_ms: float
    step_ms: float
    extrapolated: bool = False

    @property
    def total_ms(self) -> float:
        """The standard request without its two ends."""
        return self.prefill_ms + (NEW_TOKENS - 1) * self.step_ms


def quick_ms(fn: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median ms of `repeats` calls; of a single one where it takes long, for a diagnosis is no benchmark."""
    single = measure(fn, warmup=0, repeats=1, device=device).median_ms
    if single > SLOW_MS:
        return single
    return measure(fn, warmup=0, repeats=repeats, device=device).median_ms


class Subject:
    """A profile's or folder's model as transformers loads it: the device's usual dtype, SDPA, a growing cache."""

    def __init__(self, profile: str | None = None) -> None:
        self.profile = profile
        self.tokenizer = models.load_tokenizer(profile)
        self.model = models.load_target(profile)
        self.shape = roofline.shape_of(self.model)
        self.weights = dtype_name(self.model.dtype)
        self.ids = torch.tensor([encode_prompt(self.tokenizer, standard_prompt(self.tokenizer))])
        self.ids = self.ids.to(self.model.device)  # [1, 256]
        self.token = self.ids[:, :1]
        self.ceilings = hardware.ceilings(self.model.device)
        self.stepper = TransformersStepper(self.model)
        self.pace = self.pace_of(self.stepper)
        text = encode_prompt(self.tokenizer, quality.reading_text())[:QUALITY_TOKENS]
        self.text: Tensor = torch.tensor([text], device=self.model.device)
        self.perplexity = quality.perplexity(self.stepper, self.text)

    def pace_of(self, stepper: Stepper) -> Pace:
        """Measure a stepper on the standard prompt; its prefill on a few tokens where a processor has no hardware for
        its products and the whole one would take long."""
        few = self.ids[:, :PROBE_TOKENS]
        share = self.ids.shape[1] / PROBE_TOKENS
        probe = quick_ms(lambda: stepper.prefill(few), stepper.device, repeats=1) * share
        if probe > LONG_MS:
            return Pace(probe, quick_ms(lambda: stepper.step(self.token), stepper.device, repeats=3), extrapolated=True)
        prefill = quick_ms(lambda: stepper.prefill(self.ids), stepper.device, repeats=3)
        return Pace(prefill, quick_ms(lambda: stepper.step(self.token), stepper.device, repeats=8))

    def launch_ms(self) -> float:
        """A step of the narrow twin: what issuing the operators takes."""
        twin = TransformersStepper(roofline.narrow_twin(self.model))
        twin.prefill(self.ids % 64)
        token = self.token % 64
        return measure(lambda: twin.step(token), warmup=3, repeats=10, device=twin.device).median_ms

    def gain(self, pace: Pace) -> float:
        """How many times sooner the standard request is done at another pace."""
        return self.pace.total_ms / pace.total_ms

    def quality_cost(self, stepper: Stepper, pace: Pace) -> str:
        """The change of perplexity, in words."""
        if pace.extrapolated:
            return "not measured: too slow here"
        change = quality.perplexity(stepper, self.text) / self.perplexity - 1
        return f"perplexity {change:+.1%} over {QUALITY_TOKENS} tokens"
