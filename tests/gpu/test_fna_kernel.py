"""The fast neighborhood-attention kernel against softmax over the window in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from ltx_inductor.kernels import fna
from tests.gpu.fna_cases import draw, error, expected, prepare, run

TOLERANCE = 3e-3  # relative L2; P and the result are rounded to bf16, 2^-9 each
ELEVEN = (11, 11, 11)
GRIDS = [(11, 11, 11), (12, 12, 12), (12, 16, 20), (13, 17, 21), (17, 15, 14), (19, 13, 18), (33, 11, 12), (29, 12, 16)]
WINDOWS = [
    ((2, 2, 2), (5, 6, 7)),
    ((3, 5, 5), (9, 16, 20)),
    ((3, 7, 7), (5, 7, 7)),
    ((4, 2, 6), (9, 9, 9)),
    ((6, 4, 3), (14, 9, 10)),
    ((5, 13, 13), (18, 15, 14)),
    ((7, 8, 9), (20, 11, 12)),
    ((9, 3, 5), (21, 9, 13)),
    ((10, 6, 4), (23, 9, 11)),
    ((12, 13, 13), (22, 14, 15)),
    ((13, 12, 14), (21, 13, 17)),
    ((14, 2, 15), (30, 5, 16)),
    ((15, 15, 15), (17, 18, 19)),
]


def check(window: tuple[int, int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = 1.0) -> None:
    prepare(window)
    got = run(q, k, v, window, scale)
    want = expected(q, k, v, window, scale)
    assert torch.equal(got.isnan(), want.isnan())
    assert error(got.nan_to_num(), want.nan_to_num()) < TOLERANCE
    assert torch.equal(got.view(torch.int16), run(q, k, v, window, scale).view(torch.int16))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ragged_grids(grid: tuple[int, int, int]) -> None:
    check(ELEVEN, *draw(grid, heads=4))


@pytest.mark.parametrize(("window", "grid"), WINDOWS, ids=str)
def test_windows(window: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
    check(window, *draw(grid))
    check(window, *draw(grid, kind="plain", heads=3, seed=1), scale=0.125)


@pytest.mark.parametrize("kind", ["plain", "peaked", "flat", "equal"])
def test_distributions(kind: str) -> None:
    check(ELEVEN, *draw((13, 17, 21), kind=kind))


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.3, 8.0, 64.0])
def test_scales(scale: float) -> None:
    check(ELEVEN, *draw((13, 14, 15), kind="plain"), scale=scale)


def test_one_key_with_a_huge_score_wherever_it_is() -> None:
    """A reference that is far too low (seen late) or far too high (seen by the first chunk, outside of the window)."""
    q, k, v = draw((15, 14, 17), heads=1)
    for t in range(15):
        for h, w in ((0, 0), (13, 16), (7, 8), (3, 12), (12, 2)):
            for factor in (40.0, 4000.0):
                big = k.clone()
                big[:, t, h, w] = q[:, 7, 7, 8].float().mul(factor).bfloat16()
                check(ELEVEN, q, big, v)


@pytest.mark.parametrize("low", [-1e4, -1e20, -1e35])
def test_scores_that_are_all_very_low(low: float) -> None:
    q, k, v = draw((12, 13, 14), heads=1)
    q[..., 1:] = 0
    q[..., 0], k[..., 0] = math.sqrt(-low), -math.sqrt(-low)
    check(ELEVEN, q, k, v)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_stays_in_its_windows(value: float, where: int) -> None:
    tensors = draw((14, 15, 18), heads=2)
    tensors[where][0, 6, 7, 9, 1, 3] = value
    tensors[where][0, 13, 0, 17, 0, 63] = value
    prepare(ELEVEN)
    got, want = run(*tensors, ELEVEN), expected(*tensors, ELEVEN, 1.0)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert error(got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)) < TOLERANCE


def test_values_near_the_end_of_bf16() -> None:
    q, k, v = draw((12, 13, 14))
    check(ELEVEN, q, k, (v.sign() * 3.0e38).bfloat16())
    check(ELEVEN, q, k, (v * 1e-30).bfloat16())


def test_batches() -> None:
    check(ELEVEN, *draw((13, 12, 14), batch=3))
    q, k, v = draw((13, 12, 14), batch=4)
    check(ELEVEN, q[::2], k[::2], v[1::2])  # the batch is not behind T: one launch each


def test_slices_of_a_packed_projection() -> None:
    heads = 4
    packed = torch.randn(2, 12, 13, 16, 3 * heads * 64, device="cuda").bfloat16()
    q, k, v = (x.unflatten(-1, (heads, 64)) for x in packed.chunk(3, dim=-1))
    assert not q.is_contiguous()
    check(ELEVEN, q, k, v, scale=0.125)


def test_tensors_that_the_tma_cannot_address_are_copied() -> None:
    flat = torch.randn(12 * 13 * 16 * 2 * 64 + 1, device="cuda").bfloat16()[1:]  # 2 bytes off a 16-byte boundary
    q = flat.view(1, 12, 13, 16, 2, 64)
    k, v = q.flip(1), q.expand(1, -1, -1, -1, -1, -1)[..., :1, :].expand(-1, -1, -1, -1, 2, -1)
    check(ELEVEN, q, k, v, scale=0.125)


def test_memory_order_of_the_axes_does_not_matter() -> None:
    q, k, v = draw((12, 13, 16), heads=2)
    q = q.permute(0, 4, 1, 2, 3, 5).contiguous().permute(0, 2, 3, 4, 1, 5)  # heads outermost
    k = k.permute(0, 3, 2, 1, 4, 5).contiguous().permute(0, 3, 2, 1, 4, 5)  # W, H, T
    check(ELEVEN, q, k, v)


def test_capture_and_side_streams() -> None:
    prepare(ELEVEN)
    q, k, v = draw((13, 17, 21))
    want = run(q, k, v, ELEVEN)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = fna.launch(q, k, v, ELEVEN, 1.0)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(other, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fna.launch(q, k, v, ELEVEN, 1.0)
    captured.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    tensors = draw((12, 13, 14))
    want = expected(*tensors, ELEVEN, 1.0)
    with torch.cuda.device(1):
        prepare(ELEVEN)
    got = fna.launch(*(t.to("cuda:1") for t in tensors), ELEVEN, 1.0)
    assert got.device.index == 1
    assert error(got.cpu(), want.cpu()) < TOLERANCE


def test_every_split_of_t_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tiles a CTA takes is a matter of speed only."""
    prepare(ELEVEN)
    q, k, v = draw((37, 12, 13))
    want = run(q, k, v, ELEVEN)
    for tiles in range(1, 11):
        monkeypatch.setattr(fna, "tiles_per_item", lambda *_, n=tiles: n)
        assert torch.equal(run(q, k, v, ELEVEN), want), tiles


@pytest.mark.parametrize("exact", [False, True])
def test_more_than_2_31_elements(exact: bool) -> None:
    """The ends of T against grids that are cut off there: on whole tiles, so that all bits have to agree."""
    if exact:
        pytest.importorskip("tilelang")
    length, part = 1372, 40
    torch.cuda.empty_cache()
    prepare(ELEVEN, exact)
    q, k, v = draw((length, 64, 96), heads=4)
    assert q.numel() > 1 << 31
    got = run(q, k, v, ELEVEN, exact=exact)
    for cut, inner in ((slice(0, part), slice(0, -12)), (slice(length - part, None), slice(8, None))):
        tensors = [t[:, cut].clone() for t in (q, k, v)]  # inner: queries with the same windows there
        want = run(*tensors, ELEVEN, exact=exact)
        assert not want.isnan().any()
        assert torch.equal(got[:, cut][:, inner].view(torch.int16), want[:, inner].view(torch.int16))
    corner, last = ((slice(None), *(slice(-n, None),) * 3) for n in (16, 6))  # its windows lie in the corner
    want = expected(*(t[corner] for t in (q, k, v)), ELEVEN, 1.0)
    assert error(got[last], want[last]) < TOLERANCE
