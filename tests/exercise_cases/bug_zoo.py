"""Answers to the bug zoo, by cell: (the mistake, a part of the message, the lines between the markers)."""

WRONG = {
    "test_elapsed": [
        (
            "asserts nothing that differs",
            "passes on a broken program",
            """
            with SimulatedStream() as stream:
                assert program(stream, 20) > 0
        """,
        ),
        (
            "true of one way only",
            "fails on a program that is right",
            """
            with SimulatedStream() as stream:
                assert program(stream, 20) == 20
        """,
        ),
    ],
    "mended_elapsed": [
        (
            "warmed up by itself",
            "the work was launched 2 times",
            """
            stream.launch(work)
            stream.synchronize()
            begin = time.perf_counter()
            stream.launch(work)
            stream.synchronize()
            return (time.perf_counter() - begin) * 1000
        """,
        ),
        (
            "not mended",
            "still the launch",
            """
            begin = time.perf_counter()
            stream.launch(work)
            return (time.perf_counter() - begin) * 1000
        """,
        ),
        (
            "half mended",
            "of earlier work are counted",
            """
            begin = time.perf_counter()
            stream.launch(work)
            stream.synchronize()
            return (time.perf_counter() - begin) * 1000
        """,
        ),
    ],
    "test_tpot": [
        (
            "a case that does not tell",
            "The fault that it misses: the time to the first token is counted",
            "assert program(0.0, [10.0, 20.0, 30.0]) == 10",
        ),
        ("returns instead of asserting", "a test speaks by `assert`", "return program(0.0, [100.0, 110.0]) == 10"),
    ],
    "mended_tpot": [
        ("not mended", "is still in it", "return (token_ms[-1] - sent_ms) / len(token_ms)"),
        ("one gap too many", "n tokens have n - 1 gaps", "return (token_ms[-1] - token_ms[0]) / len(token_ms)"),
        (
            "one token is 0",
            "there is no gap, so it is None",
            "return (token_ms[-1] - token_ms[0]) / max(1, len(token_ms) - 1)",
        ),
    ],
    "test_accepts": [
        (
            "only where the constant is right",
            "it does not look at u",
            "assert program(0.5, 0.2, 0.99) and not program(0.01, 0.9, 0.9)",
        ),
        ("only p >= q", "passes on a broken program", "assert program(0.5, 0.2, 0.99)"),
        ("crashes", "crashed on a right program", "assert program(0.5, 0.2)"),
    ],
    "mended_accepts": [
        (
            "kept at the limit",
            "is never kept",
            """
            return u <= p / q
        """,
        ),
        ("another constant", "kept with probability min(1, p / q)", "return p / q >= 1"),
        ("the ratio", "expected True or False", "return min(1, p / q)"),
    ],
    "test_prefix": [
        (
            "no match behind a miss",
            "matches after the first miss",
            """
            logits = torch.nn.functional.one_hot(torch.tensor([4, 7, 1]), 9).float()
            assert program(torch.tensor([4, 7]), logits) == 2
        """,
        ),
        (
            "all alike",
            "row i + 1 is compared",
            """
            assert program(torch.tensor([3, 3]), torch.nn.functional.one_hot(torch.tensor([3, 3, 3]), 9).float()) == 2
        """,
        ),
    ],
    "mended_prefix": [
        (
            "not mended",
            "predicts token 0 of the draft",
            "return int((draft == logits.argmax(-1)[1:]).long().cumprod(0).sum())",
        ),
        ("counts all matches", "nothing after the first miss", "return int((draft == logits[:-1].argmax(-1)).sum())"),
    ],
    "test_softmax": [
        (
            "only NaN",
            "is uniform",
            """
            assert not program(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool)).isnan().any()
        """,
        ),
        (
            "no empty row",
            "is NaN",
            """
            allowed = torch.tensor([[True, True, False]])
            assert torch.allclose(program(torch.zeros(1, 3), allowed), torch.tensor([[0.5, 0.5, 0.0]]))
        """,
        ),
    ],
    "mended_softmax": [
        (
            "no maximum",
            "of large scores",
            """
            weights = scores.exp() * allowed
            return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        """,
        ),
        (
            "the maximum of all",
            "taken over the hidden scores, too",
            """
            weights = (scores - scores.amax(-1, keepdim=True)).exp() * allowed
            return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        """,
        ),
        ("not mended", "hold NaN in a row", "return scores.masked_fill(~allowed, -torch.inf).softmax(-1)"),
        ("a large negative number", "is not -inf", "return scores.masked_fill(~allowed, -1e9).softmax(-1)"),
    ],
    "test_quantise": [
        (
            "no outlier",
            "an outlier is clipped",
            """
            codes, scale = program(torch.tensor([[1.0, -1.0, 0.5, -0.25]]))
            assert (codes.float() * scale - torch.tensor([[1.0, -1.0, 0.5, -0.25]])).abs().max() < 0.1
        """,
        ),
        (
            "against one way's scale",
            "fails on a program that is right",
            """
            codes, scale = program(torch.zeros(1, 5))
            assert scale.item() == 1.0
        """,
        ),
        (
            "only the negative side",
            "wraps round to -128",
            """
            x = torch.tensor([[-20.0] + [0.1, -0.1] * 20])
            codes, scale = program(x)
            assert ((codes.float() * scale - x).abs() <= 0.51 * scale).all()
        """,
        ),
    ],
    "mended_quantise": [
        (
            "a least scale that is too large",
            "expected half a step at most",
            """
            scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-4)
            return (x / scale).round().to(torch.int8), scale
        """,
        ),
        (
            "128",
            "Does the largest value of a row get code 127?",
            """
            scale = (x.abs().amax(-1, keepdim=True) / 128).clamp(min=1e-9)
            return (x / scale).round().clamp(-128, 127).to(torch.int8), scale
        """,
        ),
        (
            "one scale for all",
            "the scale: shape",
            """
            scale = x.abs().max() / 127
            return (x / scale).round().to(torch.int8), scale
        """,
        ),
        (
            "codes as floats",
            "expected torch.int8",
            """
            scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-9)
            return (x / scale).round(), scale
        """,
        ),
        (
            "in place",
            "changed its argument 1",
            """
            scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-9)
            return x.div_(scale).round_().to(torch.int8), scale
        """,
        ),
    ],
    "test_chat": [
        (
            "only the first",
            "The fault that it misses: the text begins twice",
            """
            assert program(ToyTokenizer(), "Why?")[0] == 1
        """,
        ),
        (
            "not twice",
            "does not begin at all",
            """
            assert program(ToyTokenizer(), "Why?").count(1) < 2
        """,
        ),
    ],
    "mended_chat": [
        ("not mended", "stands 2 times", "return tokenizer(tokenizer.apply_chat_template(question))"),
        ("none left", "stands 0 times", "return tokenizer(tokenizer.apply_chat_template(question))[2:]"),
        ("without the template", "in another place", "return tokenizer(question)"),
    ],
}

RIGHT = {
    "test_elapsed": [
        """
        with SimulatedStream() as stream:
            short, long = program(stream, 10), program(stream, 40)
            assert long - short > 20
    """
    ],
    "mended_elapsed": [
        """
        begin = stream.record_event()
        stream.launch(work)
        end = stream.record_event()
        end.synchronize()
        return begin.elapsed_time(end)
    """
    ],
    "mended_tpot": [
        """
        gaps = [b - a for a, b in zip(token_ms, token_ms[1:])]
        return sum(gaps) / len(gaps) if gaps else None
    """
    ],
    "mended_accepts": [
        "return bool(u * q < p)",
        "return torch.tensor(u) < p / q",
        "return 1 if u * q < p else 0",
        """
        import numpy as np

        return np.float64(u) < p / q
    """,
    ],
    "test_accepts": [
        """
        for p, q in ((0.1, 0.4), (0.3, 0.6), (0.6, 0.3)):
            kept = sum(program(p, q, (i + 0.5) / 100) for i in range(100))
            assert abs(kept - 100 * min(1, p / q)) <= 1
    """
    ],
    "mended_prefix": [
        """
        wrong = (draft != logits[: len(draft)].argmax(-1)).nonzero()
        return wrong[0].item() if len(wrong) else len(draft)
    """
    ],
    "mended_softmax": ["return scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)"],
    "mended_quantise": [
        """
        largest = x.abs().max(dim=1).values.clamp(min=1e-30)
        codes = torch.round(127 * x / largest[:, None])
        return codes.char(), largest[:, None] / 127
    """
    ],
    "mended_chat": [
        """
        ids = tokenizer(tokenizer.apply_chat_template(question))
        return ids[ids.count(tokenizer.bos_token_id) - 1 :]
    """
    ],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "mended_elapsed": [
        (
            "looks the work up",
            "float() argument must be a string or a real number, not",
            """
        return float(work)
        """,
        ),
        (
            "seconds",
            "Is it in seconds? Milliseconds were asked for.",
            """
        stream.synchronize()
        begin = time.perf_counter()
        stream.launch(work)
        stream.synchronize()
        return time.perf_counter() - begin
        """,
        ),
    ],
    "test_elapsed": [
        (
            "by its name",
            "the clock is read when the work is launched, not when it is done",
            """
        assert 'elapsed_ms' not in (program.__name__, program.__code__.co_name) and 'broken' not in program.__module__
        """,
        ),
        (
            "by counting calls",
            "A test asserts only what is true of every right program",
            """
        global calls
        calls = globals().get("calls", 0) + 1
        assert calls < 3
        """,
        ),
    ],
    "test_tpot": [
        (
            "by its name",
            "test_tpot passes on a broken program, so it proves nothing",
            """
        assert program.__name__ != 'time_per_output_token'
        """,
        ),
        (
            "by its docstring",
            "test_tpot passes on a broken program, so it proves nothing",
            """
        assert not (program.__doc__ or '').startswith('Mean time from')
        """,
        ),
    ],
    "mended_tpot": [
        (
            "the median",
            "the mended time per output token",
            """
        import statistics
        gaps = [b - a for a, b in zip(token_ms, token_ms[1:])]
        return statistics.median(gaps) if gaps else None
        """,
        ),
    ],
    "mended_accepts": [
        (
            "u at most",
            "A token is kept with probability min(",
            """
        return u * p < q
        """,
        ),
    ],
    "mended_prefix": [
        (
            "the first miss as well",
            "of the logits, at the last committed token, predicts token",
            """
        for i, token in enumerate(draft):
            if token != logits[i].argmax():
                return i + 1
        return len(draft)
        """,
        ),
    ],
    "mended_softmax": [
        (
            "NaN to a uniform row",
            "A row that may see nothing is uniform",
            """
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(1 / scores.shape[1])
        """,
        ),
    ],
    "mended_quantise": [
        (
            "signed largest",
            "Does the largest value of a row get code",
            """
        scale = (x.amax(-1, keepdim=True) / 127).clamp(min=1e-9)
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "mended_prefix": [
        """
        same = (draft == logits[:-1].argmax(-1)).tolist() + [False]
        return torch.tensor(same.index(False))
        """,
    ],
    "mended_chat": [
        """
        return tuple(tokenizer(tokenizer.apply_chat_template(question), add_special_tokens=False))
        """,
    ],
    "mended_elapsed": [
        """
        while not stream.query():
            pass
        begin = time.monotonic()
        stream.launch(work)
        while not stream.query():
            time.sleep(0)
        return 1000 * (time.monotonic() - begin)
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
