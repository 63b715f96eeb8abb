"""`python -m ltx_inductor doctor`: what is there, what is missing, what to do. Changes and builds nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ltx_inductor import __version__
from ltx_inductor.config import RULES

if TYPE_CHECKING:
    from rich.console import Console

_TVM_FFI = "pip install 'apache-tvm-ffi>=0.1.11,<0.1.13'"
_TILELANG = "pip install tilelang==0.1.15"
_NATTEN = "pip install natten==0.21.7"
_DEMO = "pip install diffusers==0.42.1 numpy"
# natten takes seconds to import and registers ops: it is asked in a process of its own
_ASK_NATTEN = "import natten; print(natten.HAS_LIBNATTEN)"


@dataclass(frozen=True)
class Finding:
    """One line. cost: what one does without, "" if nothing; do: what puts it right; vital: without it nothing works."""

    name: str
    found: str
    cost: str = ""
    do: str = ""
    vital: bool = False

    @property
    def ok(self) -> bool:
        return not self.cost


def examine(console: Console, as_json: bool = False) -> int:
    """Prints the findings. 1 if something vital is missing, such as every kernel for the GPU that is here; else 0."""
    findings = list(find())
    status = int(any(f.vital and not f.ok for f in findings))
    if as_json:
        lines = [{**asdict(f), "ok": f.ok} for f in findings]
        print(json.dumps({"version": __version__, "status": status, "findings": lines}, indent=2))
        return status
    from rich.padding import Padding
    from rich.text import Text

    console.print(f"ltx_inductor {__version__}", style="bold", markup=False, highlight=False)
    width = max(len(f.name) for f in findings)
    for f in findings:
        mark = ("ok      ", "green") if f.ok else ("missing ", "red" if f.vital else "yellow")
        console.print(Text.assemble(mark, (f.name.ljust(width), "bold"), f"  {f.found}"))
        for text in filter(None, (f.cost, f.do and f"do: {f.do}")):
            console.print(Padding(Text(text, "dim" if text is f.cost else ""), (0, 0, 0, width + 10)), soft_wrap=False)
    return status


def find() -> Iterator[Finding]:
    """All findings, the most important first."""
    yield _torch()
    yield _backend()
    yield _autoload()
    yield _gpu()
    yield from _rules()
    yield from _build_tools()
    yield _kernel_cache()
    yield _proofs()
    yield _package("tilelang", "no exact neighborhood attention", _TILELANG)
    yield from _natten()
    yield _package("diffusers", "no demo", _DEMO)


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    cost = "" if version >= (2, 11) else "ltx_inductor needs torch >= 2.11"
    return Finding("torch", f"{torch.__version__} ({built})", cost, "pip install 'torch>=2.11'" if cost else "", True)


def _backend() -> Finding:
    names = {e.name for e in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if "ltx" in names:
        return Finding("backend", 'backend="ltx"', vital=True)
    do = "pip install it, or use backend=ltx_inductor.ltx_backend"
    return Finding("backend", "no entry point", 'torch.compile does not know backend="ltx"', do, True)


def _autoload() -> Finding:
    """LTX_INDUCTOR_REGISTER, for programs that compile with stock Inductor."""
    from ltx_inductor.config import flag

    names = {e.value for e in importlib.metadata.entry_points(group="torch.backends")}
    try:
        wanted = flag(os.environ, "LTX_INDUCTOR_REGISTER")
    except ValueError as error:
        return Finding("no-code start", "off", str(error), "set LTX_INDUCTOR_REGISTER=1, or unset it")
    if not wanted:
        return Finding("no-code start", "off: LTX_INDUCTOR_REGISTER=1 turns it on")
    if "ltx_inductor_autoload:autoload" not in names:
        return Finding(
            "no-code start", "no entry point", "LTX_INDUCTOR_REGISTER has no effect", "install the package anew"
        )
    hooks = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if hooks != "1":  # as torch reads it
        cost = f"TORCH_DEVICE_BACKEND_AUTOLOAD={hooks} keeps torch from calling it"
        return Finding("no-code start", "switched off in torch", cost, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    return Finding("no-code start", 'on: backend="inductor" is rewritten too')


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        cost = "graphs on the CPU are left alone; explain says what a GPU would get"
        return Finding("GPU", "none", cost, "" if torch.version.cuda else "on a machine with one: torch with CUDA")
    found = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        found.append(f"{torch.cuda.get_device_name(i)} (sm_{major}{minor})")
    return Finding("GPU", ", ".join(found))


def _rules() -> Iterator[Finding]:
    """What runs here, rule by rule. Vital where there is a GPU and nothing runs on any."""
    from ltx_inductor import readiness
    from ltx_inductor.kernels.build import toolchain

    gpus, tools = readiness.gpus(), toolchain()
    reasons = {
        (rule, arch): readiness.unsupported(rule, i) or readiness.missing(rule, arch, tools)
        for rule in RULES
        for arch, (i, _) in gpus.items()
    }
    nothing = bool(reasons) and all(reasons.values())
    for rule in RULES:
        if not gpus:
            yield Finding(rule, "no GPU to run on", "its sites are left as they are here")
            continue
        names = {arch: f"sm_{arch[0]}{arch[1]}" for arch in gpus}
        runs = [name for arch, name in names.items() if not reasons[rule, arch]]
        costs = [f"{name}: {reasons[rule, arch]}" for arch, name in names.items() if reasons[rule, arch]]
        found = f"runs on {', '.join(runs)}" if runs else "runs on no GPU here"
        yield Finding(rule, found, "; ".join(costs), vital=nothing)


def _build_tools() -> Iterator[Finding]:
    from ltx_inductor.kernels.build import toolchain

    tools = toolchain()

    def tool(key: str) -> str:
        found = tools[key]
        return "none" if found is None else f"{found['version']} at {found['path']}"

    either = tools["nvcc"] is not None or tools["nvrtc"] is not None
    loaded_only = "kernels cannot be built here, only loaded from the kernel cache"
    if tools["nvcc"] is None:
        install = "install the CUDA toolkit, or set CUDA_HOME"
        yield Finding("nvcc", "none", "NVRTC is used" if either else loaded_only, "" if either else install)
    else:
        yield Finding("nvcc", tool("nvcc"))
    nvrtc = "" if either else "pip install nvidia-cuda-nvrtc (torch's CUDA wheels bring it)"
    yield Finding("NVRTC", tool("nvrtc"), "" if either else loaded_only, nvrtc)
    yield Finding(
        "C compiler", tool("cc"), "" if tools["cc"] else loaded_only, "" if tools["cc"] else "apt install gcc"
    )
    missing = "" if tools["tvm_ffi"] else "no kernel of rmsnorm_split_rope can be launched"
    yield Finding("tvm_ffi", tools["tvm_ffi"] or "none", missing, _TVM_FFI if missing else "")


def _kernel_cache() -> Finding:
    from ltx_inductor.kernels import source_digest, store

    root = store.cache_root()
    parent = next((p for p in (root, *root.parents) if p.exists()), Path("/"))
    kernels = [p for p in root.rglob("*") if p.suffix in (".cubin", ".so")] if root.is_dir() else []
    current = sum(source_digest()[:16] in p.parts for p in kernels)
    size = sum(p.stat().st_size for p in kernels)
    text = f"{root}: {len(kernels)} artefacts, {size / 1e6:.1f} MB, {current} of this version"
    if os.access(parent, os.W_OK):
        return Finding("kernel cache", text)
    return Finding("kernel cache", text, "the folder cannot be written", "set LTX_INDUCTOR_CACHE to one that can")


def _proofs() -> Finding:
    from ltx_inductor.kernels import proofs, repro

    here = [p for p in proofs.all_kept() if p.get("torch") == torch.__version__]
    good = Counter(f"{_proved(p)} on {p['device']}" for p in here)
    wrong = repro.all_kept()
    if wrong:
        text = f"{len(wrong)} wrong results of kernels are kept"
        return Finding("proofs", text, "these kernels were not used", f"python -m ltx_inductor replay {wrong[-1]}")
    text = ", ".join(f"{n} x {name}" for name, n in sorted(good.items()))
    return Finding("proofs", text or f"none yet with torch {torch.__version__}: made at the first compile on a GPU")


def _proved(record: dict[str, Any]) -> str:
    """What a record is about: the contract of a RoPE kernel, the window or schedule of neighborhood attention."""
    if "contract" in record:
        return str(record["contract"])
    if "window" in record:
        return f"window {'x'.join(map(str, record['window']))}"
    return f"the bits of NATTEN {record['natten']}" if record.get("natten") else "a kernel"


def _natten() -> Iterator[Finding]:
    cost = "models that call NATTEN run their own fallback"
    package = _package("natten", cost, _NATTEN)
    if not package.ok:
        yield package
        return
    try:
        run = subprocess.run([sys.executable, "-c", _ASK_NATTEN], capture_output=True, text=True, timeout=60)
        has, said = run.stdout.strip().endswith("True"), run.stderr if run.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        has, said = False, str(error)
    if said:
        yield replace(package, cost=f"it cannot be imported: {_error(said)}; {cost}", do=f"install it anew: {_NATTEN}")
        return
    yield package
    do = "install natten's wheel for your torch and CUDA, see natten.org/install"
    without = "NATTEN itself runs on FlexAttention; our kernels do not need libnatten"
    yield Finding("libnatten", "there" if has else "none", "" if has else without, "" if has else do)


def _package(name: str, cost: str, do: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "none", cost, do)
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:  # such as a source tree on PYTHONPATH
        return Finding(name, "there, of unknown version")


def _error(stderr: str) -> str:
    """The first line of the exception that a traceback ends with: behind the last line that is indented."""
    lines = stderr.strip().splitlines() or ["no message"]
    last = max((i for i, line in enumerate(lines) if line.startswith(" ")), default=-1)
    return lines[min(last + 1, len(lines) - 1)]
