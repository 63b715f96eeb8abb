"""The last look: rotation-like values that neither a site nor a refusal speaks for.

A rotation cuts a value, multiplies pieces by tables, adds them, and joins the results. Whatever does that and was not
covered by a rule is named, so that no near-match is lost silently: RoPE without a norm, a norm this rule cannot read,
or RoPE written with complex numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.layout import CUT, JOIN, LAYOUT, aten
from ltx_inductor.rewrite.lift import CAST
from ltx_inductor.rewrite.view import GraphView

Node = torch.fx.Node
_MULTIPLY = {aten.mul.Tensor, aten.addcmul.default}
_SUM = {aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default}
_POINTWISE = {
    aten.neg.default,
    aten.abs.default,
    aten.div.Tensor,
    aten.copy.default,
    aten.mul.Scalar,
    aten.add.Scalar,
    aten.roll.default,
    aten.index.Tensor,
    aten.where.self,
    aten.constant_pad_nd.default,
}
_WALKED = set(LAYOUT) | CAST | CUT | _MULTIPLY | _SUM | _POINTWISE
_DEPTH = 40  # nodes walked back from a join
_COMPLEX = {aten.view_as_complex.default, aten.complex.default}


def uncovered_rotations(view: GraphView, covered: set[Node]) -> Iterator[tuple[Node, Refuse]]:
    """(the last node, why it was left alone) of every rotation-like value outside `covered`, in program order."""
    taken = set(covered)
    for n in reversed(list(view.graph.nodes)):
        if n.op != "call_function" or n in taken or n not in view.live:
            continue
        if n.target in JOIN:
            walked = _rotation(view, n)
            if walked and not walked & covered:
                taken |= walked
                yield n, _reason(n)
            elif walked:
                taken |= walked
        elif n.target is aten.view_as_real.default and _is_complex_rotation(n):
            yield (
                n,
                Refuse(
                    f"{n.name} is a rotation written with complex numbers",
                    expected="RMSNorm, then n0*cos - n1*sin and n1*cos + n0*sin on real halves",
                    hint="complex RoPE pairs neighbouring elements (interleaved), which this rule does not cover",
                ),
            )


def _rotation(view: GraphView, join: Node) -> set[Node] | None:
    """The nodes between a join and the value it was cut from, if they multiply and add pieces on the way."""
    walked, todo = {join}, [join]
    cut = False
    products = sums = 0
    while todo and len(walked) < _DEPTH:
        m = todo.pop(0)
        for a in m.all_input_nodes:
            if a in walked or a.op != "call_function" or (a.target not in _WALKED and a.target not in JOIN):
                continue
            walked.add(a)
            todo.append(a)
            cut |= a.target in CUT
            products += a.target in _MULTIPLY and len(a.all_input_nodes) > 1
            sums += a.target in _SUM and len(a.all_input_nodes) > 1
    if not (cut and products >= 2 and sums >= 1):
        return None
    return walked


def _reason(n: Node) -> Refuse:
    return Refuse(
        f"{n.name} looks like a rotation, but not of a value that is a recognised RMSNorm",
        expected="torch.rms_norm of a query or key, then split RoPE",
        hint="RoPE without a norm is not covered; a norm that is written out by hand is not either",
    )


def _is_complex_rotation(n: Node) -> bool:
    source = n.args[0]
    return (
        isinstance(source, Node)
        and source.target is aten.mul.Tensor
        and any(a.target in _COMPLEX for a in source.all_input_nodes)
    )
