"""Layout ops, read backwards: the coordinates of an element of the result -> the coordinates in the operand.

One small function per op, in the table LAYOUT. Each takes (lifter, node, coords) and lifts the operand at the
coordinates it works out; none of them looks at values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ltx_inductor.rewrite.digits import Const, Coords, Refuse
from ltx_inductor.rewrite.expr import Expr
from ltx_inductor.rewrite.size import ONE, Size

if TYPE_CHECKING:
    from ltx_inductor.rewrite.lift import Lifter

aten, prims = torch.ops.aten, torch.ops.prims
Handler = Callable[["Lifter", Node, Coords], Expr]
LAYOUT: dict[Any, Handler] = {}
FAR = 1 << 62  # where a slice "to the end" may point


def _handles(*targets: Any) -> Callable[[Handler], Handler]:
    def register(f: Handler) -> Handler:
        LAYOUT.update(dict.fromkeys(targets, f))
        return f

    return register


def argument(n: Node, index: int, name: str, default: Any = None) -> Any:
    """Argument of an ATen call, given by position, by keyword, or left at its default."""
    return n.args[index] if len(n.args) > index else n.kwargs.get(name, default)


def literal(a: Any) -> Any:
    """A literal, or the value (maybe a SymInt) of the node that stands for one."""
    return a.meta["val"] if isinstance(a, Node) else a


def _dim(n: Node, index: int, rank: int, default: int = 0) -> int:
    return int(argument(n, index, "dim", default)) % rank


@_handles(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _same(lf: Lifter, n: Node, co: Coords) -> Expr:
    return lf.lift(n.args[0], co)


@_handles(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(lf: Lifter, n: Node, co: Coords) -> Expr:
    sizes = lf.sizes.shape(n.args[0])
    regrouped = lf.space.regroup([d for axis in co for d in axis], sizes)
    if regrouped is None:
        raise Refuse(
            f"{n.name} regroups {list(sizes)} to {list(lf.sizes.shape(n))} across factors that are not known to divide"
        )
    return lf.lift(n.args[0], regrouped)


@_handles(aten.permute.default)
def _permute(lf: Lifter, n: Node, co: Coords) -> Expr:
    back: list[Any] = [()] * len(co)
    for out_axis, in_axis in enumerate(n.args[1]):
        back[in_axis] = co[out_axis]
    return lf.lift(n.args[0], tuple(back))


@_handles(aten.transpose.int, aten.t.default)
def _transpose(lf: Lifter, n: Node, co: Coords) -> Expr:
    back = list(co)
    if len(back) > 1:
        a, b = (n.args[1], n.args[2]) if n.target is aten.transpose.int else (0, 1)
        back[a], back[b] = back[b], back[a]
    return lf.lift(n.args[0], tuple(back))


@_handles(aten.unsqueeze.default)
def _unsqueeze(lf: Lifter, n: Node, co: Coords) -> Expr:
    d = n.args[1] % len(co)
    return lf.lift(n.args[0], co[:d] + co[d + 1 :])


@_handles(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(lf: Lifter, n: Node, co: Coords) -> Expr:
    sizes = lf.sizes.shape(n.args[0])
    dims = argument(n, 1, "dim")
    dims = range(len(sizes)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % len(sizes) for d in dims if sizes[d] == ONE}
    rest = iter(co)
    return lf.lift(n.args[0], tuple(() if i in gone else next(rest) for i in range(len(sizes))))


@_handles(aten.expand.default)
def _expand(lf: Lifter, n: Node, co: Coords) -> Expr:
    sizes = lf.sizes.shape(n.args[0])
    trailing = co[len(co) - len(sizes) :]
    return lf.lift(n.args[0], tuple(() if s == ONE else d for s, d in zip(sizes, trailing, strict=True)))


@_handles(aten.repeat.default)
def _repeat(lf: Lifter, n: Node, co: Coords) -> Expr:
    sizes = lf.sizes.shape(n.args[0])
    back = list(co[len(co) - len(sizes) :])
    for i, s in enumerate(sizes):
        r = lf.space.take(back[i], s)
        if r is None:
            raise Refuse(f"{n.name} repeats an axis across a factor")
        back[i] = r[1]
    return lf.lift(n.args[0], tuple(back))


@_handles(aten.flip.default, prims.rev.default)
def _flip(lf: Lifter, n: Node, co: Coords) -> Expr:
    sizes, back = lf.sizes.shape(n.args[0]), list(co)
    for d in n.args[1]:
        index, _ = lf.space.block(back[d], ONE, f"{n.name}, a flip of another axis than the halves,")
        size = sizes[d].known
        if size is None:
            raise Refuse(f"{n.name} flips a symbolic axis")
        back[d] = (Const(size - 1 - index, sizes[d]),) if size != 1 else ()
    return lf.lift(n.args[0], tuple(back))


# ---- cutting


@_handles(aten.slice.Tensor)
def _slice(lf: Lifter, n: Node, co: Coords) -> Expr:
    d, start, step = _bounds(lf, n, 1)
    return lf.lift(n.args[0], _inside(lf, n, n.args[0], co, d, start, lf.sizes.shape(n)[d], step))


@_handles(aten.select.int)
def _select(lf: Lifter, n: Node, co: Coords) -> Expr:
    sizes = lf.sizes.shape(n.args[0])
    d, index = n.args[1] % len(sizes), literal(n.args[2])
    if not isinstance(index, int) or (index < 0 and sizes[d].known is None):
        raise Refuse(f"{n.name} selects at a symbolic index")
    return lf.lift(n.args[0], (*co[:d], _at(index, sizes[d]), *co[d:]))


@_handles(operator.getitem)
def _getitem(lf: Lifter, n: Node, co: Coords) -> Expr:
    cut, i = n.args
    if cut.target not in MULTI_CUT:
        raise Refuse(f"{n.name} is a result of {cut.target}, which this rule does not know")
    source = cut.args[0]
    sizes = lf.sizes.shape(source)
    if cut.target is aten.unbind.int:
        d = _dim(cut, 1, len(sizes))
        return lf.lift(source, (*co[:d], _at(i, sizes[d]), *co[d:]))
    d = _dim(cut, 2, len(sizes))
    lengths = [lf.sizes.of(v.shape[d]) for v in cut.meta["val"]]
    starts = [s.known for s in lengths[:i]]
    if any(s is None for s in starts):
        raise Refuse(f"{cut.name} splits a symbolic axis")
    return lf.lift(source, _inside(lf, cut, source, co, d, sum(s or 0 for s in starts), lengths[i], 1))


def _at(index: int, size: Size) -> tuple[Const, ...]:
    if size == ONE:
        return ()
    return (Const(index + (size.known or 0) if index < 0 else index, size),)


def _bounds(lf: Lifter, n: Node, first: int) -> tuple[int, int, int]:
    """(dim, start, step) of slice / slice_scatter, whose arguments begin at `first`; start clamped as Python does."""
    sizes = lf.sizes.shape(n.args[0])
    d = _dim(n, first, len(sizes))
    start, step = literal(argument(n, first + 1, "start")) or 0, argument(n, first + 3, "step", 1)
    if not isinstance(step, int):
        raise Refuse(f"{n.name} steps by a symbolic amount")
    if not isinstance(start, int):
        if lf.sizes.of(start) != sizes[d]:
            raise Refuse(f"{n.name} starts at the symbolic position {start}")
        return d, FAR, step
    size = sizes[d].known
    if start < 0:
        if size is None:
            raise Refuse(f"{n.name} counts from the end of a symbolic axis")
        start = max(0, start + size)
    return d, start, step


def _inside(lf: Lifter, n: Node, source: Node, co: Coords, d: int, start: int, length: Size, step: int) -> Coords:
    """Coordinates in source of the element `co` of source[start : start + length*step : step] along d."""
    size = lf.sizes.shape(source)[d]
    if length == size and start == 0 and step == 1:
        return co
    if step != 1:
        if size.exactly_divided_by(Size(step)) != length or start >= step:
            raise Refuse(f"{n.name} is a strided slice that is not one residue of {step}")
        return (*co[:d], (*co[d], Const(start, Size(step))), *co[d + 1 :])
    if length.known is None or size.known is None:
        raise Refuse(f"{n.name} cuts a symbolic axis of size {size} to {length}")
    piece = gcd(size.known, length.known, start)
    pieces = Size(size.known // piece)
    index, low = (0, co[d]) if piece == length.known else lf.space.block(co[d], Size(piece), n.name)
    return (*co[:d], (Const(start // piece + index, pieces), *low), *co[d + 1 :])


# ---- joining


@_handles(aten.cat.default)
def _cat(lf: Lifter, n: Node, co: Coords) -> Expr:
    d = _dim(n, 1, len(co))
    parts = [p for p in n.args[0] if p.meta["val"].dim() == len(co)]  # torch.cat skips legacy empty 1-d tensors
    if len(parts) == 1:
        return lf.lift(parts[0], co)
    lengths = [lf.sizes.shape(p)[d] for p in parts]
    if all(s == lengths[0] for s in lengths):
        index, low = lf.space.block(co[d], lengths[0], n.name)
        return lf.lift(parts[index], (*co[:d], low, *co[d + 1 :]))
    sizes = [s.known for s in lengths]
    if any(s is None for s in sizes):
        raise Refuse(f"{n.name} joins pieces of different symbolic sizes")
    piece = gcd(*[s or 0 for s in sizes])
    index, low = lf.space.block(co[d], Size(piece), n.name)
    for part, s in zip(parts, sizes, strict=True):
        count = (s or 0) // piece
        if index < count:
            inner = (Const(index, Size(count)), *low) if count > 1 else low
            return lf.lift(part, (*co[:d], inner, *co[d + 1 :]))
        index -= count
    raise AssertionError("a block index outside the joined axis")


@_handles(aten.stack.default)
def _stack(lf: Lifter, n: Node, co: Coords) -> Expr:
    d = _dim(n, 1, len(co))
    index, _ = lf.space.block(co[d], ONE, n.name)
    return lf.lift(n.args[0][index], co[:d] + co[d + 1 :])


@_handles(aten.slice_scatter.default)
def _slice_scatter(lf: Lifter, n: Node, co: Coords) -> Expr:
    base, source = n.args[:2]
    _same_dtype(n, source)
    d, start, step = _bounds(lf, n, 2)
    size, length = lf.sizes.shape(base)[d], lf.sizes.shape(source)[d]
    if length == size:
        return lf.lift(source, co)
    if step != 1:
        return _strided_scatter(lf, n, co, d, start, step)
    if size.known is None or length.known is None:
        raise Refuse(f"{n.name} writes into part of a symbolic axis")
    piece = gcd(size.known, length.known, start)
    index, low = lf.space.block(co[d], Size(piece), n.name)
    index -= start // piece
    count = length.known // piece
    if not 0 <= index < count:
        return lf.lift(base, co)
    inner = (Const(index, Size(count)), *low) if count > 1 else low
    return lf.lift(source, (*co[:d], inner, *co[d + 1 :]))


def _strided_scatter(lf: Lifter, n: Node, co: Coords, d: int, start: int, step: int) -> Expr:
    base, source = n.args[:2]
    length = lf.sizes.shape(source)[d]
    cut = lf.space.take(co[d], Size(step))
    if lf.sizes.shape(base)[d].exactly_divided_by(Size(step)) != length or start >= step or cut is None:
        raise Refuse(f"{n.name} is a strided write that is not one residue of {step}")
    index, _ = lf.space.block(cut[1], ONE, n.name)
    return lf.lift(source, (*co[:d], cut[0], *co[d + 1 :])) if index == start else lf.lift(base, co)


@_handles(aten.select_scatter.default)
def _select_scatter(lf: Lifter, n: Node, co: Coords) -> Expr:
    base, source, d, at = n.args
    _same_dtype(n, source)
    size = lf.sizes.shape(base)[d].known
    index, _ = lf.space.block(co[d], ONE, n.name)
    if at < 0 and size is None:
        raise Refuse(f"{n.name} writes at an index from the end of a symbolic axis")
    d %= len(co)
    written = index == (at + (size or 0) if at < 0 else at)
    return lf.lift(source, co[:d] + co[d + 1 :]) if written else lf.lift(base, co)


def _same_dtype(n: Node, source: Node) -> None:
    if source.meta["val"].dtype != n.meta["val"].dtype:
        raise Refuse(f"{n.name} writes {source.meta['val'].dtype} into {n.meta['val'].dtype}")


CUT = {aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
MULTI_CUT = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
JOIN = {aten.cat.default, aten.stack.default, aten.slice_scatter.default, aten.select_scatter.default}
FLIP = {aten.flip.default, prims.rev.default}
