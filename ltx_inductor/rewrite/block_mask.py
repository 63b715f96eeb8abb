"""From the tensors of a FlexAttention BlockMask back to the dense mask that `create_block_mask` made them from.

create_block_mask counts the True elements of a dense [B, H, Q_LEN, KV_LEN] mask in blocks, padded with False, and lists
per row of blocks first those that are partly True, then, apart, those that are full:

    count = pad(dense).view(B, H, rows, Q, columns, K).permute(0, 1, 2, 4, 3, 5).sum([-2, -1])
    listed = (0 < count) & (count < Q*K)      and, apart,      listed = count == Q*K
    num_blocks, indices = listed.sum(-1), listed.sort(descending=True, stable=True).indices

FlexAttention applies the mask_mod in partial blocks, lets everything through in full ones and skips the others. So if
dense mask and mask_mod are the same, that is the mask; and that the tensors are what `create_block_mask` computes, from
which dense mask, is read off the graph here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ltx_inductor.rewrite.digits import Refuse

aten, prims = torch.ops.aten, torch.ops.prims
_COPIES = (aten.clone.default, aten.alias.default, prims.convert_element_type.default, aten._to_copy.default)
_EXPECTED = "the tensors that torch's create_block_mask computes from the mask_mod"


def dense_mask(
    partial: Sequence[Any], full: Sequence[Any], block: tuple[int, int], same: Callable[[Node], Node]
) -> Node:
    """The dense mask, [B, H, Q_LEN, KV_LEN]. Raises Refuse where the graph does not show that it was one.

    partial, full: (num_blocks, indices) of the blocks under the mask_mod, and of those without; (None, None) for none.
    block: positions of queries and of keys in a block. same: maps equal values of the graph to one node.
    """
    every = block[0] * block[1]
    listed = _listed(partial[0], partial[1], same)
    if full[0] is None and full[1] is None:
        counts = [_compared(listed, aten.gt.Scalar, 0)]
    else:
        if listed.target is not aten.bitwise_and.Tensor:
            raise _strange(listed)
        more, less = listed.args
        counts = [
            _compared(more, aten.gt.Scalar, 0),
            _compared(less, aten.lt.Scalar, every),
            _compared(_listed(full[0], full[1], same), aten.eq.Scalar, every),
        ]
    if any(same(c) is not same(counts[0]) for c in counts):
        raise _strange(counts[-1])
    return _counted(counts[0], block)


def inputs_of(tensors: Sequence[Any]) -> list[Node]:
    """Graph inputs that the tensors are computed from."""
    seen: set[Node] = set()
    stack = [t for t in tensors if isinstance(t, Node)]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack += n.all_input_nodes
    return [n for n in seen if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]


def _listed(num_blocks: Any, indices: Any, same: Callable[[Node], Node]) -> Node:
    """The truth value per block, of which num_blocks counts and indices lists the True ones."""
    total = _step(num_blocks, aten.sum.dim_IntList)
    rank = _rank(total.args[0])
    if [d % rank for d in total.args[1]] != [rank - 1] or _is_special(total):
        raise _strange(total)
    order = _plain(indices)
    if getattr(order.target, "__name__", "") != "getitem" or order.args[1] != 1:
        raise _strange(order)
    sort = order.args[0]
    if sort.target is not aten.sort.stable:
        raise _strange(sort)
    wanted = {"stable": True, "descending": True}
    if sort.kwargs.get("dim", -1) % rank != rank - 1 or len(sort.args) > 1 or not wanted.items() <= sort.kwargs.items():
        raise _strange(sort)
    listed = _plain(total.args[0])
    if same(_plain(sort.args[0])) is not same(listed) or listed.meta["val"].dtype is not torch.bool:
        raise _strange(listed)
    return listed


def _compared(n: Any, target: Any, to: int) -> Node:
    if not isinstance(n, Node) or n.target is not target or n.args[1] != to:
        raise _strange(n)
    count = n.args[0]
    assert isinstance(count, Node)
    return count


def _counted(count: Node, block: tuple[int, int]) -> Node:
    total = _step(count, aten.sum.dim_IntList)
    if [d % 6 for d in total.args[1]] != [4, 5] or _is_special(total):
        raise _strange(total)
    turned = _step(total.args[0], aten.permute.default)
    blocks = _step(turned.args[0], aten.view.default)
    shape = list(blocks.meta["val"].shape)
    if list(turned.args[1]) != [0, 1, 2, 4, 3, 5] or len(shape) != 6 or shape[3::2] != list(block):
        raise _strange(blocks)
    dense = _plain(blocks.args[0])
    if dense.target is aten.constant_pad_nd.default:
        added = list(dense.args[1])
        at_end = not any(added[::2]) and all(p >= 0 for p in added[1::2]) and len(added) <= 4
        if not at_end or (len(dense.args) > 2 and dense.args[2] != 0):
            raise _strange(dense)
        dense = _plain(dense.args[0])
    if dense.meta["val"].dtype is not torch.bool or _rank(dense) != 4:
        raise _strange(dense)
    return dense


def _plain(n: Any) -> Node:
    """n without copies, and casts of integers to 32 bits or more (what is counted here is less) or of truth values."""
    while isinstance(n, Node) and n.target in _COPIES and not n.meta["val"].dtype.is_floating_point:
        into, origin = n.meta["val"].dtype, n.args[0].meta["val"].dtype
        if into is not origin and into not in (torch.int32, torch.int64) and origin is not torch.bool:
            break
        n = n.args[0]
    if not isinstance(n, Node) or n.op != "call_function":
        raise _strange(n)
    return n


def _step(n: Any, target: Any) -> Node:
    n = _plain(n)
    if n.target is not target:
        raise _strange(n)
    return n


def _is_special(total: Node) -> bool:
    """A sum that keeps its axes or adds in another dtype than int64."""
    return any(total.args[2:]) or bool(total.kwargs)


def _rank(n: Any) -> int:
    return int(n.meta["val"].dim())


def _strange(n: Any) -> Refuse:
    what = f"{n.name} = {n.target}" if isinstance(n, Node) else repr(n)
    return Refuse(
        "the BlockMask is not seen to be made from its mask_mod",
        expected=_EXPECTED,
        found=what,
        hint="make it with create_block_mask, or set ltx_inductor.trust_block_mask=True if it is as good as that",
    )
