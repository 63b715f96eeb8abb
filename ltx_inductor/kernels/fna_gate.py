"""The gate of neighborhood attention: a kernel is used only where it has been seen to be what is said of it.

`fast` does not have NATTEN's bits, so what is checked is the error: the first time a window is wanted on a (compute
capability, torch version, CUDA version), the kernel runs against the op's reference in fp32, on a grid with ragged
tails, with scores as a decoder has them, with peaked ones, and with a NaN. `exact` runs against NATTEN's own
hopper-fna, bit for bit, where that is on the machine. The verdicts are kept beside the artefacts.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import counts, fna, proofs, repro
from ltx_inductor.kernels.fna_limits import HEAD_DIM, Window

BOUND = 3e-3  # relative L2 error; what two roundings to bf16 leave is 1.7e-3 to 2.4e-3 (docs/neighborhood-attention.md)
_EXACT_WINDOWS: tuple[Window, ...] = ((3, 5, 5), (11, 11, 11))
_HOPPER: dict[str, Any] = {"backend": "hopper-fna", "q_tile_shape": (4, 4, 4), "kv_tile_shape": (4, 4, 8)}
log = logging.getLogger("ltx_inductor")


def refusal(window: Window, device: int, reference: Callable[..., Tensor]) -> str | None:
    """None if the kernel of `window`, which is loaded, keeps the bound on that device; else a sentence."""
    found: str | None = verdict(window, device, reference)["refusal"]
    return found


def verdict(window: Window, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    """What was measured; keys: window, errors, bound, device, torch, refusal."""
    facts = (f"na3d {window}", str(BOUND))
    return proofs.verdict(device, facts, lambda: _measure(window, device, reference))


def exact_refusal(device: int) -> str | None:
    """None if the schedule `exact`, which is loaded, has NATTEN's bits on that device, or NATTEN cannot be asked."""
    found: str | None = exact_verdict(device)["refusal"]
    return found


def exact_verdict(device: int) -> dict[str, Any]:
    """What was found; keys: natten (its version; None where it cannot be asked), elements, device, torch, refusal."""
    natten, version = _natten_with_kernels()
    try:
        if natten is not None:
            return proofs.verdict(device, (f"na3d exact, NATTEN {version}",), lambda: _compare(version, device))
    except _NoAnswerError:  # nothing to keep: another build of this version may have the kernel
        pass
    return {"natten": None, "elements": 0, "refusal": None}


class _NoAnswerError(Exception):
    """NATTEN is here, but its hopper-fna does not run."""


def natten_bits(q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> Tensor | None:
    """What NATTEN's hopper-fna makes of q, k, v with its default tiles; None where it is not in this process."""
    na3d, _ = _natten_with_kernels()
    if na3d is None:
        return None
    try:
        return na3d(q.contiguous(), k.contiguous(), v.contiguous(), kernel_size=window, scale=scale, **_HOPPER)
    except Exception as error:  # a build of NATTEN without this kernel, or without this GPU
        log.debug("NATTEN's hopper-fna does not run here: %s", error)
        return None


def _natten_with_kernels() -> tuple[Callable[..., Tensor] | None, str]:
    """natten.na3d and its version, if its hopper-fna is in this process."""
    natten: Any = sys.modules.get("natten")
    if natten is None or not getattr(natten, "HAS_LIBNATTEN", False):
        return None, ""
    return natten.na3d, str(natten.__version__)


def _compare(version: str, device: int) -> dict[str, Any]:
    elements = wrong = 0
    for window, factor in itertools.product(_EXACT_WINDOWS, (1.0, 8.0)):
        q, k, v = draw(window, device, factor)
        want = natten_bits(q, k, v, window, 1.0)
        if want is None:
            raise _NoAnswerError
        wrong += repro.differing(fna.launch(q, k, v, window, 1.0, exact=True), want)
        elements += want.numel()
    counts.checked("na3d", elements, wrong)
    record: dict[str, Any] = {
        "natten": version,
        "elements": elements,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
        "refusal": None,
    }
    if wrong:
        record["refusal"] = (
            f"the neighborhood-attention kernel with NATTEN's bits differs from NATTEN {version} in {wrong} of "
            f"{elements} elements on {record['device']} with torch {torch.__version__}, so it is not used; its bits "
            "are those of NATTEN 0.21.7 built with CUDA 13.0"
        )
        log.error(record["refusal"])
    return record


def _measure(window: Window, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    errors: dict[str, float] = {}
    for kind, factor in (("normed", 1.0), ("peaked", 8.0)):
        q, k, v = draw(window, device, factor)
        got = fna.launch(q, k, v, window, 1.0)
        want = reference(q.float(), k.float(), v.float(), window, 1.0)
        errors[kind] = float((got.double() - want).norm() / want.norm())
        counts.checked("na3d", got.numel())
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
