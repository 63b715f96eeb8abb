"""Near-misses: a legal graph with one random thing changed.

`mutate` edits a copy of a captured graph, recomputes the fake values, and drops what no longer propagates. A mutant is
either still legal, or must be refused; `live_rotations` counts what a report has to account for.
"""

from __future__ import annotations

import random

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from .harness import copy_graph, output_node
from .mutations import MUTATIONS

aten = torch.ops.aten
Node = fx.Node
JOINS = (aten.cat.default, aten.stack.default, aten.slice_scatter.default, aten.select_scatter.default)
CUTS = (aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
PRODUCTS, SUMS = (aten.mul.Tensor, aten.addcmul.default), (aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default)


def mutate(gm: fx.GraphModule, seed: int) -> tuple[str, fx.GraphModule] | None:
    """One mutation, chosen and placed by the seed; None if it does not apply or the graph is no longer well typed."""
    rng, copy = random.Random(seed), copy_graph(gm)
    mutation = rng.choice(MUTATIONS)
    before = str(copy.graph)
    try:
        mutation(rng, copy.graph)
        if str(copy.graph) == before:
            return None
        copy.graph.lint()
        _propagate(copy)
    except Exception:  # whatever the change broke: a compiler is never given such a graph
        return None
    return mutation.__name__, copy


def _propagate(gm: fx.GraphModule) -> None:
    vals = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    mode = next(v.fake_mode for v in vals if isinstance(v, torch.Tensor))
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*vals)
    if any(a.meta["val"].numel() == 0 for a in output_node(gm.graph).args[0]):
        raise ValueError("an empty result")


def live_rotations(graph: fx.Graph) -> int:
    """How many norms reach an output through a cut, two products with tables, a sum and a join."""
    norms: set[Node] = set()
    for join in cone(output_node(graph)):
        if join.target in JOINS:
            found = {n for n in cone(join) if n.target is aten.rsqrt.default}
            nearest = found - {m for n in found for m in cone(n)}
            if _rotates(join, nearest):
                norms |= nearest
    return len(norms)


def cone(n: Node) -> set[Node]:
    """Everything n is computed from."""
    seen: set[Node] = set()
    todo = [n]
    while todo:
        for a in todo.pop().all_input_nodes:
            if a not in seen:
                seen.add(a)
                todo.append(a)
    return seen


def _rotates(join: Node, norms: set[Node]) -> bool:
    """Do the nodes between the norms and the join look like a rotation?"""
    between = {n for n in cone(join) if norms & cone(n)}
    products = sum(n.target in PRODUCTS and any(_is_table(a) for a in n.all_input_nodes) for n in between)
    sums = sum(n.target in SUMS and len(n.all_input_nodes) > 1 for n in between)
    return products >= 2 and sums >= 1 and any(n.target in CUTS for n in between)


def _is_table(a: Node) -> bool:
    """A placeholder of rank 2 or more, seen through ops of one operand."""
    while a.op == "call_function" and len(a.all_input_nodes) == 1:
        a = a.all_input_nodes[0]
    return a.op == "placeholder" and isinstance(a.meta["val"], torch.Tensor) and a.meta["val"].dim() >= 2
