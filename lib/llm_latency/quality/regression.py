"""`regression_test`: does an optimised model still say what the original said, and how much sooner?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm_latency.arguments import check_count, check_token_ids
from llm_latency.generation import Stepper, as_stepper
from llm_latency.quality.perplexity import negative_log_likelihoods
from llm_latency.quality.regression_report import OPTIMISED, ORIGINAL, CaseResult, RegressionReport, Thresholds
from llm_latency.timing import Comparison, compare

# Tokens of each case that are read one at a time after the rest was read as a prompt: what a cache keeps wrongly shows
# only in a later step, never in the pass that wrote it.
STEPPED = 32
SAMPLED_TOKENS = 4
FEWEST_EXPECTED = 5  # of each cell, below which the chi-square approximation fails (Cochran, 1954)
NEAR_TIE = 1e-3  # between logits: closer ones may fall either way by rounding alone


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two: its name for messages, and the stepper."""

    name: str
    stepper: Stepper

    def logits(self, input_ids: Tensor) -> Tensor:
        """input_ids [1, n], the last ones one by one after the rest: logits [k, vocab] after each of those."""
        prompt = max(1, input_ids.shape[1] - STEPPED)
        ids = input_ids.to(self.stepper.device)
        rows = [self.stepper.prefill(ids[:, :prompt])]  # [1, vocab]
        rows += [self.stepper.step(ids[:, i : i + 1])[:, -1] for i in range(prompt, ids.shape[1])]
        logits = torch.cat(rows).float().cpu()
        if bool(torch.isnan(logits).any()):
            raise FloatingPointError(f"the {self.name} model's logits hold NaN; expected numbers")
        return logits

    def generate(self, input_ids: Tensor, new_tokens: int, **sampling) -> list[int]:
        """New ids."""
        sequences = self.stepper.generate(input_ids, new_tokens, **sampling).sequences
        return sequences[0, input_ids.shape[1] :].tolist()


def regression_test(
    original: PreTrainedModel | Stepper,
    optimized: PreTrainedModel | Stepper,
    cases: Mapping[str, Tensor],
    *,
    thresholds: Thresholds | None = None,
    exact: bool = False,
    new_tokens: int = 16,
    rounds: int = 3,
    samples: int = 0,
) -> RegressionReport:
    """Compare an optimised model with its original: quality, greedy text and time, case by case, and judge.

    original, optimized: transformers models or steppers.
    cases: prompts by name, int64 [1, n] or [n]; `standard_cases` has the usual ones and the edges.
    exact: the optimisation promises the original's greedy text and distributions (in FP32: KV caches, kernels,
    speculation); a text that leaves it where the original's two best logits are within NEAR_TIE is let pass.
    rounds: timed answers each, in turns; 0 times nothing. samples: continuations drawn at temperature 1 by each, from
    the first case, to compare distributions by a two-sample test: it sees a sampling rule that is right when greedy and
    wrong otherwise. Seeds are fixed.

    Perplexity, KL and agreement are over the last positions of each case, decoded token by token after a prompt.
    Perplexity and KL are judged case by case, so that no odd text decides an average; agreement over all of them, since
    some have few positions. A case that only the optimised model cannot do fails.

    Raises ValueError for no cases, different vocabularies, ids out of range, logits that hold NaN (naming the model and
    the case), a case that the original itself cannot do, and TypeError for ids that are no int64 tensor.
    """
    thresholds = thresholds or Thresholds()
    for name, value, least in (("rounds", rounds, 0), ("samples", samples, 0), ("new_tokens", new_tokens, 2)):
        check_count(name, value, least=least)
    before, after = _Side(ORIGINAL, as_stepper(original)), _Side(OPTIMISED, as_stepper(optimized))
    if before.stepper.vocab_size != after.stepper.vocab_size:
        raise ValueError(
            f"the vocabularies differ: {before.stepper.vocab_size} and {after.stepper.vocab_size}; expected one model "
            "before and after an optimisation"
        )
    prompts = _checked(cases, before.stepper.vocab_size)
    results = [_case(name, ids, before, after, new_tokens, rounds) for name, ids in prompts.items()]
    p_value = None
    if samples:
        ids = next(iter(prompts.values()))
        draws = [
            lambda generator, side=side: side.generate(ids, SAMPLED_TOKENS, temperature=1.0, generator=generator)
            for side in (before, after)
        ]
        p_value = sampling_p(*draws, samples)
    return RegressionReport(tuple(results), thresholds, exact, p_value)


def _checked(cases: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    if not isinstance(cases, Mapping):
        raise TypeError(f"cases is a {type(cases).__name__}; expected a mapping of names to int64 tensors")
    if not cases:
        raise ValueError("no cases; expected at least one prompt, for a test of nothing passes")
    return {
        name: check_token_ids(ids, vocab_size, name=f"case {name!r}", of="case", flat=True)
        for name, ids in cases.items()
    }


def _case(name: str, ids: Tensor, before: _Side, after: _Side, new_tokens: int, rounds: int) -> CaseResult:
    tokens = ids.shape[1]
    try:
        expected, text = before.logits(ids), before.generate(ids, new_tokens)
    except FloatingPointError as error:
        raise ValueError(f"case {name!r}: {error}") from error
    except Exception as error:
        raise ValueError(f"case {name!r}: the original itself cannot do it: {error}") from error
    try:
        found, other = after.logits(ids), after.generate(ids, new_tokens)
    except FloatingPointError as error:
        raise ValueError(f"case {name!r}: {error}") from error
    except Exception as error:  # whatever it raises, the original did not: that is the finding
        return CaseResult(name, tokens, error=f"{type(error).__name__}: {error}")
    positions = expected.shape[0]
    targets = ids[:, tokens - positions + 1 :].cpu()  # [1, k - 1]: row i scores the token after it
    losses = [
        float(negative_log_likelihoods(logits[None, :-1], targets).double().sum()) if positions > 1 else 0.0
        for logits in (expected, found)
    ]
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)  # [k, vocab]
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    times = _times(ids, before, after, new_tokens, rounds) if rounds else None
    return CaseResult(
        name,
        tokens,
        positions,
        (losses[0], losses[1]),
        kl=float((p.exp() * (p - q)).nan_to_num(0.0).sum().clamp_min(0.0)),
        same_first=int((p.argmax(-1) == q.argmax(-1)).sum()),
        same_text=same,
        new_tokens=max(len(text), len(other)),
        near_tie=same < len(text) and _margin(before, ids, text[:same]) < NEAR_TIE,
        times=times,
    )


def _margin(side: _Side, ids: Tensor, text: list[int]) -> float:
    """Distance of the two best logits at the token after ids and text."""
    logits = side.stepper.prefill(ids.to(side.stepper.device))[0]
    for token in text:
        logits = side.stepper.step(torch.tensor([[token]], device=side.stepper.device))[0, -1]
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


def _times(ids: Tensor, before: _Side, after: _Side, new_tokens: int, rounds: int) -> Comparison:
    ways = {side.name: lambda side=side: side.generate(ids, new_tokens) for side in (before, after)}
    return compare(ways, rounds=rounds, warmup=0, device=before.stepper.device)  # both have just answered: warm


def sampling_p(
    original: Callable[[torch.Generator], Sequence[int]],
    optimised: Callable[[torch.Generator], Sequence[int]],
    samples: int,
    seed: int = 0,
) -> float:
    """The least p, corrected for the number of positions, of `samples` continuations by each way.

    Each function draws one continuation with the generator it is given. The first token comes from the prompt's pass
    and is the same in every way of decoding; later ones are compared position by position. Seeds are fixed, so the
    outcome is, too.
    """
    draws = []
    for way, offset in ((original, 0), (optimised, samples)):
        draws.append([way(torch.Generator().manual_seed(seed + offset + i)) for i in range(samples)])
    length = min(len(tokens) for tokens in draws[0] + draws[1])
    if length < 2:
        raise ValueError(f"continuations of {length} tokens; expected at least 2 to compare what decoding samples")
    found = [
        homogeneity_p([tokens[i] for tokens in draws[0]], [tokens[i] for tokens in draws[1]]) for i in range(1, length)
    ]
    return min(1.0, min(found) * len(found))


def homogeneity_p(first: Sequence[int], second: Sequence[int]) -> float:
    """The chance, if both samples come from one distribution, of differing at least as much as they do: a chi-square
    test over two samples.

    Rare values are pooled until each cell expects five. 1.0 where only one cell is left: then nothing can be told.
    Raises ValueError for an empty sample, and ImportError without scipy.
    """
    if not first or not second:
        raise ValueError(f"samples of {len(first)} and {len(second)}; expected at least one value each")
    try:
        from scipy.stats import chi2_contingency
    except ImportError as error:
        raise ImportError("comparing two samples needs scipy: `pip install scipy`") from error
    counts = Counter(first), Counter(second)
    together = counts[0] + counts[1]
    least = FEWEST_EXPECTED * len([*first, *second]) / min(len(first), len(second))  # of a value, in both samples
    common = [value for value, total in together.most_common() if total >= least]
    cells = [[count[value] for count in counts] for value in common]  # [values, 2]
    rare = [len(first) - sum(cell[0] for cell in cells), len(second) - sum(cell[1] for cell in cells)]
    if sum(rare) >= least or not cells:
        cells.append(rare)
    else:
        cells[-1] = [cell + more for cell, more in zip(cells[-1], rare, strict=True)]
    return 1.0 if len(cells) < 2 else float(chi2_contingency(cells, correction=False).pvalue)
