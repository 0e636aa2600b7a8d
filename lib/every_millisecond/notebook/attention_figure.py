"""Draws which blocks of the score matrix FlashAttention visits, in the order in which it does."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from llm_latency.arguments import check_count
from llm_latency.attention.flash import key_blocks

FULL, DIAGONAL, EMPTY = "#56B4E9", "#CC79A7", "#FFFFFF"


def visited_blocks(
    seq_q: int, seq_k: int, block_q: int, block_k: int, causal: bool
) -> list[tuple[int, int, int, int, bool]]:
    """(first query, end, first key, end, crosses the diagonal) of every block in the order of the module's loops.

    Raises TypeError or ValueError for a length or block that is not an int of 1 or more.
    """
    for name, value in (("seq_q", seq_q), ("seq_k", seq_k), ("block_q", block_q), ("block_k", block_k)):
        check_count(name, value)
    return [
        (start, min(start + block_q, seq_q), *block)
        for start in range(0, seq_q, block_q)
        for block in key_blocks(start, min(start + block_q, seq_q), seq_q, seq_k, block_k, causal)
    ]


def draw_blocks(ax: Axes, seq_q: int, seq_k: int, block_q: int, block_k: int, causal: bool, done: int) -> None:
    """The score matrix with its first `done` blocks visited; the newest has a thick frame, its number stands in each.

    Blue blocks need no mask, hatched ones cross the diagonal; white ones are not yet computed, dotted ones never.
    """
    ax.add_patch(Rectangle((0, 0), seq_k, seq_q, facecolor=EMPTY, edgecolor="#999999", linewidth=0.5))
    all_blocks = visited_blocks(seq_q, seq_k, block_q, block_k, causal)
    corners = {(q_start, k_start) for q_start, _, k_start, *_ in all_blocks}
    for y in range(0, seq_q, block_q):
        for x in range(0, seq_k, block_k):
            if (y, x) not in corners:
                size = min(block_k, seq_k - x), min(block_q, seq_q - y)
                ax.add_patch(Rectangle((x, y), *size, facecolor=EMPTY, edgecolor="#999999", hatch="..", linewidth=0.5))
    blocks = all_blocks[:done]
    for number, (q_start, q_stop, k_start, k_stop, crosses) in enumerate(blocks, start=1):
        newest = number == len(blocks)
        ax.add_patch(
            Rectangle(
                (k_start, q_start),
                k_stop - k_start,
                q_stop - q_start,
                facecolor=DIAGONAL if crosses else FULL,
                hatch="//" if crosses else None,
                edgecolor="black" if newest else "white",
                linewidth=3 if newest else 1,
                zorder=3 if newest else 2,
            )
        )
        centre = (k_start + k_stop) / 2, (q_start + q_stop) / 2
        ax.text(*centre, str(number), ha="center", va="center", fontsize=11, zorder=4)
    ax.set(xlim=(-0.1, seq_k + 0.1), ylim=(seq_q + 0.1, -0.1), aspect="equal")
    ax.set_xticks(range(0, seq_k + 1, block_k))
    ax.set_yticks(range(0, seq_q + 1, block_q))
    ax.grid(visible=False)
