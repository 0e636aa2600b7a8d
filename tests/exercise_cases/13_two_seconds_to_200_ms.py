"""Answers to the exercises 13, by cell: (the mistake, a part of the message, the lines between the markers)."""


def gate(
    missing="case['after_nll'] is None or not math.isfinite(case['after_nll'])",
    speedup="statistics.median(b / a for b, a in zip(case['before_ms'], case['after_ms']))",
    worse="tokens and math.exp((after - before) / tokens) > 1 + max_increase",
    empty="raise ValueError('no cases')",
):
    """The gate with one of its conditions exchanged."""
    return f"""
        if not cases:
            {empty}
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            if {missing}:
                failing.append(case["name"])
                continue
            if {speedup} < min_speedup:
                failing.append(case["name"])
            before += case["before_nll"]
            after += case["after_nll"]
            tokens += case["tokens"]
        if {worse}:
            failing.append("all cases")
        return failing
    """


def order(
    allowed="spent + items[name][1] <= budget",
    saved="sum(left[part] * (1 - f) for part, f in items[name][0].items())",
    whole="sum(left.values())",
    least="0.05",
    rank="gains[name]",
    result="chosen",
):
    """The order with one of its steps exchanged."""
    return f"""
        left, chosen, spent = dict(parts_ms), [], 0.0
        while True:
            gains = {{}}
            for name in items:
                if name not in chosen and {allowed}:
                    gains[name] = {saved}
            if not gains:
                return {result}
            best = max(gains, key=lambda name: {rank})
            if gains[best] < {least} * {whole}:
                return {result}
            chosen.append(best)
            spent += items[best][1]
            for part, factor in items[best][0].items():
                left[part] *= factor
    """


WRONG = {
    "gate": [
        (
            "no token, no case",
            "it got slower: that is judged",
            """
            if not cases:
                raise ValueError("no cases")
            failed, before, after, tokens = [], 0.0, 0.0, 0
            for case in cases:
                if case["tokens"] == 0:
                    continue
                loss = case["after_nll"]
                if loss is None or not math.isfinite(loss):
                    failed.append(case["name"])
                    continue
                before, after, tokens = before + case["before_nll"], after + loss, tokens + case["tokens"]
                if statistics.median(b / a for b, a in zip(case["before_ms"], case["after_ms"])) < min_speedup:
                    failed.append(case["name"])
            if tokens and math.exp(after / tokens) > math.exp(before / tokens) * (1 + max_increase):
                failed.append("all cases")
            return failed
        """,
        ),
        (
            "half left out",
            "tokens and loss before, too",
            """
            if not cases:
                raise ValueError("no cases")
            failed, before, after, tokens = [], 0.0, 0.0, 0
            for case in cases:
                loss = case["after_nll"]
                if loss is None or not math.isfinite(loss):
                    failed.append(case["name"])
                    before, tokens = before + case["before_nll"], tokens + case["tokens"]
                    continue
                before, after, tokens = before + case["before_nll"], after + loss, tokens + case["tokens"]
                if statistics.median(b / a for b, a in zip(case["before_ms"], case["after_ms"])) < min_speedup:
                    failed.append(case["name"])
            if tokens and math.exp(after / tokens) > math.exp(before / tokens) * (1 + max_increase):
                failed.append("all cases")
            return failed
        """,
        ),
        (
            "the lower median",
            "lies between the two ratios in the middle",
            """
            if not cases:
                raise ValueError("no cases")
            failed, before, after, tokens = [], 0.0, 0.0, 0
            for case in cases:
                loss = case["after_nll"]
                if loss is None or not math.isfinite(loss):
                    failed.append(case["name"])
                    continue
                before, after, tokens = before + case["before_nll"], after + loss, tokens + case["tokens"]
                if statistics.median_low(b / a for b, a in zip(case["before_ms"], case["after_ms"])) < min_speedup:
                    failed.append(case["name"])
            if tokens and math.exp(after / tokens) > math.exp(before / tokens) * (1 + max_increase):
                failed.append("all cases")
            return failed
        """,
        ),
        (
            "minus infinity is a number",
            "is infinite",
            """
            if not cases:
                raise ValueError("no cases")
            failed, before, after, tokens = [], 0.0, 0.0, 0
            for case in cases:
                loss = case["after_nll"]
                if loss is None or math.isnan(loss) or loss == math.inf:
                    failed.append(case["name"])
                    continue
                before, after, tokens = before + case["before_nll"], after + loss, tokens + case["tokens"]
                if statistics.median(b / a for b, a in zip(case["before_ms"], case["after_ms"])) < min_speedup:
                    failed.append(case["name"])
            if tokens and math.exp(after / tokens) > math.exp(before / tokens) * (1 + max_increase):
                failed.append("all cases")
            return failed
        """,
        ),
        ("NaN passes", "Comparing with NaN is always False", gate(missing="case['after_nll'] is None")),
        ("a crash passes", "raised TypeError", gate(missing="not math.isfinite(case['after_nll'])")),
        (
            "a mean over cases",
            "A mean over cases counts 31 tokens as much as 901",
            gate(
                worse="statistics.mean(math.exp((c['after_nll'] - c['before_nll']) / c['tokens']) if c['tokens'] "
                "and c['after_nll'] is not None else 1.0 for c in cases) > 1 + max_increase"
            ),
        ),
        (
            "perplexities weighted by tokens",
            "Add up losses, not perplexities",
            gate(
                worse="tokens and sum(c['tokens'] * math.exp((c['after_nll'] - c['before_nll']) / c['tokens']) "
                "for c in cases) / tokens > 1 + max_increase"
            ),
        ),
        (
            "rounded",
            "Is it rounded first?",
            gate(worse="tokens and round(math.exp((after - before) / tokens) - 1, 2) > max_increase"),
        ),
        (
            "at the limit",
            "a limit that is just met is kept",
            gate(worse="tokens and math.exp((after - before) / tokens) >= 1 + max_increase"),
        ),
        (
            "case by case",
            "Is it judged case by case?",
            gate(
                worse="any(math.exp((c['after_nll'] - c['before_nll']) / c['tokens']) > 1 + max_increase "
                "for c in cases if c['tokens'] and c['after_nll'] is not None)"
            ),
        ),
        (
            "an absolute limit",
            "max_increase is relative",
            gate(worse="tokens and math.exp(after / tokens) - math.exp(before / tokens) > max_increase"),
        ),
        (
            "a limit for the loss",
            "The limit is for the perplexity",
            gate(worse="tokens and after > before * (1 + max_increase)"),
        ),
        (
            "a difference of losses",
            "The ratio of perplexities is exp of it",
            gate(worse="tokens and (after - before) / tokens > max_increase"),
        ),
        (
            "any change",
            "That is no regression",
            gate(worse="tokens and abs(math.exp((after - before) / tokens) - 1) > max_increase"),
        ),
        (
            "the speed-up upside down",
            "Is the speed-up before over after?",
            gate(speedup="statistics.median(a / b for b, a in zip(case['before_ms'], case['after_ms']))"),
        ),
        (
            "the mean of the ratios",
            "A mean follows those",
            gate(speedup="statistics.mean(b / a for b, a in zip(case['before_ms'], case['after_ms']))"),
        ),
        (
            "two medians",
            "not the ratio of two medians",
            gate(speedup="statistics.median(case['before_ms']) / statistics.median(case['after_ms'])"),
        ),
        (
            "the worst round",
            "A mean, or the worst, follows that one",
            gate(speedup="min(b / a for b, a in zip(case['before_ms'], case['after_ms']))"),
        ),
        ("no cases pass", "must not let it pass", gate(empty="return []")),
        (
            "NaN hides the others",
            "hides them",
            gate(
                worse="tokens and math.exp(sum((c['after_nll'] or 0) - c['before_nll'] for c in cases) / tokens) > "
                "1 + max_increase"
            ),
        ),
        ("true or false", "expected list or tuple or set", "return bool(cases)"),
    ],
    "order": [
        (
            "five percent is too little",
            "exactly 5% does not save less",
            """
            left, chosen, spent = dict(parts_ms), [], 0.0
            while True:
                saved = {
                    name: sum(left[part] * (1 - factor) for part, factor in factors.items())
                    for name, (factors, cost) in items.items()
                    if name not in chosen and spent + cost <= budget
                }
                best = max(saved, key=saved.get, default=None)
                if best is None or saved[best] <= 0.05 * sum(left.values()):
                    return chosen
                chosen.append(best)
                spent += items[best][1]
                for part, factor in items[best][0].items():
                    left[part] *= factor
        """,
        ),
        (
            "ranked once",
            "Every gain is that of the untouched request",
            """
            gains = {name: sum(parts_ms[part] * (1 - f) for part, f in items[name][0].items()) for name in items}
            chosen, spent = [], 0.0
            for name in sorted(gains, key=gains.get, reverse=True):
                if gains[name] >= 0.05 * sum(parts_ms.values()) and spent + items[name][1] <= budget:
                    chosen.append(name)
                    spent += items[name][1]
            return chosen
        """,
        ),
        ("by the smallest factor", "The smallest factor comes first", order(rank="-min(items[name][0].values())")),
        ("no stop", "hardly worth it", order(least="0.0")),
        ("all of them", "hardly worth it", order(least="-1e9")),
        ("5% of the first", "not of what it took at first", order(whole="sum(parts_ms.values())")),
        ("no budget", "The budget of quality is overdrawn", order(allowed="True")),
        ("each within the budget", "The budget of quality is overdrawn", order(allowed="items[name][1] <= budget")),
        (
            "ends at a costly one",
            "Leave that one out, and go on with the next best",
            """
            left, chosen, spent = dict(parts_ms), [], 0.0
            while len(chosen) < len(items):
                gains = {name: sum(left[part] * (1 - f) for part, f in items[name][0].items())
                         for name in items if name not in chosen}
                best = max(gains, key=gains.get)
                if gains[best] < 0.05 * sum(left.values()) or spent + items[best][1] > budget:
                    break
                chosen.append(best)
                spent += items[best][1]
                for part, factor in items[best][0].items():
                    left[part] *= factor
            return chosen
        """,
        ),
        (
            "in place",
            "changed its argument 1",
            """
            for part, factor in next(iter(items.values()))[0].items():
                parts_ms[part] *= factor
            return list(items)
        """,
        ),
        ("the worst first", "The item that saves most comes last", order(result="chosen[::-1]")),
    ],
}

RIGHT = {
    "gate": [
        """
        if len(cases) == 0:
            raise ValueError("nothing to test")
        done = [case for case in cases if case["after_nll"] is not None and abs(case["after_nll"]) < math.inf]
        failing = {case["name"] for case in cases if case not in done}
        for case in done:
            if statistics.median(b / a for b, a in zip(case["before_ms"], case["after_ms"])) < min_speedup:
                failing.add(case["name"])
        tokens = sum(case["tokens"] for case in done)
        if tokens > 0:
            before, after = (math.exp(sum(case[key] for case in done) / tokens) for key in ("before_nll", "after_nll"))
            if after / before - 1 > max_increase:
                failing.add("all cases")
        return failing
    """
    ],
    "order": [
        """
        def request(names):
            total = 0.0
            for part, ms in parts_ms.items():
                for name in names:
                    ms *= items[name][0].get(part, 1.0)
                total += ms
            return total

        chosen = []
        while True:
            affordable = [n for n in items if n not in chosen and sum(items[m][1] for m in [*chosen, n]) <= budget]
            times = {name: request([*chosen, name]) for name in affordable}
            if not times or min(times.values()) > 0.95 * request(chosen):
                return tuple(chosen)
            chosen.append(min(times, key=times.get))
    """
    ],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "gate": [
        (
            "infinity passes",
            "that case fails by its name, and the perplexity is judged over the oth",
            """
        if not cases:
            raise ValueError("no cases")
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            if case["after_nll"] is None or math.isnan(case["after_nll"]):
                failing.append(case["name"])
                continue
            ratios = [b / a for b, a in zip(case["before_ms"], case["after_ms"])]
            if statistics.median(ratios) < min_speedup:
                failing.append(case["name"])
            before, after, tokens = before + case["before_nll"], after + case["after_nll"], tokens + case["tokens"]
        if tokens and math.exp((after - before) / tokens) > 1 + max_increase:
            failing.append("all cases")
        return failing
        """,
        ),
        (
            "speed-up just met",
            "Nothing changed, and no change was asked for",
            """
        if not cases:
            raise ValueError("no cases")
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            if case["after_nll"] is None or not math.isfinite(case["after_nll"]):
                failing.append(case["name"])
                continue
            ratios = [b / a for b, a in zip(case["before_ms"], case["after_ms"])]
            if statistics.median(ratios) <= min_speedup:
                failing.append(case["name"])
            before, after, tokens = before + case["before_nll"], after + case["after_nll"], tokens + case["tokens"]
        if tokens and math.exp((after - before) / tokens) > 1 + max_increase:
            failing.append("all cases")
        return failing
        """,
        ),
        (
            "increase just met",
            "Nothing changed, and no change was asked for",
            """
        if not cases:
            raise ValueError("no cases")
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            if case["after_nll"] is None or not math.isfinite(case["after_nll"]):
                failing.append(case["name"])
                continue
            ratios = [b / a for b, a in zip(case["before_ms"], case["after_ms"])]
            if statistics.median(ratios) < min_speedup:
                failing.append(case["name"])
            before, after, tokens = before + case["before_nll"], after + case["after_nll"], tokens + case["tokens"]
        if tokens and math.exp((after - before) / tokens) >= 1 + max_increase:
            failing.append("all cases")
        return failing
        """,
        ),
        (
            "the sum of times",
            "times faster, in two it seems to have ended at once",
            """
        if not cases:
            raise ValueError("no cases")
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            if case["after_nll"] is None or not math.isfinite(case["after_nll"]):
                failing.append(case["name"])
                continue
            ratios = [b / a for b, a in zip(case["before_ms"], case["after_ms"])]
            if sum(case["before_ms"]) / sum(case["after_ms"]) < min_speedup:
                failing.append(case["name"])
            before, after, tokens = before + case["before_nll"], after + case["after_nll"], tokens + case["tokens"]
        if tokens and math.exp((after - before) / tokens) > 1 + max_increase:
            failing.append("all cases")
        return failing
        """,
        ),
        (
            "losses in percent",
            "%, and its logarithm, the loss per token, by",
            """
        if not cases:
            raise ValueError("no cases")
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            if case["after_nll"] is None or not math.isfinite(case["after_nll"]):
                failing.append(case["name"])
                continue
            ratios = [b / a for b, a in zip(case["before_ms"], case["after_ms"])]
            if statistics.median(ratios) < min_speedup:
                failing.append(case["name"])
            before, after, tokens = before + case["before_nll"], after + case["after_nll"], tokens + case["tokens"]
        if tokens and (after - before) / before > max_increase:
            failing.append("all cases")
        return failing
        """,
        ),
        (
            "the best round",
            "times faster, in two it seems to have ended at once",
            """
        if not cases:
            raise ValueError("no cases")
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            if case["after_nll"] is None or not math.isfinite(case["after_nll"]):
                failing.append(case["name"])
                continue
            ratios = [b / a for b, a in zip(case["before_ms"], case["after_ms"])]
            if max(ratios) < min_speedup:
                failing.append(case["name"])
            before, after, tokens = before + case["before_nll"], after + case["after_nll"], tokens + case["tokens"]
        if tokens and math.exp((after - before) / tokens) > 1 + max_increase:
            failing.append("all cases")
        return failing
        """,
        ),
    ],
    "order": [
        (
            "by cost",
            "prefill arithmetic",
            """
        return sorted((n for n in items if items[n][1] <= budget), key=lambda n: items[n][1])
        """,
        ),
        (
            "strictly below the budget",
            "A cost that just fills the budget does not exceed it.",
            """
        left, chosen, spent = dict(parts_ms), [], 0.0
        while True:
            gains = {}
            for name, (factors, cost) in items.items():
                if name not in chosen and spent + cost < budget:
                    gains[name] = sum(left[part] * (1 - factor) for part, factor in factors.items())
            best = max(gains, key=gains.get, default=None)
            if best is None or gains[best] < 0.05 * sum(left.values()):
                return chosen
            factors, cost = items[best]
            chosen.append(best)
            spent += cost
            for part, factor in factors.items():
                left[part] *= factor
        """,
        ),
        (
            "what is saved",
            "A factor is what remains of a part",
            """
        left, chosen, spent = dict(parts_ms), [], 0.0
        while True:
            gains = {}
            for name, (factors, cost) in items.items():
                if name not in chosen and spent + cost <= budget:
                    gains[name] = sum(left[part] * factor for part, factor in factors.items())
            best = max(gains, key=gains.get, default=None)
            if best is None or gains[best] < 0.05 * sum(left.values()):
                return chosen
            factors, cost = items[best]
            chosen.append(best)
            spent += cost
            for part, factor in factors.items():
                left[part] *= 1 - factor
        """,
        ),
        (
            "a set",
            "expected list or tuple",
            """
        return set(items)
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "gate": [
        """
        if not cases:
            raise ValueError("no cases")
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            if case["after_nll"] is None or not math.isfinite(case["after_nll"]):
                failing.append(case["name"])
                continue
            ratios = [b / a for b, a in zip(case["before_ms"], case["after_ms"])]
            if statistics.median(ratios) < min_speedup:
                failing.append(case["name"])
            before, after, tokens = before + case["before_nll"], after + case["after_nll"], tokens + case["tokens"]
        if tokens and after / tokens - before / tokens > math.log1p(max_increase):
            failing.append("all cases")
        return set(failing)
        """,
        """
        if not cases:
            raise ValueError("no cases")
        failing, before, after, tokens = [], 0.0, 0.0, 0
        for case in cases:
            nll = case["after_nll"]
            if nll is None or nll != nll or abs(nll) == math.inf:
                failing.append(case["name"])
                continue
            ratios = [b / a for b, a in zip(case["before_ms"], case["after_ms"])]
            if (sorted(ratios)[len(ratios) // 2] + sorted(ratios)[(len(ratios) - 1) // 2]) / 2 < min_speedup:
                failing.append(case["name"])
            before, after, tokens = before + case["before_nll"], after + case["after_nll"], tokens + case["tokens"]
        if tokens and math.exp((after - before) / tokens) > 1 + max_increase:
            failing.append("all cases")
        return failing
        """,
    ],
    "order": [
        """
        now, order_, cost_so_far = parts_ms.copy(), (), 0
        candidates = dict(items)
        while candidates:
            saved = {n: sum(now[p] * (1 - f) for p, f in factors.items()) for n, (factors, c) in candidates.items()
                     if cost_so_far + c <= budget}
            if not saved:
                break
            name = max(saved, key=saved.__getitem__)
            if saved[name] < sum(now.values()) / 20:
                break
            factors, cost = candidates.pop(name)
            order_, cost_so_far = (*order_, name), cost_so_far + cost
            now = {p: ms * factors.get(p, 1) for p, ms in now.items()}
        return order_
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
