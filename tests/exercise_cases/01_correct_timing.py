"""Answers to the exercises 01, by cell: (the mistake, a part of the message, the lines between the markers)."""

WRONG = {
    "stage_times": [
        (
            "grouped by name",
            "in another order than they are listed in",
            """
            marks = []
            for name, work in sorted(stages, key=lambda stage: stage[0]):
                begin = stream.record_event()
                stream.launch(work)
                marks.append((name, begin, stream.record_event()))
            stream.synchronize()
            times = {}
            for name, begin, end in marks:
                times[name] = times.get(name, 0) + begin.elapsed_time(end)
            return times
        """,
        ),
        (
            "the host's clock around the launch",
            "that is the launch. The clock did not wait",
            """
            times = {}
            for name, work in stages:
                begin = time.perf_counter()
                stream.launch(work)
                times[name] = times.get(name, 0) + (time.perf_counter() - begin) * 1000
            return times
        """,
        ),
        (
            "a synchronise per stage",
            "between the stages: the queue runs dry",
            """
            times = {}
            stream.synchronize()
            for name, work in stages:
                begin = time.perf_counter()
                stream.launch(work)
                stream.synchronize()
                times[name] = times.get(name, 0) + (time.perf_counter() - begin) * 1000
            return times
        """,
        ),
        (
            "read at once",
            "is not reached yet: synchronise before reading elapsed_time, in your line",
            """
            times = {}
            for name, work in stages:
                begin = stream.record_event()
                stream.launch(work)
                end = stream.record_event()
                times[name] = times.get(name, 0) + begin.elapsed_time(end)
            return times
        """,
        ),
        (
            "repeats overwrite each other",
            "comes several times: add",
            """
            marks = {}
            for name, work in stages:
                begin = stream.record_event()
                stream.launch(work)
                marks[name] = begin, stream.record_event()
            stream.synchronize()
            return {name: begin.elapsed_time(end) for name, (begin, end) in marks.items()}
        """,
        ),
        (
            "one start mark for all",
            "Does every stage count from the first one's start",
            """
            start, ends = stream.record_event(), {}
            for name, work in stages:
                stream.launch(work)
                ends[name] = stream.record_event()
            stream.synchronize()
            return {name: start.elapsed_time(end) for name, end in ends.items()}
        """,
        ),
        (
            "seconds",
            "in seconds?",
            """
            marks, times = [], {}
            for name, work in stages:
                begin = stream.record_event()
                stream.launch(work)
                marks.append((name, begin, stream.record_event()))
            stream.synchronize()
            for name, begin, end in marks:
                times[name] = times.get(name, 0) + begin.elapsed_time(end) / 1000
            return times
        """,
        ),
        (
            "looks the work up instead of measuring it",
            "TypeError",
            """
            times = {}
            for name, work in stages:
                stream.launch(work)
                times[name] = times.get(name, 0) + work
            return times
        """,
        ),
        (
            "no return",
            "the result: None. Is a `return` missing?",
            """
            print(stages)
        """,
        ),
        (
            "a list instead of a dictionary",
            "expected dict",
            """
            return [work for _, work in stages]
        """,
        ),
        (
            "empties what it was given",
            "changed its argument 2",
            """
            times = {}
            while stages:
                name, work = stages.pop(0)
                begin = stream.record_event()
                stream.launch(work)
                times[name] = begin
            return times
        """,
        ),
        (
            "loops for ever",
            "does a loop never end?",
            """
            while stages:
                stream.record_event()
        """,
        ),
    ],
    "median_and_spread": [
        (
            "the mean",
            "That is the mean: one outlier moves it",
            """
            kept = sorted(samples_ms[warmup:])
            if not kept:
                raise ValueError("nothing left")
            return sum(kept) / len(kept), kept[0], kept[-1]
        """,
        ),
        (
            "warm-up kept",
            "Are the warm-up samples still in it?",
            """
            cuts = statistics.quantiles(samples_ms, n=10, method="inclusive")
            return statistics.median(samples_ms), cuts[0], cuts[8]
        """,
        ),
        (
            "warm-up cut off behind sorting",
            "Were the samples sorted before the warm-up was cut off?",
            """
            kept = sorted(samples_ms)[warmup:]
            return statistics.median(kept), kept[0], kept[-1]
        """,
        ),
        (
            "the upper one of two in the middle",
            "the median lies between the two in the middle",
            """
            kept = sorted(samples_ms[warmup:])
            n = len(kept)

            def at(percent):
                place = percent / 100 * (n - 1)
                below = int(place)
                return kept[below] + (place - below) * (kept[min(below + 1, n - 1)] - kept[below])

            return kept[n // 2], at(10), at(90)
        """,
        ),
        (
            "percentiles without interpolation",
            "between two samples we interpolate",
            """
            kept = sorted(samples_ms[warmup:])
            n = len(kept)
            return statistics.median(kept), kept[int(0.1 * (n - 1))], kept[int(0.9 * (n - 1))]
        """,
        ),
        (
            "sorts what it was given",
            "changed its argument 1",
            """
            samples_ms.sort()
            return samples_ms[len(samples_ms) // 2], samples_ms[0], samples_ms[-1]
        """,
        ),
        (
            "only the median",
            "expected list or tuple",
            """
            return statistics.median(samples_ms[warmup:])
        """,
        ),
        (
            "nothing left is nothing said",
            "expected ValueError",
            """
            kept = samples_ms[warmup:]
            if len(kept) < 2:
                return (kept * 3) or (0.0, 0.0, 0.0)
            cuts = statistics.quantiles(kept, n=10, method="inclusive")
            return statistics.median(kept), cuts[0], cuts[8]
        """,
        ),
    ],
    "faulty_lines": [
        ("one missing", "3 of 4 found. Look again: one outlier decides", "return {3, 5, 9}"),
        ("an innocent line", "line 10 is innocent: seconds times 1000", "return {3, 5, 9, 10}"),
        ("all lines", "is innocent", "return set(range(1, 12))"),
        ("one fault twice", "lines [5, 6] are one fault", "return {3, 5, 6, 9}"),
        ("text", "expected a number", 'return {"3", "5"}'),
    ],
    "benchmark": [
        (
            "as it was",
            "no call was left for warming up",
            """
            samples = {name: [] for name in versions}
            next(iter(versions.values()))(stream)
            stream.synchronize()
            for name, work in versions.items():
                for _ in range(repeats):
                    begin = time.perf_counter()
                    work(stream)
                    samples[name].append((time.perf_counter() - begin) * 1000)
            return {name: sum(ms) / len(ms) for name, ms in samples.items()}
        """,
        ),
        (
            "one after the other",
            "measured one after the other",
            """
            medians = {}
            for name, work in versions.items():
                samples = []
                work(stream)
                stream.synchronize()
                for _ in range(repeats):
                    begin = time.perf_counter()
                    work(stream)
                    stream.synchronize()
                    samples.append((time.perf_counter() - begin) * 1000)
                medians[name] = statistics.median(samples)
            return medians
        """,
        ),
        (
            "no wait",
            "The clock is read before the work is done",
            """
            samples = {name: [] for name in versions}
            for work in versions.values():
                work(stream)
            for _ in range(repeats):
                for name, work in versions.items():
                    stream.synchronize()
                    begin = time.perf_counter()
                    work(stream)
                    samples[name].append((time.perf_counter() - begin) * 1000)
            return {name: statistics.median(ms) for name, ms in samples.items()}
        """,
        ),
        (
            "the least",
            "The least sample follows the quick calls",
            """
            samples = {name: [] for name in versions}
            for work in versions.values():
                work(stream)
            stream.synchronize()
            for _ in range(repeats):
                for name, work in versions.items():
                    begin = time.perf_counter()
                    work(stream)
                    stream.synchronize()
                    samples[name].append((time.perf_counter() - begin) * 1000)
            return {name: min(ms) for name, ms in samples.items()}
        """,
        ),
        (
            "the warm-up not awaited",
            "is the warm-up awaited?",
            """
            samples = {name: [] for name in versions}
            for work in versions.values():
                work(stream)
            for _ in range(repeats):
                for name, work in versions.items():
                    begin = time.perf_counter()
                    work(stream)
                    stream.synchronize()
                    samples[name].append((time.perf_counter() - begin) * 1000)
            return {name: statistics.median(ms) for name, ms in samples.items()}
        """,
        ),
        (
            "the mean",
            "A mean follows the few slow calls",
            """
            samples = {name: [] for name in versions}
            for work in versions.values():
                work(stream)
            stream.synchronize()
            for _ in range(repeats):
                for name, work in versions.items():
                    begin = time.perf_counter()
                    work(stream)
                    stream.synchronize()
                    samples[name].append((time.perf_counter() - begin) * 1000)
            return {name: statistics.mean(ms) for name, ms in samples.items()}
        """,
        ),
    ],
}

RIGHT = {
    "stage_times": [
        """
        events = [stream.record_event()]  # the end of one stage is the start of the next
        for _, work in stages:
            stream.launch(work)
            events.append(stream.record_event())
        events[-1].synchronize()
        times = dict.fromkeys((name for name, _ in stages), 0.0)
        for (name, _), begin, end in zip(stages, events, events[1:]):
            times[name] += begin.elapsed_time(end)
        return times
    """
    ],
    "median_and_spread": [
        """
        kept = samples_ms[warmup:]
        if len(kept) == 0:
            raise ValueError("nothing left")
        if len(kept) == 1:
            return kept * 3
        cuts = statistics.quantiles(kept, n=20, method="inclusive")
        return cuts[9], cuts[1], cuts[17]
    """
    ],
    "faulty_lines": [
        """
            return frozenset((3, 6, 9, 11))
        """,
        "return [6, 8, 11, 3]",
    ],
    "benchmark": [
        """
        samples = {}
        for round in range(repeats + 1):  # the first round is the warm-up
            order = list(versions) if round % 2 else list(reversed(versions))
            for name in order:
                stream.synchronize()
                begin = time.perf_counter_ns()
                versions[name](stream)
                stream.record_event().synchronize()
                samples.setdefault(name, []).append((time.perf_counter_ns() - begin) / 1e6)
        return {name: statistics.median(ms[1:]) for name, ms in samples.items()}
    """
    ],
}

# Found by answering the exercises anew
for _cell, _answers in {
    "stage_times": [
        (
            "the first occurrence only",
            "The stage comes several times",
            """
        marks = {}
        for name, work in stages:
            begin = stream.record_event()
            stream.launch(work)
            marks.setdefault(name, (begin, stream.record_event()))
        stream.synchronize()
        return {name: begin.elapsed_time(end) for name, (begin, end) in marks.items()}
        """,
        ),
        (
            "marks swapped",
            "begin.elapsed_time(end), not the other way round.",
            """
        marks = []
        for name, work in stages:
            begin = stream.record_event()
            stream.launch(work)
            marks.append((name, begin, stream.record_event()))
        stream.synchronize()
        times = {}
        for name, begin, end in marks:
            times[name] = times.get(name, 0.0) + end.elapsed_time(begin)
        return times
        """,
        ),
        (
            "from a name's first start to its last end",
            "That is from its first start to its last end",
            """
        begins, ends = {}, {}
        for name, work in stages:
            begins.setdefault(name, stream.record_event())
            stream.launch(work)
            ends[name] = stream.record_event()
        stream.synchronize()
        return {name: begins[name].elapsed_time(ends[name]) for name in begins}
        """,
        ),
        (
            "events of CUDA",
            "Tried to instantiate dummy base class Event (torch.cuda.Event needs a",
            """
        raise RuntimeError("Tried to instantiate dummy base class Event")
        """,
        ),
    ],
    "median_and_spread": [
        (
            "the slowest cut off",
            "Were the samples sorted before the warm-up was cut off? Then the slowe",
            """
        kept = sorted(samples_ms)[: len(samples_ms) - warmup]
        if not kept:
            raise ValueError("nothing")
        if len(kept) == 1:
            return kept[0], kept[0], kept[0]
        cuts = statistics.quantiles(kept, n=10, method="inclusive")
        return statistics.median(kept), cuts[0], cuts[8]
        """,
        ),
        (
            "in another order",
            "the order is median, p",
            """
        kept = samples_ms[warmup:]
        if not kept:
            raise ValueError("nothing")
        if len(kept) == 1:
            return kept[0], kept[0], kept[0]
        cuts = statistics.quantiles(kept, n=10, method="inclusive")
        return cuts[0], statistics.median(kept), cuts[8]
        """,
        ),
        (
            "exclusive quantiles",
            "Is it another convention? (statistics",
            """
        kept = samples_ms[warmup:]
        if not kept:
            raise ValueError("nothing")
        if len(kept) == 1:
            return kept[0], kept[0], kept[0]
        cuts = statistics.quantiles(kept, n=10)
        return statistics.median(kept), cuts[0], cuts[8]
        """,
        ),
    ],
    "benchmark": [
        (
            "the clock starts before the wait",
            "a sample begins while work is still in the queue (is the warm-up await",
            """
        for work in versions.values():
            work(stream)
        samples = {name: [] for name in versions}
        for _ in range(repeats):
            for name, work in versions.items():
                begin = time.perf_counter()
                stream.synchronize()
                work(stream)
                stream.synchronize()
                samples[name].append((time.perf_counter() - begin) * 1000)
        return {name: statistics.median(ms) for name, ms in samples.items()}
        """,
        ),
        (
            "the warm-up is kept",
            "Is the warm-up among the samples? Its time belongs to none.",
            """
        samples = {name: [] for name in versions}
        for _ in range(repeats + 1):
            for name, work in versions.items():
                stream.synchronize()
                begin = time.perf_counter()
                work(stream)
                stream.synchronize()
                samples[name].append((time.perf_counter() - begin) * 1000)
        return {name: statistics.median(ms) for name, ms in samples.items()}
        """,
        ),
        (
            "seconds",
            "Is it in seconds? Milliseconds were asked for.",
            """
        for work in versions.values():
            work(stream)
        stream.synchronize()
        samples = {name: [] for name in versions}
        for _ in range(repeats):
            for name, work in versions.items():
                begin = time.perf_counter()
                work(stream)
                stream.synchronize()
                samples[name].append(time.perf_counter() - begin)
        return {name: statistics.median(s) for name, s in samples.items()}
        """,
        ),
    ],
}.items():
    WRONG.setdefault(_cell, []).extend(_answers)
for _cell, _answers in {
    "stage_times": [
        """
        stream.synchronize()
        marks = []
        for name, work in stages:
            begin = stream.record_event()
            stream.launch(work)
            marks.append((name, begin, stream.record_event()))
        while not stream.query():
            time.sleep(0.001)
        times = {}
        for name, begin, end in marks:
            times[name] = times.get(name, 0) + begin.elapsed_time(end)
        return times
        """,
    ],
    "median_and_spread": [
        """
        import numpy as np

        kept = np.array(samples_ms[warmup:])
        if kept.size == 0:
            raise ValueError("nothing left")
        return np.percentile(kept, [50, 10, 90])
        """,
    ],
    "benchmark": [
        """
        from time import monotonic_ns as clock

        names = list(versions)
        for _ in range(2):
            for name in names:
                versions[name](stream)
        times = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                stream.synchronize()
                start = clock()
                versions[name](stream)
                end = stream.record_event()
                end.synchronize()
                times[name].append(clock() - start)
        return {name: sorted(ns)[len(ns) // 2] / 1e6 for name, ns in times.items()}
        """,
    ],
}.items():
    RIGHT.setdefault(_cell, []).extend(_answers)
