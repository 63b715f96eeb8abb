"""Reads what a mask computes from graph nodes, as expressions over the coordinates of a query and a key.

Dividing a position by H*W drops digits, the remainder keeps them. `Reader` follows linear arithmetic on digits exactly,
whatever its spelling, and the radices are found on the way: a divisor that falls inside a digit splits it.

The same reading serves the mask_mod, a graph of scalars, and the dense mask that a BlockMask is made from, where
`coords` says which index of the element the axes of a node are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.mask_expr import ZERO, Expr, Linear, add, apply, scale, too_large
from ltx_inductor.rewrite.size import in_example

aten, prims = torch.ops.aten, torch.ops.prims

Coords = tuple[str | None, ...]
"""For every axis of a node: the index that runs along it, "b", "h", "q" or "kv"; None for an axis of size 1."""


class Split(Exception):
    """Digit number `digit` has to become two, of which the lower counts up to `low`."""

    def __init__(self, digit: int, low: int) -> None:
        self.digit, self.low = digit, low


class Reader:
    """Reads nodes as expressions, given the radices of a position, the most significant first.

    leaves: what the inputs of a scalar graph are. odd: divisors that fit no digit, for the refusal. example: sizes that
    are symbols are read as in the call that is compiled, so that what is read holds for its sizes only.
    """

    def __init__(self, radices: Sequence[int], leaves: Mapping[Node, str], example: bool = False) -> None:
        self.radices = list(radices)
        self.leaves, self.example = leaves, example
        self.odd: list[int] = []
        self._read: dict[tuple[Node, Coords], Expr] = {}

    def position(self, who: str | None) -> Expr:
        if who is None:
            return ZERO
        if who not in ("q", "kv"):
            raise Refuse(
                f"the mask depends on the {'batch' if who == 'b' else 'head'}",
                expected="one window for all of them",
            )
        terms, stride = [], 1
        for i in reversed(range(len(self.radices))):
            terms.append(((who, i), stride))
            stride *= self.radices[i]
        return Linear(0, tuple(reversed(terms)))

    def read(self, value: Any, coords: Coords) -> Expr:
        """Raises Refuse for what is no integer arithmetic on positions, Split for other radices."""
        if isinstance(value, (bool, int)):
            return Linear(int(value))
        if isinstance(value, float) and value.is_integer():
            return Linear(int(value))
        if not isinstance(value, Node):
            raise Refuse(f"the mask computes with {value!r}", expected="whole numbers")
        found = self._read.get((value, coords))
        if found is None:
            found = self._read[value, coords] = self._node(value, coords)
        return found

    def _node(self, n: Node, coords: Coords) -> Expr:
        if n in self.leaves:
            return self.position(self.leaves[n])
        if n.op != "call_function":
            raise Refuse(f"the mask reads {n.name}, a value that is only known while the model runs")
        layout = _LAYOUT.get(n.target)
        if layout is not None:
            return self.read(n.args[0], layout(n, coords))
        if _dtype(n) not in _EXACT:
            raise Refuse(f"the mask computes {n.name} in {_dtype(n)}", expected="int32, int64 and truth values")
        if n.target is prims.iota.default:
            return add(scale(self.position(coords[0]), n.kwargs["step"]), Linear(n.kwargs["start"]))
        if n.target in _FILLED:
            return self.read(n.args[_FILLED[n.target]], ())
        rule = _RULES.get(n.target)
        if rule is None:
            raise Refuse(f"the mask calls {n.target}, at {n.name}", expected="integer arithmetic on positions")
        e = rule(self, n, coords)
        if isinstance(e, Linear) and self._most(e) >= 1 << 31:
            raise too_large()
        return e

    def _most(self, e: Linear) -> int:
        """A bound of the absolute value."""
        return abs(e.constant) + sum(abs(k) * (self.radices[i] - 1) for (_, i), k in e.terms)

    def operand(self, a: Any, coords: Coords) -> Expr:
        """An operand of an elementwise node: axes are aligned at the right, those of size 1 are broadcast."""
        if not isinstance(a, Node):
            return self.read(a, ())
        value = a.meta.get("val")
        if not isinstance(value, Tensor):
            size = in_example(value) if self.example else None
            if size is not None:
                return Linear(size)
            raise Refuse(
                "the mask computes with sizes that are symbols in this graph",
                expected="sizes that are literals",
                hint="compile with dynamic=False",
            )
        mine = coords[len(coords) - value.dim() :]
        return self.read(a, tuple(None if _is_one(s) else c for s, c in zip(value.shape, mine, strict=True)))

    def divide(self, x: Expr, by: Expr) -> tuple[Expr, Expr]:
        """(floor(x / by), x mod by); raises Split where digits have to be cut for that."""
        if not isinstance(by, Linear) or by.terms or by.constant <= 0:
            raise Refuse("the mask divides by something else than a positive literal")
        c = by.constant
        if isinstance(x, Linear):
            high, low, top = [], [], 0
            for digit, k in x.terms:
                n = self.radices[digit[1]]
                if k % c == 0:
                    high.append((digit, k // c))
                    continue
                if k > 0 and k < c < k * n:
                    if c % k == 0 and n % (c // k) == 0:
                        raise Split(digit[1], c // k)
                    if not x.constant and all(other[0] == digit[0] and j > 0 for other, j in x.terms):
                        self.odd.append(c)
                low.append((digit, k))
                top = c if k < 0 else top + k * (n - 1)
            quotient, rest = divmod(x.constant, c)
            if rest + top < c:
                return Linear(quotient, tuple(high)), Linear(rest, tuple(low))
        return (
            apply("floordiv", lambda a, b: torch.div(a, b, rounding_mode="floor"), x, by),
            apply("mod", torch.remainder, x, by),
        )


_EXACT = (torch.int32, torch.int64, torch.bool)


def _dtype(n: Node) -> torch.dtype:
    value = n.meta["val"]
    return value.dtype if isinstance(value, Tensor) else torch.int64


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


Rule = Callable[[Reader, Node, Coords], Expr]


def _elementwise(name: str, function: Callable[..., Tensor]) -> Rule:
    def rule(r: Reader, n: Node, coords: Coords) -> Expr:
        return apply(name, function, *(r.operand(a, coords) for a in n.args))

    return rule


def _sum(sign: int, swapped: bool = False) -> Rule:
    def rule(r: Reader, n: Node, coords: Coords) -> Expr:
        if _dtype(n) is torch.bool:
            raise Refuse(f"the mask adds truth values, at {n.name}", expected="&, |")
        a, b = (r.operand(x, coords) for x in (n.args[1::-1] if swapped else n.args[:2]))
        alpha = n.kwargs.get("alpha", n.args[2] if len(n.args) > 2 else 1)
        if alpha != 1:
            raise Refuse(f"the mask adds with alpha={alpha}, at {n.name}", expected="alpha=1")
        return add(a, b, sign)

    return rule


def _product(r: Reader, n: Node, coords: Coords) -> Expr:
    a, b = (r.operand(x, coords) for x in n.args)
    if _dtype(n) is torch.bool:
        return apply("and", operator.and_, a, b)
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Linear) and not y.terms:
            return scale(x, y.constant)
    return apply("mul", operator.mul, a, b)


def _division(r: Reader, n: Node, coords: Coords) -> Expr:
    mode = n.kwargs.get("rounding_mode", "floor")
    if mode != "floor":
        raise Refuse(f"the mask divides with rounding_mode={mode!r}, at {n.name}", expected="floor division, //")
    return r.divide(*(r.operand(a, coords) for a in n.args[:2]))[0]


def _remainder(r: Reader, n: Node, coords: Coords) -> Expr:
    return r.divide(*(r.operand(a, coords) for a in n.args))[1]


def _clamp(r: Reader, n: Node, coords: Coords) -> Expr:
    e = r.operand(n.args[0], coords)
    bounds = [*n.args[1:], None, None][:2]
    for bound, name, function in zip(bounds, ("min", "max"), (torch.maximum, torch.minimum), strict=True):
        bound = n.kwargs.get(name, bound)
        if bound is not None:
            e = apply(name, function, e, r.operand(bound, coords))
    return e


def _cast(r: Reader, n: Node, coords: Coords) -> Expr:
    e = r.operand(n.args[0], coords)
    return apply("bool", lambda x: x != 0, e) if _dtype(n) is torch.bool else e


def _logic(name: str, function: Callable[..., Tensor]) -> Rule:
    def rule(r: Reader, n: Node, coords: Coords) -> Expr:
        if any(isinstance(a, Node) and _dtype(a) is not torch.bool for a in n.args):
            raise Refuse(f"the mask combines bits of numbers, at {n.name}", expected="truth values")
        return apply(name, function, *(r.operand(a, coords) for a in n.args))

    return rule


_RULES: dict[Any, Rule] = {
    aten.add.Tensor: _sum(1),
    aten.add.Scalar: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.sub.Scalar: _sum(-1),
    aten.rsub.Scalar: _sum(-1, swapped=True),
    aten.rsub.Tensor: _sum(-1, swapped=True),
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten.neg.default: lambda r, n, coords: scale(r.operand(n.args[0], coords), -1),
    aten.div.Tensor_mode: _division,
    aten.div.Scalar_mode: _division,
    aten.floor_divide.default: _division,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Tensor: _remainder,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_min.Tensor: _clamp,
    aten.clamp_max.default: lambda r, n, c: _elementwise("max", torch.minimum)(r, n, c),
    aten.clamp_max.Tensor: lambda r, n, c: _elementwise("max", torch.minimum)(r, n, c),
    aten.minimum.default: _elementwise("max", torch.minimum),
    aten.maximum.default: _elementwise("min", torch.maximum),
    aten.abs.default: _elementwise("abs", torch.abs),
    aten.where.self: _elementwise("where", lambda c, a, b: torch.where(c != 0, a, b)),
    aten.bitwise_and.Tensor: _logic("and", operator.and_),
    aten.logical_and.default: _logic("and", operator.and_),
    aten.bitwise_or.Tensor: _logic("or", operator.or_),
    aten.logical_or.default: _logic("or", operator.or_),
    aten.bitwise_xor.Tensor: _logic("xor", operator.xor),
    aten.logical_xor.default: _logic("xor", operator.xor),
    aten.bitwise_not.default: _logic("not", torch.logical_not),
    aten.logical_not.default: _logic("not", torch.logical_not),
    prims.convert_element_type.default: _cast,
    aten._to_copy.default: _cast,
}
for _name in ("ge", "gt", "le", "lt", "eq", "ne"):
    for _overload in ("Tensor", "Scalar"):
        _RULES[getattr(getattr(aten, _name), _overload)] = _elementwise(_name, getattr(operator, _name))

_FILLED = {  # the position of the value that all elements have
    aten.scalar_tensor.default: 0,
    aten.full.default: 1,
    aten.full_like.default: 1,
}


def _ones_moved(n: Node, coords: Coords) -> Coords:
    """view, unsqueeze, squeeze: axes of size 1 come and go, the others stay in order."""
    kept = [c for c, s in zip(coords, n.meta["val"].shape, strict=True) if not _is_one(s)]
    shape = n.args[0].meta["val"].shape
    if [s for s in shape if not _is_one(s)] != [s for s in n.meta["val"].shape if not _is_one(s)]:
        raise Refuse(f"the mask is reshaped, at {n.name}", expected="one axis of queries and one of keys")
    rest = iter(kept)
    return tuple(None if _is_one(s) else next(rest) for s in shape)


def _expanded(n: Node, coords: Coords) -> Coords:
    shape = n.args[0].meta["val"].shape
    return tuple(None if _is_one(s) else c for s, c in zip(shape, coords[len(coords) - len(shape) :], strict=True))


def _permuted(n: Node, coords: Coords) -> Coords:
    back: list[str | None] = [None] * len(coords)
    for to, origin in enumerate(n.args[1]):
        back[origin] = coords[to]
    return tuple(back)


_LAYOUT: dict[Any, Callable[[Node, Coords], Coords]] = {
    aten.view.default: _ones_moved,
    aten.reshape.default: _ones_moved,
    aten._unsafe_view.default: _ones_moved,
    aten.unsqueeze.default: _ones_moved,
    aten.squeeze.dim: _ones_moved,
    aten.squeeze.dims: _ones_moved,
    aten.squeeze.default: _ones_moved,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten.clone.default: lambda n, coords: coords,
    aten.alias.default: lambda n, coords: coords,
}
