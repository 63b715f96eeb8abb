"""Takes down what one rewrite does to the graph: the nodes before and after, and the diff of their text.

A model repeats its layers, so rewrites that look alike (same source lines, shapes and contract) share one drawing,
that of the first; the cost of drawing does not grow with the number of layers.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from torch.fx import Graph, Node

from ltx_inductor.rewrite import dump
from ltx_inductor.rewrite.drawn import Drawing, DrawnNode

log = logging.getLogger("ltx_inductor")
_MOST = 200  # nodes of one drawing: more could not be read
_LONGEST = 400  # characters of one call: a reader may be the graph's output, with every result in it


class Drawings:
    """The drawings of one rule on one graph, numbered from `first`.

    order: program order of the graph's nodes; the pass adds those that it writes.

    A drawing that fails is left out and logged: it must not cost a rewrite.
    """

    def __init__(self, graph: Graph, order: Mapping[Node, float], first: int = 0) -> None:
        self.done: list[Drawing] = []
        self._first = first
        self._original = set(graph.nodes)
        self._order = order
        self._known: dict[Hashable, int] = {}

    def before(self, key: Hashable, inputs: Iterable[Node], results: Iterable[Node]) -> tuple[DrawnNode, ...] | None:
        """To be called before the rewrite; None if one that looks alike has been drawn.

        inputs, results: the values between which the region lies.
        """
        if key in self._known:
            return None
        return self._safely(lambda: self._before(set(inputs), list(results)))

    def after(self, key: Hashable, before: tuple[DrawnNode, ...] | None, op: Node) -> int | None:
        """To be called when `op` is in place; the number of the drawing, None if there is none."""
        drawing = self._safely(lambda: self._finish(before, op)) if before else None
        if drawing is not None:
            self._known[key] = self._first + len(self.done)
            self.done.append(drawing)
        return self._known.get(key)

    def _safely(self, draw: Callable[[], Any]) -> Any:
        try:
            return draw()
        except Exception:
            log.warning("a rewrite could not be drawn for the report", exc_info=True)
            return None

    def _before(self, inputs: set[Node], results: list[Node]) -> tuple[DrawnNode, ...]:
        region, outside = self._walk(results, lambda n: n not in inputs and n in self._original)
        roles = dict.fromkeys(outside, "input") | dict.fromkeys(_readers(results), "reader")
        return self._drawn(roles | dict.fromkeys(region, "region"))

    def _finish(self, before: tuple[DrawnNode, ...], op: Node) -> Drawing:
        new, todo = [op], [op]
        while todo:  # the results: what was written behind the op, up to the readers of before
            for u in todo.pop().users:
                if u not in self._original and u not in new:
                    new.append(u)
                    todo.append(u)
        written, outside = self._walk(new, lambda n: n not in self._original)
        roles = dict.fromkeys(outside, "input") | dict.fromkeys(_readers(new), "reader")
        after = self._drawn(roles | dict.fromkeys(written, "new") | {op: "op"})
        return Drawing(before, after, _diff(before, after))

    @staticmethod
    def _walk(start: Iterable[Node], inside: Callable[[Node], bool]) -> tuple[list[Node], list[Node]]:
        """(start and what it is computed from while `inside`, the values on the edge)."""
        found, edge, todo = dict.fromkeys(start), dict[Node, None](), list(start)
        while todo and len(found) < _MOST:
            for a in todo.pop().all_input_nodes:
                if a in found or a in edge:
                    continue
                if a.op == "call_function" and inside(a):
                    found[a] = None
                    todo.append(a)
                else:
                    edge[a] = None
        return list(found), list(edge)

    def _drawn(self, roles: Mapping[Node, str]) -> tuple[DrawnNode, ...]:
        nodes = sorted(roles, key=lambda n: self._order.get(n, -1.0))
        names = {n.name for n in nodes}
        found = []
        for n in nodes:
            inputs = () if roles[n] == "input" else tuple(dict.fromkeys(a.name for a in n.all_input_nodes))
            found.append(
                DrawnNode(
                    n.name,
                    roles[n],
                    dump.op_name(n),
                    dump.call_text(n)[:_LONGEST],
                    dump.type_text(n.meta.get("val")),
                    tuple(a for a in inputs if a in names),
                    dump.source_comment(n),
                )
            )
        return tuple(found)


def _readers(results: Iterable[Node]) -> list[Node]:
    inside = set(results)
    return list(dict.fromkeys(u for n in inside for u in n.users if u not in inside))


def _diff(before: Iterable[DrawnNode], after: Iterable[DrawnNode]) -> str:
    def text(nodes: Iterable[DrawnNode]) -> list[str]:
        return [f'{n.name}: "{n.type}" = {n.call}\n' for n in nodes if n.role != "input"]

    return "".join(list(difflib.unified_diff(text(before), text(after), n=400))[3:])
