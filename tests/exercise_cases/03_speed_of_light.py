"""Answers to the exercises 03, by cell: (the mistake, a part of the message, the lines between the markers)."""

_FLOPS = """
query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
weights = shape["hidden"] * (2 * query + 2 * key + 3 * shape["ffn"])
attention = 4 * tokens * (context + tokens) * query
return 2 * tokens * weights + attention
"""
_BYTES = """
query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
weights = shape["hidden"] * (2 * query + 2 * key + 3 * shape["ffn"])
return 2 * (weights + 2 * (context + tokens) * key)
"""


def _with(answer: str, old: str, new: str) -> str:
    """The right answer with one mistake put in."""
    assert answer.count(old) >= 1, old
    return answer.replace(old, new)


WRONG = {
    "block_flops": [
        (
            "no factor 2",
            "the factor 2 is missing",
            """
            query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
            weights = shape["hidden"] * (2 * query + 2 * key + 3 * shape["ffn"])
            return tokens * weights + 2 * tokens * (context + tokens) * query
        """,
        ),
        ("no grouped heads", "their projections are narrower", _with(_FLOPS, "2 * query + 2 * key", "4 * query")),
        ("hidden x hidden", "Is it hidden x hidden", _with(_FLOPS, "(2 * query +", '(2 * shape["hidden"] +')),
        ("two matrices in the FFN", "three matrices", _with(_FLOPS, "3 * shape", "2 * shape")),
        ("no output projection", "The output projection", _with(_FLOPS, "(2 * query +", "(query +")),
        ("scores only", "two products", _with(_FLOPS, "= 4 * tokens", "= 2 * tokens")),
        ("weights only", "Is attention's own product left out?", _with(_FLOPS, " + attention", "")),
        ("the new ones among themselves", "look at the context, too", _with(_FLOPS, "(context + tokens)", "tokens")),
        ("the context only", "look at each other, too", _with(_FLOPS, "(context + tokens)", "context")),
        ("attention of the KV heads", "Each query head", _with(_FLOPS, "tokens) * query", "tokens) * key")),
        (
            "only what the mask leaves",
            "The half that a causal mask hides",
            """
            query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
            weights = shape["hidden"] * (2 * query + 2 * key + 3 * shape["ffn"])
            seen = sum(context + i + 1 for i in range(tokens))
            return 2 * tokens * weights + 4 * seen * query
        """,
        ),
        ("one token's matrices", "Every new token passes", _with(_FLOPS, "2 * tokens * weights", "2 * weights")),
        (
            "the context again",
            "passed the matrices before",
            _with(_FLOPS, "2 * tokens * weights", "2 * (context + tokens) * weights"),
        ),
    ],
    "block_bytes": [
        ("numbers", "That counts numbers", _with(_BYTES, "return 2 * (weights", "return (weights")),
        ("FP32", "Is it in FP32?", _with(_BYTES, "return 2 *", "return 4 *")),
        (
            "weights for each token",
            "read once for all tokens",
            _with(_BYTES, "2 * (weights +", "2 * (tokens * weights +"),
        ),
        ("keys only", "Keys *and* values", _with(_BYTES, "+ 2 * (context", "+ (context")),
        (
            "no cache",
            "Are keys and values left out?",
            _with(_BYTES, "(weights + 2 * (context + tokens) * key)", "weights"),
        ),
        ("the old ones only", "of the new tokens are read, too", _with(_BYTES, "(context + tokens)", "context")),
        ("the new ones only", "of the context are read, too", _with(_BYTES, "(context + tokens)", "tokens")),
        ("query heads", "Only KV heads are stored", _with(_BYTES, "tokens) * key)", "tokens) * query)")),
        ("no grouped heads", "their projections are narrower", _with(_BYTES, "2 * query + 2 * key", "4 * query")),
    ],
    "least_ms": [
        (
            "the sum",
            "not their sum",
            """
            computing, reading = flops / (tflops * 1e9), nbytes / (gbps * 1e6)
            return computing + reading, "arithmetic" if computing >= reading else "memory"
        """,
        ),
        (
            "the shorter",
            "not the shorter",
            """
            computing, reading = flops / (tflops * 1e9), nbytes / (gbps * 1e6)
            return min(computing, reading), "arithmetic" if computing >= reading else "memory"
        """,
        ),
        (
            "seconds",
            "Is it in seconds?",
            """
            computing, reading = flops / (tflops * 1e12), nbytes / (gbps * 1e9)
            return max(computing, reading), "arithmetic" if computing >= reading else "memory"
        """,
        ),
        (
            "GiB",
            "taken for 2^30",
            """
            computing, reading = flops / (tflops * 1e9), nbytes / (gbps * 2**30) * 1000
            return max(computing, reading), "arithmetic" if computing >= reading else "memory"
        """,
        ),
        (
            "the wrong way round",
            "The longer one binds",
            """
            computing, reading = flops / (tflops * 1e9), nbytes / (gbps * 1e6)
            return max(computing, reading), "memory" if computing >= reading else "arithmetic"
        """,
        ),
        (
            "by FLOPs against bytes",
            "The longer one binds",
            """
            computing, reading = flops / (tflops * 1e9), nbytes / (gbps * 1e6)
            return max(computing, reading), "arithmetic" if flops >= nbytes else "memory"
        """,
        ),
        (
            "at the ridge",
            "at the ridge it is 'memory'",
            """
            computing, reading = flops / (tflops * 1e9), nbytes / (gbps * 1e6)
            return max(computing, reading), "arithmetic" if computing > reading else "memory"
        """,
        ),
    ],
    "least_batch": [
        (
            "a batch of none",
            "a batch holds 1 at least",
            """
            slope = flops / (tflops * 1e12) - cache_bytes / (gbps * 1e9)
            return None if slope <= 0 else math.ceil(weight_bytes / (gbps * 1e9) / slope)
        """,
        ),
        (
            "a search that ends early",
            "Does a search end too early?",
            """
            for batch in range(1, 1000):
                if batch * flops / (tflops * 1e12) >= (weight_bytes + batch * cache_bytes) / (gbps * 1e9):
                    return batch
            return None
        """,
        ),
        (
            "no cache",
            "that grows with the batch",
            """
            return max(1, math.ceil(weight_bytes / gbps / 1e6 / (flops / tflops / 1e9)))
        """,
        ),
        (
            "the cache once",
            "that grows with the batch",
            """
            return max(1, math.ceil((weight_bytes + cache_bytes) / gbps / 1e6 / (flops / tflops / 1e9)))
        """,
        ),
        (
            "rounded down",
            "round up",
            """
            computing, reading = flops / (tflops * 1e9), cache_bytes / (gbps * 1e6)
            return max(1, int(weight_bytes / (gbps * 1e6) / (computing - reading))) if computing > reading else None
        """,
        ),
        (
            "not whole",
            "A batch is a whole number",
            """
            computing, reading = flops / (tflops * 1e9), cache_bytes / (gbps * 1e6)
            return weight_bytes / (gbps * 1e6) / (computing - reading) if computing > reading else None
        """,
        ),
        (
            "the sum of the slopes",
            "is the sum taken?",
            """
            computing, reading = flops / (tflops * 1e9), cache_bytes / (gbps * 1e6)
            return math.ceil(weight_bytes / (gbps * 1e6) / (computing + reading))
        """,
        ),
        (
            "negative batches",
            "no batch ever is bound",
            """
            computing, reading = flops / (tflops * 1e9), cache_bytes / (gbps * 1e6)
            return math.ceil(weight_bytes / (gbps * 1e6) / (computing - reading))
        """,
        ),
        (
            "tries up to a thousand",
            "no batch ever is bound",
            """
            for batch in range(1, 1000):
                if batch * flops / tflops / 1e9 >= (weight_bytes + batch * cache_bytes) / gbps / 1e6:
                    return batch
            return 1000
        """,
        ),
    ],
    "judge": [
        (
            "only the bytes",
            "bound by arithmetic",
            """
            share = nbytes / gbps / 1e6 / published_ms
            return "impossible" if share > 1 else "far below" if share < 0.1 else "plausible"
        """,
        ),
        (
            "upside down",
            "limit over time",
            """
            share = published_ms / least_ms(flops, nbytes, tflops, gbps)[0]
            return "impossible" if share > 1 else "far below" if share < 0.1 else "plausible"
        """,
        ),
        ("always plausible", "expected 'impossible'", 'return "plausible"'),
    ],
    "three_shares": [
        ("percent", "is it in percent?", "return 70.7, 352.6, 1.3"),
        ("one token a pass", "Each pass yields 6 tokens", "return 0.707, 21.15, 0.013"),
        ("prefill by bytes", "computing takes longer", "return 0.707, 3.526, 0.00778"),
        ("one pass", "That is one", "return 0.707, 0.0826, 0.013"),
        ("upside down", "Limit over published time", "return 1.4136, 0.2836, 76.85"),
        ("words", "expected a number", 'return "plausible", "impossible", "far below"'),
    ],
}

RIGHT = {
    "block_flops": [
        """
        h, d = shape["hidden"], shape["head_dim"]
        outs = [shape["heads"] * d, *[shape["kv_heads"] * d] * 2, shape["heads"] * d, *[shape["ffn"]] * 3]
        per_token = sum(2 * h * out for out in outs)
        scores = shape["heads"] * (context + tokens) * 2 * d
        return tokens * (per_token + 2 * scores)
    """
    ],
    "block_bytes": [
        """
        d = shape["head_dim"]
        projections = 2 * shape["hidden"] * d * (shape["heads"] + shape["kv_heads"])
        stored = sum(2 * shape["kv_heads"] * d for _ in range(context + tokens))
        return 2 * projections + 2 * 3 * shape["hidden"] * shape["ffn"] + 2 * stored
    """
    ],
    "least_ms": [
        """
        ridge = tflops * 1e12 / (gbps * 1e9)
        if flops / nbytes >= ridge:
            return 1000 * flops / (tflops * 1e12), "arithmetic"
        return 1000 * nbytes / (gbps * 1e9), "memory"
    """
    ],
    "least_batch": [
        """
        ridge = tflops * 1000 / gbps  # FLOP per byte
        if cache_bytes * ridge >= flops:
            return None
        batch = 1
        while batch * flops / (weight_bytes + batch * cache_bytes) < ridge:
            batch += 1
        return batch
    """
    ],
    "judge": [
        """
        limit = max(flops / tflops / 1e9, nbytes / gbps / 1e6)
        if published_ms < limit:
            return "impossible"
        return "far below" if published_ms > 10 * limit else "plausible"
    """
    ],
    "three_shares": [
        """
        shares = []
        for ms, passes, tokens in ((1000 / 107, 1, 1), (80, math.ceil(256 / 6), 256), (850, 1, 256)):
            limit = max(passes * 13.48e9 / 2039e6, tokens * 13.48e9 / 312e9)
            shares.append(limit / ms)
        return shares
    """
    ],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "least_batch": [
        (
            "one too many",
            "computes exactly as long as it reads, which is enough",
            """
        computing, reading = flops / (tflops * 1e9), cache_bytes / (gbps * 1e6)
        return int(weight_bytes / (gbps * 1e6) / (computing - reading)) + 1 if computing > reading else None
        """,
        ),
        (
            "longer, not as long",
            "computes exactly as long as it reads, which is enough",
            """
        if flops / tflops / 1e9 <= cache_bytes / gbps / 1e6:
            return None
        batch = 1
        while not batch * flops / tflops / 1e9 > (weight_bytes + batch * cache_bytes) / gbps / 1e6:
            batch += 1
        return batch
        """,
        ),
        (
            "0 for one",
            "One sequence less than it takes",
            """
        computing, reading = flops / (tflops * 1e9), cache_bytes / (gbps * 1e6)
        return int(round(weight_bytes / (gbps * 1e6) / (computing - reading))) if computing > reading else None
        """,
        ),
    ],
    "least_ms": [
        (
            "bandwidth",
            "the answer in words",
            """
        computing, reading = flops / (tflops * 1e9), nbytes / (gbps * 1e6)
        return max(computing, reading), "arithmetic" if computing >= reading else "bandwidth"
        """,
        ),
        (
            "the words first",
            "expected a number",
            """
        computing, reading = flops / (tflops * 1e9), nbytes / (gbps * 1e6)
        return "arithmetic" if computing >= reading else "memory", max(computing, reading)
        """,
        ),
    ],
    "judge": [
        (
            "a capital",
            "the answer in words",
            """
        share = least_ms(flops, nbytes, tflops, gbps)[0] / published_ms
        return "Impossible" if share > 1 else "far below" if share < 0.1 else "plausible"
        """,
        ),
        (
            "the limit itself",
            "ms, bound by memory",
            """
        share = least_ms(flops, nbytes, tflops, gbps)[0] / published_ms
        return "impossible" if share >= 1 else "far below" if share < 0.1 else "plausible"
        """,
        ),
        (
            "a tenth itself",
            "ms, bound by memory",
            """
        share = least_ms(flops, nbytes, tflops, gbps)[0] / published_ms
        return "impossible" if share > 1 else "far below" if share <= 0.1 else "plausible"
        """,
        ),
    ],
    "block_flops": [
        (
            "keys of the context, matrices of one",
            "Attention has two products, with the keys and with the values.",
            """
        query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
        weights = shape["hidden"] * (2 * query + 2 * key + 3 * shape["ffn"])
        return 2 * tokens * weights + 2 * tokens * (context + tokens) * query
        """,
        ),
    ],
    "block_bytes": [
        (
            "the cache of one number",
            "The FFN has three matrices",
            """
        query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
        weights = shape["hidden"] * (2 * query + 2 * key + 2 * shape["ffn"])
        return 2 * (weights + 2 * (context + tokens) * key)
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "least_batch": [
        """
        seconds = flops / (tflops * 1e12)
        read = cache_bytes / (gbps * 1e9)
        if seconds <= read:
            return None
        batch = math.ceil(weight_bytes / (gbps * 1e9) / (seconds - read))
        return float(max(batch, 1))
        """,
    ],
    "judge": [
        """
        limit, _ = least_ms(flops, nbytes, tflops, gbps)
        if limit > published_ms:
            return "impossible"
        return "plausible" if 10 * limit >= published_ms else "far below"
        """,
    ],
    "least_ms": [
        """
        intensity, ridge = flops / nbytes, 1000 * tflops / gbps
        return (flops / tflops / 1e9, "arithmetic") if intensity >= ridge else (nbytes / gbps / 1e6, "memory")
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
