"""Puts into a parsed template what Jinja has no hook for: the meter in loops and literals, the marks on control tokens.

In: a syntax tree. Out: the same tree, changed in place. Every turn of a loop passes the filter `turn`, every list,
tuple or dict that is written down `made`, every slice `sliced`, every `~` is `joined`, and each control token in the
template's own text is marked as such.

Literals that are only compared with or searched for stay unmarked: `'<|eot|>' in message.content` asks about the
message.
"""

import re
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

_SEARCH = re.compile(
    "count|endswith|r?find|r?index|r?partition|removeprefix|removesuffix|replace|r?split|startswith|[lr]?strip|trim"
)


class Rewriter(NodeTransformer):
    """One use per template: afterwards `literals` holds all the text that the template can write by itself."""

    def __init__(self, environment: Environment, mark: Callable[[str], str]) -> None:
        """`mark` puts marks around the control tokens in a text."""
        self._environment = environment
        self._mark = mark
        self._comparing = False
        self.literals: set[str] = set()

    def _pass(self, value: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Expr:
        """`value | name(args)`. A filter, not a call: it compiles to a plain function call, and loops are many."""
        made = nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
        made.set_environment(self._environment)
        return made

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802 - Jinja's names
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

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Texts are compared without marks."""
        about_tokens = any(self._is_token(child) for child in node.find_all((nodes.Const, nodes.Name)))
        outer, self._comparing = self._comparing, True
        self.generic_visit(node)
        self._comparing = outer
        if about_tokens:
            node.expr = self._pass(node.expr, "unmarked")
            for operand in node.ops:
                operand.expr = self._pass(operand.expr, "unmarked")
        return node

    def _is_token(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Const):
            return isinstance(node.value, str) and self._mark(node.value) != node.value
        return isinstance(node, nodes.Name) and node.name in ("bos_token", "eos_token")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Keys are looked up in the input."""
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = self.visit(node.arg)
        return self._pass(node, "sliced") if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        """Of a dict, the values may be written; the keys are looked up."""
        node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        """What a method searches for stays as it is written."""
        searches = isinstance(node.node, nodes.Getattr) and _SEARCH.fullmatch(node.node.attr)
        return self._visit_search(node) if searches else self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        """What a filter searches for, too."""
        return self._visit_search(node) if _SEARCH.fullmatch(node.name) else self.generic_visit(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        """A test is a comparison."""
        return self._visit_search(node)

    def _visit_search(self, node: Any) -> nodes.Node:
        written = node.args[0].value if node.args and isinstance(node.args[0], nodes.Const) else None
        changed = self.generic_visit(node)
        if written is not None:
            node.args[0].value = written
        return changed

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Count the turns, those too that the loop's own condition skips, and the text that each of them writes."""
        written = sum(len(data.data) for data in nodes.Scope(node.body).find_all(nodes.TemplateData))
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(self._pass(nodes.Const(0, lineno=node.lineno), "turn"), node.test, lineno=node.lineno)
            node.test.set_environment(self._environment)
        turn = self._pass(nodes.Const(written, lineno=node.lineno), "turn")
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """The `~` operator."""
        self.generic_visit(node)
        return self._pass(node.nodes[0], "joined", *node.nodes[1:])

    def _visit_container(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._pass(node, "made")

    visit_List = visit_Dict = _visit_container  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """A container, unless it is the target of an assignment."""
        return self._visit_container(node) if node.ctx == "load" else self.generic_visit(node)
