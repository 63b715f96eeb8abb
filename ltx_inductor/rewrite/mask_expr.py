"""Integer expressions over the digits of positions in a grid: what a mask computes, as mask_reader.py reads it.

A flat position is a number of mixed radix, whose digits are the coordinates t, h, w. Linear arithmetic on digits stays
linear; all else (clamps, comparisons, logic) is a function of the digits that it reads, evaluated on all their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ltx_inductor.rewrite.digits import Refuse

Digit = tuple[str, int]
"""("q" or "kv", number of the digit, the most significant first)."""


@dataclass(frozen=True)
class Linear:
    """constant + sum of coefficient * digit; exact integers."""

    constant: int
    terms: tuple[tuple[Digit, int], ...] = ()

    @property
    def digits(self) -> frozenset[Digit]:
        return frozenset(d for d, _ in self.terms)


@dataclass(frozen=True)
class Apply:
    """A function, elementwise, of expressions. name is "and", "or", "not" for logic, else of no importance."""

    name: str
    function: Callable[..., Tensor]
    args: tuple[Expr, ...]
    digits: frozenset[Digit]


Expr = Linear | Apply
ZERO = Linear(0)


def evaluate(e: Expr, digits: Mapping[Digit, Tensor]) -> Tensor:
    """The values of an expression where its digits have the given values, which broadcast; int64, truth values bool.

    Raises Refuse where a value leaves the range of int32, in which the mask is computed.
    """
    done: dict[int, Tensor] = {}

    def value(e: Expr) -> Tensor:
        if id(e) not in done:
            if isinstance(e, Linear):
                result = torch.tensor(e.constant)
                for digit, k in e.terms:
                    result = result + k * digits[digit]
            else:
                result = e.function(*(value(a) for a in e.args))
            if result.dtype is not torch.bool and result.numel() and int(result.abs().max()) >= 1 << 31:
                raise too_large()
            done[id(e)] = result
        return done[id(e)]

    return value(e)


def apply(name: str, function: Callable[..., Tensor], *args: Expr) -> Expr:
    digits = frozenset[Digit]().union(*(a.digits for a in args))
    e = Apply(name, function, args, digits)
    return e if digits else Linear(int(evaluate(e, {})))


def add(a: Expr, b: Expr, sign: int = 1) -> Expr:
    if not (isinstance(a, Linear) and isinstance(b, Linear)):
        return apply("add", (lambda x, y: x + y) if sign == 1 else (lambda x, y: x - y), a, b)
    terms = dict(a.terms)
    for digit, k in b.terms:
        terms[digit] = terms.get(digit, 0) + sign * k
    return Linear(a.constant + sign * b.constant, tuple((d, k) for d, k in terms.items() if k))


def scale(e: Expr, k: int) -> Expr:
    if isinstance(e, Linear):
        return Linear(e.constant * k, tuple((d, c * k) for d, c in e.terms if k))
    return apply("mul", torch.mul, e, Linear(k))


def too_large() -> Refuse:
    return Refuse("the mask's arithmetic leaves the range of int32", expected="coordinates and their sums")
