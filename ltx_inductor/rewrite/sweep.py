"""The last look: rotation-like values that neither a site nor a refusal speaks for.

A rotation moves pieces of a value (cuts and joins them, or flips, rolls or gathers them), multiplies them by tables and
adds. Whatever does that and was not covered by a rule is named, so that no near-match is lost silently: RoPE without a
norm, RoPE with something between the norm and the rotation, a norm this rule cannot read, or complex numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.layout import CUT, FLIP, JOIN, LAYOUT, aten
from ltx_inductor.rewrite.lift import CAST
from ltx_inductor.rewrite.view import GraphView

_MULTIPLY = {aten.mul.Tensor, aten.addcmul.default}
_SUM = {aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default}
_MOVE = FLIP | {aten.roll.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
_POINTWISE = {
    aten.neg.default,
    aten.abs.default,
    aten.div.Tensor,
    aten.copy.default,
    aten.mul.Scalar,
    aten.add.Scalar,
    aten.where.self,
    aten.constant_pad_nd.default,
}
_WALKED = set(LAYOUT) | CAST | CUT | JOIN | _MULTIPLY | _SUM | _MOVE | _POINTWISE
_NEAR = 40  # nodes walked back from the end of a rotation, and from there to a norm
_COMPLEX = {aten.view_as_complex.default, aten.complex.default}


def uncovered_rotations(view: GraphView, covered: set[Node]) -> Iterator[tuple[Node, Refuse]]:
    """(the last node, why it was left alone) of every rotation-like value outside `covered`, last one first."""
    taken = set(covered)
    for n in reversed(view.graph.nodes):
        if n.op != "call_function" or n in taken or n not in view.live or n in view.backward:
            continue
        if n.target in JOIN or n.target in _SUM:
            walked = _rotation(n, covered)
            if walked:
                yield n, _reason(n, walked)
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


def _rotation(end: Node, covered: set[Node]) -> set[Node] | None:
    """The nodes between `end` and the value whose pieces it multiplies and adds, if it is the end of a rotation.

    Covered nodes are not walked: a key made from a rotated query is a rotation of its own.
    """
    walked, todo = {end}, [end]
    while todo and len(walked) < _NEAR:
        for a in todo.pop(0).all_input_nodes:
            if a not in walked and a not in covered and a.op == "call_function" and a.target in _WALKED:
                walked.add(a)
                todo.append(a)
    products = [n for n in walked if n.target in _MULTIPLY and len(n.all_input_nodes) > 1]
    sums = any(n.target in _SUM and len(n.all_input_nodes) > 1 for n in walked)
    if not sums or len(products) < 2:
        return None
    if end.target in JOIN:
        moves = any(n.target in CUT or n.target in _MOVE for n in walked)
    else:
        moves = any(n.target in _MOVE for n in walked) and _mixes_one_value(end, walked)
    return walked if moves else None


def _mixes_one_value(total: Node, walked: set[Node]) -> bool:
    """Does a sum add a value's product and the product of the same value moved?"""
    addends = [a for a in total.all_input_nodes if a in walked] or [total]
    roots: list[set[Node]] = []
    for a in [total, *addends] if total.target is aten.addcmul.default else addends:
        factors = {f for m in (a, *a.all_input_nodes) for f in m.all_input_nodes}
        roots.append({r for f in factors for r in _without_moves(f)})
    return any(x & y for i, x in enumerate(roots) for y in roots[i + 1 :])


def _without_moves(n: Node, limit: int = 6) -> Iterator[Node]:
    """n, and what it is a view, a cast or a rearrangement of."""
    for _ in range(limit):
        yield n
        if n.op != "call_function" or not (n.target in LAYOUT or n.target in CAST or n.target in _MOVE):
            return
        first = n.all_input_nodes
        if not first:
            return
        n = first[0]


def _reason(n: Node, walked: set[Node]) -> Refuse:
    through = _way_from_a_norm(n, walked)
    if through is not None:
        return Refuse(
            f"{n.name} rotates what {through.name} = {through.target} makes of a normalised value; between a norm and "
            "its rotation there must be no scale, sum or other op",
            found=f"{through.name} = {through.target}",
            expected="torch.rms_norm of a query or key, then split RoPE on its result",
        )
    return Refuse(
        f"{n.name} looks like a rotation, but not of a value that is a recognised RMSNorm",
        expected="torch.rms_norm of a query or key, then split RoPE",
        hint="RoPE without a norm is not covered; a norm that is written out by hand is not either",
    )


def _way_from_a_norm(n: Node, walked: set[Node]) -> Node | None:
    """The op nearest to the rotation, on a way back to a rsqrt, that is neither layout nor the rotation's own.

    Products and sums of the rotation lie on its side of a cut; whatever computes behind a cut is in between.
    """
    seen: set[tuple[Node, bool]] = {(n, False)}
    todo: list[tuple[Node, bool, Node | None]] = [(n, False, None)]
    while todo and len(seen) < 4 * _NEAR:
        m, behind, through = todo.pop(0)
        behind = behind or m.target in CUT or m.target in _MOVE
        for a in m.all_input_nodes:
            if a.target is aten.rsqrt.default and through is not None:
                return through
            if a.op != "call_function" or (a, behind) in seen:
                continue
            seen.add((a, behind))
            own = not behind and a in walked and (a.target in _MULTIPLY or a.target in _SUM)
            plain = own or a.target in LAYOUT or a.target in CAST
            todo.append((a, behind, through if plain or through is not None else a))
    return None


def _is_complex_rotation(n: Node) -> bool:
    source = n.args[0]
    return (
        isinstance(source, Node)
        and source.target is aten.mul.Tensor
        and any(a.target in _COMPLEX for a in source.all_input_nodes)
    )
