"""Checks of the exercises to notebook 14, its choices: what users feel, a format that fits; and those of its bytes."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from every_millisecond.checks import expect
from every_millisecond.checks.call import call
from every_millisecond.checks.ch14_bytes import CHAPTER, called, check_header, check_stream, short_list
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed

__all__ = ["CUSTOMERS", "FORMATS", "check_choose", "check_header", "check_load", "check_stream"]

# Exercise 3, what users feel

Requests = list[tuple[float, float, float | None, float | None]]  # due, sent, first token, finished


def _felt_load(draw: Draw, whole: int) -> Requests:
    """An open load with a stall: long tails, a client that sends late, and requests that failed. All in 1/1024 s."""
    requests: Requests = []
    for _ in range(whole):
        due, wait = draw.integer(0, 90_000), draw.integer(1, 3000)
        first = wait + draw.integer(100, 900)
        finish = first + 1000 + int(1000 * draw.random.expovariate(0.5))
        requests.append(tuple(x / 1024 for x in (due, due + wait, due + first, due + finish)))
    for _ in range(draw.odd(11, 21)):
        due = draw.integer(0, 90_000) / 1024
        requests.append((due, due + 0.5, draw.random.choice((None, due + 1.0)), None))
    return draw.shuffled(requests)


def _rank99(values: Sequence[float]) -> float:
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def _felt_answers(requests: Requests) -> tuple[Answers, Answers]:
    """The latencies and their p99, with what mistakes make of them."""
    whole = [request for request in requests if request[3] is not None]
    felt = [end - due for due, _, _, end in whole]
    sent = [end - sent for _, sent, _, end in whole]
    ordered, count = sorted(felt), len(felt)
    hidden = "That counts from when it was sent: a client that sends late hides the queue (coordinated omission)."
    latencies = felt, {
        hidden: sent,
        "That is the time after the first token.": [end - first for _, _, first, end in whole],
        "That is the time to the first token; asked for is the whole answer's.": [
            first - due for due, _, first, _ in whole
        ],
        "Failed requests are among them, with a time of 0.": [
            0.0 if end is None else end - due for due, _, _, end in requests
        ],
        "A request that failed is no answer, though its first token came.": [
            (first if end is None else end) - due for due, _, first, end in requests if first is not None
        ],
        "They are sorted; asked for is the order of the requests.": ordered,
        "That is how late the requests were sent.": [sent - due for due, sent, _, _ in whole],
        "The sign is wrong.": [-x for x in felt],
    }  # fmt: skip
    p99 = {
        hidden: _rank99(sent),
        "That is the largest.": ordered[-1],
        "That is the mean.": statistics.mean(felt),
        "That is the median.": ordered[(count - 1) // 2],
        "The 99th percentile is near the largest; that is near the smallest.": ordered[count - (-(-99 * count // 100))],
        "The latencies are not sorted.": felt[-(-99 * count // 100) - 1],
        "That lies between two latencies (NumPy's rule); asked for is one of them.": float(np.percentile(felt, 99)),
        "That lies between two latencies (the rule of `statistics`); asked for is one of them.": statistics.quantiles(
            felt, n=100
        )[98],
    }
    if count % 100 == 0:
        p99["That has the rank after: of 100 values, the 99th is the first that 99% do not exceed."] = ordered[
            99 * count // 100
        ]
    else:
        p99["Less than 99% are that small: the rank is rounded up."] = ordered[99 * count // 100 - 1]
    return latencies, (_rank99(felt), p99)


def _check_felt(learners: Callable, draw: Draw) -> None:
    for counts in ((200, 300, 400), (213, 231, 277)):
        requests = draw.until(
            lambda counts=counts: _felt_load(draw, draw.random.choice(counts)), lambda drawn: _felt_answers(drawn)
        )
        found = expect.items(_felt(learners, requests), 2, "the result", "the latencies and their p99")
        (felt, wrong), (p99, mistakes) = _felt_answers(requests)
        latencies = [expect.number(x, "a latency") for x in expect.sequence(found[0], "the latencies")]
        name = next((name for name, values in wrong.items() if _alike(latencies, values)), "")
        expect.that(
            name != "" or len(latencies) == len(felt),
            f"the latencies: {len(latencies)}; expected {len(felt)}, one for each request that did not fail",
        )
        expect.that(
            _alike(latencies, felt),
            f"the latencies begin with {short_list([round(x, 3) for x in latencies[:3]])}; expected "
            f"{short_list([round(x, 3) for x in felt[:3]])}. {name}".removesuffix(". "),
        )
        expect.near(found[1], p99, f"the p99 of {len(felt)} latencies", mistakes=mistakes)
    why = "no request was answered whole, so there is no p99"
    for nothing in ([], [(1.0, 1.0, None, None), (2.0, 2.5, 3.0, None)]):
        found = expect.items(_felt(learners, nothing), 2, "the result", "the latencies and their p99")
        expect.that(
            list(found[0]) == [] and found[1] is None, f"{why}: the result is {tuple(found)}; expected ([], None)"
        )
    one = expect.items(_felt(learners, [(1.0, 1.25, 1.5, 3.5)]), 2, "the result", "the latencies and their p99")
    expect.near(one[1], 2.5, "the p99 of one latency")


def _felt(learners: Callable, requests: Requests) -> object:
    return called(learners, requests, hints={
        "TypeError": "A request that failed has None as its end, and perhaps as its first token",
        "IndexError": "Without a whole answer there is no p99: None",
        "ValueError": "Without a whole answer there is no p99: None",
        "ZeroDivisionError": "Without a whole answer there is no p99: None",
        "StatisticsError": "Without a whole answer there is no p99: None",
    })  # fmt: skip


def _alike(found: Sequence[float], want: Sequence[float]) -> bool:
    return len(found) == len(want) and all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(found, want, strict=True)
    )


GoodputCase = tuple[Requests, float, float, float]  # requests, limits for the first token and the whole, seconds


def _goodput_load(draw: Draw) -> GoodputCase:
    """Requests of all kinds, so many of each that every mistake gives another number. All in 1/1024 s: exact."""
    first_limit, whole_limit = draw.integer(1024, 1536), draw.integer(4096, 5120)
    kinds = [  # late by; first token and whole answer as shares of their limits; how many
        (0, 0.5, 0.6, 3), (0, 1.5, 0.8, 5), (0, 0.5, 1.05, 9), (0, 0.2, 1.6, 11), (0, 1.5, 1.4, 17), (0, 1.0, 1.0, 13),
        (0, 1.0, 0.7, 19), (0, 0.6, 1.0, 23), (1000, 1.3, 1.15, 31), (0, 0.4, None, 27), (0, None, None, 37),
    ]  # fmt: skip
    requests: Requests = []
    for late, first, whole, count in kinds:
        for _ in range(count):
            due = draw.integer(20_000, 70_000)
            ends = [
                None if share is None else due + round(share * limit)
                for share, limit in ((first, first_limit), (whole, whole_limit))
            ]
            requests.append(tuple(None if x is None else x / 1024 for x in (due, due + late, *ends)))
    return draw.shuffled(requests), first_limit / 1024, whole_limit / 1024, float(draw.integer(61, 79))


def _goodput_answers(requests: Requests, first_limit: float, whole_limit: float, seconds: float) -> Answers:
    def rate(good: Callable[..., bool]) -> float:
        return sum(good(*request) for request in requests if request[3] is not None) / seconds

    want = rate(lambda due, sent, first, end: first - due <= first_limit and end - due <= whole_limit)
    first_only = rate(lambda due, sent, first, end: first - due <= first_limit)
    whole_only = rate(lambda due, sent, first, end: end - due <= whole_limit)
    broken = sum(end is None and first is not None and first - due <= first_limit for due, _, first, end in requests)
    failed = sum(end is None for *_, end in requests)
    ends = [end for *_, end in requests if end is not None]
    return want, {
        "That counts from when it was sent: a client that sends late hides the queue (coordinated omission).": rate(
            lambda due, sent, first, end: first - sent <= first_limit and end - sent <= whole_limit
        ),
        "The whole answer's time counts from when it was due, too.": rate(
            lambda due, sent, first, end: first - due <= first_limit and end - first <= whole_limit
        ),
        "A request that broke off after its first token is not good.": want + broken / seconds,
        "Failed requests are counted.": want + failed / seconds,
        "Only the first token's limit is looked at.": first_only,
        "Only the whole answer's limit is looked at.": whole_only,
        "One limit is enough there; both must be kept.": rate(
            lambda due, sent, first, end: first - due <= first_limit or end - due <= whole_limit
        ),
        "That is a share of the requests; goodput is requests per second.": want * seconds / len(requests),
        "That is a share of the whole answers; goodput is requests per second.": want * seconds / len(ends),
        "That is a count; goodput is requests per second.": want * seconds,
        "That is throughput: all whole answers, in time or not.": len(ends) / seconds,
        "That is the load: all requests, good or not.": len(requests) / seconds,
        "A time exactly at its limit keeps it.": rate(
            lambda due, sent, first, end: first - due < first_limit and end - due < whole_limit
        ),
        "A first token exactly at its limit keeps it.": rate(
            lambda due, sent, first, end: first - due < first_limit and end - due <= whole_limit
        ),
        "A whole answer exactly at its limit keeps it.": rate(
            lambda due, sent, first, end: first - due <= first_limit and end - due < whole_limit
        ),
        "The seconds of the run are given; they are not the time of the last answer.": want * seconds / max(ends),
        "The seconds of the run are given; they do not end with the last answer.": want * seconds
        / (max(ends) - min(due for due, *_ in requests)),
        "The seconds of the run are given; requests are not due until it ends.": want * seconds
        / (max(due for due, *_ in requests) - min(due for due, *_ in requests)),
    }  # fmt: skip


def _check_goodput(learners: Callable, draw: Draw) -> None:
    case = draw.until(lambda: _goodput_load(draw), lambda drawn: [_goodput_answers(*drawn)])
    want, mistakes = _goodput_answers(*case)
    hints = {"TypeError": "A request that failed has None as its end, and perhaps as its first token"}
    expect.near(called(learners, *case, hints=hints), want, "the goodput", mistakes=mistakes)
    _, first, whole, seconds = case
    found = call(learners, [(1.0, 1.0, None, None)], first, whole, seconds)
    expect.near(found, 0.0, "where every request failed, the goodput")


@exercise(CHAPTER, "what users feel")
def check_load(felt: Callable, goodput: Callable, draw: Draw) -> None:
    """Loads whose client was late; ranks that are just met; limits that are just met."""
    _check_felt(felt, draw)
    _check_goodput(goodput, draw)


# Exercise 4, a format that fits

Format = dict[str, object]
DEVICES = ("cpu", "gpu", "ios", "android", "browser")
PARTS = ("weights", "graph", "tokenizer", "quantisation", "template")


def _reader(name: str, devices: str, python: bool) -> dict:
    return {"name": name, "devices": set(devices.split()), "python": python}


_LLAMA_CPP = _reader("llama.cpp", "cpu gpu ios android", False)
_TRANSFORMERS = _reader("transformers", "cpu gpu", True)
_VLLM = _reader("vLLM", "gpu", True)
_ORT = _reader("ONNX Runtime", "cpu gpu ios android browser", False)


def _format(name: str, stored_bits: float, bits: int, holds: str, *readers: dict) -> Format:
    """For 1.5 billion parameters. stored_bits: with the scales of the groups."""
    size = round(1.5e9 * stored_bits / 8)
    return {"name": name, "bytes": size, "bits": bits, "holds": set(holds.split()), "readers": list(readers)}


# By their documentation, shortened: who else reads a format, and what a newer version holds, is not in here.
FORMATS: list[Format] = [
    _format("safetensors BF16", 16, 16, "weights", _TRANSFORMERS, _VLLM),
    _format("safetensors AWQ", 4.16, 4, "weights quantisation", _TRANSFORMERS, _VLLM),
    _format("GGUF Q8_0", 8.5, 8, "weights tokenizer template quantisation", _LLAMA_CPP, _TRANSFORMERS),
    _format("GGUF Q4_0", 4.5, 4, "weights tokenizer template quantisation", _LLAMA_CPP, _TRANSFORMERS),
    _format("ONNX FP32", 32, 32, "weights graph", _ORT),
    _format("ONNX INT8", 8.25, 8, "weights graph quantisation", _ORT),
    _format("Core ML FP16", 16, 16, "weights graph", _reader("Core ML", "ios", False)),
    _format("Core ML INT4", 4.5, 4, "weights graph quantisation", _reader("Core ML", "ios", False)),
    _format("AOTInductor BF16", 16, 16, "weights graph", _reader("libtorch", "cpu", False)),
]
CUSTOMERS: dict[str, dict] = {
    "the phone team": {"device": "ios", "python": False, "bytes": 1_000_000_000},
    "the C++ service": {"device": "cpu", "python": False, "holds": {"weights", "tokenizer"}, "bits": 8},
    "the GPU cluster": {"reader": "vLLM", "device": "gpu", "bits": 16},
}


def _choice(
    needs: Mapping[str, object], formats: Sequence[Format], *, drop: str = "", holds: str = "all",
    limits: str = "", readers: str = "one", order: str = "bytes",
) -> list[str]:  # fmt: skip
    """The names that fit; each argument after the star makes one mistake."""
    needs = {key: value for key, value in needs.items() if key != drop}

    def reads(reader: dict, only: Sequence[str] = ("reader", "device", "python")) -> bool:
        return (
            ("reader" not in only or needs.get("reader", reader["name"]) == reader["name"])
            and ("device" not in only or "device" not in needs or needs["device"] in reader["devices"])
            and ("python" not in only or needs.get("python", True) or not reader["python"])
        )

    def is_read(form: Format) -> bool:
        if readers == "each":
            return all(any(reads(x, [key]) for x in form["readers"]) for key in ("reader", "device", "python"))
        if readers == "first":
            return reads(form["readers"][0])
        return (all if readers == "all" else any)(reads(x) for x in form["readers"])

    def fits(form: Format) -> bool:
        wanted, held = needs.get("holds", set()), form["holds"]
        held_all = {"all": wanted <= held, "any": bool(wanted & held), "equal": wanted == held}[holds]
        most, least = needs.get("bytes", math.inf), needs.get("bits", 0)
        small = form["bytes"] < most if limits == "bytes" or limits == "both" else form["bytes"] <= most
        fine = form["bits"] > least if limits == "bits" or limits == "both" else form["bits"] >= least
        return held_all and small and (form["bits"] <= least if limits == "most" else fine) and is_read(form)

    chosen = [form for form in formats if fits(form)]
    if order != "table":
        chosen.sort(key=lambda form: form[order.removeprefix("-")], reverse=order.startswith("-"))
    return [form["name"] for form in chosen]


def _choice_answers(needs: Mapping[str, object], formats: Sequence[Format]) -> Answers:
    answers = {
        "Device, Python and name must be right for one reader: two that are each half right do not help.": dict(
            readers="each"
        ),
        "One reader that fits is enough; the others do no harm.": dict(readers="all"),
        "Not the first reader alone counts, but any.": dict(readers="first"),
        "Which reader the customer has is not looked at.": dict(drop="reader"),
        "The device is not looked at.": dict(drop="device"),
        "Where there is no Python, a reader that needs it is none.": dict(drop="python"),
        "What a format must hold is not looked at.": dict(drop="holds"),
        "The size is not looked at.": dict(drop="bytes"),
        "The bits are not looked at.": dict(drop="bits"),
        "A format must hold everything that is needed, not some of it.": dict(holds="any"),
        "A format may hold more than is needed.": dict(holds="equal"),
        "A size exactly at the limit fits.": dict(limits="bytes"),
        "So many bits as are needed are enough.": dict(limits="bits"),
        "A size or a number of bits exactly at its limit fits.": dict(limits="both"),
        "`bits` is the least that is needed, not the most.": dict(limits="most"),
        "They stand in the order of the table; the smallest comes first.": dict(order="table"),
        "The smallest comes first.": dict(order="-bytes"),
        "They are sorted by name; the smallest comes first.": dict(order="name"),
        "They are sorted by bits; the smallest in bytes comes first.": dict(order="bits"),
    }
    want = _choice(needs, formats)
    wrong = {name: _choice(needs, formats, **how) for name, how in answers.items()}
    return want, wrong | {"All that fit are asked for, not the smallest alone.": want[:1]}


def _customer(draw: Draw) -> tuple[dict, list[Format]]:
    """A customer with all six needs, and formats of which each misses one, or just meets one."""
    reader, other, third = draw.shuffled(["engine", "runner", "loader", "player"])[:3]
    device, elsewhere = draw.shuffled(DEVICES)[:2]
    first, second, more, spare = draw.shuffled(PARTS)[:4]
    most, least = draw.integer(10**9, 2 * 10**9), draw.random.choice((5, 6, 8))
    needs = {
        "reader": reader, "device": device, "python": False, "holds": {first, second}, "bytes": most, "bits": least,
    }  # fmt: skip
    good = {"name": reader, "devices": {device, elsewhere}, "python": False}
    away = {"name": other, "devices": {elsewhere}, "python": True}

    def form(**change: object) -> Format:
        size, bits = most - draw.integer(10**6, 9 * 10**8), least + draw.integer(1, 8)
        return {"bytes": size, "bits": bits, "holds": {first, second, more}, "readers": [away, good]} | change

    formats = [
        form(),
        form(readers=[good]),
        form(readers=[good, away]),
        form(holds={first, second}),
        form(bytes=most),
        form(bits=least),
        form(bytes=most + 1),
        form(bits=least - 1),
        form(holds={first, more, spare}),
        form(holds={more, spare}),
        form(readers=[good | {"name": other}]),
        form(readers=[away, good | {"devices": {elsewhere}}]),
        form(readers=[good | {"python": True}]),
        form(readers=[good | {"devices": {elsewhere}}, good | {"name": third}]),
        form(readers=[good | {"python": True}, good | {"name": other}]),
    ]
    letters = draw.shuffled("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    named = [{"name": f"format {letter}"} | x for letter, x in zip(letters, formats, strict=False)]
    return needs, draw.shuffled(named)


def _chosen(learners: Callable, needs: dict, formats: list[Format], why: str = "") -> list[str]:
    hints = {"KeyError": f"{why or 'A need that is not named is no need'}. A format has name, bytes, bits, holds and "
             "readers; a reader has name, devices and python"}  # fmt: skip
    found = called(learners, needs, formats, hints=hints)
    expect.that(not isinstance(found, str), f"the result: {found!r}; expected a list of names, the smallest first")
    names = expect.sequence(found, "the result")
    if names and isinstance(names[0], dict):
        raise CheckFailed("the result holds formats; expected their names")
    return names


@exercise(CHAPTER, "a format for three customers")
def check_choose(learners: Callable, draw: Draw) -> None:
    """A customer with every need; then one need each, none, and Python; equal sizes; the three of the text."""
    needs, formats = draw.until(lambda: _customer(draw), lambda drawn: [_choice_answers(*drawn)])
    found = _chosen(learners, needs, formats)
    want, mistakes = _choice_answers(needs, formats)
    name = next((name for name, wrong in mistakes.items() if found == wrong), "")
    expect.that(found == want, f"the chosen formats: {found}; expected {want}. {name}"[:500].strip())
    for key in draw.shuffled(needs):
        _check_choice(learners, {key: needs[key]}, formats, f"Only `{key}` is needed here")
    _check_choice(learners, needs | {"python": True}, formats, "Python is there: a reader may need it or not")
    _check_choice(learners, {}, formats, "Nothing is needed here, so every format fits")
    _check_choice(learners, needs | {"bytes": 10}, formats, "Nothing is so small")
    twins = [form | {"bytes": 10**9} for form in formats]
    _check_choice(learners, {"python": False}, twins, "All are of one size: as they stand in the table")
    for customer, wanted in CUSTOMERS.items():
        _check_choice(learners, wanted, copy.deepcopy(FORMATS), f"For {customer}")
    for customer, wanted in CUSTOMERS.items():
        print(f"{customer}: {', '.join(_choice(wanted, FORMATS))}")


def _check_choice(learners: Callable, needs: dict, formats: list[Format], why: str) -> None:
    found, want = _chosen(learners, needs, formats, why), _choice(needs, formats)
    if found == want:
        return
    same = " The order differs." if sorted(map(str, found)) == sorted(want) else ""
    twice = " A format is named once." if len(set(map(str, found))) < len(found) else ""
    raise CheckFailed(f"{why}: {short_list(found)}; expected {short_list(want)}.{same}{twice}")
