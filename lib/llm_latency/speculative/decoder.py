"""Speculative decoding: a draft guesses, the target checks all guesses in one pass, and the output stays the target's.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).

A draft (`drafts.Draft`) has three methods: `begin` reads the prompt; `propose(k, rule)` guesses up to k tokens and
returns a `Proposal` (`tokens` int64 [k] and, if sampled, `probs` [k, vocab], which they were drawn from); `commit` is
given the tokens that were added to the text, and drops the rejected ones from the draft's cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from llm_latency.arguments import check_count
from llm_latency.generation import Stepper, as_stepper, check_request
from llm_latency.generation.loop import stage
from llm_latency.sampling import NAN_MESSAGE, SamplingRule, greedy
from llm_latency.speculative.drafts import Draft, ModelDraft, Proposal, ids_on
from llm_latency.speculative.output import STAGES, Cycle, SpeculativeOutput
from llm_latency.speculative.verify import verify, verify_greedy
from llm_latency.timing import LatencyTimer

PADDING = 128  # ids: vocabularies of one family are padded to different multiples, by no more than this


@dataclass(slots=True)
class Generation:
    """A request in progress. sequence: the ids of prompt and answer so far; the last one has been read by no model."""

    sequence: list[int]
    prompt_length: int
    max_new_tokens: int
    rule: SamplingRule
    eos_token_id: int | None
    timer: LatencyTimer
    cycles: list[Cycle] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """New tokens still allowed."""
        return self.prompt_length + self.max_new_tokens - len(self.sequence)

    @property
    def done(self) -> bool:
        """Whether the answer is complete: long enough, or ended by the end-of-text token."""
        return self.remaining == 0 or self.sequence[-1] == self.eos_token_id


class SpeculativeDecoder(Stepper):
    """Generates with a target and a draft, one request at a time; the output is distributed as the target's alone.

    target: a transformers model, a FastDecoder, or another `Stepper`. draft: a `ModelDraft`, `PromptLookupDraft` or
    `ConditionedDraft`; a bare model becomes a ModelDraft. num_speculative: gamma, the tokens drafted per cycle.

    As a `Stepper` it is its target, with a `generate` of its own. Raises TypeError or ValueError for a gamma below 1,
    models on different devices, and vocabularies that differ.
    """

    def __init__(self, target, draft, num_speculative: int = 5) -> None:
        self.num_speculative = check_count("num_speculative", num_speculative)
        # A plain DynamicCache keeps tokens that have left a sliding window: after crop_to the window needs them again.
        self.target = as_stepper(target, DynamicCache)
        self.draft = draft if isinstance(draft, Draft) else ModelDraft(draft)
        check_pair(self.target, self.draft)
        if self.draft.needs_features:
            self.target.keep_features()
        self.device, self.vocab_size = self.target.device, self.target.vocab_size
        self.max_positions, self.step_bytes = self.target.max_positions, self.target.step_bytes
        self._current: Generation | None = None  # the request whose tokens both caches hold

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

        Options and the timer's stages are those of `generation.generate`: "prefill" ends with the first token, and the
        draft reads the prompt at the beginning of "decode". Raises ValueError or TypeError for a request out of range
        (a batch above 1 among them), and ValueError for NaN logits.
        """
        sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        with stage(timer, "prefill"):
            request = self.start(input_ids, max_new_tokens, eos_token_id=eos_token_id, **sampling)
        with stage(timer, "decode"):
            while not request.done:
                self.cycle(request)
        times = {name: request.timer.get_elapsed_ms(name) for name in request.timer.stages}
        with torch.inference_mode(False):  # an ordinary tensor: one may train on what was generated
            sequences = torch.tensor([request.sequence], device=self.device)
        # STAGES: the names of the timer's stages in `cycle`; one that never ran took 0 ms.
        return SpeculativeOutput(sequences, tuple(request.cycles), dict.fromkeys(STAGES, 0.0) | times)

    @torch.inference_mode()
    def start(
        self, input_ids: Tensor, max_new_tokens: int, *, eos_token_id: int | None = None, **sampling
    ) -> Generation:
        """Read the prompt and choose the first token. `generate` is this and then `cycle` until `done`."""
        check_request(self, input_ids, max_new_tokens, eos_token_id)
        rule = SamplingRule(self.vocab_size, **sampling)
        first = rule.choose(self.target.prefill(input_ids.to(self.device)))
        self._current = Generation(
            sequence=[*input_ids[0].tolist(), first],
            prompt_length=input_ids.shape[1],
            max_new_tokens=max_new_tokens,
            rule=rule,
            eos_token_id=eos_token_id,
            timer=LatencyTimer(self.device),
        )
        return self._current

    @torch.inference_mode()
    def cycle(self, request: Generation) -> Cycle:
        """Draft, verify, commit: the text grows by the accepted tokens and one more, which the target chose, or up to
        an end-of-text token among them.

        Afterwards both caches hold the sequence without its last token. Returns how many tokens were proposed,
        accepted and added.
        """
        if request.done:
            raise RuntimeError("this request is done; start() another")
        if request is not self._current:
            raise RuntimeError("something else was read since this request was started; finish one at a time")
        sequence, timer, rule = request.sequence, request.timer, request.rule
        if not request.cycles:
            with timer.stage("draft prefill"):
                prompt = ids_on(self.device, sequence[: request.prompt_length])[None]
                capacity = request.prompt_length + request.max_new_tokens
                self.draft.begin(prompt, sequence[-1], capacity, self.target.features)

        with timer.stage("draft"):
            # One token of each cycle is the target's own: leave room for it.
            proposal = self.draft.propose(min(self.num_speculative, request.remaining - 1), rule)
        with timer.stage("verify"):
            last = ids_on(self.device, sequence[-1:])
            logits = self.target.step(torch.cat([last, proposal.tokens])[None])[0]  # [k + 1, vocab]
        with timer.stage("bookkeeping"):
            drafted, accepted, following = self._decide(proposal, logits, rule)  # following: the id after the accepted
            proposed, accepted, added = _cut_at_end(drafted, accepted, following, request.eos_token_id)
            # The target has read the last token and all drafted ones: forget those that were rejected.
            self.target.crop_to(len(sequence) - 1 + len(added))
            sequence.extend(added)
        with timer.stage("draft"):
            self.draft.commit(added, self.target.features)
        request.cycles.append(Cycle(proposed, accepted, len(added)))
        return request.cycles[-1]

    def _decide(self, proposal: Proposal, logits: Tensor, rule: SamplingRule) -> tuple[list[int], int, int]:
        """The k drafted ids, how many of them are accepted, and the id that follows those. logits: the target's,
        [k + 1, vocab], row i for the place of drafted token i."""
        if rule.greedy:
            return _decide_greedy(proposal, logits)
        drafted = proposal.tokens.tolist()
        probs = rule.probabilities(logits)  # [k + 1, vocab]
        draft_probs = probs[:0] if proposal.probs is None else proposal.probs  # [k, vocab]; None: k is 0
        uniforms = rule.uniforms(len(drafted), logits.device)
        accepted, next_probs = verify(proposal.tokens, draft_probs, probs, uniforms)
        return drafted, accepted, int(rule.sample(next_probs))

    # -- as a stepper, it is its target ---------------------------------------------------------------------------

    @property
    def length(self) -> int:
        return self.target.length

    @property
    def prefix_tokens(self) -> int:
        return self.target.prefix_tokens

    def prefill(self, input_ids: Tensor) -> Tensor:
        self._current = None
        return self.target.prefill(input_ids)

    def step(self, token_ids: Tensor) -> Tensor:
        self._current = None
        return self.target.step(token_ids)

    def score(self, input_ids: Tensor) -> Tensor:
        self._current = None
        return self.target.score(input_ids)

    def crop_to(self, length: int) -> None:
        self._current = None
        self.target.crop_to(length)


def check_pair(target: Stepper, draft: Draft) -> None:
    """Raise ValueError for a draft that cannot guess for this target, at once, and not by a wrong token later.

    Their dtypes may differ: both are compared in FP32. Whether an id means the same to both, sizes cannot tell.
    """
    if target.head_ids is not None:
        raise ValueError("the target's head has been cut to head_ids; expected a target that can name every token")
    if isinstance(draft, ModelDraft) and draft.stepper is target:
        raise ValueError("target and draft are the same decoder; expected one cache each")
    if draft.device is not None and draft.device != target.device:
        raise ValueError(f"the draft is on {draft.device} and the target on {target.device}; expected one device")
    if draft.vocab_size is not None and abs(draft.vocab_size - target.vocab_size) > PADDING:
        raise ValueError(
            f"the draft's vocabulary has {draft.vocab_size} ids and the target's {target.vocab_size}; expected the "
            f"same vocabulary, but for a padded tail of up to {PADDING} ids"
        )


def _decide_greedy(proposal: Proposal, logits: Tensor) -> tuple[list[int], int, int]:
    """`_decide` at temperature 0. Raises ValueError if the target's logits, or those of a draft model, hold NaN."""
    largest, choices = greedy(logits)  # [k + 1] each
    flags = [torch.isnan(largest).any()]
    flags.append(torch.isnan(proposal.largest).any() if proposal.largest is not None else torch.zeros_like(flags[0]))
    # One transfer for all that the host must know: on a GPU each would wait for the device.
    everything = torch.cat([torch.stack(flags).long(), proposal.tokens, choices]).cpu()  # [2 + k + k + 1]
    target_nan, draft_nan = everything[:2].tolist()
    if target_nan or draft_nan:
        raise ValueError(f"the {'target' if target_nan else 'draft'}'s logits {NAN_MESSAGE}")
    drafted, choices = everything[2:].split((len(proposal.tokens), len(choices)))
    return drafted.tolist(), *verify_greedy(drafted, choices)


def _cut_at_end(drafted: list[int], accepted: int, following: int, end: int | None) -> tuple[int, int, list[int]]:
    """Drop what comes after the end-of-text id `end`: (tokens proposed, tokens accepted, ids added to the text)."""
    added = [*drafted[:accepted], following]
    if end in drafted:
        drafted = drafted[: drafted.index(end) + 1]
    if end in added:
        added = added[: added.index(end) + 1]
    return len(drafted), min(accepted, len(added)), added
