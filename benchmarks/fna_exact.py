"""Neighborhood attention with NATTEN's bits against NATTEN 0.21.7's na3d as a whole: bits, ms, TFLOP/s, ratio.

    python benchmarks/natten_hopper/build.py /tmp/natten
    PYTHONPATH=/tmp/natten python benchmarks/fna_exact.py --largest --out benchmarks/results/fna-exact-h200.json

Inputs are drawn as the LTX-2.5 decoder has them: q and k normalised per head, scale 1. Every element of every result is
compared as an integer. Times are medians of CUDA-event times; the two take turns. `useful` counts the products of a
query with the keys of its window and no others: 4 * tokens * window * heads * 64 FLOP.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ltx_inductor.kernels import fna_exact

Triple = tuple[int, int, int]
ELEVEN = (11, 11, 11)
SHAPES = [  # grid, window, heads: stage 5, then stages 1 to 4 of the decoder for 121 frames at 512 x 768
    ((33, 64, 96), ELEVEN, 4),
    ((65, 96, 160), ELEVEN, 4),
    ((121, 136, 240), ELEVEN, 4),
    ((18, 16, 24), (3, 7, 7), 32),
    ((18, 32, 48), (3, 7, 7), 16),
    ((35, 32, 48), (3, 5, 5), 8),
    ((69, 64, 96), (3, 5, 5), 8),
]
LARGEST = ((121, 272, 480), ELEVEN, 4)


def draw(grid: Triple, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, T, H, W, heads, 64], bf16, made slice by slice: the largest is 8 GB each."""
    gen = torch.Generator("cuda").manual_seed(1)
    tensors = tuple(torch.empty((1, *grid, heads, 64), dtype=torch.bfloat16, device="cuda") for _ in range(3))
    for t in range(grid[0]):
        for x, size in zip(tensors, (1.7, 10.4, 0.0), strict=True):
            drawn = torch.randn((1, *grid[1:], heads, 64), generator=gen, device="cuda")
            x[:, t] = torch.nn.functional.normalize(drawn, dim=-1) * size if size else drawn
    return tensors


def differing(a: Tensor, b: Tensor) -> int:
    return sum(int((a[:, t].view(torch.int16) != b[:, t].view(torch.int16)).sum()) for t in range(a.shape[1]))


def once(call: Callable[[], Any], times: int) -> float:
    """Milliseconds of one of `times` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def measure(grid: Triple, window: Triple, heads: int, budget_ms: float) -> dict[str, Any]:
    import natten

    q, k, v = draw(grid, heads)
    calls = {
        "natten": lambda: natten.na3d(q, k, v, kernel_size=window, scale=1.0),
        "exact": lambda: fna_exact.launch(q, k, v, window, 1.0),
    }
    want, got = calls["natten"](), calls["exact"]()
    row: dict[str, Any] = {"grid": grid, "window": window, "heads": heads, "elements": got.numel()}
    row["elements_that_differ"] = differing(want, got)
    del want, got
    first = {name: once(call, 1) for name, call in calls.items()}
    times = {name: max(1, round(2.0 / ms)) for name, ms in first.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(max(3, min(21, int(budget_ms / sum(max(2.0, ms) for ms in first.values()))))):
        for name, call in list(calls.items())[:: 1 if i % 2 else -1]:
            samples[name].append(once(call, times[name]))
    flop = 4 * math.prod(grid) * math.prod(window) * heads * 64
    for name, found in samples.items():
        ms = statistics.median(found)
        row[name] = {"ms": ms, "min_ms": min(found), "samples": len(found), "useful_tflops": flop / ms / 1e9}
    row["times_natten"] = row["natten"]["ms"] / row["exact"]["ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--largest", action="store_true", help="also 121 x 272 x 480: 70 GB of tensors")
    parser.add_argument("--budget-ms", type=float, default=1500.0, help="GPU time per row")
    args = parser.parse_args()
    arch = torch.cuda.get_device_capability()
    missing = fna_exact.prepare(arch, dtype=torch.bfloat16, head_dim=64, kernel_size=ELEVEN, device=0)
    if missing is not None:
        raise SystemExit(missing)
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tilelang": version("tilelang"),
        "natten": "0.21.7",
        "rows": [],
    }
    print(f"{result['device']}, torch {result['torch']}, TileLang {result['tilelang']}")
    for grid, window, heads in [*SHAPES, *([LARGEST] if args.largest else [])]:
        row = measure(grid, window, heads, args.budget_ms)
        result["rows"].append(row)
        parts = [f"{n} {row[n]['ms']:9.3f} ms {row[n]['useful_tflops']:6.1f} TFLOP/s" for n in ("natten", "exact")]
        bits = f"{row['elements_that_differ']} of {row['elements']} elements differ"
        print(f"{grid!s:16}{window!s:13}{heads:3} heads", *parts, f"{row['times_natten']:.2f}x", bits, flush=True)
        torch.cuda.empty_cache()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
