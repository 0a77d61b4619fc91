"""One owner for each piece of state: what the import contracts in pyproject.toml can't see."""

import ast
from collections.abc import Iterator
from pathlib import Path

import everwarm
from everwarm.kv.index.tree import Node

ROOT = Path(everwarm.__file__).parent
NODE = set(Node.__dataclass_fields__)
INSIDE = {"pool", "tree", "writer", "shared", "histories"}
"""Parts of a store that nobody outside `kv` may touch."""


def trees(*, kv: bool) -> Iterator[tuple[Path, ast.Module]]:
    for path in ROOT.rglob("*.py"):
        if path.is_relative_to(ROOT / "kv") == kv:
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned to."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            found = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            found = [node.target]
        while found:
            target = found.pop()
            if isinstance(target, ast.Tuple):
                found += target.elts
            elif isinstance(target, ast.Attribute):
                yield target


def owner(attribute: ast.Attribute) -> str:
    return attribute.value.id if isinstance(attribute.value, ast.Name) else ast.unparse(attribute.value)


def test_only_the_index_changes_a_node() -> None:
    seen = {
        str(path)
        for path, tree in trees(kv=True)
        for target in targets(tree)
        if target.attr in NODE and owner(target) not in ("self", "agent", "entry", "receipt")
    }
    assert seen <= {"kv/index/index.py", "kv/index/tree.py"}


def test_nothing_is_assigned_into_another_object_from_outside() -> None:
    """Values that are handed around to be filled in (receipts, agents by their registry) are named here."""
    filled = {"receipt", "self.receipt", "agent", "known", "entry", "report", "self._report"}
    seen = {
        (str(path), ast.unparse(target))
        for path, tree in trees(kv=True)
        for target in targets(tree)
        if owner(target) not in {"self", *filled} and not str(path).startswith("kv/index/")
    }
    assert seen == set()


def test_agents_are_changed_by_their_registry_alone() -> None:
    seen = {str(path) for path, tree in trees(kv=True) for target in targets(tree) if owner(target) == "agent"}
    assert seen == {"kv/agents.py"}


def test_nobody_outside_looks_into_a_store() -> None:
    seen = {
        (str(path), ast.unparse(node))
        for path, tree in trees(kv=False)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in INSIDE
        and ast.unparse(node.value).split(".")[-1] in ("store", "agents", "_store", "_agents", "index", "_index")
    }
    assert seen == set()
