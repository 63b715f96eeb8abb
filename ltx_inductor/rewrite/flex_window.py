"""FlexAttention whose mask is the window of neighborhood attention: what diffusers' LTX decoder runs by default.

FlexAttention is given a mask twice: as a function, the mask_mod, and as a BlockMask, which says in which blocks to
look. Both are read: the mask_mod is proved to be a window (mask_window.py), and the BlockMask to be made from a dense
mask that is the same window (block_mask.py). Then the attention is one to a window, the BlockMask is not needed, and
with it dies the dense mask, a byte per pair of positions.

A BlockMask that comes in as an input cannot be proved to fit: the user may vouch for it, with `trust_block_mask`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ltx_inductor.rewrite.block_mask import dense_mask, inputs_of
from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.mask_window import Window, reads_a_grid, window_of
from ltx_inductor.rewrite.neighborhood import Miss, NeighborhoodCall, reader
from ltx_inductor.rewrite.size import in_example
from ltx_inductor.rewrite.view import GraphView

FORM = "flex_attention"
_INDICES = ("b", "h", "q", "kv")  # the inputs of a mask_mod


@reader
def flex_windows(view: GraphView) -> Iterator[NeighborhoodCall | Miss]:
    """Every call of FlexAttention whose mask_mod takes positions apart into coordinates; others are none of ours."""
    for n in view.graph.nodes:
        if n.op != "call_function" or n.target is not torch.ops.higher_order.flex_attention or n not in view.live:
            continue
        mask, length = _output(view, n.args[4][-1]), n.args[0].meta["val"].shape[2]
        if mask is None:
            continue
        if not isinstance(length, int):
            yield from _of_symbolic_length(n, mask, length)
            continue
        certain = False
        try:
            if not reads_a_grid(mask, _leaves(mask), length):
                continue
            _check_lengths(n, length)
            window = window_of(mask, (), _leaves(mask), length)
            certain = True
            yield _call(view, n, window, length)
        except Refuse as why:
            yield Miss(n, why, certain)


def _of_symbolic_length(n: Node, mask: Node, length: torch.SymInt) -> Iterator[Miss]:
    """The miss where the mask takes positions apart; certain where it is a window at the sizes of this call.

    Kernels are built for a window, and here it is a symbol, too: the smaller one of window and axis.
    """
    here, leaves = in_example(length), _leaves(mask)
    if reads_a_grid(mask, leaves, here or 0, example=True):
        why = Refuse(
            f"the sequence of {n.name} has {length} positions, a size that is a symbol in this graph",
            expected="a size that is known at compile time",
            hint="compile with dynamic=False; else torch makes sizes symbols when it sees a second one",
        )
        yield Miss(n, why, certain=here is not None and _is_window(mask, leaves, here))


def _is_window(mask: Node, leaves: Mapping[Node, str], here: int) -> bool:
    try:
        window_of(mask, (), leaves, here, example=True)
    except Refuse:
        return False
    return True


def _check_lengths(n: Node, length: int) -> None:
    """Raises Refuse where queries, keys and the mask are not of one length."""
    keys, sizes = n.args[1].meta["val"].shape[2], list(n.args[4][:2])
    if any(other != length for other in (keys, *sizes)):
        raise Refuse(
            f"{n.name} attends from {length} to {keys} positions, with a mask for {sizes[0]} x {sizes[1]}",
            expected="queries and keys on one grid",
        )


def _call(view: GraphView, n: Node, window: Window, length: int) -> NeighborhoodCall:
    q, k, v, score, block_mask, scale = n.args[:6]
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    assert isinstance(v, Node)
    assert isinstance(block_mask, tuple)
    score_out = _output(view, score)
    if score_out is None or score_out is not _inputs(score_out)[0]:
        raise Refuse(f"{n.name} has a score_mod, which changes the scores", expected="a mask_mod only")
    heads = [a.meta["val"].shape[1] for a in (q, k, v)]
    if any(h != heads[0] for h in heads):
        raise Refuse(f"{n.name} has {heads[0]} heads of queries, {heads[1]} of keys", expected="equally many")
    if not isinstance(scale, (int, float)):
        raise Refuse(f"the scale of {n.name} is only known while the model runs", expected="a number")
    result = _only_output(view, n)
    return NeighborhoodCall(
        q,
        k,
        v,
        window.kernel_size,
        float(scale),
        result,
        FORM,
        n,
        inside=(n,),
        grid=window.grid,
        unproved=_unproved(view, block_mask, window, length),
    )


def _unproved(view: GraphView, block_mask: Sequence[Any], window: Window, length: int) -> Refuse | None:
    """Why the BlockMask is not known to be made from its mask_mod; None where it is."""
    tensors = block_mask[2:6]
    inputs = inputs_of(tensors)
    if inputs:
        return Refuse(
            f"the BlockMask comes into the graph as an input, {inputs[0].name}, so that it cannot be proved to fit its "
            "mask_mod",
            expected="a BlockMask that is made inside the compiled region",
            hint="compile the decoder as a whole, or set its NATTEN processor, or vouch for the mask with "
            "ltx_inductor.trust_block_mask=True",
        )
    try:
        dense = dense_mask(tensors[:2], tensors[2:], (block_mask[-3], block_mask[-2]), view.same)
        shape = dense.meta["val"].shape
        coords = tuple(None if size == 1 else name for size, name in zip(shape, _INDICES, strict=True))
        if tuple(shape[2:]) != (length, length) or window_of(dense, coords, {}, length) != window:
            raise Refuse(
                "the BlockMask is made from another mask than its mask_mod",
                expected="create_block_mask, called with the mask_mod",
            )
    except Refuse as why:
        return why
    return None


def _only_output(view: GraphView, n: Node) -> Node:
    """The value of the attention. Raises Refuse where something else of the call is read: the logsumexp."""
    read = {u.args[1]: u for u in n.users if u in view.live}
    others = [u for i, u in read.items() if i != 0]
    if others or 0 not in read:
        what = others[0].name if others else "nothing of it"
        raise Refuse(
            f"the logsumexp of {n.name} is read, as {what}, and the op computes none", expected="return_lse=False"
        )
    return read[0]


def _output(view: GraphView, attribute: Any) -> Node | None:
    """The value that a nested graph, held by a get_attr node, computes; None for a constant."""
    assert isinstance(attribute, Node)
    assert view.graph.owning_module is not None
    nested = getattr(view.graph.owning_module, str(attribute.target))
    assert isinstance(nested, GraphModule)
    out = next(iter(reversed(nested.graph.nodes))).args[0]
    out = out[0] if isinstance(out, (tuple, list)) else out
    return out if isinstance(out, Node) else None


def _inputs(value: Node) -> list[Node]:
    return [n for n in value.graph.nodes if n.op == "placeholder"]


def _leaves(mask: Node) -> dict[Node, str]:
    return dict(zip(_inputs(mask), _INDICES, strict=False))
