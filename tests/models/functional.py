"""Models written as one function, and the refusals made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from . import pieces as p
from .case import Case
from .sides import BF16, D, H, bf16, rope, table, x

R = D // 2


class FromFunction(nn.Module):
    """forward(x, cos, sin, w), written as a function."""

    def __init__(self, forward: Callable, dtype=BF16):
        super().__init__()
        self.function = forward
        self.w = nn.Parameter(bf16(H * D).to(dtype))

    def forward(self, x, cos, sin):
        return self.function(x, cos, sin, self.w)


def inputs_16():
    return x(), table(), table()


def inputs_fp32():
    """x stays bf16, the tables are fp32."""
    return x(), table(dtype=torch.float32), table(dtype=torch.float32)


def refuse(name, refusal, forward, inputs=inputs_16, *, dtype=BF16, seq=(1, 2, 2), notes="", edit=None):
    """A case with no site. seq: the sequence axes of x, cos and sin; None: for one length only."""
    dynamic = {"seq": dict(enumerate(seq))} if seq else {}
    return Case(name, lambda: FromFunction(forward, dtype=dtype), inputs, 0, None, refusal, dynamic, notes, edit=edit)


def with_norm(norm):
    """The legal spelling with another norm(x, w)."""
    return lambda x, cos, sin, w: rope(x, w, cos, sin, H, norm=norm)


def with_rotation(rotate):
    """The legal spelling with another rotate(x, cos, sin)."""
    return lambda x, cos, sin, w: rope(x, w, cos, sin, H, rotate)


def halves(first, second):
    """A rotation written as its two halves; each is given (a, b, cos, sin)."""

    def run(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([first(a, b, cos, sin), second(a, b, cos, sin)], -1)

    return run


def first(a, b, cos, sin):
    return torch.addcmul(a * cos, -sin, b)


def second(a, b, cos, sin):
    return torch.addcmul(b * cos, sin, a)


def normed_heads(x, w):
    return p.reshape_swapaxes(p.rms(x, w), H)
