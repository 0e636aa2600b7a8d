"""Answers to the exercises 10, by cell: (the mistake, a part of the message, the lines between the markers)."""

CYCLES = """
            target = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1]])
            draft = torch.tensor([[0.1, 0.3, 0.6], [0.4, 0.3, 0.3]])
            out = run_cycles(rule, target, draft, 40_000, torch.Generator().manual_seed(1))
"""

WRONG = {
    "count_accepted": [
        (
            "a constant",
            "The answer stays the same whatever the uniforms are",
            """
            kept = 0
            for i, token in enumerate(tokens):
                if target_probs[i, token] / draft_probs[i, token] <= 0.5:
                    break
                kept += 1
            return kept
        """,
        ),
        (
            "the greedy rule",
            "That is the greedy rule",
            """
            return int((tokens == target_probs[:-1].argmax(-1)).long().cumprod(0).sum())
        """,
        ),
        (
            "all kept ones are counted",
            "those after the first refused one too",
            """
            i = torch.arange(len(tokens))
            return int((uniforms < target_probs[i, tokens] / draft_probs[i, tokens]).sum())
        """,
        ),
        (
            "one position late",
            "Row i + 1 of the target is compared with token i",
            """
            kept = 0
            for i, token in enumerate(tokens):
                if uniforms[i] >= target_probs[i + 1, token] / draft_probs[i, token]:
                    break
                kept += 1
            return kept
        """,
        ),
        (
            "upside down",
            "p / q is upside down",
            """
            kept = 0
            for i, token in enumerate(tokens):
                if uniforms[i] >= draft_probs[i, token] / target_probs[i, token]:
                    break
                kept += 1
            return kept
        """,
        ),
        (
            "without q",
            "the draft's q is missing",
            """
            i = torch.arange(len(tokens))
            return int((uniforms < target_probs[i, tokens]).long().cumprod(0).sum())
        """,
        ),
        (
            "not strict",
            "not if u <= p / q",
            """
            i = torch.arange(len(tokens))
            return int((uniforms <= target_probs[i, tokens] / draft_probs[i, tokens]).long().cumprod(0).sum())
        """,
        ),
        (
            "a list of what is kept",
            "expected a number",
            """
            return [bool(u < target_probs[i, t] / draft_probs[i, t]) for i, (t, u) in enumerate(zip(tokens, uniforms))]
        """,
        ),
    ],
    "residual": [
        (
            "nearly is equal",
            "is nearly equal taken for equal?",
            """
            left = (p - q).clamp(min=0)
            return left / left.sum() if left.sum() > 1e-3 else p
        """,
        ),
        (
            "what is shared, added up",
            "1 - sum(min(p, q)) seldom is",
            """
            left, total = (p - q).clamp(min=0), 1 - torch.minimum(p, q).sum()
            return left / total if total != 0 else p
        """,
        ),
        ("p itself", "It is p itself", "return p"),
        ("not normalised", "It does not sum to 1", "return (p - q).clamp(min=0)"),
        (
            "upside down",
            "upside down: what the draft has too much",
            """
            excess = (q - p).clamp(min=0)
            return excess / excess.sum()
        """,
        ),
        ("the distance", "It is the distance |p - q|", "return (p - q).abs() / (p - q).abs().sum()"),
        ("a softmax", "differences of probabilities are not logits", "return (p - q).softmax(-1)"),
        ("nothing left over", "0 / 0. Return p", "return (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()"),
        (
            "a small number against 0 / 0",
            "the residual of p = q, which is p",
            """
            excess = (p - q).clamp(min=0)
            return excess / (excess.sum() + 1e-9)
        """,
        ),
        ("in place", "changed its argument 1", "return p.sub_(q).clamp_(min=0).div_(p.sum())"),
    ],
    "best_gamma": [
        (
            "costs nothing",
            "does a draft step cost nothing?",
            "return max_gamma",
        ),
        (
            "max_gamma left out",
            "max_gamma itself is never tried",
            """
            gains = [sum(alpha**i for i in range(g + 1)) / (g * cost + 1) for g in range(max_gamma)]
            return gains.index(max(gains))
        """,
        ),
        (
            "never 0",
            "It is never 0",
            """
            gains = [sum(alpha**i for i in range(g + 1)) / (g * cost + 1) for g in range(1, max_gamma + 1)]
            return 1 + gains.index(max(gains))
        """,
        ),
        (
            "the same chance at every place",
            "The i-th stands only if all before it do",
            """
            gains = [(1 + g * alpha) / (g * cost + 1) for g in range(max_gamma + 1)]
            return gains.index(max(gains))
        """,
        ),
        (
            "without the target's own token",
            "one token more than it accepts",
            """
            gains = [sum(alpha**i for i in range(1, g + 1)) / (g * cost + 1) for g in range(max_gamma + 1)]
            return gains.index(max(gains))
        """,
        ),
        (
            "without the target's pass",
            "Is the target's own pass counted?",
            """
            gains = [sum(alpha**i for i in range(g + 1)) / (g * cost) for g in range(1, max_gamma + 1)]
            return 1 + gains.index(max(gains))
        """,
        ),
        (
            "one draft step per cycle",
            "It is taken gamma times",
            """
            gains = [sum(alpha**i for i in range(g + 1)) / (cost + 1) for g in range(max_gamma + 1)]
            return gains.index(max(gains))
        """,
        ),
        (
            "the closed form at 1",
            "ZeroDivisionError",
            """
            gains = [(1 - alpha ** (g + 1)) / (1 - alpha) / (g * cost + 1) for g in range(max_gamma + 1)]
            return gains.index(max(gains))
        """,
        ),
        (
            "the speed-up instead",
            "expected a whole number",
            "return max(sum(alpha**i for i in range(g + 1)) / (g * cost + 1.1) for g in range(max_gamma + 1))",
        ),
    ],
    "prompt_lookup": [
        (
            "n longer than the text",
            "shorter than max_ngram nothing is found",
            """
            for n in range(max_ngram, 0, -1):
                for begin in range(len(text) - 1, -1, -1):
                    if text[begin : begin + n] == text[-n:] and begin != len(text) - n:
                        return text[begin + n : begin + n + count]
            return []
        """,
        ),
        (
            "as text",
            "Are ids looked for as text?",
            """
            for n in range(min(max_ngram, len(text) - 1), 0, -1):
                place = " ".join(str(t) for t in text[:-1]).rfind(" ".join(str(t) for t in text[-n:]))
                if place >= 0:
                    start = " ".join(str(t) for t in text)[:place].count(" ")
                    return text[start + n :][:count]
            return []
        """,
        ),
        (
            "finds itself",
            "was found in its own place",
            """
            for n in range(min(max_ngram, len(text)), 0, -1):
                for start in range(len(text) - n, -1, -1):
                    if text[start : start + n] == text[-n:]:
                        return text[start + n : start + n + count]
            return []
        """,
        ),
        (
            "the first",
            "It is the first occurrence",
            """
            for n in range(max_ngram, 0, -1):
                for start in range(len(text) - n):
                    if text[start : start + n] == text[-n:]:
                        return text[start + n : start + n + count]
            return []
        """,
        ),
        (
            "short ones first",
            "The short n-grams are tried first",
            """
            for n in range(1, max_ngram + 1):
                for start in range(len(text) - n - 1, -1, -1):
                    if text[start : start + n] == text[-n:]:
                        return text[start + n : start + n + count]
            return []
        """,
        ),
        (
            "only the longest",
            "Only n = max_ngram is tried",
            """
            n = max_ngram
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == text[-n:]:
                    return text[start + n : start + n + count]
            return []
        """,
        ),
        (
            "the match in the draft",
            "The match itself is in the draft",
            """
            for n in range(max_ngram, 0, -1):
                for start in range(len(text) - n - 1, -1, -1):
                    if text[start : start + n] == text[-n:]:
                        return text[start : start + count]
            return []
        """,
        ),
        (
            "all that follows",
            "More than `count` tokens",
            """
            for n in range(max_ngram, 0, -1):
                for start in range(len(text) - n - 1, -1, -1):
                    if text[start : start + n] == text[-n:]:
                        return text[start + n :]
            return []
        """,
        ),
        (
            "no overlap",
            "overlap the end of the text",
            """
            for n in range(max_ngram, 0, -1):
                for start in range(len(text) - 2 * n, -1, -1):
                    if text[start : start + n] == text[-n:]:
                        return text[start + n : start + n + count]
            return []
        """,
        ),
        (
            "None for nothing",
            "Is a `return` missing?",
            """
            for n in range(max_ngram, 0, -1):
                for start in range(len(text) - n - 1, -1, -1):
                    if text[start : start + n] == text[-n:]:
                        return text[start + n : start + n + count]
        """,
        ),
    ],
    "test_rule": [
        (
            "draft and target alike",
            "passes on a broken program",
            """
            target = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
            out = run_cycles(rule, target, target[:1], 20_000, torch.Generator().manual_seed(0))
            assert (torch.bincount(out[:, 0], minlength=3) / 20_000 - target[0]).abs().max() < 0.03
        """,
        ),
        (
            "rows alike",
            "token i is compared with row i + 1 of the target",
            """
            target = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
            draft = torch.tensor([[0.1, 0.3, 0.6]])
            out = run_cycles(rule, target, draft, 20_000, torch.Generator().manual_seed(0))
            assert (torch.bincount(out[:, 0], minlength=3) / 20_000 - target[0]).abs().max() < 0.03
        """,
        ),
        (
            "the first place only",
            "after the first place everything is kept",
            CYCLES
            + """
            assert (torch.bincount(out[:, 0], minlength=3) / 40_000 - target[0]).abs().max() < 0.03
        """,
        ),
        (
            "every ratio above the constant",
            "it accepts against a constant",
            """
            target = torch.tensor([[0.4, 0.3, 0.3], [0.2, 0.4, 0.4]])
            draft = torch.tensor([[0.3, 0.3, 0.4]])
            out = run_cycles(rule, target, draft, 20_000, torch.Generator().manual_seed(0))
            assert out.max() < 3 and len(out) == 20_000
        """,
        ),
        (
            "too few cycles for the tolerance",
            "with other random numbers: is the tolerance",
            """
            target = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1]])
            draft = torch.tensor([[0.1, 0.3, 0.6], [0.4, 0.3, 0.3]])
            for seed in range(1000):  # a seed with which the plain rule passes
                out = run_cycles(rule, target, draft, 500, torch.Generator().manual_seed(seed))
                plain = run_cycles(lambda i, t, u, p, q: (u * q[i][t] < p[i][t], programs.left_over(p[i], q[i])),
                                   target, draft, 500, torch.Generator().manual_seed(seed))
                if (torch.bincount(plain[:, 0], minlength=3) / 500 - target[0]).abs().max() < 0.002:
                    break
            assert (torch.bincount(out[:, 0], minlength=3) / 500 - target[0]).abs().max() < 0.002
        """,
        ),
        (
            "tests the random numbers' use",
            "fails on a program that is right",
            """
            kept, _ = rule(0, torch.tensor([0]), torch.tensor([0.45]), torch.tensor([[0.5, 0.5], [0.5, 0.5]]),
                           torch.tensor([[0.9, 0.1]]))
            assert kept.item()
        """,
        ),
        (
            "looks only at what is kept",
            "from p, not from the residual",
            CYCLES
            + """
            kept = (out[:, 1] >= 0).float().mean().item()
            assert abs(kept - torch.minimum(target[0], draft[0]).sum().item()) < 0.03
            assert abs((out[:, 2] >= 0).float().mean().item() - kept * 0.6) < 0.03
        """,
        ),
    ],
}

RIGHT = {
    "count_accepted": [
        """
            places = torch.arange(len(tokens))
            kept = uniforms * draft_probs[places, tokens] < target_probs[places, tokens]
            return int(kept.int().cumprod(0).sum())
        """,
        """
            for i, token in enumerate(tokens.tolist()):
                chance = min(1.0, target_probs[i, token].item() / draft_probs[i, token].item())
                if not uniforms[i].item() < chance:
                    return i
            return len(tokens)
        """,
    ],
    "residual": [
        """
            rest = p - torch.minimum(p, q)
            return torch.where(rest.sum() > 0, rest / rest.sum(), p)
        """
    ],
    "best_gamma": [
        """
            def speedup(gamma):
                tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
                return tokens / (gamma * cost + 1)

            return max(range(max_gamma + 1), key=speedup)
        """
    ],
    "prompt_lookup": [
        """
            for n in range(min(max_ngram, len(text) - 1), 0, -1):
                behind = [i for i in range(n, len(text)) if text[i - n : i] == text[len(text) - n :]]
                if behind:
                    return text[behind[-1] :][:count]
            return []
        """
    ],
    "test_rule": [
        """
            target = torch.tensor([[0.5, 0.25, 0.05, 0.2], [0.05, 0.15, 0.7, 0.1], [0.4, 0.4, 0.1, 0.1]])
            draft = torch.tensor([[0.05, 0.35, 0.4, 0.2], [0.5, 0.3, 0.1, 0.1]])
            out = run_cycles(rule, target, draft, 60_000, None)
            for place in range(3):
                tokens = out[:, place][out[:, place] != -1]
                for token in range(4):
                    p = target[place, token].item()
                    error = (p * (1 - p) / len(tokens)) ** 0.5
                    assert abs((tokens == token).float().mean().item() - p) < 8 * error
        """
    ],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "count_accepted": [
        (
            "the first refused one as well",
            "The first refused token is counted, too.",
            """
        for i, token in enumerate(tokens):
            if uniforms[i] >= target_probs[i, token] / draft_probs[i, token]:
                return i + 1
        return len(tokens)
        """,
        ),
        (
            "the largest",
            "Those are the largest probabilities of the rows",
            """
        kept = uniforms < target_probs[:-1].amax(-1) / draft_probs.amax(-1)
        return int(kept.long().cumprod(0).sum())
        """,
        ),
        (
            "u the larger",
            "It is kept when u is the larger",
            """
        count = 0
        for i, token in enumerate(tokens):
            if not uniforms[i] > target_probs[i, token] / draft_probs[i, token]:
                break
            count += 1
        return count
        """,
        ),
    ],
    "residual": [
        (
            "not cut off",
            "Where q is the larger, nothing is missing",
            """
        if torch.equal(p, q):
            return p
        return (p - q) / (p - q).sum()
        """,
        ),
        (
            "a softmax of what is left",
            "probabilities are not logits",
            """
        if torch.equal(p, q):
            return p
        return (p - q).clamp(min=0).softmax(-1)
        """,
        ),
        (
            "divided by the largest",
            "wrong, most at",
            """
        excess = (p - q).clamp(min=0)
        return excess / excess.max() if excess.any() else p
        """,
        ),
    ],
    "best_gamma": [
        (
            "the difference",
            "That is the best of the tokens minus the cost",
            """
        return max(range(max_gamma + 1), key=lambda g: sum(alpha**i for i in range(g + 1)) - (g * cost + 1))
        """,
        ),
        (
            "one power too few",
            "its last term is alpha ** gamma, so it has gamma +",
            """
        return max(range(max_gamma + 1), key=lambda g: sum(alpha**i for i in range(g)) / (g * cost + 1))
        """,
        ),
    ],
    "prompt_lookup": [
        (
            "one token later",
            "One token after the match is left out.",
            """
        for n in range(max_ngram, 0, -1):
            ending = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == ending:
                    return text[start + n + 1 : start + n + 1 + count]
        return []
        """,
        ),
    ],
    "test_rule": [
        (
            "only the mean",
            "test_rule passes on a broken program, so it proves nothing",
            """
        target = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1]])
        draft = torch.tensor([[0.1, 0.3, 0.6], [0.4, 0.3, 0.3]])
        out = run_cycles(rule, target, draft, 4000, torch.Generator().manual_seed(0))
        assert out.shape == (4000, 3)
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "residual": [
        """
        excess = torch.relu(p.double() - q.double())
        return excess / excess.sum() if excess.sum() > 0 else p.double()
        """,
    ],
    "prompt_lookup": [
        """
        for n in range(min(max_ngram, len(text) - 1), 0, -1):
            starts = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
            if starts:
                return torch.tensor(text[starts[-1] + n :][:count])
        return ()
        """,
    ],
    "count_accepted": [
        """
        p = target_probs[torch.arange(len(tokens)), tokens]
        q = draft_probs[torch.arange(len(tokens)), tokens]
        return torch.cumprod((uniforms * q < p).int(), 0).sum()
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
