"""Values that are rotated, but not normalised by a torch.rms_norm of their row right before."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import pieces as p
from .functional import inputs_fp32, refuse, with_norm, with_rotation
from .sides import BF16, H, S, rope

EPS = p.EPS


def same(x, w):
    return x


def llama(x, w):
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def gemma(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w.float())).to(x.dtype)


def by_hand(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * w).to(x.dtype)


def by_hand_short(x, w):
    return (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS) * w).to(x.dtype)


def sum_over_n(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) / y.shape[-1] + EPS) * w).to(x.dtype)


def by_division(x, w):
    y = x.float()
    return (y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * w).to(x.dtype)


def in_16_bits(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def of_another_row(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS).flip(1)).to(x.dtype)


def over_the_sequence(x, w):
    return F.rms_norm(x.transpose(1, 2), (S,), None, EPS).transpose(1, 2)


def over_sequence_and_row(x, w):
    return F.rms_norm(x, x.shape[1:], None, EPS)


NO_NORM = r"(?i)no(t| ).*norm|without.*norm"
SCALE = r"(?i)scale|multiplied|weight|factor"
SUM = r"(?i)\badd|shift|sum|product|expected"
HAND = r"(?i)hand|written out|reduction order"
AXIS = r"(?i)axis|axes|another token"

CASES = [
    refuse("no-norm", NO_NORM, with_norm(same)),
    refuse("no-norm-scaled", NO_NORM, with_norm(lambda x, w: x * w)),
    refuse(
        "no-norm-fp32",
        NO_NORM,
        lambda x, c, s, w: rope(x, w, c, s, H, p.in_fp32(p.chunk_cat), same),
        inputs_fp32,
    ),
    refuse(
        "layer-norm",
        r"(?i)layer ?norm|not a mean of squares|norm",
        with_norm(lambda x, w: F.layer_norm(x, (x.shape[-1],), w)),
    ),
    refuse("l2-norm", r"(?i)norm", with_norm(lambda x, w: F.normalize(x, dim=-1) * w)),
    refuse(
        "group-norm",
        r"(?i)norm",
        with_norm(lambda x, w: F.group_norm(x.transpose(1, 2), H, w).transpose(1, 2)),
    ),
    refuse("norm-over-the-sequence", AXIS, with_norm(over_the_sequence), seq=None),
    refuse("norm-over-sequence-and-row", AXIS + "|half|heads", with_norm(over_sequence_and_row), seq=None),
    refuse("norm-of-another-row", r"(?i)another|token|flip|hand|written out|pieces", with_norm(of_another_row)),
    refuse("scale-between", SCALE, with_norm(lambda x, w: p.rms(x, w) * 0.125)),
    refuse(
        "scale-between-fp32",
        SCALE,
        with_rotation(lambda x, c, s: p.chunk_cat(x.float() * 0.5, c, s).to(BF16)),
        inputs_fp32,
    ),
    refuse("division-between", SCALE + "|div|not of a value", with_norm(lambda x, w: p.rms(x, w) / 0.9)),
    refuse("shift-between", SUM + "|not of a value", with_norm(lambda x, w: p.rms(x, w) + w)),
    refuse(
        "modulation-between",
        SUM + "|scale|multiplied|not of a value",
        with_norm(lambda x, w: p.rms(x, None) * (1 + w) + w),
    ),
    refuse(
        "weight-dtype",
        r"(?i)weight.*(float32|fp32|f32|dtype)|dtype.*weight",
        with_norm(p.rms),
        dtype=torch.float32,
    ),
    refuse("weight-one-plus", r"(?i)1 ?\+ ?w|weight|\+ ?1", with_norm(lambda x, w: p.rms(x, 1 + w))),
    refuse("weight-per-token", r"(?i)weight|multiplied", with_norm(lambda x, w: p.rms(x, None) * x[:, :, :1])),
    refuse("rounding-before-the-weight", r"(?i)weight|round", with_norm(lambda x, w: p.rms(x, None) * w)),
    refuse("hand-written", HAND, with_norm(by_hand)),
    refuse("hand-written-short", HAND, with_norm(by_hand_short)),
    refuse("hand-written-llama", HAND + "|weight|round", with_norm(llama)),
    refuse("hand-written-gemma", HAND + r"|weight|1 ?\+", with_norm(gemma)),
    refuse("hand-written-sum-over-n", HAND + "|sum", with_norm(sum_over_n)),
    refuse("hand-written-division", HAND + "|norm", with_norm(by_division)),
    refuse("hand-written-16-bit", HAND + "|bfloat16|bf16", with_norm(in_16_bits)),
]
