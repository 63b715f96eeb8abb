"""Expressions of one element: what an eager chain computes, with every rounding written out.

Every arithmetic node is one fp32 operation; a rounding to 16 bits is a node of its own, a widening is nothing. The
constructors normalise only what is exact in bits: a minus sign passes products and roundings, but not sums
(-(a - a) is -0, (-a) + a is +0); x*1 is x; rounding twice to one dtype is rounding once. There is no distributivity,
no x + 0 and no reordering of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ltx_inductor.rewrite.digits import Coords, Refuse

MAX_TERMS = 64  # operations and leaves of one expression, as a tree; a rotation has about 20
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Leaf:
    """The element at `coords` of a graph value."""

    node: Node
    coords: Coords

    def __str__(self) -> str:
        return f"{self.node.name}[{', '.join(str(d) for axis in self.coords for d in axis)}]"


@dataclass(frozen=True)
class Num:
    value: Any

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Neg:
    of: Expr
    terms: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"-{self.of}"


@dataclass(frozen=True)
class Mul:
    """a*b in fp32. `in_addcmul`: the product inside an addcmul that torch 2.11 decomposed; its sum makes it an Fma."""

    a: Expr
    b: Expr
    in_addcmul: bool = False
    terms: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"({self.a} * {self.b})"


@dataclass(frozen=True)
class Add:
    a: Expr
    b: Expr
    terms: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"({self.a} + {self.b})"


@dataclass(frozen=True)
class Fma:
    """c + a*b, or c - a*b where `minus`, rounded once."""

    a: Expr
    b: Expr
    c: Expr
    minus: bool
    terms: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"fma({'-' if self.minus else ''}{self.a}, {self.b}, {self.c})"


@dataclass(frozen=True)
class Round:
    dtype: torch.dtype
    of: Expr
    terms: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{DTYPE_NAMES.get(self.dtype, self.dtype)}({self.of})"


@dataclass(frozen=True)
class Apply:
    """An uninterpreted pointwise function: equal where function and arguments are."""

    name: str
    args: tuple[Any, ...]
    terms: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"


Expr = Leaf | Num | Neg | Mul | Add | Fma | Round | Apply


def _terms(*parts: Any) -> int:
    """Size as a tree of an operation on `parts`, which may share subtrees: everything that reads them walks the tree.

    Raises Refuse beyond MAX_TERMS: n = n*g + n a few times over doubles the tree each time.
    """
    total = 1 + sum(getattr(p, "terms", 1) for p in parts)
    if total > MAX_TERMS:
        raise Refuse(f"more than {MAX_TERMS} operations lie between the norm and the result, a rotation has about 20")
    return total


def apply(name: str, args: tuple[Any, ...]) -> Expr:
    return Apply(name, args, _terms(*args))


def neg(e: Expr) -> Expr:
    return e.of if isinstance(e, Neg) else Neg(e, _terms(e))


def split_sign(e: Expr) -> tuple[bool, Expr]:
    """(is it negated, the rest)."""
    return (True, e.of) if isinstance(e, Neg) else (False, e)


def mul(a: Expr, b: Expr, in_addcmul: bool = False) -> Expr:
    for p, q in ((a, b), (b, a)):
        if isinstance(q, Num) and q.value == 1:
            return p
        if isinstance(q, Num) and q.value == -1:
            return neg(p)
    sa, a = split_sign(a)
    sb, b = split_sign(b)
    e = Mul(settled(a), settled(b), in_addcmul, _terms(a, b))
    return neg(e) if sa != sb else e


def add(a: Expr, b: Expr, in_addcmul: bool = False) -> Expr:
    """a + b. `in_addcmul`: the sum inside a decomposed addcmul, which eager computes as one fma."""
    for p, q in ((a, b), (b, a)):
        minus, m = split_sign(q)
        if in_addcmul and isinstance(m, Mul) and m.in_addcmul:
            return Fma(m.a, m.b, settled(p), minus, _terms(m, p))
    return Add(settled(a), settled(b), _terms(a, b))


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    sa, a = split_sign(a)
    sb, b = split_sign(b)
    return Fma(settled(a), settled(b), settled(c), sa != sb, _terms(a, b, c))


def rounded(dtype: torch.dtype, e: Expr) -> Expr:
    """e as a value of that dtype; fp32 is the dtype of every operation and rounds nothing."""
    if dtype == torch.float32:
        return e
    e = settled(e)
    if isinstance(e, Neg):
        return neg(rounded(dtype, e.of))
    if (isinstance(e, Round) and e.dtype == dtype) or (isinstance(e, Leaf) and e.node.meta["val"].dtype == dtype):
        return e
    return Round(dtype, e, _terms(e))


def settled(e: Expr) -> Expr:
    """A product whose sum never came is an ordinary product."""
    sign, m = split_sign(e)
    if isinstance(m, Mul) and m.in_addcmul:
        m = Mul(m.a, m.b, terms=m.terms)
        return neg(m) if sign else m
    return e


def unrounded(e: Expr) -> tuple[torch.dtype | None, Expr]:
    """(dtype of the outermost rounding or None, what was rounded)."""
    return (e.dtype, e.of) if isinstance(e, Round) else (None, e)


def children(e: Any) -> tuple[Any, ...]:
    if isinstance(e, (Mul, Add)):
        return (e.a, e.b)
    if isinstance(e, Fma):
        return (e.a, e.b, e.c)
    if isinstance(e, (Neg, Round)):
        return (e.of,)
    return e.args if isinstance(e, Apply) else ()


def leaves(e: Any) -> Iterator[Leaf]:
    """All leaves, left to right, with repetitions."""
    if isinstance(e, Leaf):
        yield e
    for child in children(e):
        yield from leaves(child)


def contains(e: Expr, node: Node) -> bool:
    return any(leaf.node is node for leaf in leaves(e))
