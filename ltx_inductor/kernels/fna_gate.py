"""The gate of neighborhood attention: a kernel is used only where it has been seen to be what is said of it.

`fast` does not have NATTEN's bits, so what is checked is the error: the first time a window is wanted on a (compute
capability, torch version, CUDA version), the kernel runs against the op's reference in fp32, on a grid with ragged
tails, with scores as a decoder has them, with peaked ones, and with a NaN. `exact` runs against NATTEN's own
hopper-fna, bit for bit, where that is on the machine. What passed is kept beside the artefacts; a failure keeps its
inputs.
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
    """None if the kernel of `window`, which is loaded, keeps the bound on that device; else a sentence.

    What follows for the kernel: see `proofs.settle`.
    """
    return _settled(window, device, False, lambda: verdict(window, device, reference))


def verdict(window: Window, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    """What was measured; keys: window, errors, bound, device, torch, refusal."""
    facts = (*fna.facts(window, exact=False), str(BOUND))
    return proofs.verdict(device, facts, lambda: _measure(window, device, reference))


def exact_refusal(window: Window, device: int) -> str | None:
    """None if the schedule `exact`, which is loaded, has NATTEN's bits on that device, or NATTEN cannot be asked."""
    return _settled(window, device, True, lambda: exact_verdict(device))


def _settled(window: Window, device: int, exact: bool, ask: Callable[[], dict[str, Any]]) -> str | None:
    return proofs.settle(
        "na3d",
        f"the neighborhood-attention kernel for window {window}{' with the bits of NATTEN' if exact else ''}",
        ask,
        lambda: fna.accept(device, window, exact),
        lambda sentence: fna.turn_off(device, window, exact, sentence),
    )


def exact_verdict(device: int) -> dict[str, Any]:
    """What was found; keys: natten (its version; None where it cannot be asked), elements, device, torch, refusal."""
    natten, version = _natten_with_kernels()
    try:
        if natten is not None:
            facts = (*fna.facts(_EXACT_WINDOWS[0], exact=True), f"NATTEN {version}")
            return proofs.verdict(device, facts, lambda: _compare(version, device))
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
    kept = ""
    for window, factor in itertools.product(_EXACT_WINDOWS, (1.0, 8.0)):
        q, k, v = draw(window, device, factor)
        want = natten_bits(q, k, v, window, 1.0)
        if want is None:
            raise _NoAnswerError
        here = repro.differing(fna.launch(q, k, v, window, 1.0, exact=True), want)
        if here and not kept:
            kept = repro.save("na3d", (q, k, v, list(window), 1.0, True))
        wrong += here
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
            f"are those of NATTEN 0.21.7 built with CUDA 13.0; {kept}"
        )
        log.error(record["refusal"])
    return record


def _measure(window: Window, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    errors: dict[str, float] = {}
    what = kept = ""
    for kind, factor in (("normed", 1.0), ("peaked", 8.0)):
        q, k, v = draw(window, device, factor)
        got = fna.launch(q, k, v, window, 1.0)
        want = reference(q.float(), k.float(), v.float(), window, 1.0)
        errors[kind] = error = float((got.double() - want).norm() / want.norm())
        good = error <= BOUND
        counts.checked("na3d", got.numel(), 0 if good else got.numel())  # beyond the bound, all count as wrong
        if not good and not what:
            what, kept = f"has a relative error of {error:.2e}, more than {BOUND:.0e}", _kept(q, k, v, window)
    v[0, 0, 0, 0, 0, 0] = math.nan  # the first token: its windows are those that start at 0
    got = fna.launch(q, k, v, window, 1.0)
    astray = strays(got, v, window, reference)
    counts.checked("na3d", got.numel(), astray)
    if astray and not what:
        what, kept = "spreads a NaN, or loses one", _kept(q, k, v, window)
    record: dict[str, Any] = {
        "window": window,
        "errors": errors,
        "bound": BOUND,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
        "refusal": None,
    }
    if what:
        record["refusal"] = (
            f"the neighborhood-attention kernel for window {window} {what}, on {record['device']} with torch "
            f"{torch.__version__}, so it is not used; {kept}"
        )
        log.error(record["refusal"])
    return record


def _kept(q: Tensor, k: Tensor, v: Tensor, window: Window) -> str:
    return repro.save("na3d", (q, k, v, list(window), 1.0, False))


def strays(got: Tensor, v: Tensor, window: Window, reference: Callable[..., Tensor]) -> int:
    """How many elements of a result are inf or NaN though no value in their window is, or finite though one is.

    q and k, which it was made of, are finite.
    """
    broken = (~v.isfinite()).float()
    equal = torch.zeros_like(broken)  # scores: every value of the window has the same weight
    return int((got.isfinite() == (reference(equal, equal, broken, window, 1.0) > 0)).sum())


def draw(window: Window, device: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, T, H, W, 2, 64] in bf16, on a grid a little larger than the window; factor scales the scores."""
    gen = torch.Generator().manual_seed(0)
    grid = [w + extra for w, extra in zip(window, (5, 6, 7), strict=True)]
    q, k, v = (torch.randn((1, *grid, 2, HEAD_DIM), generator=gen) for _ in range(3))
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    where = torch.device("cuda", device)
    return (q * 1.7 * factor).bfloat16().to(where), (k * 10.4).bfloat16().to(where), v.bfloat16().to(where)
