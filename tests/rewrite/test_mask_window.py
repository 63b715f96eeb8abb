"""The proof that a mask is a window: spellings that are, near misses that are not, against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.decomposition import decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.mask_window import Window, reads_a_grid, window_of

GRID, KERNEL = (5, 6, 7), (3, 4, 5)


def read(mask_mod, length):
    """As FlexAttention traces a mask_mod, with the decompositions of Inductor."""
    gm = make_fx(mask_mod, decomposition_table=decompositions)(*(torch.tensor(0, dtype=torch.int32) for _ in range(4)))
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    leaves = dict(zip(inputs, ("b", "h", "q", "kv"), strict=True))
    out = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return window_of(out, (), leaves, length), reads_a_grid(out, leaves, length)


def product(grid):
    return grid[0] * grid[1] * grid[2]


def dense(mask_mod, length):
    at = torch.arange(length, dtype=torch.int32)
    return torch.broadcast_to(mask_mod(0, 0, at[:, None], at[None, :]), (length, length))


def window(grid, kernel_size):
    """NATTEN's window, [points, points], from its definition."""
    axes = []
    for n, w in zip(grid, kernel_size, strict=True):
        starts = [min(max(i - w // 2, 0), n - w) for i in range(n)]
        axes.append(torch.tensor([[s <= j < s + w for j in range(n)] for s in starts]))
    t, h, w = axes
    seen = t[:, None, None, :, None, None] & h[None, :, None, None, :, None] & w[:, None, None]
    return seen.reshape(product(grid), product(grid))


def diffusers(grid, kernel_size):
    (_, _height, width), hw = grid, grid[1] * grid[2]

    def mask_mod(b, h, q_idx, kv_idx):
        q_t, q_rem = q_idx // hw, q_idx % hw
        k_t, k_rem = kv_idx // hw, kv_idx % hw
        q = (q_t, q_rem // width, q_rem % width)
        k = (k_t, k_rem // width, k_rem % width)
        seen = []
        for i in range(3):
            start = torch.clamp(q[i] - kernel_size[i] // 2, 0, grid[i] - kernel_size[i])
            seen.append((k[i] >= start) & (k[i] < start + kernel_size[i]))
        return seen[0] & seen[1] & seen[2]

    return mask_mod


def from_the_last_axis(grid, kernel_size):
    """Coordinates by repeated division; the window by its centre, as two one-sided conditions."""

    def coordinates(index):
        found = []
        for n in reversed(grid):
            found.append(index % n)
            index = index // n
        return found[::-1]

    def mask_mod(b, h, q_idx, kv_idx):
        seen = None
        for q, k, n, w in zip(coordinates(q_idx), coordinates(kv_idx), grid, kernel_size, strict=True):
            left, right = w // 2, w // 2 + (w % 2 - 1)
            centre = q.clamp(min=left).clamp(max=n - 1 - right)
            near = ((centre - k >= 0) & (centre - k <= left)) | ((k - centre >= 0) & (k - centre <= right))
            seen = near if seen is None else near & seen
        return seen

    return mask_mod


def by_subtraction(grid, kernel_size):
    """Coordinates without a remainder, minimum and maximum for the clamp, where and not for the logic."""
    _, height, width = grid

    def coordinates(index):
        rows = index // width
        planes = rows // height
        return planes, rows - planes * height, index - rows * width

    def mask_mod(b, h, q_idx, kv_idx):
        seen = torch.ones_like(q_idx, dtype=torch.bool)
        for q, k, n, w in zip(coordinates(q_idx), coordinates(kv_idx), grid, kernel_size, strict=True):
            start = torch.minimum(torch.maximum(q - w // 2, torch.zeros_like(q)), torch.full_like(q, n - w))
            seen = torch.where(~(k < start), seen & torch.logical_not(start + w <= k), False)
        return seen

    return mask_mod


def by_distance(grid, kernel_size):
    """|2k - centre| on doubled coordinates, which works for odd and even windows."""
    _, height, width = grid

    def mask_mod(b, h, q_idx, kv_idx):
        q = (q_idx // (width * height), (q_idx // width) % height, q_idx % width)
        k = (kv_idx // (width * height), (kv_idx // width) % height, kv_idx % width)
        seen = []
        for i in range(3):
            w = kernel_size[i]
            first = torch.clamp(q[i] - w // 2, 0, grid[i] - w)
            seen.append((2 * k[i] - (2 * first + w - 1)).abs() < w)
        return torch.logical_and(torch.logical_and(seen[0], seen[1]), seen[2])

    return mask_mod


SPELLINGS = [diffusers, from_the_last_axis, by_subtraction, by_distance]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings(spelling):
    mask_mod = spelling(GRID, KERNEL)
    assert torch.equal(dense(mask_mod, product(GRID)), window(GRID, KERNEL))
    assert read(mask_mod, product(GRID)) == (Window(GRID, KERNEL), True)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_grid_and_window(data):
    grid = tuple(data.draw(st.integers(2, 9)) for _ in range(3))
    kernel_size = tuple(data.draw(st.integers(1, n)) for n in grid)
    spelling = data.draw(st.sampled_from(SPELLINGS))
    assert read(spelling(grid, kernel_size), product(grid))[0] == Window(grid, kernel_size)


def test_a_large_grid_is_read_in_no_time():
    assert read(diffusers((121, 272, 480), (11, 11, 11)), 121 * 272 * 480)[0].grid == (121, 272, 480)


def test_an_axis_without_a_condition_sees_all_keys():
    full = diffusers(GRID, (GRID[0], *KERNEL[1:]))
    hw, width = GRID[1] * GRID[2], GRID[2]

    def mask_mod(b, h, q_idx, kv_idx):
        def window(q, k, n, w):
            start = torch.clamp(q - w // 2, 0, n - w)
            return (k >= start) & (k < start + w)

        q, k = q_idx % hw, kv_idx % hw
        return window(q // width, k // width, GRID[1], KERNEL[1]) & window(q % width, k % width, GRID[2], KERNEL[2])

    assert torch.equal(dense(mask_mod, product(GRID)), dense(full, product(GRID)))
    assert read(mask_mod, product(GRID))[0] == Window(GRID, (GRID[0], *KERNEL[1:]))


def _with(change):
    """The window along T changed by `change(q_t, k_t)`; H and W as they should be."""
    (frames, _, _), hw = GRID, GRID[1] * GRID[2]
    base = diffusers(GRID, (frames, *KERNEL[1:]))

    def mask_mod(b, h, q_idx, kv_idx):
        return base(b, h, q_idx, kv_idx) & change(q_idx // hw, kv_idx // hw)

    return mask_mod


def _one_frame_less(b, h, q, kv):
    return diffusers((GRID[0] - 1, *GRID[1:]), KERNEL)(b, h, q, kv)


def _coupled(b, h, q, kv):
    hw = GRID[1] * GRID[2]
    near = (q // hw + q % GRID[2] - kv // hw - kv % GRID[2]).abs() < 3
    return near & diffusers(GRID, KERNEL)(b, h, q, kv)


NEAR_MISSES = {
    "cut at the border": (_with(lambda q, k: (q - k).abs() <= 1), "a query sees 2 to 3 keys"),
    "causal": (_with(lambda q, k: (k <= q) & (k > q - 3)), "a query sees 1 to 3 keys"),
    "off centre": (_with(lambda q, k: (k - q.clamp(0, 3) < 2) & (k - q.clamp(0, 3) >= 0)), "not NATTEN.s window"),
    "dilated": (_with(lambda q, k: ((k - q) % 2 == 0) & (k < 4) & (q < 4)), "a query sees 0 to 2 keys"),
    "other grid": (_one_frame_less, "a query sees"),
    "axes coupled": (_coupled, "ax"),
    "batch": (lambda b, h, q, kv: diffusers(GRID, KERNEL)(b, h, q, kv) & (b < 1), "depends on the batch"),
    "head": (lambda b, h, q, kv: diffusers(GRID, KERNEL)(b, h, q, kv) & (h < 1), "depends on the head"),
    "float": (lambda b, h, q, kv: diffusers(GRID, KERNEL)(b, h, q, kv) & (q.float() > -1), "float32"),
    "narrow": (lambda b, h, q, kv: diffusers(GRID, KERNEL)(b, h, q.to(torch.int8), kv), "in torch.int8"),
    "large": (lambda b, h, q, kv: diffusers(GRID, KERNEL)(b, h, q * 2**24 // 2**24, kv), "leaves the range of int32"),
    "nothing": (lambda b, h, q, kv: diffusers(GRID, KERNEL)(b, h, q, kv) & torch.full((), False), "no query see"),
    "2D": (lambda b, h, q, kv: (q // 42 - kv // 42).clamp(0, 1) == 0, "ax"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    mask_mod, sentence = NEAR_MISSES[name]
    with pytest.raises(Refuse, match=sentence):
        read(mask_mod, product(GRID))


def test_sizes_that_do_not_fit_the_sequence():
    with pytest.raises(Refuse, match="divides positions by 42, which does not fit a sequence of 5000"):
        read(diffusers(GRID, KERNEL), 5000)


def test_an_input_tensor_is_named():
    table = torch.tensor(1)

    def mask_mod(b, h, q, kv):
        return diffusers(GRID, KERNEL)(b, h, q, kv) & (kv * table >= 0)

    with pytest.raises(Refuse, match="the mask reads _tensor_constant0"):
        read(mask_mod, product(GRID))


def test_other_masks_read_no_grid():
    for mask_mod in (lambda b, h, q, kv: kv <= q, lambda b, h, q, kv: (q - kv).abs() < 9):
        gm = make_fx(mask_mod)(*(torch.tensor(0, dtype=torch.int32) for _ in range(4)))
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        out = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        assert not reads_a_grid(out, dict(zip(inputs, ("b", "h", "q", "kv"), strict=True)), 64)


def test_dense_is_what_brute_force_says():
    """The brute force above is no copy of the proof: it starts from NATTEN's definition."""
    seen: Tensor = window((2, 3, 4), (1, 2, 3))
    assert seen.sum(1).unique().tolist() == [6]
