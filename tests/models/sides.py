"""Spellings of more than one side, of tables computed in the graph, and of what happens around a rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import pieces as p
from .case import Case

B, S, H, D = 2, 21, 3, 8
BF16 = torch.bfloat16


def bf16(*shape):
    return torch.randn(*shape).to(BF16)


def weight(n):
    return nn.Parameter(bf16(n))


def rope(x, w, cos, sin, heads, rotate=p.inplace_addcmul, norm=p.rms, leave=p.swapaxes_reshape):
    return leave(rotate(p.reshape_swapaxes(norm(x, w), heads), cos, sin))


class Pair(nn.Module):
    """q and k, the same tables."""

    def __init__(self, q_heads=H, k_heads=H):
        super().__init__()
        self.q_heads, self.k_heads = q_heads, k_heads
        self.wq, self.wk = weight(q_heads * D), weight(k_heads * D)

    def forward(self, q, k, cos, sin):
        return rope(q, self.wq, cos, sin, self.q_heads), rope(k, self.wk, cos, sin, self.k_heads)


class PairOwnTables(Pair):
    def forward(self, q, k, cos_q, sin_q, cos_k, sin_k):
        return rope(q, self.wq, cos_q, sin_q, self.q_heads), rope(k, self.wk, cos_k, sin_k, self.k_heads)


class Packed(Pair):
    """q and k out of one projection, per-head norms."""

    def forward(self, x, cos, sin):
        q, k, v = x.unflatten(-1, (3, H, D)).unbind(2)
        q, k = F.rms_norm(q, (D,), self.wq[:D], p.EPS), F.rms_norm(k, (D,), self.wk[:D], p.EPS)
        q, k = p.inplace_addcmul(q.transpose(1, 2), cos, sin), p.inplace_addcmul(k.transpose(1, 2), cos, sin)
        return F.scaled_dot_product_attention(q, k, v.transpose(1, 2))


class KFromQ(Pair):
    """k is computed from the rotated q: one op for both would be a cycle."""

    def forward(self, q, cos, sin):
        q = rope(q, self.wq, cos, sin, H)
        return q, rope(q * 2, self.wk, cos, sin, H)


class Layers(nn.Module):
    """Layers that share cos and sin; each layer's x is the last one's result."""

    def __init__(self, n=4):
        super().__init__()
        self.q, self.k = (
            nn.ParameterList([weight(H * D) for _ in range(n)]),
            nn.ParameterList([weight(H * D) for _ in range(n)]),
        )

    def forward(self, x, cos, sin):
        for wq, wk in zip(self.q, self.k, strict=True):
            q, k = (
                rope(x * (i + 2), w, cos, sin, H).unflatten(-1, (H, D)).transpose(1, 2) for i, w in enumerate((wq, wk))
            )
            x = x + F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return x


class FreqsTwice(nn.Module):
    """Full-width tables: cat([freqs, freqs]).cos(), read as the Hugging Face rotate_half does."""

    def __init__(self, fused=False, sequence_of_batch=False):
        super().__init__()
        self.w, self.rotate = weight(H * D), self.fma if fused else self.sum

    @staticmethod
    def sum(x, half, cos, sin):
        return x * cos + half * sin

    @staticmethod
    def fma(x, half, cos, sin):
        return torch.addcmul(x * cos, half, sin)

    def forward(self, x, freqs):
        emb = torch.cat([freqs, freqs], -1)
        cos, sin = emb.cos(), emb.sin()
        x = p.reshape_swapaxes(p.rms(x, self.w), H).float()
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return p.swapaxes_reshape(self.rotate(x, torch.cat([-b, a], -1), cos, sin)).to(BF16)


class TablesFromPositions(nn.Module):
    """cos and sin computed in the graph, padded in front, gathered by position."""

    def __init__(self, gather):
        super().__init__()
        self.w, self.gather = weight(H * D), gather

    def forward(self, x, freqs, at):
        freqs = freqs[at] if self.gather else freqs * at.unsqueeze(-1)
        cos = torch.cat([torch.ones_like(freqs[:, :1]), freqs.cos()], -1)
        sin = torch.cat([torch.zeros_like(freqs[:, :1]), freqs.sin()], -1)
        x = p.reshape_swapaxes(p.rms(x, self.w), H)
        return p.swapaxes_reshape(p.in_fp32(p.chunk_cat)(x, cos, sin))


class NormModule(nn.Module):
    """nn.RMSNorm behind a projection, consumed by attention."""

    def __init__(self):
        super().__init__()
        self.proj, self.norm = nn.Linear(16, H * D, dtype=BF16), nn.RMSNorm(H * D, eps=1e-5, dtype=BF16)

    def forward(self, x, cos, sin):
        q = p.inplace_addcmul(self.norm(self.proj(x)).view(x.shape[0], -1, H, D).transpose(1, 2), cos, sin)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class LaterMutation(nn.Module):
    """x is written to once the rotation is done: it still reads the old values."""

    def __init__(self):
        super().__init__()
        self.w = weight(H * D)

    def forward(self, x, cos, sin):
        out = rope(x, self.w, cos, sin, H)
        x.mul_(2)
        return out + 1


class Residual(nn.Module):
    """Three modulated layers on a residual stream, each with its own rope."""

    def __init__(self):
        super().__init__()
        self.ws = nn.ParameterList([weight(H * D) for _ in range(3)])

    def forward(self, x, cos, sin):
        for w in self.ws:
            y = p.rms(x, None) * (1 + w) + w
            x = x + rope(y, w, cos, sin, H) * w
        return x


def _case(name, build, inputs, sites, contract, seq, batch, pairs=None, notes="", head_dim=D):
    dynamic = {"seq": seq} | ({"batch": batch} if batch else {})
    return Case(name, build, inputs, sites, contract, None, dynamic, notes, pairs, head_dim)


def x():
    return bf16(B, S, H * D)


def table(heads=H, s=S, dtype=BF16, batch=B):
    return torch.randn(batch, heads, s, D // 2).to(dtype)


ONE, TWO = {0: 1, 1: 2, 2: 2}, {0: 1, 1: 1, 2: 2, 3: 2}
CASES = [
    _case(
        "pair",
        Pair,
        lambda: (x(), x(), table(), table()),
        2,
        "bf16-chain",
        TWO,
        dict.fromkeys(range(4), 0),
        1,
    ),
    _case(
        "pair-head-counts",
        lambda: Pair(4, 2),
        lambda: (bf16(B, S, 4 * D), bf16(B, S, 2 * D), table(1), table(1)),
        2,
        "bf16-chain",
        TWO,
        dict.fromkeys(range(4), 0),
        notes="may be one op or two",
    ),
    _case(
        "pair-own-tables",
        PairOwnTables,
        lambda: (x(), bf16(B, 13, H * D), table(), table(), table(s=13), table(s=13)),
        2,
        "bf16-chain",
        {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2},
        dict.fromkeys(range(6), 0),
        notes="S_q != S_k",
    ),
    _case(
        "pair-packed",
        Packed,
        lambda: (bf16(B, S, 3 * H * D), table(), table()),
        2,
        "bf16-chain",
        ONE,
        {0: 0, 1: 0, 2: 0},
        1,
    ),
    _case("pair-k-from-q", KFromQ, lambda: (x(), table(), table()), 2, "bf16-chain", ONE, {0: 0, 1: 0, 2: 0}, 0),
    _case(
        "layers-share-tables",
        Layers,
        lambda: (x(), table(batch=1), table(batch=1)),
        8,
        "bf16-chain",
        ONE,
        {0: 0},
        4,
        "same-layer pairs only",
    ),
    _case(
        "layers-residual",
        Residual,
        lambda: (x(), table(), table()),
        3,
        "bf16-chain",
        ONE,
        {0: 0, 1: 0, 2: 0},
        0,
    ),
    _case(
        "freqs-twice",
        FreqsTwice,
        lambda: (x(), torch.randn(S, D // 2)),
        1,
        "fp32-rope-muladd",
        {0: 1, 1: 0},
        {0: 0},
    ),
    _case(
        "freqs-twice-fma",
        lambda: FreqsTwice(True),
        lambda: (x(), torch.randn(S, D // 2)),
        1,
        "fp32-rope",
        {0: 1, 1: 0},
        {0: 0},
    ),
    _case(
        "tables-computed",
        lambda: TablesFromPositions(False),
        lambda: (x(), torch.randn(D // 2 - 1), torch.arange(S).float()),
        1,
        "fp32-rope",
        {0: 1, 2: 0},
        {0: 0},
        head_dim=0,
    ),
    _case(
        "tables-gathered",
        lambda: TablesFromPositions(True),
        lambda: (x(), torch.randn(50, D // 2 - 1), torch.randperm(50)[:S]),
        1,
        "fp32-rope",
        {0: 1, 2: 0},
        {0: 0},
        head_dim=0,
    ),
    _case(
        "norm-module",
        NormModule,
        lambda: (bf16(B, S, 16), table(), table()),
        1,
        "bf16-chain",
        ONE,
        {0: 0, 1: 0, 2: 0},
        head_dim=0,
    ),
    _case(
        "input-mutated-later",
        LaterMutation,
        lambda: (x(), table(), table()),
        1,
        "bf16-chain",
        ONE,
        {0: 0, 1: 0, 2: 0},
    ),
]
