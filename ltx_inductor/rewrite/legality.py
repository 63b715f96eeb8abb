"""May a value be replaced at all? Each check raises Refuse with what stands in the way and what to do about it.

The public checks serve every rule; `check_region` is all of them, and its own, for a side of the RoPE rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ltx_inductor.rewrite.axes import SidePlan
from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.layout import LAYOUT, aten
from ltx_inductor.rewrite.norm import Statistic, weight_of_call
from ltx_inductor.rewrite.region import computed_inside
from ltx_inductor.rewrite.view import GraphView

_METADATA = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}


def check_region(view: GraphView, planned: SidePlan, region: set[Node]) -> SidePlan:
    """Returns the side unchanged, or raises Refuse."""
    inputs = list(_inputs(planned))
    check_inference(view, "the norm and the rotation")
    check_plain_tensors(view, inputs)
    check_sizes([*inputs, planned.side.result], "the rotation")
    check_norm(planned.side.statistic)
    inside = computed_inside(planned.side.result, region)  # redundant once the result is replaced
    check_readers(view, {planned.side.cos.node, planned.side.sin.node}, planned.side.result, inside)
    check_mutation(view, [*inputs, *between(planned.side.statistic, inside)], planned.side.result, "the rotation")
    check_streams(planned.side.result, inside)
    return planned


def check_inference(view: GraphView, what: str) -> None:
    """what: the region, in words, for the sentence."""
    if view.is_training:
        raise Refuse(
            f"this is a training graph: its backward reads values inside {what}",
            expected="an inference graph",
            hint="call the model under torch.no_grad() or torch.inference_mode()",
        )


def check_norm(st: Statistic) -> None:
    """Eager runs torch.rms_norm's fused kernel, whose order of summation ours has."""
    if not st.mean:
        raise Refuse(
            f"{st.rstd.name} divides a sum by N, which rounds differently from the mean of torch.rms_norm",
            expected="torch.rms_norm or torch.nn.RMSNorm",
        )
    if not st.fused:
        raise Refuse(
            f"the norm of {st.x.name} is written out by hand, so eager adds up its squares in another order than "
            "torch.rms_norm",
            expected="torch.nn.RMSNorm or torch.nn.functional.rms_norm",
            hint="use torch.nn.RMSNorm in the model: same values, and this rewrite",
        )
    _check_weight(st)


def _check_weight(st: Statistic) -> None:
    weight = weight_of_call(st)
    if weight is not None and weight.meta["val"].dtype != st.called_in:
        raise Refuse(
            f"torch.rms_norm is called with an input in {st.called_in} and the weight {weight.name} in "
            f"{weight.meta['val'].dtype}: eager then does not use its fused kernel, and sums in another order",
            expected="input and weight of one dtype",
            hint="cast the weight where the norm is called, or call the norm in the dtype of its weight",
        )


def check_sizes(nodes: Iterable[Node], what: str) -> None:
    """Sizes that only the running model knows: Inductor cannot fix the layout of such an operand for an opaque op."""
    for n in nodes:
        value = n.meta["val"]
        if free_unbacked_symbols((*value.shape, *value.stride())):
            raise Refuse(
                f"{n.name} has a size that is only known while the model runs, {tuple(value.shape)}",
                expected="sizes that are known, or symbols of an input's size",
                hint=f"cut to a data-dependent length outside the compiled model, or after {what}",
            )


def check_plain_tensors(view: GraphView, inputs: Iterable[Node]) -> None:
    """A quantised weight of some linear layer is no obstacle; a subclass among the operands, or any DTensor, is."""
    parts = [n for n in inputs if storage_root(n) in view.subclass_parts]
    if parts or view.has_dtensor:
        what = f"{parts[0].name} is part of a tensor subclass" if parts else "the model was called with DTensors"
        raise Refuse(
            f"{what}, whose own operations are no longer visible in the graph",
            expected="plain tensors",
            hint="compile the part of the model that works on plain local tensors",
        )


def check_readers(view: GraphView, tables: set[Node], result: Node, inside: set[Node]) -> None:
    """Intermediates of the rotation must not be read outside; the norm's own values may (the norm then stays).

    What depends on a table is past the norm: keeping it would mean computing the rotation twice.
    """
    past: set[Node] = set()
    for n in sorted(inside, key=view.order.__getitem__):
        if not any(a in past or (a not in inside and _reads(view, a, tables)) for a in n.all_input_nodes):
            continue
        past.add(n)
        if n is result:
            continue
        for u in n.users:
            if u not in inside and u in view.live and u.target not in _METADATA:
                raise Refuse(
                    f"{n.name}, an intermediate of the rotation, is also read by {u.name}",
                    expected="that only the rotation reads it",
                    hint="compute the other use from the result or from the normalised value",
                )


def _reads(view: GraphView, n: Node, tables: set[Node], limit: int = 8) -> bool:
    """Is n a view or a cast of a table? (An operand is taken at its root; the graph uses its views, or duplicates.)"""
    for _ in range(limit):
        if view.same(n) in tables:
            return True
        if n.op != "call_function" or not n.all_input_nodes:
            return False
        n = n.all_input_nodes[0]
    return False


def _inputs(planned: SidePlan) -> Iterator[Node]:
    side = planned.side
    yield side.x.node
    yield side.cos.node
    yield side.sin.node
    if side.weight:
        yield side.weight.node


def check_mutation(view: GraphView, inputs: Iterable[Node], result: Node, what: str) -> None:
    """No op between the inputs (and intermediates) and the result writes to memory that one of them may share."""
    if not view.writes:
        return
    roots = [(storage_root(n), n) for n in inputs]
    end = view.order[result]
    for n, written in view.writes:
        target = storage_root(written)
        for root, read in roots:
            if root is target and view.order[read] < view.order[n] <= end:
                raise Refuse(
                    f"{n.name} = {n.target} writes to the memory of {read.name} before {what} is finished",
                    expected="inputs that stay as they are until the result is computed",
                )


def between(st: Statistic, inside: Iterable[Node]) -> list[Node]:
    """The intermediates of a region: those of the statistic, and `inside`."""
    found = {st.x: None, st.rstd: None}
    todo = [st.rstd]
    while todo:
        for a in todo.pop().all_input_nodes:
            if a not in found:
                found[a] = None
                todo.append(a)
    return [*list(found)[1:], *inside]


def storage_root(n: Node) -> Node:
    """The value whose memory n may share, through views and ops that write to their operand."""
    while n.op == "call_function" and n.args and isinstance(n.args[0], Node) and _may_share(n.target):
        n = n.args[0]
    return n


def _may_share(target: object) -> bool:
    """Of its first argument; split, unbind and as_strided are views that LAYOUT does not have."""
    if isinstance(target, torch._ops.OpOverload) and target._schema.arguments:
        return target in LAYOUT or target._schema.arguments[0].alias_info is not None
    return target in LAYOUT


def check_streams(result: Node, inside: Iterable[Node]) -> None:
    streams = {(n.meta.get("custom") or {}).get("stream") for n in inside}
    if len(streams) > 1:
        raise Refuse(f"{result.name} is computed on {len(streams)} CUDA streams", expected="one stream")
