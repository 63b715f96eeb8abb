"""`python -m ltx_inductor bench`: the benchmark tables again, on this machine, with ratios, JSON and plots.

The scripts are those of the source tree (`benchmarks/`), which a wheel does not carry; they run one after the other,
each in a process of its own, and print a line per row: that is what moves the progress bar.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Script:
    """One benchmark. rows: lines it prints, which is how far it is; gpu: it measures nothing without one."""

    name: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...]
    rows: int
    quick_rows: int
    gpu: bool


SCRIPTS = {
    s.name: s
    for s in (
        Script("pass_cost", (), ("--blocks", "1"), 4, 1, False),
        Script("rope", (), ("--parts", "production", "--rows", "v1536", "a126"), 71, 10, True),
        Script("host", (), (), 18, 18, True),
        Script("fna", (), ("--budget-ms", "100"), 24, 24, True),
        Script("block", (), ("--tokens", "8160", "--quads", "8", "--profiles", "4"), 2, 1, True),
    )
}


class BenchError(RuntimeError):
    """Something the user can put right: no source tree, no such table, a script that ended with an error."""


def run(console: Console, names: Sequence[str], folder: Path, quick: bool = False) -> dict[str, Any]:
    """Runs the named scripts (none: all); returns {"measured": {name: data}, "skipped": {name: why}, "plots": [...]}.

    Raises BenchError. The JSON files and plots are in `folder`.
    """
    scripts = ROOT / "benchmarks"
    if not scripts.is_dir():
        raise BenchError("the benchmarks are part of the source tree: run this in a clone of the repository")
    unknown = [n for n in names if n not in SCRIPTS]
    if unknown:
        raise BenchError(f"no benchmark {unknown[0]!r}; there are: {', '.join(SCRIPTS)}")
    found: dict[str, Any] = {"measured": {}, "skipped": {}, "plots": []}
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or SCRIPTS:
        script = SCRIPTS[name]
        if script.gpu and not torch.cuda.is_available():
            found["skipped"][name] = "no GPU here: nothing was measured"
            continue
        out = folder / f"{name}.json"
        arguments = script.quick if quick else script.arguments
        command = [sys.executable, str(scripts / f"{name}.py"), *arguments, "--out", str(out)]
        _follow(console, name, command, script.quick_rows if quick else script.rows)
        found["measured"][name] = json.loads(out.read_text())
        plot = "plot_rope.py" if name in ("rope", "host") else ""
        if name == "fna" and all("natten" in row for row in found["measured"][name]["rows"]):
            plot = "plot_fna.py"
        if plot and not quick:
            _follow(console, "plots", [sys.executable, str(scripts / plot), str(out)], 1)
    found["plots"] = sorted(p.name for p in folder.glob("*.png"))
    return found


def _follow(console: Console, name: str, command: Sequence[str], rows: int) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    said: list[str] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=rows)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout or ():
                said.append(line)
                if line[:1] not in (" ", "\t", "\n"):
                    progress.advance(task)
        progress.update(task, completed=rows)
    if process.returncode:
        raise BenchError(f"{name} ended with status {process.returncode}:\n{''.join(said[-20:])}")


def tables(found: dict[str, Any]) -> list[Table]:
    """The measured rows, with the ratio to stock Inductor and to the byte floor."""
    made = []
    data = found["measured"]
    if "rope" in data:
        table = Table("shape, contract, tables", "µs", "floor / ours", "Inductor / ours", title="rope: µs per call")
        for row, r in data["rope"].get("production", {}).items():
            stock = f"{r['inductor'] / r['ours']:.2f}" if "inductor" in r else ""
            table.add_row(row, f"{r['ours']:.2f}", f"{r['of_floor']:.3f}" if "of_floor" in r else "", stock)
        made.append(table)
    if "host" in data:
        table = Table("call", "µs", title="host: µs of wall time per call, without CUDA graphs")
        for call, us in data["host"]["host_us"].items():
            table.add_row(call, f"{us:.2f}")
        made.append(table)
    if "fna" in data:
        heads = ("grid", "window", "heads", "ms", "useful TFLOP/s", "NATTEN ms", "NATTEN / ours")
        table = Table(*heads, title="fna: neighborhood attention (NATTEN where it has its binary)")
        for r in data["fna"]["rows"]:
            size, window = ("x".join(map(str, r[k])) for k in ("grid", "window"))
            natten = (f"{r['natten']['ms']:.2f}", f"{r['times_natten']:.2f}") if "natten" in r else ("", "")
            took, flops = f"{r['ltx']['ms']:.3f}", f"{r['ltx']['useful_tflops']:.0f}"
            table.add_row(size, window, str(r["heads"]), took, flops, *natten)
        made.append(table)
    if "block" in data:
        columns = ("tokens", "eager ms", "Inductor ms", "ours ms", "Inductor / ours", "saved / predicted (kernels)")
        table = Table(*columns, title="block: the LTX-2 block")
        for r in data["block"]["rows"]:
            ms = [r["block"][f"{k}_ms"] for k in ("eager", "inductor", "ltx")]
            predicted = f"{r['kernels_saved_over_predicted']:.2f}"
            table.add_row(str(r["tokens"]), *(f"{m:.2f}" for m in ms), f"{ms[1] / ms[2]:.3f}", predicted)
        made.append(table)
    if "pass_cost" in data:
        table = Table("blocks", "nodes", "sides", "pass ms", "% of tracing", title="pass_cost: the pass itself")
        for r in data["pass_cost"]["rows"]:
            table.add_row(*(str(r[k]) for k in ("blocks", "nodes", "sides", "pass_ms", "percent_of_trace")))
        made.append(table)
    return made
