"""Answers to the exercises 02, by cell: (the mistake, a part of the message, the lines between the markers)."""

WRONG = {
    "first_and_pace": [
        (
            "seconds",
            "Is it in seconds?",
            """
            return arrived_s[0] - sent_s, (arrived_s[-1] - arrived_s[0]) / (len(arrived_s) - 1)
        """,
        ),
        (
            "the stamp itself",
            "sent at another time than 0",
            """
            return 1000 * arrived_s[0], 1000 * (arrived_s[-1] - arrived_s[0]) / (len(arrived_s) - 1)
        """,
        ),
        (
            "whole time over all tokens",
            "divided by all tokens",
            """
            return 1000 * (arrived_s[0] - sent_s), 1000 * (arrived_s[-1] - sent_s) / len(arrived_s)
        """,
        ),
        (
            "the article's pace",
            "The time to first token is still in it.",
            """
            return 1000 * (arrived_s[0] - sent_s), 1000 * (arrived_s[-1] - sent_s) / (len(arrived_s) - 1)
        """,
        ),
        (
            "n gaps",
            "n - 1 gaps",
            """
            return 1000 * (arrived_s[0] - sent_s), 1000 * (arrived_s[-1] - arrived_s[0]) / len(arrived_s)
        """,
        ),
        (
            "the median gap",
            "forgets the pause",
            """
            gaps = sorted(b - a for a, b in zip(arrived_s, arrived_s[1:]))
            middle = len(gaps) // 2
            median = gaps[middle] if len(gaps) % 2 else (gaps[middle - 1] + gaps[middle]) / 2
            return 1000 * (arrived_s[0] - sent_s), 1000 * median
        """,
        ),
        (
            "tokens per second",
            "not a time per token",
            """
            return 1000 * (arrived_s[0] - sent_s), (len(arrived_s) - 1) / (arrived_s[-1] - arrived_s[0])
        """,
        ),
        (
            "no pace is 0",
            "there is no gap, so it is None",
            """
            gaps = max(1, len(arrived_s) - 1)
            return 1000 * (arrived_s[0] - sent_s), 1000 * (arrived_s[-1] - arrived_s[0]) / gaps
        """,
        ),
        (
            "no pace is infinite",
            "there is no gap, so it is None",
            """
            gaps = len(arrived_s) - 1
            pace = 1000 * (arrived_s[-1] - arrived_s[0]) / gaps if gaps else float("inf")
            return 1000 * (arrived_s[0] - sent_s), pace
        """,
        ),
        (
            "no token is 0 ms",
            "no token arrived",
            """
            if not arrived_s:
                return 0.0, None
            gaps = len(arrived_s) - 1
            pace = 1000 * (arrived_s[-1] - arrived_s[0]) / gaps if gaps else None
            return 1000 * (arrived_s[0] - sent_s), pace
        """,
        ),
    ],
    "decode_share": [
        (
            "n steps",
            "n tokens are n - 1 steps",
            """
            return tokens_out * step_ms / (prefill_ms + tokens_out * step_ms)
        """,
        ),
        (
            "percent",
            "Is it in percent?",
            """
            return 100 * (tokens_out - 1) * step_ms / (prefill_ms + (tokens_out - 1) * step_ms)
        """,
        ),
        ("over prefill", "decode over prefill", "return (tokens_out - 1) * step_ms / prefill_ms"),
        ("prefill's share", "prefill's share", "return prefill_ms / (prefill_ms + (tokens_out - 1) * step_ms)"),
    ],
    "crossover": [
        ("n steps", "is the first token counted as a step?", "return int(prefill_ms / step_ms) + 1"),
        (
            "rounded up",
            "equally long is not longer",
            """
            import math

            return 1 + math.ceil(prefill_ms / step_ms)
        """,
        ),
        ("not whole", "expected a whole number", "return 1 + prefill_ms / step_ms"),
    ],
    "time_module": [
        (
            "the host's clock",
            "that is the launch",
            """
            import time

            begins, ends = [], []
            handles = [
                module.register_forward_pre_hook(lambda *_: begins.append(time.perf_counter())),
                module.register_forward_hook(lambda *_: ends.append(time.perf_counter())),
            ]
            try:
                run()
            finally:
                for handle in handles:
                    handle.remove()
            return 1000 * (sum(ends) - sum(begins)), len(ends)
        """,
        ),
        (
            "waits in the hooks",
            "before run() had launched all its work",
            """
            import time

            begins, ends = [], []

            def before(*_):
                stream.synchronize()
                begins.append(time.perf_counter())

            def after(*_):
                stream.synchronize()
                ends.append(time.perf_counter())

            handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
            try:
                run()
            finally:
                for handle in handles:
                    handle.remove()
            return 1000 * (sum(ends) - sum(begins)), len(ends)
        """,
        ),
        (
            "a hook that returns",
            "let your hooks return nothing",
            """
            marks = []

            def mark(*_):
                marks.append(stream.record_event())
                return marks[-1]

            handles = [module.register_forward_pre_hook(mark), module.register_forward_hook(mark)]
            try:
                run()
            finally:
                for handle in handles:
                    handle.remove()
            stream.synchronize()
            return sum(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2])), len(marks) // 2
        """,
        ),
        (
            "left behind",
            "of your hooks are left on the module",
            """
            marks = []
            module.register_forward_pre_hook(lambda *_: marks.append(stream.record_event()))
            module.register_forward_hook(lambda *_: marks.append(stream.record_event()))
            run()
            stream.synchronize()
            return sum(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2])), len(marks) // 2
        """,
        ),
        (
            "left behind after an error",
            "your hooks are still on the module",
            """
            marks = []
            first = module.register_forward_pre_hook(lambda *_: marks.append(stream.record_event()))
            second = module.register_forward_hook(lambda *_: marks.append(stream.record_event()))
            run()
            first.remove()
            second.remove()
            stream.synchronize()
            return sum(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2])), len(marks) // 2
        """,
        ),
        (
            "swallows the error",
            "its error belongs to the caller",
            """
            marks = []
            handles = [
                module.register_forward_pre_hook(lambda *_: marks.append(stream.record_event())),
                module.register_forward_hook(lambda *_: marks.append(stream.record_event())),
            ]
            try:
                run()
            except Exception:
                pass
            for handle in handles:
                handle.remove()
            stream.synchronize()
            return sum(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2])), len(marks) // 2
        """,
        ),
        (
            "removes everybody's",
            "a hook of somebody else is gone",
            """
            marks = []
            module.register_forward_pre_hook(lambda *_: marks.append(stream.record_event()))
            module.register_forward_hook(lambda *_: marks.append(stream.record_event()))
            try:
                run()
            finally:
                module._forward_pre_hooks.clear()
                module._forward_hooks.clear()
            stream.synchronize()
            return sum(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2])), len(marks) // 2
        """,
        ),
        (
            "around run",
            "the whole of run()",
            """
            calls = []
            handle = module.register_forward_hook(lambda *_: calls.append(1))
            begin = stream.record_event()
            try:
                run()
            finally:
                handle.remove()
            end = stream.record_event()
            stream.synchronize()
            return begin.elapsed_time(end), len(calls)
        """,
        ),
        (
            "from the first to the last",
            "between the first call and the last",
            """
            marks = []
            handles = [
                module.register_forward_pre_hook(lambda *_: marks.append(stream.record_event())),
                module.register_forward_hook(lambda *_: marks.append(stream.record_event())),
            ]
            try:
                run()
            finally:
                for handle in handles:
                    handle.remove()
            stream.synchronize()
            return (marks[0].elapsed_time(marks[-1]) if marks else 0.0), len(marks) // 2
        """,
        ),
        (
            "one event for all calls",
            "the last call alone",
            """
            begin, end, calls = [None], [None], []

            def before(*_):
                begin[0] = stream.record_event()

            def after(*_):
                end[0] = stream.record_event()
                calls.append(1)

            handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
            try:
                run()
            finally:
                for handle in handles:
                    handle.remove()
            stream.synchronize()
            return (begin[0].elapsed_time(end[0]) if calls else 0.0), len(calls)
        """,
        ),
        (
            "runs twice",
            "call it exactly once",
            """
            run()
            marks = []
            handles = [
                module.register_forward_pre_hook(lambda *_: marks.append(stream.record_event())),
                module.register_forward_hook(lambda *_: marks.append(stream.record_event())),
            ]
            run()
            for handle in handles:
                handle.remove()
            stream.synchronize()
            return sum(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2])), len(marks) // 2
        """,
        ),
    ],
    "test_rate": [
        (
            "no prompt, so nothing shows",
            "The fault that it misses: the prompt's tokens",
            """
            assert abs(program([1, 2, 3, 4, 5], 0, 0.0, 40.0) - 100) < 1e-6
        """,
        ),
        (
            "no token twice",
            "comes twice",
            """
            assert abs(program([9, 9, 9, 1, 2, 3, 4, 5], 3, 100.0, 140.0) - 100) < 1e-6
        """,
        ),
        (
            "one token forgotten",
            "an answer of one token gets a rate",
            """
            assert abs(program([9, 9, 9, 4, 4, 4, 5, 6], 3, 100.0, 140.0) - 100) < 1e-6
        """,
        ),
        (
            "asserts its own mistake",
            "fails on a program that is right",
            """
            assert abs(program([9, 9, 9, 4, 4, 4, 5, 6], 3, 100.0, 140.0) - 125) < 1e-6
        """,
        ),
    ],
    "mended_rate": [
        (
            "two tokens are too few",
            "for two tokens the mended rate is None",
            """
            steps = len(ids) - prompt_tokens - 1
            return 1000 * steps / (total_ms - prefill_ms) if steps > 1 else None
        """,
        ),
        (
            "not mended",
            "The prompt's tokens are still counted",
            """
            if len(ids) - prompt_tokens < 2:
                return None
            return 1000 * (len(ids) - 1) / (total_ms - prefill_ms)
        """,
        ),
        (
            "half mended",
            "n tokens are n - 1 steps",
            """
            if len(ids) - prompt_tokens < 2:
                return None
            return 1000 * (len(ids) - prompt_tokens) / (total_ms - prefill_ms)
        """,
        ),
        (
            "over the whole time",
            "The prefill's time is in it.",
            """
            if len(ids) - prompt_tokens < 2:
                return None
            return 1000 * (len(ids) - prompt_tokens - 1) / total_ms
        """,
        ),
        (
            "one token is 0",
            "there is no decode step, so it is None",
            """
            return 1000 * (len(ids) - prompt_tokens - 1) / (total_ms - prefill_ms)
        """,
        ),
    ],
}

RIGHT = {
    "first_and_pace": [
        """
        import itertools
        import statistics

        first, *others = (1000 * (stamp - sent_s) for stamp in arrived_s)  # ValueError for an empty list
        gaps = [b - a for a, b in itertools.pairwise([first, *others])]
        return [first, statistics.fmean(gaps) if gaps else None]
    """
    ],
    "decode_share": ["return 1 - prefill_ms / (prefill_ms + step_ms * (tokens_out - 1))"],
    "crossover": [
        """
        tokens = 1
        while decode_share(prefill_ms, step_ms, tokens) <= 0.5:
            tokens += 1
        return tokens
    """
    ],
    "time_module": [
        """
        import contextlib

        marks = []
        with contextlib.ExitStack() as stack:
            for register in (module.register_forward_pre_hook, module.register_forward_hook):
                stack.callback(register(lambda *_: marks.append(stream.record_event())).remove)
            run()
        if not marks:
            return 0.0, 0
        marks[-1].synchronize()
        return sum(marks[i].elapsed_time(marks[i + 1]) for i in range(0, len(marks), 2)), len(marks) // 2
    """,
        """
        forward, marks = module.forward, []

        def watched(*args, **kwargs):
            marks.append(stream.record_event())
            output = forward(*args, **kwargs)
            marks.append(stream.record_event())
            return output

        module.forward = watched
        try:
            run()
        finally:
            del module.forward
        stream.synchronize()
        return sum(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2])), len(marks) // 2
    """,
    ],
    "test_rate": [
        """
        for prompt, new in ((5, 4), (2, 9)):
            expected = 1000 * (new - 1) / 30
            assert abs(program([7] * (prompt + new), prompt, 50.0, 80.0) / expected - 1) < 1e-6
        assert program([1, 2], 1, 50.0, 60.0) is None
    """
    ],
    "mended_rate": [
        """
        answer = ids[prompt_tokens:]
        return (len(answer) - 1) / ((total_ms - prefill_ms) / 1000) if len(answer) > 1 else None
    """
    ],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "first_and_pace": [
        (
            "the last gap",
            "the mean of all was asked for.",
            """
        if not arrived_s:
            raise ValueError("none")
        first = 1000 * (arrived_s[0] - sent_s)
        return first, 1000 * (arrived_s[-1] - arrived_s[-2]) if len(arrived_s) > 1 else None
        """,
        ),
        (
            "swapped",
            "The two figures have changed places.",
            """
        if not arrived_s:
            raise ValueError("none")
        first = 1000 * (arrived_s[0] - sent_s)
        return (1000 * (arrived_s[-1] - arrived_s[0]) / (len(arrived_s) - 1) if len(arrived_s) > 1 else None), first
        """,
        ),
        (
            "the longest gap",
            "the mean of all was asked for.",
            """
        if not arrived_s:
            raise ValueError("none")
        gaps = [b - a for a, b in zip(arrived_s, arrived_s[1:])]
        return 1000 * (arrived_s[0] - sent_s), 1000 * max(gaps) if gaps else None
        """,
        ),
    ],
    "crossover": [
        (
            "without the next step",
            "steps fit into the prefill, so one step more is longer",
            """
        return int(prefill_ms / step_ms) + 1
        """,
        ),
        (
            "by a loop, at least as long",
            "steps take as long as the prefill, and equally long is not longer",
            """
        tokens = 1
        while (tokens - 1) * step_ms < prefill_ms:
            tokens += 1
        return tokens
        """,
        ),
    ],
    "time_module": [
        (
            "the marks swapped",
            "begin.elapsed_time(end), not the other way round.",
            """
        begins, ends = [], []
        handles = [
            module.register_forward_pre_hook(lambda *_: begins.append(stream.record_event())),
            module.register_forward_hook(lambda *_: ends.append(stream.record_event())),
        ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        stream.synchronize()
        return sum((b.elapsed_time(a) for a, b in zip(begins, ends)), 0.0), len(ends)
        """,
        ),
        (
            "seconds",
            "Is it in seconds? Milliseconds were asked for.",
            """
        begins, ends = [], []
        handles = [
            module.register_forward_pre_hook(lambda *_: begins.append(stream.record_event())),
            module.register_forward_hook(lambda *_: ends.append(stream.record_event())),
        ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        stream.synchronize()
        return sum((a.elapsed_time(b) for a, b in zip(begins, ends)), 0.0) / 1000, len(ends)
        """,
        ),
        (
            "replaces forward",
            "of your hooks are left on the module",
            """
        marks = []
        forward = module.forward

        def timed(*args):
            begin = stream.record_event()
            out = forward(*args)
            marks.append((begin, stream.record_event()))
            return out

        module.forward = timed
        run()
        stream.synchronize()
        return sum((a.elapsed_time(b) for a, b in marks), 0.0), len(marks)
        """,
        ),
    ],
    "mended_rate": [
        (
            "per millisecond",
            "Is it per millisecond? Tokens per second were asked for.",
            """
        steps = len(ids) - prompt_tokens - 1
        return steps / (total_ms - prefill_ms) if steps else None
        """,
        ),
        (
            "distinct tokens",
            "A token that comes twice counts twice.",
            """
        steps = len(set(ids[prompt_tokens:])) - 1
        return 1000 * steps / (total_ms - prefill_ms) if len(ids) - prompt_tokens > 1 else None
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "crossover": [
        """
        tokens = 2
        while (tokens - 1) * step_ms <= prefill_ms:
            tokens += 1
        return tokens
        """,
    ],
    "decode_share": [
        """
        from fractions import Fraction

        done = Fraction(step_ms) * (tokens_out - 1)
        return done / (Fraction(prefill_ms) + done)
        """,
    ],
    "mended_rate": [
        """
        answer = ids[prompt_tokens:]
        try:
            return 1 / ((total_ms - prefill_ms) / 1000 / (len(answer) - 1))
        except ZeroDivisionError:
            return None
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
