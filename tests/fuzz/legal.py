"""Edits of a captured graph that leave what it computes alone, bit for bit, and so must leave the rewrite alone too."""

from __future__ import annotations

import operator
import random

from torch import fx
from torch._prims_common import is_contiguous_or_false

from ltx_inductor.rewrite.lift import in_addcmul
from ltx_inductor.rewrite.norm import is_fused

from ..harness import output_node
from .mutations import NotHere, Rng, aten, calls, insert_after, pick, tensors

Node = fx.Node
VIEWS = (aten.view.default, aten.permute.default, aten.unsqueeze.default, aten.slice.Tensor, aten.select.int)


def duplicate(rng: Rng, g: fx.Graph) -> None:
    """A user of a node gets a copy of its own: nothing merges equal nodes in an inference graph."""
    n = pick(rng, [n for n in calls(g) if len(n.users) > 1 and n.target is not operator.getitem and not writes(n)])
    with g.inserting_after(n):
        twin = g.node_copy(n)
    user = rng.choice([u for u in n.users if u.op != "output"] or [None])
    if user is None:
        g.erase_node(twin)
        raise NotHere
    user.replace_input_with(n, twin)


def view_chain(rng: Rng, g: fx.Graph) -> None:
    """There and back again between a node and its users: a permutation, a new axis, other sizes, a full slice.

    Not inside a norm: eager calls that as one op.
    """
    n = pick(rng, [t for t in tensors(g) if t.meta["val"].dim() and not any(writes(u) for u in t.users)])
    val, users = n.meta["val"], [u for u in n.users if u.op != "output" and not (is_fused(u) and is_fused(n))]
    if not users:
        raise NotHere
    rank = val.dim()
    kind = rng.choice(["permute", "unsqueeze", "view", "slice"])
    if kind == "permute":
        order = rng.sample(range(rank), rank)
        there = insert_after(n, aten.permute.default, order)
        back = insert_after(there, aten.permute.default, [order.index(i) for i in range(rank)])
    elif kind == "unsqueeze":
        axis = rng.randrange(rank + 1)
        there = insert_after(n, aten.unsqueeze.default, axis)
        back = insert_after(there, *rng.choice([(aten.squeeze.dim, axis), (aten.select.int, axis, 0)]))
    elif kind == "view":
        sizes = list(val.shape)
        if not all(isinstance(s, int) for s in sizes) or not is_contiguous_or_false(val):
            raise NotHere
        i = rng.randrange(rank)
        factors = [f for f in range(1, sizes[i] + 1) if sizes[i] % f == 0]
        f = rng.choice(factors)
        there = insert_after(n, aten.view.default, [*sizes[:i], f, sizes[i] // f, *sizes[i + 1 :]])
        back = insert_after(there, aten.view.default, sizes)
    else:
        there = insert_after(n, aten.slice.Tensor, rng.randrange(rank), 0, (1 << 63) - 1)
        back = there
    some = set(rng.sample(users, rng.randrange(1, len(users) + 1)))
    if any(is_fused(u) for u in some):
        some |= {u for u in users if is_fused(u)}  # the call of a norm reads one x
    for u in some:
        u.replace_input_with(n, back)
    if not back.users:
        raise NotHere


def swap_factors(rng: Rng, g: fx.Graph) -> None:
    """a*b for b*a, a+b for b+a, in addcmul too."""
    n = pick(rng, calls(g, aten.mul.Tensor, aten.add.Tensor, aten.addcmul.default))
    i, j = (1, 2) if n.target is aten.addcmul.default else (0, 1)
    if n.kwargs or not all(isinstance(a, Node) for a in n.args):
        raise NotHere
    args = list(n.args)
    args[i], args[j] = args[j], args[i]
    n.args = tuple(args)


def move_neg(rng: Rng, g: fx.Graph) -> None:
    """-(a*b) for (-a)*b: rounding is symmetric.

    Not inside an addcmul that torch < 2.12 took apart: there eager rounds no product, and has no sign behind one.
    """
    products = [n for n in calls(g, aten.mul.Tensor) if all(isinstance(a, Node) for a in n.args)]
    n = pick(rng, [n for n in products if not in_addcmul(n)])
    i = rng.randrange(2)
    inner = n.args[i]
    if inner.target is not aten.neg.default:
        raise NotHere
    n.replace_input_with(inner, inner.args[0])
    outer = insert_after(n, aten.neg.default)
    n.replace_all_uses_with(outer, delete_user_cb=lambda u: u is not outer)


def reorder(rng: Rng, g: fx.Graph) -> None:
    """Another order of the nodes in which every operand still comes before its users, and writes stay in place."""
    nodes = list(g.nodes)
    if any(writes(n) for n in nodes[:-1] if n.target is not aten.copy_.default):
        raise NotHere
    first = [n for n in nodes if n.op in ("placeholder", "get_attr")]
    last = [n for n in nodes if writes(n) or n.op == "output"]
    left = {n: len(set(n.all_input_nodes) - set(first)) for n in nodes if n not in first and n not in last}
    ready = [n for n, missing in left.items() if not missing]
    anchor = first[-1]
    while ready:
        n = ready.pop(rng.randrange(len(ready)))
        anchor.append(n)
        anchor = n
        for u in n.users:
            if u in left:
                left[u] -= 1
                if not left[u]:
                    ready.append(u)
    g.lint()


def keep_input(rng: Rng, g: fx.Graph) -> None:
    """An input, or a view of one, is returned as well."""
    n = pick(rng, [n for n in tensors(g) if n.op == "placeholder" or (n.target in VIEWS and _of_input(n))])
    out = output_node(g)
    with g.inserting_before(out):
        new = g.call_function(aten.mul.Tensor, (n, 2))
    out.args = ((*out.args[0], new),)


def _of_input(n: Node) -> bool:
    while n.op == "call_function" and n.target in VIEWS:
        n = n.args[0]
    return n.op == "placeholder"


def writes(n: Node) -> bool:
    schema = getattr(n.target, "_schema", None)
    return bool(schema and schema.is_mutable)


LEGAL = [duplicate, view_chain, view_chain, view_chain, swap_factors, move_neg, reorder, keep_input]


def legal_edits(rng: random.Random, graph: fx.Graph, count: int) -> list[str]:
    """Up to `count` of them, in place; what was done."""
    done = []
    for _ in range(count):
        edit = rng.choice(LEGAL)
        try:
            edit(rng, graph)
        except NotHere:
            continue
        done.append(edit.__name__)
    return done
