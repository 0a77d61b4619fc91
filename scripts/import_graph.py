"""Draw who imports whom, by package, into docs/architecture.md; and count the names that each package offers.

    python scripts/import_graph.py [--check]

Imports under TYPE_CHECKING count as well. A cycle, between packages or between modules, is an error. A name counts as
offered if it is public (no underscore, defined at the top of a module) and another package uses it.
"""

import argparse
import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import everwarm

ROOT = Path(everwarm.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- imports: begin (python scripts/import_graph.py) -->", "<!-- imports: end -->"
LEAVES = ("everwarm.errors", "everwarm.types")
"""Everybody uses them: they are left out of the drawing."""

KV_DATA = {"believable", "chain", "container", "counts", "eviction", "ids", "last_turn", "layout", "manifest"}
KV_DATA |= {"receipt", "stats"}
"""Modules of `kv` that are plain data; its other modules are agents and turns."""

Uses = dict[str, dict[str, set[str]]]
"""Module -> module that it imports -> names that it takes from it."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(known: dict[str, Path]) -> Uses:
    uses: Uses = {module: defaultdict(set) for module in known}
    for module, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in known:
                        uses[module][alias.name].add("*")
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    if inner in known:
                        uses[module][inner].add("*")
                    elif node.module in known and not alias.name.startswith("_native"):
                        uses[module][node.module].add(alias.name)
        uses[module].pop(module, None)
    return uses


def package(module: str) -> str:
    """`kv` has layers of its own, which are shown one by one."""
    parts = module.split(".")
    if parts[:2] == ["everwarm", "kv"] and len(parts) > 2:
        if len(parts) > 3 or (ROOT / "kv" / parts[2]).is_dir():
            return ".".join(parts[:3])
        return "everwarm.kv.data" if parts[2] in KV_DATA else "everwarm.kv.agents"
    return ".".join(parts[:2])


def ordered(graph: dict[str, set[str]], what: str) -> list[str]:
    """From the top to the bottom. Ends the program if there is a cycle."""
    try:
        return list(TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)}).static_order())[::-1]
    except CycleError as error:
        sys.exit(f"a cycle of {what}: {' -> '.join(error.args[1])}")


def public(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def draw() -> str:
    known = modules()
    uses = imports(known)
    ordered({module: set(targets) for module, targets in uses.items()}, "modules")
    graph: dict[str, set[str]] = defaultdict(set)
    offered: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for module, targets in uses.items():
        graph[package(module)] |= set()
        for target, names in targets.items():
            if package(target) != package(module):
                graph[package(module)].add(package(target))
                taken = public(known[target]) if "*" in names else set(names)
                if known[target].name != "__init__.py":  # a facade offers what it imports, too
                    taken &= public(known[target])
                offered[package(target)] |= {(target, name) for name in taken if not name.startswith("_")}
    order = ordered(graph, "packages")
    lines = ["```mermaid", "graph TD"]
    for name in order:
        below = [other for other in order if other in graph[name] and other not in LEAVES]
        shown = [other for other in below if not any(_leads(graph, mid, other) for mid in below if mid != other)]
        lines += [f"    {_short(name)} --> {_short(other)}" for other in shown]
    lines += [
        "```",
        "",
        "| package | modules | public names | of these used by other packages |",
        "| --- | --- | --- | --- |",
    ]
    for name in order:
        if name != "everwarm":
            inside = [module for module in known if package(module) == name]
            count = sum(len(public(known[module])) for module in inside)
            lines.append(f"| `{_short(name)}` | {len(inside)} | {count} | {len(offered[name])} |")
    return "\n".join(lines)


def _leads(graph: dict[str, set[str]], start: str, end: str) -> bool:
    """Whether there is a path: an arrow that is implied by others is not drawn."""
    seen, left = set[str](), [start]
    while left:
        at = left.pop()
        if at == end:
            return True
        if at not in seen:
            seen.add(at)
            left += graph[at]
    return False


def _short(name: str) -> str:
    return name.removeprefix("everwarm.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    asked = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = f"{before}{BEGIN}\n\n{draw()}\n\n{END}{after}"
    if asked.check:
        sys.exit(None if drawn == page else f"{PAGE.name} is out of date: python scripts/import_graph.py")
    PAGE.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
