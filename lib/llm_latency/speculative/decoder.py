"""Speculative decoding: a draft guesses, the target checks all guesses in one pass, and the output stays the target's.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llm_latency.generation import check_request
from llm_latency.sampling import check_end
from llm_latency.speculative.adaptive import AdaptiveGamma
from llm_latency.speculative.compatible import check_devices, check_sizes, check_tokenizers
from llm_latency.speculative.model_draft import ModelDraft
from llm_latency.speculative.output import STAGES, Cycle, SpeculativeOutput
from llm_latency.speculative.proposal import Draft, Proposal, ids_on
from llm_latency.speculative.rule import SamplingRule, greedy_choices
from llm_latency.speculative.targets import CroppableStepper, Reader, as_reader, column_ids
from llm_latency.speculative.verify import verify, verify_greedy
from llm_latency.timing import LatencyTimer

NAN = "hold NaN; expected numbers (was the model loaded in a dtype it overflows in?)"


@dataclass(slots=True)
class Request:
    """One generation under way. sequence: every committed id, the prompt first; its last one no model has read."""

    sequence: list[int]
    prompt_length: int
    max_new_tokens: int
    rule: SamplingRule
    eos_token_id: int | None
    timer: LatencyTimer
    prompt: Tensor | None  # [1, n] until the draft has read it
    adaptive: AdaptiveGamma | None = None
    cycles: list[Cycle] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """New tokens still allowed."""
        return self.prompt_length + self.max_new_tokens - len(self.sequence)

    @property
    def done(self) -> bool:
        return self.remaining == 0 or self.sequence[-1] == self.eos_token_id


class SpeculativeDecoder:
    """Generates with a target and a draft, one request at a time; the output is distributed as the target's alone.

    target: a transformers model, a FastDecoder, or anything else with prefill, step and crop_to. draft: a `ModelDraft`,
    `PromptLookupDraft` or `ConditionedDraft`; a bare model becomes a ModelDraft. num_speculative: gamma, the tokens
    drafted per cycle. adaptive: choose gamma from 1 to num_speculative by what is measured on the way. tokenizer,
    draft_tokenizer: with both, every id must mean the same to both.

    Raises TypeError or ValueError for a gamma below 1, models on different devices, and vocabularies that differ.
    """

    def __init__(
        self,
        target,
        draft,
        num_speculative: int = 5,
        *,
        adaptive: bool = False,
        tokenizer=None,
        draft_tokenizer=None,
    ) -> None:
        if isinstance(num_speculative, bool) or not isinstance(num_speculative, int):
            raise TypeError(f"num_speculative={num_speculative!r}; expected an int")
        if num_speculative < 1:
            raise ValueError(f"num_speculative={num_speculative}; expected at least 1 drafted token per cycle")
        self.target: Reader = as_reader(target)
        self.draft: Draft = draft if hasattr(draft, "propose") else ModelDraft(draft)
        if column_ids(self.target) is not None:
            raise ValueError("the target's head has been cut to head_ids; expected a target that can name every token")
        if getattr(self.draft, "reader", None) is self.target:
            raise ValueError("target and draft are the same decoder; expected one cache each")
        check_devices(self.target, self.draft)
        if tokenizer is not None and draft_tokenizer is not None:
            check_tokenizers(tokenizer, draft_tokenizer)
        else:
            check_sizes(self.target, self.draft)
        if self.draft.needs_features and not hasattr(self.target, "features"):
            raise TypeError(
                f"the draft reads the target's hidden states, and {type(target).__name__} has no `features`"
            )
        if isinstance(self.target, CroppableStepper):
            self.target.keep_features = self.target.keep_features or self.draft.needs_features
        self.num_speculative, self.adaptive = num_speculative, adaptive
        self._current: Request | None = None  # whose tokens both caches hold

    # -- a stepper like any other: what is scored or read is the target's ---------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def max_positions(self) -> int:
        return self.target.max_positions

    def prefill(self, input_ids: Tensor) -> Tensor:
        self._current = None
        return self.target.prefill(input_ids)

    def step(self, token_ids: Tensor) -> Tensor:
        self._current = None
        return self.target.step(token_ids)

    def score(self, input_ids: Tensor) -> Tensor:
        self._current = None
        return self.target.score(input_ids)

    # -- generation -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        generator: torch.Generator | None = None,
        timer: LatencyTimer | None = None,
    ) -> SpeculativeOutput:
        """Generate up to `max_new_tokens` after input_ids [1, n]; stops after `eos_token_id` if one is given.

        Options and stages of the timer as in `generation.generate`: "prefill" ends with the first token; the draft
        reads the prompt at the beginning of "decode". Raises ValueError or TypeError for a request out of range (a
        batch above 1 among them), and ValueError for NaN logits.
        """
        sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        with timer.stage("prefill") if timer else contextlib.nullcontext():
            request = self.start(input_ids, max_new_tokens, eos_token_id=eos_token_id, **sampling)
        with timer.stage("decode") if timer else contextlib.nullcontext():
            while not request.done:
                self.cycle(request)
        times = {name: request.timer.get_elapsed_ms(name) for name in request.timer.stages}
        times = dict.fromkeys(("draft prefill", *STAGES), 0.0) | times
        with torch.inference_mode(False):  # an ordinary tensor: one may train on what was generated
            sequences = torch.tensor([request.sequence], device=self.device)
        return SpeculativeOutput(sequences, tuple(request.cycles), times)

    @torch.inference_mode()
    def start(self, input_ids: Tensor, max_new_tokens: int, *, eos_token_id: int | None = None, **sampling) -> Request:
        """Read the prompt and choose the first token. `generate` is this and then `cycle` until `done`."""
        check_request(self, input_ids, max_new_tokens)
        check_end(eos_token_id, self.vocab_size)
        rule = SamplingRule(self.vocab_size, **sampling)
        prompt = input_ids.to(self.device)
        logits = self.target.prefill(prompt)  # [1, vocab]
        if rule.greedy:
            largest, token = greedy_choices(logits)
            if torch.isnan(largest):
                raise ValueError(f"the target's logits {NAN}")
        else:
            token = rule.sample(rule.probabilities(logits))
        self._current = Request(
            sequence=[*input_ids[0].tolist(), int(token)],
            prompt_length=input_ids.shape[1],
            max_new_tokens=max_new_tokens,
            rule=rule,
            eos_token_id=eos_token_id,
            timer=LatencyTimer(self.device),
            prompt=prompt,
            adaptive=AdaptiveGamma(self.num_speculative) if self.adaptive else None,
        )
        return self._current

    @torch.inference_mode()
    def cycle(self, request: Request) -> Cycle:
        """Draft, verify, commit. Afterwards both caches hold the committed sequence less its last token."""
        if request.done:
            raise RuntimeError("this request is done; start() another")
        if request is not self._current:
            raise RuntimeError("something else was read since this request was started; finish one at a time")
        sequence, timer, rule = request.sequence, request.timer, request.rule
        if request.prompt is not None:
            with timer.stage("draft prefill"):
                self.draft.begin(request.prompt, sequence[-1], self._capacity(request), self._features())
            request.prompt = None

        count = self._count(request)
        with timer.stage("draft"):
            proposal = self.draft.propose(count, rule)
        with timer.stage("verify"):
            last = ids_on(self.device, sequence[-1:])
            logits = self.target.step(torch.cat([last, proposal.tokens])[None])[0]  # [k + 1, vocab]
        with timer.stage("bookkeeping"):
            drafted, accepted, following = self._decide(proposal, logits, rule)
            proposed, accepted, added = _cut(drafted, accepted, following, request.eos_token_id)
            # The target has read the last committed token and all proposed ones; what follows the accepted ones goes.
            self.target.crop_to(len(sequence) - 1 + len(added))
            sequence.extend(added)
        with timer.stage("draft"):
            self.draft.commit(added, self._features())

        done = Cycle(proposed, accepted, len(added))
        request.cycles.append(done)
        if request.adaptive is not None:
            request.adaptive.observe(proposed, accepted)
        return done

    def _capacity(self, request: Request) -> int:
        """Tokens that the draft must have room for."""
        return request.prompt_length + request.max_new_tokens

    def _count(self, request: Request) -> int:
        """Tokens to draft. One token of a cycle is the target's own, so never more than leaves room for it."""
        return min(self._gamma(request), request.remaining - 1)

    def _gamma(self, request: Request) -> int:
        if request.adaptive is None:
            return self.num_speculative
        proposed = sum(cycle.proposed for cycle in request.cycles)
        if proposed == 0:
            return self.num_speculative
        draft, verify = (request.timer.get_elapsed_ms(name) for name in ("draft", "verify"))
        return request.adaptive.choose((draft / proposed) / (verify / len(request.cycles)))

    def _features(self) -> Tensor | None:
        return self.target.features if self.draft.needs_features else None

    def _decide(self, proposal: Proposal, logits: Tensor, rule: SamplingRule) -> tuple[list[int], int, int]:
        """The drafted ids, how many of them stand, and the id that follows those; logits [k + 1, vocab]."""
        if rule.greedy:
            return _decide_greedy(proposal, logits)
        drafted = proposal.tokens.tolist()
        probs = rule.probabilities(logits)  # [k + 1, vocab]
        draft_probs = probs[:0] if proposal.probs is None else proposal.probs
        accepted, next_probs = verify(
            proposal.tokens, draft_probs, probs, rule.uniforms(len(drafted), proposal.tokens.device)
        )
        return drafted, accepted, int(rule.sample(next_probs))


def _decide_greedy(proposal: Proposal, logits: Tensor) -> tuple[list[int], int, int]:
    largest, choices = greedy_choices(logits)  # [k + 1] each
    flags = [torch.isnan(largest).any()]
    flags.append(torch.isnan(proposal.largest).any() if proposal.largest is not None else torch.zeros_like(flags[0]))
    # One transfer brings all over that the host must know: on a GPU each would wait for the device.
    everything = torch.cat([torch.stack(flags).long(), proposal.tokens, choices]).cpu()
    target_nan, draft_nan = everything[:2].tolist()
    if target_nan or draft_nan:
        raise ValueError(f"the {'target' if target_nan else 'draft'}'s logits {NAN}")
    drafted, choices = everything[2:].split((len(proposal.tokens), len(choices)))
    return drafted.tolist(), *verify_greedy(drafted, choices)


def _cut(drafted: list[int], accepted: int, following: int, end: int | None) -> tuple[int, int, list[int]]:
    """What counts of a cycle, as `Cycle` says it: proposed, accepted, and the tokens that the text grows by."""
    added = [*drafted[:accepted], following]
    if end in drafted:
        drafted = drafted[: drafted.index(end) + 1]
    if end in added:
        added = added[: added.index(end) + 1]
    return len(drafted), min(accepted, len(added)), added
