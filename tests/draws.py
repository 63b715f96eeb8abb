"""Values on which a wrong rewrite shows.

On N(0, 1) alone most mistakes are invisible: eps + 1 % changes no element of a million, and one fma instead of a
product and a sum changes 17. So every token gets its own kind of values, and all kinds meet in one run:

* x of scale 1, 1e-3 and 1e-6 (eps, subnormals), outliers, zeros of both signs, denormals, inf and NaN;
* cancelling tokens: both halves of a head are normalised to the same values and sin is +-cos, so one half of the
  result is nothing but the rounding of the products. "near" moves sin by up to 3 units in the last place.

For the halves to cancel whatever the norm rounds, x[j + r] = x[j] * 2^-e(j) and w[j + r] = w[j] * 2^e(j).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("unit", "milli", "micro", "outliers", "zeros", "denormals", "cancel", "near", "special")


def redraw(
    module: nn.Module,
    inputs: tuple[Any, ...],
    seq: Mapping[int, int],
    head_dim: int,
    seed: int,
    first: int = 0,
    special: bool = True,
) -> None:
    """Overwrite weights and inputs in place: token s gets KINDS[(s + first) % len(KINDS)].

    seq: {index of input: its token axis}. Inputs are told apart by the names of the parameters of `forward`: cos*,
    sin*, freqs*, and everything else is an x. special=False leaves inf and NaN out, which attention spreads.
    """
    gen = torch.Generator().manual_seed(seed)
    names = list(inspect.signature(module.forward).parameters)
    with torch.no_grad():
        for w in module.parameters():
            _store(w, _weight(w.shape, head_dim, gen))
        for i, (name, t) in enumerate(zip(names, inputs, strict=False)):
            if not isinstance(t, Tensor) or not t.is_floating_point() or name.startswith("sin"):
                continue
            axis = seq.get(i)
            if name.startswith("cos"):
                j = names.index("sin" + name[3:])
                cos, sin = _tables(t, axis, first, gen)
                _store(t, cos)
                _store(inputs[j], sin)
            elif name.startswith("freqs"):
                _store(t, _by_token(t, axis, first, lambda k, s: _angles(k, s, gen)))
            else:
                _store(
                    t,
                    _by_token(
                        t,
                        axis,
                        first,
                        lambda k, s: _x(k if special else k.replace("special", "unit"), s, head_dim, gen),
                    ),
                )


def _store(t: Tensor, value: Tensor) -> None:
    """Copy into t, whose expanded axes (stride 0) take the first entry."""
    one = tuple(slice(0, 1) if st == 0 and n > 1 else slice(None) for n, st in zip(t.shape, t.stride(), strict=True))
    t[one].copy_(value.to(t.dtype)[one])


def _by_token(t: Tensor, axis: int | None, first: int, draw: Any) -> Tensor:
    if axis is None:
        return draw(KINDS[first % len(KINDS)], t.shape)
    out = torch.empty(t.shape).movedim(axis, 0)
    for k, kind in enumerate(KINDS):
        at = range((k - first) % len(KINDS), out.shape[0], len(KINDS))
        if at:
            out[list(at)] = draw(kind, (len(at), *out.shape[1:]))
    return out.movedim(0, axis)


def _exponents(r: int) -> Tensor:
    return torch.tensor([float((j * 7) % 3 - 1) for j in range(r)])


def _weight(shape: Any, head_dim: int, gen: torch.Generator) -> Tensor:
    w, r = torch.randn(shape, generator=gen), head_dim // 2
    heads = w.view(-1, 2, r)
    heads[:, 1] = heads[:, 0] * torch.exp2(_exponents(r))
    return w


def _x(kind: str, shape: Any, head_dim: int, gen: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=gen)
    if kind in ("milli", "micro"):
        return x * {"milli": 1e-3, "micro": 1e-6}[kind]
    pick = torch.randint(0, 8, x.shape, generator=gen)
    if kind == "outliers":
        return torch.where(pick == 0, x * 1000, x)
    if kind == "zeros":
        return torch.where(pick < 3, torch.zeros(()), torch.where(pick < 6, torch.tensor(-0.0), x))
    if kind == "denormals":
        return x * 2.0**-130
    if kind == "special":
        some = torch.rand(x.shape, generator=gen) < 0.02
        return torch.where(some, torch.tensor([math.inf, -math.inf, math.nan, 3e38])[pick % 4], x)
    if kind in ("cancel", "near"):
        r = head_dim // 2
        x = x.bfloat16().float()
        heads = x.unflatten(-1, (-1, 2, r)) if x.shape[-1] % head_dim == 0 else x[..., :0].unflatten(-1, (-1, 1, 1))
        heads[..., 1, :] = heads[..., 0, :] * torch.exp2(-_exponents(r))
    return x


def _angles(kind: str, shape: Any, gen: torch.Generator) -> Tensor:
    if kind in ("cancel", "near"):
        return (torch.randint(0, 4, shape, generator=gen) * 2 + 1) * (math.pi / 4)
    return torch.rand(shape, generator=gen) * 2 * math.pi


def _tables(t: Tensor, axis: int | None, first: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    both = _by_token(t.unsqueeze(-1).expand(*t.shape, 2), axis, first, lambda k, s: _cos_sin(k, s[:-1], t.dtype, gen))
    return both[..., 0], both[..., 1]


def _cos_sin(kind: str, shape: Any, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    angle = torch.rand(shape, generator=gen) * 2 * math.pi
    cos, sin = angle.cos().to(dtype).float(), angle.sin()
    if kind in ("cancel", "near"):
        sin = cos * (torch.randint(0, 2, shape, generator=gen) * 2 - 1)
    if kind == "near":
        sin = sin * (1 + torch.randint(-3, 4, shape, generator=gen) * torch.finfo(dtype).eps)
    if kind == "zeros":
        exact = torch.tensor([0.0, -0.0, 1.0, -1.0])
        cos, sin = (exact[torch.randint(0, 4, shape, generator=gen)] for _ in range(2))
    return torch.stack([cos, sin], -1)
