"""What follows a good norm, and is not a split rotation, or rounds in a way no contract has."""

from __future__ import annotations

import torch

from . import pieces as p
from .functional import R, first, halves, inputs_16, inputs_fp32, refuse, second, with_norm, with_rotation
from .sides import BF16, D, S, table, x


# ---- helpers of other models
def partial(x, cos, sin):
    return torch.cat([p.chunk_cat(x[..., :4], cos[..., :2], sin[..., :2]), x[..., 4:]], -1)


def interleaved(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([torch.addcmul(even * cos, -sin, odd), torch.addcmul(odd * cos, sin, even)], -1).flatten(-2)


def interleaved_fp32(x, cos, sin):
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


def complex_pairs(x, cos, sin):
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.complex(cos, sin)).flatten(-2).to(x.dtype)


def complex_halves(x, cos, sin):
    z = torch.complex(*x.float().chunk(2, -1)) * torch.complex(cos, sin)
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


def rolled(x, cos, sin):
    return torch.addcmul(x * torch.cat([cos, cos], -1), x.roll(R, -1), torch.cat([-sin, sin], -1))


def flux(x, cos, sin):
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    real, imag = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return (x.float() * cos + torch.stack([-imag, real], -1).flatten(3).float() * sin).to(x.dtype)


def wan(x, cos, sin):
    (a, b), out = x.unflatten(-1, (-1, 2)).unbind(-1), torch.empty_like(x)
    out[..., 0::2] = a * cos - b * sin
    out[..., 1::2] = a * sin + b * cos
    return out.type_as(x)


def cohere(x, cos, sin):
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


PAIRS = r"(?i)interleav|neighbour"
HELPERS = [
    refuse("partial-rotary", r"(?i)partial|cases|cut", with_rotation(partial)),
    refuse("partial-rotary-fp32", r"(?i)partial|cases|cut", with_rotation(p.in_fp32(partial)), inputs_fp32),
    refuse("interleaved", PAIRS, with_rotation(interleaved)),
    refuse("interleaved-fp32", PAIRS, with_rotation(interleaved_fp32), inputs_fp32),
    refuse("complex-pairs", r"(?i)complex", with_rotation(complex_pairs), inputs_fp32),
    refuse("complex-halves", r"(?i)complex", with_rotation(complex_halves), inputs_fp32),
    refuse("roll", r"(?i)roll|index|not .*know|unknown", with_rotation(rolled)),
    refuse("flux", PAIRS, with_rotation(flux), inputs_fp32),
    refuse("wan", PAIRS + "|round", with_rotation(wan)),
    refuse("cohere", PAIRS, with_rotation(cohere), inputs_fp32),
]

# ---- one thing wrong in one half
SIGN, HALF, TABLE = (
    r"(?i)sign|reflection|minus|negat",
    r"(?i)half|halves|partner",
    r"(?i)\bcos\b|\bsin\b|table",
)
ELSEWHERE = r"(?i)partner|same position|flip|rev|half|not .*know|cases|pieces"
_WRONG = {
    "both-plus": (SIGN, lambda a, b, c, s: torch.addcmul(a * c, s, b), second),
    "both-minus": (SIGN, first, lambda a, b, c, s: torch.addcmul(b * c, -s, a)),
    "minus-cos": (SIGN, lambda a, b, c, s: torch.addcmul(-a * c, -s, b), second),
    "negated-sum": (SIGN + "|sum|product|round", lambda a, b, c, s: -torch.addcmul(-a * c, s, b), second),
    "same-half-twice": (HALF, lambda a, b, c, s: torch.addcmul(a * c, -s, a), second),
    "cos-twice": (TABLE, lambda a, b, c, s: first(a, b, c, s), lambda a, b, c, s: torch.addcmul(b * c, c, a)),
    "tables-exchanged": (TABLE, first, lambda a, b, c, s: torch.addcmul(b * s, c, a)),
    "shift-after": (
        r"(?i)sum|\badd|product|expected|rotation",
        lambda a, b, c, s: first(a, b, c, s) + 1,
        second,
    ),
    "partner-of-another-token": (ELSEWHERE, lambda a, b, c, s: torch.addcmul(a * c, -s, b.flip(-2)), second),
    "partner-reversed": (ELSEWHERE, lambda a, b, c, s: torch.addcmul(a * c, -s, b.flip(-1)), second),
    "table-reversed": (
        TABLE + "|cases|flip|rev",
        first,
        lambda a, b, c, s: torch.addcmul(b * c.flip(-2), s, a),
    ),
    "abs": (r"(?i)abs|not .*know|unknown", lambda a, b, c, s: torch.addcmul(a.abs() * c, -s, b), second),
    "scaled-table": (TABLE, lambda a, b, c, s: torch.addcmul(a * (c * 2), -s, b), second),
    "table-per-half": (TABLE, first, lambda a, b, c, s: torch.addcmul(b * (c + 1), s, a)),
    "constant-for-cos": (
        TABLE + "|multiplies",
        lambda a, b, c, s: torch.addcmul(a * 0.5, -s, b),
        lambda a, b, c, s: torch.addcmul(b * 0.5, s, a),
    ),
}
WRONG = [
    refuse(name + suffix, why, with_rotation(around(halves(f, g))), inputs)
    for name, (why, f, g) in _WRONG.items()
    for suffix, around, inputs in (("", lambda r: r, inputs_16), ("-fp32", p.in_fp32, inputs_fp32))
]


def minus_by_value(a, b, c, s):
    return torch.addcmul(a * c, s, b, value=-1)


def twice_by_value(a, b, c, s):
    return torch.addcmul(b * c, s, a, value=2)


WRONG += [
    refuse(
        "addcmul-value-fp32",
        r"(?i)value",
        with_rotation(p.in_fp32(halves(minus_by_value, second))),
        inputs_fp32,
        notes="the CPU fuses it, CUDA rounds the product first",
    ),
    refuse("addcmul-value-2", r"(?i)value|scale|cos and sin", with_rotation(halves(first, twice_by_value))),
]


# ---- roundings
fma_and_sum = halves(first, lambda a, b, c, s: b * c + a * s)


def sum_of_rounded(x, cos, sin):
    a, b = x.chunk(2, -1)
    one = (a * cos).float() - (b * sin).float()
    return torch.cat([one, (b * cos).float() + (a * sin).float()], -1).to(x.dtype)


def through_fp16(x, cos, sin):
    return p.inplace_addcmul(x.half(), cos, sin).to(x.dtype)


def norm_through_fp16(x, w):
    return p.rms(x, w).half().to(x.dtype)


ROUND, FP64 = r"(?i)round|contract", r"(?i)float64|fp64|f64|double"
ROUNDINGS = [
    refuse("16-bit-sub", ROUND, with_rotation(p.chunk_cat_sub)),
    refuse("16-bit-rotate-half", ROUND, with_rotation(p.rotate_half_sum)),
    refuse("16-bit-in-place", ROUND, with_rotation(p.inplace_sub)),
    refuse("fma-and-sum", ROUND + "|halves", with_rotation(fma_and_sum)),
    refuse("fma-and-sum-fp32", ROUND + "|halves", with_rotation(p.in_fp32(fma_and_sum)), inputs_fp32),
    refuse("sum-of-rounded", ROUND, with_rotation(sum_of_rounded)),
    refuse("through-fp16", ROUND + "|float16|fp16|f16|stored", with_rotation(through_fp16)),
    refuse("norm-through-fp16", ROUND + "|float16|fp16|f16", with_norm(norm_through_fp16)),
    refuse("fp64", FP64, with_norm(p.rms), lambda: tuple(t.double() for t in inputs_16()), dtype=torch.float64),
    refuse(
        "fp64-rope",
        FP64,
        with_rotation(lambda x, c, s: p.chunk_cat(x.double(), c.double(), s.double()).to(BF16)),
    ),
    refuse(
        "fp64-tables",
        FP64,
        with_rotation(lambda x, c, s: p.chunk_cat_sub(x, c, s).to(BF16)),
        lambda: (x(), table().double(), table().double()),
    ),
]


# ---- tables
def full_width(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([-b, a], -1), sin)


def wide(dtype):
    return lambda: (x(), torch.randn(S, D).to(dtype), torch.randn(S, D).to(dtype))


def next_token(x, cos, sin):
    """The second half is rotated by the angle of the next token."""
    turn = halves(
        lambda a, b, c, s: first(a, b, c[:, :, :S], s[:, :, :S]),
        lambda a, b, c, s: second(a, b, c[:, :, 1:], s[:, :, 1:]),
    )
    return turn(x, cos, sin)


FULL = r"(?i)full.?width|both halves|halves"
TABLES = [
    refuse("table-full-width", FULL, with_rotation(full_width), wide(BF16), seq=(1, 0, 0)),
    refuse(
        "table-full-width-fp32",
        FULL,
        with_rotation(p.in_fp32(full_width)),
        wide(torch.float32),
        seq=(1, 0, 0),
    ),
    refuse(
        "table-of-the-next-token",
        TABLE + "|halves",
        with_rotation(next_token),
        lambda: (x(), table(s=S + 1), table(s=S + 1)),
        seq=None,
    ),
]

CASES = HELPERS + WRONG + ROUNDINGS + TABLES
