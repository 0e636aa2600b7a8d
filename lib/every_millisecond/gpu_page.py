"""The one page that sums up a run of `make gpu`."""

from __future__ import annotations

from html import escape

NAME = "summary.html"
STYLE = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{text-align:left;padding:.2em .8em .2em 0}"


def page(report: dict) -> str:
    """HTML of a report as `gpu_check` writes it, whole or not: what ran, what failed and why, figures, notebooks."""
    machine = report["machine"]
    title = f"{machine['gpu']}, {report['date']}"
    facts = f"torch {machine['torch']}, CUDA {machine['cuda']}, transformers {machine['transformers']}"
    parts = report["parts"].items()
    ran = [(name, part["status"], f"{part['seconds']:.0f} s", part["said"]) for name, part in parts]
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(facts)}; profile {escape(report['profile'])}</p>",
        _list("The card", report["card"]),
        _table("What ran", ("part", "outcome", "time", ""), ran),
        _list("Kernels beside SDPA and flash-attn", report["verdicts"]),
    ]
    if "tests" in report:
        tests = report["tests"]
        counts = f"{tests['tests'] - tests['skipped']} CUDA tests ran, {tests['skipped']} were skipped"
        body.append(_list(f"Tests: {counts}", [f"failed: {name}" for name in tests["failed"]]))
    if "ceilings" in report:
        ceilings = report["ceilings"]
        rows = [("read, copy (GB/s)", f"{ceilings['read_gbps']:.0f}, {ceilings['copy_gbps']:.0f}")]
        rows += [
            (f"matrix times vector, {name} (GB/s)", f"{value:.0f}") for name, value in ceilings["gemv_gbps"].items()
        ]
        rows += [(f"matrices, {name} (GFLOP/s)", f"{value:.0f}") for name, value in ceilings["matmul_gflops"].items()]
        body.append(_table("Measured ceilings", ("what", "rate"), rows))
    links = [
        f'<li><a href="{escape(book["page"])}">{escape(book["page"])}</a> on {escape(book["profile"])}: '
        f"{book['cells'] - book['cells_left']} of {book['cells']} cells, {len(book['errors'])} raised</li>"
        for _, book in sorted(report["notebooks"].items())
    ]
    body.append(f"<h2>Notebooks</h2><ul>{''.join(links)}</ul>" if links else "")
    return f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>{"".join(body)}\n'


def _list(title: str, lines: list[str]) -> str:
    return f"<h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{lines}</table>"
