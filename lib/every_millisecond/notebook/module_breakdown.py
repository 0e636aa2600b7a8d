"""`module_breakdown`: where the milliseconds of one forward pass go, module by module, and what looking costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm_latency.arguments import check_count
from llm_latency.generation import TransformersStepper, check_request
from llm_latency.timing import LatencyTimer

# Names that Llama-like models in transformers share. Rotary embeddings serve attention alone.
_PART_BY_NAME = {"self_attn": "attention", "rotary_emb": "attention", "mlp": "ffn"}
PARTS = ("embedding", "attention", "ffn", "norms", "head", "sampling", "overhead")


@dataclass(frozen=True, slots=True)
class ModuleBreakdown:
    """One forward pass and the choice of its token, cut into parts that add up to the wall clock.

    Args:
        phase: "prefill" or "decode". tokens: prompt tokens read before or in the pass.
        parts_ms: milliseconds by part (`PARTS`), of the repeat with the median wall clock. "overhead" is all that is in
            no hooked module: residual additions, the mask, Python between modules, and much of the hooks' own cost.
        total_ms: the wall clock of that repeat: the sum of the parts.
        unhooked_ms: the median wall clock of the same pass without hooks, measured in turns with the hooked one.
        stages_per_pass: how many times a hook opened a stage in one pass.
    """

    phase: str
    tokens: int
    parts_ms: dict[str, float]
    total_ms: float
    unhooked_ms: float
    stages_per_pass: int

    @property
    def hooks_cost_ms(self) -> float:
        """What the hooks added to a pass. Below zero: less than the machine's noise."""
        return self.total_ms - self.unhooked_ms

    def share(self, part: str) -> float:
        """A part's share of the hooked wall clock, 0 to 1. KeyError for an unknown part."""
        if part not in self.parts_ms:
            raise KeyError(f"unknown part {part!r}; known: {', '.join(PARTS)}")
        return self.parts_ms[part] / self.total_ms

    def report(self) -> str:
        """A table for `print`: ms and share of each part, the total, the total without hooks."""
        lines = [f"{self.phase}, {self.tokens} tokens, {self.stages_per_pass} hooked calls in a pass"]
        lines += [f"{part:<12}{ms:>10.3f} ms{100 * self.share(part):>8.1f} %" for part, ms in self.parts_ms.items()]
        lines += [
            f"{'total':<12}{self.total_ms:>10.3f} ms{100.0:>8.1f} %",
            f"{'unhooked':<12}{self.unhooked_ms:>10.3f} ms",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()


def find_parts(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Which part each module belongs to: "embedding", "attention", "ffn", "norms" or "head".

    A norm inside attention (Qwen3) is listed too: the timer's exclusive time keeps it out of attention.

    Raises:
        TypeError: not a transformers model. ValueError: no attention, FFN or norms under the names of Llama's family.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; expected a transformers model")
    parts: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in _PART_BY_NAME:
            parts[module] = _PART_BY_NAME[leaf]
        elif type(module).__name__.endswith("Norm"):
            parts[module] = "norms"
    missing = {"attention", "ffn", "norms"} - set(parts.values())
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {', '.join(sorted(missing))} under the names of Llama's family"
            " (self_attn, mlp, ...Norm)"
        )
    parts[model.get_input_embeddings()] = "embedding"
    parts[model.get_output_embeddings()] = "head"
    return parts


@contextmanager
def part_hooks(parts: dict[nn.Module, str], timer: LatencyTimer) -> Iterator[None]:
    """While the block runs, each call of a module is a stage of `timer` under its part's name; then no hook is left."""
    handles = []
    try:
        for module, part in parts.items():
            handles.append(module.register_forward_pre_hook(lambda *_, part=part: timer.mark_start(part)))
            handles.append(module.register_forward_hook(lambda *_, part=part: timer.mark_end(part)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def module_breakdown(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    phase: str = "prefill",
    steps: int = 8,
    warmup: int = 1,
    repeats: int = 5,
) -> ModuleBreakdown:
    """Time the parts of a prefill of input_ids, or of the decode steps after it, by forward hooks.

    Args:
        model: a Llama-like transformers model (Llama, SmolLM2, Qwen2, Qwen3, Mistral).
        input_ids: int64 [1, n], the prompt.
        phase: "prefill", or "decode": then the figures are the mean of `steps` greedy steps after the prompt.
        warmup, repeats: rounds thrown away and kept; each runs the pass with hooks and without, in alternating order.

    Raises:
        TypeError: not a transformers model, not a tensor of int64. ValueError: an unknown phase, a count too small, a
            prompt that is empty, not one row, or too long with its steps; a model of another build.
    """
    if phase not in ("prefill", "decode"):
        raise ValueError(f'phase is {phase!r}; expected "prefill" or "decode"')
    check_count("steps", steps, least=1)
    check_count("warmup", warmup, least=0)
    check_count("repeats", repeats, least=1)
    parts = find_parts(model)
    stepper = TransformersStepper(model)
    check_request(stepper, input_ids, steps + 1 if phase == "decode" else 1)
    timer = LatencyTimer(model.device)
    run = _prefill if phase == "prefill" else _decode
    passes = 1 if phase == "prefill" else steps
    hooked: list[tuple[float, dict[str, float], int]] = []
    plain: list[float] = []
    for turn in range(warmup + repeats):
        for hooks_on in (turn % 2 == 0, turn % 2 == 1):
            with part_hooks(parts, timer) if hooks_on else nullcontext():
                run(stepper, input_ids.to(stepper.device), steps, timer)
            total = timer.get_elapsed_ms("pass") / passes
            if turn >= warmup and hooks_on:
                hooked.append((total, _read_parts(timer, passes), _stages_per_pass(timer, passes)))
            elif turn >= warmup:
                plain.append(total)
    # One repeat as it was, not a median of each part: only so do the parts add up.
    total, parts_ms, stages = sorted(hooked, key=lambda repeat: repeat[0])[(repeats - 1) // 2]
    return ModuleBreakdown(phase, input_ids.shape[1], parts_ms, total, statistics.median(plain), stages)


def _prefill(stepper: TransformersStepper, input_ids: Tensor, steps: int, timer: LatencyTimer) -> None:
    timer.reset()
    with timer.stage("pass"):
        logits = stepper.prefill(input_ids)
        with timer.stage("sampling"):
            int(logits.float().argmax(dim=-1))


def _decode(stepper: TransformersStepper, input_ids: Tensor, steps: int, timer: LatencyTimer) -> None:
    token = int(stepper.prefill(input_ids).argmax(dim=-1))
    timer.reset()
    for _ in range(steps):
        with timer.stage("pass"):
            logits = stepper.step(torch.tensor([[token]], device=stepper.device))[:, -1]
            with timer.stage("sampling"):
                token = int(logits.float().argmax(dim=-1))


def _read_parts(timer: LatencyTimer, passes: int) -> dict[str, float]:
    parts_ms = {}
    for part in PARTS[:-1]:
        parts_ms[part] = timer.get_elapsed_ms(part, exclusive=True) / passes if part in timer.stages else 0.0
    parts_ms["overhead"] = timer.get_elapsed_ms("pass", exclusive=True) / passes
    return parts_ms


def _stages_per_pass(timer: LatencyTimer, passes: int) -> int:
    hooked = [name for name in timer.stages if name not in ("pass", "sampling")]
    return sum(timer.get_count(name) for name in hooked) // passes
