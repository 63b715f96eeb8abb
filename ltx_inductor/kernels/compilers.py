"""The compilers this machine has: nvcc, NVRTC from the CUDA wheels, and a C compiler for the launcher.

All of them are optional. A compiler is found once per process and never raises for being absent.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class BuildError(RuntimeError):
    """A compiler refused the sources; the message holds its output."""


@dataclass(frozen=True)
class Compiler:
    """A compiler that was found. `path` is never part of a cache key, `tag` always is."""

    kind: str  # nvcc, nvrtc or cc
    path: str
    version: str

    @property
    def tag(self) -> str:
        return f"{self.kind}-{self.version}"


@functools.lru_cache(maxsize=1)
def find_nvcc() -> Compiler | None:
    """nvcc of CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda or the nvidia wheels, in this order."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    paths = [str(Path(home, "bin", "nvcc")) for home in homes if home]
    paths += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    paths += [str(f) for root in _nvidia_wheels() for f in sorted(root.glob("*/bin/nvcc"))]
    for path in paths:
        if not path or not os.access(path, os.X_OK):
            continue
        try:
            text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
        if found:
            return Compiler("nvcc", path, found.group(1))
    return None


@functools.lru_cache(maxsize=1)
def find_nvrtc() -> Compiler | None:
    """libnvrtc of the nvidia wheels (pip's torch brings it), or of the loader's search path."""
    libraries = [str(f) for root in _nvidia_wheels() for f in sorted(root.glob("*/lib/libnvrtc.so.*"))]
    libraries = [f for f in libraries if ".alt." not in f]
    for path in [*libraries, "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            major, minor = ctypes.c_int(), ctypes.c_int()
            if ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
                return Compiler("nvrtc", path, f"{major.value}.{minor.value}")
        except (OSError, AttributeError):
            continue
    return None


@functools.lru_cache(maxsize=1)
def find_cc() -> Compiler | None:
    """The C compiler: CC, cc, gcc or clang. torch.compile needs one on CUDA too (Triton's launchers)."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        try:
            text = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if text.strip():
            return Compiler("cc", path, text.strip().splitlines()[0])
    return None


def _nvidia_wheels() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def compile_nvcc(nvcc: Compiler, source: Path, arch: str, flags: Sequence[str]) -> bytes:
    """The cubin of `source` for an arch such as "90". Raises BuildError with nvcc's output."""
    with tempfile.TemporaryDirectory(prefix="ltx-nvcc-") as folder:
        out = Path(folder, "kernel.cubin")
        _run([nvcc.path, "-cubin", f"-arch=sm_{arch}", "-O3", *flags, str(source), "-o", str(out)])
        return out.read_bytes()


def compile_nvrtc(nvrtc: Compiler, source: Path, arch: str, flags: Sequence[str]) -> bytes:
    """The same through NVRTC; the headers are read from the folder of `source`."""
    lib = ctypes.CDLL(nvrtc.path)
    program = ctypes.c_void_p()
    _check(
        lib,
        lib.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None),
    )
    try:
        options = [f"--gpu-architecture=sm_{arch}", f"-I{source.parent}", *flags]
        encoded = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        if lib.nvrtcCompileProgram(program, len(options), encoded) != 0:
            log = _fetch(lib, program, "ProgramLog").decode()
            raise BuildError(f"NVRTC could not compile {source.name} for sm_{arch}:\n{log}")
        return _fetch(lib, program, "CUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(lib, getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, getattr(lib, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(lib: ctypes.CDLL, code: int) -> None:
    if code != 0:
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BuildError(f"NVRTC failed: {lib.nvrtcGetErrorString(code).decode()}")


def compile_c(cc: Compiler, source: Path, flags: Sequence[str]) -> bytes:
    """The shared library of a C source. Raises BuildError with the compiler's output."""
    with tempfile.TemporaryDirectory(prefix="ltx-cc-") as folder:
        out = Path(folder, "library.so")
        _run([cc.path, str(source), "-o", str(out), *flags])
        return out.read_bytes()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\nfailed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
