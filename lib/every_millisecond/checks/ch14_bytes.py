"""Checks of the exercises to notebook 14, its bytes: the times of a stream, and the header of a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from every_millisecond.checks import expect
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed

CHAPTER = "14_out_of_the_notebook"
LETTERS = "abcdefgh"


def called(fn: Callable, *args: object, hints: Mapping[str, str]) -> object:
    """`call(fn, *args)`; where it raises, the message ends in the hint for the error's type ("" is any)."""
    try:
        return call(fn, *args)
    except CheckFailed as failure:
        told = str(failure)
        hint = next((hint for kind, hint in hints.items() if f" raised {kind}" in told), "")
        raise CheckFailed(f"{told[:400]}. {hint}" if hint else told) from None


def _word(draw: Draw) -> str:
    return "".join(draw.random.choices(LETTERS, k=draw.integer(3, 5)))


# Exercise 1, a stream of events

Events = list[tuple[float, str]]  # when each was complete, and its data
BREAK = "\u2028\u0085"  # ends of a line for str.splitlines, and for no server


def _moments(draw: Draw, count: int) -> list[float]:
    """Rising moments in eighths of a second."""
    moments = [draw.integer(800, 8000) / 8]
    while len(moments) < count:
        moments.append(moments[-1] + draw.integer(1, 9) / 8)
    return moments


def _streams(draw: Draw) -> Iterator[tuple[list[bytes], list[tuple[int, str]], str]]:
    """Chunks; for each event the number of the chunk that ends it, and its data; what is special about the stream."""
    one, two, three = (json.dumps({"n": number, "t": _word(draw)}) for number in range(3))
    a, b, c = (f"data: {data}\n\n".encode() for data in (one, two, three))
    done = b"data: [DONE]\n\n"
    end = (3, "[DONE]")
    cut, later = draw.integer(8, 12), draw.integer(9, 14)
    wide = json.dumps({"t": _word(draw) + draw.random.choice("€你界") + _word(draw)}, ensure_ascii=False)
    w = f"data: {wide}\n\n".encode()
    torn = next(i for i, byte in enumerate(w) if byte >= 0x80) + draw.integer(1, 2)
    yield [a, b, c, done], [(0, one), (1, two), (2, three), end], "Here each chunk holds one event"
    yield [a + b, c + done], [(0, one), (0, two), (1, three), (1, "[DONE]")], "Here a chunk holds two events"
    yield (
        [a[:cut], a[cut:] + b[:later], b[later:], done], [(1, one), (2, two), end],
        "Here chunks end inside a line: its beginning must wait for the rest",
    )  # fmt: skip
    yield (
        [w[:torn], w[torn:] + a, b, done], [(1, wide), (1, one), (2, two), end],
        "Here a chunk ends inside a character: only a whole line can be decoded",
    )  # fmt: skip
    yield (
        [a[:-1], b"\n" + b[:-1], b"\n", done], [(1, one), (2, two), end],
        "Here a chunk ends before the empty line, and an event is complete with its empty line",
    )  # fmt: skip
    r, s, dos = (x.replace(b"\n", b"\r\n") for x in (a, b, done))
    yield [r, s, dos], [(0, one), (1, two), (2, "[DONE]")], "Here lines end with \\r\\n"
    yield (
        [r[:-3], r[-3:-1], b"\n" + s[:-1], b"\n" + dos], [(2, one), (3, two), end],
        "Here chunks end between \\r and \\n, which are one line end",
    )  # fmt: skip
    yield (
        [b": ping\n\n", b"event: message\nid: 7\ndataset: 8\n" + a, b":\n\n: ping\n" + b, done],
        [(1, one), (2, two), end],
        "Here are comments and fields other than data; an empty line after no data ends no event",
    )  # fmt: skip
    yield (
        [f"data:{one}\n\n".encode(), b"data:[DONE]\n\n"], [(0, one), (1, "[DONE]")],
        "Here no space stands after `data:`; it is optional",
    )  # fmt: skip
    yield (
        [b'data: {"n":\ndata: 1}\n\n', b, done], [(0, '{"n":\n1}'), (1, two), (2, "[DONE]")],
        "Here an event has two lines of data: one text, with a line end between them",
    )  # fmt: skip
    strange = json.dumps({"t": _word(draw) + BREAK[draw.integer(0, 1)] + _word(draw)}, ensure_ascii=False)
    yield (
        [f"data: {strange}\n\n".encode(), done], [(0, strange), (1, "[DONE]")],
        "Here the data holds U+2028 or U+0085, at which str.splitlines ends a line and a server does not",
    )  # fmt: skip
    quoted = json.dumps({"t": f"data: {_word(draw)}, data:"})
    yield [f"data: {quoted}\n\n".encode()], [(0, quoted)], "Here the data itself holds `data:`"
    yield [a, b[: -draw.integer(1, 4)]], [(0, one)], "Here the stream broke off: what lacks its empty line is no event"
    for end_of_line in (b"\n", b"\r\n"):
        body = (a + w + b": ping\n\n" + b + done).replace(b"\n", end_of_line)
        ends = [i for i in range(len(body)) if body[: i + 1].endswith(end_of_line * 2)]
        yield (
            [body[i : i + 1] for i in range(len(body))],
            list(zip([ends[i] for i in (0, 1, 3, 4)], (one, wide, two, "[DONE]"), strict=True)),
            "Here each chunk is a single byte",
        )  # fmt: skip


def _check_events(learners: Callable, draw: Draw) -> None:
    for pieces, want, why in _streams(draw):
        moments = _moments(draw, len(pieces))
        found = expect.sequence(
            called(learners, list(zip(moments, pieces, strict=True)), hints={"": why}), "the events"
        )
        pairs = [expect.items(pair, 2, "an event", "its moment and its data") for pair in found]
        texts, right = [data for _, data in pairs], [data for _, data in want]
        if all(isinstance(data, bytes) for data in texts) and texts:
            raise CheckFailed(f"the data of an event: {texts[0][:40]!r}, bytes; expected text: decode the whole line")
        expect.that(texts == right, f"{why}. The data: {short_list(texts)}; expected {short_list(right)}")
        times, due = [expect.number(at, "a moment") for at, _ in pairs], [moments[number] for number, _ in want]
        expect.that(
            times == due,
            f"{why}. The moments: {short_list(times)}; expected {short_list(due)}, when the chunk came that holds the "
            "event's last byte",
        )


def short_list(values: list) -> str:
    text = repr(values)
    return text if len(text) <= 150 else f"{text[:145]} ...]"


def _message(delta: dict | None, **more: object) -> dict:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": more.pop("finish", None)}]
    return {"object": "chat.completion.chunk", "choices": choices, **more}


Answer = tuple[Events, float, float]  # events, due, sent


def _timed(draw: Draw, messages: list[dict]) -> Answer:
    """The messages as a stream with its [DONE], each at a moment of its own."""
    due = draw.number(1000, 2000)
    sent = due + draw.number(0.1, 0.4)
    moment, events = sent, []
    for data in [*(json.dumps(message) for message in messages), "[DONE]"]:
        moment += draw.number(0.02, 0.3)
        events.append((moment, data))
    return events, due, sent


def _words(draw: Draw, count: int) -> list[str]:
    return [f" {_word(draw)}" for _ in range(count)]


def _usage(draw: Draw, tokens: int) -> dict:
    prompt = draw.integer(31, 61)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _stream(draw: Draw) -> Answer:
    """The role, empty deltas at three places, several tokens in a piece, a line end as a piece, usage at the end."""
    words = _words(draw, draw.odd(7, 13))
    words[draw.integer(2, 4)] = "\n"
    deltas: list[dict] = [{"content": word} for word in words]
    deltas.insert(draw.integer(2, 5), {"content": ""})
    usage = _usage(draw, len(words) + draw.integer(2, 4))
    return _timed(draw, [
        _message({"role": "assistant"}),
        _message({"content": ""}),
        *map(_message, deltas),
        _message({}, finish="stop"),
        _message(None, usage=usage),
    ])  # fmt: skip


def _stream_answers(events: Events, due: float, sent: float) -> tuple[Answers, Answers, Answers]:
    """TTFT, TPOT and text, and what mistakes make of them."""
    messages = [(moment, json.loads(data)) for moment, data in events if data != "[DONE]"]
    deltas = [(moment, choice["delta"]) for moment, message in messages for choice in message["choices"]]
    pieces = [(moment, delta["content"]) for moment, delta in deltas if delta.get("content")]
    usage = next(message["usage"] for _, message in messages if message.get("usage"))
    (first, _), (last, _), tokens = pieces[0], pieces[-1], usage["completion_tokens"]
    span, texts = last - first, [text for _, text in pieces]
    tpot = span / (tokens - 1)
    ttft = first - due, {
        "That counts from when the request was sent. The user waits from when it was due.": first - sent,
        "The first message names the role: it is no token.": deltas[0][0] - due,
        "A delta with an empty text is no token.": next(m for m, d in deltas if d.get("content") == "") - due,
        "That is a moment on the clock; asked for is the time since it was due.": first,
        "That is in milliseconds; asked for are seconds.": (first - due) * 1e3,
        "That is the time to the last token.": last - due,
        "That is TPOT; the first of the three is TTFT.": tpot,
    }  # fmt: skip
    per_token = tpot, {
        "n tokens have n - 1 gaps between them.": span / tokens,
        "Two tokens may come in one piece: `usage` says how many there were.": span / (len(pieces) - 1),
        "Two tokens may come in one piece: `usage` says how many there were, and n of them have n - 1 gaps.": span
        / len(pieces),
        "Messages without text are counted as tokens.": span / (len(deltas) - 1),
        "total_tokens counts the prompt, too.": span / (usage["total_tokens"] - 1),
        "prompt_tokens is the length of the prompt.": span / (usage["prompt_tokens"] - 1),
        "The last token came with the last text, not with the message that says why it ended.": (deltas[-1][0] - first)
        / (tokens - 1),
        "The last token came with the last text, not with `usage`.": (messages[-1][0] - first) / (tokens - 1),
        "The last token came with the last text, not with [DONE].": (events[-1][0] - first) / (tokens - 1),
        "The time to the first token is no gap between tokens.": (last - due) / tokens,
        "The time to the first token is no gap between tokens, counted from when it was sent or due.": (last - due)
        / (tokens - 1),
        "The first token came with the first text, not with the role.": (last - deltas[0][0]) / (tokens - 1),
        "That is in milliseconds; asked for are seconds.": tpot * 1e3,
        "That is the whole time after the first token, not the time for each.": span,
    }  # fmt: skip
    text = (
        "".join(texts),
        {
            "Spaces and line ends are text: nothing is stripped.": "".join(texts).strip(),
            "Spaces and line ends are text: a piece of them is a piece.": "".join(x for x in texts if x.strip()),
            "Spaces and line ends are text: no piece is stripped.": "".join(x.strip() for x in texts),
            "The pieces bring their own spaces.": " ".join(texts),
            "That is the last piece.": texts[-1],
            "The first piece is missing.": "".join(texts[1:]),
        },
    )
    return ttft, per_token, text


STREAM_HINTS = {
    "JSONDecodeError": "The data of the last event is [DONE], which is no JSON",
    "IndexError": "A message may have no choices, as the one with `usage`",
    "KeyError": "A delta may lack `content`, and a message `usage`",
    "TypeError": "A delta may lack `content`, and a message `usage`; either may be null, None in Python",
    "ZeroDivisionError": "One token has no time per token after the first: None",
}


def _check_times(learners: Callable, draw: Draw) -> None:
    case = draw.until(lambda: _stream(draw), lambda drawn: _stream_answers(*drawn))
    ttft, tpot, text = expect.items(
        called(learners, *case, hints=STREAM_HINTS), 3, "the result", "TTFT, TPOT and the text"
    )
    for found, (want, mistakes), what in zip(
        (ttft, tpot), _stream_answers(*case)[:2], ("TTFT in s", "TPOT in s"), strict=True
    ):
        expect.that(found is not None, f"{what}: None; expected {want:.6g}")
        expect.near(found, want, what, mistakes=mistakes)
    want, mistakes = _stream_answers(*case)[2]
    name = next((name for name, wrong in mistakes.items() if text == wrong), "")
    expect.that(
        expect.kind(text, str, "the text") == want, f"the text: {text!r}; expected {want!r}. {name}"[:500].strip()
    )
    for messages, first, tokens, why in _rare_streams(draw):
        _check_rare(learners, _timed(draw, messages), first, tokens, why)


def _rare_streams(draw: Draw) -> Iterator[tuple[list[dict], int, int, str]]:
    """Messages, the number of the first with text, how many tokens, and what is special."""
    role, count = _message({"role": "assistant", "content": ""}), draw.odd(5, 9)
    stop = _message({}, finish="stop")
    words = [_message({"content": word}) for word in _words(draw, count)]
    usage = _usage(draw, count + 2)
    yield [role, *words, stop, _message(None, usage=usage)], 1, count + 2, "Here the role comes with an empty text"
    null = [_message({"role": "assistant", "content": None}, usage=None), *(x | {"usage": None} for x in words)]
    yield [*null, _message(None, usage=usage)], 1, count + 2, "Here content and usage are null where there is none"
    yield [role, *words, stop], 1, count, "Here no message has `usage`: each piece counts as a token"
    yield [role, *words, stop | {"usage": usage}], 1, count + 2, "Here `usage` is in a message that has choices"
    yield [*words, stop, _message(None, usage=usage)], 0, count + 2, "Here the first message has text at once"
    blank = [_message({"content": "\n"}), *words]
    yield (
        [role, *blank, stop, _message(None, usage=usage)], 1, count + 2,
        "Here the first token is a line end: it was generated like any other",
    )  # fmt: skip
    said = [words[0], _message({"content": " [DONE]"}), *words[1:]]
    yield (
        [role, *said, stop, _message(None, usage=usage)], 1, count + 2,
        "Here the text holds [DONE]: only data that is [DONE], and nothing else, ends the stream",
    )  # fmt: skip
    one = "Here the answer is one token: TPOT is None"
    yield [role, words[0], stop, _message(None, usage=_usage(draw, 1))], 1, 1, one
    yield [role, words[0], stop], 1, 1, one


def _check_rare(learners: Callable, case: Answer, first: int, tokens: int, why: str) -> None:
    events, due, _ = case
    pieces = [
        (moment, choice["delta"]["content"])
        for moment, data in events[:-1]
        for choice in json.loads(data)["choices"]
        if choice["delta"].get("content")
    ]
    span, text = pieces[-1][0] - events[first][0], "".join(piece for _, piece in pieces)
    found = expect.items(called(learners, *case, hints={"": why}), 3, f"{why}. The result", "TTFT, TPOT and the text")
    expect.near(found[0], events[first][0] - due, f"{why}. TTFT in s")
    if tokens == 1:
        expect.that(found[1] is None, f"{why}. TPOT: {found[1]!r}; expected None")
    else:
        expect.that(found[1] is not None, f"{why}. TPOT: None; expected {span / (tokens - 1):.6g}")
        expect.near(found[1], span / (tokens - 1), f"{why}. TPOT in s")
    expect.that(found[2] == text, f"{why}. The text: {found[2]!r}; expected {text!r}"[:500])


@exercise(CHAPTER, "first token and pace from a stream")
def check_stream(events: Callable, stream_times: Callable, draw: Draw) -> None:
    """Chunks that end anywhere; then the figures of whole events, by named streams."""
    _check_events(events, draw)
    _check_times(stream_times, draw)


# Exercise 2, a header read by hand

SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1}
Tensors = dict[str, tuple[str, list[int], tuple[int, int]]]


def _entries(draw: Draw, names: Sequence[str]) -> dict[str, dict]:
    """Header entries in another order than their data: three BF16, two F32; one empty, one a scalar."""
    dtypes = draw.shuffled(["BF16"] * 3 + ["F32"] * 2 + ["F8_E4M3", "I64"])
    shapes = [[draw.odd(3, 7), draw.odd(9, 13)] for _ in dtypes]
    shapes[dtypes.index("BF16")] = [0, draw.odd(3, 9)]
    shapes[dtypes.index("F32")] = []
    placed, start = {}, 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        end = start + SIZES[dtype] * math.prod(shape)
        placed[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    return {name: placed[name] for name in draw.shuffled(names)}


def _names(draw: Draw, count: int = 7) -> list[str]:
    return [f"model.layers.{i}.{_word(draw)}.weight" for i in draw.shuffled(range(count))]


def _file(draw: Draw, header: dict) -> bytes:
    """A file with this header, padded with spaces, and data that is no UTF-8."""
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (draw.integer(1, 5) + (len(text) + 7) % 8)
    size = max((x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"), default=0)
    return len(text).to_bytes(8, "little") + text + b"\xff" * min(size, 1) + draw.random.randbytes(max(size - 1, 0))


def _tensors(file: bytes, header: dict, shift: int | None = None) -> Tensors:
    shift = 8 + int.from_bytes(file[:8], "little") if shift is None else shift
    return {
        name: (x["dtype"], x["shape"], (x["data_offsets"][0] + shift, x["data_offsets"][1] + shift))
        for name, x in header.items()
        if name != "__metadata__"
    }


def _header_answers(file: bytes, header: dict) -> Answers:
    want, length = _tensors(file, header), int.from_bytes(file[:8], "little")
    written, at = {}, 8 + length
    for name, (dtype, shape, (start, end)) in want.items():
        written[name] = dtype, shape, (at, at + end - start)
        at += end - start

    def ranges(change: Callable[[int, int], tuple[int, int]]) -> Tensors:
        return {name: (dtype, shape, change(*place)) for name, (dtype, shape, place) in want.items()}

    return want, {
        "data_offsets count from the end of the header, not from the file's first byte.": _tensors(file, header, 0),
        "The 8 bytes of the length stand before the header, and count as well.": _tensors(file, header, length),
        "The header itself lies between the length and the data.": _tensors(file, header, 8),
        "The spaces that fill the header up belong to it.": _tensors(
            file, header, 8 + len(file[8 : 8 + length].rstrip())
        ),
        "The second number is where the data ends, no length.": ranges(
            lambda start, end: (start, start + end - 8 - length)
        ),
        "Asked for is where the data ends, not how long it is.": ranges(lambda start, end: (start, end - start)),
        "The end is the byte after the last one, as in a slice.": ranges(lambda start, end: (start, end - 1)),
        "The data need not lie in the order of the names: data_offsets say where it lies.": written,
    }  # fmt: skip


def _as_tensors(value: dict, why: str) -> Tensors:
    """What the learner returned, lists and tuples made alike."""
    found = {}
    for name, entry in value.items():
        dtype, shape, place = expect.items(entry, 3, f"{why}the entry {name!r}", "dtype, shape, (start, end)")
        place = expect.items(place, 2, f"{why}the range of {name!r}", "start and end")
        shape = [
            expect.whole(x, f"{why}the shape of {name!r}") for x in expect.sequence(shape, f"the shape of {name!r}")
        ]
        found[name] = dtype, shape, tuple(expect.whole(x, f"{why}the range of {name!r}") for x in place)
    return found


_LITTLE = "Is the length read least byte first (little-endian), and the JSON cut out as file[8 : 8 + length]?"
HEADER_HINTS = {
    "JSONDecodeError": _LITTLE,
    "UnicodeDecodeError": _LITTLE,
    "ValueError": "This file is whole: its last tensor ends where the file ends",
    "OverflowError": _LITTLE,
    "error": "The length has 8 bytes, and more follow",
}


def _check_header(learners: Callable, file: bytes, header: dict, why: str, hints: Mapping[str, str]) -> None:
    value = expect.kind(called(learners, file, hints=hints), dict, "the result")
    expect.that("__metadata__" not in value, f"{why}`__metadata__` is among the tensors; it holds notes, no tensor")
    found = _as_tensors(value, why)
    want, mistakes = _header_answers(file, header)
    if set(found) != set(want):
        missing, more = sorted(set(want) - set(found)), sorted(map(str, set(found) - set(want)))
        raise CheckFailed(f"{why}The names: missing {missing or 'none'}, and not in the file {more or 'none'}"[:500])
    if found == want:
        return
    told = next((name for name, wrong in mistakes.items() if found == wrong), "")
    name = next(name for name in want if found[name] != want[name])
    raise CheckFailed(f"{why}{name!r} is {found[name]}; expected {want[name]}. {told}"[:550].strip())


def _totals(tensors: Tensors, count: Callable[[str, list[int], tuple[int, int]], int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for dtype, shape, place in tensors.values():
        total[dtype] = total.get(dtype, 0) + count(dtype, shape, place)
    return total


def _total_answers(tensors: Tensors) -> Answers:
    want = _totals(tensors, lambda dtype, shape, place: place[1] - place[0])
    return want, {
        "Those are elements; asked for are bytes.": _totals(tensors, lambda dtype, shape, place: math.prod(shape)),
        "Those are numbers of tensors; asked for are bytes.": _totals(tensors, lambda dtype, shape, place: 1),
        "Several tensors have the same dtype: their bytes add up.": {
            dtype: place[1] - place[0] for dtype, _, place in tensors.values()
        },
        "Those are sums of ends: a tensor has the bytes between its start and its end.": _totals(
            tensors, lambda dtype, shape, place: place[1]
        ),
        "The end is the byte after the last one: nothing is added to end - start.": _totals(
            tensors, lambda dtype, shape, place: place[1] - place[0] + 1
        ),
        "Not every element has 4 bytes.": _totals(tensors, lambda dtype, shape, place: 4 * math.prod(shape)),
        "Not every element has 2 bytes.": _totals(tensors, lambda dtype, shape, place: 2 * math.prod(shape)),
        "A scalar, shape [], has one element, and a shape with a 0 has none.": _totals(
            tensors, lambda dtype, shape, place: SIZES[dtype] * math.prod(shape) if shape else 0
        ),
        "An element is not counted once for each axis: sizes multiply.": _totals(
            tensors, lambda dtype, shape, place: SIZES[dtype] * sum(shape)
        ),
    }


def _header_case(draw: Draw) -> tuple[bytes, dict]:
    header = _entries(draw, _names(draw))
    return _file(draw, header), header


def _out_of_order(case: tuple[bytes, dict]) -> bool:
    """The name that comes last in the header is not the last in the data, and the length needs both of its bytes."""
    ends = [x["data_offsets"][1] for x in case[1].values()]
    return ends[-1] < max(ends) and int.from_bytes(case[0][:8], "little") % 256 > 0


@exercise(CHAPTER, "a safetensors header by hand")
def check_header(read_header: Callable, bytes_by_dtype: Callable, draw: Draw) -> None:
    """A plain file, then one peculiarity each; a file one byte too short; and the sums."""
    file, header = draw.until(
        lambda: _header_case(draw),
        lambda drawn: [_header_answers(*drawn), _total_answers(_tensors(*drawn))],
        fit=_out_of_order,
    )
    _check_header(read_header, file, header, "", HEADER_HINTS)
    notes = {"format": "pt", "template": "{{ user }} says {{ '{}' }}"}
    for place in (0, 3):
        names = list(header)
        mixed = {n: header[n] for n in names[:place]} | {"__metadata__": notes} | {n: header[n] for n in names[place:]}
        why = "Here the header has `__metadata__`, a dict of texts: "
        _check_header(read_header, _file(draw, mixed), mixed, why, {"": f"{why}it is no tensor"})
    odd = ["größe.weight", "重み", "__head__", "metadata", "format", "dtype", "model.norm"]
    mixed = _entries(draw, draw.shuffled(odd))
    why = "Here are names of all kinds, in UTF-8; none but `__metadata__` is special. "
    _check_header(read_header, _file(draw, mixed), mixed, why, {"": why.strip()})
    why = "Here the header is {}, for a file may hold no tensor. "
    _check_header(read_header, _file(draw, {}), {}, why, {"": why.strip()})
    for short in (1, draw.odd(3, 9)):
        call_raising(
            ValueError, read_header, file[:-short],
            why=f"the file ends {short} byte{'s' * (short > 1)} before its last tensor does (the last in the data need "
            "not be the last in the header)",
        )  # fmt: skip
    _check_totals(bytes_by_dtype, _tensors(file, header))


def _check_totals(learners: Callable, tensors: Tensors) -> None:
    (want, mistakes), told = _total_answers(tensors), "The bytes by dtype"
    value = expect.kind(called(learners, tensors, hints={"KeyError": "The range says how many bytes a tensor has, "
                        "whatever its dtype is"}), dict, told)  # fmt: skip
    found = {dtype: expect.whole(size, f"{told}, {dtype}") for dtype, size in value.items()}
    name = next((name for name, wrong in mistakes.items() if found == wrong), "")
    expect.that(found == want, f"{told}: {found}; expected {want}. {name}"[:500].strip())
    expect.that(call(learners, {}) == {}, f"{told} of no tensors: expected an empty dict")
