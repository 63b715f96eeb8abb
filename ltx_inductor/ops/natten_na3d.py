"""`natten_na3d`: a call of `natten.na3d` as one op, which runs natten itself.

A NATTEN without its binary cannot be traced: its pure Python breaks the graph, and computes every score of the grid. So
a compile of ours puts this op where it meets the call (see `ltx_inductor.natten_calls`), and the rule
`neighborhood_attention` puts `ltx_inductor::na3d` in its place. Where the rule refuses, the op stays and the call
happens as it does in eager code.

query, key, value  [B, T, H, W, heads, head_dim], one shape, dtype and device
kernel_size, scale as for natten.na3d
out                as query, contiguous
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ltx_inductor", "FRAGMENT")
_LIBRARY.define(
    "natten_na3d(Tensor query, Tensor key, Tensor value, int[3] kernel_size, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sequence[int], scale: float) -> Tensor:
    from natten.functional import na3d

    out: Tensor = na3d(query, key, value, kernel_size=tuple(kernel_size), scale=scale)
    return out.contiguous()


def _fake(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sequence[int], scale: float) -> Tensor:
    return query.new_empty(query.shape)


def _no_gradients(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sequence[int], scale: float) -> Tensor:
    needing = [n for n, t in (("query", query), ("key", key), ("value", value)) if t.requires_grad]
    if needing and torch.is_grad_enabled():
        raise RuntimeError(
            f"ltx_inductor::natten_na3d has no backward, and {', '.join(needing)} requires a gradient; "
            "call natten.na3d itself"
        )
    with torch._C._AutoDispatchBelowAutograd():
        out: Tensor = torch.ops.ltx_inductor.natten_na3d.default(query, key, value, kernel_size, scale)
    return out


_LIBRARY.impl("natten_na3d", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("natten_na3d", _no_gradients, "Autograd")
torch.library.register_fake("ltx_inductor::natten_na3d", _fake, lib=_LIBRARY)
