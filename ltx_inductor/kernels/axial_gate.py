"""The exactness gate of RoPE over several axes: the kernel is used only where it has been seen to give eager's bits.

The first time a configuration is wanted on a (compute capability, torch version, CUDA version), it runs against the
eager chain on over a million elements, on batches of small grids, contiguous and not, with and without a weight, scaled
by powers of two and by others. The values are those of gate.py: outliers, zeros of both signs, denormals, infinities
and a NaN, and angles for which the two products cancel.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import counts, gate, proofs, repro, rope_axial
from ltx_inductor.kernels.rope_axial import OP, Spec

_GRID, _HEADS = (2, 3, 9, 14), 6  # B, T, H, W: no multiples of what a warp or a CTA does, and more heads than one round
_SCALES = (1.0, 0.125, 0.11785113019775793)  # none, 64 ** -0.5, 72 ** -0.5
log = logging.getLogger("ltx_inductor")


def refusal(spec: Spec, device: int, reference: Callable[..., Tensor]) -> str | None:
    """None if the kernel, which is loaded, has eager's bits on that device; else a sentence.

    Proves it if nobody has yet; what follows for the kernel: see `proofs.settle`.
    """
    return proofs.settle(
        OP,
        f"the kernel {spec.name}",
        lambda: proofs.verdict(device, rope_axial.facts(device, spec), lambda: _compare(spec, device, reference)),
        lambda: rope_axial.accept(device, spec),
        lambda sentence: rope_axial.turn_off(device, spec, sentence),
    )


def proof(spec: Spec, device: int) -> str:
    """What `refusal` found when it gave None, as a sentence."""
    return gate.no_bit_differs(device, rope_axial.facts(device, spec))


def _compare(spec: Spec, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    x, weight, cos, sin = draw(spec, _GRID, _HEADS, device)
    apart = torch.stack((x, x), dim=-2).flatten(-3, -2)[..., ::2, :]  # the same rows, two apart
    record: dict[str, Any] = {
        "elements": 0,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
        "refusal": None,
    }
    for source, w, scale in itertools.product((x, apart), (weight, None), _SCALES):
        args = (source, w, cos, sin, 1e-6, scale, spec.contract)
        got = rope_axial.launch(*args)
        if got is None:
            record["refusal"] = f"the kernel {spec.name} declined aligned inputs"
            return record
        wrong = repro.differing(got, reference(*args))
        counts.checked(OP, got.numel(), wrong)
        record["elements"] += got.numel()
        if wrong:
            record["refusal"] = (
                f"the kernel {spec.name} differs from eager in {wrong} of {got.numel()} elements on {record['device']} "
                f"with torch {torch.__version__}, so it is not used; " + repro.save(OP, args)
            )
            log.error(record["refusal"])
            return record
    return record


def draw(spec: Spec, grid: Sequence[int], heads: int, device: int) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """x [*grid, heads, head_dim], weight, and cos and sin of every axis of the rotation, on the device.

    Table i varies along the token axis i from the end, as a decoder's do.
    """
    gen = torch.Generator().manual_seed(0)
    where = torch.device("cuda", device)
    x = torch.randn((*grid, heads, spec.head_dim), generator=gen).flatten(0, -3).unsqueeze(0)
    x = gate.awkward(x, spec.dtype)
    cos, sin = [], []
    for axis, pairs in enumerate(spec.pairs):
        along = len(grid) - len(spec.pairs) + axis
        shape = [n if i == along else 1 for i, n in enumerate(grid)] + [1, pairs]
        angle = torch.rand(shape, generator=gen) * 6.2831853
        angle[..., ::3] = 0.78539816  # cos == sin: the two products of equal elements cancel
        cos.append(angle.cos().to(where))
        sin.append(angle.sin().to(where))
    x[..., 1::6] = x[..., 0::6][..., : x[..., 1::6].shape[-1]]
    weight = torch.randn(spec.head_dim, generator=gen)
    weight[1::2] = weight[::2]
    x = x.view(*grid, heads, spec.head_dim).to(spec.dtype).to(where)
    return x, weight.to(spec.dtype).to(where), cos, sin
