"""Checks of the exercises to notebook 08: packing, rounding on the stored grid, a group size, a prediction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from every_millisecond.checks import expect, programs, zoo
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from llm_latency.quantization import quantize_blocks

CHAPTER = "08_weight_quantization"


@exercise(CHAPTER, "pack INT4")
def check_pack(pack: Callable, unpack: Callable, draw: Draw) -> None:
    """Each by itself, so that two mistakes which undo each other do not pass."""
    rows, pairs = draw.odd(5, 9), draw.odd(11, 17)
    codes = torch.randint(16, (rows, 2 * pairs), generator=draw.generator).to(torch.uint8)
    codes[0, :4] = torch.tensor([15, 1, 9, 14])  # high nibbles of 8 and more: the sign bit of a signed byte
    high, low = codes[:, ::2], codes[:, 1::2]
    packed = high * 16 + low
    found = expect.tensor(call(pack, codes), "the packed weight", dtype=torch.uint8)
    expect.that(
        found.shape == packed.shape,
        f"the packed weight has shape {list(found.shape)}; expected {list(packed.shape)}: two codes of a "
        "row in each byte",
    )
    expect.close(
        found, packed, "the packed weight",
        mistakes={
            "The halves are swapped: the even column belongs in the high half of the byte.": low * 16 + high,
            "Neighbours share a byte, not column i of the left half and of the right.": codes[:, :pairs] * 16
            + codes[:, pairs:],
            "Left and right half of the row, and the halves of the byte swapped.": codes[:, pairs:] * 16
            + codes[:, :pairs],
            "The two codes are added: the high half must be moved up by 4 bits first.": high + low,
            "It is moved up by too few bits: a code has 4.": (high << 3) + low,
        },
    )  # fmt: skip
    found = expect.tensor(call(unpack, packed), "the unpacked codes", dtype=torch.uint8)
    expect.tensor(found, "the unpacked codes", shape=codes.shape)
    expect.close(
        found, codes, "the unpacked codes",
        mistakes={
            "Side by side, not in turns: all high halves come first.": torch.cat([packed >> 4, packed & 15], 1),
            "The halves are swapped: the high half is the even column.": torch.stack([low, high], 2).flatten(1),
            "The high half is still in the odd columns: mask it off with & 15.": torch.stack(
                [high, packed], 2
            ).flatten(1),
            "The sign bit came along: shift the byte as uint8, not as int8.": torch.stack(
                [(packed.view(torch.int8) >> 4).view(torch.uint8), low], 2
            ).flatten(1),
        },
    )  # fmt: skip
    call_raising(ValueError, pack, codes[:, 1:], why="an odd number of columns has no pairs")


def _read(codes: Tensor, scales: Tensor, lows: Tensor) -> Tensor:
    group = codes.shape[1] // scales.shape[1]
    scale, low = (x.float().repeat_interleave(group, 1) for x in (scales, lows))
    return codes.float() * scale + low


def _stored_grid(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = weight.unflatten(1, (-1, group))
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    scale, low = ((high - low) / 15).clamp(min=1e-12).bfloat16(), low.bfloat16()
    codes = ((blocks - low.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8)
    return codes.flatten(1), scale.squeeze(2), low.squeeze(2)


def _by_trying_all(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    _, scales, lows = _stored_grid(weight, group)
    points = torch.arange(16) * scales.float()[..., None] + lows.float()[..., None]  # [out, blocks, 16]
    distance = (weight.unflatten(1, (-1, group))[..., None] - points[:, :, None]).abs()
    return distance.argmin(-1).flatten(1).to(torch.uint8), scales, lows


def _unclamped(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    _, scales, lows = _stored_grid(weight, group)
    scale, low = (x.float().repeat_interleave(group, 1) for x in (scales, lows))
    return ((weight - low) / scale).round().to(torch.int16).to(torch.uint8), scales, lows


def _cut_off(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    _, scales, lows = _stored_grid(weight, group)
    scale, low = (x.float().repeat_interleave(group, 1) for x in (scales, lows))
    return ((weight - low) / scale).clamp(0, 15).to(torch.uint8), scales, lows


@exercise(CHAPTER, "the grid that moved")
def check_round_blocks(test: Callable, mended: Callable, draw: Draw) -> None:
    """Weights far from zero, where rounding a block's low moves the grid by more than a step."""
    zoo.check_test(
        test,
        draw,
        broken={
            "the codes are chosen before scale and low are rounded": programs.round_blocks,
            "the codes are cut off, not rounded": _cut_off,
            "a weight below the rounded low gets code -1, which is 255": _unclamped,
        },
        right={"by division": _stored_grid, "by trying all sixteen": _by_trying_all},
    )
    weight, group = draw.until(lambda: _far_from_zero(draw), lambda drawn: [_code_answers(*drawn)])
    want = _stored_grid(weight, group)
    codes, scales, lows = expect.items(call(mended, weight, group), 3, "the result", "codes, scales, lows")
    expect.tensor(codes, "the codes", shape=weight.shape, dtype=torch.uint8)
    span = torch.stack([block.max() - block.min() for block in weight.flatten().split(group)]).view_as(want[1])
    steps = {"Sixteen points have fifteen steps between them.": (span / 16).bfloat16()}
    for name, found, stored in (("scales", scales, want[1]), ("lows", lows, want[2])):
        expect.tensor(found, f"the {name}", shape=stored.shape, dtype=torch.bfloat16)
        expect.close(found, stored, f"the {name}", rel=0, absolute=0, mistakes=steps)
    expect.that(
        bool((codes <= 15).all()),
        f"a code is {codes.max().item()}; expected 0 to 15. A weight just outside the rounded grid needs a clamp",
    )
    best = (_read(*want) - weight).abs()
    far = ((_read(codes, scales, lows) - weight).abs() > best + 1e-5).sum().item()
    expect.that(
        far == 0,
        f"{far} of {weight.numel()} codes are not the nearest stored point. "
        "Are they chosen with scale and low as they are before the rounding to BF16, or cut off?",
    )


def _far_from_zero(draw: Draw) -> tuple[Tensor, int]:
    group, blocks, rows = draw.odd(7, 11), draw.odd(5, 9), draw.odd(13, 17)
    shift = draw.normal(rows, 1) * (torch.arange(rows)[:, None] % 3)
    return 0.05 * draw.normal(rows, group * blocks) + shift, group


def _code_answers(weight: Tensor, group: int) -> Answers:
    """The codes by each program: some weight lies outside the rounded grid, or clamping would not matter."""
    wrong = {"before": programs.round_blocks, "cut off": _cut_off, "no clamp": _unclamped}
    return _stored_grid(weight, group)[0], {name: rule(weight, group)[0] for name, rule in wrong.items()}


def _on_grid(draw: Draw, rows: int, width: int, group: int) -> Tensor:
    """Weights that lie on a grid of their own in each block of `group`, as the default model's do in blocks of 32."""
    q = torch.randint(16, (rows, width // group, group), generator=draw.generator)
    q[..., 0], q[..., -1] = 0, 15
    steps = 2.0 ** torch.randint(-9, -4, (rows, width // group, 1), generator=draw.generator)
    return ((q - 8) * steps).flatten(1)


def _loss(weight: Tensor, group: int) -> float:
    blocks = quantize_blocks(weight, bits=4, group_size=group)
    return float((blocks.dequantize() - weight).norm() / weight.norm())


@exercise(CHAPTER, "a group size under a loss budget")
def check_choose_group(learners: Callable, draw: Draw) -> None:
    """A bell curve, where loss rises with the group, and weights on a grid, where it does not; a budget just met."""
    rows = draw.odd(5, 9)
    width = 96 * draw.random.choice([k for k in (3, 5, 7) if k != rows])
    fitting = [16, 24, 32, 48, width]
    sizes = draw.shuffled([*fitting, *(size for size in (36, 80, width + 96, 7) if width % size), 48 * rows])
    bell, losses = draw.until(
        lambda: (x := draw.normal(rows, width), [_loss(x, group) for group in fitting]),
        lambda drawn: [],
        fit=lambda drawn: (
            drawn[1] == sorted(drawn[1]) and drawn[1][2] > 1.02 * drawn[1][1] and drawn[1][0] < drawn[1][1]
        ),
    )
    for weight, budget, want in (
        (bell, (losses[1] + losses[2]) / 2, 24),  # 32 / 24 is no whole number
        (bell, losses[3], 48),
        (_on_grid(draw, rows, width, 32), 0.01, 32),
        (bell, losses[0] / 2, None),
        (bell, 1.0, width),
    ):
        found = call(learners, weight, sizes, budget)
        _check_choice(found, weight, [s for s in sizes if width % s == 0], budget, want)


def _check_choice(found: object, weight: Tensor, sizes: list[int], budget: float, want: int | None) -> None:
    if want is None:
        expect.that(
            found is None, f"the result is {found!r} where no size keeps the budget of {budget:.2%}; expected None"
        )
        return
    loss = {size: _loss(weight, size) for size in sizes}
    case = f"for a budget of {budget:.2%}"
    given = ", ".join(f"{size}: {loss[size]:.1%}" for size in sorted(sizes))
    expect.that(found is not None, f"{case} the result is None, but {want} keeps it. Losses by size: {given}")
    group, bits = expect.items(found, 2, "the result", "group, bits per weight")
    group = expect.whole(group, "the group size")
    expect.that(group in loss, f"{case} the group size is {group}, which is not offered or does not divide the row")
    expect.that(loss[group] <= budget, f"{case} the group size is {group}, whose loss is {loss[group]:.2%}")
    expect.that(
        group == want or loss[want] != budget,
        f"{case} the group size is {group}, but the loss of {want} is exactly the budget, and so keeps it",
    )
    expect.that(
        group == want,
        f"{case} the group size is {group}, but {want} keeps it, too, with fewer bytes. Losses by size: {given}. "
        "Is the first size taken that fits, or the one with the least loss?",
    )
    expect.near(
        bits, 4 + 32 / group, "the bits per weight",
        mistakes={
            "Scale and zero of each block are not counted.": 4,
            "`//` cuts the fraction off.": 4 + 32 // group,
            "Each block has two numbers of 16 bits, a scale and a zero.": 4 + 16 / group,
            "That is bytes: 16 bits each for scale and zero.": 4 + 4 / group,
            "A number of 2 bytes has 16 bits.": 4 + 64 / group,
        },
    )  # fmt: skip


def _weights(shape: dict[str, int]) -> tuple[int, int]:
    """Weights of all layers, and of the head."""
    rows = 2 * shape["heads"] * shape["head_dim"] + 2 * shape["kv_heads"] * shape["head_dim"] + 3 * shape["inner"]
    return shape["layers"] * shape["hidden"] * rows, shape["vocab"] * shape["hidden"]


LLAMA_13B = dict(hidden=5120, layers=40, inner=13824, heads=40, kv_heads=40, head_dim=128, vocab=32000)


@exercise(CHAPTER, "tokens per second of a 13B model")
def check_predict(step_bytes: Callable, tokens_per_second: Callable, draw: Draw) -> None:
    """A shape in which heads * head_dim is not hidden and blocks come out even, then the real one; 4, 8 and 16 bits."""
    odd, context = draw.until(
        lambda: _shape(draw), lambda drawn: [_byte_answers(drawn[0], bits, 32, drawn[1]) for bits in (4, 8)]
    )
    for shape in (odd, LLAMA_13B):
        for bits, group, tokens in ((4, 32, context), (8, 32, context), (16, None, draw.odd(101, 301))):
            want, mistakes = _byte_answers(shape, bits, group, tokens)
            what = f"step_bytes(..., bits={bits}, group={group}, context={tokens})"
            found = call(step_bytes, shape, bits, group, tokens)
            expect.near(found, want, what, mistakes=mistakes, rel=1e-9, absolute=1)  # bytes may be rounded
    step = draw.until(lambda: _step(draw), lambda drawn: [_rate_answers(*drawn)])
    want, mistakes = _rate_answers(*step)
    expect.near(call(tokens_per_second, *step), want, "the tokens per second", mistakes=mistakes)


def _shape(draw: Draw) -> tuple[dict[str, int], int]:
    kv_heads = draw.odd(3, 5)
    shape = dict(
        hidden=32 * draw.odd(7, 9), layers=draw.odd(5, 9), inner=draw.odd(401, 501), heads=3 * kv_heads,
        kv_heads=kv_heads, head_dim=draw.odd(31, 39), vocab=draw.odd(1001, 1999),
    )  # fmt: skip
    return shape, draw.odd(501, 901)


def _step(draw: Draw) -> tuple[float, float, float]:
    """Bytes, GB/s and ms without any bytes; reading is the shorter part."""
    gbps, fixed = draw.number(300, 3000), draw.number(4, 9)
    return gbps * 1e6 * fixed * draw.number(0.4, 0.8), gbps, fixed


def _rate_answers(nbytes: float, gbps: float, fixed: float) -> Answers:
    seconds = nbytes / gbps / 1e9 + fixed / 1e3
    return 1 / seconds, {
        "What a step costs without any bytes, fixed_ms, is left out.": gbps * 1e9 / nbytes,
        "That is the time of a step in ms, not a rate.": seconds * 1e3,
        "That is the time of a step in seconds, not a rate.": seconds,
        "Is the fixed time, in ms, added to seconds?": 1 / (nbytes / gbps / 1e9 + fixed),
        "That is tokens per millisecond.": 1e-3 / seconds,
        "1 GB/s is 1e9 bytes a second, not 2 ** 30.": 1 / (nbytes / gbps / 2**30 + fixed / 1e3),
        "Reading and the fixed time follow one another: they add up.": 1 / max(nbytes / gbps / 1e9, fixed / 1e3),
    }


def _byte_answers(shape: dict[str, int], bits: int, group: int | None, context: int) -> Answers:
    layers, head = _weights(shape)
    per_weight = 2 if group is None else bits / 8 + 4 / group
    kv = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * context * 2
    want = layers * per_weight + 2 * head + kv
    mlp = shape["layers"] * shape["hidden"] * shape["inner"]
    as_hidden = {**shape, "heads": shape["kv_heads"]}
    alike = {**shape, "kv_heads": shape["heads"]}
    return want, {
        "Scales and zeros are not counted: 4 bytes a block.": layers * bits / 8 + 2 * head + kv,
        "A block has a scale and a zero, 2 bytes each.": layers * (bits / 8 + 2 / (group or 1e30)) + 2 * head + kv,
        "Are bits taken for bytes?": layers * bits + 2 * head + kv,
        "The head is kept in 16 bits.": (layers + head) * per_weight + kv,
        "The embedding is not read: a step looks up one row of it.": want + 2 * head,
        "Is the head left out? It is read in every step.": want - 2 * head,
        "The cache is not counted.": want - kv,
        "The cache holds keys and values.": want - kv // 2,
        "The cache has kv_heads heads; query heads share them.": want + kv * (shape["heads"] / shape["kv_heads"] - 1),
        "The MLP has three matrices: gate, up and down.": want - mlp * per_weight,
        "K and V have kv_heads heads, fewer than Q and O.": want + (_weights(alike)[0] - layers) * per_weight,
        "Q and O have `heads` heads.": want + (_weights(as_hidden)[0] - layers) * per_weight,
    }
