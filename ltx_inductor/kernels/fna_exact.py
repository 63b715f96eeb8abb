"""3D neighborhood attention on CUDA, schedule `exact`: the bits of NATTEN 0.21.7's Hopper kernel.

The kernel is a TileLang program (fna_exact_schedule.py) with the arithmetic of csrc/fna_exact.cuh. It is compiled once
per machine, in some seconds, by `prepare`, while a graph is compiled; TileLang keeps it under the cache folder of the
other kernels. One kernel serves all windows, grids and head counts. The bits hold for finite keys and values: NATTEN
multiplies values that no query of a tile sees by zero, this kernel leaves them out.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import compilers, fna_limits, fna_tiles, proofs, store
from ltx_inductor.kernels.fna_limits import HEAD_DIM, LOG2_E
from ltx_inductor.kernels.rope import KernelNotReadyError

_DENSE = torch.contiguous_format

_lock = threading.Lock()
_kernel: Any = None  # TileLang's, callable
_ready: set[int] = set()  # devices


def unsupported(
    *, arch: tuple[int, int], dtype: torch.dtype, head_dim: int, kernel_size: tuple[int, int, int]
) -> str | None:
    """None if there is a kernel for this, else a sentence. Pure: builds nothing, looks at no device."""
    return fna_limits.unsupported(
        "neighborhood-attention kernel with NATTEN's bits",
        arch=arch,
        dtype=dtype,
        head_dim=head_dim,
        kernel_size=kernel_size,
    )


def prepare(
    arch: tuple[int, int], *, dtype: torch.dtype, head_dim: int, kernel_size: tuple[int, int, int], device: int
) -> str | None:
    """Compiles (or finds) the kernel and loads it on `device`; None, or a sentence that says why it cannot be used."""
    missing = unsupported(arch=arch, dtype=dtype, head_dim=head_dim, kernel_size=kernel_size)
    if missing is not None:
        return missing
    with _lock:
        if device in _ready:
            return None
        missing = _compile()
        if missing is not None:
            return missing
        _ready.add(device)
        try:  # a first call loads the module: not allowed inside a graph capture
            _first_call(dtype, torch.device("cuda", device))
            torch.cuda.synchronize(device)
        except Exception as error:
            _ready.discard(device)
            return f"the neighborhood-attention kernel with NATTEN's bits cannot be loaded: {_first_line(error)}"
    return None


def digest() -> str:
    """Of the kernel, which `prepare` has compiled: TileLang's CUDA source, and the versions that make code of it."""
    import tilelang

    assert _kernel is not None
    nvcc = compilers.find_nvcc()
    parts = (_kernel.get_kernel_source(), tilelang.__version__, "" if nvcc is None else nvcc.version)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _first_call(dtype: torch.dtype, device: torch.device) -> None:
    with proofs.real_tensors():
        small = torch.zeros((1, 4, 4, 4, 1, HEAD_DIM), dtype=dtype, device=device)
        launch(small, small, small, (3, 3, 3), 1.0)


def launch(q: Tensor, k: Tensor, v: Tensor, kernel_size: tuple[int, int, int], scale: float) -> Tensor:
    """Neighborhood attention of q, k, v [B, T, H, W, heads, 64], bf16, on one CUDA device; the result is contiguous.

    Equal to NATTEN 0.21.7's hopper-fna in every bit, for finite k and v and scale > 0. Tensors that are not contiguous,
    or not on a 16-byte boundary, are copied first. Raises ValueError for another scale, KernelNotReadyError if
    `prepare` has not been called for the device, fna_tiles.TablesNotReadyError if a shape is met for the first time
    inside a graph capture.
    """
    if not scale > 0:
        raise ValueError(f"scale {scale}: neighborhood attention with NATTEN's bits needs a positive scale")
    if _kernel is None or q.device.index not in _ready:
        raise KernelNotReadyError(f"the exact neighborhood-attention kernel is not ready on {q.device}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v = (x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=_DENSE) for x in (q, k, v))  # TMA
    tables = fna_tiles.tables((q.shape[1], q.shape[2], q.shape[3]), kernel_size, q.device)
    factor = float(torch.tensor(LOG2_E, dtype=torch.float32) * torch.tensor(scale, dtype=torch.float32))
    with torch.cuda.device(q.device):
        for batch in range(q.shape[0]):
            views = [x[batch].permute(2, 1, 0, 3, 4) for x in (q, k, v)]
            _kernel(*views, out[batch], tables.order, *tables.axes, factor)
    return out


def _compile() -> str | None:
    global _kernel
    if _kernel is not None:
        return None
    if importlib.util.find_spec("tilelang") is None:
        return (
            "the neighborhood-attention kernel with NATTEN's bits is written in TileLang, which is not installed; "
            "install it with `pip install tilelang==0.1.15`"
        )
    with _tilelang_cache():
        try:
            from ltx_inductor.kernels import fna_exact_schedule

            _kernel = fna_exact_schedule.compiled()
        except Exception as error:  # TileLang, TVM and nvcc raise whatever they like; a compile must not crash
            return f"the neighborhood-attention kernel with NATTEN's bits cannot be built: {_first_line(error)}"
    return None


@contextlib.contextmanager
def _tilelang_cache() -> Iterator[None]:
    """TileLang's cache is put beside ours, unless the user has placed it."""
    name = "TILELANG_CACHE_DIR"
    placed = name in os.environ
    os.environ.setdefault(name, str(store.cache_root() / "tilelang"))
    try:
        yield
    finally:
        if not placed:
            os.environ.pop(name, None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
