"""Lifting: which expression is one element of a graph value?

`Lifter.lift(node, coords)` walks backwards from a value to the leaves: x and its statistic rstd (the rsqrt of the
norm), and operands (cos, sin, weight). Whatever is computed from rstd is *derived* and must be understood completely;
an operand is followed upwards only as long as that is exact and needs no case split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Node

from ltx_inductor.rewrite.digits import Atom, BadLeaf, Coords, NeedCase, Refuse, Space
from ltx_inductor.rewrite.expr import (
    Expr,
    Leaf,
    Num,
    add,
    apply,
    fma,
    mul,
    neg,
    rounded,
    settled,
)
from ltx_inductor.rewrite.layout import LAYOUT, argument, aten, prims
from ltx_inductor.rewrite.size import ONE

if TYPE_CHECKING:
    from ltx_inductor.rewrite.view import GraphView

NARROW = frozenset({torch.bfloat16, torch.float16})
FLOATS = NARROW | {torch.float32}
CAST = {prims.convert_element_type.default, aten._to_copy.default}
PRODUCT = {aten.mul.Tensor, aten.mul.Scalar}
SUM = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.addcmul.default}
ARITHMETIC = PRODUCT | SUM | {aten.neg.default, aten.copy.default}
UNDERSTOOD = set(LAYOUT) | CAST | ARITHMETIC | {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


def in_addcmul(n: Node) -> bool:
    """Is this node part of an addcmul that torch 2.11 decomposed? (By name: the overload object may be a copy.)"""
    return str(n.meta.get("original_aten")) == "aten.addcmul.default"


class Lifter:
    """Lifts values of one graph over one x.

    derived: everything computed from rstd.
    """

    def __init__(self, view: GraphView, x: Node, rstd: Node, derived: set[Node]) -> None:
        self.view, self.derived = view, derived
        self.sizes, self.same = view.sizes, view.same
        self.space = Space()
        self.x, self.rstd = self.same(x), self.same(rstd)
        self._memo: dict[tuple[Node, Coords], Expr] = {}

    def lift(self, n: Any, co: Coords) -> Expr:
        """The expression of the element of `n` at `co`. Raises Refuse (a sentence) or NeedCase."""
        co = tuple([self.space.resolve(axis) if axis else axis for axis in co])
        n = self.view.origins.get(n, n)
        key = (n, co)
        if key not in self._memo:
            self._memo[key] = self._compute(n, co)
        return self._memo[key]

    def cases(self, n: Node) -> tuple[Coords, list[tuple[dict[Atom, int], Expr]]]:
        """(coordinates of an element of n, its expression for every value of the atoms it depends on)."""
        out: Coords = tuple(self.space.axis(s) for s in self.sizes.shape(n))
        found: list[tuple[dict[Atom, int], Expr]] = []

        def go(case: dict[Atom, int]) -> None:
            self.space.case = case  # coordinates in the memo have their cases filled in: what is there stays right
            try:
                found.append((case, self.lift(n, out)))
            except NeedCase as need:
                if len(found) > 4:
                    raise Refuse(f"{n.name} is put together from more than four different pieces") from None
                for value in range(need.atom.size.known or 0):
                    go({**case, need.atom: value})

        go({})
        self.space.case = {}
        return out, found

    def source_of(self, n: Node, co: Coords) -> Expr:
        """The element of `n` in terms of what n is a view or a wider copy of, also where n is x itself."""
        return self._operand(n, co)

    # ---- one node

    def _compute(self, n: Node, co: Coords) -> Expr:
        if self.same(n) in (self.x, self.rstd):
            return self._leaf(n, co)
        if n in self.derived:
            layout = LAYOUT.get(n.target)
            if layout:
                return layout(self, n, co)
            if n.target in CAST or n.target in ARITHMETIC:
                return self._arithmetic(n, co)
            raise Refuse(f"{n.name} = {n.target} is not a layout or arithmetic op that this rule knows")
        return self._operand(n, co)

    def _leaf(self, n: Node, co: Coords) -> Expr:
        value, x = n.meta.get("val"), self.x.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise Refuse(f"{n.name} is not a tensor")
        if not isinstance(value, FakeTensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise BadLeaf(
                f"{n.name} is a {type(value).__name__}, a tensor subclass whose operations are not those in the graph",
                expected="plain tensors",
            )
        if value.device != x.device:
            raise BadLeaf(f"{n.name} is on {value.device}, {self.x.name} on {x.device}", hint="move both to one device")
        if value.dtype not in FLOATS:
            raise BadLeaf(
                f"{n.name} is {value.dtype}",
                expected="bf16, fp16 or fp32 values",
                hint="fp64 and integer operands change where eager rounds; cast cos/sin before the model",
            )
        return Leaf(self.same(n), co)

    def _operand(self, n: Node, co: Coords) -> Expr:
        """Something that does not depend on rstd: followed up while that is exact."""
        if n.op != "call_function":
            return self._leaf(n, co)
        out = n.meta["val"]
        source = n.args[0] if n.args and isinstance(n.args[0], Node) else None
        before = source.meta.get("val") if source is not None else None
        if isinstance(before, torch.Tensor):
            if n.target in CAST:
                widening = out.dtype == torch.float32 and before.dtype in FLOATS and before.device == out.device
                return self.lift(source, co) if widening else self._leaf(n, co)
            if n.target is aten.neg.default:
                return neg(self.lift(source, co))
            if n.target in PRODUCT and n.args[1] in (1, -1) and before.dtype == out.dtype:
                return self._unit_product(n, co)
            if n.target in SUM and len(co) == 1 and isinstance(n.args[1], (int, float)) and not n.kwargs:
                return rounded(out.dtype, add(self.lift(source, co), Num(n.args[1])))  # 1 + weight
        if n.target in LAYOUT:
            return self._through_layout(n, co)
        return self._leaf(n, co)

    def _unit_product(self, n: Node, co: Coords) -> Expr:
        if in_addcmul(n) and n.args[1] == -1:
            raise Refuse(
                f"{n.name} belongs to an addcmul with value=-1, which rounds differently on CPU and CUDA",
                hint="negate sin and leave value at 1",
            )
        return mul(self.lift(n.args[0], co), Num(n.args[1]), in_addcmul(n))

    def _through_layout(self, n: Node, co: Coords) -> Expr:
        mark, before = self.space.mark(), set(self._memo)
        try:
            return LAYOUT[n.target](self, n, co)
        except BadLeaf:
            raise
        except (Refuse, NeedCase):
            # A join that differs along an axis which the rotation does not split: take its result as it is.
            self.space.undo(mark)
            for key in [k for k in self._memo if k not in before]:
                del self._memo[key]
            return self._leaf(n, co)

    # ---- arithmetic on derived values

    def _arithmetic(self, n: Node, co: Coords) -> Expr:
        out = n.meta["val"]
        if out.dtype not in FLOATS:
            raise Refuse(f"{n.name} computes in {out.dtype}", expected="bf16, fp16 or fp32")
        if n.target in CAST:
            if n.args[0].meta["val"].device != out.device:
                raise Refuse(f"{n.name} moves a value to another device")
            return rounded(out.dtype, self.lift(n.args[0], co))
        if n.target is aten.copy.default:  # out[...] = source, functionalised: the target gives only shape and dtype
            return rounded(out.dtype, self._argument(n.args[1], n, co))
        if n.target is aten.neg.default:
            return neg(settled(self.lift(n.args[0], co)))
        self._no_scale(n)
        ops = [self._argument(a, n, co) for a in n.args[: 3 if n.target is aten.addcmul.default else 2]]
        if n.target in PRODUCT:
            e = mul(ops[0], ops[1], in_addcmul(n))
        elif n.target is aten.addcmul.default:
            e = fma(ops[1], ops[2], ops[0])
        elif n.target is aten.sub.Tensor:
            e = add(ops[0], neg(ops[1]))
        else:
            e = add(ops[0], ops[1], in_addcmul(n))
        return rounded(out.dtype, e)

    def _no_scale(self, n: Node) -> None:
        if n.target is aten.addcmul.default:
            scale = n.kwargs.get("value", 1)
        else:
            scale = argument(n, 2, "alpha", 1)
        if scale != 1:
            name = "value" if n.target is aten.addcmul.default else "alpha"
            raise Refuse(
                f"{n.name} has {name}={scale}, which rounds once more, or differently on CPU and CUDA",
                expected=f"{name}=1",
                hint="negate sin instead of passing a scale factor",
            )

    def _argument(self, a: Any, n: Node, co: Coords) -> Expr:
        """An operand of a pointwise op at the coordinates of the op's result, broadcast undone."""
        if not isinstance(a, Node):
            return Num(a)
        value, out = a.meta["val"], n.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise Refuse(f"{n.name} computes with the symbolic number {a.name}")
        if value.dim() == 0 and value.dtype != out.dtype:
            raise Refuse(
                f"{n.name} computes with the 0-d tensor {a.name} of another dtype",
                hint="dynamic=True makes an input of every number of the model: mark the axes that change instead, "
                "with torch._dynamo.mark_dynamic",
            )
        trailing = co[len(co) - value.dim() :]
        sizes = self.sizes.shape(a)
        return self.lift(a, tuple(() if s == ONE else d for s, d in zip(sizes, trailing, strict=True)))


POINTWISE = CAST | {
    aten.cos.default,
    aten.sin.default,
    aten.neg.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.div.Tensor,
}


class Prover(Lifter):
    """Reads tables through pointwise ops too, as uninterpreted functions: to prove two places of a table equal."""

    def __init__(self, lifter: Lifter) -> None:
        super().__init__(lifter.view, lifter.x, lifter.rstd, set())
        self.space = lifter.space

    def _compute(self, n: Node, co: Coords) -> Expr:
        if n.op == "call_function" and n.target in POINTWISE:
            keywords = tuple(sorted((k, str(v)) for k, v in n.kwargs.items()))
            args = tuple(self._argument(a, n, co) if isinstance(a, Node) else repr(a) for a in n.args)  # 0.0 == -0.0
            return apply(f"{n.target} {n.meta['val'].dtype} {keywords}", args)
        if n.op == "call_function" and n.target in LAYOUT:
            return self._through_layout(n, co)
        return self._leaf(n, co)
