"""A picture of benchmarks/results/fna-*.json: useful TFLOP/s of ours and of NATTEN, and the ratio.

python benchmarks/plot_fna.py benchmarks/results/fna-h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(path: Path) -> None:
    data = json.loads(path.read_text())
    rows = data["rows"]
    names = ["x".join(map(str, r["grid"])) + "\n" + "x".join(map(str, r["window"])) for r in rows]
    figure, axes = plt.subplots(figsize=(13, 5))
    for offset, (name, color) in enumerate((("ltx", "#1f77b4"), ("natten", "#bbbbbb"))):
        values = [r[name]["useful_tflops"] if name in r else 0.0 for r in rows]
        axes.bar([i + 0.4 * offset for i in range(len(rows))], values, 0.4, label=name, color=color)
    for i, row in enumerate(rows):
        if "times_natten" in row:
            height = row["ltx"]["useful_tflops"]
            axes.annotate(f"{row['times_natten']:.1f}x", (i, height), ha="center", va="bottom", fontsize=9)
    axes.set_xticks([i + 0.2 for i in range(len(rows))], names, fontsize=7)
    axes.set_ylabel("useful TFLOP/s (keys in the window only)")
    axes.set_title(f"3D neighborhood attention, {data['device']}, torch {data['torch']}, {data['date']}: grid, window")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
