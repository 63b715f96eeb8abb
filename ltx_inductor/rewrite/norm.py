"""The statistic of an RMSNorm: rsqrt(mean(x*x) + eps) in fp32.

Only the statistic is a pattern. What is done with it (weight, 1 + w, casts and their order) is read off the lifted
expression. Whether eager runs torch.rms_norm, one fused kernel on CUDA with its own reduction order, or a norm that is
written out, several kernels with another order, is in the metadata and decides whether the bits can be kept.
"""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ltx_inductor.rewrite.layout import CUT, JOIN, LAYOUT, argument, aten
from ltx_inductor.rewrite.lift import CAST, PRODUCT
from ltx_inductor.rewrite.size import Sizes, product

_FUSED_ATEN = ("aten._fused_rms_norm.default", "aten.rms_norm.default")
_FUSED_NAMES = (*_FUSED_ATEN, "aten._fused_rms_norm", "aten.rms_norm")  # in exported models


@dataclass(frozen=True)
class Statistic:
    """rstd: the rsqrt node. x: what is normalised, before any cast to fp32. dims: the normalised axes of x."""

    rstd: Node
    x: Node
    dims: tuple[int, ...]
    eps: float
    mean: bool  # mean(); False where it is sum()/N, which rounds differently unless N is a power of two
    fused: bool  # eager runs torch.rms_norm
    called_in: torch.dtype  # the dtype of the tensor that torch.rms_norm was given


@dataclass(frozen=True)
class NotANorm:
    """A rsqrt that is no RMS statistic, and why."""

    rstd: Node
    reason: str


def find_statistics(graph: Graph, sizes: Sizes) -> tuple[list[Statistic], list[NotANorm]]:
    """Every rsqrt of the graph, in program order, as one or the other."""
    yes: list[Statistic] = []
    no: list[NotANorm] = []
    found = set(graph.find_nodes(op="call_function", target=aten.rsqrt.default))
    for n in graph.nodes:
        if n in found:
            s = _match(n, sizes)
            yes.append(s) if isinstance(s, Statistic) else no.append(NotANorm(n, s))
    return yes, no


def _match(rstd: Node, sizes: Sizes) -> Statistic | str:
    total = rstd.args[0]
    if total.target not in (aten.add.Tensor, aten.add.Scalar) or not isinstance(total.args[1], (int, float)):
        return f"{rstd.name} is the rsqrt of {total.name} = {total.target}, not of a mean plus a literal eps"
    if argument(total, 2, "alpha", 1) != 1:
        return f"{total.name} scales eps by alpha"
    mean, divisor = total.args[0], None
    if not isinstance(mean, Node):
        return f"{total.name} adds eps to the number {mean}"
    if mean.target in (aten.div.Tensor, aten.div.Scalar) and isinstance(mean.args[0], Node):
        divisor, mean = mean.args[1], mean.args[0]
    if mean.target is not (aten.mean.dim if divisor is None else aten.sum.dim_IntList):
        return _from_elsewhere(mean) or f"{mean.name} = {mean.target} is not a mean over fixed axes"
    square, x32 = mean.args[0], None
    if (square.target is aten.pow.Tensor_Scalar and square.args[1] == 2) or (
        square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    ):
        x32 = square.args[0]
    if x32 is None:
        return _from_elsewhere(square) or f"{square.name} = {square.target} is not the square of a value"
    shape = sizes.shape(x32)
    dims = tuple(sorted(d % len(shape) for d in (mean.args[1] or range(len(shape)))))
    if divisor is not None and divisor != product(shape[d] for d in dims).known:
        return f"{mean.name} is divided by {divisor}, not by the number of elements summed"
    for n in (rstd, square, x32):
        if n.meta["val"].dtype != torch.float32:
            return f"{n.name} of the statistic is computed in {n.meta['val'].dtype}, not in fp32"
    source = x32.args[0] if x32.target in CAST else x32
    if source.meta["val"].device != x32.meta["val"].device:
        source = x32
    inner_cast = x32.target in CAST and is_fused(x32)  # part of rms_norm, not the user's .float() before it
    called_in = source.meta["val"].dtype if inner_cast else torch.float32
    eps = _fp32(float(total.args[1]))
    return Statistic(rstd, source, dims, eps, divisor is None, is_fused(rstd), called_in)


_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")  # namespaces
_WAIT = "_c10d_functional.wait_tensor.default"


def _from_elsewhere(n: Node) -> str | None:
    """Why the squares that n holds are not those of one row: a collective made them, or an op that nobody here knows.

    That is how a tensor-parallel norm looks. Between the two are copies, views and casts; else None.
    """
    source: Any = n
    while isinstance(source, Node):
        n, source = source, _moved(source)
    op = n.args[0] if "auto_functionalized" in str(n.target) else n.target  # an op that writes to its operand
    space = str(op).partition(".")[0]
    parallel = (
        "the squares of all ranks of a process group, as a tensor-parallel norm does, so that no rank has the whole row"
    )
    if space in _COLLECTIVES:
        return f"{n.name} = {op} combines {parallel}"
    if n.op == "call_function" and space not in ("aten", "prims") and isinstance(op, torch._ops.OperatorBase):
        return f"{n.name} = {op} is not known here; it may combine {parallel}"
    return None


def _moved(n: Node) -> Any:
    """The operand whose elements n only moves, casts or scales; None where it computes."""
    if n.target is aten.copy.default:
        return n.args[1]
    if n.target in JOIN:
        return n.args[0][0] if isinstance(n.args[0], (list, tuple)) else n.args[0]
    moves = n.target in LAYOUT or n.target in CAST or n.target in CUT or n.target is operator.getitem
    scales = n.target in (*PRODUCT, aten.div.Tensor, aten.div.Scalar) and not isinstance(n.args[1], Node)
    return n.args[0] if moves or scales or str(n.target) == _WAIT else None


def _fp32(value: float) -> float:
    """eps as the fp32 number that eager adds: 1e-06 in the graph on CUDA, 9.99999997e-07 on CPU."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def weight_of_call(st: Statistic) -> Node | None:
    """The weight as torch.rms_norm was given it, found in its decomposition; None where there is none."""
    for scaled in st.rstd.users:
        for n in scaled.users if scaled.target is aten.mul.Tensor else ():
            if n.target is aten.mul.Tensor and is_fused(n):
                weight = n.args[1] if n.args[0] is scaled else n.args[0]
                while isinstance(weight, Node) and weight.target in CAST and is_fused(weight):
                    weight = weight.args[0]
                return weight if isinstance(weight, Node) else None
    return None


def is_fused(n: Node) -> bool:
    """Does n come from a call of torch.rms_norm, by whatever name?"""
    if str(n.meta.get("original_aten")) in _FUSED_ATEN:
        return True
    stack: Any = n.meta.get("source_fn_stack") or ()
    if not stack:
        return False
    fn = stack[-1][1]
    return fn in (torch.nn.RMSNorm, torch.rms_norm, torch.nn.functional.rms_norm) or str(fn) in _FUSED_NAMES
