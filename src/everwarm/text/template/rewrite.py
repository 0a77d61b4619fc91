"""Puts into a parsed template what Jinja has no hook for: the meter in loops and literals, the marks on control tokens.

In: a syntax tree. Out: the same tree, changed in place. Every loop turn calls `turn`, every list, tuple or dict that
is written down and every `~` goes through a call, and each control token in the literal text of the template is
marked as the template's own.

Literals that are only compared with or searched for stay unmarked: `'<|eot|>' in message.content` asks about the
message.
"""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

_SEARCHES = frozenset(
    "count endswith find index lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split "
    "startswith strip trim".split()
)


class Rewriter(NodeTransformer):
    """One use per template: afterwards `literals` holds all the text the template can write by itself."""

    def __init__(self, environment: Environment, mark: Callable[[str], str]) -> None:
        """`mark` puts marks around the control tokens in a text."""
        self._environment = environment
        self._mark = mark
        self._comparing = False
        self.literals: set[str] = set()

    def _call(self, name: str, args: list[nodes.Expr], like: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
        return call.set_lineno(like.lineno, override=True).set_environment(self._environment)  # type: ignore[return-value]

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802 - names are Jinja's
        """Literal text outside of tags."""
        self.literals.add(node.data)
        node.data = self._mark(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        """Literal text inside of tags."""
        if isinstance(node.value, str) and not self._comparing:
            self.literals.add(node.value)
            node.value = self._mark(node.value)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        """A key of a dict is looked up, its value may be written."""
        node.value = self.visit(node.value)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Compare texts without marks."""
        outer, self._comparing = self._comparing, True
        self.generic_visit(node)
        self._comparing = outer
        for side in (node, *node.ops):
            if not isinstance(side.expr, nodes.Const):
                side.expr = self._call("unmarked", [side.expr], node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Keys are looked up in the input."""
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = self.visit(node.arg)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        """What a method searches for stays as it is written."""
        if isinstance(node.node, nodes.Getattr) and node.node.attr in _SEARCHES:
            return self._visit_search(node)
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        """The same for filters."""
        return self._visit_search(node) if node.name in _SEARCHES else self.generic_visit(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        """A test compares."""
        return self._visit_search(node)

    def _visit_search(self, node: Any) -> nodes.Node:
        wanted = node.args[0] if node.args else None
        written = wanted.value if isinstance(wanted, nodes.Const) else None
        self.generic_visit(node)
        if written is not None:
            node.args[0].value = written
        return node  # type: ignore[no-any-return]

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Count the turns, those too that the loop's own condition skips."""
        written = sum(len(data.data) for part in node.body for data in _within(part, nodes.TemplateData))
        self.generic_visit(node)
        if node.test is not None:
            test = nodes.And(self._call("turn", [nodes.Const(0)], node), node.test, lineno=node.lineno)
            node.test = test.set_environment(self._environment)
        node.body.insert(0, nodes.ExprStmt(self._call("turn", [nodes.Const(written)], node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """The `~` operator."""
        self.generic_visit(node)
        return self._call("joined", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        """A container that may hold other containers more than once."""
        self.generic_visit(node)
        return self._call("made", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        """The same."""
        self.generic_visit(node)
        return self._call("made", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """The same, unless it is the target of an assignment."""
        self.generic_visit(node)
        return self._call("made", [node], node) if node.ctx == "load" else node


def _within(node: nodes.Node, kind: type[nodes.TemplateData]) -> list[nodes.TemplateData]:
    return [node] if isinstance(node, kind) else list(node.find_all(kind))
