"""Checks of the exercises to notebook 04: tokens read, a cache of fixed size, its bytes, a position that was off."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from every_millisecond.checks import expect, zoo
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed

CHAPTER = "04_kv_cache"
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@exercise(CHAPTER, "what is read twice")
def check_tokens_read(learners: Callable, draw: Draw) -> None:
    """An answer of several tokens, and of one."""
    prompt, new = draw.until(lambda: (draw.odd(31, 301), draw.odd(5, 61)), lambda drawn: _read_answers(*drawn).values())
    for prompt, new in ((prompt, new), (draw.odd(31, 301), 1)):  # noqa: B020  the first as drawn
        result = expect.items(call(learners, prompt, new), 2, "the result", "without a cache, with one")
        for found, (name, (want, mistakes)) in zip(result, _read_answers(prompt, new).items(), strict=True):
            what = f"{prompt} tokens in, {new} out, the tokens read {name} a cache"
            expect.near(expect.whole(found, what), want, what, rel=1e-9, mistakes=mistakes)


def _read_answers(prompt: int, new: int) -> dict[str, Answers]:
    total = sum(range(prompt, prompt + new))
    return {
        "without": (total, {
            "The text grows: each pass reads one token more than the one before.": new * prompt,
            "The first pass reads the prompt alone, and the last token is read by nobody.": total + new,
            "The first token costs a pass, too: the prefill.": total - prompt,
            "That is one pass too many: the last token of the answer is not read again.": total + prompt + new,
            "That is the last pass alone; all passes were asked for.": prompt + new - 1,
        }),
        "with": (prompt + new - 1, {
            "The last token of the answer is read by nobody: nothing comes after it.": prompt + new,
            "The prompt must be read, too, once.": new,
            "The prompt must be read, too, and the last token is not.": new - 1,
        }),
    }  # fmt: skip


@exercise(CHAPTER, "a cache of fixed size")
def check_kv_cache(learners: Callable, draw: Draw) -> None:
    """A prompt, single tokens, a piece up to the last slot; then one token too many; then a second cache."""
    kv_heads, head_dim = draw.odd(3, 5), draw.odd(7, 11)
    sizes = [draw.odd(5, 9), 1, 1, draw.odd(3, 5)]
    capacity = sum(sizes)
    cache = call(learners, capacity, kv_heads, head_dim)
    expect.that(
        all(hasattr(cache, name) for name in ("keys", "values", "tokens", "update")),
        "the cache lacks one of keys, values, tokens, update; leave __init__ as it was given",
    )
    homes = cache.keys.data_ptr(), cache.values.data_ptr()
    pieces = [(draw.normal(1, kv_heads, n, head_dim), draw.normal(1, kv_heads, n, head_dim)) for n in sizes]
    for number in range(len(pieces)):
        try:
            _check_update(cache, pieces[: number + 1], capacity, homes)
        except CheckFailed as failure:
            if number == len(pieces) - 1 and "raised ValueError" in str(failure):
                raise CheckFailed(f"{failure}. But the tokens fit exactly: {capacity} into {capacity} slots") from None
            raise
    more = draw.normal(1, kv_heads, 1, head_dim)
    call_raising(
        ValueError, cache.update, more, more, why=f"all {capacity} slots are taken, so one more token does not fit"
    )
    _check_untouched(cache, pieces, capacity)
    fresh = call(learners, capacity, kv_heads, head_dim)
    _check_update(fresh, pieces[:1], capacity, (fresh.keys.data_ptr(), fresh.values.data_ptr()))
    much = draw.normal(1, kv_heads, capacity, head_dim)
    call_raising(
        ValueError, fresh.update, much, much,
        why=f"{sizes[0]} of {capacity} slots are taken, so {capacity} more tokens do not fit",
    )  # fmt: skip
    _check_untouched(fresh, pieces[:1], capacity)


def _check_update(cache: object, pieces: list[tuple[Tensor, Tensor]], capacity: int, homes: tuple[int, int]) -> None:
    made = _Made()

    @functools.wraps(cache.update)
    def watched(*args):
        with made:
            return cache.update(*args)

    result = expect.items(call(watched, *pieces[-1]), 2, "the result of update", "all keys, all values")
    wants = [torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True)]
    tokens, new = wants[0].shape[2], pieces[-1][0].shape[2]
    expect.that(
        cache.tokens == tokens, f"self.tokens is {cache.tokens} after {tokens} tokens: advance it by the new ones"
    )
    for name, found, want, other, home in zip(("keys", "values"), result, wants, reversed(wants), homes, strict=True):
        expect.tensor(found, f"the {name}", finite=False)
        if found.dim() == 4 and tokens < capacity and found.shape[2] == capacity:
            raise CheckFailed(f"the {name} are the whole buffer, empty slots too; return the {tokens} stored ones")
        if found.dim() == 4 and new < tokens and found.shape[2] == new:
            raise CheckFailed(f"the {name} are the new tokens' alone; return all {tokens} so far")
        overwritten = want.clone()
        overwritten[:, :, :new] = want[:, :, -new:]
        if new < tokens:
            overwritten[:, :, -new:] = 0
        expect.close(
            found, want, f"the {name}", rel=0, absolute=0,
            mistakes={
                "Keys and values have changed places.": other,
                "The new tokens were written over the first ones: they go after what is there.": overwritten,
            },
        )  # fmt: skip
        expect.that(
            getattr(cache, name).data_ptr() == home and getattr(cache, name).shape[2] == capacity,
            f"self.{name} is another buffer than at the start: write into the slots, do not replace the buffer",
        )
        expect.that(
            new == tokens or _home(found) == _home(getattr(cache, name)),
            f"the {name} are a copy of what is stored: at every step all of it is copied. Return a slice of the buffer",
        )
    expect.that(
        new == tokens or made.largest <= pieces[-1][0].numel(),
        f"for {new} new of {tokens} tokens a tensor of {made.largest} numbers was made: what is stored is copied at "
        "every step. Write the new tokens alone into their slots",
    )


class _Made(TorchFunctionMode):
    """While active, sees the largest tensor of numbers that is made, views of other tensors apart."""

    largest = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {_home(x) for x in _tensors([args, kwargs or {}])}
        new = [x.numel() for x in _tensors([result]) if x.is_floating_point() and _home(x) not in given]
        self.largest = max([self.largest, *new])
        return result


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _home(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _check_untouched(cache: object, pieces: list[tuple[Tensor, Tensor]], capacity: int) -> None:
    tokens = sum(k.shape[2] for k, _ in pieces)
    expect.that(
        cache.tokens == tokens,
        f"after the ValueError self.tokens is {cache.tokens}; it was {tokens}. Check before you change anything",
    )
    for name, parts in zip(("keys", "values"), zip(*pieces, strict=True), strict=True):
        stored = getattr(cache, name)
        same = stored.shape[2] == capacity and torch.equal(stored[:, :, :tokens], torch.cat(parts, dim=2))
        expect.that(
            same and not stored[:, :, tokens:].any(),
            f"after the ValueError the {name} have changed. Check before you write anything",
        )


LLAMA_3_70B = (80, 8192, 64, 8, 128)


def _config(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


@exercise(CHAPTER, "its bytes for a 70B model")
def check_cache_bytes(cache_bytes: Callable, users_that_fit: Callable, draw: Draw) -> None:
    """A drawn model whose head size is not hidden / heads; the 70B; memory that is short by a byte, or by far."""
    drawn = draw.until(lambda: _model(draw), lambda drawn: [_cache_answers(*drawn)])
    for sizes, tokens, nbytes in (drawn, (LLAMA_3_70B, 4096, 2)):
        want, mistakes = _cache_answers(sizes, tokens, nbytes)
        name = "the 70B model's bytes" if sizes is LLAMA_3_70B else "the bytes"
        found = expect.whole(call(cache_bytes, _config(*sizes), tokens, nbytes), name)
        expect.near(found, want, name, rel=1e-9, mistakes=mistakes)
    config, one = _config(*drawn[0]), _cache_answers(drawn[0], 51, 2)[0]
    weights = draw.integer(3, 9) * one + one // 3
    for users, spare in ((draw.odd(5, 9), one - 1), (draw.odd(5, 9), 0), (0, one // 2)):
        memory = weights + users * one + spare
        found = expect.whole(call(users_that_fit, memory, weights, config, 51, 2), "the number of users")
        given = f"room for {users} users and {spare} of the next one's {one} bytes: the number of users is {found}. "
        expect.that(found != memory // one, given + "The weights take room, too.")
        expect.that(spare > 0 or found != users - 1, given + "They fit exactly: that is room enough.")
        expect.that(found != users + 1, given + "Whole users only: round down.")
        expect.that(found == users, given + f"Expected {users}")
    found = expect.whole(call(users_that_fit, weights // 2, weights, config, 51, 2), "the number of users")
    expect.that(found == 0, f"the weights alone do not fit: the number of users is {found}; expected 0")


def _model(draw: Draw) -> tuple[tuple[int, ...], int, int]:
    """Layers, hidden size, heads, KV heads and head size; tokens; bytes a number."""
    kv_heads = draw.odd(3, 7)
    heads, head_dim = kv_heads * draw.odd(3, 5), draw.odd(33, 65)
    sizes = draw.odd(11, 31), heads * (head_dim + draw.odd(5, 9)), heads, kv_heads, head_dim
    return sizes, draw.odd(101, 301), draw.random.choice((1, 4))


def _cache_answers(sizes: tuple[int, ...], tokens: int, nbytes: int) -> Answers:
    layers, hidden, heads, kv_heads, head_dim = sizes
    want = 2 * layers * kv_heads * head_dim * tokens * nbytes
    numbers = {"That counts numbers, not bytes.": want // nbytes} if nbytes > 1 else {}
    return want, {
        "A key and a value: the factor 2 is missing.": want // 2,
        "Query heads are not stored: only the KV heads' keys and values are.": want // kv_heads * heads,
        "Is it the hidden size? Only the KV heads' keys and values are stored.": 2 * layers * hidden * tokens * nbytes,
        "The head size stands in the config; it need not be hidden size over heads.": 2 * layers * kv_heads
        * (hidden // heads) * tokens * nbytes,
        "Every layer stores its own.": want // layers,
        "That is one token's.": want // tokens,
        "Is it always BF16? The bytes of a number are given.": want // nbytes * 2,
        "Is it in bits? Bytes were asked for.": want * 8,
        **numbers,
    }  # fmt: skip


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [tokens, dim] with its pairs of channels turned by angles that grow with positions [tokens]; dim is even."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 0.5 ** torch.arange(half)  # [tokens, dim / 2]
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def read(step: Step, x: Tensor, pieces: Sequence[int]) -> Tensor:
    """Output [tokens, dim] of a text x [tokens, dim] that `step` reads in pieces of these lengths."""
    keys, values, outputs = x[:0], x[:0], []
    for piece in x.split(list(pieces)):
        output, keys, values = step(piece, keys, values)
        outputs.append(output)
    return torch.cat(outputs)


def broken_step(piece: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of the next piece of a text over itself and what was cached.

    piece: [new, dim]. keys, values: [past, dim], the keys rotated. Returns the output [new, dim], and keys and values
    with the piece in them, [past + new, dim].
    """
    values = torch.cat([values, piece])
    positions = len(values) + torch.arange(len(piece))
    rotated = rotate(piece, positions)
    keys = torch.cat([keys, rotated])
    scores = rotated @ keys.T / math.sqrt(piece.shape[-1])
    last_seen = len(keys) - len(piece) + torch.arange(len(piece))
    hidden = torch.arange(len(keys)) > last_seen[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values, keys, values


def _step(
    *,
    first: Callable[[int, int], int] = lambda past, new: past,
    mask: str = "right",
    forget: bool = False,
    scaled: bool = True,
) -> Step:
    """A step whose piece begins at position first(past, new), with one of several masks."""

    def step(piece: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        past, new = len(keys), len(piece)
        rotated = rotate(piece, first(past, new) + torch.arange(new))
        keys, values = torch.cat([keys, rotated]), torch.cat([values, piece])
        last_seen = torch.arange(new) + (0 if mask == "top-left" else past + new if mask == "none" else past)
        hidden = torch.arange(past + new) > last_seen[:, None]
        if forget:
            hidden = hidden | (torch.arange(past + new) < past)
        scores = rotated @ keys.T / math.sqrt(piece.shape[-1] if scaled else 1)
        scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ values, keys, values

    return step


def _plain_keys_step(piece: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Another right way: the cache holds keys as they are, and all are rotated at every step."""
    past, values = len(values), torch.cat([values, piece])
    positions = torch.arange(len(values))
    rotated = rotate(values, positions)
    scores = rotated[past:] @ rotated.T / math.sqrt(piece.shape[-1])
    scores = scores + torch.full_like(scores, -torch.inf).triu(past + 1)
    return scores.softmax(-1) @ values, torch.cat([keys, piece]), values


_WRONG_STEPS = {
    "the position is counted after the piece was appended": _step(first=lambda past, new: past + new),
    "the position begins at 0 again in every piece": _step(first=lambda past, new: 0),
    "the mask is aligned top-left: tokens after a cache do not see all of it": _step(mask="top-left"),
    "tokens see later ones of their piece": _step(mask="none"),
    "what was cached is not looked at": _step(forget=True),
}


@exercise(CHAPTER, "the position that was off")
def check_step(test: Callable, mended: Callable, draw: Draw) -> None:
    """Texts in one piece, token by token, and mixed; the learner's step keeps its own cache."""
    zoo.check_test(
        test,
        draw,
        broken={"the position is counted after the piece was appended": broken_step} | _WRONG_STEPS,
        right={
            "counted before": _step(),
            "counted from 1, which changes no distance": _step(first=lambda past, new: past + 1),
            "keys rotated when they are used": _plain_keys_step,
        },
    )
    dim = 2 * draw.odd(3, 7)
    mixed = [draw.odd(5, 9), 1, 1, draw.odd(3, 5)]
    telling = draw.until(lambda: draw.normal(sum(mixed), dim), lambda x: [_step_answers(x, mixed)])
    for pieces in (mixed, [draw.odd(5, 9)], [1] * 5, [1, draw.odd(3, 5), 1]):
        x = telling if pieces is mixed else draw.normal(sum(pieces), dim)
        want, mistakes = _step_answers(x, pieces)
        what = f"the output of a text in pieces of {pieces}"
        expect.close(call(read, mended, x, pieces), want, what, rel=1e-3, mistakes=mistakes)


def _step_answers(x: Tensor, pieces: list[int]) -> Answers:
    wrong = {f"The fault: {fault}.": read(step, x, pieces) for fault, step in _WRONG_STEPS.items()}
    wrong["The scores are not divided by the root of dim."] = read(_step(scaled=False), x, pieces)
    return read(_step(), x, pieces), wrong
