"""The course's hand-drawn pictures, one function each: what a notebook's idea looks like before anything is measured.

They hold no measured figure and nothing in them is to scale unless the picture says so. Each returns a figure for
`show.figure`, whose alternative text the notebook writes.
"""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from every_millisecond.notebook.plots import METHOD_COLOURS, OTHER_COLOUR, STAGE_COLOURS
from llm_latency.roofline import ModelShape

INK = "#222222"
YELLOW = "#F0E442"  # the colour of Okabe and Ito's eight that neither stages nor methods use


def canvas(width: float, height: float, right: float, top: float, title: str) -> tuple[Figure, Axes]:
    """An empty sheet from (0, 0) to (right, top), y upwards, without axes."""
    fig, ax = plt.subplots(figsize=(width, height))
    ax.set(xlim=(0, right), ylim=(0, top))
    ax.set_title(title)
    ax.axis("off")
    return fig, ax


def box(ax: Axes, x: float, y: float, width: float, height: float, text: str = "", colour: str = OTHER_COLOUR,
        *, ink: str = "white", size: float = 11, **style) -> None:  # fmt: skip
    """A filled rectangle with its lower left corner at (x, y) and text in its middle."""
    ax.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", **style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=size)


def span(ax: Axes, begin: float, end: float, y: float, text: str, *, above: bool = True, size: float = 11) -> None:
    """A dimension line from begin to end at height y, with its text in the middle above or below it."""
    ax.annotate("", (begin, y), (end, y), arrowprops={"arrowstyle": "|-|,widthA=0.35,widthB=0.35", "color": INK})
    ax.annotate(
        text, ((begin + end) / 2, y), (0, 5 if above else -5), textcoords="offset points", ha="center",
        va="bottom" if above else "top", fontsize=size, color=INK,
    )  # fmt: skip


def request_in_time() -> Figure:
    """One request as four coloured stages, left to right, with the two waits that a user feels."""
    fig, ax = canvas(11, 3.2, 22, 6.4, "One request in time (not to scale: the scale is what you will measure)")
    box(ax, 0.5, 2.6, 1.1, 1.4, "", STAGE_COLOURS["tokenise"])
    box(ax, 1.7, 2.6, 4.6, 1.4, "256 tokens in one pass", STAGE_COLOURS["prefill"])
    left = 6.4
    for i in range(12):
        if i == 9:
            ax.text(left + 0.5, 3.3, "...", ha="center", va="center", fontsize=16)
        else:
            box(ax, left, 2.6, 0.9, 1.4, "1", STAGE_COLOURS["decode"])
        left += 1.0
    box(ax, left, 2.6, 1.1, 1.4, "", STAGE_COLOURS["detokenise"])
    for x, name in ((1.05, "tokenise"), (4.0, "prefill"), (12.4, "decode: 49 passes of one token each"),
                    (left + 0.55, "detokenise")):  # fmt: skip
        ax.text(x, 4.2, name, ha="center", va="bottom", fontsize=12, fontweight="bold", color=INK)
    span(ax, 0.5, 6.3, 2.1, "time to first token", above=False)
    span(ax, 6.4, 7.3, 2.1, "time per\noutput token", above=False)
    span(ax, 0.5, left + 1.1, 5.5, "the whole request: 50 new tokens")
    return fig


def host_and_device(launch: float = 1.0, kernel: float = 1.7, wake: float = 0.7) -> Figure:
    """The same four kernels twice: one wait at the end, and one after each, which leaves the device idle."""
    fig, ax = canvas(11, 4.6, 19, 9.6, "A host that launches, a device that works")
    for y, title in ((6.7, "one wait,\nat the end"), (2.3, "a wait after\neach kernel")):
        ax.text(0.1, y, title, ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
        for dy, name in ((0.7, "host"), (-0.7, "device")):
            ax.text(3.9, y + dy, name, ha="right", va="center", fontsize=11, color=INK)
    host = device = 4.1
    for i in range(4):  # the host runs ahead
        box(ax, host, 7.0, launch - 0.08, 0.8, str(i + 1), METHOD_COLOURS[3])
        host += launch
        begin = max(device, host)
        box(ax, begin, 5.6, kernel - 0.08, 0.8, f"kernel {i + 1}", METHOD_COLOURS[4], ink=INK, size=10)
        device = begin + kernel
    back = device + wake
    box(ax, host, 7.0, back - host - 0.08, 0.8, "wait", "#DDDDDD", ink=INK)
    for x, foot, text in (
        (host, 6.75, "a clock read here\ncounts the launches"), (back, 5.4, "a clock read here\ncounts the work")
    ):  # fmt: skip
        ax.plot([x, x], [foot, 8.3], color=INK, linewidth=2, linestyle="--", marker="")
        ax.text(x, 8.4, text, ha="center", va="bottom", fontsize=11, color=INK, fontweight="bold")
    host = 4.1
    for i in range(4):
        box(ax, host, 2.6, launch - 0.08, 0.8, str(i + 1), METHOD_COLOURS[3])
        box(ax, host + launch, 1.2, kernel - 0.08, 0.8, f"kernel {i + 1}", METHOD_COLOURS[4], ink=INK, size=10)
        box(ax, host + launch, 2.6, kernel + wake - 0.08, 0.8, "wait", "#DDDDDD", ink=INK)
        if i < 3:
            span(ax, host + launch + kernel, host + 2 * launch + kernel + wake, 0.9, "idle", above=False, size=10)
        host += launch + kernel + wake
    ax.text(4.1, 7.95, "launches", ha="left", va="bottom", fontsize=10, color=METHOD_COLOURS[3])
    ax.annotate("time", (18.8, 0.1), (16.8, 0.1), arrowprops={"arrowstyle": "->"}, va="center", fontsize=10)
    return fig


def block_with_shapes(shape: ModelShape, tokens: int = 256) -> Figure:
    """One block of a Llama-like model: the shape of what flows, of each matrix, and where a hook starts and stops."""
    fig, ax = canvas(11.5, 4.4, 23, 9, "One block: what flows through it, and where a hook starts and stops the clock")
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    pieces = (
        (2.6, 1.5, "norm", ["", f"{shape.hidden}"], OTHER_COLOUR),
        (5.0, 4.3, "attention", [f"q {query} × {shape.hidden}", f"k, v {key} × {shape.hidden}",
                                 f"o {shape.hidden} × {query}"], METHOD_COLOURS[3]),
        (11.9, 1.5, "norm", ["", f"{shape.hidden}"], OTHER_COLOUR),
        (14.3, 4.6, "FFN", [f"gate {shape.ffn} × {shape.hidden}", f"up {shape.ffn} × {shape.hidden}",
                            f"down {shape.hidden} × {shape.ffn}"], METHOD_COLOURS[4]),
    )  # fmt: skip
    ax.plot([0.4, 22.4], [4.3, 4.3], color=INK, linewidth=1.6, marker="", zorder=0)
    ax.annotate("", (22.8, 4.3), (22.2, 4.3), arrowprops={"arrowstyle": "->", "color": INK})
    for x, width, name, weights, colour in pieces:
        box(ax, x, 2.9, width, 2.8, "", colour)
        ax.text(x + width / 2, 5.25, name, ha="center", va="center", fontsize=12, fontweight="bold", color=INK)
        for line, text in enumerate(weights):
            ax.text(x + width / 2, 4.6 - 0.62 * line, text, ha="center", va="center", fontsize=10, color=INK)
    for begin, plus in ((2.0, 10.3), (11.3, 19.9)):  # the residual goes round norm and module
        ax.plot([begin, begin, plus, plus], [4.3, 7.0, 7.0, 4.65], color=INK, linewidth=1.3, marker="")
        ax.add_patch(plt.Circle((plus, 4.3), 0.36, facecolor="white", edgecolor=INK))
        ax.text(plus, 4.27, "+", ha="center", va="center", fontsize=13, color=INK)
    ax.text(6.2, 7.15, "residual: past the hooks", ha="center", va="bottom", fontsize=10, color=INK)
    for x, width in ((5.0, 4.3), (14.3, 4.6)):
        for edge, text, side in ((x, "pre-hook:\nstart", "left"), (x + width, "hook:\nstop", "right")):
            ax.plot([edge, edge], [1.9, 5.9], color=INK, linewidth=1.6, linestyle=":", marker="")
            ax.text(edge, 1.8, text, ha=side, va="top", fontsize=10, color=INK)
    ax.text(0.3, 8.3, f"in and out: [1, T, {shape.hidden}].   T = {tokens} in prefill, 1 in a decode step.   "
            f"This model has {shape.layers} such blocks.", fontsize=12, color=INK)  # fmt: skip
    attention, ffn = (sum(out * into for out, into in matrices)
                      for matrices in (shape.attention_matrices(), shape.ffn_matrices()))  # fmt: skip
    for x, values in ((7.15, attention), (16.6, ffn)):
        ax.text(x, 0.2, f"{values:,} weights", ha="center", va="center", fontsize=11, color=INK)
    return fig


def three_regimes() -> Figure:
    """The roofline twice: a large model, whose launches bind nothing, and a small one, which never meets memory."""
    fig, axes = plt.subplots(1, 2, figsize=(12.5, 4.8), sharey=True)
    memory, arithmetic, launches = METHOD_COLOURS[4], METHOD_COLOURS[3], "#BBBBBB"
    ridge, top, right, apart = 5.0, 5.0, 10.0, 1.9  # in decades that stand for no machine
    bold = dict(fontsize=11, fontweight="bold", color=INK, rotation_mode="anchor", transform_rotates_text=True)
    panels = ((apart, memory, "A large model", "memory binds:\nfewer bytes (INT4),\nmore tokens a pass"),
              (-apart, launches, "A small model on a fast device",
               "launches bind:\nfewer operators (fusion,\ngraphs, one kernel)"))  # fmt: skip
    for ax, (shift, colour, title, cure) in zip(axes, panels, strict=True):
        begin, meets = max(0.0, -shift), ridge + max(0.0, -shift)  # where what binds leaves the axis, meets the flat
        ax.fill_between([begin, meets], [0, top], color=colour, alpha=0.35, linewidth=0)
        ax.fill_between([meets, right], [top, top], color=arithmetic, alpha=0.35, linewidth=0)
        ax.plot([0, ridge, right], [0, top, top], color=INK, linewidth=3, marker="")
        ax.plot([max(0.0, -shift), ridge - shift], [max(0.0, shift), top], color=INK, linewidth=2, ls="--", marker="")
        ax.text(1.3, 1.4, "memory", rotation=45, va="bottom", **bold)
        y, side = (2.4, "bottom") if shift > 0 else (1.95, "top")
        ax.text(2.2 - shift, y, "launches", rotation=45, va=side, **bold)
        ax.text(7.4, 5.15, "arithmetic", va="bottom", ha="center", **bold)
        ax.text(meets + 0.4, 3.0, "arithmetic binds:\nless of it,\nfaster formats", fontsize=11, color=INK, va="center")
        ax.text(begin + 1.7, 0.7, cure, fontsize=11, color=INK, va="center")
        ax.set(xlim=(0, right), ylim=(0, 6.1), xticks=[], yticks=[], title=title)
        ax.set_xlabel("FLOP per byte: grows with the tokens in a pass")
    axes[0].set_ylabel("FLOP per second")
    axes[0].annotate("ridge", (ridge, top), (ridge - 0.3, top + 0.7), arrowprops={"arrowstyle": "->"}, ha="right")
    axes[1].fill_between([0, apart, ridge, ridge + apart], [0, 0, ridge - apart, top], [0, apart, top, top],
                         facecolor="none", edgecolor="#777777", hatch="//", linewidth=0)  # fmt: skip
    style = dict(facecolor="white", edgecolor="none", pad=1.5)
    axes[1].text(4.4, 3.45, "no pass\nhere", ha="center", va="center", fontsize=11, color=INK, bbox=style)
    fig.suptitle("Three limits: the lowest line above a pass binds it (log axes, not to scale)")
    return fig


def attention_levels() -> Figure:
    """FlashAttention on an A100: a tile in fast memory, and what each level of memory holds and delivers."""
    fig, ax = canvas(11, 6.2, 21.6, 12.4, "Where FlashAttention's numbers live: A100, published sizes and bandwidths")
    shared, cached, large = METHOD_COLOURS[4], "#C9E6F7", "#E3E3E3"
    box(ax, 0.3, 8.0, 15.2, 3.6, "", shared)
    box(ax, 0.3, 4.4, 15.2, 2.4, "", cached)
    box(ax, 0.3, 0.4, 15.2, 2.8, "", large)
    for y, text in ((11.15, "ON THE CHIP, beside the arithmetic: the tile of one block of queries"),
                    (6.35, "L2 CACHE, shared by all multiprocessors"),
                    (2.75, "HBM, the GPU's large memory")):  # fmt: skip
        ax.text(0.6, y, text, ha="left", va="center", fontsize=11, fontweight="bold", color=INK)
    pieces = ((0.7, 1.7, "q block", "stays"), (3.0, 1.7, "k block", "streams past"),
              (5.3, 2.7, "scores of\nthis tile", "used, then forgotten"), (8.9, 1.7, "v block", "streams past"),
              (11.2, 4.0, "m, l, acc", "2 numbers, 1 vector a row"))  # fmt: skip
    for x, width, name, fate in pieces:
        box(ax, x, 9.1, width, 1.5, name, METHOD_COLOURS[3], ink=INK)
        ax.text(x + width / 2, 8.55, fate, ha="center", va="center", fontsize=10, color=INK)
    for x, sign, size in ((2.7, "@", 14), (5.0, "=", 14), (8.45, "with", 10), (10.9, "\N{RIGHTWARDS ARROW}", 14)):
        ax.text(x, 9.85, sign, ha="center", va="center", fontsize=size, fontweight="bold", color=INK)
    box(ax, 0.7, 4.8, 4.9, 1.1, "k and v of the heads in work", "white", ink=INK, size=10)
    ax.text(6.0, 5.35, "read again for every block of queries", ha="left", va="center", fontsize=10, color=INK)
    box(ax, 0.7, 0.8, 4.9, 1.4, "q, k, v and the result:\nn rows a head", "white", ink=INK, size=10)
    ax.add_patch(plt.Rectangle((8.6, 0.7), 6.4, 1.6, facecolor="none", edgecolor=INK, linestyle="--"))
    ax.text(11.8, 1.5, "n x n scores a head:\nnever written here", ha="center", va="center", fontsize=10, color=INK)
    for y in (3.25, 6.85):
        ax.annotate("", (3.15, y + 1.1), (3.15, y), arrowprops={"arrowstyle": "<->", "color": INK, "linewidth": 2})
    ax.text(3.6, 3.8, "each number once", ha="left", va="center", fontsize=10, color=INK)
    ax.text(3.6, 7.4, "k and v once per block of queries", ha="left", va="center", fontsize=10, color=INK)
    for y, size, rate in ((9.8, "192 KB on each of 108\nmultiprocessors", "19,000 GB/s"), (5.6, "40 MB", "7,200 GB/s"),
                          (1.8, "80 GB", "2,039 GB/s")):  # fmt: skip
        ax.text(16.1, y + 0.75, rate, ha="left", va="center", fontsize=14, fontweight="bold", color=INK)
        ax.text(16.1, y - 0.45, size, ha="left", va="center", fontsize=11, color=INK)
    return fig


def draft_and_verify() -> Figure:
    """Seven tokens twice: one pass each, and two cycles of three guesses that the target checks in one pass."""
    fig, ax = canvas(11.5, 4.9, 23, 9.8, "Draft and verify in time (not to scale: the scale is what you will measure)")
    draft, target, own = YELLOW, METHOD_COLOURS[4], METHOD_COLOURS[3]

    def small(x: float, y: float, colour: str) -> None:  # a token; white: one that fell
        ax.add_patch(plt.Rectangle((x, y), 0.5, 0.65, facecolor=colour, edgecolor=INK, linewidth=0.8))
        if colour == "white":
            ax.text(x + 0.25, y + 0.31, "x", ha="center", va="center", fontsize=11, color=INK)

    ax.text(0.1, 8.1, "target alone", ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
    ax.text(0.1, 3.9, "draft and\ntarget", ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
    for i in range(7):
        box(ax, 3.4 + 2.75 * i, 7.6, 2.65, 1.0, "1 row", target, ink=INK)
        small(3.4 + 2.75 * i + 1.1, 6.4, own)
    ax.text(22.65, 6.1, "seven passes, seven tokens", ha="right", va="top", fontsize=11, color=INK)
    left = 3.4
    for stand, words in ((2, "the third guess falls:\nthe target's own token replaces it"),
                         (3, "all three stand:\nthe target adds a fourth token")):  # fmt: skip
        for i in range(3):
            box(ax, left + 0.75 * i, 3.4, 0.65, 1.0, "", draft)
        box(ax, left + 2.3, 3.4, 3.3, 1.0, "4 rows at once", target, ink=INK)
        for i, colour in enumerate([draft] * stand + ["white"] * (3 - stand) + [own]):
            small(left + 2.45 + 0.85 * i, 2.3, colour)
        ax.text(left + 2.3, 2.0, words, ha="left", va="top", fontsize=10, color=INK)
        left += 6.6
    ax.text(3.4, 4.75, "three guesses, one after the other", ha="left", va="bottom", fontsize=10, color=INK)
    ax.text(16.6, 3.9, "two passes, seven tokens:\none of six guesses was wasted", ha="left", va="center", fontsize=11,
            color=INK)  # fmt: skip
    for x, colour, text in ((3.4, draft, "the draft's, stands"), (8.6, "white", "the draft's, falls"),
                            (13.4, own, "the target's own")):  # fmt: skip
        small(x, 0.1, colour)
        ax.text(x + 0.7, 0.42, text, ha="left", va="center", fontsize=10, color=INK)
    ax.annotate("time", (22.9, 9.2), (20.9, 9.2), arrowprops={"arrowstyle": "->"}, va="center", fontsize=10)
    return fig


def three_tables(page: int, tables: dict[str, list[int]], lengths: dict[str, int], pages: int) -> Figure:
    """Pages of several requests: the texts on the left, their tables, and where the pages lie in the pool.

    page: tokens of a page. tables: request -> its pages in order. lengths: tokens of each. pages: in the pool.
    """
    fig, ax = canvas(11.5, 4.6, 23, 9.2, "Each request sees one text; the pool holds pages in any order")
    colours = dict(zip(tables, (METHOD_COLOURS[4], YELLOW, METHOD_COLOURS[3]), strict=False))
    owner = {number: (name, i) for name, table in tables.items() for i, number in enumerate(table)}
    slot = 0.42

    def draw_page(x: float, y: float, name: str | None, i: int) -> None:
        filled = 0 if name is None else min(page, lengths[name] - i * page)
        for j in range(page):
            used = j < filled
            colour, hatch = colours[name] if used else "white", None if used or name is None else "////"
            ax.add_patch(
                plt.Rectangle((x + slot * j, y), slot, 0.8, facecolor=colour, edgecolor="#777777", hatch=hatch)
            )

    for row, (name, table) in enumerate(tables.items()):
        y = 6.4 - 1.9 * row
        ax.text(0.1, y + 0.4, f"request {name}", ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
        for i, number in enumerate(table):
            draw_page(2.8 + (slot * page + 0.25) * i, y, name, i)
            ax.text(2.8 + (slot * page + 0.25) * i + slot * page / 2, y - 0.12, f"page {number}", ha="center", va="top",
                    fontsize=10, color=INK)  # fmt: skip
    ax.text(0.1, 8.0, "what a request sees, and its table", ha="left", va="center", fontsize=12, color=INK)
    ax.text(14.0, 8.0, "the pool", ha="left", va="center", fontsize=12, color=INK)
    for number in range(pages):
        column, row = number % 3, number // 3
        x, y = 14.6 + (slot * page + 1.0) * column, 6.7 - 1.35 * row
        name, i = owner.get(number, (None, 0))
        draw_page(x, y, name, i)
        ax.text(x - 0.15, y + 0.4, str(number), ha="right", va="center", fontsize=10, color=INK)
        if name is None:
            ax.text(x + slot * page / 2, y + 0.4, "free", ha="center", va="center", fontsize=10, color=INK,
                    bbox={"fc": "white", "ec": "none", "pad": 1})  # fmt: skip
    ax.text(0.1, 0.3, "coloured: a token's key and value stand there; hatched: reserved, still empty", ha="left",
            va="center", fontsize=11, color=INK)  # fmt: skip
    return fig


def int4_group() -> Figure:
    """A group of 32 weights: 128 bytes in FP32, and as nibbles, a scale and a zero in 20."""
    fig, ax = canvas(11, 4.6, 34, 11.4, "A group of 32 weights in FP32, and in INT4")
    halves, extra = (METHOD_COLOURS[4], "#C9E6F7"), METHOD_COLOURS[3]
    for i in range(32):
        box(ax, 1 + i, 8.4, 0.96, 1.4, f"w{i}", halves[i // 16], ink=INK, size=8)
    ax.text(1, 10.1, "FP32: 32 weights of 4 bytes = 128 bytes", ha="left", fontsize=12, fontweight="bold", color=INK)
    for i in range(32):
        box(ax, 1 + i % 16, 4.2 + i // 16 * 0.75, 0.96, 0.7, f"q{i}", halves[i // 16], ink=INK, size=8)
    for y, name in ((5.3, "high"), (4.55, "low")):
        ax.text(0.8, y, name, ha="right", va="center", fontsize=9, color=INK)
    ax.text(
        1, 6.0, "INT4: 16 bytes, in each a low and a high code", ha="left", fontsize=12, fontweight="bold", color=INK
    )
    for x, name in ((17.6, "scale"), (20.4, "zero")):
        box(ax, x, 4.2, 2.6, 1.45, f"{name}\n2 bytes", extra, ink=INK, size=10)
    ax.text(23.6, 4.95, "= 20 bytes: 5 bits a weight", ha="left", va="center", fontsize=12, color=INK)
    ax.text(20.2, 7.55, "all 32 share one scale and one zero", ha="center", va="top", fontsize=11, color=INK)
    ax.annotate("", (20.2, 5.7), (18.4, 7.15), arrowprops={"arrowstyle": "->", "color": INK})
    line = 1.7
    ax.plot([1, 31], [line, line], color=INK, linewidth=1, marker="")
    for code in range(16):
        x = 1 + 2 * code
        ax.plot([x, x], [line - 0.35, line + 0.35], color=INK, linewidth=1.5, marker="")
        ax.text(x, line - 0.5, str(code), ha="center", va="top", fontsize=9, color=INK)
    ax.text(17, line + 1.05, "zero:\ncode 8", ha="center", va="center", fontsize=10, color=INK)
    span(ax, 21, 23, line + 0.75, "scale", size=10)
    ax.text(31.6, line, "the sixteen\npoints", ha="left", va="center", fontsize=10, color=INK)
    return fig


def operators_and_one_kernel() -> Figure:
    """Three operators of a step, each with a launch before it, and the same work as one call with barriers in it."""
    fig, ax = canvas(11, 5.0, 24, 11.6, "The same work, as operators and as one function (not to scale)")
    launch, work = METHOD_COLOURS[3], METHOD_COLOURS[4]
    names = ("norm", "q, k, v", "rotate")
    for y, title in ((8.6, "operators"), (3.3, "one kernel")):
        ax.text(0.2, y, title, ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
    for y in (8.95, 8.0, 3.65, 2.7):
        ax.text(4.0, y, f"core {1 if y in (8.95, 3.65) else 2}", ha="right", va="center", fontsize=10, color=INK)
    x, ends = 4.3, []
    for name in names:
        box(ax, x, 8.55, 3.2, 0.8, "launch", launch, ink=INK, size=10)
        cores = ((8.55, 1.7), (7.6, 1.5)) if name == "q, k, v" else ((8.55, 1.7),)  # the others are too small for two
        for y, length in cores:
            box(ax, x + 3.25, y, length, 0.8, name, work, ink=INK, size=10)
        x += 5.1
        ends.append(x)
    ax.text(x + 0.15, 8.4, "... and so on,\nhundreds of times a step", ha="left", va="center", fontsize=11, color=INK)
    ax.annotate(
        "a launch: Python, dispatch, memory for the result, threads\ntold to begin (on a GPU: a kernel queued)",
        (5.9, 9.4), (4.3, 10.7), ha="left", va="center", fontsize=10, color=INK, arrowprops={"arrowstyle": "->"},
    )  # fmt: skip
    x = 4.3
    box(ax, x, 3.25, 3.2, 0.8, "one call", launch, ink=INK, size=10)
    x += 3.25
    for name in (*names, "attend"):
        cores = ((3.25, 1.7),) if name == "norm" else ((3.25, 1.7), (2.3, 1.5))  # a thread takes whole rows of a norm
        for y, length in cores:
            box(ax, x, y, length, 0.8, name, work, ink=INK, size=10)
        ax.plot([x + 1.82, x + 1.82], [2.1, 4.3], color=INK, linewidth=3, marker="")
        x += 1.95
    ax.text(x + 0.1, 3.2, "... to the logits", ha="left", va="center", fontsize=11, color=INK)
    ax.annotate(
        "a barrier: whoever is done waits here, on its core, for the others", (9.37, 2.05), (7.6, 1.0), ha="left",
        va="center", fontsize=10, color=INK, arrowprops={"arrowstyle": "->"},
    )  # fmt: skip
    ax.annotate("time", (23.8, 5.8), (21.6, 5.8), arrowprops={"arrowstyle": "->"}, va="center", fontsize=10)
    return fig


def slots_filling(prompt: int = 4, steps: int = 3) -> Figure:
    """Four passes of one layer twice: nothing kept, so that each computes all tokens; and with slots that fill up."""
    fig, ax = canvas(11.5, 4.8, 23, 9.6, "Keys and values of one layer, pass by pass")
    computed, stored, size = METHOD_COLOURS[3], METHOD_COLOURS[4], 0.85
    room = prompt + steps + 1
    for x, title in ((2.9, "nothing kept: every pass computes every token"), (13.4, "kept: a pass computes its own")):
        ax.text(x, 8.7, title, ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
    for row in range(steps + 1):
        y, tokens = 7.0 - 1.45 * row, prompt + row
        name = f"prompt,\n{prompt} tokens" if row == 0 else f"step {row}"
        ax.text(0.1, y + 0.42, name, ha="left", va="center", fontsize=11, color=INK)
        for i in range(tokens):
            box(ax, 2.9 + size * i, y, size, 0.85, str(i + 1), computed, ink=INK, size=10)
        ax.text(2.9 + size * tokens + 0.15, y + 0.42, f"+{tokens}", ha="left", va="center", fontsize=12, color=INK)
        new = prompt if row == 0 else 1
        for i in range(room):
            colour = computed if tokens - new <= i < tokens else stored if i < tokens else "white"
            box(ax, 13.4 + size * i, y, size, 0.85, str(i + 1) if i < tokens else "", colour, ink=INK, size=10)
            ax.add_patch(plt.Rectangle((13.4 + size * i, y), size, 0.85, facecolor="none", edgecolor="#777777"))
        ax.text(13.4 + size * room + 0.15, y + 0.42, f"+{new}", ha="left", va="center", fontsize=12, color=INK)
    for x, total in ((2.9, sum(prompt + row for row in range(steps + 1))), (13.4, prompt + steps)):
        ax.text(x, 1.85, f"{total} tokens computed", ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
    for x, colour, text in ((0.1, computed, "computed in this pass (right: and written)"),
                            (9.0, stored, "read from its slot"),
                            (14.6, "white", "a free slot (a cache of fixed size has them)")):  # fmt: skip
        box(ax, x, 0.35, size, 0.75, "", colour)
        ax.add_patch(plt.Rectangle((x, 0.35), size, 0.75, facecolor="none", edgecolor="#777777"))
        ax.text(x + size + 0.2, 0.72, text, ha="left", va="center", fontsize=10, color=INK)
    return fig


def three_ways_to_issue() -> Figure:
    """One step on a GPU as operators, compiled, and as a recorded graph: what the host does, when the device works."""
    fig, ax = canvas(11.5, 5.6, 23, 11.2, "One step, issued in three ways (a GPU; not to scale)")
    order, matmul, small = "#DDDDDD", METHOD_COLOURS[4], METHOD_COLOURS[3]
    eager = [("", 0.35, small), ("", 0.35, small), ("", 0.35, small), ("matmul", 1.2, matmul), ("", 0.35, small),
             ("", 0.35, small), ("matmul", 1.2, matmul), ("", 0.35, small)]  # fmt: skip
    fused = [("", 0.5, small), ("matmul", 1.2, matmul), ("", 0.5, small), ("matmul", 1.2, matmul), ("", 0.35, small)]
    ways = (("eager", "a launch for\neach operator", eager, 1.75), ("compiled", "small ones fused:\nfewer launches",
            fused, 1.75), ("as a graph", "recorded once,\nthen one launch", fused, 0.0))  # fmt: skip
    for row, (name, what, kernels, launch) in enumerate(ways):
        y = 8.2 - 3.4 * row
        ax.text(0.1, y + 1.15, name, ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
        ax.text(0.1, y + 0.1, what, ha="left", va="center", fontsize=10, color=INK)
        for dy, side in ((1.35, "host"), (0.35, "device")):
            ax.text(5.6, y + dy, side, ha="right", va="center", fontsize=10, color=INK)
        host = device = 5.8
        if not launch:
            box(ax, host, y + 0.95, 1.75, 0.8, "replay", order, ink=INK, size=10)
            device = host + 1.75
        for text, width, colour in kernels:
            if launch:
                box(ax, host, y + 0.95, launch, 0.8, "launch", order, ink=INK, size=9)
                host += launch
            begin = max(host, device)
            if launch and begin - device > 0.3 and device > 5.8:
                span(ax, device, begin, y - 0.25, "", size=9)
            box(ax, begin, y - 0.05, width, 0.8, text, colour, ink=INK, size=9)
            device = begin + width
        ax.text(device + 0.25, y + 0.35, "done", ha="left", va="center", fontsize=10, fontweight="bold", color=INK)
    for x, colour, text in ((14.4, small, "a small operator"), (18.6, matmul, "a matmul")):
        box(ax, x, 2.1, 0.35, 0.8, "", colour)
        ax.text(x + 0.5, 2.5, text, ha="left", va="center", fontsize=10, color=INK)
    span(ax, 14.4, 15.6, 1.2, "")
    ax.text(15.8, 1.2, "a gap: the device waits for the host", ha="left", va="center", fontsize=10, color=INK)
    ax.annotate("time", (22.9, 10.9), (20.9, 10.9), arrowprops={"arrowstyle": "->"}, va="center", fontsize=10)
    return fig


def prefix_shared() -> Figure:
    """Two prompts over one kept prefix, and a third whose first token differs, so that nothing of it can be kept."""
    fig, ax = canvas(11.5, 4.9, 21.4, 10.4, "One prefix, read once, in front of many requests (not to scale)")
    common, own, strange = METHOD_COLOURS[4], METHOD_COLOURS[3], OTHER_COLOUR
    left, width, tail = 4.6, 10.2, 5.4
    rows = ((7.4, "learner A", "A's solution, the question"), (4.9, "learner B", "B's solution, the question"))
    for y, name, text in rows:
        ax.text(left - 0.3, y + 0.6, name, ha="right", va="center", fontsize=12, fontweight="bold", color=INK)
        box(ax, left, y, width, 1.2, "instructions, statement, notes", common, ink=INK)
        box(ax, left + width + 0.1, y, tail, 1.2, text, own, ink=INK, size=10)
    span(ax, left, left + width, 9.0, "the same ids from the first on: read once, keys and values kept")
    span(ax, left + width + 0.1, left + width + tail + 0.1, 4.6, "read for this request alone", above=False, size=10)
    for x in (left + 1.2, left + width / 2, left + width - 1.2):
        ax.annotate("", (x, 6.15), (x, 7.35), arrowprops={"arrowstyle": "<->", "color": INK})
    ax.text(left + width / 2 + 0.3, 6.75, "equal, slot by slot", ha="left", va="center", fontsize=10, color=INK)
    y = 1.6
    ax.text(left - 0.3, y + 0.6, "name first", ha="right", va="center", fontsize=12, fontweight="bold", color=INK)
    box(ax, left, y, 1.5, 1.2, "“Ada,”", own, ink=INK, size=10)
    box(ax, left + 1.6, y, width - 1.6, 1.2, "instructions, statement, notes", strange, ink=INK)
    box(ax, left + width + 0.1, y, tail, 1.2, "A's solution, the question", strange, ink=INK, size=10)
    ax.text(
        left, y - 0.3, "every slot after the name depends on it: the same words, and not one can be used again",
        ha="left", va="top", fontsize=10, color=INK,
    )  # fmt: skip
    return fig


def quantised_cache() -> Figure:
    """One head of an INT8 cache: key codes with scales by channel and group, value codes with scales by token."""
    fig, ax = canvas(11.5, 6.2, 23, 12.4, "One head's INT8 cache: codes and scales (4 channels, groups of 4 tokens)")
    codes, scales, exact = METHOD_COLOURS[4], METHOD_COLOURS[3], "#E3E3E3"
    for left, title in ((2.6, "KEYS: a scale per channel and group"), (13.2, "VALUES: a scale per token")):
        ax.text(left, 11.6, title, ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
        for token in range(12):  # the oldest at the top
            for channel in range(4):
                colour = codes if token < 9 else exact
                ax.add_patch(plt.Rectangle((left + channel, 10.1 - 0.8 * token), 0.9, 0.7, facecolor=colour))
    for group, (top, tokens) in enumerate(((10.8, 4), (7.6, 4), (4.4, 1))):
        for channel in range(4):  # one column of a group shares a scale
            low = top - 0.8 * tokens + 0.12
            ax.add_patch(plt.Rectangle((2.56 + channel, low - 0.05), 0.98, 0.8 * tokens - 0.02, fill=False,
                                       edgecolor=scales, linewidth=2.2))  # fmt: skip
            ax.add_patch(plt.Rectangle((7.4 + 0.55 * channel, top - 0.75), 0.45, 0.7, facecolor=scales))
        if group == 0:
            ax.text(7.4, 9.5, "4 scales a group,\none per column", ha="left", va="center", fontsize=10, color=INK)
    for token in range(9):
        y = 10.1 - 0.8 * token
        ax.add_patch(plt.Rectangle((13.16, y - 0.04), 3.98, 0.78, fill=False, edgecolor=scales, linewidth=2.2))
        ax.add_patch(plt.Rectangle((17.5, y), 0.45, 0.7, facecolor=scales))
    ax.text(18.3, 7.3, "1 scale a token:\nfinal at once", ha="left", va="center", fontsize=10, color=INK)
    ax.text(2.3, 4.05, "open\ngroup", ha="right", va="center", fontsize=10, color=INK)
    kept = "exact tokens\nkept too, until\na 4th closes it"
    ax.text(9.75, 4.0, kept, ha="left", va="center", fontsize=10, color=INK)
    for x in (2.3, 12.9):
        ax.text(x, 2.85, "window:\nexact", ha="right", va="center", fontsize=10, color=INK)
    ax.text(2.3, 10.45, "oldest", ha="right", va="center", fontsize=10, color=INK)
    ax.text(2.3, 1.65, "newest", ha="right", va="center", fontsize=10, color=INK)
    ax.text(2.6, 0.35, "a score sums over channels: q times k", ha="left", va="center", fontsize=10, color=INK)
    ax.text(13.2, 0.35, "the result sums over tokens: weights times v", ha="left", va="center", fontsize=10, color=INK)
    return fig


def weights_to_server() -> Figure:
    """From a model's folder to its users: three formats, who serves each, and where the times over HTTP come from."""
    fig, ax = canvas(11.5, 5.4, 23, 10.8, "From weights to a server")
    weights, waiting, running = METHOD_COLOURS[4], "#DDDDDD", METHOD_COLOURS[3]
    for x, text in ((0.2, "what you have"), (5.0, "a format"), (11.0, "a server"), (18.4, "users, over HTTP")):
        ax.text(x, 9.9, text, ha="left", va="center", fontsize=12, fontweight="bold", color=INK)
    box(ax, 0.2, 5.0, 3.3, 3.4, "weights\ngraph (code)\ntokenizer, template\n(quantisation)", weights, ink=INK, size=10)

    def arrow(begin: tuple[float, float], end: tuple[float, float]) -> None:
        ax.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": INK, "lw": 1.4})

    rows = (
        (7.9, "safetensors", "weights", "transformers serve", 1, 4),
        (5.9, "GGUF", "weights, tokenizer, quantisation", "llama.cpp's server", 4, 1),
        (3.9, "ONNX", "weights, graph", "", 0, 0),
    )
    for y, name, what, server, slots, queue in rows:
        arrow((3.6, 6.7), (4.9, y + 0.7))
        box(ax, 5.0, y, 5.2, 1.4, f"{name}\n{what}", weights, ink=INK, size=10)
        arrow((10.3, y + 0.7), (10.9, y + 0.7))
        if not server:
            ax.text(
                11.0, y + 0.7, "a runtime that your own program calls", ha="left", va="center", fontsize=10, color=INK
            )
            continue
        ax.add_patch(plt.Rectangle((11.0, y - 0.15), 6.2, 1.7, facecolor="none", edgecolor=INK, linewidth=1.2))
        ax.text(11.2, y + 1.2, server, ha="left", va="center", fontsize=10, fontweight="bold", color=INK)
        for i in range(queue):
            box(ax, 11.3 + 0.5 * i, y + 0.1, 0.45, 0.6, "", waiting)
        for i in range(slots):
            box(ax, 16.5 - 0.5 * i, y + 0.1, 0.45, 0.6, "", running)
        ax.text(
            18.4,
            y + 0.7,
            f"{slots + queue} ask, {slots} served at a time",
            ha="left",
            va="center",
            fontsize=10,
            color=INK,
        )
        arrow((18.2, y + 1.0), (17.3, y + 1.0))
        arrow((17.3, y + 0.4), (18.2, y + 0.4))
    for x, colour, text in ((11.0, waiting, "a request that waits"), (15.2, running, "a request being served")):
        box(ax, x, 2.75, 0.45, 0.6, "", colour)
        ax.text(x + 0.6, 3.05, text, ha="left", va="center", fontsize=10, color=INK)
    ax.text(0.2, 1.65, "one answer", ha="left", va="center", fontsize=11, fontweight="bold", color=INK)
    left = 3.6
    for width, text, colour in ((3.2, "waits", waiting), (4.2, "prompt is read", STAGE_COLOURS["prefill"])):
        box(ax, left, 1.2, width, 0.9, text, colour, ink=INK if colour == waiting else "white", size=10)
        left += width
    for _ in range(6):
        box(ax, left, 1.2, 1.1, 0.9, "", STAGE_COLOURS["decode"])
        left += 1.1
    span(ax, 3.6, 11.0, 0.85, "time to first token (TTFT)", above=False, size=10)
    span(ax, 11.0, 17.6, 0.85, "then time per output token (TPOT), each", above=False, size=10)
    return fig
