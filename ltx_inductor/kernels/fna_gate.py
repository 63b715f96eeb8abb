"""The gate of neighborhood attention: the fast kernel is used only where it has been seen to be as accurate as stated.

Its result is not NATTEN's bit for bit, so what is checked is the error: the first time a window is wanted on a
(compute capability, torch version, CUDA version), the kernel runs against the op's reference in fp32, on a grid with
ragged tails, with scores as a decoder has them, with peaked ones, and with a NaN. The verdict is kept beside the
artefacts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import fna, proofs
from ltx_inductor.kernels.fna_limits import HEAD_DIM, Window

BOUND = 3e-3  # relative L2 error; what two roundings to bf16 leave is 1.7e-3 to 2.4e-3 (docs/neighborhood-attention.md)
log = logging.getLogger("ltx_inductor")


def refusal(window: Window, device: int, reference: Callable[..., Tensor]) -> str | None:
    """None if the kernel of `window`, which is loaded, keeps the bound on that device; else a sentence."""
    found: str | None = verdict(window, device, reference)["refusal"]
    return found


def verdict(window: Window, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    """What was measured; keys: window, errors, bound, device, torch, refusal."""
    facts = (f"na3d {window}", str(BOUND))
    return proofs.verdict(device, facts, lambda: _measure(window, device, reference))


def _measure(window: Window, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    errors: dict[str, float] = {}
    for kind, factor in (("normed", 1.0), ("peaked", 8.0)):
        q, k, v = draw(window, device, factor)
        got = fna.launch(q, k, v, window, 1.0)
        want = reference(q.float(), k.float(), v.float(), window, 1.0)
        errors[kind] = float((got.double() - want).norm() / want.norm())
    v[0, 0, 0, 0, 0, 0] = math.nan  # the first token: its windows are those that start at 0
    got = fna.launch(q, k, v, window, 1.0)
    t, h, w = (
        (torch.arange(n, device=q.device) - size // 2).clamp(0, n - size) == 0
        for n, size in zip(q.shape[1:4], window, strict=True)
    )
    touched = t[:, None, None] & h[:, None] & w
    strays = int((got[0, ..., 0, 0].isnan() != touched).sum())
    record: dict[str, Any] = {
        "window": window,
        "errors": errors,
        "bound": BOUND,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
        "refusal": None,
    }
    worst = max(errors.values())
    if not worst <= BOUND or strays:
        what = f"has a relative error of {worst:.2e}, more than {BOUND:.0e}" if not worst <= BOUND else "spreads a NaN"
        record["refusal"] = (
            f"the neighborhood-attention kernel for window {window} {what}, on {record['device']} with torch "
            f"{torch.__version__}, so it is not used; please report it"
        )
        log.error(record["refusal"])
    return record


def draw(window: Window, device: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, T, H, W, 2, 64] in bf16, on a grid a little larger than the window; factor scales the scores."""
    gen = torch.Generator().manual_seed(0)
    grid = [w + extra for w, extra in zip(window, (5, 6, 7), strict=True)]
    q, k, v = (torch.randn((1, *grid, 2, HEAD_DIM), generator=gen) for _ in range(3))
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    where = torch.device("cuda", device)
    return (q * 1.7 * factor).bfloat16().to(where), (k * 10.4).bfloat16().to(where), v.bfloat16().to(where)
