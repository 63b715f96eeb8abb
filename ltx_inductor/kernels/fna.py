"""3D neighborhood attention on CUDA: what it takes, how it is made ready, and the launch; `exact` goes to fna_exact.

The kernel is csrc/fna.cu, which says how it works. It is compiled once per window, a few seconds each; sizes of the
grid, heads, strides and scale are arguments. `prepare` compiles and loads it while a graph is compiled; it is launched
once its gate (fna_gate.py), or a caller of `prepare` who asks for no trial, has accepted it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import build, driver, fna_exact, fna_limits, proofs
from ltx_inductor.kernels.fna_limits import HEAD_DIM, LOG2_E, Window
from ltx_inductor.kernels.rope import KernelNotReadyError

ARCH = "90a"
# the windows of the LTX-2.5 decoder: what `build` makes ahead of time
PRODUCTION = ((11, 11, 11), (3, 7, 7), (3, 5, 5))
_SHARED_BYTES_OF_SM = 228 * 1024


@dataclass(frozen=True)
class Shape:
    """What follows from a window; the same numbers as in csrc/fna_config.h, where they are explained."""

    box_w: int  # keys of a box row
    box_h: int  # rows of a box
    middle: int  # rows that are fetched in one piece
    warpgroups: int  # consumers of a CTA
    ctas: int  # of an SM
    stages: int  # slices of K and of V in shared memory
    shared_bytes: int

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @staticmethod
    @functools.cache
    def of(window: Window) -> Shape:
        wt, wh, ww = window
        box_w = 8 if ww <= 5 else 16 if ww <= 13 else 32
        box_h = wh + 3
        if box_w == 8:
            box_h += box_h % 2
        warpgroups = 2 if wt <= 5 else 3 if wt <= 9 else 4
        fixed = warpgroups * 8192 + 2048 + 256 + 1024
        both = 2 * box_h * box_w * 2 * HEAD_DIM
        ctas = 2 if wt <= 5 and _SHARED_BYTES_OF_SM // 2 - 1024 - fixed >= 2 * both else 1
        stages = min(4, (_SHARED_BYTES_OF_SM // ctas - 1024 - fixed) // both)
        return Shape(box_w, box_h, box_h - (6 if wh >= 3 else 0), warpgroups, ctas, stages, fixed + stages * both)


class _Params(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.c_void_p * 4),  # q, k, v, out
        ("strides", (ctypes.c_int64 * 5) * 3),
        ("sizes", ctypes.c_int32 * 5),  # B, T, H, W, heads
        ("segment", ctypes.c_int32),
        ("segments", ctypes.c_int32),
        ("scale_log2", ctypes.c_float),
    )


def unsupported(
    *, arch: tuple[int, int], dtype: torch.dtype, head_dim: int, kernel_size: Window, exact: bool = False
) -> str | None:
    """None if there is a kernel for this, else a sentence. Pure: builds nothing, looks at no device.

    exact: bit for bit NATTEN's result is wanted, not just its accuracy.
    """
    if exact:
        return fna_exact.unsupported(arch=arch, dtype=dtype, head_dim=head_dim, kernel_size=kernel_size)
    return fna_limits.unsupported(
        "neighborhood-attention kernel", arch=arch, dtype=dtype, head_dim=head_dim, kernel_size=kernel_size
    )


_lock = threading.Lock()
_functions: dict[tuple[int, Window], int] = {}
_digests: dict[Window, str] = {}  # SHA-256 of the cubins
_accepted: set[tuple[int, Window, bool]] = set()  # (device, window, exact) that may be launched
_off: dict[tuple[int, Window, bool], str] = {}  # (device, window, exact) -> why it must not run


def accept(device: int, window: Window, exact: bool) -> None:
    """From now on the kernel, which `prepare` has loaded, may be launched, unless it was turned off."""
    _accepted.add((device, window, exact))


def turn_off(device: int, window: Window, exact: bool, sentence: str) -> None:
    """From now on `prepare` and `launch` say no, in this process; `sentence` says why."""
    _off[device, window, exact] = sentence


def facts(window: Window, exact: bool) -> tuple[str, str]:
    """What a proof of the kernel, which `prepare` has made ready, is a proof of: its name, and a digest of its code."""
    return ("na3d exact", fna_exact.digest()) if exact else (f"na3d {window}", _digests[window])


def prepare(
    arch: tuple[int, int],
    *,
    dtype: torch.dtype,
    head_dim: int,
    kernel_size: Window,
    exact: bool = False,
    device: int,
    trial: bool = False,
) -> str | None:
    """Builds (or finds) the kernel and loads it on `device`; None, or a sentence that says why it cannot be used.

    trial: the gate has to `accept` it before anybody else may launch it.
    """
    window: Window = (kernel_size[0], kernel_size[1], kernel_size[2])
    missing = unsupported(arch=arch, dtype=dtype, head_dim=head_dim, kernel_size=window, exact=exact)
    if missing is None:
        missing = _off.get((device, window, exact))
    if missing is not None:
        return missing
    if exact:
        missing = fna_exact.prepare(arch, dtype=dtype, head_dim=head_dim, kernel_size=window, device=device)
    else:
        missing = _load(window, device)
    if missing is None and not trial:
        accept(device, window, exact)
    return missing


def _load(window: Window, device: int) -> str | None:
    with _lock:
        if (device, window) in _functions:
            return None
        try:
            image = cubin(window)
            _digests[window] = hashlib.sha256(image).hexdigest()
            _functions[device, window] = driver.load(image, "ltx_fna", device, Shape.of(window).shared_bytes)
        except (build.BuildError, build.MissingToolError, driver.DriverError, OSError) as error:
            return f"the neighborhood-attention kernel for window {window} cannot be built or loaded: {error}"
    return None


def cubin(window: Window) -> bytes:
    """The compiled kernel of a window, from the cache or built. Raises what `build.cubin` raises."""
    flags = [f"-DLTX_{axis}={size}" for axis, size in zip(("WT", "WH", "WW"), window, strict=True)]
    return build.cubin(f"fna-{'x'.join(map(str, window))}", ARCH, flags, "fna.cu")


def launch(q: Tensor, k: Tensor, v: Tensor, kernel_size: Window, scale: float, exact: bool = False) -> Tensor:
    """Neighborhood attention of q, k, v [B, T, H, W, heads, 64], bf16, on one CUDA device; the result is contiguous.

    Tensors that the TMA cannot address (16-byte alignment, unit stride along head_dim) are copied first. Raises
    KernelNotReadyError if the kernel of the window is not ready on the device, not accepted, or turned off.
    """
    window: Window = (kernel_size[0], kernel_size[1], kernel_size[2])
    device = q.device.index
    if (device, window, exact) in _off:
        raise KernelNotReadyError(_off[device, window, exact])
    if (device, window, exact) not in _accepted and not proofs.measuring():
        raise KernelNotReadyError(f"the neighborhood-attention kernel of {window} is not ready on {q.device}")
    if exact:
        return fna_exact.launch(q, k, v, window, scale)
    function = _functions.get((device, window))
    if function is None:
        raise KernelNotReadyError(f"the fast neighborhood-attention kernel of {window} is not ready on {q.device}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v = (_addressable(t) for t in (q, k, v))
    for part in _launches(q, k, v):
        _launch(function, q[part], k[part], v[part], out[part], window, scale, device)
    return out


def _addressable(t: Tensor) -> Tensor:
    strides = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    fits = t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 and s < 1 << 38 for s in strides)
    return t if fits else t.clone(memory_format=torch.contiguous_format)  # contiguous() keeps a misaligned one


def _launches(*tensors: Tensor) -> Iterator[slice]:
    """The batch in one launch where it lies behind T like one longer T, else one launch each."""
    batch, length = tensors[0].shape[:2]
    if batch == 1 or all(t.stride(0) == length * t.stride(1) or length == 1 for t in tensors):
        yield slice(0, batch)
    else:
        yield from (slice(b, b + 1) for b in range(batch))


def _launch(
    function: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, window: Window, scale: float, device: int
) -> None:
    shape = Shape.of(window)
    params, maps, blocks = _arguments(window, device, *(_described(x) for x in (q, k, v)))
    params = _Params.from_buffer_copy(params)  # the rest is the same for every call on such tensors
    params.tensors[3], params.scale_log2 = out.data_ptr(), scale * LOG2_E
    driver.launch(function, blocks, shape.threads, shape.shared_bytes, device, [*maps, params])


_Described = tuple[int, torch.Size, tuple[int, ...]]  # address, sizes, strides of a tensor


def _described(x: Tensor) -> _Described:
    return x.data_ptr(), x.shape, x.stride()


@functools.lru_cache(maxsize=256)
def _arguments(
    window: Window, device: int, q: _Described, k: _Described, v: _Described
) -> tuple[_Params, list[Any], int]:
    """Parameters of the kernel but for the result and the scale, tensor maps, and the number of CTAs.

    A model's activations come back to the same addresses, and this takes longer than the launch.
    """
    shape = Shape.of(window)
    batch, t, h, w, heads = q[1][:5]
    columns = -(-h // 4) * -(-w // 4) * heads * batch
    ctas = _multiprocessors(device) * shape.ctas
    segment = tiles_per_item(t, columns, window, ctas)
    tiles = -(-t // 4)
    segments = -(-tiles // segment)
    items = columns * segments
    if items > 0x7FFFFFFF or batch * t > 0x7FFFFFFF:
        raise ValueError(
            f"q of shape {list(q[1])}: neighborhood attention takes at most 2^31 query tiles in a call; split the batch"
        )
    params = _Params(segment=segment, segments=segments)
    params.sizes[:] = (batch, t, h, w, heads)
    params.tensors[:3] = (q[0], k[0], v[0])
    for row, x in zip(params.strides, (q, k, v), strict=True):
        row[:] = x[2][:5]
    maps = [_map(q, (4, 4, 4), "wth")]
    for x in (k, v):
        maps += [_map(x, (shape.box_w, rows, 1), "wht") for rows in (1, max(1, shape.middle))]
    return params, maps, min(items, ctas)


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _map(x: _Described, box: tuple[int, int, int], order: str) -> Any:
    """x as the TMA sees it: head_dim, heads, then W, H and T (with B in front of it) in `order`, innermost first."""
    address, (batch, t, h, w, heads, _), strides = x
    size = {"t": batch * t, "h": h, "w": w}
    stride = {"t": strides[0] if t == 1 else strides[1], "h": strides[2], "w": strides[3]}
    steps = [strides[4], *(stride[axis] for axis in order)]
    sizes = [heads, *(size[axis] for axis in order)]
    # an axis of size 1 is never stepped along, and torch may leave any stride there
    return driver.tensor_map(
        address,
        (HEAD_DIM, *sizes),
        tuple(2 * (s if n > 1 else HEAD_DIM) for s, n in zip(steps, sizes, strict=True)),
        (HEAD_DIM, 1, *box),
    )


@functools.lru_cache(maxsize=4096)
def tiles_per_item(length: int, columns: int, window: Window, ctas: int) -> int:
    """How many tiles of T, of `length` tokens, a CTA takes at a time: all of a column, or a part of it.

    Parts are for grids with too few columns for all CTAs; a part reads up to wt - 1 slices that the next reads too.
    """
    wt, consumers = window[0], Shape.of(window).warpgroups
    tiles = -(-length // 4)
    possible = (n for n in range(tiles, 0, -1) if _streams(length, wt, consumers, n))
    if columns >= 8 * ctas:
        return next(possible)

    def cost(part: int) -> int:  # slices that the busiest CTA computes or waits for
        rounds = -(-columns * -(-tiles // part) // ctas)
        return rounds * max(-(-part // consumers) * (wt + 3), (4 * part + wt - 1) // 2)

    return min(possible, key=cost)


def _streams(length: int, wt: int, consumers: int, part: int) -> bool:
    """Has every consumer of a CTA passed the slices of one tile when those of its next tile begin?

    The kernel can send slices again for the last tile of a part (`resent` in csrc/fna.cu), not for others.
    """

    def start(i: int) -> int:
        return min(max(min(i, length - 1) - wt // 2, 0), length - wt)

    tiles = -(-length // 4)
    return all(
        start(4 * (tile - consumers) + 3) + wt <= start(4 * tile)
        for first in range(0, tiles, part)
        for tile in range(first + consumers, min(first + part, tiles) - 1)
    )
