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
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.fna_timing import ELEVEN, LARGEST, STAGE_5, STAGES, Triple, measure
from ltx_inductor.kernels import fna_exact
from tests.gpu.fna_cases import draw


def differing(a: Tensor, b: Tensor) -> int:
    return sum(int((a[:, t].view(torch.int16) != b[:, t].view(torch.int16)).sum()) for t in range(a.shape[1]))


def compare(grid: Triple, window: Triple, heads: int, budget_ms: float) -> dict[str, Any]:
    import natten

    q, k, v = draw(grid, heads=heads, seed=1)
    calls = {
        "natten": lambda: natten.na3d(q, k, v, kernel_size=window, scale=1.0),
        "exact": lambda: fna_exact.launch(q, k, v, window, 1.0),
    }
    want, got = calls["natten"](), calls["exact"]()
    bits = {"elements": got.numel(), "elements_that_differ": differing(want, got)}
    del want, got
    row = measure(calls, grid, window, heads, budget_ms, most=21) | bits
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
    for grid, window, heads in [*STAGE_5, *STAGES, *([LARGEST] if args.largest else [])]:
        row = compare(grid, window, heads, args.budget_ms)
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
