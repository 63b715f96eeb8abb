"""Writes a launch into the graph: operands as planned, the op, and the results in the form their readers expect.

Nothing is removed before everything new is in place and checked against the values it replaces; a failure on the way
takes the new nodes out again.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from ltx_inductor.ops import verified
from ltx_inductor.ops.rope import FAKES
from ltx_inductor.rewrite.axes import Plan, SidePlan, result_axes
from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.layout import aten
from ltx_inductor.rewrite.pairs import Launch, input_nodes
from ltx_inductor.rewrite.region import is_pure
from ltx_inductor.rewrite.size import Size, product
from ltx_inductor.rewrite.view import GraphView


class Writer:
    """Adds nodes behind anchors, with fake values, and can take the latest ones out again.

    Nodes behind one anchor keep the order in which they were written, and get a place in `view.order` between the
    anchor and what followed it, so that later launches can tell before from after.
    """

    def __init__(self, view: GraphView) -> None:
        self.view, self.graph = view, view.graph
        self._new: list[tuple[Node, Node, Node]] = []  # (node, its anchor, the tail of the anchor before)
        self._tail: dict[Node, Node] = {}
        self._anchor: Node | None = None

    def after(self, anchor: Node) -> None:
        """The next nodes go behind anchor (behind the last placeholder, if it is one)."""
        while anchor.op == "placeholder" and anchor.next.op == "placeholder":
            anchor = anchor.next
        self._anchor = anchor

    def call(self, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """A new call_function node; its fake value is computed, its source line is that of `like`."""
        assert self._anchor is not None
        tail = self._tail.get(self._anchor, self._anchor)
        with self.graph.inserting_after(tail):
            n = self.graph.call_function(target, args, kwargs)
        self._new.append((n, self._anchor, tail))
        self._tail[self._anchor] = n
        self.view.order[n] = self.view.order[tail] + 2**-20
        n.meta["val"] = _run_fake(target, map_arg(args, lambda a: a.meta["val"]), kwargs)
        if like is not None:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                if key in like.meta:
                    n.meta[key] = like.meta[key]
        return n

    def mark(self) -> int:
        return len(self._new)

    def undo(self, mark: int) -> None:
        """Takes out every node written since `mark`."""
        while len(self._new) > mark:
            n, anchor, tail = self._new.pop()
            self.graph.erase_node(n)
            del self.view.order[n]
            self._tail[anchor] = tail


def _run_fake(target: Any, values: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch._subclasses.FakeTensor)]
    mode = tensors[0].fake_mode if tensors else contextlib.nullcontext()
    dynamic = any(isinstance(s, torch.SymInt) for t in tensors for s in (*t.shape, *t.stride()))
    try:
        with mode, _no_needless_guards(mode, target) if dynamic else contextlib.nullcontext():
            return FAKES.get(target, target)(*values, **kwargs)  # a third of the time of the way through the dispatcher
    except (ValueError, RuntimeError) as e:  # a view that the strides of the operand do not allow
        raise Refuse(
            f"the axes of an operand cannot be viewed as the op reads them: {str(e).splitlines()[0]}",
            expected="token, head and pair axes that are axes of one memory layout",
            hint="make the operand contiguous before the norm or the rotation",
        ) from None


@contextlib.contextmanager
def _no_needless_guards(mode: FakeTensorMode, target: Any) -> Iterator[None]:
    """A fake value says more of symbolic strides than we need to know, and guards on it.

    To file a result, torch 2.11 asks for its memory format. A table that is negated gets the order of strides that its
    operand has; the op reads it in any. (Whether a view can be had depends on strides too, but that matters.)
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(disable_fake_tensor_cache(mode))
        if target is aten.neg.default and mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
        yield


class Replacer:
    """Replaces launches of one graph, in program order.

    Tables that several launches read in one form are written once, behind their root. Replaced chains are removed at
    once, but for nodes that a later launch may refer to; those go in `finish`.
    verify: the ops compare every result with eager's.
    """

    def __init__(self, view: GraphView, launches: Sequence[Launch], verify: bool = False) -> None:
        self.view, self.verify = view, verify
        self._writer = Writer(view)
        self._pending = {n for launch in launches for s in launch.sides for n in input_nodes(s)}
        self._tables: dict[Plan, Node] = {}
        self._replaced: dict[Node, Node] = {}

    def replace(self, launch: Launch) -> Node:
        """Writes the op and hands its results to the readers; returns the op's node.

        Raises Refuse, with the graph as it was, where the new value is not exactly what it replaces.
        """
        mark, tables = self._writer.mark(), dict(self._tables)
        try:
            op, results = self._write(launch)
        except BaseException:
            self._writer.undo(mark)
            self._tables = tables
            raise
        for planned, new in zip(launch.sides, results, strict=True):
            old = planned.side.result
            take_place(old, new)
            self._replaced[old] = new
        remove_dead(self.view.graph, [s.side.result for s in launch.sides], self._pending)
        return op

    def finish(self) -> None:
        """Removes the replaced values, and what only they needed and was kept for a later launch."""
        remove_dead(self.view.graph, list(self._replaced), set())

    def _now(self, p: Plan) -> Plan:
        """The plan with its root as it is now: the root may be the result of an earlier launch."""
        return replace(p, node=self._replaced.get(p.node, p.node))

    def _write(self, launch: Launch) -> tuple[Node, list[Node]]:
        w, sides = self._writer, launch.sides
        like = sides[0].side.result
        cos_sin = [self._table(self._now(p)) for s in sides for p in (s.cos, s.sin)]
        x_plans = [self._now(s.x) for s in sides]
        weight_plans = [self._now(s.weight) if s.weight else None for s in sides]
        inputs = [*cos_sin, *(p.node for p in (*x_plans, *weight_plans) if p)]
        w.after(max(inputs, key=self.view.order.__getitem__))
        xs = [emit(w, p, like) for p in x_plans]
        weights = [emit(w, p, like) if p else None for p in weight_plans]
        eps = [s.side.statistic.eps for s in sides]
        heads = [s.num_heads for s in sides]
        last = (sides[0].side.contract.name + verified.SUFFIX * self.verify, sides[0].layout)
        ops = torch.ops.ltx_inductor
        if len(sides) == 1:
            args = (xs[0], weights[0], *cos_sin, eps[0], heads[0], *last)
            op = w.call(ops.rmsnorm_split_rope.default, *args, like=like)
            outs = [op]
        else:
            tables = (*cos_sin[:2], None, None) if launch.shares_tables else cos_sin
            op = w.call(ops.qk_rmsnorm_split_rope.default, *xs, *weights, *tables, *eps, *heads, *last, like=like)
            outs = [w.call(operator.getitem, op, i, like=s.side.result) for i, s in enumerate(sides)]
        results = [_as_result(w, s, out) for s, out in zip(sides, outs, strict=True)]
        for s, new in zip(sides, results, strict=True):
            readers = [u for u in s.side.result.users if u in self.view.order]
            if any(self.view.order[u] <= self.view.order[new] for u in readers if u in self.view.live):
                raise Refuse(f"{s.side.result.name} is read before all inputs of the op exist")
        return op, results

    def _table(self, p: Plan) -> Node:
        """cos or sin in the form of the op, written behind its root, so that later launches can use it too."""
        if _is_identity(p):
            return p.node
        if p not in self._tables:
            self._writer.after(p.node)
            self._tables[p] = emit(self._writer, p, p.node)
        return self._tables[p]


def _is_identity(p: Plan) -> bool:
    return (
        p.split is None
        and not p.fixed
        and p.order is None
        and not p.negated
        and all(len(g) == 1 for g in p.groups)
        and len(p.groups) == p.node.meta["val"].dim()
    )


def emit(w: Writer, p: Plan, like: Node) -> Node:
    """The nodes of a plan: split, select, permute, squeeze/unsqueeze and merge, negate; as few as it takes."""
    n = p.node
    if p.split is not None:
        n = w.call(aten.view.default, n, _size_args(w, p.split, n), like=like)
    for axis, index in p.fixed:
        n = w.call(aten.select.int, n, axis, index, like=like)
    if p.order is not None:
        n = w.call(aten.permute.default, n, list(p.order), like=like)
    parts = sum(len(g) for g in p.groups)
    rank = n.meta["val"].dim()
    if rank > parts:  # axes of size 1 that belong to no group were sorted to the end
        n = w.call(aten.squeeze.dims, n, list(range(parts, rank)), like=like)
    if any(len(g) > 1 for g in p.groups):
        merged = [product(g) for g in p.groups if g]
        n = w.call(aten.view.default, n, _size_args(w, tuple(merged), n), like=like)
    for i, g in enumerate(p.groups):
        if not g:
            n = w.call(aten.unsqueeze.default, n, i, like=like)
    if p.negated:
        n = w.call(aten.neg.default, n, like=like)
    return n


def _size_args(w: Writer, sizes: tuple[Size, ...], source: Node) -> list[Any]:
    """Sizes as view arguments: ints, a sym_size of an axis that has the size, or -1 for one that none has."""
    args: list[Any] = []
    have = w.view.sizes
    for s in sizes:
        if s.known is not None:
            args.append(s.known)
            continue
        shape = source.meta["val"].shape
        axis = next((i for i, v in enumerate(shape) if have.of(v) == s), None)
        if axis is not None:
            args.append(w.call(aten.sym_size.int, source, axis))
        elif -1 not in args:
            args.append(-1)
        else:
            raise Refuse(f"the sizes {list(sizes)} cannot be written as a view of {source.name}")
    return args


def _as_result(w: Writer, planned: SidePlan, out: Node) -> Node:
    """The op's output with the shape, strides and dtype of the value it replaces."""
    old = planned.side.result
    want, n = old.meta["val"], out
    if not same_form(n.meta["val"], want):
        cut, order, coords = result_axes(planned)
        n = w.call(aten.view.default, n, _size_args(w, cut, n), like=old)
        if order != tuple(range(len(order))):
            n = w.call(aten.permute.default, n, list(order), like=old)
        shape = tuple(w.view.sizes.of(s) for s in want.shape)
        if len(shape) != len(order) or any(not c for c in coords):
            n = w.call(aten.view.default, n, _size_args(w, shape, n), like=old)
    if not same_form(n.meta["val"], want):
        raise Refuse(
            f"the fused value would be {form_of(n.meta['val'])}, {old.name} is {form_of(want)}",
            expected="the same shape, strides and dtype",
        )
    return n


def take_place(old: Node, new: Node) -> None:
    """Every reader of old reads new, which has old's source lines and so on.

    But not what Inductor notes about the operands of a custom op: new has others.
    """
    old.replace_all_uses_with(new)
    new.meta = {**old.meta, "val": new.meta["val"]}
    new.meta.pop("eager_input_vals", None)


def same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.device != b.device or a.dim() != b.dim():
        return False
    for sa, sb, ta, tb in zip(a.shape, b.shape, a.stride(), b.stride(), strict=True):
        if not statically_known_true(sa == sb):
            return False
        if not (statically_known_true(ta == tb) or statically_known_true(sa == 1)):
            return False
    return True


def form_of(t: torch.Tensor) -> str:
    return f"{t.dtype} {tuple(t.shape)} with strides {tuple(t.stride())}"


def _is_removable(n: Node) -> bool:
    return n.op == "get_attr" or n.target in (operator.getitem, torch.ops.higher_order.flex_attention) or is_pure(n)


def remove_dead(graph: Graph, start: Sequence[Node], keep: set[Node]) -> None:
    """Removes `start` and what only it needed, where nothing reads it; inputs, impure nodes and `keep` stay."""
    todo = list(start)
    while todo:
        n = todo.pop()
        if n.op not in ("call_function", "get_attr") or n.users or n in keep or n._erased or not _is_removable(n):
            continue
        inputs = n.all_input_nodes
        graph.erase_node(n)
        todo += inputs
