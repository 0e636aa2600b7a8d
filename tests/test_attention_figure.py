"""What the notebook shows of the blocked algorithm: which blocks, in which order, and the kernel's own text."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from every_millisecond.notebook.attention_figure import draw_blocks, visited_blocks
from every_millisecond.notebook.kernel_text import kernel_paragraphs


@pytest.mark.parametrize("seq_q, seq_k, block_q, block_k", [(6, 6, 2, 3), (7, 12, 3, 5), (9, 4, 2, 2), (1, 5, 4, 2)])
def test_every_visible_pair_is_in_exactly_one_block(seq_q, seq_k, block_q, block_k):
    """Guards against a block too many (work) or too few (a wrong answer), and an unmarked crossing of the diagonal."""
    for causal in (False, True):
        visible = {(i, j) for i in range(seq_q) for j in range(seq_k) if not causal or j <= i + seq_k - seq_q}
        seen = []
        for q_start, q_stop, k_start, k_stop, crosses in visited_blocks(seq_q, seq_k, block_q, block_k, causal):
            pairs = {(i, j) for i in range(q_start, q_stop) for j in range(k_start, k_stop)}
            assert pairs & visible, "a block that nobody sees"
            assert crosses == bool(pairs - visible)
            seen += pairs & visible
        assert len(seen) == len(set(seen)) and set(seen) == visible


def test_drawing_counts_what_was_done():
    """Guards against a picture that shows another number of blocks than it says."""
    fig, ax = plt.subplots()
    draw_blocks(ax, 8, 8, 2, 2, True, done=4)
    assert [text.get_text() for text in ax.texts] == ["1", "2", "3", "4"]
    plt.close(fig)


def test_blocks_of_nothing_are_refused():
    """Guards against a range with step 0."""
    with pytest.raises(ValueError, match="block_k=0"):
        visited_blocks(4, 4, 2, 0, True)


def test_the_kernels_text_is_there_without_importing_it():
    """Guards against a notebook that cannot be read where Triton is not installed."""
    paragraphs = kernel_paragraphs("triton_prefill", "prefill_kernel")
    assert paragraphs[0].startswith("def prefill_kernel(") and "tl.store" in paragraphs[-1]
    for arguments in (("triton_prefill", "nothing"), ("nothing", "prefill_kernel")):
        with pytest.raises(ValueError, match="nothing"):
            kernel_paragraphs(*arguments)
