"""Which KV tiles a query tile of 3D neighborhood attention visits, and which keys of them each query sees.

A query tile is 4x4x4 and a KV tile 4x4x8 tokens (T, H, W), as in NATTEN's Hopper kernel for head_dim 64. A query i of
an axis of n tokens sees the keys from min(max(i - window // 2, 0), n - window) on, `window` of them. The window of a
tile is the union over its queries; it is visited from the KV tile that holds its first key to the one that holds its
last. All of this is separable, so there is one small table per axis instead of a list per query tile, and grids of any
size fit: nothing here is indexed by a flattened KV tile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

Sizes = tuple[int, int, int]  # T, H, W

QUERY_TILE: Sizes = (4, 4, 4)
KV_TILE: Sizes = (4, 4, 8)
MAX_WINDOW = 15
# Columns of an axis table: the first KV tile, how many there are, the first key and one past the last key of the union
# window, and one mask per query of the tile: bit j is set if the query sees key first_tile * kv_tile + j.
FIRST, COUNT, LOW, HIGH, MASK = 0, 1, 2, 3, 4
_BLOCK = 8  # query tiles per axis that run at about the same time: their keys are shared through the L2 cache
_MAX_CACHED = 16
_lock = threading.Lock()
_cache: OrderedDict[tuple[Sizes, Sizes, torch.device], TileTables] = OrderedDict()
_captured: dict[tuple[Sizes, Sizes, torch.device], TileTables] = {}  # a captured graph goes on reading its tables


class TablesNotReadyError(RuntimeError):
    """A graph is being captured, and this shape has no tables yet: an upload is not allowed there."""


@dataclass(frozen=True)
class TileTables:
    """The tables of one grid and window, all int32 and on one device.

    axes: per axis (T, H, W) [query tiles of the axis, 8], see FIRST..MASK.
    order: [query tiles, 4]: tile coordinates (T, H, W) and the number of KV tiles; most KV tiles first, so that no long
        tile is left for the end; equal numbers form one bucket, and a bucket runs in blocks that share their keys.
    """

    axes: tuple[Tensor, Tensor, Tensor]
    order: Tensor

    @property
    def query_tiles(self) -> int:
        return self.order.shape[0]


def axis_table(n: int, window: int, query_tile: int, kv_tile: int) -> Tensor:
    """[ceil(n / query_tile), 8] int32 on the CPU, see FIRST..MASK. Queries past the end count as the last one.

    Raises ValueError if the window is not 2..15 or exceeds the axis.
    """
    if not 2 <= window <= MAX_WINDOW or window > n:
        raise ValueError(f"window {window} on an axis of {n} tokens: expected 2 <= window <= min({MAX_WINDOW}, tokens)")
    tiles = -(-n // query_tile)
    queries = torch.arange(tiles * query_tile).clamp(max=n - 1)
    start = (queries - window // 2).clamp(0, n - window).view(tiles, query_tile)
    low, high = start[:, 0], start[:, -1] + window
    first = low // kv_tile
    count = -(-high // kv_tile) - first
    # 15 + 3 keys, 7 before them: at most 25 of 32 bits in W; 15 + 3 + 3 of 24 in T and H
    masks = ((1 << window) - 1) << (start - (first * kv_tile)[:, None])
    masks = torch.where(masks >= 1 << 31, masks - (1 << 32), masks)
    return torch.cat([torch.stack([first, count, low, high], 1), masks], 1).to(torch.int32)


def build(grid: Sizes, window: Sizes) -> TileTables:
    """The tables on the CPU. Raises ValueError, see axis_table."""
    t, h, w = (axis_table(*sizes) for sizes in zip(grid, window, QUERY_TILE, KV_TILE, strict=True))
    count = (t[:, None, None, COUNT] * h[None, :, None, COUNT] * w[None, None, :, COUNT]).flatten()
    tiles = torch.cartesian_prod(*(torch.arange(len(a)) for a in (t, h, w))).view(-1, 3)
    block = tiles // _BLOCK
    blocks = [-(-len(a) // _BLOCK) for a in (t, h, w)]
    key = ((-count.long() * blocks[0] + block[:, 0]) * blocks[1] + block[:, 1]) * blocks[2] + block[:, 2]
    order = torch.cat([tiles, count[:, None]], 1)[torch.argsort(key, stable=True)]
    return TileTables((t, h, w), order.to(torch.int32).contiguous())


def tables(grid: Sizes, window: Sizes, device: torch.device) -> TileTables:
    """The tables on `device`, uploaded the first time and kept for the 16 shapes used last.

    Raises TablesNotReadyError if a CUDA graph is being captured and they are not there yet, or ValueError.
    """
    key = (grid, window, device)
    capturing = _capturing(device)
    with _lock:
        found = _captured.get(key) or _cache.get(key)
        if found is None:
            if capturing:
                raise TablesNotReadyError(
                    f"neighborhood attention of grid {grid}, window {window}: the first call of a shape uploads its "
                    "tile tables, which a CUDA graph capture does not allow; run the model once before the capture"
                )
            made = build(grid, window)
            t, h, w = (a.to(device) for a in made.axes)
            found = _cache[key] = TileTables((t, h, w), made.order.to(device))
        elif key in _cache:
            _cache.move_to_end(key)
        if capturing:
            _captured[key] = found
        while len(_cache) > _MAX_CACHED:
            (_, _, place), dropped = _cache.popitem(last=False)
            if place.type == "cuda":
                torch.cuda.synchronize(place)  # a kernel on another stream may still read them
            del dropped
        return found


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
