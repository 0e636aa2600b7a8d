"""Checks of the exercises to notebook 12: two streaming detokenisers, a prefix cache, ids that do not concatenate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

from every_millisecond.checks import expect, programs, zoo
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.toys import BytePieces, MergingTokenizer, WindowParts

CHAPTER = "12_text_path"
LETTERS = "abcdefgh"
WIDE = "éß你好世界👍🎉€"


def _answer(draw: Draw, words: int) -> tuple[BytePieces, list[int]]:
    """A vocabulary and the ids of an answer: spaces stand before words, wide characters are torn at any byte."""
    text = "".join(
        " " + "".join(draw.random.choices(LETTERS + WIDE * 2, k=draw.integer(1, 4))) for _ in range(words)
    ).encode()
    pieces, start = [], 0
    while start < len(text):
        length = draw.integer(1, 3) + (text[start : start + 1] == b" ")  # a space is never a piece by itself
        piece = text[start : start + length]
        if piece.endswith(b" "):
            piece = piece[:-1] or piece
        pieces.append(piece)
        start += len(piece)
    vocabulary = sorted(set(pieces))
    draw.random.shuffle(vocabulary)
    return BytePieces(vocabulary), [vocabulary.index(piece) for piece in pieces]


def _follow(stream: object, pieces: BytePieces, ids: list[int]) -> None:
    """Push all ids: at no time more than is certain, and no less where the text so far is whole."""
    shown, whole = "", pieces.decode(ids)
    for number, token_id in enumerate(ids, 1):
        part = expect.kind(call(stream.push, token_id), str, f"the result of push number {number}")
        given, so_far = f"after {number} ids", pieces.decode(ids[:number])
        shown += part
        if whole.startswith(shown) and (so_far.endswith("\ufffd") or shown == so_far):
            if isinstance(stream, WindowParts) and shown == so_far:
                expect.that(
                    stream.read == number,
                    f"{given}, all of them shown, self.read is {stream.read}; expected {number}: the ids before it "
                    "have been shown",
                )
            continue
        expect.that(
            part != so_far or shown == so_far, f"{given}, the whole text came again: {part!r}. Return what is new only"
        )
        expect.that(
            "\ufffd" not in part,
            f"{given}, half a character was shown: {part!r}. A later id completes it; hold it back until then",
        )
        expect.that(
            shown.replace(" ", "") != so_far.replace(" ", ""),
            f"{given}, {shown!r} is shown; expected {so_far!r}. Spaces are lost: `decode` drops a space in "
            "front, so one id decoded by itself has lost it",
        )
        expect.that(
            not so_far.startswith(shown) or shown == so_far,
            f"{given}, only {shown!r} is shown, though {so_far!r} is whole. Is it held back too long?",
        )
        expect.that(False, f"{given}, {shown!r} is shown; expected {so_far!r}")
    rest = expect.kind(call(stream.finish), str, "the result of finish")
    expect.that(
        shown + rest == whole,
        f"with finish(), the stream ends in {(shown + rest)[-12:]!r}, the full decode in {whole[-12:]!r}",
    )


def _streams(learners: type, draw: Draw) -> None:
    torn = BytePieces([b"\xff", b" ok", "你".encode()[:2], b"a\xe2", b"\x82\xac", b" b"])
    broken_off = [1, 0, 5, 3, 4, 1, *[0] * draw.odd(9, 21), 1, 2]  # no character at all, longer than any fixed window
    _follow(call(learners, torn.decode), torn, broken_off)
    pieces, ids = _answer(draw, 9)
    _follow(call(learners, pieces.decode), pieces, ids)
    first, second = call(learners, pieces.decode), call(learners, torn.decode)
    call(first.push, ids[0])
    begun = call(second.push, 1)
    expect.that(begun == "ok", f"a second stream begins with {begun!r}; expected 'ok'. Do two streams share their ids?")


@exercise(CHAPTER, "a streaming detokeniser")
def check_stream(learners: type, draw: Draw) -> None:
    """Torn characters, spaces before words, bytes that are no character, an end in the middle."""
    for _ in range(2):
        _streams(learners, draw)


@exercise(CHAPTER, "a stream whose cost does not grow")
def check_window_stream(learners: type, draw: Draw) -> None:
    """As before; and the ids decoded per push, over a long answer."""
    pieces, ids = _answer(draw, 180)
    stream = call(learners, pieces.decode)
    for token_id in ids:
        call(stream.push, token_id)
    pushes = len(ids)
    expect.that(
        pieces.decoded > 0,
        "nothing was decoded with the `decode` that the stream was given",
    )
    expect.that(
        pieces.decoded < 16 * pushes,
        f"{pushes} pushes decoded {pieces.decoded} ids, {pieces.decoded / pushes:.0f} for each. Decode a window of the "
        "newest ids, not the answer from its beginning",
    )
    for _ in range(3):
        _streams(learners, draw)


Prefix = tuple[int, ...]


def _good_hash(value: Hashable) -> int:
    return hash((value, 5))


def _poor_hash(value: Hashable, salt: int = 0) -> int:
    return hash((value, salt)) % 3


def _shared(stored: list[list[int]], prompt: list[int], size: int) -> int:
    """Tokens in full pages that some stored text has in common with the prompt, the last token not among them."""
    best = 0
    for ids in stored:
        same = 0
        while same < min(len(ids), len(prompt)) and ids[same] == prompt[same]:
            same += 1
        best = max(best, min(same, len(prompt) - 1) // size * size)
    return best


@exercise(CHAPTER, "a prefix cache that never lies")
def check_prefix(store: Callable, find: Callable, draw: Draw) -> None:
    """Named cases, a random crowd of prompts, and a hash that says the same of different pages."""
    size = draw.odd(3, 7)
    one, two, three = ([draw.integer(0, 9) for _ in range(size - 1)] + [10 + i] for i in range(3))
    zeros = [0] * size
    end = "The last token must run through the model, or there are no logits: its page does not count"
    after = "Keys and values depend on everything before them: a page counts only after the same pages"
    cases = [
        ([], one + two, 0, "nothing is stored"),
        ([one + two], one + two + [7], 2 * size, "both pages are stored, and one token is new"),
        ([one + two], one + two, size, end),
        ([one], one, 0, end),
        ([one + two], three + two + [7], 0, after),
        ([one + two], [*two, 7], 0, after),
        ([one + two], two + one + [7], 0, after),
        ([one + two], one + three + [7], size, "only the first page is the same"),
        ([one + two[:-1]], one + two + [7], size, "Only full pages are kept; the last one was not full"),
        ([one + two[:-1]], one + two[:-1] + [7, 7], size, "Only full pages are kept; the last one was not full"),
        ([one], [*one[::-1], 7], 0, "the same tokens in another order are another page"),
        ([one], one[:1], 0, "the prompt is shorter than a page"),
        ([zeros + one], zeros + one + [0], 2 * size, "token 0 is a token like any other"),
        ([one + two, one + three], one + two + three + [7], 2 * size, "both texts stay in the cache"),
        ([one + two, three + two], one + two + [7], 2 * size, "the same tokens after different pages are two pages"),
    ]
    for stored, prompt, want, why in cases:
        _check_find(store, find, stored, prompt, size, _good_hash, want, why)
    for salt in range(40):  # the second pages differ in what stands before them only, and their hashes seldom
        hash_of = functools.partial(_poor_hash, salt=salt)
        _check_find(store, find, [one + two, three], three + two + [7], size, hash_of, size, None)
    crowd = [[draw.integer(0, 1) for _ in range(draw.integer(1, 5 * size))] for _ in range(25)]
    for number in range(5, 25):
        want = _shared(crowd[:number], crowd[number], size)
        _check_find(store, find, crowd[:number], crowd[number], size, _good_hash, want, "one of many stored texts")
    for number in range(1, 25):
        want = _shared(crowd[:number], crowd[number], size)
        _check_find(store, find, crowd[:number], crowd[number], size, _poor_hash, want, None)


def _check_find(
    store: Callable, find: Callable, stored: list[list[int]], prompt: list[int], size: int, hash_of: Callable,
    want: int, why: str | None,
) -> None:  # fmt: skip
    cache: dict = {}
    for ids in stored:
        call(store, cache, ids, size, hash_of, may_change=True)
    found = expect.whole(call(find, cache, prompt, size, hash_of), "the number of tokens found")
    given = f"pages of {size}, stored {stored}, prompt {prompt}: {found} tokens found"
    if len(given) > 240:
        given = f"pages of {size}, {len(stored)} texts stored, a prompt of {len(prompt)} tokens: {found} tokens found"
    if why is None:  # a poor hash may make the cache forget, never lie
        expect.that(
            found <= want and found % size == 0,
            f"{given}, but only {want} are the same. The hash of two different pages was equal: it is a hint, and the "
            "ids must be compared",
        )
    else:
        expect.that(found == want, f"{given}; expected {want}. {why[0].upper()}{why[1:]}")


def _cut_at_marker(tokenizer, cache: dict[str, list[int]], text: str) -> list[int]:
    for head in sorted(cache, key=len, reverse=True):
        if text.startswith(head) and (head == text or head.endswith(tokenizer.marker)):
            return cache[head] + tokenizer(text[len(head) :], add_special_tokens=False)
    return tokenizer(text)


def _never_cut(tokenizer, cache: dict[str, list[int]], text: str) -> list[int]:
    return list(cache[text]) if text in cache else tokenizer(text)


def _begins_twice(tokenizer, cache: dict[str, list[int]], text: str) -> list[int]:
    for head in sorted(cache, key=len, reverse=True):
        if text.startswith(head) and head.endswith(tokenizer.marker):
            return cache[head] + tokenizer(text[len(head) :])
    return tokenizer(text)


@exercise(CHAPTER, "the ids that were put together")
def check_encode_cached(test: Callable, mended: Callable, draw: Draw) -> None:
    """A prefix cut inside a word, at a space, and after a marker; and what was tokenised again."""
    zoo.check_test(
        test,
        draw,
        broken={
            "ids are put together in the middle of a word": programs.encode_cached,
            "after a marker, the rest begins with a second beginning of text": _begins_twice,
        },
        right={"cut after a marker only": _cut_at_marker, "only whole texts are used again": _never_cut},
    )
    noise = "".join(draw.random.choices("abc ", k=draw.odd(9, 15)))
    system = f"explain {noise}<end>"
    texts = [
        ("the sol", "the solution", "the text goes on inside a word"),
        ("the ", "the solution", "a space may belong to the next word's token"),
        ("in", f"in the {noise}", "a piece may hold a space"),
        (f"{noise}the", f"{noise}then", "the text goes on inside a word"),
        (system, f"{system}then {noise}", "the cut is after a marker"),
        (f"{system}the sol", f"{system}the solution", "the cached text holds a marker, but does not end with one"),
        (system, system, "the whole text is in the cache"),
        (system, noise, "nothing in the cache begins the text"),
        ("<end>", f"<end>{noise}", "the cut is after a marker"),
    ]
    for head, text, case in texts:
        tokenizer = MergingTokenizer()
        cache = {head: tokenizer(head), "": tokenizer("")}
        found = expect.sequence(call(mended, tokenizer, cache, text), "the mended ids")
        want = MergingTokenizer()(text)
        begins = found.count(1)
        expect.that(begins <= 1, f"{text!r} with {head!r} in the cache begins {begins} times in the mended ids")
        expect.that(
            found == want, f"{text!r} with {head!r} in the cache: the ids are {found}; expected {want} ({case})"[:590]
        )
    for head, tail in ((system, f"then {noise}"), (f"{system}in{noise}<end>", noise)):
        tokenizer = MergingTokenizer()
        cache = {system: tokenizer(system), head: tokenizer(head)}
        before = tokenizer.characters
        call(mended, tokenizer, cache, head + tail)
        again = tokenizer.characters - before
        expect.that(
            again <= len(tail) + len(tokenizer.marker),
            f"{again} characters were tokenised, though the cache holds all but the last {len(tail)}, up to a marker. "
            "Is the longest prefix that ends with a marker used again?",
        )
    tokenizer = MergingTokenizer()
    whole = f"{system}then {noise}"
    cache = {system: tokenizer(system), whole: tokenizer(whole)}
    before = tokenizer.characters
    call(mended, tokenizer, cache, whole)
    again = tokenizer.characters - before
    expect.that(again == 0, f"{again} characters were tokenised, though the cache holds the whole text")
