"""`python -m ltx_inductor doctor`: what is there, and what anything missing costs. Changes and builds nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ltx_inductor import __version__

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Finding:
    """One line of the table. `cost` is what one does without, "" if nothing."""

    name: str
    found: str
    cost: str = ""


def examine(console: Console) -> int:
    """Prints the table. 1 if the backend itself cannot work, else 0."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "found", "what that means", title=f"ltx_inductor {__version__}", title_justify="left")
    findings = list(find())
    for f in findings:
        mark = "[yellow]-[/yellow]" if f.cost else "[green]ok[/green]"
        table.add_row(f"{mark} {f.name}", escape(f.found), escape(f.cost))
    console.print(table)
    return int(any(f.name in ("torch", "backend") and f.cost for f in findings))


def find() -> Iterator[Finding]:
    """All findings, the most important first."""
    yield _torch()
    yield _backend()
    yield _gpu()
    yield from _build_tools()
    yield _package("tilelang", "no exact neighborhood attention: pip install 'ltx_inductor[tilelang]'")
    yield _package("natten", "models that call NATTEN run their own fallback: pip install 'ltx_inductor[natten]'")
    yield _package("diffusers", "no demo: pip install 'ltx_inductor[demo]'")


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    cost = "" if version >= (2, 11) else "ltx_inductor needs torch >= 2.11"
    return Finding("torch", f"{torch.__version__} ({built})", cost)


def _backend() -> Finding:
    names = {e.name for e in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if "ltx" in names:
        return Finding("backend", 'backend="ltx"')
    return Finding(
        "backend", "no entry point", "not installed: pip install it, or use backend=ltx_inductor.ltx_backend"
    )


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none", "graphs on the CPU are left alone; explain says what a GPU would get")
    found = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        found.append(f"{torch.cuda.get_device_name(i)} ({major}.{minor})")
    return Finding("GPU", ", ".join(found))


def _build_tools() -> Iterator[Finding]:
    from ltx_inductor.kernels.build import toolchain

    tools = toolchain()

    def tool(key: str) -> str:
        found = tools[key]
        return "none" if found is None else f"{found['version']} at {found['path']}"

    either = tools["nvcc"] is not None or tools["nvrtc"] is not None
    no_compiler = "kernels cannot be built here, only loaded from the kernel cache"
    yield Finding("nvcc", tool("nvcc"), "" if tools["nvcc"] else ("NVRTC is used" if either else no_compiler))
    yield Finding("NVRTC", tool("nvrtc"), "" if either else no_compiler + ": torch's CUDA wheels bring NVRTC")
    yield Finding("C compiler", tool("cc"), "" if tools["cc"] else no_compiler)
    missing = "no kernel can be launched: pip install 'apache-tvm-ffi>=0.1.11,<0.1.13'"
    yield Finding("tvm_ffi", tools["tvm_ffi"] or "none", "" if tools["tvm_ffi"] else missing)
    yield Finding("kernel cache", tools["cache"])


def _package(name: str, cost: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "none", cost)
    return Finding(name, importlib.metadata.version(name))
