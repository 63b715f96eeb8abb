"""`rmsnorm_split_rope` and `qk_rmsnorm_split_rope`: RMSNorm -> split RoPE of one or two tensors, as opaque ops.

    n    = RMSNorm(x, weight, eps)                 over the last axis of x
    out  = [n0*cos - n1*sin, n1*cos + n0*sin]      n0, n1 = the two halves of every head of n

x       [B, S, H*D] (norm over the whole row) or [B, S, H, D] (norm per head), bf16 or fp16, any strides
weight  [H*D] or [D], the dtype of x, or None
cos,sin [B or 1, H or 1, S, D/2], the dtype of x or fp32, any strides (0 = broadcast)
out     layout "bshd": shape of x, contiguous; layout "bhsd": [B, H, S, D], contiguous. The dtype is the contract's.

The reference is the eager chain of the contract (see `ltx_inductor.contract`), op by op, and so has its bits on every
device. On CUDA the kernel runs; the reference only where the kernel says that eager itself takes another path.

Who runs it: once the launcher is loaded, the ops' CUDA kernel is a C function of it (csrc/torch_dispatch.h). What that
one does not serve (a kernel that is not loaded, the reference, errors) it hands to the `_slow` ops below. Before, and
on a torch that lacks what it takes, CUDA tensors come to the same functions directly.

A contract may end in "+verify": the kernel's result is then compared with the reference's (see verified.py).
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.contract import Contract, lookup
from ltx_inductor.kernels import counts
from ltx_inductor.kernels import rope as kernel
from ltx_inductor.ops import verified
from ltx_inductor.ops.sizes import certainly

LAYOUTS = ("bshd", "bhsd")
_LIBRARY = torch.library.Library("ltx_inductor", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_LIBRARY.define(
    "rmsnorm_split_rope(Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, int num_heads, str contract, "
    'str layout="bshd") -> Tensor',
    tags=_TAGS,
)
_LIBRARY.define(
    "qk_rmsnorm_split_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor q_cos, Tensor q_sin, "
    "Tensor? k_cos, Tensor? k_sin, float q_eps, float k_eps, int q_heads, int k_heads, str contract, "
    'str layout="bshd") -> (Tensor, Tensor)',
    tags=_TAGS,
)
# contract and layout: addresses of C strings. The results, and an int64 tensor: 0, or the address of an owned reference
# to the exception that stands for them (torch logs and drops one that is raised here).
_LIBRARY.define(
    "_rmsnorm_split_rope_slow(Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, int num_heads, "
    "int contract, int layout) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "_qk_rmsnorm_split_rope_slow(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor q_cos, Tensor q_sin, "
    "Tensor? k_cos, Tensor? k_sin, float q_eps, float k_eps, int q_heads, int k_heads, int contract, "
    "int layout) -> (Tensor, Tensor, Tensor)"
)


def reference(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    contract: str,
    layout: str = "bshd",
) -> Tensor:
    """The eager chain of `contract`; shapes as in the module's docstring."""
    c = _lookup(contract)
    _check(x, weight, cos, sin, num_heads, layout, c)
    out = _rotate(_normalise(x, weight, eps, num_heads, c), cos, sin, c)  # [B, H, S, D]
    if c.narrow_result:
        out = out.to(x.dtype)
    if layout == "bhsd":
        return out.contiguous()
    return out.transpose(1, 2).reshape(x.shape).contiguous()


def _lookup(contract: str) -> Contract:
    return lookup(verified.split(contract)[0])


def _normalise(x: Tensor, weight: Tensor | None, eps: float, num_heads: int, c: Contract) -> Tensor:
    """[B, H, S, D], rounded to the dtype of x or left in fp32."""
    if not c.narrow_norm:
        x, weight = x.float(), None if weight is None else weight.float()
    n = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return n.reshape(*_heads_shape(x, num_heads)).transpose(1, 2)


def _rotate(n: Tensor, cos: Tensor, sin: Tensor, c: Contract) -> Tensor:
    """[B, H, S, D] -> the same shape; the dtype of the sum (n's, or fp32)."""
    if not c.narrow_product:
        n = n.float()
        cos, sin = cos.float(), sin.float()
    n0, n1 = n.chunk(2, dim=-1)
    if c.fused_sum:
        a = torch.addcmul(n0 * cos, -sin, n1)
        b = torch.addcmul(n1 * cos, sin, n0)
    else:
        a = n0 * cos + -sin * n1
        b = n1 * cos + sin * n0
    return torch.cat((a, b), dim=-1)


def _heads_shape(x: Tensor, num_heads: int) -> tuple[int, int, int, int]:
    """(B, S, H, D) of an x that is [B, S, H*D] or [B, S, H, D]."""
    head_dim = x.shape[-1] // num_heads if x.dim() == 3 else x.shape[-1]
    return x.shape[0], x.shape[1], num_heads, head_dim


def _check(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int, layout: str, c: Contract
) -> None:
    """Raises ValueError, naming the argument, its value and what is accepted. Adds no guard on a dynamic B or S."""
    if x.dim() not in (3, 4):
        raise ValueError(f"x has {x.dim()} axes; expected [B, S, H*D] or [B, S, H, D]")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}; expected torch.bfloat16 or torch.float16")
    _check_layout(layout)
    if (x.dim() == 4 and x.shape[2] != num_heads) or (x.dim() == 3 and (num_heads < 1 or x.shape[-1] % num_heads)):
        raise ValueError(f"num_heads={num_heads} does not fit x of shape {list(x.shape)}")
    batch, tokens, heads, head_dim = _heads_shape(x, num_heads)
    if head_dim % 2:
        raise ValueError(f"x has heads of {head_dim} elements; expected an even number, since a head has two halves")
    if weight is not None and weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}; expected the device of x, {x.device}")
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != x.shape[-1] or weight.dtype != x.dtype):
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)}; expected {x.dtype} [{x.shape[-1]}], the last axis of x"
        )
    for name, t in (("cos", cos), ("sin", sin)):
        accepted: tuple[tuple[Any, ...], ...] = ((1, batch), (1, heads), (tokens,), (head_dim // 2,))
        if t.dim() != 4 or any(_certainly_not(n, sizes) for n, sizes in zip(t.shape, accepted, strict=True)):
            raise ValueError(
                f"{name} has shape {list(t.shape)}; expected [{batch} or 1, {heads} or 1, {tokens}, {head_dim // 2}] "
                f"for x of shape {list(x.shape)}"
            )
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}; expected the device of x, {x.device}")
        allowed = (x.dtype,) if c.narrow_product else (x.dtype, torch.float32)
        if t.dtype not in allowed or t.dtype != cos.dtype:
            raise ValueError(
                f"{name} is {t.dtype}; expected {' or '.join(map(str, allowed))} for contract {c.name}, the same for "
                "cos and sin"
            )


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; expected one of {', '.join(LAYOUTS)}")


def _certainly_not(size: Any, accepted: tuple[Any, ...]) -> bool:
    """Is it none of these, whatever the values of their symbols? Adds no guard."""
    return all(certainly(size != n) for n in accepted)


def _fake(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    contract: str,
    layout: str = "bshd",
) -> Tensor:
    c = _lookup(contract)
    _check(x, weight, cos, sin, num_heads, layout, c)
    dtype = x.dtype if c.narrow_result else torch.float32
    if layout == "bshd":
        return x.new_empty(x.shape, dtype=dtype)
    b, s, h, d = _heads_shape(x, num_heads)
    return x.new_empty((b, h, s, d), dtype=dtype)


def _pair(side: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The two-sided op from a one-sided function; k_cos/k_sin None means that k uses q's tables."""

    def both(
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
    ) -> tuple[Tensor, Tensor]:
        if (k_cos is None) != (k_sin is None):
            raise ValueError("k_cos and k_sin: expected both, or None for both to use q's tables")
        _lookup(contract)  # what both sides share is told without the name of one
        _check_layout(layout)
        k_tables = (q_cos, q_sin) if k_cos is None else (k_cos, k_sin)
        return (
            _named("q", side, q, q_weight, q_cos, q_sin, q_eps, q_heads, contract, layout),
            _named("k", side, k, k_weight, *k_tables, k_eps, k_heads, contract, layout),
        )

    return both


def _named(name: str, side: Callable[..., Tensor], *args: Any) -> Tensor:
    """`side(*args)`, whose errors speak of x, cos and sin, told of the tensor with that name."""
    try:
        return side(*args)
    except ValueError as error:
        raise ValueError(f"{name} as x: {error}") from None


reference_pair = _pair(reference)


def _kernel_or(op: str, launch: str, chain: Callable[..., Any]) -> Callable[..., Any]:
    """The op on CUDA tensors: the launch of that name, or the eager chain where it declines or is not ready."""
    signature = inspect.signature(chain)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        *rest, contract, layout = given.args
        plain, verify = verified.split(contract)
        call = (*rest, plain, layout)
        try:
            out = getattr(kernel, launch)(*call)
        except kernel.KernelNotReadyError as missing:
            without_kernel(str(missing))
            out = None
        if out is None:
            counts.called(op, "refused")
            return chain(*call)
        counts.called(op, "kernel", (*call, *(out if isinstance(out, tuple) else (out,))))
        return verified.compared(op, out, chain, call) if verify else out

    return run


_on_cuda = _kernel_or("rmsnorm_split_rope", "launch_single", reference)
_pair_on_cuda = _kernel_or("qk_rmsnorm_split_rope", "launch_pair", reference_pair)


@functools.cache
def without_kernel(missing: str) -> None:
    """Once per message: a graph out of Inductor's cache may come without the kernel it was compiled for."""
    warnings.warn(f"ltx_inductor: running the eager chain, several times slower: {missing}", stacklevel=3)


def _single(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if x.is_cuda:
        return _on_cuda(x, *args, **kwargs)
    counts.called("rmsnorm_split_rope", "reference")
    return reference(x, *args, **kwargs)


def _both(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return _pair_on_cuda(q, *args, **kwargs)
    counts.called("qk_rmsnorm_split_rope", "reference")
    return reference_pair(q, *args, **kwargs)


def _slow(op: Callable[..., tuple[Tensor, ...]], results: int) -> Callable[..., tuple[Tensor, ...]]:
    """`op` for the C kernel, which calls it for what it does not serve itself (see csrc/torch_dispatch.h).

    The dispatcher's C entry swallows exceptions, so one comes back as data: the last result holds its address, with a
    reference that the caller owns, or 0. Strings arrive as addresses too, since torch 2.11 leaks each one it is handed.
    """

    def run(*args: Any) -> tuple[Tensor, ...]:
        address = 0
        try:
            out = op(*args[:-2], *(ctypes.string_at(a).decode() for a in args[-2:]))
        except BaseException as error:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
            address = id(error)
            out = (torch.empty(0, device="cpu"),) * results
        return (*out, torch.tensor([address], dtype=torch.int64, device="cpu"))

    return run


_LIBRARY.impl("rmsnorm_split_rope", _single, "CompositeExplicitAutograd")
_LIBRARY.impl("qk_rmsnorm_split_rope", _both, "CompositeExplicitAutograd")
_LIBRARY.impl("_rmsnorm_split_rope_slow", _slow(lambda *args: (_on_cuda(*args),), 1), "CompositeExplicitAutograd")
_LIBRARY.impl("_qk_rmsnorm_split_rope_slow", _slow(_pair_on_cuda, 2), "CompositeExplicitAutograd")
# What the ops make of fake tensors, by overload; the rewrite calls these directly.
FAKES: dict[Any, Callable[..., Any]] = {
    torch.ops.ltx_inductor.rmsnorm_split_rope.default: _fake,
    torch.ops.ltx_inductor.qk_rmsnorm_split_rope.default: _pair(_fake),
}
for _op, _function in FAKES.items():
    torch.library.register_fake(_op.name(), _function, lib=_LIBRARY)
