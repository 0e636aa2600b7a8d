"""How many of a draft's tokens the target accepts, counted on the target's own held-out answers.

No speculative decoder is needed for it. Its output is the target's own text, and what it would accept on the way is
known from that text alone: a greedy draft token is accepted if it is the text's token; a sampled one is accepted, given
that the text went on with token x, with probability min(1, q(x) / p(x)). (Of the chance p(x) that the text goes on with
x, min(p(x), q(x)) comes through an accepted draft.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from draft_train import _batch
from torch import Tensor, nn

LOGITS = 1 << 16  # head rows times texts at once: 256 tokens of each make 64 MB


@torch.inference_mode()
def target_chances(chunks: list[dict], head: Tensor) -> list[Tensor]:
    """log p of each text's next token [b, n - 1] under the target, one tensor per chunk; 0 where it does not count."""
    result = []
    for chunk in chunks:
        batch = _batch(chunk, torch.arange(len(chunk["lengths"])))
        chances = torch.zeros(batch.tokens.shape[0], batch.tokens.shape[1])
        for row in range(len(chances)):  # a row at a time: the full head is 49k wide
            known = batch.known[row]
            logits = F.linear(batch.features[row, known], head)
            following = batch.tokens[row].roll(-1)[known]
            chances[row, known] = logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(dim=1)
        result.append(chances)
    return result


@torch.inference_mode()
def evaluate(
    student: nn.Module,
    chunks: list[dict],
    head_ids: Tensor,
    head_rows: Tensor,
    *,
    gammas: tuple[int, ...] = (1, 2, 3, 4),
    chances: list[Tensor] | None = None,
    seed: int = 5,
) -> dict:
    """Acceptance on held-out answers: greedy on the greedy ones, and with `chances` by sampling on the sampled ones.

    Returns {"greedy": {"acceptance": {gamma: accepted / proposed}, "by_position": [...], "tokens_per_cycle": {...},
    "by_kind": {gamma: {kind: ...}}}, "sampled": the same}. by_position: how often the j-th token of the longest draft
    is accepted if those before it were.
    """
    columns = torch.full((int(head_ids.max()) + 1,), -1)
    columns[head_ids] = torch.arange(len(head_ids))
    generator = torch.Generator().manual_seed(seed)
    accepted: dict[str, list[tuple[Tensor, str]]] = {"greedy": [], "sampled": []}
    for number, chunk in enumerate(chunks):
        for rows in torch.arange(len(chunk["lengths"])).split(max(1, LOGITS // len(head_ids))):
            if chances is None:
                rows = rows[~chunk["sampled"][rows]]
            if len(rows) == 0:
                continue
            batch = _batch(chunk, rows)
            following = batch.tokens.roll(-1, dims=1)  # [b, n]
            column = torch.where(following < len(columns), columns[following.clamp(max=len(columns) - 1)], -1)
            hits = []
            for predicted in student.predict(batch.tokens, batch.features, max(gammas)):
                logits = F.linear(predicted, head_rows)  # [b, n, v]
                greedy = logits.argmax(dim=-1) == column
                if chances is not None:
                    log_q = logits.gather(2, column.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(dim=-1)
                    log_p = chances[number][rows, : log_q.shape[1]]
                    drawn = torch.rand(log_q.shape, generator=generator).log() < log_q - log_p
                    sampled = drawn & (column >= 0)
                    greedy = torch.where(chunk["sampled"][rows, None], sampled, greedy)
                hits.append(greedy & batch.known)
            hits = torch.stack(hits, dim=-1)  # [b, n, gamma]
            for i, row in enumerate(rows.tolist()):
                key = "sampled" if chunk["sampled"][row] else "greedy"
                # The first answer token comes from the prompt's own pass and is never drafted.
                known = batch.known[i].nonzero()[1:, 0]
                accepted[key].append((hits[i, known], chunk["kinds"][row]))
    return {key: _summary(texts, gammas) for key, texts in accepted.items() if texts}


def _summary(texts: list[tuple[Tensor, str]], gammas: tuple[int, ...]) -> dict:
    """Walk every text in cycles of each gamma. A text's hits [m, gamma]: row p, column j is the (j + 1)-th step's."""
    result: dict = {"acceptance": {}, "tokens_per_cycle": {}, "by_kind": {}}
    for gamma in gammas:
        counts: dict[str, list[int]] = {}
        tried, right = [0] * gamma, [0] * gamma
        for hits, kind in texts:
            table, start = hits.tolist(), 0
            count = counts.setdefault(kind, [0, 0, 0, 0])  # accepted, proposed, cycles, tokens
            while start < len(table):
                length = min(gamma, len(table) - start)
                run = 0
                while run < length:
                    tried[run] += 1
                    if not table[start + run][run]:
                        break
                    right[run] += 1
                    run += 1
                count[0] += run
                count[1] += length
                count[2] += 1
                count[3] += min(run + 1, len(table) - start)
                start += run + 1
        total = [sum(column) for column in zip(*counts.values(), strict=True)]
        result["acceptance"][str(gamma)] = total[0] / total[1]
        result["tokens_per_cycle"][str(gamma)] = total[3] / total[2]
        result["by_kind"][str(gamma)] = {kind: c[0] / c[1] for kind, c in sorted(counts.items())}
        if gamma == max(gammas):
            result["by_position"] = [r / t if t else None for r, t in zip(right, tried, strict=True)]
    return result
