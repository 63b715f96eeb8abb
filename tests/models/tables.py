"""Where cos and sin come from: how they lie in memory, and what a model does to them before it rotates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """make(B, H, S, r, dtype): the input; seq, batch: its axes; graph(t, heads, x): done to it in the model."""

    make: Callable
    seq: int | None = None
    batch: int | None = None
    graph: Callable | None = None


def _rand(*shape, dtype):
    return torch.randn(*shape).to(dtype)


def _of(*axes):
    """A dense table with the axes named, out of B, H, S, r, and 1."""

    def make(B, H, S, r, dtype):
        return _rand(*[{"B": B, "H": H, "S": S, "r": r}.get(a, a) for a in axes], dtype=dtype)

    return make


def _offset(B, H, S, r, dtype):
    return _rand(B, H, S + 3, r + 4, dtype=dtype)[:, :, 2 : 2 + S, :r]


LAYOUTS = {
    "bhsr": Layout(_of("B", "H", "S", "r"), 2, 0),
    "batch-1": Layout(_of(1, "H", "S", "r"), 2),
    "expanded": Layout(lambda B, H, S, r, d: _rand(1, H, S, r, dtype=d).expand(B, H, S, r), 2, 0),
    "swapped": Layout(lambda B, H, S, r, d: _rand(B, S, H, r, dtype=d).transpose(1, 2), 2, 0),
    "permuted": Layout(lambda B, H, S, r, d: _rand(S, H, B, r, dtype=d).permute(2, 1, 0, 3), 2, 0),
    "offset": Layout(_offset, 2, 0),
    "sr": Layout(_of("S", "r"), 0),
    "1sr": Layout(_of(1, "S", "r"), 1),
    "11sr": Layout(_of(1, 1, "S", "r"), 2),
    "b1sr": Layout(_of("B", 1, "S", "r"), 2, 0),
    "hsr": Layout(_of("H", "S", "r"), 1),
    "bshr swapped in the graph": Layout(_of("B", "S", "H", "r"), 1, 0, lambda t, h, x: t.transpose(1, 2)),
    "flat row": Layout(
        lambda B, H, S, r, d: _rand(B, S, H * r, dtype=d),
        1,
        0,
        lambda t, h, x: t.unflatten(-1, (h, -1)).swapaxes(1, 2),
    ),
    "bsr unsqueezed": Layout(_of("B", "S", "r"), 1, 0, lambda t, h, x: t.unsqueeze(1)),
    "sr expanded in the graph": Layout(
        _of("S", "r"), 0, None, lambda t, h, x: t[None, None].expand(x.shape[0], h, -1, -1)
    ),
    "cut to the sequence": Layout(
        lambda B, H, S, r, d: _rand(B, H, S + 4, r, dtype=d), 2, 0, lambda t, h, x: t[:, :, : x.shape[1]]
    ),
    "repeated heads": Layout(_of("B", 1, "S", "r"), 2, 0, lambda t, h, x: t.repeat(1, h, 1, 1)),
}
