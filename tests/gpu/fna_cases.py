"""Inputs for neighborhood attention, and what it should give: softmax over the window, in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ltx_inductor.kernels import fna

Triple = tuple[int, int, int]


def inside(size: int, window: int, device: str | torch.device) -> Tensor:
    """[queries, keys] of one axis: which keys are in the window of which query."""
    i = torch.arange(size, device=device)
    start = (i - window // 2).clamp(0, size - window)
    return (i >= start[:, None]) & (i < start[:, None] + window)


def expected(q: Tensor, k: Tensor, v: Tensor, window: Triple, scale: float) -> Tensor:
    """The result in fp64; keys outside of a window have no part in it, be they NaN. For small grids: it is dense."""
    batch, t, h, w, heads, d = q.shape
    masks = [inside(n, m, q.device) for n, m in zip((t, h, w), window, strict=True)]
    mask = masks[0][:, None, None, :, None, None] & masks[1][None, :, None, None, :, None]
    mask = (mask & masks[2][None, None, :, None, None, :]).reshape(t * h * w, -1)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b in range(batch):
        for n in range(heads):
            qs, ks, vs = (x[b, ..., n, :].reshape(-1, d).double() for x in (q, k, v))
            weights = torch.softmax((scale * (qs @ ks.T)).masked_fill(~mask, -math.inf), -1)
            clean = vs.nan_to_num(0.0, 0.0, 0.0)
            result = weights @ clean
            broken = (mask.double() @ (~vs.isfinite()).double()) > 0  # 0 * inf of keys elsewhere does not count
            out[b, ..., n, :] = torch.where(broken, math.nan, result).reshape(t, h, w, d)
    return out


def draw(grid: Triple, heads: int = 2, batch: int = 1, kind: str = "normed", seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v in bf16. normed: as the decoder has them, q and k normalised per head; plain: scores of 8 sigma;
    peaked: one key takes nearly all; flat: all weights about equal; equal: all scores the same."""
    gen = torch.Generator("cuda").manual_seed(seed)
    made = [torch.empty((batch, *grid, heads, 64), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for t in range(grid[0]):  # a frame at a time: the largest grids would not fit in fp32
        q, k, v = (torch.randn((batch, *grid[1:], heads, 64), generator=gen, device="cuda") for _ in range(3))
        if kind == "normed":
            q, k = torch.nn.functional.normalize(q, dim=-1) * 1.7, torch.nn.functional.normalize(k, dim=-1) * 10.4
        elif kind == "peaked":
            q = q * 8
        elif kind == "flat":
            q = q * 0.01
        elif kind == "equal":
            k = torch.ones_like(k)
        for whole, frame in zip(made, (q, k, v), strict=True):
            whole[:, t] = frame
    return tuple(made)


def prepare(window: Triple, exact: bool = False) -> None:
    """Makes the kernel ready on the current device; fails the test with the reason if it cannot be."""
    device = torch.cuda.current_device()
    arch = torch.cuda.get_device_capability(device)
    missing = fna.prepare(arch, dtype=torch.bfloat16, head_dim=64, kernel_size=window, exact=exact, device=device)
    assert missing is None, missing


def run(q: Tensor, k: Tensor, v: Tensor, window: Triple, scale: float = 1.0, exact: bool = False) -> Tensor:
    """The kernel's result, into memory that held NaN before."""
    poison = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
    del poison
    return fna.launch(q, k, v, window, scale, exact)


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error."""
    return float((got.double() - want).norm() / want.norm())
