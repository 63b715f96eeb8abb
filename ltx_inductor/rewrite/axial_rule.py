"""The rule `rmsnorm_axial_rope`: RMSNorm per head, a scale, and RoPE over several token axes, one tensor at a time.

It runs before the rule for split RoPE, which would only say that such a rotation has more than one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from ltx_inductor.ops import verified
from ltx_inductor.rewrite.axes import Plan
from ltx_inductor.rewrite.axial import AxialSide, candidates, read
from ltx_inductor.rewrite.digits import Refuse, internal_error
from ltx_inductor.rewrite.drawing import Drawings
from ltx_inductor.rewrite.legality import (
    between,
    check_inference,
    check_mutation,
    check_norm,
    check_plain_tensors,
    check_readers,
    check_sizes,
    check_streams,
)
from ltx_inductor.rewrite.needs import AxialNeed
from ltx_inductor.rewrite.norm import Statistic, find_statistics
from ltx_inductor.rewrite.region import computed_inside, derived_from, reached_inside
from ltx_inductor.rewrite.replace import Writer, emit, form_of, remove_dead, same_form, take_place
from ltx_inductor.rewrite.report import Site
from ltx_inductor.rewrite.rule import Job, on_the_cpu
from ltx_inductor.rewrite.source import origin
from ltx_inductor.rewrite.traffic import bytes_of, total
from ltx_inductor.rewrite.view import GraphView

RULE = "rmsnorm_axial_rope"
_WHAT = "the rotation"


def run(job: Job) -> None:
    """See `ltx_inductor.rewrite.rule.Rule`."""
    view = GraphView(job.graph)
    statistics, others = find_statistics(view.graph, view.sizes)
    rstds = {s.rstd for s in statistics} | {o.rstd for o in others}
    rewriter = _Rewriter(job, view)
    for st in statistics:
        region, whole = derived_from(st.rstd, rstds, view.order)
        if not whole:
            continue  # the rule for split RoPE says so
        for join in list(candidates(view, st, region)):
            try:
                rewriter.rewrite(st, region, join)
            except Exception as e:
                job.refuse(view.order[join], join, e if isinstance(e, Refuse) else internal_error(e))
                job.spoken_for |= computed_inside(join, region) | reached_inside(join, region)
    rewriter.finish()


class _Rewriter:
    """Replaces the sites of one graph."""

    def __init__(self, job: Job, view: GraphView) -> None:
        self._job, self._view = job, view
        self._writer = Writer(view)
        self._drawings = Drawings(job.graph, view.order, len(job.report.drawings))
        self._tables: dict[Plan, Node] = {}  # as written, for the sites that share them
        self._replaced: dict[Node, Node] = {}

    def rewrite(self, st: Statistic, region: set[Node], join: Node) -> None:
        """Raises, with the graph as it was, where the join is no site."""
        job, view = self._job, self._view
        side = read(view, st, region, join)
        inputs = [side.x, *side.tables, *([side.weight.node] if side.weight else [])]
        self._check(side, region, inputs)
        where, shapes = origin(st.rstd), _shapes(side)
        size = total(bytes_of(n) for n in dict.fromkeys((*inputs, side.result)))
        proof = job.ask([_need(side)], size)
        alike = (where.path, where.source, *shapes.values(), side.contract.name)
        drawn = self._drawings.before(alike, inputs, [side.result])
        before = job.pictures.before(view.order, inputs, [side.result]) if job.pictures else None
        op = self._write(side, inputs)
        self._replaced[side.result] = op
        site = Site(
            RULE,
            f"ltx_inductor::{RULE}",
            None,
            None,
            shapes=shapes,
            contract=side.contract.name,
            node=side.result.name,
            drawing=self._drawings.after(alike, drawn, op),
            bytes=size,
            proof=proof,
            **vars(where),
        )
        job.site(view.order[side.result], site)
        if job.pictures and before:
            job.pictures.after(before, f"{RULE} {where.source}")

    def finish(self) -> None:
        remove_dead(self._job.graph, list(self._replaced), set())
        self._job.graph.lint()
        self._job.report.drawings += self._drawings.done
        self._job.finish()

    def _check(self, side: AxialSide, region: set[Node], inputs: Sequence[Node]) -> None:
        """Raises Refuse where the value may not be replaced, whatever kernels there are."""
        view, inside = self._view, computed_inside(side.result, region)
        check_inference(view, "the norm and the rotation")
        check_plain_tensors(view, inputs)
        check_sizes([*inputs, side.result], _WHAT)
        check_norm(side.statistic)
        _check_alignment(side.statistic)
        check_readers(view, set(side.tables), side.result, inside)
        check_mutation(view, [*inputs, *between(side.statistic, inside)], side.result, _WHAT)
        check_streams(side.result, inside)
        if side.x.meta["val"].device.type == "cpu" and not self._job.config.cpu:
            raise on_the_cpu()

    def _write(self, side: AxialSide, inputs: Sequence[Node]) -> Node:
        w, mark, tables = self._writer, self._writer.mark(), dict(self._tables)
        try:
            cos, sin = (
                [self._table(t) for t in plans] for plans in zip(*((p.cos, p.sin) for p in side.pieces), strict=True)
            )
            x = self._now(side.x)
            weight = self._now(side.weight.node) if side.weight else None
            w.after(max((n for n in (x, weight, *cos, *sin) if n), key=self._view.order.__getitem__))
            if side.weight and weight:
                weight = emit(w, replace(side.weight, node=weight), side.result)
            contract = side.contract.name + verified.SUFFIX * (self._job.config.verify == "always")
            arguments = (x, weight, cos, sin, side.statistic.eps, side.scale, contract)
            op = w.call(torch.ops.ltx_inductor.rmsnorm_axial_rope.default, *arguments, like=side.result)
            new, old = op.meta["val"], side.result.meta["val"]
            if not same_form(new, old):
                raise Refuse(
                    f"the fused value would be {form_of(new)}, {side.result.name} is {form_of(old)}",
                    expected="a contiguous result in the dtype of x",
                )
        except BaseException:
            w.undo(mark)
            self._tables = tables
            raise
        take_place(side.result, op)
        return op

    def _table(self, p: Plan) -> Node:
        """A table in the form of the op, written behind its root."""
        p = replace(p, node=self._now(p.node))
        if p not in self._tables:
            self._writer.after(p.node)
            self._tables[p] = emit(self._writer, p, p.node)
        return self._tables[p]

    def _now(self, n: Node) -> Node:
        """An input as it is now: it may be the result of an earlier site."""
        return self._replaced.get(n, n)


def _check_alignment(st: Statistic) -> None:
    """The op calls torch.rms_norm on x itself, where it is left to eager since x is not aligned."""
    if st.called_in != st.x.meta["val"].dtype:
        raise Refuse(
            f"torch.rms_norm is called with {st.x.name} in {st.called_in}, a copy that is aligned where {st.x.name} is "
            "not: eager then sums in another order",
            expected="a norm that is called in the dtype of the activations",
        )


def _need(side: AxialSide) -> AxialNeed:
    x, cos = side.x.meta["val"], side.pieces[0].cos.node.meta["val"]
    return AxialNeed(x.device, x.dtype, cos.dtype, side.pairs, x.dim() - 2, side.contract.name)


def _shapes(side: AxialSide) -> dict[str, str]:
    def text(n: Node) -> str:
        return f"[{','.join(str(s) for s in n.meta['val'].shape)}]"

    return {"x": text(side.x), "out": text(side.result), "pairs": f"[{','.join(map(str, side.pairs))}]"}
