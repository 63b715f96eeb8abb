"""The ops on tensors as they come, in fifty memory layouts each: the kernels' bits do not depend on strides.

The gaps of every tensor hold NaN, and so does the memory that results get: what is read or left by mistake shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx_inductor
from ltx_inductor.kernels import rope
from ltx_inductor.ops.rope import reference, reference_pair
from tests.gpu.fna_cases import prepare
from tests.gpu.rope_cases import differing, prepare_specs
from tests.test_random_strides import (
    BF16,
    LAYOUTS,
    OPS,
    as_tuple,
    check_fakes,
    draws,
    pair_arguments,
    rope_arguments,
)

DIMS = (32, 64, 128)
WINDOWS = ((2, 2, 2), (3, 5, 5), (5, 4, 9))


def poisoned(op: Any, args: tuple[Any, ...], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The op's results, which have the shapes of `like`, into memory that held NaN before."""
    poison = [torch.full_like(t, torch.nan) for t in like for _ in range(8)]
    del poison
    return as_tuple(op(*args))


def counted(name: str) -> int:
    """Calls that a kernel ran since the last time; there were LAYOUTS."""
    calls = ltx_inductor.stats(reset=True)[name]
    assert calls["kernel"] + calls["refused"] == LAYOUTS
    return calls["kernel"]


def check_layouts(all_args: list[tuple[Any, ...]]) -> None:
    found = {tuple(a.stride() for a in args if isinstance(a, Tensor)) for args in all_args}
    assert len(found) > LAYOUTS * 0.8


def spec(args: tuple[Any, ...]) -> rope.Spec:
    pair = len(args) > 8
    x, cos, contract, layout = args[0], args[4 if pair else 2], *args[-2:]
    shared = pair and args[6] is None
    return rope.Spec(contract, x.dtype, cos.dtype, 2 * cos.size(-1), x.size(-1), x.dim() == 4, layout, shared)


@pytest.mark.parametrize(
    ("name", "arguments", "eager"),
    [
        ("rmsnorm_split_rope", rope_arguments, reference),
        ("qk_rmsnorm_split_rope", pair_arguments, reference_pair),
    ],
)
def test_rope_has_the_bits_of_eager(
    name: str, arguments: Callable[..., tuple[Any, ...]], eager: Callable[..., Any]
) -> None:
    op = getattr(OPS, name).default
    drawn = [args for _, args in draws(name, LAYOUTS, partial(arguments, dims=DIMS), "cuda")]
    check_layouts(drawn)
    prepare_specs(map(spec, drawn))
    ltx_inductor.stats(reset=True)
    for args in drawn:
        want = as_tuple(eager(*args))
        found = poisoned(op, args, want)
        for f, w in zip(found, want, strict=True):
            assert f.stride() == w.stride()
            assert differing(f, w) == 0, [a.stride() if isinstance(a, Tensor) else a for a in args]
        check_fakes(op, args, found)
    assert counted(name) > LAYOUTS // 2  # the rest: contiguous off a vector, where eager itself takes another path


def na3d_arguments(rng: random.Random) -> tuple[Any, ...]:
    window = rng.choice(WINDOWS)
    grid = [w + rng.choice([0, 1, 3, 8]) for w in window]
    shape = (rng.choice([1, 2]), *grid, rng.choice([1, 2]), 64)
    q, k, v = (torch.randn(shape).to(BF16) for _ in "qkv")
    return q, k, v, list(window), 0.125


def test_na3d_has_the_bits_of_contiguous_tensors() -> None:
    op, drawn = OPS.na3d.default, draws("na3d", LAYOUTS, na3d_arguments, "cuda")
    check_layouts([args for _, args in drawn])
    for window in WINDOWS:
        prepare(window)
    wants = [op(*dense) for dense, _ in drawn]
    ltx_inductor.stats(reset=True)
    for (_, args), want in zip(drawn, wants, strict=True):
        (found,) = poisoned(op, args, (want,))
        assert not found.isnan().any()
        assert found.is_contiguous()
        assert differing(found, want) == 0, [a.stride() if isinstance(a, Tensor) else a for a in args]
        check_fakes(op, args, (found,))
    assert counted("na3d") == LAYOUTS
