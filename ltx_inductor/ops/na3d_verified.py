"""`verify="always"` for na3d: every call of its kernel is compared, and one that goes wrong is off from then on.

The schedule `fast` has the accuracy of NATTEN and not its bits, so its error against the reference in fp32 has to stay
below the bound of the gate (`fna_gate.BOUND`), and no result may be inf or NaN where the reference's is finite. The
schedule `exact` has to keep the same bound, and NATTEN's bits where NATTEN's own kernel is in this process. The
reference is slow: of a large grid one batch entry and as many heads as make `_QUERIES` queries are compared, heads
taking turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ltx_inductor.kernels import fna, fna_gate, repro
from ltx_inductor.kernels.fna_limits import Window
from ltx_inductor.ops import verified

_OP = "na3d"
_QUERIES = 1 << 22
_turn = itertools.count()
Reference = Callable[[Tensor, Tensor, Tensor, Sequence[int], float], Tensor]


def compared(
    got: Tensor, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float, exact: bool, reference: Reference
) -> Tensor:
    """`got`, the kernel's result, where it passes; else the reference's, with the kernel off and the call kept.

    Not inside CUDA-graph capture: the comparison is postponed to the next call outside of one.
    """
    if verified.postponed(_OP, got):
        return got
    some = _some(q, next(_turn))
    elements, wrong, what = difference(got[some], q[some], k[some], v[some], window, scale, exact, reference)
    verified.tally(_OP, elements, wrong)
    if not wrong:
        return got
    sentence = (
        f"the kernel of {_OP} for window {window} {what} on {repro.device_name(got)} with torch {torch.__version__}; "
        "it is off in this process, which runs the reference; " + repro.save(_OP, (q, k, v, list(window), scale, exact))
    )
    fna.turn_off(q.device.index, window, exact, sentence)
    verified.tell(sentence)
    return reference(q, k, v, window, scale)


def difference(
    got: Tensor, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float, exact: bool, reference: Reference
) -> tuple[int, int, str]:
    """(elements compared, how many are wrong, what is wrong). Beyond the bound, all count as wrong."""
    want = reference(q.float(), k.float(), v.float(), window, scale)
    finite = want.isfinite()  # a value that is not finite spreads further in the reference, block by block
    stray = int((finite & ~got.isfinite()).sum())
    if stray:
        return want.numel(), stray, f"gives {stray} inf or NaN of {want.numel()} elements where the reference has none"
    off = torch.where(finite, got.double() - want, 0.0).norm()
    error = float(off / torch.where(finite, want, 0.0).double().norm()) if off else 0.0
    if not error <= fna_gate.BOUND:
        what = f"has a relative error of {error:.2e} in {want.numel()} elements, more than {fna_gate.BOUND:.0e},"
        return want.numel(), want.numel(), what
    bits = fna_gate.natten_bits(q, k, v, window, scale) if exact else None
    wrong = 0 if bits is None else repro.differing(got, bits)
    return want.numel(), wrong, f"differs from NATTEN in {wrong} of {want.numel()} elements"


def _some(q: Tensor, turn: int) -> tuple[slice, ...]:
    """Of a tensor like q [B, T, H, W, heads, head_dim]: everything, or what is compared in this turn."""
    batch, t, h, w, heads, _ = q.shape
    points = max(1, t * h * w)
    if batch * points * heads <= _QUERIES:
        return (slice(None),)
    count = max(1, min(heads, _QUERIES // points))
    first = turn * count % heads
    return (slice(turn % batch, turn % batch + 1), *(slice(None),) * 3, slice(first, first + count))
