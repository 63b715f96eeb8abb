"""Around a statistic: what is computed from it, what equals what, and who else reads it."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from ltx_inductor.rewrite.layout import CUT, FLIP, JOIN, aten
from ltx_inductor.rewrite.lift import ARITHMETIC, SUM, UNDERSTOOD

MAX_REGION = 160  # nodes computed from one statistic; a RoPE chain has about 20, and a search must stay linear


def value_numbers(graph: Graph, origins: Mapping[Node, Node]) -> Callable[[Node], Node]:
    """same(n): the first node that computes the same pure function of the same values.

    Inference graphs are not CSEd: the unsqueeze, neg or float of a table appears once per use.
    What is computed before a write to anything is not what is computed after it. origins: see there_and_back.py.
    """
    first: dict[Any, Node] = {}
    representative: dict[Node, Node] = {}

    def key(a: Any) -> Any:
        if isinstance(a, Node):
            return representative.get(a, a)
        if isinstance(a, (list, tuple)):
            return tuple(key(x) for x in a)
        return type(a), a.hex() if isinstance(a, float) else a  # 0.0 == -0.0

    for n in graph.nodes:
        representative[n] = n
        if n in origins:
            representative[n] = representative[origins[n]]
        elif isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            first.clear()
        elif n.op == "call_function" and is_pure(n):
            try:
                keywords = tuple(sorted((k, key(v)) for k, v in n.kwargs.items())) if n.kwargs else ()
                representative[n] = first.setdefault((n.target, key(n.args), keywords), n)
            except TypeError:  # an argument that cannot be hashed: the node stands for itself
                pass
    return lambda n: representative.get(n, n)


def is_pure(n: Node) -> bool:
    """An ATen-style op without side effects, mutation or randomness."""
    return isinstance(n.target, torch._ops.OpOverload) and _is_pure_op(n.target)


@functools.cache
def _is_pure_op(op: torch._ops.OpOverload) -> bool:
    return not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def derived_from(rstd: Node, other_rstds: set[Node], order: Mapping[Node, float]) -> tuple[set[Node], bool]:
    """Everything computed from rstd through ops we understand, up to the next norm or the residual stream.

    Walked in graph order: by the time a sum is looked at, it is known whether both addends belong. A rotation only ever
    adds products of one x, so a sum with a foreign addend (x + attention(norm(x))) ends the walk; without that every
    region would be the rest of the network.

    Returns the region and whether it is whole: the walk ends at MAX_REGION nodes.
    """
    seen, queued = {rstd}, set()
    todo: list[tuple[float, Node]] = []

    def push(n: Node) -> None:
        for u in n.users:
            if u not in queued and u.op == "call_function" and u.target in UNDERSTOOD:
                queued.add(u)
                heapq.heappush(todo, (order[u], u))

    push(rstd)
    while todo:
        n = heapq.heappop(todo)[1]
        if any(a in other_rstds and a is not rstd for a in n.all_input_nodes):
            continue
        if n.target in SUM and any(_foreign(a, seen) for a in _addends(n)):
            continue
        seen.add(n)
        if len(seen) > MAX_REGION:
            return seen - {rstd}, False
        push(n)
    return seen - {rstd}, True


def _addends(n: Node) -> list[Node]:
    args = n.args[:1] if n.target is aten.addcmul.default else n.args[:2]
    return [a for a in args if isinstance(a, Node)]


def _foreign(a: Node, seen: set[Node]) -> bool:
    return a not in seen and a.op != "get_attr" and isinstance(a.meta.get("val"), torch.Tensor)


def looks_like_rotation(n: Node, region: Iterable[Node]) -> bool:
    """Is n put together from cut pieces of the region, with a product by an outside table on the way?"""
    inside = set(region)
    seen, todo = {n}, [n]
    cut = table = False
    join = n.target in JOIN or n.target in FLIP
    while todo:
        m = todo.pop()
        for a in m.all_input_nodes:
            table |= a not in inside and m.target in ARITHMETIC
            if a in inside and a not in seen:
                seen.add(a)
                todo.append(a)
                cut |= a.target in CUT or a.target in FLIP
                join |= a.target in JOIN or a.target in FLIP
    return cut and join and table


def computed_inside(n: Node, region: set[Node]) -> set[Node]:
    """n and the nodes of the region that it is computed from."""
    seen, todo = {n}, [n]
    while todo:
        for a in todo.pop().all_input_nodes:
            if a in region and a not in seen:
                seen.add(a)
                todo.append(a)
    return seen


def reached_inside(n: Node, region: set[Node]) -> set[Node]:
    """The nodes of the region that are computed from n."""
    seen: set[Node] = set()
    todo = [n]
    while todo:
        for u in todo.pop().users:
            if u in region and u not in seen:
                seen.add(u)
                todo.append(u)
    return seen


def live_nodes(graph: Graph) -> set[Node]:
    """Nodes that an output or a side effect depends on. (Joint graphs are full of dead slices.)"""
    todo = [n for n in graph.nodes if n.op == "output" or (n.op == "call_function" and _has_effects(n))]
    live = set(todo)
    while todo:
        for a in todo.pop().all_input_nodes:
            if a not in live:
                live.add(a)
                todo.append(a)
    return live


def _has_effects(n: Node) -> bool:
    return isinstance(n.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)) and not is_pure(n)
