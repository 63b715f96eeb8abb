"""Edges that may be rewritten or left alone: the bits must be right, and what is left alone must be reported."""

from __future__ import annotations

import dataclasses

import torch

from . import pieces as p
from .case import Case
from .functional import FromFunction, halves, inputs_16
from .sides import BF16, B, D, H, Pair, S, bf16, rope, table
from .spellings import spell


def heads_from_chunks(x, heads):
    return torch.stack(x.chunk(heads, -1), 1)


def cat_of_heads(x):
    return torch.cat(x.unbind(1), -1)


def inner_stride_2():
    pairs = torch.randn(B, H, S, D // 2, 2).to(BF16)
    return bf16(B, S, H * D), pairs[..., 0], pairs[..., 1]


def x_with_gaps():
    return torch.randn(B, S, H * D, 2).to(BF16)[..., 0], table(), table()


def mixed_tables():
    return bf16(B, S, H * D), table(), table(dtype=torch.float32)


def tables_from_the_norm(x, cos, sin, w):
    n = p.reshape_swapaxes(p.rms(x, w), H)
    return rope(x, w, n[..., : D // 2], sin, H)


def rotated_twice(x, cos, sin, w):
    return p.chunk_cat(rope(x, w, cos, sin, H, leave=lambda t: t), cos, sin)


class OneX(Pair):
    """q and k are the same tensor."""

    def forward(self, x, cos, sin):
        return rope(x, self.wq, cos, sin, H), rope(x, self.wk, cos, sin, H)


def minus_all(a, b, cos, sin):
    return torch.addcmul(-a * cos, sin, b)


def minus_all_second(a, b, cos, sin):
    return torch.addcmul(-b * cos, -sin, a)


def _either(case: Case) -> Case:
    return dataclasses.replace(case, sites=None)


def _function(name, forward, inputs=inputs_16):
    seq, batch = {0: 1, 1: 2, 2: 2}, {0: 0, 1: 0, 2: 0}
    return Case(name, lambda: FromFunction(forward), inputs, None, "bf16-chain", None, {"seq": seq, "batch": batch})


def legal(x, cos, sin, w):
    return rope(x, w, cos, sin, H)


CASES = [
    _either(spell("heads-from-chunks", "bf16-chain", p.inplace_addcmul, enter=heads_from_chunks)),
    _either(spell("cat-of-heads", "bf16-chain", p.inplace_addcmul, leave=cat_of_heads)),
    _either(spell("cat-of-heads-fp32", "fp32-rope", p.in_fp32(p.chunk_cat), leave=cat_of_heads, table=torch.float32)),
    _either(spell("head-dim-2", "bf16-chain", p.inplace_addcmul, head_dim=2)),
    _either(spell("fp32-throughout", None, p.inplace_addcmul, dtype=torch.float32, table=torch.float32)),
    _either(spell("minus-all", "bf16-chain", halves(minus_all, minus_all_second))),
    _either(
        spell("result-fp16", "fp32-result", lambda x, c, s: p.chunk_cat(x.float(), c, s).half(), table=torch.float32)
    ),
    _function("table-inner-stride-2", legal, inner_stride_2),
    _function("x-inner-stride-2", legal, x_with_gaps),
    dataclasses.replace(_function("cos-16-sin-fp32", legal, mixed_tables), contract=None),
    _function("table-from-the-norm", tables_from_the_norm),
    _function("rotated-twice", rotated_twice),
    Case("one-x-two-weights", OneX, inputs_16, None, "bf16-chain", None, {"seq": {0: 1, 1: 2, 2: 2}}),
]
