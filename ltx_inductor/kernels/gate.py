"""The exactness gate: a kernel is used only where it has been seen to give eager's bits.

The first time a configuration is wanted on a (compute capability, torch version, CUDA version), every entry point of
its cubin runs against the eager chain, each on at least a million elements: with and without weights, on two batch
entries, and where both sides have tables of their own, on one side and on two. The inputs are made, and harder than
real ones: outliers, zeros of both signs, denormals, an inf, a NaN, tables that make the two products cancel, odd
strides for the entry point that takes any. Only then is it served. A failure keeps its inputs, and the graph stays
unfused with a sentence that says where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import counts, proofs, repro, rope
from ltx_inductor.kernels.repro import differing
from ltx_inductor.kernels.rope_specs import Spec

ELEMENTS = 1 << 20  # at least this many per entry point
_BATCH = 2
_HEADS, _RAGGED_HEADS = 32, 5  # of a norm per head, whose kernels take any number: whole warps of heads, and not
_EPS = (1e-6, 1e-5)
_OPS = ("rmsnorm_split_rope", "qk_rmsnorm_split_rope")
log = logging.getLogger("ltx_inductor")


def refusal(need: Any, device: int, reference: Callable[..., Tensor]) -> str | None:
    """None if the kernel of `need`, which is loaded, has eager's bits on that device; else a sentence.

    Proves it if nobody has yet; what follows for the kernel: see `proofs.settle`.
    """
    spec = _spec(need)
    return proofs.settle(
        _OPS[spec.shared],
        f"the kernel for contract {spec.contract}",
        lambda: proofs.verdict(device, rope.facts(device, spec), lambda: _compare(spec, device, reference)),
        lambda: rope.accept(device, spec),
        lambda sentence: rope.turn_off(device, spec, sentence),
    )


def proof(need: Any, device: int) -> str:
    """What `refusal` found when it gave None, as a sentence."""
    return no_bit_differs(device, rope.facts(device, _spec(need)))


def no_bit_differs(device: int, facts: Sequence[str]) -> str:
    """The kept record of a kernel that has passed, as a sentence."""
    record = proofs.kept(device, facts)
    assert record is not None
    return (
        f"the kernel was compared with eager on {record['device']} with torch {record['torch']}: "
        f"{record['elements']:,} elements, no bit differs"
    )


def _spec(need: Any) -> Spec:
    norm = need.head_dim if need.per_head else need.hidden
    rest = (need.per_head, need.layout, need.shared)
    return Spec(need.contract, need.dtype, need.table_dtype, need.head_dim, norm, *rest)


def _compare(spec: Spec, device: int, reference: Callable[..., Tensor]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "elements": 0,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
        "contract": spec.contract,
        "refusal": None,
    }
    wrong, kept = 0, ""
    for path, args in calls(spec, torch.device("cuda", device)):
        op = _OPS[len(args) > 8]
        want = [reference(*side) for side in _sides(args)]
        poison = [torch.full_like(w, torch.nan) for w in want]  # in the memory that the results will get
        del poison
        launch: Callable[..., Any] = rope.launch_pair if len(args) > 8 else rope.launch_single
        launched = launch(*args, path=path)
        if launched is None:
            record["refusal"] = f"the kernel for contract {spec.contract} declined inputs that it has to take"
            return record
        got = launched if isinstance(launched, tuple) else (launched,)
        elements = sum(g.numel() for g in got)
        here = sum(differing(g, w) for g, w in zip(got, want, strict=True))
        counts.checked(op, elements, here)
        record["elements"] += elements
        wrong += here
        if here and not kept:
            kept = repro.save(op, args, path)
    if wrong:
        record["refusal"] = (
            f"the kernel for contract {spec.contract} differs from eager in {wrong} of {record['elements']} elements "
            f"on {record['device']} with torch {torch.__version__}, so it is not used; {kept}"
        )
        log.error(record["refusal"])
    return record


def _sides(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments of the eager chain, for each side of a call."""
    if len(args) <= 8:
        return [args]
    q, k, q_weight, k_weight, cos, sin, k_cos, k_sin, q_eps, k_eps, q_heads, k_heads, *rest = args
    k_tables = (cos, sin) if k_cos is None else (k_cos, k_sin)
    return [(q, q_weight, cos, sin, q_eps, q_heads, *rest), (k, k_weight, *k_tables, k_eps, k_heads, *rest)]


def calls(spec: Spec, device: torch.device) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Calls of the ops that go through every entry point of a configuration: what to force, and the op's arguments."""
    heads = _HEADS if spec.per_head else spec.norm // spec.head_dim
    q, k, q_weight, k_weight, cos, sin = (t.to(device) for t in draw(spec, heads))
    rest = (spec.contract, spec.layout)
    made: list[tuple[Any, ...]]
    if spec.shared:
        made = [
            (q, k, q_weight, k_weight, cos, sin, None, None, *_EPS, heads, heads, *rest),
            (q, k, None, None, cos[:1], sin[:1], None, None, *_EPS, heads, heads, *rest),
        ]
        if spec.per_head:
            few = _RAGGED_HEADS
            some = (q[:, :, :few], k[:, :, :few], q_weight, k_weight, cos[:, :few], sin[:, :few])
            made.append((*some, None, None, *_EPS, few, few, *rest))
        paths: tuple[int, ...] = (rope.PAIR, rope.ROW)  # where there is no rope_pair, the launcher takes rope_row
    else:
        k_heads = _RAGGED_HEADS if spec.per_head else heads
        k, k_cos, k_sin = k[:, 3:].contiguous(), cos[:, :k_heads, 3:], sin[:, :k_heads, 3:]
        k = k[:, :, :k_heads] if spec.per_head else k
        made = [
            (q, q_weight, cos, sin, _EPS[0], heads, *rest),
            (q, None, cos[:1], sin[:1], _EPS[0], heads, *rest),
            (q, k, q_weight, k_weight, cos, sin, k_cos, k_sin, *_EPS, heads, k_heads, *rest),
            (q, k[:1], None, None, cos, sin, k_cos[:1], k_sin[:1], *_EPS, heads, k_heads, *rest),
        ]
        paths = (rope.ROW,)
    for args in made:
        for path in paths:
            yield path, args
        yield rope.ANY, tuple(_odd(a) if isinstance(a, Tensor) and a.dim() > 1 else a for a in args)


def _odd(t: Tensor) -> Tensor:
    """The same values, not contiguous and off every alignment, with NaN in between."""
    base = t.new_full((*t.shape[:-1], t.shape[-1] + 5), torch.nan)
    return base[..., 3:-2].copy_(t)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """A denormal and a large number of a 16-bit dtype."""
    return (1e-7, 6e4) if dtype == torch.float16 else (1e-40, 3e38)


def awkward(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Normal numbers [B, S, H, D], S at least 9, made into the values described above: fp32, as `dtype` has them."""
    least, most = _range(dtype)
    tokens = x.shape[1]
    x = x * torch.tensor([1.0, 1e-3, 1e-6, 300.0]).repeat(-(-tokens // 4))[:tokens].view(1, -1, 1, 1)
    x.view(-1)[:: max(1, x.numel() // 4096)] *= 1e4
    x[:, 1::5, :, ::7] = 0.0
    x[:, 2::5, :, ::9] = -0.0
    x[:, 3::5, :, ::11] = least
    x = x.clamp(-most, most).to(dtype).float()
    x[0, 7, 0, 0], x[-1, 8, -1, 1] = float("inf"), float("nan")
    return x


def draw(spec: Spec, heads: int) -> list[Tensor]:
    """q, k [2, S, H*D] or [2, S, H, D], their weights, cos and sin [2, H, S, D/2], on the CPU; S so that q and k have
    ELEMENTS together. The values are those described above."""
    gen = torch.Generator().manual_seed(0)
    half = spec.head_dim // 2
    tokens = max(16, -(-ELEMENTS // (2 * _BATCH * heads * spec.head_dim)))
    sides = []
    for _ in "qk":
        sides.append(awkward(torch.randn((_BATCH, tokens, heads, spec.head_dim), generator=gen), spec.dtype))
    angle = torch.rand((_BATCH, tokens, heads, half), generator=gen) * 6.2831853
    cos, sin = angle.cos(), angle.sin()
    for x, first in zip(sides, (0, 3), strict=True):
        # n0*cos - n1*sin: nothing but the rounding of the two products is left, with equal weights in both halves
        ratio = x[:, first::6, :, :half] / x[:, first::6, :, half:]
        sin[:, first::6] = (cos[:, first::6] * ratio).nan_to_num(0.5, 2.0, -2.0).clamp(-1e3, 1e3)
    for t in (cos, sin):
        for i, value in enumerate((0.0, -0.0, 1.0, _range(spec.dtype)[0])):
            t.view(-1)[1000 + i :: 4099] = value
    weights = []
    for _ in "qk":
        w = torch.randn((1 if spec.per_head else heads, spec.head_dim), generator=gen)
        w[1::2, half:] = w[1::2, :half]
        weights.append(w.flatten().to(spec.dtype))
    q, k = (x.to(spec.dtype) if spec.per_head else x.to(spec.dtype).flatten(2) for x in sides)
    return [q, k, *weights, *(t.to(spec.table_dtype).transpose(1, 2) for t in (cos, sin))]
