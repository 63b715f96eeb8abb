"""The CUDA driver calls of kernels that are launched from Python: load a cubin, describe tensors to the TMA, launch.

Everything goes through libcuda.so.1 with ctypes, so that a finished cubin needs no compiler and no extension module.
A launch costs the host some tens of us here, which suits kernels that run for longer; the RoPE kernels, which do
not, have a launcher in C (csrc/launcher.c).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BFLOAT16, _SWIZZLE_128B, _PROMOTE_L2_256B = (
    9,
    3,
    3,
)  # of CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: loading is not allowed in a capture's default mode
TENSOR_MAP_BYTES = 128


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; the message says which, and the driver's own text."""


@functools.lru_cache(maxsize=1)
def _libcuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"libcuda.so.1 cannot be loaded, so this process has no CUDA driver: {error}") from error


def _call(name: str, *args: Any) -> None:
    code = getattr(_libcuda(), name)(*args)
    if code:
        _fail(name, code)


def _fail(name: str, code: int) -> NoReturn:
    text = ctypes.c_char_p()
    _libcuda().cuGetErrorString(code, ctypes.byref(text))
    raise DriverError(f"{name} failed with CUDA error {code} ({(text.value or b'unknown').decode()})")


def load(image: bytes, name: str, device: int, shared_bytes: int) -> int:
    """The function `name` of a cubin, on `device`, allowed to use shared_bytes of dynamic shared memory.

    It lives as long as the process. Raises DriverError.
    """
    library, kernel, function, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes sure that the primary context is there
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            none, zero = ctypes.c_void_p(), ctypes.c_uint(0)
            _call("cuLibraryLoadData", ctypes.byref(library), image, none, none, zero, none, none, zero)
            _call("cuLibraryGetKernel", ctypes.byref(kernel), library, name.encode())
            _call("cuKernelGetFunction", ctypes.byref(function), kernel)
            _call("cuFuncSetAttribute", function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(shared_bytes))
        finally:
            _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert function.value
    return function.value


def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Any:
    """How the TMA reads boxes of a bf16 tensor: innermost dimension first, strides in bytes of all but the innermost.

    Boxes have 128-byte rows in shared memory, swizzled; what lies outside of the tensor is read as zero. The map
    describes memory, it does not own it. Raises DriverError where the hardware cannot address the tensor.
    """
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
    start = (-ctypes.addressof(buffer)) % 64  # the driver wants it aligned
    result = (ctypes.c_char * TENSOR_MAP_BYTES).from_buffer(buffer, start)
    ones = (ctypes.c_uint32 * rank)(*([1] * rank))
    _call(
        "cuTensorMapEncodeTiled",
        result,
        ctypes.c_int(_BFLOAT16),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        ones,
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_PROMOTE_L2_256B),
        ctypes.c_int(0),
    )
    return result


def launch(function: int, blocks: int, threads: int, shared_bytes: int, device: int, arguments: Sequence[Any]) -> None:
    """Launches on the current stream of `device`; arguments are ctypes values, copied before this returns."""
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            launch(function, blocks, threads, shared_bytes, device, arguments)
        return
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream = torch.cuda.current_stream(device).cuda_stream
    code = _launcher()(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, None)
    if code:
        _fail("cuLaunchKernel", code)


@functools.lru_cache(maxsize=1)
def _launcher() -> Any:
    call = _libcuda().cuLaunchKernel
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    call.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return call
