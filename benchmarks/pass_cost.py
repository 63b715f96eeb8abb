"""What the pass costs: milliseconds per graph on real captures of 1, 4, 16 and 48 transformer blocks.

    python benchmarks/pass_cost.py [--blocks 1 4 16 48] [--out benchmarks/results/pass_cost.json]

Each graph is the joint ATen graph of the real diffusers LTX2VideoTransformer3DModel (small widths: the number of nodes
does not depend on them) as Inductor's joint_custom_pre_pass sees it. `trace_s` is the time Dynamo and AOTAutograd took
to get there: a lower bound of the compile time, since Inductor's lowering and code generation come after it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.models import transformer
from ltx_inductor.config import Config
from ltx_inductor.rewrite.passes import rewrite_graph
from tests.harness import copy_graph, trace


class _Called(nn.Module):
    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self) -> Any:
        return self.model(**self.inputs)


def measure(blocks: int, repeats: int = 5) -> dict[str, Any]:
    """The pass on one captured graph: median of `repeats` runs, each on a fresh copy."""
    model, inputs = transformer(blocks)
    start = time.perf_counter()
    (traced,) = trace(_Called(model, inputs), ())
    trace_s = time.perf_counter() - start
    times, report = [], None
    for _ in range(repeats):
        graph = copy_graph(traced.gm).graph
        report = rewrite_graph(graph, Config(cpu=True))
        times.append(report.pass_ms)
    assert report is not None
    row = {
        "blocks": blocks,
        "nodes": report.nodes,
        "sides": len(report.sites),
        "refusals": len(report.refusals),
        "pass_ms": round(statistics.median(times), 1),
        "trace_s": round(trace_s, 1),
    }
    row["us_per_node"] = round(row["pass_ms"] * 1e3 / row["nodes"], 2)
    row["percent_of_trace"] = round(row["pass_ms"] / (trace_s * 10), 2)
    return row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds over nodes, with the line of equal cost per node."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    nodes, ms = [r["nodes"] for r in rows], [r["pass_ms"] for r in rows]
    axes.plot(nodes, ms, "o-", label="pass")
    axes.plot([0, nodes[-1]], [0, ms[-1]], ":", color="gray", label="linear")
    for r in rows:
        axes.annotate(f"{r['blocks']} blocks, {r['sides']} sides", (r["nodes"], r["pass_ms"]), fontsize=8, ha="right")
    axes.set(xlabel="nodes in the graph", ylabel="ms in the pass", title="LTX-2 transformer (diffusers), real captures")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4, 16, 48])
    parser.add_argument("--out", type=Path, default=None, help="also write the rows as JSON")
    args = parser.parse_args()
    rows = []
    for n in args.blocks:
        rows.append(measure(n))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        facts = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "command": "python benchmarks/pass_cost.py",
            "rows": rows,
        }
        args.out.write_text(json.dumps(facts, indent=2) + "\n")
        plot(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
