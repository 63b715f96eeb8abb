"""Graphs that no module traces to here: a write in the middle, a second device, a tensor subclass."""

from __future__ import annotations

import torch
from torch import fx
from torch.testing._internal.two_tensor import TwoTensor

aten = torch.ops.aten


def _input(graph: fx.Graph, *shape: int) -> fx.Node:
    return next(n for n in graph.find_nodes(op="placeholder") if tuple(n.meta["val"].shape) == shape)


def _norm(graph: fx.Graph) -> fx.Node:
    return graph.find_nodes(op="call_function", target=aten.rsqrt.default)[0]


def _write(node: fx.Node, after: fx.Node) -> None:
    with node.graph.inserting_after(after):
        new = node.graph.call_function(aten.mul_.Tensor, (node, 2.0))
    new.meta["val"] = node.meta["val"]


def write_x_between(gm: fx.GraphModule) -> None:
    _write(_input(gm.graph, 2, 21, 24), _norm(gm.graph))


def write_cos_between(gm: fx.GraphModule) -> None:
    """The first table is written to after the product with it."""
    cos = _input(gm.graph, 2, 3, 21, 4)
    product = next(n for n in gm.graph.nodes if n.target is aten.mul.Tensor and cos in _sources(n))
    _write(cos, product)


def _sources(node: fx.Node) -> set[fx.Node]:
    return {b for a in node.all_input_nodes for b in [a, *a.all_input_nodes]}


def tables_on_cuda(gm: fx.GraphModule) -> None:
    for n in gm.graph.find_nodes(op="placeholder"):
        if n.meta["val"].shape == (2, 3, 21, 4):
            val = n.meta["val"]
            with val.fake_mode:
                n.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cuda:0")


def x_is_a_subclass(gm: fx.GraphModule) -> None:
    x = _input(gm.graph, 2, 21, 24)
    with x.meta["val"].fake_mode:
        x.meta["val"] = TwoTensor(x.meta["val"].clone(), x.meta["val"].clone())
