"""Which sides become one launch, and which is the query and which the key.

Two sides pair if they reach the same attention op as its query and its key, or, where no attention is in sight, if they
share both tables and are next to each other. Either way a point of the graph must exist where both inputs are there and
neither result has been used yet: without that test four layers that share one cos/sin would pair layer 1's query with
layer 2's key and build a cycle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from ltx_inductor.rewrite.axes import Plan, SidePlan
from ltx_inductor.rewrite.layout import LAYOUT, aten
from ltx_inductor.rewrite.legality import storage_root
from ltx_inductor.rewrite.lift import CAST, PRODUCT
from ltx_inductor.rewrite.view import GraphView

_ATTENTION = re.compile(r"attention|attn|sdpa|fmha", re.IGNORECASE)
_MATMUL = {aten.bmm.default, aten.mm.default, aten.matmul.default, aten.baddbmm.default}
_REACH = 48  # nodes looked at between a result and the attention that reads it


@dataclass(frozen=True)
class Launch:
    """One op to write: one side, or the query and the key of a pair. roles: "q"/"k"/None by side."""

    sides: tuple[SidePlan, ...]
    roles: tuple[str | None, ...]

    @property
    def shares_tables(self) -> bool:
        a, b = self.sides
        return (a.cos, a.sin) == (b.cos, b.sin)


def pair_sides(view: GraphView, sides: list[SidePlan]) -> list[Launch]:
    """Every side exactly once, in program order of the results."""
    readers = {id(s): dict(_attention_readers(view, s.side.result)) for s in sides}
    sites_at: dict[Node, list[SidePlan]] = {}
    for s in sides:
        for attention in readers[id(s)]:
            sites_at.setdefault(attention, []).append(s)
    role: dict[int, str] = {}
    for s in sides:
        for attention, index in readers[id(s)].items():
            known = attention.target not in _MATMUL or len(sites_at[attention]) == 2
            if known and index in (0, 1):
                role.setdefault(id(s), "qk"[index])
    launches: list[Launch] = []
    free = list(sides)
    while free:
        a = free.pop(0)
        b = next((b for b in free if _may_pair(view, a, b, readers, role)), None)
        if b is None:
            launches.append(Launch((a,), (role.get(id(a)),)))
            continue
        free.remove(b)
        if role.get(id(a)) == "k" or role.get(id(b)) == "q":
            a, b = b, a
        launches.append(Launch((a, b), (role.get(id(a)), role.get(id(b)))))
    return sorted(launches, key=lambda launch: min(view.order[s.side.result] for s in launch.sides))


def _may_pair(
    view: GraphView,
    a: SidePlan,
    b: SidePlan,
    readers: dict[int, dict[Node, int]],
    role: dict[int, str],
) -> bool:
    if not _same_kind(a, b):
        return False
    ra, rb = readers[id(a)], readers[id(b)]
    common = ra.keys() & rb.keys()
    if ra and rb and not common:
        return False  # they serve different attentions
    if common:
        if all(ra[n] == rb[n] for n in common):
            return False  # both are the query, or both the key
    elif (a.cos, a.sin) != (b.cos, b.sin) or role.get(id(a), "?") == role.get(id(b), "!"):
        return False
    return can_meet(view, a, b)


def _same_kind(a: SidePlan, b: SidePlan) -> bool:
    """What one launch has only one of."""
    va, vb = a.side.x.node.meta["val"], b.side.x.node.meta["val"]
    ta, tb = a.cos.node.meta["val"], b.cos.node.meta["val"]
    return (
        a.side.contract == b.side.contract
        and (a.layout, a.per_head) == (b.layout, b.per_head)
        and a.side.pair_size == b.side.pair_size
        and (va.dtype, va.device, ta.dtype) == (vb.dtype, vb.device, tb.dtype)
    )


def can_meet(view: GraphView, a: SidePlan, b: SidePlan) -> bool:
    """Is there a point in program order after all inputs of both and before the first reader of either result?

    The first of the two moves down to it: no input may be written to on that way.
    """
    inputs = [*input_nodes(a), *input_nodes(b)]
    results = (a.side.result, b.side.result)
    if any(n in results for n in inputs):
        return False
    latest = max(view.order[n] for n in inputs)
    readers = [view.order[u] for r in results for u in r.users if u in view.live]
    roots, start = {storage_root(n) for n in inputs}, min(view.order[r] for r in results)
    written = any(start < view.order[n] <= latest and storage_root(w) in roots for n, w in view.writes)
    return latest < min(readers, default=latest + 1) and not written


def input_nodes(planned: SidePlan) -> Iterator[Node]:
    def of(p: Plan | None) -> Iterator[Node]:
        if p is not None:
            yield p.node

    yield from of(planned.x)
    yield from of(planned.weight)
    yield from of(planned.cos)
    yield from of(planned.sin)


def _attention_readers(view: GraphView, result: Node) -> Iterator[tuple[Node, int]]:
    """(attention op, position of its argument that comes from result), through layout, casts and a scale."""
    todo, seen = [result], {result}
    while todo and len(seen) < _REACH:
        n = todo.pop(0)
        for u in n.users:
            if u not in view.live:
                continue
            if u.target in _MATMUL or (u.op == "call_function" and _ATTENTION.search(str(u.target))):
                index = next((i for i, a in enumerate(u.args) if a is n), None)
                if index is not None:
                    yield u, index
            elif u not in seen and (u.target in LAYOUT or u.target in CAST or u.target in PRODUCT):
                seen.add(u)
                todo.append(u)
