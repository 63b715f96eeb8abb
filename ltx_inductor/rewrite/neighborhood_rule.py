"""The rule `neighborhood_attention`: every call that a reader finds is checked, its kernel asked for, and replaced.

The schedule `fast` replaces attention by attention of the same accuracy, not of the same bits. With `config.exact` the
kernel has to have NATTEN's bits, or the call stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ltx_inductor.config import Config
from ltx_inductor.rewrite import flex_window, natten_forms, opaque_forms  # noqa: F401  (registers the readers)
from ltx_inductor.rewrite.digits import Refuse, internal_error
from ltx_inductor.rewrite.drawing import Drawings
from ltx_inductor.rewrite.layout import aten
from ltx_inductor.rewrite.legality import (
    check_inference,
    check_mutation,
    check_plain_tensors,
    check_sizes,
    check_streams,
)
from ltx_inductor.rewrite.needs import NeighborhoodNeed
from ltx_inductor.rewrite.neighborhood import RULE as RULE
from ltx_inductor.rewrite.neighborhood import Miss, NeighborhoodCall, bound_arguments, find_calls, window_of
from ltx_inductor.rewrite.replace import Writer, form_of, remove_dead, same_form, take_place
from ltx_inductor.rewrite.report import Site
from ltx_inductor.rewrite.rule import Job, on_the_cpu
from ltx_inductor.rewrite.source import origin, source_line
from ltx_inductor.rewrite.view import GraphView

_WHAT = "the attention"


def run(job: Job) -> None:
    """See `ltx_inductor.rewrite.rule.Rule`."""
    view = GraphView(job.graph)
    calls: list[NeighborhoodCall] = []
    for found in find_calls(view):
        if isinstance(found, Miss):
            job.refuse(view.order[found.node], found.node, found.why, found.certain)
        else:
            calls.append(found)
    _make_ready(job)
    if not calls:
        job.finish()
        return
    calls.sort(key=lambda call: view.order[call.result])
    rewriter = _Rewriter(job, view, calls)
    for call in calls:
        rewriter.rewrite(call)
    rewriter.finish()


def _make_ready(job: Job) -> None:
    """Asks for the kernels of calls of the op itself, which a model may make: there is nothing to replace in them."""
    for n in job.graph.nodes:
        if n.op != "call_function" or n.target is not torch.ops.ltx_inductor.na3d.default:
            continue
        args = bound_arguments(n)
        q = args["q"].meta["val"]
        try:
            job.ask([_need(q, window_of(args["kernel_size"], "ltx_inductor::na3d"), args["exact"])])
        except Refuse as why:
            job.report.notes.append(f"{source_line(n) or n.name}: ltx_inductor::na3d runs its reference: {why.reason}")


class _Rewriter:
    """Replaces the calls of one graph, in program order."""

    def __init__(self, job: Job, view: GraphView, calls: Sequence[NeighborhoodCall]) -> None:
        self._job, self._view = job, view
        self._writer = Writer(view)
        self._drawings = Drawings(job.graph, view.order, len(job.report.drawings))
        self._pending = {n for call in calls for n in (call.q, call.k, call.v)}
        self._replaced: dict[Node, Node] = {}

    def rewrite(self, call: NeighborhoodCall) -> None:
        job, at, where = self._job, self._view.order[call.result], origin(call.call)
        shapes, contract = _shapes(call), "exact" if job.config.exact else "fast"
        inputs = [self._now(n) for n in (call.q, call.k, call.v)]
        alike = (where.path, where.source, *shapes.values(), contract, call.form)
        mark = self._writer.mark()
        try:
            _check(self._view, call, job.config)
            if job.config.exact and not call.hopper_bits:
                raise Refuse(
                    f"{call.form} does not have the bits of NATTEN's Hopper kernel, the only ones a kernel here has",
                    expected="hopper_na3d_forward with tiles (4, 4, 4) and (4, 4, 8) and a positive scale",
                    hint="without exact=True it is replaced by attention of the same accuracy",
                )
            need = _need(call.q.meta["val"], call.kernel_size, job.config.exact)
            measured = not job.config.exact  # of the schedule `exact` there is no table: it is wanted for its bits
            proof = job.ask([need], _queries(call.q.meta["val"]) if measured else None)
            drawn = self._drawings.before(alike, inputs, [call.result])
            before = job.pictures.before(self._view.order, inputs, [call.result]) if job.pictures else None
            op, new = self._write(call, inputs)
        except Exception as e:
            self._writer.undo(mark)
            job.refuse(at, call.call, e if isinstance(e, Refuse) else internal_error(e))
            return
        take_place(call.result, new)
        self._replaced[call.result] = new
        site = Site(
            RULE,
            "ltx_inductor::na3d",
            None,
            None,
            shapes=shapes,
            contract=contract,
            node=call.result.name,
            drawing=self._drawings.after(alike, drawn, op),
            proof=proof,
            form=call.form,
            **vars(where),
        )
        job.site(at, site)
        remove_dead(job.graph, [call.result], self._pending)
        if job.pictures and before:
            job.pictures.after(before, f"{RULE} {where.source}")

    def finish(self) -> None:
        remove_dead(self._job.graph, list(self._replaced), set())
        self._job.graph.lint()
        self._job.report.drawings += self._drawings.done
        self._job.finish()

    def _now(self, n: Node) -> Node:
        """An input as it is now: it may be the result of an earlier call."""
        return self._replaced.get(n, n)

    def _write(self, call: NeighborhoodCall, inputs: Sequence[Node]) -> tuple[Node, Node]:
        """(the op, the value that takes the place of the result)."""
        w, want = self._writer, call.result.meta["val"]
        w.after(call.result)
        if call.grid is not None:
            inputs = [_on_grid(w, n, call.grid, call.call) for n in inputs]
        arguments = [*inputs, list(call.kernel_size), call.scale, self._job.config.exact]
        if self._job.config.verify == "always":
            arguments.append(True)
        op = new = w.call(torch.ops.ltx_inductor.na3d.default, *arguments, like=call.call)
        if call.grid is not None:
            new = _heads_first(w, op, call.call)
        if not same_form(new.meta["val"], want):
            order = _memory_order(want)
            if order is not None:  # what was replaced keeps its axes in another order in memory
                back = [order.index(i) for i in range(len(order))]
                new = w.call(aten.permute.default, new, order, like=call.call)
                new = w.call(aten.clone.default, new, like=call.call, memory_format=torch.contiguous_format)
                new = w.call(aten.permute.default, new, back, like=call.call)
        if not same_form(new.meta["val"], want):
            raise Refuse(
                f"the fused value would be {form_of(op.meta['val'])}, {call.result.name} is {form_of(want)}",
                expected="the same shape, dtype and strides, or strides of a permutation",
            )
        return op, new


def _on_grid(w: Writer, n: Node, grid: tuple[int, int, int], like: Node) -> Node:
    """[B, heads, T*H*W, head_dim] -> [B, T, H, W, heads, head_dim], a view."""
    turned = w.call(aten.permute.default, n, [0, 2, 1, 3], like=like)
    return w.call(aten.view.default, turned, [_size(w, n, 0), *grid, _size(w, n, 1), _size(w, n, 3)], like=like)


def _heads_first(w: Writer, op: Node, like: Node) -> Node:
    """[B, T, H, W, heads, head_dim], contiguous -> [B, heads, T*H*W, head_dim], a view."""
    length = math.prod(op.meta["val"].shape[1:4])
    flat = w.call(aten.view.default, op, [_size(w, op, 0), length, _size(w, op, 4), _size(w, op, 5)], like=like)
    return w.call(aten.permute.default, flat, [0, 2, 1, 3], like=like)


def _size(w: Writer, n: Node, axis: int) -> Any:
    size = n.meta["val"].shape[axis]
    return size if isinstance(size, int) else w.call(aten.sym_size.int, n, axis)


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """The axes from the outermost to the innermost in memory; None where sizes do not tell."""
    if not all(isinstance(s, int) for s in value.stride()):
        return None
    return sorted(range(value.dim()), key=lambda i: (-value.stride(i), i))


def _check(view: GraphView, call: NeighborhoodCall, config: Config) -> None:
    """Raises Refuse where the call may not be replaced, whatever kernels there are."""
    inputs = (call.q, call.k, call.v)
    q, k, v = (n.meta["val"] for n in inputs)
    check_inference(view, _WHAT)
    check_plain_tensors(view, inputs)
    check_sizes((*inputs, call.result), _WHAT)
    if call.unproved is not None and not config.trust_block_mask:
        raise call.unproved
    if call.grid is None and q.dim() != 6:
        raise Refuse(f"{call.q.name} has {q.dim()} axes", expected="[B, T, H, W, heads, head_dim]")
    for n, t in ((call.k, k), (call.v, v)):
        if t.dtype != q.dtype:
            raise Refuse(f"{n.name} is {t.dtype}, {call.q.name} {q.dtype}", expected="one dtype")
        if t.device != q.device:
            raise Refuse(f"{n.name} is on {t.device}, {call.q.name} on {q.device}", expected="one device")
        if not _same_shape(t, q):
            raise Refuse(
                f"{n.name} has shape {list(t.shape)}, {call.q.name} {list(q.shape)}",
                expected="queries, keys and values of one shape",
            )
    for axis, window, size in zip("THW", call.kernel_size, call.grid or q.shape[1:4], strict=True):
        if window < 1 or statically_known_true(size < window):
            raise Refuse(f"the window has {window} keys along {axis}, the grid {size}", expected="a window that fits")
    if q.device.type == "cpu" and not config.cpu:
        raise on_the_cpu()
    check_mutation(view, inputs, call.result, _WHAT)
    check_streams(call.result, (*call.inside, call.result))


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(statically_known_true(m == n) for m, n in zip(a.shape, b.shape, strict=True))


def _need(q: torch.Tensor, window: tuple[int, int, int], exact: bool) -> NeighborhoodNeed:
    head_dim: Any = q.shape[-1]
    if not isinstance(head_dim, int):
        raise Refuse(f"head_dim is {head_dim}", expected="a size that is known at compile time")
    return NeighborhoodNeed(q.device, q.dtype, head_dim, window, exact)


def _queries(q: torch.Tensor) -> int | None:
    """Queries times heads; None if a size is dynamic."""
    sizes = list(q.shape[:-1])
    return math.prod(sizes) if all(isinstance(s, int) for s in sizes) else None


def _shapes(call: NeighborhoodCall) -> dict[str, str]:
    shapes = {
        name: f"[{','.join(str(s) for s in n.meta['val'].shape)}]"
        for name, n in (("q", call.q), ("k", call.k), ("v", call.v), ("out", call.result))
    }
    if call.grid is not None:
        shapes["grid"] = f"[{','.join(map(str, call.grid))}]"
    return shapes | {"window": f"[{','.join(map(str, call.kernel_size))}]"}
