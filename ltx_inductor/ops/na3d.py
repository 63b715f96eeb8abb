"""`na3d`: 3D neighborhood attention, as an opaque op on un-permuted tensors.

    out[b, i, n] = sum_j softmax_j(scale * q[b, i, n] . k[b, j, n]) v[b, j, n]       j in the window of i

i and j are points (t, h, w) of the grid. The window of i spans `kernel_size` keys per axis and shifts inward at the
borders, so that every query sees equally many: it starts at min(max(i - w//2, 0), size - w). Stride 1, dilation 1, not
causal: NATTEN's na3d with its defaults.

q, k, v      [B, T, H, W, heads, head_dim], one shape, dtype (bf16, fp16 or fp32) and device; any strides
kernel_size  keys per axis (T, H, W), each at least 1 and at most the grid's size
out          as q, contiguous

The reference multiplies, sums and exponentiates in fp32, and rounds once, to the dtype of q. It goes by blocks of
queries, whose keys are one box, and so needs some hundred megabytes on any grid; a value that is not finite may spread
to queries nearby whose windows do not hold it. On CUDA the kernel runs (`exact` asks for the schedule with NATTEN's
bits), or the reference where there is none; `verify` compares every result of the kernel (na3d_verified.py).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import counts
from ltx_inductor.kernels.rope import KernelNotReadyError
from ltx_inductor.ops.sizes import certainly

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = (4, 4, 8)  # queries per axis of one block of the reference: 128 queries see 2.7 times 11^3 keys
_SCORES = 1 << 24  # at most this many scores at once, 64 MiB in fp32, or one block of one head
_LIBRARY = torch.library.Library("ltx_inductor", "FRAGMENT")
_LIBRARY.define(
    "na3d(Tensor q, Tensor k, Tensor v, int[3] kernel_size, float scale, bool exact=False, bool verify=False)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def window_start(index: int, window: int, size: int) -> int:
    """First key of the window of a query, along an axis of `size` keys; NATTEN's rule."""
    return min(max(index - window // 2, 0), size - window)


def reference(q: Tensor, k: Tensor, v: Tensor, kernel_size: Sequence[int], scale: float, exact: bool = False) -> Tensor:
    """Neighborhood attention in plain ATen; shapes, dtypes and errors as in the module's docstring."""
    _check(q, k, v, kernel_size)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    axes = [_axis_blocks(*axis, q.device) for axis in zip(q.shape[1:4], kernel_size, _BLOCK, strict=True)]
    masks: dict[tuple[int, ...], Tensor] = {}  # by the masks of the axes: most blocks have those of others
    for queries, keys, inside in (zip(*blocks, strict=True) for blocks in itertools.product(*axes)):
        which = tuple(map(id, inside))
        if which not in masks:
            t, h, w = inside
            points = t[:, None, None, :, None, None] & h[:, None, None, :, None] & w[:, None, None]
            masks[which] = points.logical_not_().flatten(3).flatten(0, 2)
        heads = max(1, _SCORES // masks[which].numel())
        for batch, n in itertools.product(range(q.shape[0]), range(0, q.shape[4], heads)):
            at, to = (batch, *queries, slice(n, n + heads)), (batch, *keys, slice(n, n + heads))
            out[at] = _attend(q[at], k[to], v[to], masks[which], scale).view(q[at].shape)
    return out


def _axis_blocks(size: int, window: int, block: int, device: torch.device) -> list[tuple[slice, slice, Tensor]]:
    """Blocks of queries along one axis: the queries, the keys that they see, and which sees which, [queries, keys].

    Blocks in which the same queries see the same keys share one tensor.
    """
    found, masks = [], {}
    for first in range(0, size, block):
        last = min(first + block, size)
        starts = [window_start(i, window, size) for i in range(first, last)]
        keys = slice(starts[0], starts[-1] + window)
        pattern = tuple(s - starts[0] for s in starts)
        if pattern not in masks:
            index, key = torch.arange(first, last, device=device), torch.arange(keys.start, keys.stop, device=device)
            start = (index - window // 2).clamp(0, size - window)[:, None]  # no upload: it may run in a graph capture
            masks[pattern] = (key >= start) & (key < start + window)
        found.append((slice(first, last), keys, masks[pattern]))
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor, outside: Tensor, scale: float) -> Tensor:
    """A box of queries and a box of keys, [t, h, w, heads, head_dim] each -> [queries, heads, head_dim], fp32.

    outside: [queries, keys], True where a key is not in the window of a query.
    """
    q, k, v = (t.float().flatten(0, 2).transpose(0, 1) for t in (q, k, v))  # [heads, points, head_dim]
    scores = torch.matmul(q * scale, k.transpose(1, 2)).masked_fill_(outside, float("-inf"))
    return torch.matmul(scores.softmax(-1), v).transpose(0, 1).contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, kernel_size: Sequence[int]) -> None:
    """Raises ValueError, naming the argument, its value and what is accepted. Adds no guard on a dynamic size."""
    if q.dim() != 6:
        raise ValueError(f"q has {q.dim()} axes; expected [B, T, H, W, heads, head_dim]")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    for name, t in (("k", k), ("v", v)):
        if t.dim() != 6 or any(certainly(a != b) for a, b in zip(t.shape, q.shape, strict=True)):
            raise ValueError(f"{name} has shape {list(t.shape)}; expected that of q, {list(q.shape)}")
        if t.dtype != q.dtype:
            raise ValueError(f"{name} is {t.dtype}; expected the dtype of q, {q.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; expected the device of q, {q.device}")
    if len(kernel_size) != 3 or any(w < 1 for w in kernel_size):
        raise ValueError(f"kernel_size={list(kernel_size)}; expected three sizes of at least 1, for T, H and W")
    for axis, window, size in zip("THW", kernel_size, q.shape[1:4], strict=True):
        if certainly(size < window):
            raise ValueError(
                f"kernel_size={list(kernel_size)}: the window has {window} keys along {axis}, the grid only {size}; "
                "expected a window that fits"
            )


def _fake(q: Tensor, k: Tensor, v: Tensor, kernel_size: Sequence[int], *_: Any) -> Tensor:
    _check(q, k, v, kernel_size)
    return q.new_empty(q.shape)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: Sequence[int],
    scale: float,
    exact: bool = False,
    verify: bool = False,
) -> Tensor:
    if not q.is_cuda:
        counts.called("na3d", "reference")
        return reference(q, k, v, kernel_size, scale)
    from ltx_inductor.kernels import fna  # late: `import ltx_inductor` is to be light

    _check(q, k, v, kernel_size)
    window = (kernel_size[0], kernel_size[1], kernel_size[2])
    missing = _unsupported(torch.cuda.get_device_capability(q.device), q.dtype, q.shape[-1], window, exact)
    if missing is None:
        try:
            out = fna.launch(q, k, v, window, scale, exact)
            counts.called("na3d", "kernel", (q, k, v, out))
            if verify:
                from ltx_inductor.ops import na3d_verified

                return na3d_verified.compared(out, q, k, v, window, scale, exact, reference)
            return out
        except KernelNotReadyError as error:
            missing = str(error)
    counts.called("na3d", "refused")
    _without_kernel(missing, exact)
    return reference(q, k, v, kernel_size, scale)


@functools.lru_cache(maxsize=256)
def _unsupported(
    arch: tuple[int, int], dtype: torch.dtype, head_dim: int, window: tuple[int, int, int], exact: bool
) -> str | None:
    from ltx_inductor.kernels import fna

    return fna.unsupported(arch=arch, dtype=dtype, head_dim=head_dim, kernel_size=window, exact=exact)


@functools.cache
def _without_kernel(missing: str, exact: bool) -> None:
    """Once per message: a graph out of Inductor's cache may come without the kernel it was compiled for."""
    bits = "; exact=True: these are not NATTEN's bits" if exact else ""
    warnings.warn(
        f"ltx_inductor: na3d runs its reference, many times slower than a kernel: {missing}{bits}", stacklevel=3
    )


def _no_gradients(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    if torch.is_grad_enabled():
        needing = [name for name, t in (("q", q), ("k", k), ("v", v)) if t.requires_grad]
        if needing:
            raise RuntimeError(
                f"ltx_inductor::na3d has no backward, and {', '.join(needing)} requires a gradient; call it under "
                "torch.no_grad() or torch.inference_mode(), or on detached tensors"
            )
    with torch._C._AutoDispatchBelowAutograd():
        out: Tensor = torch.ops.ltx_inductor.na3d.default(q, k, v, *arguments)
    return out


_LIBRARY.impl("na3d", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("na3d", _no_gradients, "Autograd")
torch.library.register_fake("ltx_inductor::na3d", _fake, lib=_LIBRARY)
