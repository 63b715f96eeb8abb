"""Every spelling that must be rewritten. One axis is varied at a time, around `spell`'s defaults.

Sizes: B=2, S=21 (odd), 3 heads of 8: N = 24 is no power of two, so that mean and sum/N round differently.
"""

from __future__ import annotations

import torch

from . import pieces as p
from .case import Case
from .sides import CASES as SIDES
from .tables import LAYOUTS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES: list[Case] = []


def spell(
    name,
    contract,
    rotate,
    *,
    B=2,
    S=21,
    heads=3,
    head_dim=8,
    dtype=BF16,
    table=BF16,
    layout="bhsr",
    norm=p.rms,
    enter=p.reshape_swapaxes,
    leave=p.swapaxes_reshape,
    take=None,
    x_shape=None,
    x_axes=(1, 0),
    weight=None,
    twice=False,
    notes="",
):
    """One side, as a Case. x_shape(B, S, N), x_axes (sequence, batch): the x that `take` is given."""
    lay, N = LAYOUTS[layout], heads * head_dim

    def build():
        return p.Rope(
            heads,
            head_dim,
            dtype,
            norm=norm,
            enter=enter,
            rotate=rotate,
            leave=leave,
            take=take,
            tables=lay.graph,
            weight=weight,
            twice=twice,
        )

    def inputs():
        x = torch.randn(*(x_shape(B, S, N) if x_shape else (B, S, N))).to(dtype)
        return x, lay.make(B, heads, S, head_dim // 2, table), lay.make(B, heads, S, head_dim // 2, table)

    dynamic = {}
    if S > 1:
        dynamic["seq"] = {0: x_axes[0], 1: lay.seq, 2: lay.seq}
    if B > 1:
        dynamic["batch"] = {0: x_axes[1]} | ({} if lay.batch is None else {1: lay.batch, 2: lay.batch})
    return Case(name, build, inputs, 1, contract, None, dynamic, notes, head_dim=head_dim)


# ---- how it rotates
for f in p.FMA:
    CASES += [
        spell(f"{f.__name__}-16", "bf16-chain", f),
        spell(f"{f.__name__}-fp32", "fp32-rope", p.in_fp32(f), table=FP32),
    ]
CASES += [spell(f"{f.__name__}-fp32", "fp32-rope-muladd", p.in_fp32(f), table=FP32) for f in p.MULADD]

# ---- where it rounds
ROUNDINGS = {
    "bf16-chain": (lambda f: f, BF16, p.rms),
    "fp32-rope": (p.in_fp32, FP32, p.rms),
    "fp32-result": (lambda f: f, FP32, p.rms),
    "fp32-all": (p.narrow_to, FP32, p.rms_fp32),
    "fp32-all-result": (lambda f: f, FP32, p.rms_fp32),
}
for contract, (around, table, norm) in ROUNDINGS.items():
    for dtype, d in ((BF16, "bf16"), (FP16, "fp16")):
        wrap = around(dtype) if around is p.narrow_to else around
        table = dtype if contract == "bf16-chain" else table
        kw = {"dtype": dtype, "table": table, "norm": norm}
        CASES += [
            spell(f"rounds-{contract}-{d}-{f.__name__}", contract, wrap(f), **kw)
            for f in (p.inplace_addcmul, p.chunk_cat)
        ]
        if contract != "bf16-chain":
            CASES += [
                spell(f"rounds-{contract}-muladd-{d}-{f.__name__}", contract + "-muladd", wrap(f), **kw)
                for f in (p.chunk_cat_sub, p.rotate_half_sum)
            ]
CASES += [
    spell(
        "rounds-16-bit-tables-in-fp32",
        "fp32-rope",
        p.tables_in_fp32(p.inplace_addcmul),
        notes="products are exact",
    ),
    spell(
        "rounds-16-bit-tables-in-fp32-sub",
        "fp32-rope-muladd",
        p.tables_in_fp32(p.chunk_cat_sub),
        notes="exact products: the same bits as one fma",
    ),
    spell("rounds-fp32-all-16-bit-tables", "fp32-all", p.narrow_to(BF16)(p.inplace_addcmul), norm=p.rms_fp32),
]

# ---- how it enters and leaves the heads
for f in (
    p.unflatten_transpose,
    p.einops_in,
    p.view_permute,
    p.view_movedim,
    p.permute_contiguous,
    p.permute_then_view,
):
    CASES.append(spell(f"enter-{f.__name__}", "bf16-chain", p.inplace_addcmul, enter=f))
for f in (
    p.transpose_flatten,
    p.einops_out,
    p.permute_contiguous_view,
    p.keep_bhsd,
    p.keep_bhsd_contiguous,
    p.keep_bshd,
    p.keep_bshd_contiguous,
    p.attend,
):
    CASES += [
        spell(f"leave-{f.__name__}", "bf16-chain", p.inplace_addcmul, leave=f),
        spell(f"leave-{f.__name__}-cat", "fp32-rope", p.in_fp32(p.chunk_cat), leave=f, table=FP32),
    ]

# ---- where cos and sin come from
for name in LAYOUTS:
    CASES += [
        spell(f"table-{name}", "bf16-chain", p.inplace_addcmul, layout=name),
        spell(f"table-{name}-fp32", "fp32-rope-muladd", p.in_fp32(p.chunk_cat_sub), layout=name, table=FP32),
    ]

# ---- where x comes from
TAKES = {
    "slice": (lambda x, h: x[..., : x.shape[-1] // 3], lambda B, S, N: (B, S, 3 * N), (1, 0)),
    "middle-slice": (
        lambda x, h: x[..., x.shape[-1] // 3 : 2 * (x.shape[-1] // 3)],
        lambda B, S, N: (B, S, 3 * N),
        (1, 0),
    ),
    "split": (
        lambda x, h: x.split([x.shape[-1] // 2, x.shape[-1] // 4, x.shape[-1] // 4], -1)[0],
        lambda B, S, N: (B, S, 2 * N),
        (1, 0),
    ),
    "chunk": (lambda x, h: x.chunk(3, -1)[1], lambda B, S, N: (B, S, 3 * N), (1, 0)),
    "unbind": (lambda x, h: x.unflatten(-1, (3, -1)).unbind(2)[1], lambda B, S, N: (B, S, 3 * N), (1, 0)),
    "stacked": (lambda x, h: x[1], lambda B, S, N: (3, B, S, N), (2, 1)),
    "sequence-first": (lambda x, h: x.transpose(0, 1), lambda B, S, N: (S, B, N), (0, 1)),
    "tokens-cut": (lambda x, h: x[:, 2:-1], lambda B, S, N: (B, S + 3, N), (1, 0)),
    "sum": (lambda x, h: x + 1, lambda B, S, N: (B, S, N), (1, 0)),
}
for name, (take, shape, axes) in TAKES.items():
    CASES.append(spell(f"take-{name}", "bf16-chain", p.inplace_addcmul, take=take, x_shape=shape, x_axes=axes))

# ---- how it normalises
CASES += [
    spell("norm-no-weight", "bf16-chain", p.inplace_addcmul, norm=p.rms_no_weight),
    spell("norm-no-weight-fp32", "fp32-rope", p.in_fp32(p.chunk_cat), norm=p.rms_no_weight, table=FP32),
    spell("norm-eps-none", "bf16-chain", p.inplace_addcmul, norm=p.rms_eps_none),
    spell("norm-torch.rms_norm", "bf16-chain", p.inplace_addcmul, norm=p.rms_torch),
    spell("norm-weight-slice", "bf16-chain", p.inplace_addcmul, norm=p.rms_weight_slice, weight=48),
    spell("norm-per-head", "bf16-chain", p.inplace_addcmul, norm=p.rms_per_head, weight=8),
    spell(
        "norm-per-head-fp32",
        "fp32-rope-muladd",
        p.in_fp32(p.chunk_cat_sub),
        norm=p.rms_per_head,
        weight=8,
        table=FP32,
    ),
    spell(
        "norm-also-returned",
        "bf16-chain",
        p.inplace_addcmul,
        twice=True,
        notes="the norm stays for its other reader",
    ),
    spell("norm-also-returned-fp32", "fp32-rope", p.in_fp32(p.chunk_cat), twice=True, table=FP32),
]

# ---- sizes
for B in (1, 2):
    for S in (1, 2, 5):
        for heads in (1, 3):
            CASES += [
                spell(f"size-b{B}-s{S}-h{heads}", "bf16-chain", p.inplace_addcmul, B=B, S=S, heads=heads),
                spell(
                    f"size-b{B}-s{S}-h{heads}-fp32",
                    "fp32-rope",
                    p.in_fp32(p.split_stack_flatten),
                    B=B,
                    S=S,
                    heads=heads,
                    table=FP32,
                ),
            ]
CASES += [
    spell("size-head-dim-4", "bf16-chain", p.inplace_addcmul, head_dim=4),
    spell("size-head-dim-10", "bf16-chain", p.chunk_cat, head_dim=10),
]

CASES += SIDES

# ---- at least 1e6 elements, one per contract: 2 x 1049 x (5 x 100)
for contract, (around, table, norm) in ROUNDINGS.items():
    wrap = p.narrow_to(BF16) if around is p.narrow_to else around
    kw = {"S": 1049, "heads": 5, "head_dim": 100, "table": table, "norm": norm, "layout": "swapped"}
    CASES.append(spell(f"full-{contract}", contract, wrap(p.inplace_addcmul), **kw))
    if contract != "bf16-chain":
        CASES.append(spell(f"full-{contract}-muladd", contract + "-muladd", wrap(p.chunk_cat_sub), **kw))
