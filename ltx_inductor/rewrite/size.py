"""Sizes that may be symbolic: exact arithmetic, or "don't know"; never a new guard.

A size is a rational coefficient times a sorted tuple of opaque factors (sympy expressions of SymInts). Two sizes that
are equal for every value of the symbols compare equal as far as the ShapeEnv already knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import reduce
from typing import Any

import sympy
import torch
from torch.fx import Node


class Size:
    """A positive size, immutable. `known` is its value, or None where it depends on a symbol."""

    __slots__ = ("coefficient", "factors")

    def __init__(self, coefficient: int | Fraction, factors: tuple[Any, ...] = ()) -> None:
        self.coefficient = coefficient
        self.factors = factors

    @property
    def known(self) -> int | None:
        return None if self.factors else int(self.coefficient)

    def __mul__(self, other: Size) -> Size:
        if not other.factors:
            return Size(_whole(self.coefficient * other.coefficient), self.factors)
        if not self.factors:
            return other * self
        both = tuple(sorted(self.factors + other.factors, key=str))
        return Size(_whole(self.coefficient * other.coefficient), both)

    def exactly_divided_by(self, other: Size) -> Size | None:
        """self / other where that is certainly a whole number, else None."""
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        if not other.factors:
            return Size(self.coefficient // other.coefficient, self.factors)
        if len(other.factors) > len(self.factors):
            return None
        mine, theirs = Counter(self.factors), Counter(other.factors)
        if theirs - mine:
            return None
        rest = tuple(sorted((mine - theirs).elements(), key=str))
        return Size(self.coefficient // other.coefficient, rest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Size):
            return NotImplemented
        return self.coefficient == other.coefficient and self.factors == other.factors

    def __hash__(self) -> int:
        return hash((self.coefficient, self.factors))

    def __repr__(self) -> str:
        head = [] if self.coefficient == 1 and self.factors else [str(self.coefficient)]
        return "*".join(head + [str(f) for f in self.factors])


ONE = Size(1)
TWO = Size(2)


def _whole(c: int | Fraction) -> int | Fraction:
    return c if type(c) is int or c.denominator != 1 else int(c)


def product(sizes: Iterable[Size]) -> Size:
    return reduce(lambda a, b: a * b, sizes, ONE)


class Sizes:
    """Reads sizes out of a graph, with a cache per expression: what a ShapeEnv knows does not change while we read."""

    def __init__(self) -> None:
        self._cache: dict[Any, Size] = {}
        self._shapes: dict[Node, tuple[Size, ...]] = {}

    def of(self, value: Any) -> Size:
        """The size of an int or a SymInt."""
        if isinstance(value, int):
            return Size(value)
        key = (id(value.node.shape_env), value.node.expr)
        if key not in self._cache:
            self._cache[key] = _factorise(simplify(value))
        return self._cache[key]

    def shape(self, node: Node) -> tuple[Size, ...]:
        """The sizes of a tensor node."""
        found = self._shapes.get(node)
        if found is None:
            found = self._shapes[node] = tuple(self.of(s) for s in node.meta["val"].shape)
        return found

    def numel(self, node: Node) -> Size | None:
        """The number of elements of a tensor node; None for a node that is not a tensor."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        return product(self.shape(node))


def simplify(value: Any) -> sympy.Expr:
    """The expression of a SymInt under what its ShapeEnv already knows.

    numel(x) may be s85 while another node says 2*(s85//2): floor divisions that the ShapeEnv has recorded as exact
    become true ones. Strides carry Max(1, s): a size that is multiplied into a stride that matters is at least 1.
    """
    env = value.node.shape_env
    expr = env.simplify(value.node.expr)

    def exact(e: Any) -> bool:
        name = e.func.__name__
        return name == "CleanDiv" or (name == "FloorDiv" and sympy.Mod(*e.args) in env.divisible)

    def at_least_one(e: Any) -> bool:
        return e.func.__name__ == "Max" and len(e.args) == 2 and e.args[0] == 1

    expr = expr.replace(exact, lambda e: e.args[0] / e.args[1])
    return sympy.factor_terms(expr.replace(at_least_one, lambda e: e.args[1]))


def in_example(value: Any) -> int | None:
    """The size of an int or a SymInt in the call that is compiled; None if that does not tell. Adds no guard."""
    if isinstance(value, int):
        return value
    number = value.node.expr.xreplace(value.node.shape_env.backed_var_to_val)
    return int(number) if number.is_Integer else None


def _factorise(expr: sympy.Expr) -> Size:
    coefficient: Fraction = Fraction(1)
    factors: list[Any] = []
    for term in sympy.Mul.make_args(expr):
        base, power = term.as_base_exp()
        if term.is_Rational:
            coefficient *= Fraction(int(term.p), int(term.q))
        elif power.is_Integer and power > 0:
            factors += [base] * int(power)
        else:
            factors.append(term)
    return Size(_whole(coefficient), tuple(sorted(factors, key=str)))
