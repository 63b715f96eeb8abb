"""Plots of the tables that benchmarks/rope.py and host.py wrote: one file per table, beside the JSON.

python benchmarks/plot_rope.py benchmarks/results/rope-h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREY, BLUE, ORANGE, RED = "#9aa0a6", "#1f6fb4", "#e08214", "#b2182b"


def times(data: dict[str, Any], out: Path) -> None:
    """Microseconds per call of all contenders, contract bf16-chain, on a log scale."""
    suffix = " bf16-chain bf16"
    rows = {k.removesuffix(suffix): v for k, v in data["production"].items() if k.endswith(suffix)}
    kinds = [("eager", RED, "eager"), ("inductor", ORANGE, "stock Inductor"), ("ours", BLUE, "this kernel")]
    kinds.append(("floor_best", GREY, "byte floor"))
    figure, axis = plt.subplots(figsize=(9, 4))
    for i, (key, colour, label) in enumerate(kinds):
        values = [r.get(key, float("nan")) for r in rows.values()]
        axis.bar([x + (i - 1.5) * 0.2 for x in range(len(rows))], values, 0.2, color=colour, label=label)
    axis.set_xticks(range(len(rows)), list(rows))
    axis.set_yscale("log")
    axis.set_ylabel("us per call (cold L2)")
    axis.set_ylim(top=6 * max(r.get("eager", 1.0) for r in rows.values()))
    axis.legend(frameon=False, ncols=4, loc="upper center")
    _finish(figure, data, "QK RMSNorm + split RoPE, bf16-chain", out)


def fractions(rows: dict[str, Any], data: dict[str, Any], title: str, out: Path) -> None:
    """Byte floor over time, one bar per row; 1.0 is the floor of the same run."""
    rows = {k: v for k, v in rows.items() if "of_floor" in v}
    figure, axis = plt.subplots(figsize=(9, 0.22 * len(rows) + 1.2))
    names = list(rows)[::-1]
    axis.barh(range(len(rows)), [rows[n]["of_floor"] for n in names], color=BLUE)
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.axvline(1.0, color=GREY)
    axis.set_xlim(0.5, 1.1)
    axis.set_xlabel("byte floor of the same run / time")
    _finish(figure, data, title, out)


def host(data: dict[str, Any], out: Path) -> None:
    """Wall time of one call without CUDA graphs."""
    costs = data["host_us"]
    figure, axis = plt.subplots(figsize=(9, 4))
    names = list(costs)[::-1]
    bars = axis.barh(range(len(costs)), [costs[n] for n in names], color=BLUE)
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=7)
    axis.set_yticks(range(len(costs)), names, fontsize=7)
    axis.set_xscale("log")
    axis.set_xlabel("us per call on the host")
    _finish(figure, data, "Launch path without CUDA graphs (a126)", out)


def _finish(figure: Any, data: dict[str, Any], title: str, out: Path) -> None:
    env = data["environment"]
    figure.suptitle(f"{title}\n{env['gpu']}, torch {env['torch']}, {env['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    source = Path(sys.argv[1])
    data = json.loads(source.read_text())

    def out(table: str) -> Path:
        return source.with_name(f"{source.stem}-{table}.png")

    if "host_us" in data:
        host(data, source.with_suffix(".png"))
        return
    times(data, out("times"))
    fractions(data["production"], data, "Production grid, all contracts", out("production"))
    fractions(data["paths"], data, "Short sequences", out("paths"))
    fractions(data["other"], data, "Other shapes and strides", out("other"))


if __name__ == "__main__":
    main()
