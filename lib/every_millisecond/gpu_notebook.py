"""Executes a notebook within a time budget and writes it as an HTML page; errors stay in the page and the rest runs."""

from __future__ import annotations

import math
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from llm_latency import files


@dataclass(slots=True)
class Played:
    """errors: "[cell] Kind: message" of each cell that raised. cells_left: code cells that the time did not reach."""

    cells: int = 0
    cells_left: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


def execute(source: Path, page: Path, profile: str, *, seconds: float) -> Played:
    """Execute `source` on a profile in its own folder and write `page`. The notebook and the reader's scorecard stay.

    Raises RuntimeError for a kernel that does not start or dies.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from nbconvert import HTMLExporter

    notebook = nbformat.read(source, as_version=4)
    code = [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    found, start = Played(cells=len(code), cells_left=len(code)), time.monotonic()
    resources = {"metadata": {"path": str(source.parent)}}
    client = NotebookClient(notebook, kernel_name="python3", resources=resources, allow_errors=True)
    for _, cell in code:
        cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as scratch:
        own = {f"LLM_LATENCY_{name.upper()}": f"{scratch}/{name}.json" for name in ("scorecard", "progress")}
        environment = os.environ | own | {"LLM_LATENCY_PROFILE": profile}
        try:
            with client.setup_kernel(env=environment):
                for index, cell in code:
                    left = seconds - (time.monotonic() - start)
                    if left <= 0:
                        break
                    client.timeout = math.ceil(left)
                    client.execute_cell(cell, index)
                    found.cells_left -= 1
        except CellTimeoutError:
            pass  # what stands in the page is what was reached
        except DeadKernelError as error:
            raise RuntimeError(f"the kernel of {source.name} died in cell {index}") from error
    for index, cell in code:
        raised = [output for output in cell.outputs if output.output_type == "error"]
        found.errors += [f"[{index}] {output.ename}: {output.evalue[:200]}" for output in raised]
    found.seconds = round(time.monotonic() - start, 1)
    files.write_atomically(page, HTMLExporter().from_notebook_node(notebook)[0])
    return found
