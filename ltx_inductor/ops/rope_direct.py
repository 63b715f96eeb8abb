"""What a compiled model calls in place of the RoPE ops: the launch, into outputs that Inductor has allocated.

The dispatcher takes 4.6 us to carry an op's 14 arguments to its kernel and its results back. The code that
`ltx_inductor.lowering` has Inductor write calls one of these instead:

    rope = rope_call(True, "fp32-rope", "bshd", 1e-06, 1e-06, 32, 32)      once, when the code is loaded
    rope(q_out, k_out, q, k, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin)

It is a C function (csrc/python_call.h) with the checks and kernels of the op. What that one does not serve, and errors,
come to `slow` here: the op itself, and copies.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ltx_inductor.ops.rope  # noqa: F401  (registers the ops)
from ltx_inductor.kernels import build, rope

log = logging.getLogger("ltx_inductor")


@functools.cache
def rope_call(
    pair: bool, contract: str, layout: str, q_eps: float, k_eps: float, q_heads: int, k_heads: int
) -> Callable[..., None]:
    """The callable for one set of the ops' arguments that are no tensors; shapes and dtypes are those of the ops.

    pair: `qk_rmsnorm_split_rope`, as above; else `rmsnorm_split_rope`, called (out, x, weight, cos, sin), whose eps and
    heads are q's. Builds no kernel. The outputs must have the shape, dtype and strides of the op's results.
    """
    slow = _slow(pair, contract, layout, q_eps, k_eps, q_heads, k_heads)
    prepare, reason = _prepare_call()
    if prepare is None:
        log.debug("compiled code calls the op: %s", reason)
        return slow
    direct = prepare(_dlpack_table(), slow, pair, contract.encode(), layout == "bhsd", q_eps, k_eps, q_heads, k_heads)
    return slow if direct is None else direct


def _slow(
    pair: bool, contract: str, layout: str, q_eps: float, k_eps: float, q_heads: int, k_heads: int
) -> Callable[..., None]:
    ops = torch.ops.ltx_inductor

    def slow_pair(q_out: Tensor, k_out: Tensor, *tensors: Tensor | None) -> None:
        q, k = ops.qk_rmsnorm_split_rope.default(*tensors, q_eps, k_eps, q_heads, k_heads, contract, layout)
        q_out.copy_(q)
        k_out.copy_(k)

    def slow_single(out: Tensor, *tensors: Tensor | None) -> None:
        out.copy_(ops.rmsnorm_split_rope.default(*tensors, q_eps, q_heads, contract, layout))

    return slow_pair if pair else slow_single


@functools.cache
def _prepare_call() -> tuple[Callable[..., Any] | None, str]:
    """`ltx_prepare_call` of the launcher; None and why, where it cannot be had."""
    if getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) is None:
        return None, f"torch {torch.__version__} has no DLPack exchange table"
    try:
        rope._library()
        function = ctypes.PyDLL(str(build.launcher())).ltx_prepare_call
    except (build.MissingToolError, build.BuildError, ImportError, OSError) as error:
        return None, str(error)
    function.restype = ctypes.py_object
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
        *(ctypes.c_double, ctypes.c_double, ctypes.c_int64, ctypes.c_int64),
    )
    return function, ""


def _dlpack_table() -> int | None:
    """The address of torch's DLPackExchangeAPI, which lives as long as the process."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return address(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
