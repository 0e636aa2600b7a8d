"""Answers to the exercises 06, by cell: (the mistake, a part of the message, the lines between the markers)."""

LOOP = """
    (queries, head_dim), keys = q.shape, k.shape[0]
    seen = torch.arange(queries)[:, None] + keys - queries
    m, l, acc = torch.full((queries, 1), -torch.inf), torch.zeros(queries, 1), torch.zeros(queries, head_dim)
    for start in range(0, keys, block):
        scores = q @ k[start : start + block].T / math.sqrt(head_dim)
        hidden = start + torch.arange(scores.shape[1]) > seen
        m, l, acc = update(m, l, acc, scores.masked_fill(hidden, -torch.inf), v[start : start + block])
    return acc / l
"""

MASKED = """
    scores = scores.masked_fill(~allowed, -torch.inf)
    values = values.masked_fill(~allowed.any(0)[:, None], 0)
    m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
    origin = m_new.masked_fill(m_new == -torch.inf, 0)
    weights = torch.exp(scores - origin)
    shrink = torch.exp(m - origin)
    return m_new, l * shrink + weights.sum(-1, keepdim=True), acc * shrink + weights @ values
"""

WRONG = {
    "update": [
        (
            "l keeps its old measure",
            "The old sum was measured from the old maximum",
            """
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - m_new)
            return m_new, l + weights.sum(-1, keepdim=True), acc * torch.exp(m - m_new) + weights @ values
        """,
        ),
        (
            "acc keeps its old measure",
            "The old acc was measured from the old maximum",
            """
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - m_new), torch.exp(m - m_new)
            return m_new, l * shrink + weights.sum(-1, keepdim=True), acc + weights @ values
        """,
        ),
        (
            "the factor upside down",
            "exp(m_new - m) is infinite",
            """
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights, grow = torch.exp(scores - m_new), torch.exp(m_new - m)
            return m_new, l * grow + weights.sum(-1, keepdim=True), acc * grow + weights @ values
        """,
        ),
        (
            "the maximum of the block",
            "It is the maximum of this block alone",
            """
            m_new = scores.amax(-1, keepdim=True)
            weights, shrink = torch.exp(scores - m_new), torch.exp(m - m_new)
            return m_new, l * shrink + weights.sum(-1, keepdim=True), acc * shrink + weights @ values
        """,
        ),
        (
            "one maximum for all rows",
            "one maximum for all rows",
            """
            m_new = torch.maximum(m, scores.max()).max().expand_as(m)
            weights, shrink = torch.exp(scores - m_new), torch.exp(m - m_new)
            return m_new, l * shrink + weights.sum(-1, keepdim=True), acc * shrink + weights @ values
        """,
        ),
        (
            "divided in every step",
            "It is divided by l already",
            """
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - m_new), torch.exp(m - m_new)
            l_new = l * shrink + weights.sum(-1, keepdim=True)
            return m_new, l_new, (acc * shrink + weights @ values) / l_new
        """,
        ),
        (
            "no maximum subtracted",
            "Is m_new subtracted from the scores before exp?",
            """
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores)
            return m_new, l + weights.sum(-1, keepdim=True), acc + weights @ values
        """,
        ),
        (
            "keepdim forgotten",
            "m: shape",
            """
            m_new = torch.maximum(m[:, 0], scores.amax(-1))
            return m_new, l, acc
        """,
        ),
        (
            "in place",
            "changed its argument 2",
            """
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - m_new), torch.exp(m - m_new)
            l *= shrink
            l += weights.sum(-1, keepdim=True)
            return m_new, l, acc * shrink + weights @ values
        """,
        ),
        ("FP64", "m: dtype torch.float64; expected torch.float32", "return m.double(), l.double(), acc.double()"),
    ],
    "blocked": [
        (
            "blocks of scores, all values",
            "keys (or values) at once",
            """
            rows = []
            for i in range(len(q)):
                n = i + len(k) - len(q) + 1
                scores = [q[i : i + 1] @ k[a : min(a + block, n)].T for a in range(0, n, block)]
                rows.append((torch.cat(scores, 1) / math.sqrt(q.shape[1])).softmax(1) @ v[:n])
            return torch.cat(rows)
        """,
        ),
        (
            "the library function",
            "keys (or values) at once",
            """
            padded = torch.cat([torch.zeros(len(k) - len(q), q.shape[1]), q])
            heads = (x[None, None] for x in (padded, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)[0, 0, len(k) - len(q) :]
        """,
        ),
        (
            "all of it in numpy",
            "left torch (numpy)",
            """
            import numpy as np

            queries, keys, values = q.numpy(), k.numpy(), v.numpy()
            scores = queries @ keys.T / math.sqrt(q.shape[1])
            scores = np.where(np.triu(np.ones_like(scores), len(k) - len(q) + 1) > 0, -np.inf, scores)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            return torch.from_numpy(weights / weights.sum(1, keepdims=True) @ values)
        """,
        ),
        (
            "no maximum",
            "is a row's maximum subtracted before exp?",
            """
            (queries, head_dim), keys = q.shape, k.shape[0]
            seen = torch.arange(queries)[:, None] + keys - queries
            l, acc = torch.zeros(queries, 1), torch.zeros(queries, head_dim)
            for start in range(0, keys, block):
                scores = q @ k[start : start + block].T / math.sqrt(head_dim)
                hidden = start + torch.arange(scores.shape[1]) > seen
                weights = scores.masked_fill(hidden, -torch.inf).exp()
                l, acc = l + weights.sum(-1, keepdim=True), acc + weights @ v[start : start + block]
            return acc / l
        """,
        ),
        ("no mask", "is the causal mask missing?", LOOP.replace(" > seen", " > keys + 0 * seen")),
        ("top-left", "aligned top-left", LOOP.replace(" + keys - queries", "")),
        ("off by one", "Off by one", LOOP.replace("> seen", ">= seen")),
        ("no scale", "1 / sqrt(head_dim) missing?", LOOP.replace(" / math.sqrt(head_dim)", "")),
        ("1 / head_dim", "Is it 1 / head_dim instead", LOOP.replace("math.sqrt(head_dim)", "head_dim")),
        (
            "full blocks only",
            "The last block, which is not full, was left out",
            LOOP.replace("range(0, keys, block)", "range(0, keys - block + 1, block)"),
        ),
        ("not divided", "Is the division by l missing", LOOP.replace("acc / l", "acc")),
        (
            "the whole matrix",
            "that is the whole matrix",
            """
            n, s = q.shape[0], k.shape[0]
            hidden = torch.ones(n, s, dtype=torch.bool).triu(1 + s - n)
            return (q @ k.T / math.sqrt(q.shape[1])).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        """,
        ),
        ("a block too long", "raised RuntimeError", LOOP.replace("v[start : start + block])", "v[start : start + 1])")),
    ],
    "masked_update": [
        (
            "only NaN is filled",
            "A hidden slot held infinity",
            """
            scores = scores.masked_fill(~allowed, -torch.inf)
            new = torch.maximum(m, scores.amax(1, keepdim=True))
            origin = torch.where(new == -torch.inf, 0.0, new)
            shrink, weights = torch.exp(m - origin), torch.exp(scores - origin)
            values = torch.where(values.isnan(), 0.0, values)
            return new, l * shrink + weights.sum(1, keepdim=True), acc * shrink + weights @ values
        """,
        ),
        ("-inf minus -inf", "-inf - -inf is NaN", MASKED.replace("m_new.masked_fill(m_new == -torch.inf, 0)", "m_new")),
        ("a large negative number", "they weigh exp(0) = 1", MASKED.replace("~allowed, -torch.inf", "~allowed, -1e9")),
        (
            "values as they are",
            "0 * NaN is NaN",
            MASKED.replace("values.masked_fill(~allowed.any(0)[:, None], 0)", "values"),
        ),
        (
            "hidden scores in the maximum",
            "Hidden scores count in the maximum",
            """
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - m_new) * allowed
            shrink = torch.exp(m - m_new)
            live = (l > 0) | allowed.any(-1, keepdim=True)
            m_new = torch.where(live, m_new, -torch.inf)
            return m_new, l * shrink + weights.sum(-1, keepdim=True), acc * shrink + weights @ values
        """,
        ),
    ],
    "finish": [
        ("0 / 0", "0 / 0. It shall be zeros", "return acc / l"),
        ("an epsilon that shows", "the output: wrong", "return acc / (l + 0.1)"),
    ],
}

RIGHT = {
    "update": [
        """
        both = torch.cat([m, scores], -1)  # the past as one more key
        m_new = both.amax(-1, keepdim=True)
        weights = torch.exp(both - m_new)
        worth, weights = weights[:, :1], weights[:, 1:]
        return m_new, worth * l + weights.sum(-1)[:, None], torch.addmm(worth * acc, weights, values)
    """
    ],
    "blocked": [
        """
            past, out = len(k) - len(q), torch.empty(len(q), v.shape[1])
            for i in range(len(q)):
                m, l, acc = torch.tensor([[-torch.inf]]), torch.zeros(1, 1), torch.zeros(1, v.shape[1])
                for a in range(0, i + past + 1, block):
                    e = min(i + past + 1, a + block)
                    scores = q[i : i + 1] @ k[a:e].T / math.sqrt(q.shape[1])
                    new = torch.maximum(m, scores.amax())
                    shrink, weights = (m - new).exp(), (scores - new).exp()
                    m, l, acc = new, l * shrink + weights.sum(), acc * shrink + weights @ v[a:e]
                out[i] = acc[0] / l[0]
            return out
        """,
        """
        n, s = q.shape[0], k.shape[0]
        rows = []
        for i in range(n):  # a row at a time, its keys in blocks
            last, m, l, acc = i + s - n, -math.inf, 0.0, torch.zeros(q.shape[1])
            for start in range(0, last + 1, block):
                part = slice(start, min(start + block, last + 1))
                scores = k[part] @ q[i] / q.shape[1] ** 0.5
                new = max(m, scores.max().item())
                weights = torch.exp(scores - new)
                l = l * math.exp(m - new) + weights.sum().item()
                acc, m = acc * math.exp(m - new) + weights @ v[part], new
            rows.append(acc / l)
        return torch.stack(rows)
    """,
    ],
    "masked_update": [
        """
        scores = torch.where(allowed, scores, -torch.inf)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        origin = m_new.nan_to_num(neginf=0.0)
        weights, shrink = (scores - origin).exp(), (m - origin).exp()
        return m_new, l * shrink + weights.sum(-1, keepdim=True), acc * shrink + weights @ values.nan_to_num(0.0)
    """
    ],
    "finish": ["return acc / l.clamp(min=1.0)", "return torch.where(l > 0, acc / l, 0.0)"],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "blocked": [
        (
            "a row at a time",
            ", one after the other, and the running softmax over them",
            """
        (queries, head_dim), keys = q.shape, k.shape[0]
        last_seen = torch.arange(queries)[:, None] + keys - queries
        m, l = torch.full((queries, 1), -torch.inf), torch.zeros(queries, 1)
        acc = torch.zeros(queries, head_dim)

        rows = []
        for i in range(queries):
            seen = i + keys - queries + 1
            rows.append((q[i] @ k[:seen].T / math.sqrt(head_dim)).softmax(-1) @ v[:seen])
        return torch.stack(rows)
        """,
        ),
        (
            "one key at a time",
            ", one after the other, and the running softmax over them",
            """
        (queries, head_dim), keys = q.shape, k.shape[0]
        last_seen = torch.arange(queries)[:, None] + keys - queries
        m, l = torch.full((queries, 1), -torch.inf), torch.zeros(queries, 1)
        acc = torch.zeros(queries, head_dim)

        for start in range(keys):
            scores = q @ k[start : start + 1].T / math.sqrt(head_dim)
            m, l, acc = update(m, l, acc, scores.masked_fill(start > last_seen, -torch.inf), v[start : start + 1])
        return acc / l
        """,
        ),
        (
            "a block of its own",
            ", one after the other, and the running softmax over them",
            """
        (queries, head_dim), keys = q.shape, k.shape[0]
        last_seen = torch.arange(queries)[:, None] + keys - queries
        m, l = torch.full((queries, 1), -torch.inf), torch.zeros(queries, 1)
        acc = torch.zeros(queries, head_dim)

        for start in range(0, keys, 4):
            k_block, v_block = k[start : start + 4], v[start : start + 4]
            scores = q @ k_block.T / math.sqrt(head_dim)
            hidden = start + torch.arange(k_block.shape[0]) > last_seen
            m, l, acc = update(m, l, acc, scores.masked_fill(hidden, -torch.inf), v_block)
        return acc / l
        """,
        ),
        (
            "one key later",
            "a query does not see the key after its own.",
            """
        (queries, head_dim), keys = q.shape, k.shape[0]
        last_seen = torch.arange(queries)[:, None] + keys - queries
        m, l = torch.full((queries, 1), -torch.inf), torch.zeros(queries, 1)
        acc = torch.zeros(queries, head_dim)

        for start in range(0, keys, block):
            k_block, v_block = k[start : start + block], v[start : start + block]
            scores = q @ k_block.T / math.sqrt(head_dim)
            hidden = start + torch.arange(k_block.shape[0]) > last_seen + 1
            m, l, acc = update(m, l, acc, scores.masked_fill(hidden, -torch.inf), v_block)
        return acc / l
        """,
        ),
    ],
    "update": [
        (
            "l by the block's maximum",
            "The old sum was measured from the old maximum",
            """
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - m_new)
        return m_new, l + weights.sum(-1, keepdim=True), acc * torch.exp(m - m_new) + weights @ values
        """,
        ),
        (
            "the past forgotten",
            "Is the old sum left out?",
            """
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - m_new)
        return m_new, weights.sum(-1, keepdim=True), weights @ values
        """,
        ),
        (
            "the mean",
            "wrong, most at",
            """
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - m_new), torch.exp(m - m_new)
        return m_new, l * shrink + weights.mean(-1, keepdim=True), acc * shrink + weights @ values
        """,
        ),
    ],
    "masked_update": [
        (
            "NaN to zero at the end",
            "A hidden slot held NaN, and",
            """
        scores = scores.masked_fill(~allowed, -torch.inf)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - m_new), torch.exp(m - m_new)
        l, acc = l * shrink + weights.sum(-1, keepdim=True), acc * shrink + weights @ values
        return m_new, l.nan_to_num(), acc.nan_to_num()
        """,
        ),
        (
            "the mask turned",
            "Are hidden scores filled with a large negative number? In a row of not",
            """
        scores = scores.masked_fill(allowed, -torch.inf)
        values = values.masked_fill(~allowed.any(dim=0)[:, None], 0.0)
        m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
        origin = m_new.masked_fill(m_new == -torch.inf, 0.0)
        shrink, weights = torch.exp(m - origin), torch.exp(scores - origin)
        return m_new, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ values
        """,
        ),
    ],
    "finish": [
        (
            "not divided",
            "Is the division by l missing?",
            """
        return acc
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "blocked": [
        """
        (queries, head_dim), keys = q.shape, k.shape[0]
        last_seen = torch.arange(queries)[:, None] + keys - queries
        m, l = torch.full((queries, 1), -torch.inf), torch.zeros(queries, 1)
        acc = torch.zeros(queries, head_dim)

        for k_block, v_block, place in zip(k.split(block), v.split(block), torch.arange(keys).split(block)):
            scores = torch.einsum("qd,kd->qk", q, k_block * head_dim**-0.5)
            m, l, acc = update(m, l, acc, torch.where(place <= last_seen, scores, -torch.inf), v_block)
        return acc / l
        """,
        """
        (queries, head_dim), keys = q.shape, k.shape[0]
        last_seen = torch.arange(queries)[:, None] + keys - queries
        m, l = torch.full((queries, 1), -torch.inf), torch.zeros(queries, 1)
        acc = torch.zeros(queries, head_dim)

        outputs = []
        for i in range(queries):
            mi, li, acci = m[i : i + 1], l[i : i + 1], acc[i : i + 1]
            for start in range(0, i + keys - queries + 1, block):
                scores = q[i : i + 1] @ k[start : start + block].transpose(0, 1) / math.sqrt(head_dim)
                hidden = start + torch.arange(scores.shape[1]) > last_seen[i]
                mi, li, acci = update(mi, li, acci, scores.masked_fill(hidden, -torch.inf), v[start : start + block])
            outputs.append(acci / li)
        return torch.cat(outputs)
        """,
    ],
    "update": [
        """
        joined = torch.cat([m, scores], dim=1)
        top = joined.max(dim=1, keepdim=True).values
        past = (m - top).exp()
        w = (scores - top).exp()
        return top, past * l + w.sum(1, keepdim=True), torch.addmm(past * acc, w, values)
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
