"""One random change to a graph each: (rng, graph) -> None, or NotHere."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..harness import output_node

aten, prims = torch.ops.aten, torch.ops.prims
Node, Rng = fx.Node, random.Random
CASTS = (prims.convert_element_type.default,)


class NotHere(Exception):
    """This mutation does not apply to this graph."""


def calls(graph: fx.Graph, *targets: object) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function" and (not targets or n.target in targets)]


def tensors(graph: fx.Graph) -> list[Node]:
    return [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].is_floating_point()]


def pick(rng: Rng, nodes: list[Node]) -> Node:
    if not nodes:
        raise NotHere
    return rng.choice(nodes)


def insert_after(n: Node, target: object, *args: object) -> Node:
    with n.graph.inserting_after(n):
        new = n.graph.call_function(target, (n, *args))
    return new


def reroute(rng: Rng, n: Node, new: Node, keep: Node | None = None) -> None:
    """Let one user of n, or all but `keep`, read `new` instead."""
    users = [u for u in n.users if u is not (keep or new)]
    if not users:
        raise NotHere
    for u in users if rng.random() < 0.5 else [rng.choice(users)]:
        u.replace_input_with(n, new)


def arith(graph: fx.Graph) -> list[Node]:
    return calls(graph, aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default)


# ---- one mutation each: (rng, graph) -> None
def swap_operands(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, arith(g))
    args = list(n.args)
    i, j = rng.sample(range(len(args)), 2)
    args[i], args[j] = args[j], args[i]
    n.args = tuple(args)


def swap_cat(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, calls(g, aten.cat.default, aten.stack.default))
    parts = list(n.args[0])
    i, j = (rng.randrange(len(parts)) for _ in range(2))
    if rng.random() < 0.5:
        parts[i], parts[j] = parts[j], parts[i]
    else:
        parts[i] = parts[j]
    n.args = (parts, *n.args[1:])


def shift_bound(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, calls(g, aten.slice.Tensor, aten.slice_scatter.default))
    first = 2 if n.target is aten.slice.Tensor else 3
    args = list(n.args)
    for i in range(first, min(len(args), first + 2)) if rng.random() < 0.5 else [rng.randrange(first, len(args))]:
        if isinstance(args[i], int):
            args[i] = args[i] + rng.choice([-1, 1]) if args[i] < 1 << 40 else rng.choice([1, 2, 3])
    n.args = tuple(args)


def change_dim(rng: Rng, g: fx.Graph) -> None:
    dims = {aten.slice.Tensor: 1, aten.cat.default: 1, aten.unsqueeze.default: 1, aten.slice_scatter.default: 2}
    dims |= {aten.select.int: 1, aten.unbind.int: 1, aten.split.Tensor: 2, aten.stack.default: 1, aten.mean.dim: 1}
    n = pick(rng, [n for n in calls(g, *dims) if len(n.args) > dims[n.target]])
    args, i = list(n.args), dims[n.target]
    rank = n.meta["val"][0].dim() if isinstance(n.meta["val"], (list, tuple)) else n.meta["val"].dim()
    args[i] = [rng.randrange(rank)] if isinstance(args[i], list) else rng.randrange(rank)
    n.args = tuple(args)


def change_index(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, [n for n in calls(g) if n.target in (aten.select.int, operator.getitem)])
    i = len(n.args) - 1
    n.args = (*n.args[:i], max(0, n.args[i] + rng.choice([-1, 1])))


def permute_dims(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, calls(g, aten.permute.default))
    order = list(n.args[1])
    i, j = rng.sample(range(len(order)), 2)
    order[i], order[j] = order[j], order[i]
    n.args = (n.args[0], order)


def regroup_view(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, calls(g, aten.view.default, aten.reshape.default))
    size = list(n.args[1])
    i, j = rng.sample(range(len(size)), 2)
    size[i], size[j] = size[j], size[i]
    n.args = (n.args[0], size)


def drop_cast(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, calls(g, *CASTS))
    n.replace_all_uses_with(n.args[0])
    g.erase_node(n)


def change_cast(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, calls(g, *CASTS))
    n.args = (n.args[0], rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64]))


def add_cast(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, tensors(g))
    new = insert_after(n, CASTS[0], rng.choice([torch.float32, torch.bfloat16, torch.float16]))
    reroute(rng, n, new)


def round_trip(rng: Rng, g: fx.Graph) -> None:
    """A rounding to a narrower type and back."""
    n = pick(rng, [n for n in tensors(g) if n.meta["val"].dtype is torch.float32])
    narrow = insert_after(n, CASTS[0], rng.choice([torch.bfloat16, torch.float16]))
    reroute(rng, n, insert_after(narrow, CASTS[0], torch.float32), keep=narrow)


def insert_op(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, tensors(g))
    rank, sizes = n.meta["val"].dim(), n.meta["val"].shape
    axis = rng.randrange(rank) if rank else 0
    choices: list[tuple] = [
        (aten.abs.default,),
        (aten.neg.default,),
        (aten.mul.Tensor, rng.choice([1.0, -1, 2.0, 0.5])),
    ]
    choices += [(aten.add.Tensor, rng.choice([0, 1e-3])), (aten.mul.Tensor, 1)]
    if rank:
        half = max(1, sizes[axis] // 2) if isinstance(sizes[axis], int) else 1  # max of a symbol would guard
        choices += [
            (aten.roll.default, [rng.choice([1, half])], [axis]),
            (aten.flip.default, [axis]),
        ]
        choices += [(aten.clone.default,), (aten.transpose.int, axis, rank - 1)]
    target, *args = rng.choice(choices)
    reroute(rng, n, insert_after(n, target, *args))


def same_shape(rng: Rng, g: fx.Graph) -> None:
    """Read another value of the same shape and dtype."""
    n = pick(rng, calls(g))
    before = list(g.nodes)[: list(g.nodes).index(n)]
    slots = [a for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    old = pick(rng, slots)
    alike = [m for m in before if m is not old and like(m, old)]
    n.replace_input_with(old, pick(rng, alike))


def like(a: Node, b: Node) -> bool:
    """As far as is known: to compare two symbolic sizes with == would guard, for every graph that shares them."""
    x, y = a.meta.get("val"), b.meta["val"]
    if not isinstance(x, torch.Tensor) or x.dtype != y.dtype or x.dim() != y.dim():
        return False
    return all(statically_known_true(m == n) for m, n in zip(x.shape, y.shape, strict=True))


def change_number(rng: Rng, g: fx.Graph) -> None:
    """eps, the exponent, a literal factor."""

    def numbers(n: Node) -> list[int]:
        return [i for i, a in enumerate(n.args) if isinstance(a, (int, float)) and not isinstance(a, bool)]

    kinds = (aten.add.Tensor, aten.add.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.pow.Tensor_Scalar)
    n = pick(rng, [n for n in calls(g, *kinds) if numbers(n)])
    i = rng.choice(numbers(n))
    value = n.args[i]
    new = rng.choice([value * 1.01, value * 2, value + 1, 0, 1, -value])
    n.args = (*n.args[:i], new, *n.args[i + 1 :])


def change_value(rng: Rng, g: fx.Graph) -> None:
    """addcmul(value=), add(alpha=)."""
    n = pick(rng, calls(g, aten.addcmul.default, aten.add.Tensor, aten.sub.Tensor))
    n.kwargs = {"value" if n.target is aten.addcmul.default else "alpha": rng.choice([-1, 2, 1])}


def change_op(rng: Rng, g: fx.Graph) -> None:
    other = {aten.add.Tensor: aten.sub.Tensor, aten.sub.Tensor: aten.add.Tensor, aten.mul.Tensor: aten.add.Tensor}
    other |= {
        aten.rsqrt.default: aten.reciprocal.default,
        aten.mean.dim: aten.amax.default,
        aten.neg.default: aten.abs.default,
    }
    n = pick(rng, calls(g, *other))
    n.target = other[n.target]


def split_addcmul(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, calls(g, aten.addcmul.default))
    with g.inserting_before(n):
        product = g.call_function(aten.mul.Tensor, (n.args[1], n.args[2]))
        total = g.call_function(aten.add.Tensor, (n.args[0], product))
    n.replace_all_uses_with(total)
    g.erase_node(n)


def fuse_addcmul(rng: Rng, g: fx.Graph) -> None:
    sums = [n for n in calls(g, aten.add.Tensor) if getattr(n.args[1], "target", None) is aten.mul.Tensor]
    n = pick(rng, [n for n in sums if all(isinstance(a, Node) for a in n.args[1].args)])
    with g.inserting_before(n):
        new = g.call_function(aten.addcmul.default, (n.args[0], *n.args[1].args))
    n.replace_all_uses_with(new)
    g.erase_node(n)


def other_user(rng: Rng, g: fx.Graph) -> None:
    """Return an intermediate as well."""
    out, n = output_node(g), pick(rng, [n for n in tensors(g) if n.op == "call_function"])
    out.args = ((*out.args[0], n),)


def scale_table(rng: Rng, g: fx.Graph) -> None:
    n = pick(rng, [n for n in g.find_nodes(op="placeholder") if n in set(tensors(g))])
    reroute(rng, n, insert_after(n, aten.mul.Tensor, rng.choice([-1, 2, 0.5, 1.5])))


def write_input(rng: Rng, g: fx.Graph) -> None:
    """An input, or a piece of one, is written to somewhere on the way: after functionalisation a graph has no such."""
    n = pick(rng, [n for n in g.find_nodes(op="placeholder") if n in set(tensors(g)) and n.meta["val"].dim()])
    where = pick(rng, calls(g))
    with g.inserting_after(where):
        if rng.random() < 0.5:
            g.call_function(aten.mul_.Tensor, (n, 2))
        else:
            piece = g.call_function(aten.slice.Tensor, (n, rng.randrange(n.meta["val"].dim()), 0, 1))
            with g.inserting_after(piece):
                g.call_function(aten.neg_.default, (piece,))


def swap_inputs(rng: Rng, g: fx.Graph) -> None:
    """cos for sin, q for k, everywhere or in one place."""
    inputs = [n for n in g.find_nodes(op="placeholder") if n in set(tensors(g)) and n.users]
    a = pick(rng, inputs)
    b = pick(rng, [n for n in inputs if n is not a and like(n, a)])
    users_a, users_b = list(a.users), list(b.users)
    if rng.random() < 0.5:
        u = rng.choice(users_a)
        u.replace_input_with(a, b)
        return
    for users, old, new in ((users_a, a, b), (users_b, b, a)):
        for u in users:
            u.replace_input_with(old, new)


MUTATIONS: list[Callable[[Rng, fx.Graph], None]] = [
    swap_operands, swap_cat, shift_bound, change_dim, change_index, permute_dims, regroup_view, drop_cast, change_cast,
    add_cast, round_trip, insert_op, same_shape, change_number, change_value, change_op, split_addcmul, fuse_addcmul,
    other_user, scale_table, swap_inputs, write_input,
]  # fmt: skip
