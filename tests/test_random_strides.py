"""The ops on tensors as they come, in fifty memory layouts each, seeded: the fake says what the real op gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from ltx_inductor.contract import CONTRACTS, lookup

BF16 = torch.bfloat16
OPS = torch.ops.ltx_inductor
LAYOUTS = 50


def scattered(t: Tensor, rng: random.Random) -> Tensor:
    """The values of `t` in another memory layout: axes in any order, gaps, an offset; sometimes a broadcast axis."""
    order = rng.sample(range(t.dim()), t.dim())
    sizes = [t.size(a) * rng.choice([1, 1, 2]) + rng.choice([0, 0, 3]) for a in order]
    base = torch.full((rng.choice([0, 1, 5]) + _product(sizes),), torch.nan, dtype=t.dtype, device=t.device)
    view = base[len(base) - _product(sizes) :].view(sizes)
    for axis, a in enumerate(order):
        step = view.size(axis) // t.size(a) if t.size(a) else 1
        view = view.narrow(axis, 0, t.size(a)) if rng.random() < 0.5 else _every(view, axis, step, t.size(a))
    view = view.permute([order.index(a) for a in range(t.dim())])
    return view.copy_(t)


def _every(view: Tensor, axis: int, step: int, size: int) -> Tensor:
    index = [slice(None)] * view.dim()
    index[axis] = slice(0, size * max(step, 1), max(step, 1))
    return view[tuple(index)]


def _product(sizes: list[int]) -> int:
    total = 1
    for s in sizes:
        total *= s
    return total


def rope_arguments(rng: random.Random, dims: Sequence[int] = (4, 8)) -> tuple[Any, ...]:
    """Dense ones, of `rmsnorm_split_rope`; dims: of a head."""
    batch, seq, heads, dim = rng.choice([1, 2]), rng.choice([1, 2, 5]), rng.choice([1, 3]), rng.choice(dims)
    contract, layout = rng.choice(list(CONTRACTS)), rng.choice(["bshd", "bhsd"])
    table = BF16 if lookup(contract).narrow_product else rng.choice([BF16, torch.float32])
    shape = (batch, seq, heads, dim) if rng.random() < 0.5 else (batch, seq, heads * dim)
    x, weight = torch.randn(shape).to(BF16), torch.randn(shape[-1]).to(BF16)
    cos, sin = (torch.randn(rng.choice([1, batch]), rng.choice([1, heads]), seq, dim // 2).to(table) for _ in "cs")
    return x, rng.choice([weight, None]), cos, sin, 1e-6, heads, contract, layout


def pair_arguments(rng: random.Random, dims: Sequence[int] = (4, 8)) -> tuple[Any, ...]:
    q, w, cos, sin, eps, heads, contract, layout = rope_arguments(rng, dims)
    k = q.flip(1).clone()
    own = rng.choice([(None, None), (cos.clone(), sin.clone())])
    return q, k, w, None, cos, sin, *own, eps, 1e-5, heads, heads, contract, layout


def na3d_arguments(rng: random.Random) -> tuple[Any, ...]:
    grid = [rng.choice([2, 3, 5]) for _ in range(3)]
    shape = (rng.choice([1, 2]), *grid, rng.choice([1, 2]), 8)
    dtype = rng.choice([BF16, torch.float16, torch.float32])
    q, k, v = (torch.randn(shape).to(dtype) for _ in "qkv")
    return q, k, v, [rng.randrange(2, n + 1) for n in grid], 0.5


ARGUMENTS = {
    "rmsnorm_split_rope": rope_arguments,
    "qk_rmsnorm_split_rope": pair_arguments,
    "na3d": na3d_arguments,
}


def draws(
    name: str, count: int, make: Callable[[random.Random], tuple[Any, ...]] | None = None, device: str = "cpu"
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """(dense arguments, the same values scattered); `make`: other ones than ARGUMENTS has for the op."""
    rng, found = random.Random(name), []
    torch.manual_seed(0)
    for _ in range(count):
        drawn = (make or ARGUMENTS[name])(rng)
        dense = tuple(a.to(device) if isinstance(a, Tensor) else a for a in drawn)
        found.append((dense, tuple(scattered(a, rng) if isinstance(a, Tensor) else a for a in dense)))
    return found


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def check_fakes(op: Any, args: tuple[Any, ...], real: tuple[Tensor, ...]) -> None:
    with FakeTensorMode() as mode:
        fake = as_tuple(op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)))
    for f, r in zip(fake, real, strict=True):
        assert (f.shape, f.stride(), f.dtype, f.device) == (r.shape, r.stride(), r.dtype, r.device)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_fake_has_the_strides_of_the_real_result(name: str) -> None:
    op, layouts = getattr(OPS, name).default, set()
    for dense, args in draws(name, LAYOUTS):
        layouts.add(tuple(a.stride() for a in args if isinstance(a, Tensor)))
        real = as_tuple(op(*args))
        check_fakes(op, args, real)
        # not as integers: fp32 loops of the CPU round differently for different strides, in eager too
        torch.testing.assert_close(real, as_tuple(op(*dense)), rtol=2e-2, atol=1e-2)
    assert len(layouts) > LAYOUTS * 0.8


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck_of_scattered_tensors(name: str) -> None:
    for _, args in draws(name, 2):
        opcheck(getattr(OPS, name).default, args)


def test_sizes_and_strides_beyond_32_bits_have_the_right_fakes() -> None:
    """What no machine holds: a sequence of 2^28 rows, and rows that are 2^31 elements apart."""
    with FakeTensorMode(), torch.device("meta"):
        far = torch.empty_strided((1, 4, 64), (1 << 40, 1 << 31, 1), dtype=BF16)
        long = torch.empty((2, 1 << 28, 4096), dtype=BF16)
        for x, heads, dim in ((far, 2, 32), (long, 32, 128)):
            cos, sin = (torch.empty((1, 1, x.size(1), dim // 2), dtype=BF16) for _ in "cs")
            for layout, contract in itertools.product(("bshd", "bhsd"), ("bf16-chain", "fp32-result")):
                out = OPS.rmsnorm_split_rope(x, None, cos, sin, 1e-6, heads, contract, layout)
                shape = x.shape if layout == "bshd" else (x.size(0), heads, x.size(1), dim)
                assert out.shape == shape
                assert out.is_contiguous()
                assert out.numel() == x.numel()
        q = torch.empty((1, 121, 272, 480, 4, 64), dtype=BF16)  # 2^32 elements: the 1080p grid of the decoder
        assert OPS.na3d(q, q, q, [11, 11, 11], 0.125).stride() == q.stride()
