"""The op na3d: its reference against dense masked attention in fp64, opcheck, fakes, errors, gradients, memory."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from ltx_inductor.ops import na3d
from ltx_inductor.ops.na3d import reference

NA3D = torch.ops.ltx_inductor.na3d.default
BF16 = torch.bfloat16
ROUNDING = {BF16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def dense(q, k, v, kernel_size, scale):
    """Every query against every key of the grid, masked by NATTEN's window rule, in fp64."""
    grid = q.shape[1:4]
    points = torch.cartesian_prod(*(torch.arange(n) for n in grid)).view(-1, 3)
    inside = torch.ones(len(points), len(points), dtype=torch.bool)
    for axis, (n, w) in enumerate(zip(grid, kernel_size, strict=True)):
        i, j = points[:, None, axis], points[None, :, axis]
        start = (i - w // 2).clamp(0, n - w)
        inside &= (j >= start) & (j < start + w)
    assert (inside.sum(1) == torch.tensor(kernel_size).prod()).all()
    a, b, c = (t.double().flatten(1, 3).transpose(1, 2) for t in (q, k, v))  # [B, heads, points, head_dim]
    scores = (a @ b.transpose(-1, -2) * scale).masked_fill(~inside, float("-inf"))
    return (scores.softmax(-1) @ c).transpose(1, 2).reshape(q.shape)


def tolerance(q, k, v, scale):
    """One rounding of the result, a score's rounding in fp32 (it is exponentiated), and fp32 sums of a few hundred."""
    scores = abs(scale) * float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    return (ROUNDING[q.dtype] + 2**-23 * (scores + 16)) * float(v.double().abs().max())


def operands(shape, dtype=BF16, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=gen).to(dtype) for _ in range(3)]


def draw(seed):
    """(shape, window, dtype, scale): windows up to the grid, grids that no block divides."""
    rng = random.Random(seed)
    grid = [rng.randint(2, 10) for _ in range(3)]
    window = [rng.choice([n, max(1, n - 1), rng.randint(1, n)]) for n in grid]
    shape = (rng.randint(1, 3), *grid, rng.randint(1, 3), rng.choice([1, 8, 12, 64]))
    return shape, window, rng.choice(list(ROUNDING)), rng.choice([1.0, 0.125, -0.3, 0.0, 7.5])


@pytest.mark.parametrize("seed", range(60))
def test_the_reference_is_dense_attention_in_a_window(seed):
    shape, window, dtype, scale = draw(seed)
    q, k, v = operands(shape, dtype, seed)
    got = NA3D(q, k, v, window, scale)
    assert (got.dtype, got.shape) == (dtype, q.shape)
    assert got.is_contiguous()
    error = (got.double() - dense(q, k, v, window, scale)).abs().max()
    assert error <= tolerance(q, k, v, scale), (shape, window, dtype, scale)


def test_draws_cover_what_they_are_for():
    draws = [draw(seed) for seed in range(60)]
    assert any(list(s[1:4]) == w for s, w, _, _ in draws)
    assert any(any(n > b for n, b in zip(s[1:4], na3d._BLOCK, strict=True)) for s, *_ in draws)
    assert {s[0] for s, *_ in draws} == {1, 2, 3}


def test_heads_are_split_where_scores_would_not_fit(monkeypatch):
    q, k, v = operands((2, 5, 6, 9, 5, 8), torch.float32)
    whole = reference(q, k, v, (3, 3, 3), 0.5)
    monkeypatch.setattr(na3d, "_SCORES", 1)
    assert torch.allclose(reference(q, k, v, (3, 3, 3), 0.5), whole, atol=1e-6)


def test_strides_do_not_matter():
    q, k, v = operands((2, 4, 5, 6, 3, 8))
    shuffled = [t.permute(5, 3, 0, 4, 1, 2).contiguous().permute(2, 4, 5, 1, 3, 0) for t in (q, k, v)]
    assert not shuffled[0].is_contiguous()
    got = NA3D(*shuffled, [3, 3, 3], 1.0)
    assert got.is_contiguous()
    assert torch.equal(got, NA3D(q, k, v, [3, 3, 3], 1.0))


def test_a_key_outside_the_window_has_no_say_even_if_it_is_not_finite():
    q, k, v = operands((1, 1, 1, 12, 1, 8))
    want = NA3D(q, k, v, [1, 1, 3], 1.0)
    k[0, 0, 0, 6] = float("inf")
    got = NA3D(q, k, v, [1, 1, 3], 1.0)
    assert torch.equal(got[0, 0, 0, :5], want[0, 0, 0, :5])


def test_exact_on_the_cpu_is_the_reference():
    q, k, v = operands((1, 4, 4, 4, 2, 64))
    assert torch.equal(NA3D(q, k, v, [3, 3, 3], 1.0, True), reference(q, k, v, (3, 3, 3), 1.0))


def test_an_empty_batch():
    q, k, v = operands((0, 4, 4, 4, 2, 8))
    assert NA3D(q, k, v, [3, 3, 3], 1.0).shape == q.shape


def test_opcheck():
    q, k, v = operands((2, 4, 5, 6, 2, 8))
    opcheck(NA3D, (q, k, v, [3, 5, 2], 0.125))
    opcheck(NA3D, (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), [5, 4, 3], 1.0, True))


Q, K, V = operands((1, 4, 4, 4, 2, 8))
WRONG = {
    r"q has 5 axes; expected \[B, T, H, W": (Q[0], K, V, [3, 3, 3]),
    r"q is torch.float64; expected one of torch.bfloat16": (Q.double(), K.double(), V.double(), [3, 3, 3]),
    r"k has shape \[1, 3, 4, 4, 2, 8\]; expected that of q": (Q, K[:, :3], V, [3, 3, 3]),
    r"v has shape \[1, 4, 4, 4, 2, 7\]": (Q, K, V[..., :7], [3, 3, 3]),
    r"v has shape \[4, 4, 4, 2, 8\]": (Q, K, V[0], [3, 3, 3]),
    r"k is torch.float32; expected the dtype of q": (Q, K.float(), V, [3, 3, 3]),
    r"v is on meta; expected the device of q, cpu": (Q, K, V.to("meta"), [3, 3, 3]),
    r"kernel_size=\[3, 5, 3\]: the window has 5 keys along H, the grid only 4": (Q, K, V, [3, 5, 3]),
    r"kernel_size=\[3, 3, 0\]; expected three sizes of at least 1": (Q, K, V, [3, 3, 0]),
    r"kernel_size=\[3, 3\]; expected three sizes": (Q, K, V, [3, 3]),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_argument_value_and_what_is_accepted(message):
    with pytest.raises(ValueError, match=message):
        NA3D(*WRONG[message], 1.0)


@pytest.mark.parametrize("message", WRONG)
def test_the_fake_raises_the_same(message):
    *tensors, window = WRONG[message]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        with pytest.raises(ValueError, match=message):
            NA3D(*fakes, window, 1.0)


def test_gradients_are_refused_and_no_grad_is_not():
    q = Q.clone().requires_grad_()
    for args in ((q, K, V), (Q, q, V), (Q, K, q)):
        with pytest.raises(
            RuntimeError, match="has no backward, and . requires a gradient; call it under torch.no_grad"
        ):
            NA3D(*args, [3, 3, 3], 1.0)
    with torch.no_grad():
        assert not NA3D(q, K, V, [3, 3, 3], 1.0).requires_grad
    with torch.inference_mode():
        NA3D(q, K, V, [3, 3, 3], 1.0)


def test_a_dynamic_grid_adds_no_guard():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        sizes = [DimDynamic.DYNAMIC] * 4 + [DimDynamic.STATIC] * 2
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        q = mode.from_tensor(operands((2, 4, 5, 6, 2, 8))[0], symbolic_context=context)
        before = len(env.guards)
        out = NA3D(q, q + 0, q * 2, [3, 3, 3], 1.0)
        assert out.shape == q.shape
        assert len(env.guards) == before


def test_without_a_kernel_it_says_so_once(monkeypatch):
    """What a CUDA tensor meets where no kernel is there, with the device taken out of the way."""
    na3d._without_kernel.cache_clear()
    with pytest.warns(UserWarning, match="many times slower than a kernel: not built; exact=True: these are not"):
        na3d._without_kernel("not built", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        na3d._without_kernel("not built", True)


CHILD = """
import resource, torch
from ltx_inductor.ops.na3d import reference
q, k, v = (torch.randn(1, 33, 64, 96, 1, 8).bfloat16() for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = reference(q, k, v, (11, 11, 11), 0.125)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, bool(out.isfinite().all()))
"""


@pytest.mark.slow
def test_a_grid_of_the_decoder_fits_in_memory():
    """One head of 33x64x96, window 11^3: dense scores would need 164 GB."""
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    mebibytes, finite = run.stdout.split()
    assert finite == "True"
    assert int(mebibytes) < 512
