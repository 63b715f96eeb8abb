"""RMSNorm per head + scale + RoPE over several token axes on CUDA: what it takes, how it is made ready, and the launch.

The kernel is csrc/rope_axial.cu. A configuration (Spec) is compiled by itself, in about a second, once per machine;
`prepare` does that while a graph is compiled. Grid, heads, strides, eps and scale are arguments of the launch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import build, driver
from ltx_inductor.kernels.rope import KernelNotReadyError

TOKEN_AXES, ROPE_AXES = 4, 3  # at most this many; as in csrc/rope_axial_params.h
_THREADS = 128
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_FMA = {"fp32-rope": True, "fp32-rope-muladd": False}  # contracts: is the product with sin added by one fma?


@dataclass(frozen=True)
class Spec:
    """One configuration. pairs: of every axis of the rotation, in order; together half of head_dim."""

    contract: str
    dtype: torch.dtype
    pairs: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return 2 * sum(self.pairs)

    @property
    def name(self) -> str:
        """The name of its artefact, e.g. rope-axial-fp32-rope-muladd-bf16-8-12-12."""
        return f"rope-axial-{self.contract}-{_DTYPES[self.dtype]}-{'-'.join(map(str, self.pairs))}"

    @property
    def flags(self) -> tuple[str, ...]:
        values = {
            "FP16": self.dtype == torch.float16,
            "TABLE_F32": True,
            "OUT_F32": False,
            "FMA": _FMA[self.contract],
            "ROUNDING": 1,  # ROPE of csrc/rope_config.cuh
            "HEAD_DIM": self.head_dim,
            "NORM": self.head_dim,
            "PER_HEAD": True,
            "OUT_BHSD": False,
            "SHARED": False,
        }
        values |= {f"PAIRS_{axis}": n for axis, n in enumerate((*self.pairs, 0, 0)[:ROPE_AXES])}
        return tuple(f"-DLTX_{key}={int(value)}" for key, value in values.items())


PRODUCTION = (Spec("fp32-rope-muladd", torch.bfloat16, (8, 12, 12)),)  # the LTX-2.5 diffusion decoder


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("cos", ctypes.c_void_p * ROPE_AXES),
        ("sin", ctypes.c_void_p * ROPE_AXES),
        ("x_stride", ctypes.c_int64 * TOKEN_AXES),
        ("x_head", ctypes.c_int64),
        ("table_stride", (ctypes.c_int64 * TOKEN_AXES) * ROPE_AXES),
        ("table_pair", ctypes.c_int64 * ROPE_AXES),
        ("multiplier", ctypes.c_uint64 * TOKEN_AXES),
        ("shift", ctypes.c_uint32 * TOKEN_AXES),
        ("sizes", ctypes.c_uint32 * TOKEN_AXES),
        ("tokens", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


def unsupported(
    *,
    arch: tuple[int, int],
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    pairs: Sequence[int],
    token_axes: int,
    contract: str,
) -> str | None:
    """None if a kernel exists for this, else a sentence: what was found, what is expected, what to do. Pure.

    pairs: of every axis of the rotation; token_axes: axes of x in front of the heads; arch: a compute capability.
    """
    what = "no kernel for a rotation over several axes"
    if contract not in _FMA:
        return f"{what} with rounding contract {contract!r}; kernels exist for {', '.join(_FMA)}"
    if dtype not in _DTYPES:
        return f"{what} of activations in {dtype}; expected torch.bfloat16 or torch.float16: cast the model"
    if table_dtype != torch.float32:
        return f"{what} with cos/sin in {table_dtype}; expected torch.float32"
    if not 1 <= len(pairs) <= ROPE_AXES:
        return f"{what} where there are {len(pairs)} of them; expected at most {ROPE_AXES}"
    if not 1 <= token_axes <= TOKEN_AXES:
        return f"{what} where x has {token_axes} token axes; expected 1 to {TOKEN_AXES}"
    head_dim = 2 * sum(pairs)
    if not 32 <= head_dim <= 256 or head_dim % 8:
        return f"{what} with head_dim {head_dim}; expected a multiple of 8 from 32 to 256"
    if arch < (8, 0):
        return f"{what} for compute capability {arch[0]}.{arch[1]}; expected 8.0 or newer"
    return None


_lock = threading.Lock()
_functions: dict[tuple[int, Spec], int] = {}  # (device, spec)
_off: dict[tuple[int, Spec], str] = {}  # why it must not run


def turn_off(device: int, spec: Spec, sentence: str) -> None:
    """From now on `prepare` and `launch` say no, in this process; `sentence` says why."""
    _off[device, spec] = sentence


def turn_off_call(args: Sequence[Any], sentence: str) -> None:
    """The same for the configuration of a call of `launch`."""
    x, _, cos, _, _, _, contract = args
    turn_off(x.device.index, _spec(x, cos, contract), sentence)


def _spec(x: Tensor, cos: Sequence[Tensor], contract: str) -> Spec:
    return Spec(contract, x.dtype, tuple(c.shape[-1] for c in cos))


def cubin(spec: Spec, arch: str) -> bytes:
    """The compiled kernel for an arch number such as "90". Raises what `build.cubin` raises."""
    return build.cubin(spec.name, arch, spec.flags, "rope_axial.cu")


def prepare(arch: tuple[int, int], spec: Spec, device: int) -> str | None:
    """Builds (or finds) the kernel and loads it on `device`; None, or a sentence that says why it cannot be used.

    To be called when a graph is compiled; the configuration must be one that `unsupported` has nothing against.
    """
    with _lock:
        if (device, spec) in _off:
            return _off[device, spec]
        if (device, spec) in _functions:
            return None
        try:
            image = cubin(spec, build.arch_number(arch))
            _functions[device, spec] = driver.load(image, "rope_axial", device, 0)
        except (build.BuildError, build.MissingToolError, driver.DriverError, OSError) as error:
            return f"the kernel {spec.name} cannot be built or loaded: {error}"
    return None


def launch(
    x: Tensor,
    weight: Tensor | None,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    eps: float,
    scale: float,
    contract: str,
) -> Tensor | None:
    """The op `rmsnorm_axial_rope` by its kernel: shapes as in `ltx_inductor.ops.axial_rope`, which has checked them.

    None where eager sums in another order (contiguous x or weight off a multiple of 8 bytes, which torch's vectorised
    norm does not take), or where eps is so small that the kernel's division could show (rope_math.cuh): the caller
    then runs eager. Raises KernelNotReadyError if `prepare` has not been called, or the kernel was turned off.
    """
    spec = _spec(x, cos, contract)
    if (x.device.index, spec) in _off:
        raise KernelNotReadyError(_off[x.device.index, spec])
    function = _functions.get((x.device.index, spec))
    if function is None or cos[0].dtype != torch.float32:
        raise KernelNotReadyError(f"the kernel {spec.name} is not ready on {x.device} for tables in {cos[0].dtype}")
    if x.is_contiguous() and x.data_ptr() % 8:
        return None
    if weight is not None:
        if weight.is_contiguous() and weight.data_ptr() % 8:
            return None
        weight = weight.contiguous()  # as eager does; a copy is aligned
    if not eps >= 1e-30 and spec.head_dim & (spec.head_dim - 1):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens = x[..., 0, 0].numel()
    if out.numel() == 0:
        return out
    if tokens >= 1 << 31:
        raise ValueError(f"x of shape {list(x.shape)}: expected fewer than 2^31 tokens in a call; split the batch")
    if not _vectors(x):
        x = x.clone(memory_format=torch.contiguous_format)
    params = _Params(x.data_ptr(), None if weight is None else weight.data_ptr(), out.data_ptr())
    missing = TOKEN_AXES - (x.dim() - 2)
    params.sizes[:] = (1,) * missing + tuple(x.shape[:-2])
    params.x_stride[:] = (0,) * missing + x.stride()[:-2]
    for i, size in enumerate(params.sizes):
        params.multiplier[i], params.shift[i] = _division(size)
    params.x_head, params.tokens, params.heads, params.eps, params.scale = x.stride(-2), tokens, x.shape[-2], eps, scale
    for axis, (c, s) in enumerate(zip(cos, sin, strict=True)):
        if c.stride() != s.stride():
            c, s = c.contiguous(), s.contiguous()
        params.cos[axis], params.sin[axis], params.table_pair[axis] = c.data_ptr(), s.data_ptr(), c.stride(-1)
        steps = (0 if n == 1 else step for n, step in zip(c.shape[:-2], c.stride()[:-2], strict=True))
        params.table_stride[axis][:] = ((0,) * missing) + tuple(steps)
    blocks = -(-tokens // (_THREADS // _group(spec.head_dim)))
    driver.launch(function, blocks, _THREADS, 0, x.device.index, [params])
    return out


def _vectors(x: Tensor) -> bool:
    """Can every row be read as vectors of 4 elements?"""
    steps = [step for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 8 == 0 and all(step % 4 == 0 for step in steps)


def _group(head_dim: int) -> int:
    """Lanes that hold a head: LTX_HEAD_GROUP of csrc/rope_plan.h."""
    return 4 if head_dim <= 32 else 8 if head_dim <= 64 else 16 if head_dim <= 128 else 32


@functools.lru_cache(maxsize=1024)
def _division(size: int) -> tuple[int, int]:
    """(multiplier, shift): n // size == n * multiplier >> shift for 0 <= n < 2^31 and 1 <= size < 2^31."""
    shift = 31 + (size - 1).bit_length()
    return (1 << shift) // size + 1, shift
