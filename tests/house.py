"""Who imports whom in lib/, read from the source: imports inside functions and behind TYPE_CHECKING count, too.

`upward` and `circles` are the rules that tests/test_house.py holds; `closure` is what an import loads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LIB = Path(__file__).resolve().parents[1] / "lib"
TAKE_HOME, COURSE = "llm_latency", "every_millisecond"

# The floors of llm_latency from the ground up. A room imports only from floors strictly below its own.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("arguments", "files", "host", "compat", "_moved"),
    ("timing", "hardware", "sampling"),
    ("attention", "quantization", "generation", "text", "models", "roofline"),
    ("kv_cache",),
    ("engine",),
    ("speculative", "batching", "quality", "benchmark"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one of our modules. loads: it runs when the importing file is loaded, so no function holds it."""

    importer: str
    imported: str
    line: int
    loads: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules(lib: Path = LIB) -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    found = {}
    for package in (TAKE_HOME, COURSE):
        for path in sorted((lib / package).rglob("*.py")):
            parts = path.relative_to(lib).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(lib: Path = LIB) -> list[Import]:
    """Every import of one of our modules by another, in order of file and line."""
    known = modules(lib)
    found = []
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node, loads in _nodes(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            targets = {target for wanted in _wanted(node, package) for target in _ours(wanted, known)} - {name}
            found += [Import(name, target, node.lineno, loads) for target in sorted(targets)]
    return found


def _nodes(tree: ast.AST, loads: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `tree`, and whether it runs as the file is loaded."""
    for child in ast.iter_child_nodes(tree):
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        deferred = deferred or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
        yield child, loads
        yield from _nodes(child, loads and not deferred)


def _wanted(node: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that a statement asks for."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("import_module", "__import__"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _ours(wanted: str, known: dict[str, Path]) -> Iterable[str]:
    """The module of ours that a dotted name is, if it is one."""
    return [wanted] if wanted in known else []


def room(module: str) -> str:
    """The room of a module of llm_latency: "timing" of "llm_latency.timing.measure"; "" of the package itself."""
    return module.split(".")[1] if "." in module else ""


def upward(found: Iterable[Import]) -> list[str]:
    """What breaks the floors: one line for each import, and for each room that stands on no floor."""
    wrong = []
    for entry in found:
        if not entry.importer.startswith(f"{TAKE_HOME}.") and entry.importer != TAKE_HOME:
            continue
        if entry.imported.split(".")[0] == COURSE:
            wrong.append(f"{entry}: the take-home package knows nothing of the course")
            continue
        here, there = room(entry.importer), room(entry.imported)
        if not here or not there or here == there:
            continue
        unknown = [name for name in (here, there) if name not in FLOOR_OF]
        if unknown:
            wrong.append(f"{entry}: {unknown[0]!r} stands on no floor; give it one in tests/house.py")
        elif FLOOR_OF[there] >= FLOOR_OF[here]:
            wrong.append(f"{entry}: floor {FLOOR_OF[there]} is not below floor {FLOOR_OF[here]}")
    return wrong


def circles(found: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that import one another, directly or by way of others (Tarjan's algorithm)."""
    graph: dict[str, set[str]] = {}
    for entry in found:
        graph.setdefault(entry.importer, set()).add(entry.imported)
        graph.setdefault(entry.imported, set())
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return groups


def closure(start: str, lib: Path = LIB, package: str = TAKE_HOME) -> list[str]:
    """The modules of `package` that importing `start` loads: itself, what it imports, and the packages around each."""
    known = modules(lib)
    if start not in known:
        raise ValueError(f"no module {start!r} in {lib}")
    found = [entry for entry in imports(lib) if entry.loads]
    loaded: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in loaded or name not in known:
            continue
        loaded.add(name)
        waiting.append(name.rpartition(".")[0])
        waiting += [entry.imported for entry in found if entry.importer == name]
    return sorted(name for name in loaded if name.split(".")[0] == package)
