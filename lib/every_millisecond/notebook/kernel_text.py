"""The text of our Triton kernels, paragraph by paragraph, readable where Triton is not installed."""

from __future__ import annotations

import ast
from pathlib import Path

import llm_latency


def kernel_paragraphs(module: str, function: str) -> list[str]:
    """The source of a function of `llm_latency.attention`, cut at its blank lines.

    module: file name without ".py", such as "triton_prefill". The file is read, not imported. Raises ValueError if
    there is no such module or function.
    """
    path = Path(llm_latency.__file__).parent / "attention" / f"{module}.py"
    if not path.is_file():
        raise ValueError(f"no module {module!r} in llm_latency.attention")
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_source_segment(text, node) or "").split("\n\n")
    raise ValueError(f"no function {function!r} in llm_latency.attention.{module}")
