"""Neighborhood attention on one GPU: ours against NATTEN's na3d as a whole, and the errors of both against fp64.

    python benchmarks/fna.py --out benchmarks/results/fna-h200.json
    ncu --set full -k ltx_fna python benchmarks/fna.py --profile 33,64,96

Inputs are drawn as the LTX-2.5 decoder has them: q and k normalised per head, scale 1. Times are medians of CUDA-event
times; contenders take turns, in both orders, because the GPU's power limit moves its clock by more than some of the
differences. A short call is repeated within one event pair, so that the host's part hides behind the GPU's, as it does
in a model. `useful` counts the products of a query with the keys of its window and no others: 4 * tokens * window *
heads * 64 FLOP. NATTEN takes part if it is installed with its binary (benchmarks/natten_hopper builds one for Hopper).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.fna_timing import ELEVEN, LARGEST, STAGE_5, STAGES, Triple, measure
from ltx_inductor.kernels import fna
from tests.gpu.fna_cases import draw, error, expected, prepare

Call = Callable[[Tensor, Tensor, Tensor, Triple], Tensor]
SMALL = [((11, 12, 12), ELEVEN, 4), ((13, 16, 24), ELEVEN, 4), ((17, 24, 32), ELEVEN, 4), ((33, 32, 32), ELEVEN, 4)]
SMALL += [((5, 8, 12), (3, 7, 7), 32), ((5, 8, 12), (3, 5, 5), 8)]


def contenders() -> dict[str, Call]:
    found: dict[str, Call] = {"ltx": lambda q, k, v, window: fna.launch(q, k, v, window, 1.0)}
    try:
        import natten

        found["natten"] = lambda q, k, v, window: natten.na3d(q, k, v, kernel_size=window, scale=1.0)
        found["natten"](*draw((12, 13, 14)), ELEVEN)
    except Exception as problem:
        print(f"NATTEN takes no part: {type(problem).__name__}: {str(problem)[:200]}")
        found.pop("natten", None)
    return found


def compare(calls: dict[str, Call], grid: Triple, window: Triple, heads: int, budget_ms: float) -> dict[str, Any]:
    """Milliseconds, useful TFLOP/s, the ratio to NATTEN and the errors of one shape."""
    q, k, v = draw(grid, heads=heads, seed=1)
    prepare(window)
    bound = {name: (lambda call=call: call(q, k, v, window)) for name, call in calls.items()}
    row = measure(bound, grid, window, heads, budget_ms, most=31)
    if "natten" in row:
        row["times_natten"] = row["natten"]["ms"] / row["ltx"]["ms"]
    row["spot_error"] = {name: spot_error(q, k, v, call(), window) for name, call in bound.items()}
    return row


def spot_error(q: Tensor, k: Tensor, v: Tensor, out: Tensor, window: Triple, queries: int = 256) -> float:
    """Relative L2 error against fp64 over corners and random queries of a grid that is too large to check whole."""
    sizes = q.shape[1:4]
    gen = torch.Generator().manual_seed(0)
    wrong = total = 0.0
    for i in range(queries):
        at = [int(torch.randint(0, n, (1,), generator=gen)) for n in sizes]
        if i < 8:
            at = [0 if (i >> axis) & 1 else n - 1 for axis, n in enumerate(sizes)]
        start = [min(max(a - w // 2, 0), n - w) for a, w, n in zip(at, window, sizes, strict=True)]
        box = (0, *(slice(s, s + w) for s, w in zip(start, window, strict=True)))
        keys, values = (x[box].flatten(0, 2).double() for x in (k, v))
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[(0, *at)].double(), keys), -1)
        want = torch.einsum("hn,nhd->hd", weights, values)
        wrong += float((out[(0, *at)].double() - want).square().sum())
        total += float(want.square().sum())
    return math.sqrt(wrong / total)


def errors(calls: dict[str, Call]) -> list[dict[str, Any]]:
    """Whole small grids against fp64, for several kinds of scores."""
    rows = []
    for kind in ("normed", "plain", "peaked", "flat", "equal"):
        for grid, window in (((13, 17, 21), ELEVEN), ((9, 16, 20), (3, 7, 7))):
            tensors = draw(grid, heads=4, kind=kind, seed=3)
            prepare(window)
            want = expected(*tensors, window, 1.0)
            row: dict[str, Any] = {"kind": kind, "grid": grid, "window": window}
            row |= {name: error(call(*tensors, window), want) for name, call in calls.items()}
            if "natten" in row:
                row["times_natten"] = row["ltx"] / row["natten"]
            rows.append(row)
    return rows


def host_us(window: Triple = (3, 5, 5)) -> float:
    """Microseconds that the host spends on a call, with the GPU kept from falling behind."""
    q, k, v = draw((3, 5, 5), heads=1)
    prepare(window)
    samples = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            fna.launch(q, k, v, window, 1.0)
        samples.append((time.perf_counter() - start) / 50 * 1e6)
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--largest", action="store_true", help="also 121 x 272 x 480: 32 GB of tensors")
    parser.add_argument("--profile", metavar="T,H,W", help="only run our kernel on this grid, for a profiler")
    parser.add_argument("--budget-ms", type=float, default=2000.0, help="GPU time per row")
    args = parser.parse_args()
    if args.profile:
        t, h, w = map(int, args.profile.split(","))
        prepare(ELEVEN)
        tensors = draw((t, h, w), heads=4, seed=1)
        for _ in range(3):
            fna.launch(*tensors, ELEVEN, 1.0)
        torch.cuda.synchronize()
        return
    calls = contenders()
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "host_us": host_us(),
        "errors": errors(calls),
        "rows": [],
    }
    print(f"{result['device']}, torch {result['torch']}; host {result['host_us']:.1f} us a call")
    for row in result["errors"]:
        print(
            f"error {row['kind']:8}{row['window']!s:13}", {n: f"{row[n]:.3e}" for n in calls}, row.get("times_natten")
        )
    for grid, window, heads in [*STAGE_5, *([LARGEST] if args.largest else []), *STAGES, *SMALL]:
        row = compare(calls, grid, window, heads, args.budget_ms)
        result["rows"].append(row)
        parts = [f"{n} {row[n]['ms']:9.3f} ms {row[n]['useful_tflops']:6.1f} TFLOP/s" for n in calls]
        ratio = f"{row['times_natten']:.2f}x" if "times_natten" in row else ""
        spot = " ".join(f"{e:.2e}" for e in row["spot_error"].values())
        print(f"{grid!s:16}{window!s:13}{heads:3} heads", *parts, ratio, "error", spot, flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
