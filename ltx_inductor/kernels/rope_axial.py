"""RMSNorm per head + scale + RoPE over several token axes on CUDA: what it takes, how it is made ready, and the launch.

The kernel is csrc/rope_axial.cu. A configuration (Spec) is compiled by itself, in about a second, once per machine;
`prepare` does that while a graph is compiled. Grid, heads, strides, eps and scale are arguments of the launch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import build, counts, driver, proofs, rope_specs
from ltx_inductor.kernels.rope import KernelNotReadyError

TOKEN_AXES, ROPE_AXES = 4, 3  # at most this many; as in csrc/rope_axial_params.h
_THREADS = 128
OP = "rmsnorm_axial_rope"
_DTYPES = (torch.bfloat16, torch.float16)
_CONTRACTS = ("fp32-rope", "fp32-rope-muladd")


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
        return f"rope-axial-{self.contract}-{rope_specs.DTYPES[self.dtype]}-{'-'.join(map(str, self.pairs))}"

    @property
    def flags(self) -> tuple[str, ...]:
        one_axis = rope_specs.Spec(
            self.contract, self.dtype, torch.float32, self.head_dim, self.head_dim, per_head=True
        )
        pairs = (*self.pairs, 0, 0)[:ROPE_AXES]
        return (*one_axis.flags, *(f"-DLTX_PAIRS_{axis}={n}" for axis, n in enumerate(pairs)))


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
        ("table_stride", (ctypes.c_int32 * TOKEN_AXES) * ROPE_AXES),
        ("multiplier", ctypes.c_uint64 * TOKEN_AXES),
        ("shift", ctypes.c_uint32 * TOKEN_AXES),
        ("sizes", ctypes.c_uint32 * TOKEN_AXES),
        ("tokens", ctypes.c_uint32),
        ("heads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("scale_word", ctypes.c_uint32),
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
    if contract not in _CONTRACTS:
        return f"{what} with rounding contract {contract!r}; kernels exist for {', '.join(_CONTRACTS)}"
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


@dataclass(frozen=True)
class _Functions:
    """A loaded kernel: its entries rope_axial and rope_axial_scaled, and the digest of what was loaded."""

    entries: tuple[int, int]
    digest: str


_lock = threading.Lock()
_functions: dict[tuple[int, Spec], _Functions] = {}  # by device and spec
_accepted: set[tuple[int, Spec]] = set()  # these may be launched
_off: dict[tuple[int, Spec], str] = {}  # why it must not run


def turn_off(device: int, spec: Spec, sentence: str) -> None:
    """From now on `prepare` and `launch` say no, in this process; `sentence` says why."""
    with _lock:
        _off[device, spec] = sentence
        _accepted.discard((device, spec))
        _plans.clear()


def accept(device: int, spec: Spec) -> None:
    """The kernel, which is loaded, may be launched from now on."""
    _accepted.add((device, spec))


def facts(device: int, spec: Spec) -> tuple[str, str]:
    """What a proof of the loaded kernel is about: its configuration, and the very code."""
    return spec.name, _functions[device, spec].digest


def turn_off_call(args: Sequence[Any], sentence: str) -> None:
    """The same for the configuration of a call of `launch`."""
    x, _, cos, _, _, _, contract = args
    turn_off(x.device.index, _spec(x, cos, contract), sentence)


def _spec(x: Tensor, cos: Sequence[Tensor], contract: str) -> Spec:
    return Spec(contract, x.dtype, tuple(c.shape[-1] for c in cos))


def cubin(spec: Spec, arch: str) -> bytes:
    """The compiled kernel for an arch number such as "90". Raises what `build.cubin` raises."""
    return build.cubin(spec.name, arch, spec.flags, "rope_axial.cu")


def prepare(arch: tuple[int, int], spec: Spec, device: int, trial: bool = False) -> str | None:
    """Builds (or finds) the kernel and loads it on `device`; None, or a sentence that says why it cannot be used.

    To be called when a graph is compiled; the configuration must be one that `unsupported` has nothing against.
    trial: it is to be compared with eager first, and may be launched after `accept` only.
    """
    with _lock:
        if (device, spec) in _off:
            return _off[device, spec]
        try:
            if (device, spec) not in _functions:
                image = cubin(spec, build.arch_number(arch))
                first, second = (driver.load(image, name, device, 0) for name in ("rope_axial", "rope_axial_scaled"))
                _functions[device, spec] = _Functions((first, second), hashlib.sha256(image).hexdigest())
        except (build.BuildError, build.MissingToolError, driver.DriverError, OSError) as error:
            return f"the kernel {spec.name} cannot be built or loaded: {error}"
        if not trial:
            accept(device, spec)
    return None


@dataclass(frozen=True)
class _Plan:
    """What follows from everything about a call but its addresses."""

    function: int
    params: _Params  # without addresses
    blocks: int
    moved: int  # bytes
    declined: bool  # tables of 8 GiB, or eps so small that the kernel's division could show (csrc/rope_math.cuh)
    x_is_contiguous: bool
    copies_x: bool  # rows of x cannot be read as vectors of 4 elements
    copies_tables: bool
    tables_in_pairs: bool  # two pairs of a table are read at once


_plans: dict[tuple[Any, ...], _Plan] = {}
_MAX_PLANS = 4096


def launch(
    x: Tensor,
    weight: Tensor | None,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    eps: float,
    scale: float,
    contract: str,
    *,
    check: Callable[[], Any] = lambda: None,
) -> Tensor | None:
    """The op `rmsnorm_axial_rope` by its kernel: shapes as in `ltx_inductor.ops.axial_rope`.

    check: looks at the arguments, and raises; called for every new combination of shapes and strides. None where eager
    sums in another order (contiguous x or weight off a multiple of 8 bytes, which torch's vectorised norm does not
    take), or where the kernel cannot be exact (_Plan.declined): the caller then runs eager. Raises KernelNotReadyError
    if the kernel is not ready and accepted, or was turned off.
    """
    tables = (*cos, *sin)
    # 0.0 == -0.0, but their results differ in sign
    key = (x.shape, x.stride(), x.dtype, x.device.index, eps, scale, math.copysign(1.0, scale), contract, len(cos))
    key = (*key, *(None if t is None else (t.shape, t.dtype, t.device) for t in (weight, *tables)))
    key = (*key, *(t.stride() for t in tables))
    plan = _plans.get(key)
    if plan is None:
        check()
        plan = _planned(x, weight, cos, sin, eps, scale, contract)
        with _lock:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            # another thread must not launch what this one is only trying, or what was turned off meanwhile
            if (x.device.index, _spec(x, cos, contract)) in _accepted:
                _plans[key] = plan
    x_at = x.data_ptr()
    if plan.declined or (plan.x_is_contiguous and x_at % 8):
        return None
    if weight is not None:
        if not weight.is_contiguous():
            weight = weight.contiguous()  # as eager does; a copy is aligned
        elif weight.data_ptr() % 8:
            return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if plan.copies_x or x_at % 8:
        return launch(x.clone(memory_format=torch.contiguous_format), weight, cos, sin, eps, scale, contract)
    addresses = [t.data_ptr() for t in tables]
    if plan.copies_tables or (plan.tables_in_pairs and any(at % 8 for at in addresses)):
        both = [torch.broadcast_tensors(c, s) for c, s in zip(cos, sin, strict=True)]
        cos, sin = ([t.clone(memory_format=torch.contiguous_format) for t in some] for some in zip(*both, strict=True))
        return launch(x, weight, cos, sin, eps, scale, contract)
    params = _Params.from_buffer_copy(plan.params)
    params.x, params.out, params.weight = x_at, out.data_ptr(), None if weight is None else weight.data_ptr()
    params.cos[: len(cos)], params.sin[: len(sin)] = addresses[: len(cos)], addresses[len(cos) :]
    driver.launch(plan.function, plan.blocks, _THREADS, 0, x.device.index, [params])
    counts.called(OP, "kernel", moved=plan.moved)
    return out


def _planned(
    x: Tensor,
    weight: Tensor | None,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    eps: float,
    scale: float,
    contract: str,
) -> _Plan:
    spec = _spec(x, cos, contract)
    if (x.device.index, spec) in _off:
        raise KernelNotReadyError(_off[x.device.index, spec])
    functions = _functions.get((x.device.index, spec))
    usable = (x.device.index, spec) in _accepted or proofs.measuring()
    if functions is None or not usable or cos[0].dtype != torch.float32:
        raise KernelNotReadyError(f"the kernel {spec.name} is not ready on {x.device} for tables in {cos[0].dtype}")
    tokens, missing = math.prod(x.shape[:-2]), TOKEN_AXES - (x.dim() - 2)
    if tokens >= 1 << 31:
        raise ValueError(f"x of shape {list(x.shape)}: expected fewer than 2^31 tokens in a call; split the batch")
    params = _Params(tokens=tokens, heads=x.shape[-2], x_head=x.stride(-2), eps=eps, scale=scale)
    params.sizes[:] = (1,) * missing + tuple(x.shape[:-2])
    params.x_stride[:] = (0,) * missing + x.stride()[:-2]
    for i, size in enumerate(params.sizes):
        params.multiplier[i], params.shift[i] = _division(max(size, 1))
    word = _word(scale, x.dtype)
    params.scale_word = word or 0
    for axis, c in enumerate(cos):
        params.table_stride[axis][:] = (0,) * missing + _steps(c)
    tables, in_pairs = (*cos, *sin), not any(n % 2 for n in spec.pairs)
    bytes_of = (counts.bytes_of(t) for t in (x, *tables, *(() if weight is None else (weight,))))
    return _Plan(
        function=functions.entries[word is None],
        params=params,
        blocks=-(-tokens // (_THREADS // _group(spec.head_dim))),
        moved=x.numel() * x.element_size() + sum(bytes_of),
        declined=(not eps >= 1e-30 and bool(spec.head_dim & (spec.head_dim - 1)))
        or any(sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) >= 1 << 31 for t in tables)
        or any(step >= 1 << 31 for t in tables for step in _steps(t)),
        x_is_contiguous=x.is_contiguous(),
        copies_x=x.stride(-1) != 1 or any(step % 4 for n, step in zip(x.shape[:-1], x.stride(), strict=False) if n > 1),
        copies_tables=any(_steps(c) != _steps(s) for c, s in zip(cos, sin, strict=True))
        or any(t.stride(-1) != 1 or any(step % (1 + in_pairs) for step in _steps(t)) for t in tables),
        tables_in_pairs=in_pairs,
    )


def _steps(table: Tensor) -> tuple[int, ...]:
    """Elements from one token to the next, along every token axis."""
    return tuple(0 if n == 1 else step for n, step in zip(table.shape[:-2], table.stride(), strict=False))


def _word(scale: float, dtype: torch.dtype) -> int | None:
    """scale twice, as numbers of that 16-bit dtype; None if it is none of them."""
    narrow = torch.tensor(scale, dtype=dtype, device="cpu")
    if float(narrow) != scale:
        return None
    bits = int(narrow.view(torch.int16)) & 0xFFFF
    return bits << 16 | bits


def _group(head_dim: int) -> int:
    """Lanes that hold a head: LTX_HEAD_GROUP of csrc/rope_plan.h."""
    return 4 if head_dim <= 32 else 8 if head_dim <= 64 else 16 if head_dim <= 128 else 32


@functools.lru_cache(maxsize=1024)
def _division(size: int) -> tuple[int, int]:
    """(multiplier, shift): n // size == n * multiplier >> shift for 0 <= n < 2^31 and 1 <= size < 2^31."""
    shift = 31 + (size - 1).bit_length()
    return (1 << shift) // size + 1, shift
