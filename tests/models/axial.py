"""RMSNorm per head, a scale, RoPE over several token axes: the spellings that rmsnorm_axial_rope must read.

Every module takes q and k [B, T, H, W, heads, head_dim] (or fewer token axes) and, unless it makes its own, cos and sin
of every axis. The inputs are those of `Axial.inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BF16 = torch.bfloat16
GRID, HEADS, PAIRS = (2, 5, 6, 9), 3, (4, 6, 6)
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def stacked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As diffusers' LTX2VideoVaeRotaryPosEmbed3D._rotate_axis."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0].float(), pairs[..., 1].float()
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.reshape(x.shape).to(x.dtype)


def unbound(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((cos * even - sin * odd, cos * odd + sin * even), -1).flatten(-2).type_as(x)


def strided(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x*cos + swap(x)*sin, with the tables of both neighbours written out."""
    x32 = x.float()
    even, odd = x32.unflatten(-1, (-1, 2)).unbind(-1)
    swap = torch.stack((-odd, even), -1).flatten(-2)
    return (x32 * cos.repeat_interleave(2, -1) + swap * sin.repeat_interleave(2, -1)).to(x.dtype)


def fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    parts = torch.addcmul(even * cos, -sin, odd), torch.addcmul(odd * cos, sin, even)
    return torch.stack(parts, -1).flatten(-2).to(x.dtype)


def negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotation by the negative angle."""
    return stacked(x, cos, -sin)


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2).to(x.dtype)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves apart within every axis: not covered."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def reflected(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos + odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def narrow(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Everything in the dtype of x: every product is rounded."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Not rounded: whoever joins the axes does that."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Axial(nn.Module):
    """turn: of one axis. cut: "slice", "split", "narrow" or "nested". scale: of q. order: of the axes in the result."""

    def __init__(
        self,
        turn: Turn = stacked,
        cut: str = "slice",
        scale: Any = 0.25,
        pairs: Sequence[int] = PAIRS,
        weight: bool = True,
        order: Sequence[int] | None = None,
        dtype: torch.dtype = BF16,
    ) -> None:
        super().__init__()
        self.turn, self.cut, self.scale, self.pairs = turn, cut, scale, tuple(pairs)
        self.order = order or range(len(self.pairs))
        norms = [nn.RMSNorm(2 * sum(pairs), eps=1e-6, elementwise_affine=weight, dtype=dtype) for _ in range(2)]
        self.norm_q, self.norm_k = norms

    def parts(self, n: Tensor) -> Sequence[Tensor]:
        sizes = [2 * p for p in self.pairs]
        if self.cut == "split":
            return n.split(sizes, -1)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        if self.cut == "narrow":
            return [n.narrow(-1, start, size) for start, size in zip(starts, sizes, strict=True)]
        if self.cut == "nested":
            return [n[..., start:][..., :size] for start, size in zip(starts, sizes, strict=True)]
        return [n[..., start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def rotated(self, n: Tensor, tables: Sequence[Tensor]) -> Tensor:
        count = len(self.pairs)
        turned = [self.turn(p, c, s) for p, c, s in zip(self.parts(n), tables[:count], tables[count:], strict=True)]
        return torch.cat([turned[i] for i in self.order], -1).to(n.dtype)

    def scaled(self, q: Tensor) -> Tensor:
        return self.norm_q(q) * self.scale

    def forward(self, q: Tensor, k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        """tables: cos of every axis, then sin of every axis."""
        return self.rotated(self.scaled(q), tables), self.rotated(self.norm_k(k), tables)

    def inputs(self, grid: Sequence[int] = GRID, heads: int = HEADS, seed: int = 0) -> tuple[Tensor, ...]:
        """Table i varies along the token axis i from the end of those that there are tables for."""
        dtype = self.norm_q.weight.dtype if self.norm_q.weight is not None else BF16
        gen = torch.Generator().manual_seed(seed)
        q, k = (awkward(torch.randn(*grid, heads, 2 * sum(self.pairs), generator=gen)).to(dtype) for _ in range(2))
        angles = []
        for axis, pairs in enumerate(self.pairs):
            along = len(grid) - len(self.pairs) + axis
            shape = [n if i == along else 1 for i, n in enumerate(grid)] + [1, pairs]
            angle = torch.rand(shape, generator=gen) * 6.3
            angle[..., ::3] = 0.78539816  # cos == sin: the products of equal neighbours cancel
            angles.append(angle)
        for norm in (self.norm_q, self.norm_k):
            if norm.weight is not None:
                with torch.no_grad():
                    w = torch.randn(norm.weight.shape, generator=gen)
                    w[1::2] = w[::2]
                    norm.weight.copy_(w)
        return q, k, *(a.cos() for a in angles), *(a.sin() for a in angles)


def awkward(x: Tensor) -> Tensor:
    """In place: every kind of value that shows a wrong rounding, by token, and equal neighbours every third pair."""
    rows = x.view(-1, x.shape[-1])
    rows[1::7] *= 1e-3
    rows[2::7] *= 1e-6
    rows[3::7, ::5] *= 1e4
    rows[4::7, ::3], rows[4::7, 1::3] = 0.0, -0.0
    rows[5::7, ::4] = 1e-40
    rows[6::35, 1], rows[13::35, 2], rows[20::35, 3] = float("inf"), float("nan"), float("-inf")
    rows[..., 1::6] = rows[..., 0::6]
    return x
