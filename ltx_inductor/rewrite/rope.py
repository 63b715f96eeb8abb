"""Reads RMSNorm -> split RoPE off the lifted expressions of one value: a Side, or a refusal.

Nothing here looks at node names, shapes or spellings. With `half` the one digit that needs cases, the two cases must be

    half = 0:   n[0]*cos - n[1]*sin          half = 1:   n[1]*cos + n[0]*sin

where n = RMSNorm(x) is read at the same position of the other half, cos and sin are the same table elements in both
cases, and the roundings are those of one contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from ltx_inductor.contract import Contract, find
from ltx_inductor.rewrite.digits import Atom, Const, Coords, Digits, Refuse, radix
from ltx_inductor.rewrite.expr import (
    DTYPE_NAMES,
    Add,
    Expr,
    Fma,
    Leaf,
    Mul,
    Neg,
    Num,
    contains,
    leaves,
    settled,
    split_sign,
    unrounded,
)
from ltx_inductor.rewrite.lift import NARROW, Lifter, Prover
from ltx_inductor.rewrite.norm import Statistic
from ltx_inductor.rewrite.size import ONE, TWO, Size, product

# How far a reading got; the refusal that got furthest is the one worth reporting.
LIFT, CASES, TERMS, ROLES, DIGITS, TABLES = range(6)


@dataclass(frozen=True)
class Operand:
    """A tensor to read: the digits of every axis (constants are fixed positions), and a sign."""

    node: Node
    coords: Coords
    negated: bool = False


@dataclass
class Side:
    """One RMSNorm -> RoPE chain of one tensor, as read. Digits are shared between all coordinates."""

    statistic: Statistic
    result: Node
    x: Operand
    weight: Operand | None
    cos: Operand
    sin: Operand
    rows: Digits  # token axes of x, in x's order; where the norm is per head, these include the head axis
    heads: Digits  # the head axis inside the normalised row; () where the norm is per head
    half: Atom
    pair: Digits
    out: Coords  # digits of every axis of the result
    contract: Contract

    @property
    def pair_size(self) -> Size:
        """Half of head_dim: the length of a row of cos."""
        return radix(self.pair)


@dataclass(frozen=True)
class Term:
    """One product of a case: sign, rounding of the product, the half of x it reads, norm and table."""

    negative: bool
    rounding: torch.dtype | None
    half: int
    x: Coords
    weight: Leaf | None
    norm_rounding: torch.dtype | None
    table: Leaf


@dataclass(frozen=True)
class Case:
    """A half of the result: the term with its own half of x, and the one with the partner half."""

    rounding: torch.dtype | None
    fused: bool
    own: Term
    partner: Term


class Reader:
    """Reads one candidate. `stage` and `mixes` say how far it got and whether it mixes two elements of x."""

    def __init__(self, lifter: Lifter, statistic: Statistic, result: Node) -> None:
        self.lifter, self.space = lifter, lifter.space
        self.statistic, self.result = statistic, result
        self.name = result.name
        self.x, self.rstd = lifter.x, lifter.rstd
        self.stage = LIFT
        self.mixes = False
        self.foreign: set[Node] = set()  # leaves other than x and rstd

    def read(self) -> Side:
        """Raises Refuse with the first thing that is not as it must be."""
        out, cases = self.lifter.cases(self.result)
        self.stage = CASES
        self.mixes = any(len({f.coords for f in leaves(e) if f.node is self.x}) > 1 for _, e in cases)
        self.foreign = {f.node for _, e in cases for f in leaves(e)} - {self.x, self.rstd}
        atoms = {a for case, _ in cases for a in case}
        if len(cases) != 2 or len(atoms) != 1:
            raise Refuse(
                f"{self.name} is put together from {len(cases)} different pieces of {self.x.name}; a split rotation "
                "has one for each half of a head",
                expected="two pieces, the first and the second half of every head",
                hint="partial rotary and multi-axis RoPE are not covered",
            )
        half = atoms.pop()
        self.stage = TERMS
        read = []
        for case, e in cases:
            self.space.case = case
            read.append(self._case(case[half], e))
        self.space.case = {}
        return self._assemble(out, half, read[0], read[1])

    # ---- one case

    def _case(self, value: int, e: Expr) -> Case:
        if isinstance(e, Neg):
            raise Refuse(f"{self.name} negates the sum of its products", expected="signs on the tables, not on the sum")
        rounding, e = unrounded(e)
        stored = self.result.meta["val"].dtype
        if (rounding or torch.float32) != stored:
            raise Refuse(f"{self.name} is rounded to {_dt(rounding)} but stored as {_dt(stored)}")
        if isinstance(e, Add):
            terms = [self._term(e.a), self._term(e.b)]
        elif isinstance(e, Fma):
            terms = [self._term(e.c), self._product(e.minus, None, e.a, e.b)]
        else:
            raise Refuse(f"{self.name} computes {_short(e)}", expected="a sum of two products")
        if terms[0].half == terms[1].half:
            raise Refuse(
                f"both products of {self.name} read half {terms[0].half} of {self.x.name}",
                expected="one product of each half",
            )
        own, partner = sorted(terms, key=lambda t: t.half != value)
        if isinstance(e, Fma) and own is terms[1]:
            raise Refuse(
                f"{self.name} fuses the product with cos into the sum and rounds the product with sin",
                expected="x*cos rounded first, then one fma with sin",
            )
        return Case(rounding, isinstance(e, Fma), own, partner)

    def _term(self, e: Expr) -> Term:
        negative, e = split_sign(e)
        rounding, e = unrounded(e)
        if not isinstance(e, Mul):
            raise Refuse(f"{self.name} adds {_short(e)}", expected="the product of a normalised value and a table")
        return self._product(negative, rounding, e.a, e.b)

    def _product(self, negative: bool, rounding: torch.dtype | None, a: Expr, b: Expr) -> Term:
        if contains(a, self.x) == contains(b, self.x):
            count = "two factors" if contains(a, self.x) else "no factor"
            raise Refuse(f"{self.name} multiplies {_short(a)} by {_short(b)}: {count} with {self.x.name}")
        n, table = (a, b) if contains(a, self.x) else (b, a)
        flip_n, n = split_sign(n)
        flip_t, table = split_sign(table)
        if not isinstance(table, Leaf) or table.node is self.rstd:
            raise Refuse(
                f"{self.name} multiplies the normalised value by {_short(table)}, which is no element of a cos or sin "
                "table",
            )
        coords, weight, norm_rounding = self._norm(n)
        fixed = [d for d in self.space.flat(coords) if isinstance(d, Const)]
        if len(fixed) != 1 or fixed[0].size != TWO:
            raise Refuse(
                f"{self.name} reads {self.x.name} at fixed positions {fixed}",
                expected="exactly one fixed digit, the half of the head",
                hint="partial rotary (a rotation of only a part of each head) is not covered",
            )
        table = Leaf(table.node, tuple(self.space.resolve(axis) for axis in table.coords))
        negative = negative ^ flip_n ^ flip_t
        return Term(negative, rounding, fixed[0].value, coords, weight, norm_rounding, table)

    # ---- the normalised value

    def _norm(self, e: Expr) -> tuple[Coords, Leaf | None, torch.dtype | None]:
        """(coordinates of x, weight, rounding) of weight * (x * rstd)."""
        whole = e
        rounding, e = unrounded(settled(e))
        if not isinstance(e, Mul):
            raise Refuse(f"{self.name} rotates {_short(whole)}", expected=f"the RMS-normalised {self.x.name}")
        weight = None
        scaled = self._scaled(e)
        if scaled is None:
            e, weight = self._weighted(e)
            scaled = self._scaled(e)
        if scaled is None:
            raise Refuse(
                f"{self.name} rotates {_short(whole)}",
                expected=f"weight * ({self.x.name} * {self.rstd.name}), with nothing in between",
                hint="a scale or another op between norm and rotation changes the roundings: apply it after",
            )
        xs, rs = scaled
        outer = [c for i, c in enumerate(xs.coords) if i not in self.statistic.dims]
        if self.space.flat(rs.coords) != self.space.flat(outer):
            raise Refuse(f"{self.name}: the statistic is that of another token than the element it scales")
        if weight is not None:
            weight = self._aligned_weight(weight, xs.coords)
        return tuple(self.space.resolve(c) for c in xs.coords), weight, rounding

    def _scaled(self, e: Expr) -> tuple[Leaf, Leaf] | None:
        """The leaves of x * rstd, in either order."""
        if isinstance(e, Mul) and isinstance(e.a, Leaf) and isinstance(e.b, Leaf):
            for a, b in ((e.a, e.b), (e.b, e.a)):
                if a.node is self.x and b.node is self.rstd:
                    return a, b
        return None

    def _weighted(self, e: Mul) -> tuple[Expr, Leaf]:
        scaled, weight = (e.a, e.b) if contains(e.a, self.x) else (e.b, e.a)
        if isinstance(weight, Add) and any(isinstance(t, Num) for t in (weight.a, weight.b)):
            raise Refuse(
                f"{self.name}: the norm multiplies by {_short(weight)}",
                expected="a plain weight",
                hint="fold the constant into the weight when the model is loaded",
            )
        if not isinstance(weight, Leaf) or weight.node is self.rstd:
            raise Refuse(
                f"{self.name}: the norm of {self.x.name} is multiplied by {_short(weight)}",
                expected="a weight vector",
            )
        early, scaled = unrounded(scaled)
        if early is not None:
            raise Refuse(
                f"{self.name}: the norm of {self.x.name} is rounded to {_dt(early)} before the weight "
                f"{weight.node.name}",
                expected="one rounding, after the weight, as torch.rms_norm does",
            )
        return scaled, weight

    def _aligned_weight(self, weight: Leaf, x: Coords) -> Leaf:
        """The weight with coordinates (fixed leading digits), (the normalised digits)."""
        normed = self.space.flat(x[i] for i in self.statistic.dims)
        cut = self.space.take(self.space.flat(weight.coords), radix(normed))
        if cut is None or self.space.resolve(cut[1]) != normed or any(isinstance(d, Atom) for d in cut[0]):
            raise Refuse(
                f"{self.name}: weight {weight.node.name} is indexed by {list(self.space.flat(weight.coords))}",
                expected=f"the normalised axis, {list(normed)}",
            )
        return Leaf(weight.node, tuple(self.space.resolve(c) for c in weight.coords))

    # ---- both cases together

    def _assemble(self, out: Coords, half: Atom, first: Case, second: Case) -> Side:
        self.stage = ROLES
        terms = (first.own, first.partner, second.own, second.partner)
        contract = self._contract(first, second, terms, self._before_cast(terms[0].x).node.meta["val"].dtype)
        if first.own.negative != second.own.negative or first.partner.negative == second.partner.negative:
            raise Refuse(
                f"{self.name}: the signs are those of a reflection, not of a rotation",
                expected="n0*cos - n1*sin in one half and n1*cos + n0*sin in the other",
            )
        cos = self._table("cos", first.own.table, second.own.table, half)
        sin = self._table("sin", first.partner.table, second.partner.table, half)
        weights = {self._without_half(t.weight, half) for t in terms}
        if len(weights) != 1:
            raise Refuse(f"{self.name}: the two halves are normalised with different weights")
        self.stage = DIGITS
        x = {tuple(self._free(c, half) for c in t.x) for t in terms}
        if len(x) != 1:
            raise Refuse(f"{self.name}: the partner is not at the same position of the other half")
        coords = x.pop()
        rows, normed = self._axes(coords)
        if half not in normed:
            raise Refuse(f"{self.name}: the halves do not lie on the normalised axis of {self.x.name}")
        k = normed.index(half)
        heads, pair = normed[:k], normed[k + 1 :]
        out = tuple(self.space.resolve(c) for c in out)
        flat = [d for c in out for d in c]
        if len(flat) != len(set(flat)) or set(flat) != set(rows + normed):
            raise Refuse(
                f"{self.name} has the digits {flat}", expected=f"those of {self.x.name}, {list(rows + normed)}"
            )
        self.stage = TABLES
        for what, table in (("cos", cos), ("sin", sin)):
            self._check_table(what, table, half, pair)
        leaf = weights.pop()
        source = self._before_cast(coords)
        return Side(
            statistic=self.statistic,
            result=self.result,
            x=Operand(source.node, source.coords),
            weight=Operand(leaf[0], leaf[1]) if leaf else None,
            cos=Operand(cos.node, cos.coords, first.own.negative),
            sin=Operand(sin.node, sin.coords, not first.partner.negative),
            rows=rows,
            heads=heads,
            half=half,
            pair=pair,
            out=out,
            contract=contract,
        )

    def _before_cast(self, coords: Coords) -> Leaf:
        """x at these coordinates; where x is a view of a value cast to fp32, the element of that value."""
        if self.x.meta["val"].dtype == torch.float32:
            root = self.lifter.source_of(self.x, coords)
            if isinstance(root, Leaf) and root.node.meta["val"].dtype in NARROW:
                return Leaf(root.node, tuple(self.space.resolve(c) for c in root.coords))
        return Leaf(self.x, coords)

    def _contract(self, first: Case, second: Case, terms: Iterable[Term], x: torch.dtype) -> Contract:
        terms = tuple(terms)
        if (
            first.rounding != second.rounding
            or first.fused != second.fused
            or first.own.rounding != second.own.rounding
            or first.partner.rounding != second.partner.rounding
            or len({t.norm_rounding for t in terms}) != 1
        ):
            raise Refuse(f"{self.name}: the two halves are rounded differently")
        norm, own, partner = terms[0].norm_rounding, first.own.rounding, first.partner.rounding
        if x not in NARROW:
            raise Refuse(f"{self.x.name} is {_dt(x)}", expected="bf16 or fp16 activations")
        if partner is not None:
            raise Refuse(
                f"{self.name} rounds n*cos to {_dt(own)}, n*sin to {_dt(partner)} and their sum to "
                f"{_dt(first.rounding)}",
                expected="at most two roundings after the norm",
                hint="compute the rotation in fp32, or write it with addcmul_",
            )
        odd = [d for d in (norm, own, first.rounding) if d not in (None, x)]
        if odd:
            raise Refuse(f"{self.name} rounds to {_dt(odd[0])} on the way", expected=f"{_dt(x)}, the dtype of x")
        for weight in (t.weight for t in terms):
            dtype = x if weight is None else weight.node.meta["val"].dtype
            if dtype != x:
                assert weight is not None
                raise Refuse(
                    f"the norm's weight {weight.node.name} is {_dt(dtype)}, {self.x.name} is {_dt(x)}",
                    expected=f"a weight in {_dt(x)}",
                    hint="cast the norm to the dtype of the activations when the model is loaded",
                )
        tables = {t.table.node.meta["val"].dtype for t in terms}
        if len(tables) != 1 or not tables <= {x, torch.float32}:
            raise Refuse(
                f"cos and sin are {' and '.join(sorted(_dt(t) for t in tables))}",
                expected=f"both {_dt(x)} or both fp32",
            )
        if own is not None and tables != {x}:
            raise Refuse(f"{self.name} rounds a product with an fp32 table to {_dt(own)}")
        contract = find(
            narrow_norm=norm is not None,
            narrow_product=own is not None,
            fused_sum=first.fused,
            narrow_result=first.rounding is not None,
        )
        if contract is None:
            raise Refuse(
                f"{self.name} rounds the norm to {_dt(norm)}, n*cos to {_dt(own)}, the sum to {_dt(first.rounding)}"
                f" ({'one fma' if first.fused else 'product and sum apart'})",
                expected="the roundings of one of the known contracts",
            )
        return contract

    def _table(self, what: str, a: Leaf, b: Leaf, half: Atom) -> Leaf:
        """The table of both halves. A full-width table is one table only if its two halves are provably equal."""
        if a == b:
            return a
        one = (a.node, tuple(self._free(c, half, 0) for c in a.coords))
        other = (b.node, tuple(self._free(c, half, 1) for c in b.coords))
        if one != other:
            raise Refuse(
                f"{self.name}: {what} of the first half is {a}, of the second {b}",
                expected="the same table element for both halves",
            )
        if not self._provably_equal(a, b):
            raise Refuse(
                f"{self.name}: {a.node.name} holds a {what} for both halves, which cannot be proved equal from the "
                "graph",
                expected="one table element for both halves",
                hint=f"pass {what} of half the width, or build it as cat([freqs, freqs]) inside the compiled model",
            )
        return a

    def _provably_equal(self, a: Leaf, b: Leaf) -> bool:
        prover = Prover(self.lifter)
        try:
            return prover.lift(a.node, a.coords) == prover.lift(b.node, b.coords)
        except Refuse:
            return False

    def _check_table(self, what: str, table: Leaf, half: Atom, pair: Digits) -> None:
        atoms = [d for c in table.coords for d in self.space.resolve(c) if isinstance(d, Atom)]
        if len(atoms) != len(set(atoms)) or half in atoms:
            raise Refuse(f"{self.name}: {what} table {table.node.name} is indexed by {atoms}")
        interleaved = not pair  # the half is the least significant digit: the two of a pair are neighbours
        if interleaved or tuple(d for d in atoms if d in pair) != pair:
            raise Refuse(
                f"{self.name}: {what} table {table.node.name} is indexed by {atoms}, the pairs of a head by "
                f"{list(pair)}" + (": interleaved RoPE, where neighbours are rotated together" if interleaved else ""),
                expected="one table element per pair, in order, halves apart (split RoPE)",
            )
        self._check_foreign(what, table)

    def _check_foreign(self, what: str, table: Leaf) -> None:
        """A table is nothing that the norm itself is made of."""
        chain, todo = {self.statistic.rstd}, [self.statistic.rstd]
        while todo:
            for a in todo.pop().all_input_nodes:
                if a is not self.statistic.x and a not in chain:
                    chain.add(a)
                    todo.append(a)
        if table.node in chain or table.node is self.x:
            raise Refuse(f"{self.name}: {what} table {table.node.name} is part of the norm itself")

    def _axes(self, coords: Coords) -> tuple[Digits, Digits]:
        """(digits of the token axes, digits of the normalised axes)."""
        dims = self.statistic.dims
        if dims != tuple(range(len(coords) - len(dims), len(coords))):
            raise Refuse(
                f"the norm of {self.x.name} is over axes {list(dims)} of {len(coords)}", expected="the last axis"
            )
        return self.space.flat(coords[: dims[0]]), self.space.flat(coords[dims[0] :])

    def _free(self, axis: Digits, half: Atom, value: int | None = None) -> Digits:
        """The axis with its half digit free again: x has exactly one constant; in a table it has the case's value."""
        fixed = Const(value or 0, TWO)
        return tuple(
            half if isinstance(d, Const) and (value is None or d == fixed) else d for d in self.space.resolve(axis)
        )

    def _without_half(self, weight: Leaf | None, half: Atom) -> tuple[Node, Coords] | None:
        """The weight with its half digit free again; digits in front of the normalised ones are a fixed row."""
        if weight is None:
            return None
        left = product(self.lifter.sizes.shape(self.x)[d] for d in self.statistic.dims)
        out: list[Digits] = []
        for axis in reversed(weight.coords):
            whole = left.exactly_divided_by(radix(self.space.resolve(axis)))
            cut = ((), axis) if whole is not None else self.space.take(axis, left)
            if cut is None:
                raise Refuse(f"{self.name}: weight {weight.node.name} is not read half by half")
            inside = (half if isinstance(d, Const) else d for d in self.space.resolve(cut[1]))
            out.append((*cut[0], *inside))
            left = whole or ONE
        return weight.node, tuple(out[::-1])


def _dt(dtype: torch.dtype | None) -> str:
    return DTYPE_NAMES.get(dtype or torch.float32, str(dtype))


def _short(e: Expr, limit: int = 120) -> str:
    text = str(e)
    return text if len(text) <= limit else text[: limit - 3] + "..."
