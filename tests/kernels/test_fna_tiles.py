"""The tile tables of neighborhood attention against the definition of its window, on hundreds of random shapes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ltx_inductor.kernels import fna_tiles
from ltx_inductor.kernels.fna_tiles import COUNT, FIRST, HIGH, KV_TILE, LOW, MASK, QUERY_TILE


def sees(i: int, n: int, window: int) -> set[int]:
    """The keys of query i, by the definition."""
    start = min(max(i - window // 2, 0), n - window)
    return set(range(start, start + window))


def axis_cases() -> list[tuple[int, int]]:
    rng = random.Random(0)
    cases = [(w + extra, w) for w in range(2, 16) for extra in (0, 1, 2, 3, 5)]  # window == n, n - 1, ...
    cases += [(n, w) for w, n in ((rng.randint(2, 15), rng.randint(15, 90)) for _ in range(250))]
    return cases


@pytest.mark.parametrize("kv_tile", [4, 8])
def test_an_axis_against_brute_force(kv_tile: int) -> None:
    for n, window in axis_cases():
        table = fna_tiles.axis_table(n, window, 4, kv_tile).tolist()
        assert len(table) == -(-n // 4)
        for tile, row in enumerate(table):
            keys = [sees(min(4 * tile + i, n - 1), n, window) for i in range(4)]
            union = set().union(*keys)
            assert (row[LOW], row[HIGH]) == (min(union), max(union) + 1)
            assert row[FIRST] == min(union) // kv_tile
            assert row[FIRST] + row[COUNT] == max(union) // kv_tile + 1
            for i in range(4):
                bits = row[MASK + i] & 0xFFFFFFFF
                assert {row[FIRST] * kv_tile + b for b in range(32) if bits >> b & 1} == keys[i], (n, window, tile, i)
                assert bits >> (row[COUNT] * kv_tile) == 0


def grids() -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    rng = random.Random(1)
    cases = []
    for _ in range(200):
        window = tuple(rng.randint(2, 15) for _ in range(3))
        grid = tuple(w + rng.choice((0, 1, rng.randint(0, 20))) for w in window)
        cases.append((grid, window))
    return cases


def test_every_query_tile_is_in_the_order_once_with_its_kv_tiles_counted() -> None:
    for grid, window in grids():
        made = fna_tiles.build(grid, window)
        sizes = [-(-n // q) for n, q in zip(grid, QUERY_TILE, strict=True)]
        rows = made.order.tolist()
        assert made.query_tiles == len(rows)
        assert sorted(tuple(r[:3]) for r in rows) == list(itertools.product(*map(range, sizes)))
        for row in rows:
            counts = [int(a[i, COUNT]) for a, i in zip(made.axes, row[:3], strict=True)]
            assert row[3] == counts[0] * counts[1] * counts[2]
        assert [r[3] for r in rows] == sorted((r[3] for r in rows), reverse=True)


def test_no_key_is_lost_or_seen_twice_in_three_dimensions() -> None:
    """All KV tiles of a query tile, T fastest, then H, then W, hold the window of every query exactly once."""
    grid, window = (13, 9, 22), (5, 6, 11)
    made = fna_tiles.build(grid, window)
    for tile in [r[:3] for r in made.order.tolist()]:
        rows = [a[i].tolist() for a, i in zip(made.axes, tile, strict=True)]
        visited = [
            (t, h, w)
            for w in range(rows[2][FIRST], rows[2][FIRST] + rows[2][COUNT])
            for h in range(rows[1][FIRST], rows[1][FIRST] + rows[1][COUNT])
            for t in range(rows[0][FIRST], rows[0][FIRST] + rows[0][COUNT])
        ]
        for offset in itertools.product(range(4), repeat=3):
            query = tuple(min(4 * i + o, n - 1) for i, o, n in zip(tile, offset, grid, strict=True))
            wanted = set(itertools.product(*(sees(q, n, w) for q, n, w in zip(query, grid, window, strict=True))))
            found = []
            for kv in visited:
                per_axis = []
                for axis in range(3):
                    base = kv[axis] * KV_TILE[axis]
                    bits = rows[axis][MASK + offset[axis]] >> (base - rows[axis][FIRST] * KV_TILE[axis])
                    per_axis.append([base + b for b in range(KV_TILE[axis]) if bits >> b & 1])
                found += itertools.product(*per_axis)
            assert len(found) == len(set(found))
            assert set(found) == wanted


def test_a_grid_of_more_than_32768_kv_tiles() -> None:
    grid, window = (121, 272, 480), (11, 11, 11)
    made = fna_tiles.build(grid, window)
    kv_tiles = 1
    for n, tile in zip(grid, KV_TILE, strict=True):
        kv_tiles *= -(-n // tile)
    assert kv_tiles > 32768
    assert made.query_tiles == 31 * 68 * 120
    last = made.axes[2][-1].tolist()
    assert (last[LOW], last[HIGH], last[FIRST], last[COUNT]) == (469, 480, 58, 2)
    assert int(made.order[:, 3].max()) == 5 * 5 * 3
    assert made.order.dtype == torch.int32


@pytest.mark.parametrize(("n", "window"), [(5, 6), (20, 1), (20, 16)])
def test_a_window_that_does_not_fit(n: int, window: int) -> None:
    with pytest.raises(ValueError, match=f"window {window} on an axis of {n} tokens"):
        fna_tiles.axis_table(n, window, 4, 8)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(fna_tiles, "_cache", type(fna_tiles._cache)())
    kept = fna_tiles.tables((8, 8, 8), (3, 3, 3), cpu)
    for n in range(9, 60):
        fna_tiles.tables((8, 8, n), (3, 3, 3), cpu)
        assert fna_tiles.tables((8, 8, 8), (3, 3, 3), cpu) is kept
        assert len(fna_tiles._cache) <= 16


def test_nothing_is_uploaded_inside_a_capture_and_what_it_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")  # stands for the GPU: the device type is asked through `capturing`
    monkeypatch.setattr(fna_tiles, "_cache", type(fna_tiles._cache)())
    monkeypatch.setattr(fna_tiles, "_captured", {})
    monkeypatch.setattr(fna_tiles, "_capturing", lambda device: True)
    with pytest.raises(fna_tiles.TablesNotReadyError, match="run the model once before the capture"):
        fna_tiles.tables((8, 8, 8), (3, 3, 3), cpu)
    monkeypatch.setattr(fna_tiles, "_capturing", lambda device: False)
    made = fna_tiles.tables((8, 8, 8), (3, 3, 3), cpu)
    monkeypatch.setattr(fna_tiles, "_capturing", lambda device: True)
    assert fna_tiles.tables((8, 8, 8), (3, 3, 3), cpu) is made
    monkeypatch.setattr(fna_tiles, "_capturing", lambda device: False)
    for n in range(9, 60):
        fna_tiles.tables((8, 8, n), (3, 3, 3), cpu)
    assert fna_tiles.tables((8, 8, 8), (3, 3, 3), cpu) is made
