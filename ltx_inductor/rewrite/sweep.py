"""The last look: rotation-like values that neither a site nor a refusal speaks for.

A rotation moves pieces of a value (cuts and joins them, or flips, rolls or gathers them), multiplies them by tables and
adds. Whatever does that and was not covered by a rule is named, so that no near-match is lost silently: RoPE without a
norm, RoPE with something between the norm and the rotation, a norm this rule cannot read, or complex numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.layout import CUT, FLIP, JOIN, LAYOUT, argument, aten
from ltx_inductor.rewrite.lift import CAST
from ltx_inductor.rewrite.norm import is_fused
from ltx_inductor.rewrite.view import GraphView

_MULTIPLY = {aten.mul.Tensor, aten.addcmul.default}
_SUM = {aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default, aten.sum.dim_IntList}
_WRITE = {aten.index_put.default, aten.index_copy.default, aten.scatter.src}
_MOVE = FLIP | {aten.roll.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
_POINTWISE = {
    aten.neg.default,
    aten.abs.default,
    aten.div.Tensor,
    aten.copy.default,
    aten.mul.Scalar,
    aten.add.Scalar,
    aten.where.self,
    aten.constant_pad_nd.default,
}
_WALKED = set(LAYOUT) | CAST | CUT | JOIN | _MULTIPLY | _SUM | _WRITE | _MOVE | _POINTWISE
_NEAR = 40  # nodes walked back from the end of a rotation, and from there to a norm
_COMPLEX = {aten.view_as_complex.default, aten.complex.default}


@dataclass(frozen=True)
class Suspect:
    """The end of something like a rotation. certain: it is one of a normalised value, along the last axes."""

    node: Node
    why: Refuse
    certain: bool


def uncovered_rotations(view: GraphView, covered: set[Node]) -> Iterator[Suspect]:
    """Every rotation-like value outside `covered`, last one first.

    Near a norm anything that moves, multiplies and adds is named; elsewhere only what mixes two pieces of one value
    along its last axes, since gathers, blends and joins of other kinds are everywhere.
    """
    taken, normed = set(covered), _normed(view)
    for n in reversed(view.graph.nodes):
        if n.op != "call_function" or n in taken or n not in view.live or n in view.backward:
            continue
        if n.target in JOIN or n.target in _SUM or n.target in _WRITE:
            walked = _rotation(n, covered, normed)
            if walked:
                typical = _is_typical(walked)
                near, through = _way_from_a_norm(n, walked)
                if typical or near:
                    yield Suspect(n, _reason(n, near, through), typical and near)
                    taken |= walked
        elif n.target is aten.view_as_real.default and _is_complex_rotation(n):
            why = Refuse(
                f"{n.name} is a rotation written with complex numbers",
                expected="RMSNorm, then n0*cos - n1*sin and n1*cos + n0*sin on real halves",
                hint="complex RoPE pairs neighbouring elements (interleaved), which this rule does not cover",
            )
            yield Suspect(n, why, True)


def _normed(view: GraphView, limit: int = 8) -> set[Node]:
    """The values whose squares a rsqrt is computed from."""
    found: set[Node] = set()
    for n in view.graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        for _ in range(limit):
            inputs = n.all_input_nodes
            if len(inputs) != 1:
                break
            if n.target is aten.pow.Tensor_Scalar or n.target is aten.mul.Tensor:
                found.add(inputs[0])
                break
            n = inputs[0]
    return found


def _rotation(end: Node, covered: set[Node], normed: set[Node]) -> set[Node] | None:
    """The nodes between `end` and the value whose pieces it multiplies and adds, if it is the end of a rotation.

    Covered nodes are not walked, and what is normalised is not walked past: a key made from a rotated query is a
    rotation of its own.
    """
    walked, todo = {end}, [end]
    while todo and len(walked) < _NEAR:
        n = todo.pop(0)
        if n in normed and n is not end:
            continue
        for a in n.all_input_nodes:
            if a not in walked and a not in covered and a.op == "call_function" and a.target in _WALKED:
                walked.add(a)
                todo.append(a)
    products = [n for n in walked if n.target in _MULTIPLY and len(n.all_input_nodes) > 1]
    matrix = end.target is aten.sum.dim_IntList
    sums = matrix or any(n.target in _SUM and len(n.all_input_nodes) > 1 for n in walked)
    if not sums or len(products) < (1 if matrix else 2):
        return None
    if matrix:
        return walked if _adds_a_pair(end) else None
    if end.target in JOIN or end.target in _WRITE:
        moves = any(n.target in CUT or n.target in _MOVE for n in walked)
    else:
        moves = any(n.target in CUT or n.target in _MOVE for n in walked) and _mixes_one_value(end, walked)
    return walked if moves else None


def _adds_a_pair(total: Node) -> bool:
    """A sum over one axis of size 2 of a product: a 2 x 2 matrix times the halves."""
    summed = total.args[0]
    dims = total.args[1]
    return summed.target in _MULTIPLY and len(dims) == 1 and _is(summed.meta["val"].shape[dims[0]], 2)


def _is_typical(walked: set[Node]) -> bool:
    """Does a sum mix two pieces of one value that lie along the last axis, or along two halves in front of it?"""
    return any(_mixes_one_value(n, walked, _is_along_last_axes) for n in walked if n.target in _SUM)


def _is_along_last_axes(n: Node) -> bool:
    """Is n a piece along the last axis (wider than one element: that would be a factor per token), or of two halves?"""
    if n.target is operator.getitem:
        n = n.args[0]
    if n.target not in CUT and n.target not in _MOVE:
        return False
    shape = n.args[0].meta["val"].shape
    if n.target is aten.index.Tensor:
        dims = [i for i, at in enumerate(n.args[1]) if at is not None]
    elif n.target is aten.gather.default:
        dims = [n.args[1]]
    elif n.target in (aten.split.Tensor, aten.split_with_sizes.default):
        dims = [argument(n, 2, "dim", 0)]
    elif n.target is aten.roll.default:
        dims = list(argument(n, 2, "dims", []))
    elif n.target in FLIP:
        dims = list(n.args[1])
    else:
        dims = [argument(n, 1, "dim", 0)]
    rank = len(shape)
    value = n.meta["val"]
    single = n.target is aten.select.int or (n.target is aten.slice.Tensor and _is(value.shape[-1], 1))
    return any((d % rank == rank - 1 and not single) or (d % rank == rank - 2 and _is(shape[d], 2)) for d in dims)


def _is(size: object, value: int) -> bool:
    return isinstance(size, int) and size == value


def _mixes_one_value(total: Node, walked: set[Node], is_piece: Callable[[Node], bool] = lambda _: True) -> bool:
    """Does a sum add products of two different pieces of one value, one of which `is_piece` accepts?"""
    addends = [a for a in total.all_input_nodes if a in walked]
    if total.target is aten.addcmul.default:
        addends = [total.args[0], total]
    pieces: list[set[tuple[Node, Node]]] = []
    for a in addends:
        product = a if a is total else _product_under(a)
        factors = product.args[-2:] if product.target in _MULTIPLY else ()
        pieces.append({p for f in factors if isinstance(f, Node) for p in _pieces(f)})
    return any(
        rx is ry and px is not py and (is_piece(px) or is_piece(py))
        for i, x in enumerate(pieces)
        for y in pieces[i + 1 :]
        for rx, px in x
        for ry, py in y
    )


def _product_under(n: Node, limit: int = 4) -> Node:
    """The product that n is a piece, a view or a cast of."""
    for _ in range(limit):
        plain = n.target in LAYOUT or n.target in CAST or n.target in CUT or n.target is aten.neg.default
        if n.target in _MULTIPLY or not plain or not n.all_input_nodes:
            break
        n = n.all_input_nodes[0]
    return n


def _pieces(n: Node, limit: int = 8) -> Iterator[tuple[Node, Node]]:
    """(a value, the piece of it) for n and what it is a view, a cast or a rearrangement of."""
    piece = n
    for _ in range(limit):
        yield n, piece
        if n.op != "call_function" or not n.all_input_nodes:
            return
        if n.target in CUT or n.target in _MOVE:
            piece = n
        elif not (n.target in LAYOUT or n.target in CAST or n.target in (aten.neg.default, aten.mul.Tensor)):
            return
        n = n.all_input_nodes[0]


def _reason(n: Node, near: bool, through: Node | None) -> Refuse:
    if through is not None:
        return Refuse(
            f"{n.name} rotates what {through.name} = {through.target} makes of a normalised value; between a norm and "
            "its rotation there must be no scale, sum or other op",
            found=f"{through.name} = {through.target}",
            expected="torch.rms_norm of a query or key, then split RoPE on its result",
        )
    if near:
        return Refuse(
            f"{n.name} looks like a rotation of a normalised value, in a form that this rule does not read",
            expected="n0*cos - n1*sin and n1*cos + n0*sin, joined by cat, stack or writes to slices",
        )
    return Refuse(
        f"{n.name} looks like a rotation, but not of a value that is a recognised RMSNorm",
        expected="torch.rms_norm of a query or key, then split RoPE",
        hint="RoPE without a norm is not covered; a norm that is written out by hand is not either",
    )


def _way_from_a_norm(n: Node, walked: set[Node]) -> tuple[bool, Node | None]:
    """(is there a rsqrt near, through pointwise ops and layout only; the op nearest to the rotation on a way to it).

    The op is one that is neither layout nor the rotation's own. Products and sums of the rotation lie on its side of a
    cut; whatever computes behind a cut is in between.
    """
    near = False
    seen: set[tuple[Node, bool]] = {(n, False)}
    todo: list[tuple[Node, bool, Node | None]] = [(n, False, None)]
    while todo and len(seen) < 4 * _NEAR:
        m, behind, through = todo.pop(0)
        behind = behind or m.target in CUT or m.target in _MOVE
        for a in m.all_input_nodes:
            if a.target is aten.rsqrt.default:
                near = True
                if through is not None:
                    return True, through
            if a.op != "call_function" or (a, behind) in seen or not _is_elementwise(a):
                continue
            seen.add((a, behind))
            own = not behind and a in walked and (a.target in _MULTIPLY or a.target in _SUM)
            plain = own or a.target in LAYOUT or a.target in CAST or a.target in CUT or is_fused(a)
            todo.append((a, behind, through if plain or through is not None else a))
    return near, None


def _is_elementwise(n: Node) -> bool:
    """Layout, cast or an op without a reduction or a product of matrices."""
    if n.target in _WALKED or n.target is operator.getitem:
        return True
    return isinstance(n.target, torch._ops.OpOverload) and torch.Tag.pointwise in n.target.tags


def _is_complex_rotation(n: Node) -> bool:
    source = n.args[0]
    return (
        isinstance(source, Node)
        and source.target is aten.mul.Tensor
        and any(a.target in _COMPLEX for a in source.all_input_nodes)
    )
