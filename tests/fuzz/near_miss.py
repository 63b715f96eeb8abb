"""Near-misses: a legal graph with random things changed.

`mutate` edits a copy of a captured graph, recomputes the fake values, and drops what no longer propagates. A mutant is
either still legal, or must be refused; `live_rotations` counts what a report has to account for.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from ..harness import copy_graph, output_node, shape_facts
from .mutations import MUTATIONS

aten = torch.ops.aten
Node = fx.Node
JOINS = (aten.cat.default, aten.stack.default, aten.slice_scatter.default, aten.select_scatter.default)
CUTS = (aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
PRODUCTS, SUMS = (aten.mul.Tensor, aten.addcmul.default), (aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default)


def mutate(gm: fx.GraphModule, seed: int) -> tuple[str, fx.GraphModule] | None:
    """One mutation, chosen and placed by the seed; None if it does not apply or the graph is no longer well typed."""
    rng = random.Random(seed)
    mutation = rng.choice(MUTATIONS)
    made = edited(gm, lambda g: mutation(rng, g))
    return None if made is None else (mutation.__name__, made)


def edited(gm: fx.GraphModule, edit: Callable[[fx.Graph], object]) -> fx.GraphModule | None:
    """A copy of `gm` with `edit` applied and its fake values recomputed; None if that is no graph to compile.

    One that holds for some sizes only is none: the copies of a graph share its symbols, and what one says of them is
    then said of all. Whoever goes on with `gm` after that has to capture it anew.
    """
    copy, facts = copy_graph(gm), shape_facts(gm.graph)
    before = {n: (n.target, n.args, n.kwargs) for n in copy.graph.nodes}
    try:
        edit(copy.graph)
        changed = {n for n in copy.graph.nodes if before.get(n) != (n.target, n.args, n.kwargs)}
        if not changed and len(before) == len(copy.graph.nodes):
            return None
        copy.graph.lint()
        propagate(copy, changed)
    except Exception:  # whatever the change broke: a compiler is never given such a graph
        return None
    return copy if shape_facts(gm.graph) == facts else None


def propagate(gm: fx.GraphModule, changed: set[Node]) -> None:
    """Recomputes the fake values of the changed nodes and of all that is computed from them. Adds no guards.

    As Dynamo does it, with the Python dispatcher: without it torch cannot broadcast to symbolic sizes. Raises
    ValueError where the values would need a guard on a size: where two sizes are the same for the example only.
    """
    vals = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    mode = next(v.fake_mode for v in vals if isinstance(v, torch.Tensor))
    todo = set(changed)
    guards = mode.shape_env.suppress_guards() if mode.shape_env else contextlib.nullcontext()
    with mode, torch.no_grad(), enable_python_dispatcher(), guards:
        for n in gm.graph.nodes:
            if n.op == "call_function" and (n in todo or any(a in todo for a in n.all_input_nodes)):
                todo.add(n)
                args, kwargs = (map_arg(a, lambda m: m.meta["val"]) for a in (n.args, n.kwargs))
                n.meta["val"] = n.target(*args, **kwargs)
                if not _sizes_hold(n, args):
                    raise ValueError(f"{n.name} has its sizes for the example only")
    results = [t for t in pytree.arg_tree_leaves(output_node(gm.graph).args[0]) if isinstance(t, Node)]
    if any(isinstance(t.meta["val"], torch.Tensor) and t.meta["val"].numel() == 0 for t in results):
        raise ValueError("an empty result")


def _sizes_hold(n: Node, args: tuple[Any, ...]) -> bool:
    """Does a view have the sizes it was asked for, and do operands fit each other, whatever the symbols are?"""
    shape = n.meta["val"].shape if isinstance(n.meta["val"], torch.Tensor) else ()
    if n.target in VIEWS:
        return all((isinstance(a, int) and a == -1) or _same(a, s) for a, s in zip(args[1], shape, strict=True))
    if n.target in PRODUCTS or n.target in SUMS:
        shapes = [t.shape for t in args if isinstance(t, torch.Tensor)]
        return all(_same(a, 1) or _same(a, s) for own in shapes for a, s in zip(own[::-1], shape[::-1], strict=False))
    return True


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def live_rotations(graph: fx.Graph) -> int:
    """How many norms reach an output through a cut, two products with tables, a sum and a join.

    A join that mixes two of them, neither of which has a join of its own, is one rotation.
    """
    mixed: list[set[Node]] = []
    cones: dict[Node, frozenset[Node]] = {}
    for n in graph.nodes:
        cones[n] = frozenset().union(n.all_input_nodes, *(cones[a] for a in n.all_input_nodes))
    live = cones[output_node(graph)]
    for join in graph.nodes:
        if join in live and join.target in JOINS:
            found = {n for n in cones[join] if n.target is aten.rsqrt.default}
            nearest = found - {m for n in found for m in cones[n]}
            if _rotates(cones, join, nearest):
                mixed.append(nearest)
    count, seen = 0, set[Node]()
    for norms in sorted(mixed, key=len):
        count += not norms & seen
        seen |= norms
    return count


def _rotates(cones: dict[Node, frozenset[Node]], join: Node, norms: set[Node]) -> bool:
    """Do the nodes between the norms and the join look like a rotation?"""
    between = {n for n in cones[join] if norms & cones[n]}
    products = sum(n.target in PRODUCTS and any(_is_table(a) for a in n.all_input_nodes) for n in between)
    sums = sum(n.target in SUMS and len(n.all_input_nodes) > 1 for n in between)
    return products >= 2 and sums >= 1 and any(n.target in CUTS for n in between)


def _is_table(a: Node) -> bool:
    """A placeholder of rank 2 or more, seen through ops of one operand."""
    while a.op == "call_function" and len(a.all_input_nodes) == 1:
        a = a.all_input_nodes[0]
    return a.op == "placeholder" and isinstance(a.meta["val"], torch.Tensor) and a.meta["val"].dim() >= 2
