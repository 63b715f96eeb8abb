"""`rmsnorm_axial_rope`: RMSNorm per head, a scale, and RoPE over several token axes, as an opaque op.

    n = RMSNorm(x) * scale          (a, b) = (n[..., 2j], n[..., 2j+1])
    out[..., 2j] = a*cos - b*sin    out[..., 2j+1] = b*cos + a*sin

Neighbours are rotated together. The axes of the rotation share the head: its first cos[0].shape[-1] pairs turn by
cos[0] and sin[0], the next by cos[1] and sin[1], and so on. Usually table i varies along token axis i only.

x       [*tokens, heads, head_dim] with 1 to 4 token axes, bf16 or fp16; any strides
weight  [head_dim], the dtype of x, or None
cos,sin 1 to 3 each, [*tokens, 1, pairs] with 1 for every token axis that a table does not vary along; all fp32 or
        all the dtype of x, any strides; the pairs of all axes are half of head_dim
scale   the norm, rounded, is multiplied by it and rounded again; 1 is nothing
out     shape and dtype of x, contiguous

The reference is the eager chain of the contract (see `ltx_inductor.contract`), op by op, and so has its bits on every
device. On CUDA the kernel runs; the reference only where the kernel says that eager itself takes another path.
A contract may end in "+verify": the kernel's result is then compared with the reference's (see verified.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.contract import Contract, lookup
from ltx_inductor.kernels import counts
from ltx_inductor.kernels.rope import KernelNotReadyError
from ltx_inductor.ops import verified
from ltx_inductor.ops.rope import without_kernel
from ltx_inductor.ops.sizes import certainly

NAME = "rmsnorm_axial_rope"
_LIBRARY = torch.library.Library("ltx_inductor", "FRAGMENT")
_LIBRARY.define(
    f"{NAME}(Tensor x, Tensor? weight, Tensor[] cos, Tensor[] sin, float eps, float scale, str contract) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def reference(
    x: Tensor,
    weight: Tensor | None,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    eps: float,
    scale: float,
    contract: str,
) -> Tensor:
    """The eager chain of `contract`; shapes as in the module's docstring."""
    c = _checked(x, weight, cos, sin, contract)
    n = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    if scale != 1:
        n = n * scale
    even, odd = n.unflatten(-1, (-1, 2)).unbind(-1)
    sizes = [t.shape[-1] for t in cos]
    pieces = [
        _rotate(a.float(), b.float(), of_cos.float(), of_sin.float(), c).to(x.dtype)
        for a, b, of_cos, of_sin in zip(even.split(sizes, -1), odd.split(sizes, -1), cos, sin, strict=True)
    ]
    return torch.cat(pieces, dim=-1)


def _rotate(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor, c: Contract) -> Tensor:
    """a, b [*tokens, heads, pairs] in fp32 -> [*tokens, heads, 2 * pairs]."""
    if c.fused_sum:
        parts = torch.addcmul(a * cos, -sin, b), torch.addcmul(b * cos, sin, a)
    else:
        parts = a * cos + -sin * b, b * cos + sin * a
    return torch.stack(parts, dim=-1).flatten(-2)


def _checked(x: Tensor, weight: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor], contract: str) -> Contract:
    """The contract. Raises ValueError, naming the argument, its value and what is accepted. Adds no guard on a size."""
    c = lookup(verified.split(contract)[0])
    if not (c.narrow_norm and c.narrow_result) or c.narrow_product:
        raise ValueError(f"contract={contract!r}: expected fp32-rope or fp32-rope-muladd")
    if not 3 <= x.dim() <= 6:
        raise ValueError(f"x has {x.dim()} axes; expected [*tokens, heads, head_dim] with 1 to 4 token axes")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}; expected torch.bfloat16 or torch.float16")
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != x.shape[-1] or weight.dtype != x.dtype):
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)}; expected {x.dtype} [{x.shape[-1]}], the last axis of x"
        )
    if not 1 <= len(cos) <= 3 or len(sin) != len(cos):
        raise ValueError(f"cos has {len(cos)} tables, sin {len(sin)}; expected 1 to 3, and as many of each")
    if 2 * sum(t.shape[-1] for t in cos) != x.shape[-1]:
        raise ValueError(
            f"cos has {[t.shape[-1] for t in cos]} pairs; expected {x.shape[-1] // 2} together, half of head_dim"
        )
    for name, tables in (("cos", cos), ("sin", sin)):
        for i, (t, of_cos) in enumerate(zip(tables, cos, strict=True)):
            _check_table(f"{name}[{i}]", t, of_cos, x, cos[0].dtype)
    for name, tensors in (("weight", [weight]), ("cos", cos), ("sin", sin)):
        for t in tensors:
            if t is not None and t.device != x.device:
                raise ValueError(f"{name} is on {t.device}; expected the device of x, {x.device}")
    return c


def _check_table(name: str, t: Tensor, of_cos: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    wanted = [*(f"{n} or 1" for n in x.shape[:-2]), 1, of_cos.shape[-1]]
    if t.dim() != x.dim() or t.shape[-2] != 1 or t.shape[-1] != of_cos.shape[-1]:
        raise ValueError(f"{name} has shape {list(t.shape)}; expected {wanted} for x of shape {list(x.shape)}")
    if any(certainly(n != 1) and certainly(n != m) for n, m in zip(t.shape[:-2], x.shape[:-2], strict=True)):
        raise ValueError(f"{name} has shape {list(t.shape)}; expected {wanted} for x of shape {list(x.shape)}")
    if t.dtype not in (x.dtype, torch.float32) or t.dtype != dtype:
        raise ValueError(
            f"{name} is {t.dtype}; expected {x.dtype} or torch.float32, the same for cos and sin of all axes"
        )


def _fake(x: Tensor, weight: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor], *rest: Any) -> Tensor:
    _checked(x, weight, cos, sin, rest[-1])
    return x.new_empty(x.shape)


def _run(x: Tensor, weight: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor], *rest: Any) -> Tensor:
    contract, verify = verified.split(rest[-1])
    args = (x, weight, cos, sin, *rest[:-1], contract)
    if not x.is_cuda:
        counts.called(NAME, "reference")
        return reference(*args)
    from ltx_inductor.kernels import rope_axial  # late: `import ltx_inductor` is to be light

    try:
        out = rope_axial.launch(*args, check=lambda: _checked(x, weight, cos, sin, contract))
    except KernelNotReadyError as missing:
        without_kernel(str(missing))
        out = None
    if out is None:
        counts.called(NAME, "refused")
        return reference(*args)
    return verified.compared(NAME, out, reference, args, rope_axial.turn_off_call) if verify else out


_LIBRARY.impl(NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"ltx_inductor::{NAME}", _fake, lib=_LIBRARY)
