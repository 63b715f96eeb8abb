"""The small parts that spellings are put together from: norm the row, enter heads, rotate, leave heads.

Shapes: x [B, S, H*D], inside a rotation [B, H, S, D]; cos and sin broadcast to [B, H, S, r], r = D/2.
`a` and `b` are the first and the second half of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

EPS = 1e-6


# ---- norms: (x, w) -> normalised x, [B, S, N]
def rms(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


def rms_eps_none(x, w):
    return F.rms_norm(x, (x.shape[-1],), w)


def rms_torch(x, w):
    return torch.rms_norm(x, [x.shape[-1]], w, EPS)


def rms_no_weight(x, w):
    return F.rms_norm(x, (x.shape[-1],), None, EPS)


def rms_per_head(x, w):
    heads = x.unflatten(-1, (-1, w.shape[0]))
    return F.rms_norm(heads, (w.shape[0],), w, EPS).flatten(-2)


def rms_fp32(x, w):
    """The result stays fp32, as under autocast on torch >= 2.12."""
    return F.rms_norm(x.float(), (x.shape[-1],), w.float(), EPS)


def rms_weight_slice(x, w):
    """The weight is the front of a longer vector."""
    return F.rms_norm(x, (x.shape[-1],), w[: x.shape[-1]], EPS)


# ---- enter: [B, S, H*D] -> [B, H, S, D]
def reshape_swapaxes(x, heads):
    return x.reshape(x.shape[0], x.shape[1], heads, -1).swapaxes(1, 2)


def unflatten_transpose(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def einops_in(x, heads):
    return rearrange(x, "b s (h d) -> b h s d", h=heads)


def view_permute(x, heads):
    return x.view(x.shape[0], -1, heads, x.shape[-1] // heads).permute(0, 2, 1, 3)


def view_movedim(x, heads):
    return x.unflatten(2, (heads, x.shape[-1] // heads)).movedim(2, 1)


def permute_contiguous(x, heads):
    return unflatten_transpose(x, heads).contiguous()


def permute_then_view(x, heads):
    """Heads are split after the sequence has moved to the back."""
    return x.transpose(1, 2).unflatten(1, (heads, -1)).transpose(2, 3)


# ---- leave: [B, H, S, D] -> what the model keeps
def swapaxes_reshape(x):
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def transpose_flatten(x):
    return x.transpose(1, 2).flatten(2)


def einops_out(x):
    return rearrange(x, "b h s d -> b s (h d)")


def permute_contiguous_view(x):
    return x.permute(0, 2, 1, 3).contiguous().view(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def cat_of_heads(x):
    return torch.cat(x.unbind(1), -1)


def keep_bhsd(x):
    return x


def keep_bhsd_contiguous(x):
    return x.contiguous()


def keep_bshd(x):
    return x.transpose(1, 2)


def keep_bshd_contiguous(x):
    return x.transpose(1, 2).contiguous()


def attend(x):
    """Consumed by attention, as a permuted 4-D value."""
    return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


# ---- rotations whose sum is one fma (addcmul)
def inplace_addcmul(x, cos, sin):
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    out = halves * cos.unsqueeze(-2)
    out[..., :1, :].addcmul_(-sin.unsqueeze(-2), halves[..., 1:, :])
    out[..., 1:, :].addcmul_(sin.unsqueeze(-2), halves[..., :1, :])
    return out.reshape(x.shape)


def inplace_shared(x, cos, sin):
    """Each unsqueeze and the neg written once."""
    halves, cos, sin = x.unflatten(-1, (2, -1)), cos[..., None, :], sin[..., None, :]
    minus = -sin
    out = halves * cos
    out.narrow(-2, 0, 1).addcmul_(halves.narrow(-2, 1, 1), minus)
    out.narrow(-2, 1, 1).addcmul_(halves.narrow(-2, 0, 1), sin)
    return out.flatten(-2)


def inplace_flat(x, cos, sin):
    """In place on the two halves of the last axis, tables widened by cat."""
    r = x.shape[-1] // 2
    out = x * torch.cat([cos, cos], -1)
    out[..., :r].addcmul_(x[..., r:], -sin)
    out[..., r:].addcmul_(x[..., :r], sin)
    return out


def chunk_cat(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([torch.addcmul(a * cos, -sin, b), torch.addcmul(b * cos, sin, a)], -1)


def chunk_cat_neg_x(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((torch.addcmul(cos * a, sin, -b), torch.addcmul(cos * b, a, sin)), dim=-1)


def split_stack_flatten(x, cos, sin):
    a, b = x.split(x.shape[-1] // 2, -1)
    return torch.stack([(a * cos).addcmul(b, -sin), (b * cos).addcmul(a, sin)], -2).flatten(-2)


def unbind_stack_last(x, cos, sin):
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    out = torch.stack([torch.addcmul(a * cos, b, -sin), torch.addcmul(b * cos, a, sin)], -1)
    return out.transpose(-1, -2).flatten(-2)


def select_cat(x, cos, sin):
    halves = x.view(*x.shape[:-1], 2, -1)
    a, b = halves.select(-2, 0), halves[..., 1, :]
    return torch.cat(
        [torch.addcmul(a * cos, -sin, b)[..., None, :], torch.addcmul(b * cos, sin, a)[..., None, :]], -2
    ).flatten(-2)


def slice_writes(x, cos, sin):
    r, out = x.shape[-1] // 2, torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))
    a, b = x[..., :r], x[..., r:]
    out[..., :r] = torch.addcmul(a * cos, -sin, b)
    out[..., r:] = torch.addcmul(b * cos, sin, a)
    return out


def select_writes(x, cos, sin):
    halves = x.unflatten(-1, (2, -1))
    out = torch.zeros_like(halves, dtype=torch.promote_types(x.dtype, cos.dtype))
    out[..., 0, :] = torch.addcmul(halves[..., 0, :] * cos, halves[..., 1, :], -sin)
    out[..., 1, :] = torch.addcmul(halves[..., 1, :] * cos, halves[..., 0, :], sin)
    return out.flatten(-2)


def rotate_half(x, cos, sin):
    """The Hugging Face form, its wide tables provably made of two equal halves."""
    a, b = x.chunk(2, -1)
    return torch.addcmul(x * torch.cat([cos, cos], -1), torch.cat([-b, a], -1), torch.cat([sin, sin], -1))


def rotate_half_signed_table(x, cos, sin):
    a, b = x.tensor_split(2, -1)
    return torch.addcmul(torch.cat([cos, cos], -1) * x, torch.cat([-sin, sin], -1), torch.cat([b, a], -1))


def flip_halves(x, cos, sin):
    halves = x.unflatten(-1, (2, -1))
    return torch.addcmul(halves * cos.unsqueeze(-2), halves.flip(-2), torch.stack([-sin, sin], -2)).flatten(-2)


def inverse_rotation(x, cos, sin):
    """By the negative angle."""
    a, b = x.chunk(2, -1)
    return torch.cat([torch.addcmul(a * cos, sin, b), torch.addcmul(b * cos, -sin, a)], -1)


def double_negation(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([torch.addcmul(-a * -cos, -sin, b), torch.addcmul(-(-b * cos), torch.neg(-sin), a)], -1)


def swapped_tables(x, cos, sin):
    """The angle pi/2 - t: sin in the role of cos."""
    a, b = x.chunk(2, -1)
    return torch.cat([torch.addcmul(a * sin, -cos, b), torch.addcmul(b * sin, cos, a)], -1)


FMA = [
    inplace_addcmul,
    inplace_shared,
    inplace_flat,
    chunk_cat,
    chunk_cat_neg_x,
    split_stack_flatten,
    unbind_stack_last,
    select_cat,
    slice_writes,
    select_writes,
    rotate_half,
    rotate_half_signed_table,
    flip_halves,
    inverse_rotation,
    double_negation,
    swapped_tables,
]


# ---- rotations whose products are rounded before the sum
def chunk_cat_sub(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def chunk_cat_sub_reordered(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([-(sin * b) + cos * a, sin * a + cos * b], -1)


def stack_sub(x, cos, sin):
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -2).flatten(-2)


def rotate_half_sum(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


def writes_sub(x, cos, sin):
    r, out = x.shape[-1] // 2, torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))
    out[..., :r] = x[..., :r] * cos - x[..., r:] * sin
    out[..., r:] = x[..., r:] * cos + x[..., :r] * sin
    return out


def inplace_sub(x, cos, sin):
    a, b = x.chunk(2, -1)
    first, second = a * cos, b * cos
    first.sub_(b * sin)
    second.add_(a * sin)
    return torch.cat([first, second], -1)


MULADD = [chunk_cat_sub, chunk_cat_sub_reordered, stack_sub, rotate_half_sum, writes_sub, inplace_sub]


# ---- precision around a rotation
def in_fp32(rotate):
    """x.float() before, the dtype of x after."""

    def run(x, cos, sin):
        return rotate(x.float(), cos, sin).to(x.dtype)

    return run


def tables_in_fp32(rotate):
    def run(x, cos, sin):
        return rotate(x.float(), cos.float(), sin.float()).type_as(x)

    return run


def narrow_to(dtype):
    def around(rotate):
        return lambda x, cos, sin: rotate(x, cos, sin).to(dtype)

    return around


class Rope(nn.Module):
    """One side: x [B, S, H*D] (or what `take` makes that of), cos and sin, -> rotated."""

    def __init__(
        self,
        heads,
        head_dim,
        dtype,
        *,
        norm,
        enter,
        rotate,
        leave,
        take=None,
        tables=None,
        weight=None,
        twice=False,
    ):
        super().__init__()
        self.heads, self.norm, self.enter, self.rotate, self.leave = heads, norm, enter, rotate, leave
        self.take, self.tables, self.twice = take, tables, twice
        self.w = nn.Parameter(torch.randn(weight or heads * head_dim).to(dtype), requires_grad=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
        q = self.take(x, self.heads) if self.take else x
        if self.tables:
            cos, sin = self.tables(cos, self.heads, q), self.tables(sin, self.heads, q)
        n = self.norm(q, self.w)
        out = self.leave(self.rotate(self.enter(n, self.heads), cos, sin))
        return (out, n) if self.twice else out
