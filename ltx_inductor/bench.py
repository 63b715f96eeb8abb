"""`python -m ltx_inductor bench`: the benchmark tables again, on this machine, with ratios, JSON and plots.

The scripts are those of the source tree (`benchmarks/`), which a wheel does not carry: beside the package, or in the
current folder. They run one after the other, each in a process of its own, and print a line per row: that is what moves
the progress bar.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ltx_inductor import readiness

ROOT = Path(__file__).resolve().parents[1]
_ROPE, _AXIAL, _NEIGHBORHOOD = "rmsnorm_split_rope", "rmsnorm_axial_rope", "neighborhood_attention"
_ASK_NATTEN = "import natten, sys; sys.exit(not natten.HAS_LIBNATTEN)"


@dataclass(frozen=True)
class Script:
    """One benchmark. rows: lines it prints, which is how far it is.

    rule: whose kernels it measures, so that it needs a GPU that they run on; "" for none. natten: it needs NATTEN with
    its binary.
    """

    name: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...]
    rows: int
    quick_rows: int
    rule: str = ""
    natten: bool = False


_TILE = ("--swiglu-tile", "262144")  # of diffusers' 16,384, compiling takes minutes
SCRIPTS = {
    s.name: s
    for s in (
        Script("pass_cost", (), ("--blocks", "1"), 4, 1),
        Script("rope", (), ("--parts", "production", "--rows", "v1536", "a126"), 71, 10, _ROPE),
        Script("axial", (), ("--rounds", "5"), 7, 7, _AXIAL),
        Script("host", (), (), 18, 18, _ROPE),
        Script("fna", (), ("--budget-ms", "100"), 24, 24, _NEIGHBORHOOD),
        Script("fna_exact", (), ("--budget-ms", "100"), 8, 8, _NEIGHBORHOOD, natten=True),
        Script("block", (), ("--tokens", "8160", "--quads", "8", "--profiles", "4"), 2, 1, _ROPE),
        Script("decoder_block", _TILE, (*_TILE, "--grids", "33,64,96"), 8, 4, _NEIGHBORHOOD, natten=True),
        Script("decoder", (), ("--videos", "33,256,384"), 12, 4, _NEIGHBORHOOD, natten=True),
    )
}


class BenchError(RuntimeError):
    """Something the user can put right: no source tree, no such table, a script that ended with an error."""


def run(console: Console, names: Sequence[str], folder: Path, quick: bool = False) -> dict[str, Any]:
    """Runs the named scripts (none: all), also where one fails.

    Returns {"measured": {name: data}, "skipped": {name: why}, "failed": {name: why}, "plots": [...]}; the JSON files
    and plots are in `folder`. Raises BenchError for a name that is none, and without a source tree.
    """
    unknown = [n for n in names if n not in SCRIPTS]
    if unknown:
        raise BenchError(f"no benchmark {unknown[0]!r}; there are: {', '.join(SCRIPTS)}")
    scripts = _scripts()
    found: dict[str, Any] = {"measured": {}, "skipped": {}, "failed": {}, "plots": []}
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or SCRIPTS:
        why = _not_here(SCRIPTS[name])
        if why:
            found["skipped"][name] = why
            continue
        try:
            found["measured"][name] = _measure(console, SCRIPTS[name], scripts, folder, quick)
            _plot(console, name, found["measured"][name], scripts, folder, quick)
        except BenchError as error:
            found["failed"][name] = str(error)
    found["plots"] = sorted(p.name for p in folder.glob("*.png"))
    return found


def _scripts() -> Path:
    folders = [root / "benchmarks" for root in (ROOT, Path.cwd())]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise BenchError("the benchmarks are part of the source tree: run this in a clone of the repository")


def _not_here(script: Script) -> str:
    """Why the script would measure nothing on this machine; "" if it would."""
    if not script.rule:
        return ""
    if not torch.cuda.is_available():
        return "no GPU here: nothing was measured"
    why = readiness.unsupported(script.rule, torch.cuda.current_device())
    if (
        not why
        and script.natten
        and subprocess.run([sys.executable, "-c", _ASK_NATTEN], capture_output=True).returncode
    ):
        why = "NATTEN is not here with its binary, which this compares with (benchmarks/natten_hopper builds it)"
    return why


def _measure(console: Console, script: Script, scripts: Path, folder: Path, quick: bool) -> dict[str, Any]:
    out = folder / f"{script.name}.json"
    arguments = script.quick if quick else script.arguments
    command = [sys.executable, str(scripts / f"{script.name}.py"), *arguments, "--out", str(out)]
    _follow(console, script.name, command, script.quick_rows if quick else script.rows)
    data: dict[str, Any] = json.loads(out.read_text())
    return data


def _plot(console: Console, name: str, data: dict[str, Any], scripts: Path, folder: Path, quick: bool) -> None:
    plot = "plot_rope.py" if name in ("rope", "host") else ""
    if name == "fna" and all("natten" in row for row in data["rows"]):
        plot = "plot_fna.py"
    if plot and not quick:
        _follow(console, "plots", [sys.executable, str(scripts / plot), str(folder / f"{name}.json")], 1)


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
    """The measured rows, with the ratio to stock Inductor or NATTEN, and to the byte floor."""
    data = found["measured"]
    return [make(data[name]) for name, make in _TABLES.items() if name in data]


def _rope(data: dict[str, Any]) -> Table:
    table = Table("shape, contract, tables", "µs", "floor / ours", "Inductor / ours", title="rope: µs per call")
    for row, r in data.get("production", {}).items():
        stock = f"{r['inductor'] / r['ours']:.2f}" if "inductor" in r else ""
        table.add_row(row, f"{r['ours']:.2f}", f"{r['of_floor']:.3f}" if "of_floor" in r else "", stock)
    return table


def _axial(data: dict[str, Any]) -> Table:
    columns = ("grid", "heads", "µs", "Inductor µs", "floor / op", "Inductor / ours")
    table = Table(*columns, title="axial: norm, scale and 3-axis RoPE of q and k, µs of the GPU")
    for r in data["rows"]:
        us = (f"{r['ms'][name] * 1e3:.1f}" for name in ("ltx", "stock"))
        table.add_row(_by(r["grid"]), str(r["heads"]), *us, f"{r['of_floor']:.3f}", f"{r['times_stock']:.2f}")
    return table


def _host(data: dict[str, Any]) -> Table:
    table = Table("call", "µs", title="host: µs of wall time per call, without CUDA graphs")
    for call, us in data["host_us"].items():
        table.add_row(call, f"{us:.2f}")
    return table


def _attention(data: dict[str, Any], schedule: str, title: str) -> Table:
    table = Table("grid", "window", "heads", "ms", "useful TFLOP/s", "NATTEN ms", "NATTEN / ours", title=title)
    for r in data["rows"]:
        natten = (f"{r['natten']['ms']:.2f}", f"{r['times_natten']:.2f}") if "natten" in r else ("", "")
        took, flops = f"{r[schedule]['ms']:.3f}", f"{r[schedule]['useful_tflops']:.0f}"
        table.add_row(_by(r["grid"]), _by(r["window"]), str(r["heads"]), took, flops, *natten)
    return table


def _fna(data: dict[str, Any]) -> Table:
    return _attention(data, "ltx", "fna: neighborhood attention (NATTEN where it has its binary)")


def _fna_exact(data: dict[str, Any]) -> Table:
    return _attention(data, "exact", "fna_exact: neighborhood attention with NATTEN's bits")


def _block(data: dict[str, Any]) -> Table:
    columns = ("tokens", "eager ms", "Inductor ms", "ours ms", "Inductor / ours", "saved / predicted (kernels)")
    table = Table(*columns, title="block: the LTX-2 block")
    for r in data["rows"]:
        ms = [r["block"][f"{k}_ms"] for k in ("eager", "inductor", "ltx")]
        predicted = f"{r['kernels_saved_over_predicted']:.2f}"
        table.add_row(str(r["tokens"]), *(f"{m:.2f}" for m in ms), f"{ms[1] / ms[2]:.3f}", predicted)
    return table


def _decoder_block(data: dict[str, Any]) -> Table:
    table = Table("grid", "Inductor ms", "ours ms", "Inductor / ours", title="decoder_block: a block of stage 5")
    for r in data["rows"]:
        ms = [r["ms"][k] for k in ("stock", "ltx")]
        table.add_row(_by(r["grid"]), *(f"{m:.2f}" for m in ms), f"{ms[0] / ms[1]:.2f}")
    return table


def _decoder(data: dict[str, Any]) -> Table:
    columns = ("video", "what", "eager ms", "Inductor ms", "ours ms", "Inductor / ours", "samples")
    table = Table(*columns, title=f"decoder: the LTX-2.5 decoder, tiles of {data['swiglu_tile']:,} tokens in the MLP")
    for r in data["rows"]:
        for what in ("stage_5", "decode"):
            ms = r.get(what, {}).get("ms", {})
            if ms:
                took = (f"{ms[k]:.1f}" if k in ms else "out of memory" for k in ("eager", "stock", "ltx"))
                ratio = f"{ms['stock'] / ms['ltx']:.2f}" if {"stock", "ltx"} <= set(ms) else ""
                video, samples = _by(r[k] for k in ("frames", "height", "width")), str(min(r[what]["samples"].values()))
                table.add_row(video, what, *took, ratio, samples)
    return table


def _pass_cost(data: dict[str, Any]) -> Table:
    table = Table("blocks", "nodes", "sides", "pass ms", "% of tracing", title="pass_cost: the pass itself")
    for r in data["rows"]:
        table.add_row(*(str(r[k]) for k in ("blocks", "nodes", "sides", "pass_ms", "percent_of_trace")))
    return table


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


_TABLES = {
    "rope": _rope, "axial": _axial, "host": _host, "fna": _fna, "fna_exact": _fna_exact, "block": _block,
    "decoder_block": _decoder_block, "decoder": _decoder, "pass_cost": _pass_cost,
}  # fmt: skip
