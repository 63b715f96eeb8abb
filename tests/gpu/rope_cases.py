"""Inputs for the RoPE kernels: shapes, strides and values that have to be survived bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ltx_inductor.kernels import rope, rope_specs
from ltx_inductor.ops.rope import reference

CONTRACTS = tuple(rope_specs.CONTRACTS)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Side:
    """A tensor of a call: [batch, seq, heads * head_dim], or [batch, seq, heads, head_dim] for a norm per head."""

    seq: int
    heads: int = 32
    batch: int = 1
    eps: float = 1e-6
    weight: bool = True


@dataclass(frozen=True)
class Case:
    """A call. `x` and `tables` name memory layouts (see `_x` and `_table`); k None: a single tensor."""

    q: Side
    k: Side | None
    head_dim: int
    shared: bool = True
    per_head: bool = False
    dtype: torch.dtype = BF16
    table_dtype: torch.dtype = BF16
    contract: str = "bf16-chain"
    layout: str = "bshd"
    x: str = "plain"
    tables: str = "view"

    def spec(self, side: Side) -> rope_specs.Spec:
        norm = self.head_dim if self.per_head else side.heads * self.head_dim
        k = self.k
        one = k is not None and (self.per_head or k.heads == self.q.heads)
        shared = bool(one and k and self.shared and k.heads == self.q.heads)
        return rope_specs.Spec(
            self.contract, self.dtype, self.table_dtype, self.head_dim, norm, self.per_head, self.layout, shared
        )

    def specs(self) -> set[rope_specs.Spec]:
        return {self.spec(s) for s in (self.q, self.k) if s is not None}

    def __str__(self) -> str:
        sides = "x".join(f"{s.batch}.{s.seq}.{s.heads}" for s in (self.q, self.k) if s)
        flags = (
            "shared" if self.shared else "own",
            "head" if self.per_head else "row",
            self.x,
            self.tables,
            self.layout,
        )
        dtypes = "-".join(rope_specs.DTYPES[t] for t in (self.dtype, self.table_dtype))
        return f"{sides}.d{self.head_dim}-{'-'.join(flags)}-{dtypes}-{self.contract}"


def _pair(seq: int, head_dim: int, batch: int = 1) -> Case:
    return Case(Side(seq, batch=batch), Side(seq, batch=batch), head_dim)


PRODUCTION = {
    "v1536": _pair(1536, 128),
    "v6144": _pair(6144, 128),
    "v8160": _pair(8160, 128),
    "v32640": _pair(32640, 128),
    "v6144b2": _pair(6144, 128, batch=2),
    "a126": _pair(126, 64),
    "a2v": Case(Side(32640), Side(126), 64, shared=False),
    "v2a": Case(Side(126), Side(32640), 64, shared=False),
}


def contracts() -> list[tuple[str, torch.dtype]]:
    """Every contract with every dtype of cos and sin that it takes."""
    return [(c, t) for c in CONTRACTS for t in (BF16, FP32) if not (c == "bf16-chain" and t == FP32)]


def prepare(cases: list[Case], threads: int = 16) -> None:
    """Builds what the cases need, in parallel."""
    prepare_specs({s for c in cases for s in c.specs()}, threads)


def prepare_specs(wanted: Iterable[rope.Spec], threads: int = 16) -> None:
    """Builds configurations, in parallel."""
    arch = torch.cuda.get_device_capability()
    specs = sorted(set(wanted), key=lambda s: s.name)

    def one(s: rope_specs.Spec) -> str | None:
        return rope.prepare(
            arch,
            dtype=s.dtype,
            table_dtype=s.table_dtype,
            head_dim=s.head_dim,
            hidden=s.norm,
            contract=s.contract,
            per_head=s.per_head,
            layout=s.layout,
            shared=s.shared,
        )

    if specs:
        one(specs[0])  # the launcher, once
    with ThreadPoolExecutor(threads) as pool:
        reasons = [r for r in pool.map(one, specs) if r is not None]
    assert not reasons, reasons[0]


def _values(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator, device: str) -> Tensor:
    """Normal values; then rows of outliers, zeros, -0, denormals, near-overflow, and one inf and one NaN."""
    x = torch.randn(shape, generator=gen, device=device, dtype=FP32)
    rows = x.view(-1, shape[-1])
    tiny, huge = (1e-39, 3e38) if dtype == BF16 else (3e-7, 6e4)
    n = rows.shape[0]
    if n >= 16:
        rows[1, ::7] *= 1e4 if dtype == BF16 else 1e2
        rows[2] = 0
        rows[3] = -0.0
        rows[4] *= tiny
        rows[5, ::3] = huge
        rows[6, 5] = torch.inf
        rows[7, 3] = torch.nan
        rows[8, ::2] = -0.0
        rows[n - 1] *= 1e-3
        rows[n // 2, 1::5] *= -300
    return x.to(dtype)


def _layout(values: Tensor, kind: str) -> Tensor:
    """The same values as a view of another memory layout."""
    shape, last = values.shape, values.shape[-1]
    if kind == "plain":
        return values
    if kind == "slice":  # a slice of a fused q, k, v projection
        base = values.new_full((*shape[:-1], 3 * last), torch.nan)
        view = base[..., last : 2 * last]
    elif kind == "odd":  # not contiguous, and off every alignment
        base = values.new_full((*shape[:-1], last + 5), torch.nan)
        view = base[..., 3 : 3 + last]
    elif kind == "misaligned":  # contiguous, but off a vector: eager itself takes another path
        base = values.new_full((values.numel() + 1,), torch.nan)
        view = base[1:].view(shape)
    elif kind == "strided":  # every second element
        base = values.new_full((*shape[:-1], 2 * last), torch.nan)
        view = base[..., ::2]
    elif kind == "seqfirst":  # [S, B, ...] in memory
        base = values.new_full((shape[1], shape[0], *shape[2:]), torch.nan)
        view = base.transpose(0, 1)
    else:
        raise ValueError(kind)
    view.copy_(values)
    return view


def _x(case: Case, side: Side, gen: torch.Generator, device: str) -> Tensor:
    d = case.head_dim
    shape = (side.batch, side.seq, side.heads, d) if case.per_head else (side.batch, side.seq, side.heads * d)
    return _layout(_values(shape, case.dtype, gen, device), case.x)


def _table(case: Case, side: Side, gen: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin as [B or 1, H or 1, S, D/2]."""
    kind, half = case.tables, case.head_dim // 2
    batch = 1 if kind in ("batch1", "head1") else side.batch
    heads = 1 if kind == "head1" else side.heads
    both = []
    for fn in (torch.cos, torch.sin):
        angle = torch.rand((batch, side.seq, heads, half), generator=gen, device=device) * 20 - 10
        t = fn(angle)
        flat = t.view(-1)
        flat[:: max(1, flat.numel() // 50)] = 0.0
        flat[1 :: max(1, flat.numel() // 50)] = -0.0
        flat[2 :: max(1, flat.numel() // 50)] = 1.0
        flat[3 :: max(1, flat.numel() // 50)] = 1e-40
        t = t.to(case.table_dtype)
        if kind in ("view", "batch1", "head1"):
            t = t.transpose(1, 2)  # [B, H, S, D/2], heads side by side in memory: what LTX models pass
        elif kind == "contiguous":
            t = t.transpose(1, 2).contiguous()
        elif kind == "expanded":  # stride 0 along heads and batch
            t = t[:1, :, :1].transpose(1, 2).expand(side.batch, side.heads, -1, -1)
        elif kind in ("odd", "strided"):
            t = _layout(t.transpose(1, 2).contiguous(), kind)
        else:
            raise ValueError(kind)
        both.append(t)
    if kind == "odd":
        both[1] = both[1].transpose(1, 2).contiguous().transpose(1, 2)  # sin with other strides than cos
    return both[0], both[1]


def make(case: Case, seed: int, device: str = "cuda") -> tuple[object, ...]:
    """The arguments of `launch_pair` (or `launch_single`), up to the layout."""
    gen = torch.Generator(device).manual_seed(seed)

    def weight(side: Side) -> Tensor | None:
        n = case.head_dim if case.per_head else side.heads * case.head_dim
        w = torch.randn(n, generator=gen, device=device).to(case.dtype)
        return torch.nn.Parameter(w) if side.weight else None

    q = case.q
    if case.k is None:
        return (
            _x(case, q, gen, device),
            weight(q),
            *_table(case, q, gen, device),
            q.eps,
            q.heads,
            case.contract,
            case.layout,
        )
    k = case.k
    own = (None, None) if case.shared else _table(case, k, gen, device)
    return (
        _x(case, q, gen, device),
        _x(case, k, gen, device),
        weight(q),
        weight(k),
        *_table(case, q, gen, device),
        *own,
        q.eps,
        k.eps,
        q.heads,
        k.heads,
        case.contract,
        case.layout,
    )


def _poison(case: Case, args: tuple[object, ...]) -> None:
    """Leaves NaN in the memory that the outputs will get."""
    for t in args[: 1 if case.k is None else 2]:
        assert isinstance(t, Tensor)
        dtype = FP32 if rope_specs.CONTRACTS[case.contract][2] else case.dtype
        torch.empty(t.shape, dtype=dtype, device=t.device).fill_(torch.nan)


def run(case: Case, args: tuple[object, ...], path: int = rope.AUTO) -> list[Tensor] | None:
    """The kernel's results."""
    _poison(case, args)
    if case.k is None:
        single = rope.launch_single(*args, path=path)  # type: ignore[arg-type]
        return None if single is None else [single]
    both = rope.launch_pair(*args, path=path)  # type: ignore[arg-type]
    return None if both is None else list(both)


def eager(case: Case, args: tuple[object, ...]) -> list[Tensor]:
    """The eager chain's results."""
    if case.k is None:
        return [reference(*args)]  # type: ignore[arg-type]
    q, k, qw, kw, qc, qs, kc, ks, q_eps, k_eps, q_heads, k_heads, contract, layout = args
    kc, ks = (qc, qs) if kc is None else (kc, ks)
    return [
        reference(q, qw, qc, qs, q_eps, q_heads, contract, layout),  # type: ignore[arg-type]
        reference(k, kw, kc, ks, k_eps, k_heads, contract, layout),  # type: ignore[arg-type]
    ]


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ, compared as integers: -0 is not +0, and a NaN equals itself."""
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    kind = torch.int32 if a.dtype == FP32 else torch.int16
    return int((a.view(kind) != b.view(kind)).sum())


def with_contract(case: Case, contract: str, table_dtype: torch.dtype) -> Case:
    return replace(case, contract=contract, table_dtype=table_dtype)
