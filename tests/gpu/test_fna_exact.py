"""The schedule `exact` against NATTEN itself, bit for bit. Needs libnatten: benchmarks/natten_hopper builds it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ltx_inductor.kernels import fna_exact, fna_tiles

if importlib.util.find_spec("natten") is None or importlib.util.find_spec("natten.libnatten") is None:
    pytest.skip("no libnatten", allow_module_level=True)
if importlib.util.find_spec("tilelang") is None:
    pytest.skip("no tilelang", allow_module_level=True)

Triple = tuple[int, int, int]
STAGE5: Triple = (11, 11, 11)


def natten(q: Tensor, k: Tensor, v: Tensor, window: Triple, scale: float = 1.0) -> Tensor:
    import natten as library

    return library.na3d(q, k, v, kernel_size=window, scale=scale, backend="hopper-fna")


@pytest.fixture(autouse=True, scope="module")
def _ready() -> None:
    device = torch.cuda.current_device()
    arch = torch.cuda.get_device_capability(device)
    if arch != (9, 0):
        pytest.skip("not a Hopper GPU")
    missing = fna_exact.prepare(arch, dtype=torch.bfloat16, head_dim=64, kernel_size=STAGE5, device=device)
    assert missing is None, missing


def draw(grid: Triple, heads: int = 4, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q and k as the decoder has them, normalised per head, with scores of some units; drawn slice by slice."""
    gen = torch.Generator("cuda").manual_seed(seed)
    tensors = tuple(torch.empty((batch, *grid, heads, 64), dtype=torch.bfloat16, device="cuda") for _ in range(3))
    for t in range(grid[0]):
        for x, size in zip(tensors, (1.7, 10.4, 0.0), strict=True):
            drawn = torch.randn((batch, *grid[1:], heads, 64), generator=gen, device="cuda")
            x[:, t] = torch.nn.functional.normalize(drawn, dim=-1) * size if size else drawn
    return tensors


def same_bits(q: Tensor, k: Tensor, v: Tensor, window: Triple, scale: float = 1.0) -> int:
    """Compares the two; the number of elements."""
    want = natten(q, k, v, window, scale)
    poison = torch.full_like(q, math.nan)
    del poison
    got = fna_exact.launch(q, k, v, window, scale)
    differ = (want.view(torch.int16) != got.view(torch.int16)) & ~(want.isnan() & got.isnan())
    assert not bool(differ.any()), f"{int(differ.sum())} of {differ.numel()} elements differ"
    return differ.numel()


@pytest.mark.parametrize(
    ("grid", "window", "heads", "batch"),
    [
        ((12, 16, 20), STAGE5, 4, 2),
        ((13, 17, 21), STAGE5, 4, 1),
        ((11, 12, 11), STAGE5, 1, 1),
        ((11, 11, 12), STAGE5, 3, 3),
        ((19, 13, 18), STAGE5, 4, 1),
        ((20, 24, 40), (3, 5, 7), 4, 1),
        ((20, 24, 40), (2, 15, 4), 2, 1),
        ((16, 15, 17), (15, 15, 15), 4, 1),
        ((9, 22, 31), (8, 2, 13), 5, 1),
        ((4, 5, 30), (4, 3, 14), 2, 2),
        ((2, 2, 3), (2, 2, 2), 1, 1),
    ],
)
def test_bits_on_ragged_grids_and_other_windows(grid: Triple, window: Triple, heads: int, batch: int) -> None:
    same_bits(*draw(grid, heads, batch), window)


def _change(kind: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    def spikes(x: Tensor, value: float) -> Tensor:
        gen = torch.Generator("cuda").manual_seed(5)
        at = torch.rand(x.shape[:-1], generator=gen, device="cuda") < 0.002
        return torch.where(at[..., None], x * value, x)

    changes: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
        "large scores": lambda q, k, v: (q * 64, k, v),
        "all scores equal": lambda q, k, v: (q * 0, k, v),
        "tiny scores": lambda q, k, v: (q * 1e-30, k, v),
        "huge scores": lambda q, k, v: (q * 1e4, k * 1e4, v),
        "a few huge keys": lambda q, k, v: (q, spikes(k, 200.0), v),
        "a few huge values": lambda q, k, v: (q, k, spikes(v, 1e30)),
        "tiny values": lambda q, k, v: (q, k, v * 1e-38),
        "negative scores only": lambda q, k, v: (q.abs(), -k.abs() * 4, v),
        "constant values": lambda q, k, v: (q, k, torch.ones_like(v)),
        "NaN queries": lambda q, k, v: (spikes(q, math.nan), k, v),
        "infinite queries": lambda q, k, v: (spikes(q, math.inf), k, v),
        "NaN keys": lambda q, k, v: (q, spikes(k, math.nan), v),
    }
    return changes[kind]


@pytest.mark.parametrize(
    "kind",
    ["large scores", "all scores equal", "tiny scores", "huge scores", "a few huge keys", "a few huge values",
     "tiny values", "negative scores only", "constant values", "NaN queries", "infinite queries", "NaN keys"],
)  # fmt: skip
def test_bits_on_adversarial_inputs(kind: str) -> None:
    same_bits(*_change(kind)(*draw((21, 33, 40))), STAGE5)


@pytest.mark.parametrize("scale", [0.125, 0.3, 3.7, 1e-4])
def test_bits_with_other_scales(scale: float) -> None:
    same_bits(*draw((14, 18, 27)), STAGE5, scale)


def test_bits_on_more_than_1e8_elements() -> None:
    elements = sum(same_bits(*draw(grid, seed=n), STAGE5) for n, grid in enumerate([(33, 64, 96), (65, 96, 160)]))
    assert elements > 1e8


def test_graph_capture_and_another_stream() -> None:
    q, k, v = draw((13, 18, 25), 2)
    want = natten(q, k, v, STAGE5)
    fna_exact.launch(q, k, v, STAGE5, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fna_exact.launch(q, k, v, STAGE5, 1.0)
    got.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_a_new_shape_inside_a_capture_is_an_error() -> None:
    q, k, v = draw((11, 12, 29), 1)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(fna_tiles.TablesNotReadyError), torch.cuda.graph(graph):
        fna_exact.launch(q, k, v, STAGE5, 1.0)


def test_tensors_that_are_not_contiguous() -> None:
    q, k, v = draw((13, 18, 25), 2)
    want = natten(q, k, v, STAGE5)
    q, k, v = (torch.stack([x, x], -2)[..., 0, :] for x in (q, k, v))
    assert not q.is_contiguous()
    assert torch.equal(fna_exact.launch(q, k, v, STAGE5, 1.0).view(torch.int16), want.view(torch.int16))
