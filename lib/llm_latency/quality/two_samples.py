"""Whether two ways of sampling draw from the same distribution: a chi-square test over two samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch

FEWEST_EXPECTED = 5  # of each cell, below which the chi-square approximation fails (Cochran, 1954)


def homogeneity_p(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """The chance, if both samples come from one distribution, of differing at least as much as they do.

    Rare values are pooled until each cell expects five. 1.0 where only one cell is left: then nothing can be told.
    Raises ValueError for an empty sample.
    """
    if not first or not second:
        raise ValueError(f"samples of {len(first)} and {len(second)}; expected at least one value each")
    counts = Counter(first), Counter(second)
    sizes = len(first), len(second)
    together = counts[0] + counts[1]
    share = min(sizes) / sum(sizes)
    cells: list[tuple[int, int]] = []
    pooled = [0, 0]
    for value, total in together.most_common():
        pair = (counts[0][value], counts[1][value])
        if total * share >= FEWEST_EXPECTED:
            cells.append(pair)
        else:
            pooled = [pooled[0] + pair[0], pooled[1] + pair[1]]
    if sum(pooled) * share >= FEWEST_EXPECTED:
        cells.append((pooled[0], pooled[1]))
    elif sum(pooled) and cells:
        cells[-1] = (cells[-1][0] + pooled[0], cells[-1][1] + pooled[1])
    if len(cells) < 2:
        return 1.0
    return float(_scipy_stats().chi2_contingency(cells, correction=False).pvalue)


def _scipy_stats():
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("comparing two samples needs scipy: `pip install scipy`") from error
    return stats


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
