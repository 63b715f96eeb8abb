"""Views there and back again: which earlier value is the end of a chain of views, element for element?

x.view(B, S, H, D).view(B, S, H*D) is x. Reading such a chain op by op would be right, but may not be possible: the
sizes on the way can lie across the halves of a head, and then no digits fit (see digits.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ltx_inductor.rewrite.layout import argument, aten
from ltx_inductor.rewrite.size import ONE, Sizes

_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}
_VIEWS = {*_RESHAPES, aten.permute.default, aten.select.int, aten.slice.Tensor}
_Way = tuple[Node, str, Any]  # from a root: ("reshape", sizes) in row-major order, or ("permute", order of its axes)


def origins(graph: Graph, sizes: Sizes) -> dict[Node, Node]:
    """{a view: an earlier value that it is}: two values are one if the same reshape or permutation of one root."""
    ways: dict[Node, _Way] = {}
    found: dict[Node, Node] = {}
    first: dict[_Way, Node] = {}
    for n in graph.nodes:
        if n.op != "call_function" or n.target not in _VIEWS:
            continue
        source = n.args[0]
        if not all(isinstance(a.meta.get("val"), torch.Tensor) for a in (n, source)):
            continue
        source = found.get(source, source)
        root, kind, form = ways.get(source, (source, "", None))
        way: _Way
        start: _Way
        if n.target is aten.permute.default:
            identity = tuple(range(len(n.args[1])))
            if kind != "permute":
                root, form = source, identity
            way = (root, "permute", tuple(form[d] for d in n.args[1]))
            start = (root, "permute", identity)
        elif _is_reshape(n, sizes):
            if kind == "permute":
                root = source
            way = (root, "reshape", _plain_shape(n, sizes))
            start = (root, "reshape", _plain_shape(root, sizes))
        else:
            continue
        first.setdefault(start, root)
        known = first.setdefault(way, n)
        if known is n:
            ways[n] = way
        else:
            found[n] = known
    return found


def _plain_shape(n: Node, sizes: Sizes) -> tuple[Any, ...]:
    """Sizes with plain numbers where they are known: quicker to hash."""
    shape = n.meta["val"].shape
    if all(type(s) is int for s in shape):
        return tuple(shape)
    return tuple(s if s.known is None else s.known for s in sizes.shape(n))


def _is_reshape(n: Node, sizes: Sizes) -> bool:
    """Does n have the elements of its operand, in the same row-major order?"""
    if n.target in _RESHAPES:
        return True
    shape = sizes.shape(n.args[0])
    if n.target is aten.select.int:
        return shape[n.args[1]] == ONE
    return n.target is aten.slice.Tensor and argument(n, 4, "step", 1) == 1 and sizes.shape(n) == shape
