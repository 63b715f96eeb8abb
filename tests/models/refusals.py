"""What must be left alone, one case for each reason, and a regular expression that the refusal has to match.

Sizes as in spellings.py. Most cases are a legal spelling with one thing wrong.
"""

from __future__ import annotations

import torch

from . import graph_edits as edits
from . import pieces as p
from . import refused_norms, refused_rotations
from .case import Case
from .functional import first, inputs_fp32, normed_heads, refuse, second, with_norm
from .sides import BF16, TWO, Pair, table, x


def half_outside(x, c, s, w):
    a, b = normed_heads(x, w).chunk(2, -1)
    one = first(a, b, c, s)
    return torch.cat([one, second(a, b, c, s)], -1), one


def product_outside(x, c, s, w):
    a, b = normed_heads(x, w).float().chunk(2, -1)
    product = a * c
    return torch.cat([torch.addcmul(product, -s, b), second(a, b, c, s)], -1).to(BF16), product


OUTSIDE, WRITTEN = (
    r"(?i)outside|elsewhere|also read|another (user|reader)|escape",
    r"(?i)mutat|writ|alias|in.place",
)
LEGAL = with_norm(p.rms)
SURROUNDINGS = [
    refuse("half-read-outside", OUTSIDE, half_outside),
    refuse("product-read-outside", OUTSIDE, product_outside, inputs_fp32),
    refuse("x-written-in-between", WRITTEN, LEGAL, seq=None, edit=edits.write_x_between),
    refuse("table-written-in-between", WRITTEN, LEGAL, seq=None, edit=edits.write_cos_between),
    refuse("two-devices", r"(?i)device|cuda", LEGAL, seq=None, edit=edits.tables_on_cuda),
    refuse("tensor-subclass", r"(?i)subclass", LEGAL, seq=None, edit=edits.x_is_a_subclass),
    Case(
        "training",
        Pair,
        lambda: (x().requires_grad_(), x(), table(), table()),
        0,
        None,
        r"(?i)training|backward|gradient",
        {"seq": TWO},
        "gradients must come out as without us",
        grad=True,
    ),
]

CASES = refused_norms.CASES + refused_rotations.CASES + SURROUNDINGS
