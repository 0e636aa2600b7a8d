"""C++ from a cell, the operators of a step by name, and what notebook 09 says of the kernel's phases."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import kernel_toys
import pytest
import torch

from every_millisecond.laboratory import counting
from every_millisecond.notebook import cpp
from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_library import KernelUnavailable

needs_kernel = kernel_toys.needs_kernel()
LIB = Path(kernel_library.__file__).parent


@needs_kernel
def test_a_function_of_a_cell_is_called():
    """Guards against flags with which a cell's C++ is built, but not found or not right."""
    library = cpp.build('extern "C" int twice(int x) { return 2 * x; }')
    assert library.twice(21) == 42 and isinstance(library, ctypes.CDLL)


@needs_kernel
def test_a_mistake_is_told_in_one_line_without_a_path():
    """Guards against a page of a compiler's complaints, and against a stored output that names a folder."""
    with pytest.raises(ValueError, match=r"does not compile: /cell.cpp:1:.*error") as told:
        cpp.build("int f() { return x; }")
    assert "\n" not in str(told.value)


def test_without_the_kernel_there_is_no_cell_either(monkeypatch):
    """Guards against a notebook that dies where there is no compiler instead of saying so."""
    monkeypatch.setattr(kernel_library, "problem", lambda: "no compiler here")
    with pytest.raises(KernelUnavailable, match="no compiler here"):
        cpp.build("")


def test_operators_are_counted_by_name_and_views_are_not():
    """Guards against counting views, which launch nothing, and against losing operators of the same name."""
    x = torch.ones(2, 3)
    counted = counting.operators(lambda: (x + 1) * (x + 2).view(3, 2).t())
    assert counted == {"add": 2, "mul": 1} and counting.count_operators(lambda: x + 1) == 1


def test_a_layer_has_as_many_phases_as_the_notebook_says():
    """Guards against a count of barriers in notebook 09 that a change of the kernel makes wrong."""
    source = (LIB / "kernel.cpp").read_text(encoding="utf-8")
    body = source[source.index("    phase(n, [&](int64_t r) {\n        const float* embedding") :]
    loop, rest = body.split("    for (int64_t l = 0;", 1)
    inside, end = rest.split("    norm(m.norm", 1)

    def phases(text: str) -> int:
        return len(re.findall(r"^ {4}(?: {4})?(?:phase|norm|integers|product)\(", text, re.MULTILINE))

    joined = 2  # a conditioned draft alone has these
    assert (phases(inside), phases(loop) - joined + phases("    norm(" + end)) == (13, 4)
