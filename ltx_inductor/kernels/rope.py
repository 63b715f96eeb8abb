"""RMSNorm + split RoPE on CUDA: how a configuration (rope_specs.py) is made ready, and the launch.

A configuration is compiled by itself, with head_dim, hidden size, dtypes and contract as constants: about one
second, once per machine. `prepare` does that when a graph is compiled; `launch_single` and `launch_pair` only look up
the loaded kernels. docs/kernels-rope.md describes the kernels.

A loaded kernel is launched, from here or by the ops' C kernel, once it is accepted: by its gate (gate.py), by whoever
calls `prepare` and asks for no trial, or for a proof that is kept on disk.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import build, counts, proofs
from ltx_inductor.kernels.rope_specs import CONTRACTS, LAYOUTS, Spec, unsupported

# What may be forced on a launch, by the gate, tests and benchmarks: let the launcher choose; one CTA per token (q and k
# together); one CTA per row; the any-stride kernel.
AUTO, PAIR, ROW, ANY = 0, 1, 2, 3
DRY = -1  # everything but the launch: what the host costs

log = logging.getLogger("ltx_inductor")


class KernelNotReadyError(RuntimeError):
    """A launch met a configuration that is not built, that nobody has compared with eager, or that is turned off."""


_lock = threading.Lock()
_images: dict[tuple[str, Spec], bytes] = {}  # (arch number, spec) -> cubin
_handles: dict[tuple[int, Spec], int] = {}  # (device, spec) -> the launcher's handle
_accepted: set[tuple[int | str, Spec]] = set()  # (device, or an arch number for all of its devices; spec)
_served: set[tuple[int, Spec]] = set()  # (device, spec) that the ops' C kernel launches
_off: dict[tuple[int, Spec], str] = {}  # (device, spec) -> why it must not run
_plans: dict[tuple[Any, ...], _Plan] = {}  # shapes, dtypes, device, heads, contract, layout -> how to launch
_MAX_PLANS = 4096


def prepare(
    arch: tuple[int, int],
    *,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    head_dim: int,
    hidden: int,
    contract: str,
    per_head: bool,
    layout: str = "bshd",
    shared: bool = False,
    device: int | None = None,
    trial: bool = False,
) -> str | None:
    """Makes the kernels of one configuration ready: None, or a sentence that says what is missing and what to do.

    To be called when a graph is compiled. The arguments are those of `unsupported`, and: `layout` of the output;
    `shared`, which is `k_cos is None and q_heads == k_heads` of a pair, and False for a single tensor; `device`, on
    which the kernels are to be resident too (default: none; the first launch then does it); `trial`: the gate has to
    `accept` the kernels before anybody else may launch them. A pair whose sides have different hidden sizes (norm over
    the row) runs as two singles: prepare each.
    Thread safe, idempotent and, once ready, a dictionary look-up. Never raises for a missing compiler.
    """
    reason = unsupported(
        dtype=dtype,
        table_dtype=table_dtype,
        head_dim=head_dim,
        hidden=hidden,
        contract=contract,
        per_head=per_head,
        arch=arch,
    )
    if reason is not None:
        return reason
    spec = Spec(contract, dtype, table_dtype, head_dim, head_dim if per_head else hidden, per_head, layout, shared)
    if device is not None and (device, spec) in _off:
        return _off[device, spec]
    number = build.arch_number(arch)
    try:
        if (number, spec) not in _images:
            image = build.cubin(spec.name, number, spec.flags)
            _library()
            _images[number, spec] = image
        if device is not None:
            _open(device, number, spec)
        if not trial:
            _accepted.add((number, spec))
            if device is not None:
                accept(device, spec)
    except build.BuildError as error:
        return f"{spec.name} cannot be built for compute capability {arch[0]}.{arch[1]}: {error}"
    except build.MissingToolError as error:
        return str(error)
    except ImportError as error:
        return f"{error}; install it with `pip install apache-tvm-ffi filelock platformdirs`"
    except OSError as error:
        return (
            f"neither the kernel cache nor a temporary folder can be written: {error}; set LTX_INDUCTOR_CACHE to a "
            "writable folder"
        )
    return None


def accept(device: int, spec: Spec) -> None:
    """From now on the kernels, which are loaded on `device`, may be launched, by the ops' C kernel too."""
    key = device, spec
    with _lock:
        if key in _off:
            return
        if key not in _served:
            _library().get_function("rope_serve")(_handles[key], device, _address(spec.contract))
            _served.add(key)
        _accepted.add(key)


def turn_off(device: int, spec: Spec, sentence: str) -> None:
    """The kernels are not launched any more on `device` in this process, whoever has accepted them; `sentence`: why."""
    key = device, spec
    with _lock:
        _off[key] = sentence
        if key in _handles:
            _library().get_function("rope_unserve")(_handles[key])
        _served.discard(key)
        _plans.clear()


def turn_off_call(args: Sequence[Any], sentence: str) -> None:
    """`turn_off` for every configuration that a call of an op with these arguments may use."""
    sides = [t for t in args[: 2 if len(args) > 8 else 1] if isinstance(t, Tensor)]
    cos, contract, layout = args[4] if len(sides) == 2 else args[2], *args[-2:]
    for x in sides:
        for shared in (False, True):
            spec = Spec(contract, x.dtype, cos.dtype, 2 * cos.size(-1), x.size(-1), x.dim() == 4, layout, shared)
            turn_off(x.get_device(), spec, sentence)


def facts(device: int, spec: Spec) -> tuple[str, str]:
    """What a proof of these kernels, which `prepare` has made ready for `device`, is a proof of: their name, and the
    SHA-256 of the cubin, since another compiler makes other code."""
    image = _images[build.arch_number(torch.cuda.get_device_capability(device)), spec]
    return spec.name, hashlib.sha256(image).hexdigest()


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    import tvm_ffi

    library = tvm_ffi.load_module(str(build.launcher()))
    counts.watch(library.get_function("rope_counted")())
    _take_over(library)
    return library


_MINUS_ONE = (-1,)  # the launcher keeps its address (csrc/torch_dispatch.h, throw_python_error)
_register_lock = threading.Lock()
_registered: list[bool] = []


def _take_over(library: Any) -> None:
    """Makes the launcher's C function the CUDA kernel of both ops: once per process, where torch has what it takes.

    Until then, and where it has not, CUDA tensors reach the ops' own kernel (ltx_inductor/ops/rope.py), which does the
    same in Python. Nothing is registered for CUDA before, so nothing is replaced: this may run inside that kernel, on
    the first call of a graph that came out of a cache.
    """
    with _register_lock:
        if not _registered:
            _registered.append(register(library, "ltx_inductor", "CUDA"))
            if not _registered[0]:
                log.debug("torch %s lacks the stable ABI: the CUDA kernel stays in Python", torch.__version__)


def register(library: Any, namespace: str, key: str) -> bool:
    """Registers the C kernels for the ops of a namespace and a dispatch key. False: it cannot be, nothing was done."""
    return bool(library.get_function("rope_register")(_address(namespace), _address(key), id(_MINUS_ONE)))


@functools.cache
def _buffer(text: str) -> Any:
    return ctypes.create_string_buffer(text.encode())


def _address(text: str) -> int:
    """Of a C string that lives as long as the process."""
    return ctypes.addressof(_buffer(text))


def _open(device: int, number: str, spec: Spec) -> int:
    """The launcher's handle of a configuration, with its kernels resident on the device."""
    with _lock:
        handle = _handles.get((device, spec))
        if handle is not None:
            return handle
        image = _images[number, spec]
        rounding, _, out_f32 = CONTRACTS[spec.contract]
        address = ctypes.cast(ctypes.c_char_p(image), ctypes.c_void_p).value  # the driver copies what it needs
        handle = _library().get_function("rope_open")(
            address,
            len(image),
            spec.head_dim,
            spec.norm,
            int(spec.per_head),
            int(spec.dtype == torch.float16),
            int(spec.table_dtype == torch.float32),
            out_f32,
            int(rounding == 2),
            int(spec.layout == "bhsd"),
            int(spec.shared),
        )
        _library().get_function("rope_load")(handle, device)
        _handles[device, spec] = handle
        return handle


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, strides and dtype of an output


@dataclass(frozen=True)
class _Plan:
    """All that a launch of known shapes needs: then it is one dictionary look-up, the outputs and one call."""

    launch: Callable[..., int]
    handle: int
    device: int
    q_out: _Layout
    k_out: _Layout
    stream: Callable[[int], int]
    current_device: Callable[[], int]
    empty_here: Callable[..., Tensor]  # on the current device
    empty_there: Callable[..., Tensor]  # on `device`


def _empty_on(device: torch.device, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=device)


def _plan(
    key: tuple[Any, ...], x: Tensor, k: Tensor, cos: Tensor, heads: tuple[int, int], kind: tuple[str, str, bool]
) -> _Plan:
    """The slow part of the first launch of some shapes. Builds no kernel, and lets only the gate use one on trial."""
    contract, layout, shared = kind
    device = x.get_device()
    if device < 0:
        raise ValueError("the rope kernel runs on CUDA tensors; on CPU the op runs its reference")
    if contract not in CONTRACTS or layout not in LAYOUTS:
        known = f"{list(CONTRACTS)} and {list(LAYOUTS)}"
        raise ValueError(f"contract {contract!r}, layout {layout!r}: expected one of {known}")
    if x.dim() not in (3, 4) or cos.dim() != 4:
        raise ValueError(f"x is {list(x.shape)}, cos {list(cos.shape)}: expected 3 or 4 axes, and 4")
    arch = torch.cuda.get_device_capability(device)
    per_head, head_dim, width = x.dim() == 4, 2 * cos.size(-1), x.size(-1)
    reason = unsupported(
        dtype=x.dtype,
        table_dtype=cos.dtype,
        head_dim=head_dim,
        hidden=width,
        contract=contract,
        per_head=per_head,
        arch=arch,
    )
    if reason is not None:
        raise ValueError(reason)
    spec = Spec(contract, x.dtype, cos.dtype, head_dim, width, per_head, layout, shared)
    if (device, spec) in _off:
        raise KernelNotReadyError(_off[device, spec])
    number = build.arch_number(arch)
    if (number, spec) not in _images:
        try:
            _images[number, spec] = build.cubin(spec.name, number, spec.flags, build=False)
        except build.MissingToolError as error:
            text = f"{error}; kernels are built when a graph is compiled, by rope.prepare"
            raise KernelNotReadyError(text) from None
    trial = proofs.measuring()
    if not trial and not {(device, spec), (number, spec)} & _accepted:
        _find_proof(device, spec)
    handle = _open(device, number, spec)
    if not trial:
        accept(device, spec)

    dtype = torch.float32 if CONTRACTS[contract][2] else x.dtype

    def output(t: Tensor, h: int) -> _Layout:
        b, s = t.shape[:2]
        if layout == "bhsd":
            return (b, h, s, head_dim), (h * s * head_dim, s * head_dim, head_dim, 1), dtype
        if per_head:
            return (b, s, h, head_dim), (s * h * head_dim, h * head_dim, head_dim, 1), dtype
        return (b, s, h * head_dim), (s * h * head_dim, h * head_dim, 1), dtype

    from torch._C._dynamo import guards

    there = functools.partial(_empty_on, torch.device("cuda", device))

    plan = _Plan(
        launch=_library().get_function("rope_launch"),
        handle=handle,
        device=device,
        q_out=output(x, heads[0]),
        k_out=output(k, heads[1]),
        stream=torch._C._cuda_getCurrentRawStream,
        current_device=torch._C._cuda_getDevice,
        empty_here=getattr(guards, "_empty_strided_cuda", there),  # Inductor's: half the cost of torch.empty_like
        empty_there=there,
    )
    if trial:
        return plan
    with _lock:
        if (device, spec) in _off:  # by another thread, in the meantime
            raise KernelNotReadyError(_off[device, spec])
        if len(_plans) >= _MAX_PLANS:  # sequence lengths of a long-lived server: start again rather than grow for ever
            _plans.clear()
        _plans[key] = plan
    return plan


def _find_proof(device: int, spec: Spec) -> None:
    """Raises KernelNotReadyError unless a proof of these kernels is kept. Nobody in this process has asked for them, as
    with a graph out of Inductor's cache whose report is gone."""
    if proofs.kept(device, facts(device, spec)) is None:
        raise KernelNotReadyError(
            f"{spec.name} is built, but nobody has compared it with eager on this kind of device with torch "
            f"{torch.__version__}; that is done when a graph is compiled: set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 once"
        )


def launch_single(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    contract: str,
    layout: str = "bshd",
    path: int = AUTO,
) -> Tensor | None:
    """The op `rmsnorm_split_rope` on CUDA tensors: its result, or None where the caller must run the reference.

    None means that eager would sum the squares in another order: x or weight is contiguous, but its address is no
    multiple of 4 elements (not in the fp32-all contracts). Shapes and strides as in the op; runs on the current
    stream of x's device, whichever device is current. Raises KernelNotReadyError, or ValueError for arguments that do
    not fit.
    """
    key = (x.shape, x.dtype, cos.dtype, x.get_device(), num_heads, contract, layout)
    plan = _plans.get(key) or _plan(key, x, x, cos, (num_heads, num_heads), (contract, layout, False))
    empty = plan.empty_here if plan.current_device() == plan.device else plan.empty_there
    out = empty(*plan.q_out)
    tensors = (x, None, weight, None, cos, sin, None, None, out, None)
    status = plan.launch(plan.handle, plan.stream(plan.device), path, *tensors, eps, eps, num_heads, num_heads)
    if status == 0:
        return out
    if status == 2 and weight is not None:
        return launch_single(x, _aligned(weight), cos, sin, eps, num_heads, contract, layout, path)
    return None


def launch_pair(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_cos: Tensor,
    q_sin: Tensor,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    q_eps: float,
    k_eps: float,
    q_heads: int,
    k_heads: int,
    contract: str,
    layout: str = "bshd",
    path: int = AUTO,
) -> tuple[Tensor, Tensor] | None:
    """The op `qk_rmsnorm_split_rope` on CUDA tensors, in one launch: its results, or None as in `launch_single`.

    Sides whose rows differ in length (norm over the row) are launched one after the other.
    """
    kind = (q.dtype, q_cos.dtype, q.get_device(), contract, layout, k_cos is None)
    key = (q.shape, k.shape, q_heads, k_heads, *kind)
    plan = _plans.get(key)
    if plan is None:
        if k.size(-1) != q.size(-1):
            first = launch_single(q, q_weight, q_cos, q_sin, q_eps, q_heads, contract, layout, path)
            if first is None:
                return None
            cos, sin = (q_cos, q_sin) if k_cos is None or k_sin is None else (k_cos, k_sin)
            second = launch_single(k, k_weight, cos, sin, k_eps, k_heads, contract, layout, path)
            return None if second is None else (first, second)
        shared = k_cos is None and q_heads == k_heads
        plan = _plan(key, q, k, q_cos, (q_heads, k_heads), (contract, layout, shared))
    empty = plan.empty_here if plan.current_device() == plan.device else plan.empty_there
    q_out, k_out = empty(*plan.q_out), empty(*plan.k_out)
    tables, numbers = (q_cos, q_sin, k_cos, k_sin), (q_eps, k_eps, q_heads, k_heads)
    tensors = (q, k, q_weight, k_weight, *tables, q_out, k_out)
    status = plan.launch(plan.handle, plan.stream(plan.device), path, *tensors, *numbers)
    if status == 0:
        return q_out, k_out
    if status == 2:
        qw, kw = (None if w is None else _aligned(w) for w in (q_weight, k_weight))
        return launch_pair(q, k, qw, kw, *tables, *numbers, contract, layout, path)
    return None


def _aligned(weight: Tensor) -> Tensor:
    """A contiguous copy in a fresh allocation, as eager makes one before it reads such a weight."""
    return weight.clone(memory_format=torch.contiguous_format)
