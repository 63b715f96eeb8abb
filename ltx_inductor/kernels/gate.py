"""The exactness gate: a kernel is used only where it has been seen to give eager's bits.

The first time a configuration is wanted on a (compute capability, torch version, CUDA version), it runs against the
eager chain on at least a million elements with outliers, zeros of both signs, denormals, infinities and a NaN, and with
tables that make the two products cancel. The verdict is kept beside the artefacts; a failure keeps its inputs too, and
the graph stays unfused with a sentence that says where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import counts, proofs, repro, rope
from ltx_inductor.kernels.repro import differing

ELEMENTS = 1 << 20  # at least this many per tensor
_OPS = ("rmsnorm_split_rope", "qk_rmsnorm_split_rope")
log = logging.getLogger("ltx_inductor")


def refusal(need: Any, device: int, reference: Callable[..., Tensor]) -> str | None:
    """None if the kernel of `need` has eager's bits on that device; else a sentence. Proves it if nobody has yet."""
    found: str | None = proofs.verdict(device, _facts(need), lambda: _compare(need, device, reference))["refusal"]
    return found


def proof(need: Any, device: int) -> str:
    """What `refusal` found when it gave None, as a sentence."""
    record = proofs.kept(device, _facts(need)) or {}
    where = f" on {record['device']} with torch {record['torch']}" if record else " on this device"
    count = f"{record['elements']:,}" if record else f"at least {ELEMENTS:,}"
    return f"the kernel was compared with eager{where}: {count} elements, no bit differs"


def _facts(need: Any) -> tuple[str, str]:
    return (
        str((need.dtype, need.table_dtype, need.head_dim, need.hidden, need.per_head)),
        str((need.contract, need.layout, need.shared)),
    )


def _compare(need: Any, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    heads = need.hidden // need.head_dim
    tokens = max(16, -(-ELEMENTS // need.hidden))
    x, weight, cos, sin = draw(need, heads, tokens, device)
    args = (weight, cos, sin, 1e-6, heads, need.contract, need.layout)
    sides = [x]
    got: tuple[Tensor, ...] | None
    if need.shared:
        sides.append(x.flip(1).contiguous())
        got = rope.launch_pair(
            sides[0], sides[1], weight, weight, cos, sin, None, None, 1e-6, 1e-6, heads, heads, *args[5:]
        )
    else:
        single = rope.launch_single(x, *args)
        got = None if single is None else (single,)
    record: dict[str, Any] = {
        "elements": x.numel() * len(sides),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
        "contract": need.contract,
        "refusal": None,
    }
    if got is None:
        record["refusal"] = f"the kernel for contract {need.contract} declined aligned, contiguous inputs"
        return record
    wrong = sum(differing(g, reference(s, *args)) for g, s in zip(got, sides, strict=True))
    counts.checked(_OPS[need.shared], record["elements"], wrong)
    if wrong:
        two = (*sides, weight, weight, cos, sin, None, None, 1e-6, 1e-6, heads, heads, *args[5:])
        record["refusal"] = (
            f"the kernel for contract {need.contract} differs from eager in {wrong} of {record['elements']} elements "
            f"on {record['device']} with torch {torch.__version__}, so it is not used; "
            + repro.save(_OPS[need.shared], two if need.shared else (x, *args))
        )
        log.error(record["refusal"])
    return record


def awkward(x: Tensor) -> Tensor:
    """x [1, S, H, D], drawn from a normal distribution; with the values described above, in place."""
    tokens = x.shape[1]
    x *= torch.tensor([1.0, 1e-3, 1e-6, 300.0]).repeat(-(-tokens // 4))[:tokens].view(1, -1, 1, 1)
    x.view(-1)[:: max(1, x.numel() // 4096)] *= 1e4
    x[:, 1::5, :, ::7] = 0.0
    x[:, 2::5, :, ::9] = -0.0
    x[:, 3::5, :, ::11] = 1e-40
    if tokens > 8:
        x[0, 7, 0, 0], x[0, 8, 0, 1] = float("inf"), float("nan")
    return x


def draw(need: Any, heads: int, tokens: int, device: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [1, S, H*D] or [1, S, H, D], weight, cos and sin [1, H, S, D/2], on the device; the values described above."""
    gen = torch.Generator().manual_seed(0)
    half = need.head_dim // 2
    shape = (1, tokens, heads, need.head_dim)
    x = awkward(torch.randn(shape, generator=gen))
    angle = torch.rand((1, tokens, heads, half), generator=gen) * 6.2831853
    cos, sin = angle.cos(), angle.sin()
    cancel = slice(0, None, 3)  # n0*cos - n1*sin: nothing but the rounding of the two products is left
    ratio = x[..., :half] / x[..., half:]
    sin[:, cancel] = (cos * ratio)[:, cancel].nan_to_num(0.5, 2.0, -2.0).clamp(-1e3, 1e3)
    weight = torch.randn(need.head_dim if need.per_head else need.hidden, generator=gen)
    where = torch.device("cuda", device)
    x = x if need.per_head else x.flatten(2)
    tables = [t.to(need.table_dtype).transpose(1, 2).to(where) for t in (cos, sin)]
    return x.to(need.dtype).to(where), weight.to(need.dtype).to(where), tables[0], tables[1]
