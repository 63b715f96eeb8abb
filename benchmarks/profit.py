"""Where is a kernel worth its launch? Writes the table that `ltx_inductor.profit` reads.

    python benchmarks/profit.py --out ltx_inductor/kernels/profit.json       the package's own
    python benchmarks/profit.py --out mine.json      this machine's: options={"ltx_inductor.profit": "mine.json"}

RMSNorm + split RoPE of q and k as diffusers spells it, compiled by stock Inductor and by backend="ltx", from 1 to 4,096
tokens; the decoder's norm, scale and 3-axis RoPE in the same way, with the tables that it makes; neighborhood attention
by NATTEN and by the op, from a grid hardly larger than its window on (if NATTEN runs).
Times are of the GPU: medians over replays of a CUDA graph of several calls, contenders in turns. Small calls find their
inputs in the L2 cache, as they do behind the projection that made them. (A window as large as the grid is left out:
NATTEN runs plain attention there.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ltx_inductor
from benchmarks import axial
from benchmarks.fna_timing import in_turns, replay_of
from benchmarks.rope import model_chain

CALLS, ROUNDS = 8, 40
TOKENS = (1, 8, 64, 256, 1024, 4096)
HEADS = ((8, 64), (32, 64), (32, 128))  # heads, head_dim
AXIAL = [((1, 1, 8), 4), ((3, 8, 8), 4), ((6, 16, 24), 4), ((18, 16, 24), 32), ((33, 64, 96), 4)]  # grid, heads
GRIDS = [  # grid, window, heads
    ((4, 6, 6), (3, 5, 5), 8),
    ((4, 8, 8), (3, 5, 5), 8),
    ((8, 16, 16), (3, 7, 7), 8),
    ((18, 16, 24), (3, 7, 7), 32),
    ((12, 12, 12), (11, 11, 11), 4),
    ((16, 16, 24), (11, 11, 11), 4),
    ((33, 64, 96), (11, 11, 11), 4),
]


def compare(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of a call of each."""
    replays = {name: replay_of(call, CALLS) for name, call in calls.items()}
    for replay in replays.values():
        replay()
    return {name: statistics.median(ms) * 1e3 / CALLS for name, ms in in_turns(replays, ROUNDS).items()}


def rope_rows() -> Iterator[dict[str, Any]]:
    for heads, head_dim in HEADS:
        torch._dynamo.reset()  # or the width would be taken for dynamic, since it changes
        chain = model_chain("fp32-rope", heads)
        models = {
            "other": torch.compile(chain, fullgraph=True),
            "ltx": torch.compile(
                chain,
                fullgraph=True,
                backend="ltx",
                options={"ltx_inductor.profit": "any", "ltx_inductor.strict": True},
            ),
        }
        for tokens in TOKENS:
            q, k = (torch.randn(1, tokens, heads * head_dim, device="cuda").bfloat16() for _ in "qk")
            weights = [torch.randn(heads * head_dim, device="cuda").bfloat16() for _ in "qk"]
            angle = torch.rand(1, tokens, heads, head_dim // 2, device="cuda") * math.tau
            tables = [t.bfloat16().transpose(1, 2) for t in (angle.cos(), angle.sin())]
            args = (q, k, *weights, *tables, None, None)
            for i, axis in ((0, 1), (1, 1), (4, 2), (5, 2)):
                torch._dynamo.maybe_mark_dynamic(args[i], axis)
            us = compare({name: lambda m=m, args=args: m(*args) for name, m in models.items()})
            size = sum(t.nbytes for t in (q, k, q, k, *weights, *tables))
            report = ltx_inductor.last_report()
            assert report is not None
            assert not report.refusals, report  # else Inductor would be compared with itself
            assert report.count() > 0, report
            yield row("rmsnorm_split_rope", size, us, f"{tokens} tokens, {heads} heads of {head_dim}")


def axial_rows() -> Iterator[dict[str, Any]]:
    """Of one side, half of q and k."""
    for grid, heads in AXIAL:
        stock, ours, q, k = axial.compiled(grid, heads, {"ltx_inductor.profit": "any"})
        us = compare({"other": lambda f=stock, a=(q, k): f(*a), "ltx": lambda f=ours, a=(q, k): f(*a)})
        half = {name: value / 2 for name, value in us.items()}
        yield row("rmsnorm_axial_rope", 2 * q.nbytes, half, f"one side, grid {grid}, {heads} heads of 64")


def neighborhood_rows() -> Iterator[dict[str, Any]]:
    try:
        import natten

        natten.na3d(*(torch.randn(1, 4, 8, 8, 1, 64, device="cuda").bfloat16() for _ in "qkv"), kernel_size=(3, 5, 5))
    except Exception as error:
        print(f"neighborhood attention is left out: NATTEN does not run here ({error})", file=sys.stderr)
        return
    from ltx_inductor.kernels import fna

    for grid, window, heads in GRIDS:
        q, k, v = (torch.randn(1, *grid, heads, 64, device="cuda").bfloat16() for _ in "qkv")
        missing = fna.prepare(
            torch.cuda.get_device_capability(), dtype=q.dtype, head_dim=64, kernel_size=window, device=0
        )
        if missing:
            print(f"neighborhood attention is left out: {missing}", file=sys.stderr)
            return

        def ours(args: tuple[Tensor, ...] = (q, k, v), window: Any = window) -> Tensor:
            return torch.ops.ltx_inductor.na3d(*args, window, 1.0)

        def theirs(args: tuple[Tensor, ...] = (q, k, v), window: Any = window) -> Tensor:
            return natten.na3d(*args, kernel_size=window, scale=1.0)

        us = compare({"other": theirs, "ltx": ours})
        yield row("neighborhood_attention", math.prod(grid) * heads, us, f"grid {grid}, window {window}, {heads} heads")


def row(rule: str, size: int, us: dict[str, float], what: str) -> dict[str, Any]:
    arch = "{}.{}".format(*torch.cuda.get_device_capability())
    made = {"rule": rule, "arch": arch, "size": size, "ltx_us": us["ltx"], "other_us": us["other"], "what": what}
    print(f"{rule} {what}: {us['ltx']:.2f} us, {us['other']:.2f} us, {us['other'] / us['ltx']:.2f}x", flush=True)
    return made


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/profit.py",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": [*rope_rows(), *axial_rows(), *neighborhood_rows()],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
