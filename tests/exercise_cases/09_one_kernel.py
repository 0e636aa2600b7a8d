"""Answers to the exercises 09, by cell: (the mistake, a part of the message, the lines between the markers)."""

ROUND = """
    groups = x.view(-1, 32)
    scales = groups.abs().amax(dim=1) / 127
    safe = torch.where(scales > 0, scales, 1.0)
    return (groups / safe[:, None]).round().to(torch.int8).flatten(), scales
"""
MATMUL = """
    q, x = q.view(len(q), -1, 32).int(), codes.view(-1, 32).int()
    dots, sums = (q * x).sum(dim=2), x.sum(dim=1)
    return (t * (scales * dots + minima * sums)).sum(dim=1)
"""
COUNT = """
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    return sum(
        event.name.startswith("aten::") and event.name not in VIEWS and event.cpu_parent is None
        for event in recorded.events()
    )
"""
BARRIERS = """
    count, read, written = 0, set(), set()
    for reads, writes in phases:
        if written & (reads | writes) or read & writes:
            count, read, written = count + 1, set(), set()
        read, written = read | reads, written | writes
    return count
"""

WRONG = {
    "round_vector": [
        ("128 steps", "stands for 127", ROUND.replace("/ 127", "/ 128")),
        ("no magnitudes", "take the magnitudes first", ROUND.replace("groups.abs().amax", "groups.amax")),
        ("one scale", "One scale for the whole vector", """
            scales = (x.abs().max() / 127).expand(len(x) // 32)
            safe = torch.where(scales > 0, scales, 1.0)
            return (x.view(-1, 32) / safe[:, None]).round().to(torch.int8).flatten(), scales
        """),
        ("cut off", "round to the nearest", ROUND.replace(".round()", "")),
        ("zeros", "a group of zeros", ROUND.replace(
            "/ safe[:, None]).round()", "/ scales[:, None]).round().nan_to_num(7)")),
        ("the peak", "what one step of the codes is worth", ROUND.replace(
            ".flatten(), scales", ".flatten(), scales * 127")),
        ("wide codes", "expected torch.int8", ROUND.replace("torch.int8", "torch.int32")),
        ("groups kept apart", "shape", ROUND.replace(".flatten()", "")),
    ],
    "integer_matmul": [
        ("no minima", "The minima are missing", MATMUL.replace(" + minima * sums", "")),
        ("minimum once", "the sum of the vector's codes", MATMUL.replace("minima * sums", "minima")),
        ("no scale of the vector", "The vector's scales are missing", MATMUL.replace("t * (scales", "(scales")),
        ("minimum not scaled", "lacks the vector's scale", MATMUL.replace(
            "(t * (scales * dots + minima * sums))", "(t * scales * dots + minima * sums)")),
        ("minimum in the bracket", "m stands beside s", MATMUL.replace("scales * dots + minima * sums",
                                                                        "scales * (dots + minima * sums)")),
        ("bytes times bytes", "wrap around", """
            q, x = q.view(len(q), -1, 32).to(torch.int8), codes.view(-1, 32)
            dots, sums = (q * x).sum(dim=2), x.sum(dim=1)
            return (t * (scales * dots + minima * sums)).sum(dim=1)
        """),
        ("sums of 16 bits", "does not fit into 16 bits", MATMUL.replace("(q * x).sum(dim=2)",
                                                                       "(q * x).sum(dim=2, dtype=torch.int16)")),
        ("codes around zero", "begin at the minimum", MATMUL.replace("q.view(len(q), -1, 32).int()",
                                                                     "q.view(len(q), -1, 32).int() - 8")),
    ],
    "count_launches": [
        ("all depths", "Operators inside operators", COUNT.replace(" and event.cpu_parent is None", "")),
        ("views", "Views are counted", COUNT.replace(" and event.name not in VIEWS", "")),
        ("kinds", "count every call", """
            with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as recorded:
                step()
            return len({event.name for event in recorded.events()
                        if event.name.startswith("aten::") and event.name not in VIEWS and event.cpu_parent is None})
        """),
        ("matmuls", "Only the matmuls", COUNT.replace(
            'event.name.startswith("aten::")', 'event.name == "aten::linear"')),
        ("twice", "the launches", COUNT.replace("step()", "step(); step()")),
    ],
    "price_us": [
        ("longest", "the longest time over its length", """
            return 1e3 * max(times_ms) / max(lengths)
        """),
        ("milliseconds", "microseconds were asked for", """
            return (max(times_ms) - min(times_ms)) / (max(lengths) - min(lengths))
        """),
        ("upside down", "upside down", """
            return (max(lengths) - min(lengths)) / (max(times_ms) - min(times_ms)) / 1e3
        """),
        ("the mean", "the mean of time over length", """
            return 1e3 * sum(t / n for t, n in zip(times_ms, lengths)) / len(lengths)
        """),
        ("the start", "the line's start", """
            slope = (times_ms[1] - times_ms[0]) / (lengths[1] - lengths[0])
            return 1e3 * (times_ms[0] - slope * lengths[0])
        """),
    ],
    "count_barriers": [
        ("after each", "One after each phase", "return len(phases)"),
        ("between any two", "between any two phases", "return max(0, len(phases) - 1)"),
        ("read after write", "writing matters as well", BARRIERS.replace(
            "written & (reads | writes) or read & writes", "written & reads")),
        ("write after read forgotten", "writes over what another may still be reading", BARRIERS.replace(
            " or read & writes", "")),
        ("write after write forgotten", "write into the same buffer", BARRIERS.replace(
            "written & (reads | writes)", "written & reads")),
        ("neighbours", "Only neighbours", """
            pairs = zip(phases, phases[1:])
            return sum(bool(w1 & (r2 | w2) or r1 & w2) for (r1, w1), (r2, w2) in pairs)
        """),
        ("nothing forgotten", "forget it there", """
            count, written = 0, set()
            for reads, writes in phases:
                count += bool(written & (reads | writes))
                written |= writes
            return count
        """),
        ("one at the end", "no barrier is needed after the last", BARRIERS.replace("return count", "return count + 1")),
        ("readers wait for readers", "Two readers", BARRIERS.replace(
            "written & (reads | writes) or read & writes", "(read | written) & (reads | writes)")),
    ],
}  # fmt: skip

RIGHT = {
    "round_vector": ["""
        scales, codes = [], []
        for group in x.split(32):
            t = group.abs().max() / 127
            scales.append(t)
            codes.append(torch.round(group / t) if t > 0 else torch.zeros(32))
        return torch.cat(codes).to(torch.int8), torch.stack(scales)
    """],
    "integer_matmul": ["""
        y = torch.zeros(len(q))
        for g in range(scales.shape[1]):
            part = codes[32 * g : 32 * g + 32].long()
            dot = (q[:, 32 * g : 32 * g + 32].long() * part).sum(dim=1)
            y += scales[:, g] * t[g] * dot + minima[:, g] * t[g] * part.sum()
        return y
    """],
    "count_launches": ["""
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            step()
        total = 0
        for event in recorded.events():
            outermost = event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")
            total += event.name.startswith("aten::") and outermost and event.name not in VIEWS
        return total
    """],
    "price_us": [
        """
        import numpy as np
        return float(np.polyfit(lengths, times_ms, 1)[0]) * 1000
        """,
        """
        pairs = sorted(zip(lengths, times_ms))
        (n1, t1), (n2, t2) = pairs[0], pairs[-1]
        return 1000 * (t2 - t1) / (n2 - n1)
        """,
    ],
    "count_barriers": ["""
        count, since = 0, []
        for reads, writes in phases:
            if any(w & (reads | writes) or r & writes for r, w in since):
                count += 1
                since = []
            since.append((reads, writes))
        return count
    """],
}  # fmt: skip
