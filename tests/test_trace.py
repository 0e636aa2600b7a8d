"""Traces: kernels in order, gaps between them, nothing counted twice."""

from __future__ import annotations

import matplotlib
import pytest
import torch
from matplotlib import pyplot as plt

from every_millisecond.notebook import trace
from every_millisecond.notebook.trace import Span, Trace, profile_operators

matplotlib.use("Agg")
COLOURS = {"matmul": "#000000", "attention": "#111111", "everything else": "#222222"}


def test_gaps_of_a_trace_by_hand():
    """Kernels of 10 and 30 us with 20 us between them: gaps are a third of 60 us."""
    made = Trace((Span("a", 0, 10), Span("b", 30, 60)), "cpu")
    assert (made.wall_us, made.busy_us) == (60, 40)
    assert made.gap_share == pytest.approx(1 / 3)
    assert made.report() == "2 kernels, 0.06 ms, of which gaps 0.02 ms (33%)"


def test_the_beginning_of_a_trace_is_a_trace():
    """Three layers were drawn, and the gaps of the whole step printed beside them, an interruption among them."""
    made = Trace(tuple(Span("a", 10 * i, 10 * i + 8) for i in range(30)), "cpu")
    assert made.first(3 / 30).report() == "3 kernels, 0.03 ms, of which gaps 0.00 ms (14%)"
    assert made.first(1) == made and len(made.first(1e-9).spans) == 1
    for share in (0, -0.1, 1.1):
        with pytest.raises(ValueError, match="more than 0 and at most 1"):
            made.first(share)


def test_overlaps_count_once():
    """A copy inside a product, or two streams of a GPU, must not make a trace busier than its own length."""
    spans = [Span("inner", 2, 5), Span("outer", 0, 10), Span("late", 8, 14), Span("later", 20, 21)]
    assert trace._one_after_another(spans) == [Span("outer", 0, 10), Span("late", 10, 14), Span("later", 20, 21)]


def test_a_cpu_trace_holds_what_computes(capfd):
    """Views and containers are no kernels; a product is one, though it calls others. Nothing on stderr."""
    x, w = torch.randn(7, 33), torch.randn(65, 33)

    def work():
        return torch.nn.functional.silu(torch.nn.functional.linear(x.t().contiguous().t(), w)).view(-1).softmax(0)

    work()
    recorded = trace.record_trace(work, device="cpu")
    names = [span.name for span in recorded.spans]
    assert names.index("aten::mm") < names.index("aten::silu") < names.index("aten::_softmax")
    assert not {"aten::linear", "aten::t", "aten::view", "aten::softmax"} & set(names)
    assert recorded.spans[0].start_us == 0 and 0 <= recorded.gap_share < 1
    ends = [span.end_us for span in recorded.spans]
    assert all(span.start_us >= end for span, end in zip(recorded.spans[1:], ends, strict=False))
    assert capfd.readouterr().err == ""


def test_attention_is_one_kernel():
    """SDPA's CPU kernel reserves and transposes inside; its own time must not be taken for a gap."""
    q = torch.randn(1, 3, 5, 16)
    recorded = trace.record_trace(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), device="cpu")
    assert [trace.kind_of(span.name) for span in recorded.spans] == ["attention"]


def test_nothing_to_record_is_an_error():
    """An empty trace would divide by zero later, far from its cause."""
    with pytest.raises(ValueError, match="no kernel ran on cpu"):
        trace.record_trace(lambda: None, device="cpu")
    with pytest.raises(ValueError, match="device='tpu'"):
        trace.record_trace(lambda: None, device="tpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmul"),
        ("sm90_xmma_gemm_bf16", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("graph_0_cpp_fused__scaled_dot_product_flash_attention_for_cpu__to_copy_3", "everything else"),
        ("triton_red_fused_mm_mul_0", "everything else"),
        ("aten::mul", "everything else"),
    ],
)
def test_kinds(name, kind):
    """The colours of the picture rest on these names."""
    assert trace.kind_of(name) == kind


def test_drawing_stops_at_the_window():
    """A bar past the window would stretch the axis of all rows."""
    _, ax = plt.subplots()
    made = Trace((Span("aten::mm", 0, 10), Span("b", 30, 60), Span("c", 70, 80)), "cpu")
    trace.draw_traces(ax, {"eager": made}, COLOURS, window_us=50)
    assert ax.get_xlim() == (0, 50)
    assert [round(patch.get_width()) for patch in ax.patches] == [50, 10, 20]
    plt.close("all")


def test_profiler_counts_calls_and_leaves_stderr_alone(capfd):
    """Guards against a table that mixes up counts, and against the profiler's chatter in every notebook."""
    a = torch.randn(33, 33)
    found = profile_operators(lambda: [a @ a for _ in range(7)], device="cpu")
    calls = {operator.name: operator.calls for operator in found}
    assert calls["aten::mm"] == 7
    assert [operator.own_ms for operator in found] == sorted((operator.own_ms for operator in found), reverse=True)
    assert capfd.readouterr().err == ""
    with pytest.raises(ZeroDivisionError):
        profile_operators(lambda: 1 / 0, device="cpu")
    with pytest.raises(TypeError, match="fn is 3"):
        profile_operators(3)
    assert profile_operators(lambda: None, device="cpu") == []  # the failed run left no profiler behind
