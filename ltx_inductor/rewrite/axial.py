"""Reads RMSNorm -> scale -> RoPE over several token axes off one join: an AxialSide, or a refusal.

The head is cut into pieces, one for every axis of the rotation, and each piece is turned by angles of its own:

    n = RMSNorm(x) * scale        result = cat([turned(n[..., :a]), turned(n[..., a:b]), ...], -1)

Two readings: of n, over x and its statistic, and of every piece, over the slice of n that it is computed from. Within a
piece any spelling will do (rewrite/rope.py reads it); what is cut and joined must be slices of n, in order.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ltx_inductor.contract import Contract, lookup
from ltx_inductor.rewrite.axes import Plan, plan
from ltx_inductor.rewrite.digits import Coords, Digits, NeedCase, Refuse, radix
from ltx_inductor.rewrite.expr import Expr, Leaf, Mul, Neg, Num, contains, settled, unrounded
from ltx_inductor.rewrite.layout import JOIN, argument, aten
from ltx_inductor.rewrite.lift import ARITHMETIC, CAST, Lifter
from ltx_inductor.rewrite.norm import Statistic
from ltx_inductor.rewrite.region import computed_inside, reached_inside
from ltx_inductor.rewrite.rope import Operand, Reader
from ltx_inductor.rewrite.size import ONE
from ltx_inductor.rewrite.view import GraphView


@dataclass(frozen=True)
class Cut:
    """A slice of the last axis of `source`, elements start to stop, as the graph value `node`."""

    node: Node
    source: Node
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """The tables of one axis of the rotation, as [*tokens, 1, pairs] with 1 where a table does not vary."""

    pairs: int
    cos: Plan
    sin: Plan
    contract: Contract


@dataclass(frozen=True)
class AxialSide:
    """One chain of one tensor, as read. result: the value that the op's result replaces."""

    statistic: Statistic
    result: Node
    weight: Plan | None
    scale: float
    pieces: tuple[Piece, ...]

    @property
    def x(self) -> Node:
        return self.statistic.x

    @property
    def contract(self) -> Contract:
        return self.pieces[0].contract

    @property
    def pairs(self) -> tuple[int, ...]:
        """Pairs of elements that every axis of the rotation has."""
        return tuple(p.pairs for p in self.pieces)

    @property
    def tables(self) -> list[Node]:
        return [t.node for p in self.pieces for t in (p.cos, p.sin)]


def candidates(view: GraphView, st: Statistic, region: set[Node]) -> Iterator[Node]:
    """Joins of at least two pieces that are each computed from one slice of the normalised value, with a table."""
    size = view.sizes.numel(st.x)
    for n in sorted(region & view.live, key=view.order.__getitem__):
        if n.target is not aten.cat.default or view.sizes.numel(n) != size:
            continue
        parts = n.args[0]
        if len(parts) > 1 and all(p in region and _is_turned(view, p, size, region) for p in parts):
            yield n


def _is_turned(view: GraphView, part: Node, size: object, region: set[Node]) -> bool:
    """Is a part computed from one slice of a whole value, joined of pieces, with an operand from outside?"""
    inside = computed_inside(part, region)
    wholes = {n for n in inside if view.sizes.numel(n) == size}
    cuts = {view.same(n) for n in inside - wholes if any(a in wholes for a in n.all_input_nodes)}
    joined = any(n.target in JOIN for n in inside - wholes)
    table = any(n.target in ARITHMETIC and not set(n.all_input_nodes) <= inside for n in inside - wholes)
    return len(cuts) == 1 and joined and table


def read(view: GraphView, st: Statistic, region: set[Node], join: Node) -> AxialSide:
    """Raises Refuse with the first thing that is not as it must be."""
    axis, rank = argument(join, 1, "dim", 0), len(view.sizes.shape(join))
    if axis % rank != rank - 1:
        raise Refuse(f"{join.name} joins the parts of the rotation along axis {axis}", expected="the last axis")
    if not 3 <= rank <= 6:
        raise Refuse(f"{join.name} has {rank} axes", expected="[*tokens, heads, head_dim] with 1 to 4 token axes")
    cuts = [_cut(view, part, region) for part in join.args[0]]
    sources = {view.same(c.source): c.source for c in cuts}
    if len(sources) != 1:
        raise Refuse(
            f"{join.name} joins parts of {len(sources)} values, {', '.join(n.name for n in sources.values())}",
            expected="parts of one normalised value",
        )
    source = next(iter(sources.values()))
    ends = [0, *(c.stop for c in cuts)]
    if [c.start for c in cuts] != ends[:-1] or view.sizes.shape(source)[-1].known != ends[-1]:
        raise Refuse(
            f"{join.name} joins elements {', '.join(f'{c.start}:{c.stop}' for c in cuts)} of {source.name}",
            expected="every element of a head once, in order",
        )
    norm, result = _NormReader(view, st, region, source), _result(view, st, join)
    pieces = tuple(
        _PieceReader(view, region, cut, part, norm).piece(result.meta["val"].dtype)
        for cut, part in zip(cuts, join.args[0], strict=True)
    )
    contracts = {p.contract.name for p in pieces}
    if len(contracts) != 1:
        raise Refuse(f"{join.name}: the axes are rounded differently: {', '.join(sorted(contracts))}")
    contract = lookup(contracts.pop())
    if contract.narrow_product or not (contract.narrow_norm and contract.narrow_result):
        raise Refuse(
            f"{join.name} is rounded so: {contract.describe()}", expected="norm 16-bit, n*cos fp32, result 16-bit"
        )
    dtypes = {str(t.node.meta["val"].dtype) for p in pieces for t in (p.cos, p.sin)}
    if len(dtypes) != 1:
        raise Refuse(
            f"{join.name}: cos and sin of the axes are {' and '.join(sorted(dtypes))}",
            expected="one dtype for all axes",
        )
    return AxialSide(st, result, norm.weight, norm.scale, pieces)


def _cut(view: GraphView, part: Node, region: set[Node]) -> Cut:
    """The slice that a part is computed from."""
    size = view.sizes.numel(part)
    for n in sorted(computed_inside(part, region), key=view.order.__getitem__):
        found = _as_cut(view, n)
        if found and view.sizes.numel(n) == size:
            return found
    raise Refuse(
        f"{part.name} is computed from no slice of the last axis of the normalised value",
        expected="a slice of neighbouring elements for every axis of the rotation",
    )


def _as_cut(view: GraphView, n: Node) -> Cut | None:
    if n.target is aten.slice.Tensor:
        source, start, stop = n.args[0], argument(n, 2, "start", 0), argument(n, 3, "end", None)
        axis, step = argument(n, 1, "dim", 0), argument(n, 4, "step", 1)
        if not all(b is None or isinstance(b, int) for b in (start, stop)):
            return None
    elif n.target is operator.getitem and n.args[0].target in (aten.split_with_sizes.default, aten.split.Tensor):
        source, axis, step = n.args[0].args[0], argument(n.args[0], 2, "dim", 0), 1
        sizes = [part.shape[axis] for part in n.args[0].meta["val"]]
        if not all(isinstance(size, int) for size in sizes):
            return None
        start, stop = sum(sizes[: n.args[1]]), sum(sizes[: n.args[1] + 1])
    else:
        return None
    shape = view.sizes.shape(source)
    length = shape[-1].known
    if axis % len(shape) != len(shape) - 1 or step != 1 or length is None:
        return None
    start, stop, _ = slice(start, stop).indices(length)
    outer = _as_cut(view, source)  # a slice of a slice
    return Cut(n, outer.source, outer.start + start, outer.start + stop) if outer else Cut(n, source, start, stop)


def _result(view: GraphView, st: Statistic, join: Node) -> Node:
    """The join, or the cast of it to the dtype of x."""
    readers = [u for u in join.users if u in view.live]
    one = readers[0] if len(readers) == 1 and join.meta["val"].dtype == torch.float32 else None
    cast = one is not None and one.target in CAST and one.meta["val"].dtype == st.x.meta["val"].dtype
    return one if one is not None and cast else join


class _NormReader(Reader):
    """Reads the value that is cut: weight, scale and rounding of the norm of x."""

    def __init__(self, view: GraphView, st: Statistic, region: set[Node], source: Node) -> None:
        super().__init__(Lifter(view, st.x, st.rstd, region), st, source)
        coords = tuple(self.space.axis(size) for size in view.sizes.shape(source))
        try:
            e = self.lifter.lift(source, coords)
        except NeedCase:
            raise Refuse(f"{source.name} is put together from several pieces before it is rotated") from None
        e, self.scale = self._unscaled(e)
        xs, self.leaf, self.rounding = self._norm(e)
        if xs != tuple(self.space.resolve(c) for c in coords):
            raise Refuse(
                f"{source.name} has the axes of {st.x.name} in another order, or cut differently",
                expected="axes that stay as they are from the norm to the rotation",
            )
        _, normed = self._axes(xs)
        if st.dims != (len(xs) - 1,):
            raise Refuse(f"the norm of {st.x.name} is over {len(st.dims)} axes", expected="a norm of every head")
        self.weight = plan(Operand(self.leaf.node, self.leaf.coords), [normed]) if self.leaf else None

    def _unscaled(self, e: Expr) -> tuple[Expr, float]:
        """(the norm, what it is multiplied by and rounded again)."""
        if isinstance(e, Neg):  # exact, before or after the rounding
            norm, scale = self._unscaled(e.of)
            return norm, -scale
        rounding, product = unrounded(settled(e))
        if not isinstance(product, Mul) or not isinstance(product.b if contains(product.a, self.x) else product.a, Num):
            return e, 1.0
        norm, factor = (product.a, product.b) if contains(product.a, self.x) else (product.b, product.a)
        inner, _ = unrounded(norm)
        if rounding is None or inner != rounding:
            raise Refuse(
                f"{self.name} scales the norm by {factor} before it is rounded",
                expected="a norm that is rounded, then scaled, then rounded",
            )
        assert isinstance(factor, Num)
        scale = float(factor.value)
        if factor is product.a and not _is_narrow(scale, rounding):
            raise Refuse(
                f"{self.name} multiplies {factor} by the norm: with the number first, eager rounds it too on the CPU",
                expected="the norm times a number",
            )
        return norm, scale


def _is_narrow(value: float, dtype: torch.dtype) -> bool:
    """Is it a number of that 16-bit dtype? (No tensor is asked: the pass runs where all of them are fake.)"""
    try:
        if dtype == torch.float16:
            return bool(struct.unpack("<e", struct.pack("<e", value))[0] == value)
        bits = struct.pack("<f", value)
        return bits[:2] == b"\0\0" and struct.unpack("<f", bits)[0] == value
    except OverflowError:
        return False


class _PieceReader(Reader):
    """Reads the part of one axis over the slice that it is computed from, which stands for the normalised value."""

    def __init__(self, view: GraphView, region: set[Node], cut: Cut, part: Node, norm: _NormReader) -> None:
        inside = computed_inside(part, region)
        slices = [n for n in inside if view.same(n) is view.same(cut.node)]
        derived = {n for s in slices for n in reached_inside(s, inside)}
        super().__init__(Lifter(view, cut.node, norm.statistic.rstd, derived), norm.statistic, part)
        self._cut, self._norm_reader = cut, norm

    def _norm(self, e: Expr) -> tuple[Coords, Leaf | None, torch.dtype | None]:
        if not isinstance(settled(e), Leaf):
            raise Refuse(f"{self.name} rotates {e}", expected=f"the elements of {self.x.name} as they are")
        leaf = settled(e)
        assert isinstance(leaf, Leaf)
        return tuple(self.space.resolve(c) for c in leaf.coords), self._norm_reader.leaf, self._norm_reader.rounding

    def piece(self, result: torch.dtype) -> Piece:
        """result: the dtype that the rotation is rounded to at last. Raises Refuse."""
        out, cases = self.lifter.cases(self.result)
        atoms = {a for case, _ in cases for a in case}
        if len(cases) != 2 or len(atoms) != 1:
            raise Refuse(
                f"{self.name} is put together from {len(cases)} different pieces of {self.x.name}",
                expected="two, the even and the odd elements",
            )
        half = atoms.pop()
        read = []
        for case, e in cases:
            self.space.case = case
            found = self._case(case[half], e)
            read.append(replace(found, rounding=None if result == torch.float32 else found.rounding or result))
        self.space.case = {}
        first, second = read
        terms = (first.own, first.partner, second.own, second.partner)
        contract = self._contract(first, second, terms, self.statistic.x.meta["val"].dtype)
        if first.own.negative != second.own.negative or first.partner.negative == second.partner.negative:
            raise Refuse(
                f"{self.name}: the signs are those of a reflection, not of a rotation",
                expected="a*cos - b*sin for the even and b*cos + a*sin for the odd elements",
            )
        coords = {tuple(self._free(c, half) for c in t.x) for t in terms}
        if coords != {tuple(self.space.resolve(c) for c in out)}:
            raise Refuse(
                f"{self.name} has the elements of {self.x.name} at other places",
                expected="every element where it was",
            )
        *axes, last = coords.pop()
        if last[-1:] != (half,):
            raise Refuse(
                f"{self.name} rotates elements of {self.x.name} that lie half of it apart",
                expected="neighbours that are rotated together",
                hint="halves that lie apart (split RoPE) are covered for one axis only",
            )
        pairs = radix(last[:-1]).known
        assert pairs is not None  # the bounds of the slice are numbers
        tables = (
            ("cos", first.own.table, second.own.table, first.own.negative),
            ("sin", first.partner.table, second.partner.table, not first.partner.negative),
        )
        cos, sin = (
            self._planned(what, self._table(what, a, b, half), [*axes, last[:-1]], negated)
            for what, a, b, negated in tables
        )
        return Piece(pairs, cos, sin, contract)

    def _planned(self, what: str, table: Leaf, groups: Sequence[Digits], negated: bool) -> Plan:
        self._check_foreign(what, table)
        found = plan(Operand(table.node, table.coords, negated), groups)
        if any(size != ONE for size in found.groups[-2]):  # of size 1 where there is one head
            raise Refuse(
                f"{self.name}: {what} table {table.node.name} differs from head to head",
                expected="one for all",
                hint="the heads are the last axis but one: they move in front of the tokens after the rotation",
            )
        return found
