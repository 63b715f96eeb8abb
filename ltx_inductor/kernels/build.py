"""From a kernel configuration to a finished artefact: look it up, or compile it and publish it (see store.py).

Two kinds of artefact. A cubin holds the kernels of one configuration for one GPU architecture: nvcc makes it,
or NVRTC, which pip's torch brings along. The launcher is the C library that calls them: one per machine type and
tvm-ffi version, made by any C compiler. Where a compiler is present, an artefact must come from that version of
it; where none is, any finished artefact of the same sources will do: a filled cache needs no compiler at all.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ltx_inductor.kernels import compilers, store
from ltx_inductor.kernels.compilers import BuildError, Compiler
from ltx_inductor.kernels.sources import DEVICE_FLAGS, HOST_FLAGS, csrc_dir, source_digest

__all__ = ["BuildError", "MissingToolError", "arch_number", "cubin", "launcher", "prebuild", "toolchain"]

_NO_CUDA_COMPILER = (
    "no CUDA compiler was found: neither nvcc (CUDA_HOME, PATH, /usr/local/cuda) nor NVRTC; install the CUDA "
    "toolkit, or NVRTC with `pip install nvidia-cuda-nvrtc`, or fill the cache elsewhere with "
    "`python -m ltx_inductor build`"
)
_NO_C_COMPILER = (
    "no C compiler was found (CC, cc, gcc, clang); install one (for example `apt install gcc`), or fill the cache "
    "elsewhere with `python -m ltx_inductor build`"
)


class MissingToolError(RuntimeError):
    """Nothing is in the cache and no compiler is there to build it; the message says what to install."""


def arch_number(arch: str | tuple[int, int]) -> str:
    """ "90" for (9, 0), "9.0", "9.0a", "90a", "sm_90" or "sm_90a".

    The suffix is dropped: the kernels use no instruction that exists only on one member of a family.
    Raises ValueError for anything else, or below sm_80.
    """
    if isinstance(arch, tuple):
        number = f"{arch[0]}{arch[1]}"
    else:
        found = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)[af]?", arch.strip())
        number = "".join(found.groups()) if found else ""
    if not number or int(number) < 80:
        raise ValueError(f"arch {arch!r}: expected a compute capability from 8.0 on, such as '9.0' or 'sm_90'")
    return number


def cubin(name: str, arch: str, flags: Sequence[str], source: str = "rope.cu", *, build: bool = True) -> bytes:
    """The kernels of one configuration. `name` says what `flags` (-D...) say; `arch` is a number such as "90".

    With build=False only the cache is asked. Raises MissingToolError or BuildError.
    """
    folder = store.cache_root() / source_digest()[:16]
    stem = f"{name}-sm_{arch}"
    makers: list[tuple[Compiler, Callable[..., bytes]]] = []
    for find, make in (
        (compilers.find_nvcc, compilers.compile_nvcc),
        (compilers.find_nvrtc, compilers.compile_nvrtc),
    ):
        found = find()
        if found is not None:
            makers.append((found, make))
    failure: BuildError | None = None
    for compiler, make in makers:
        path = folder / f"{stem}.{compiler.tag}.cubin"
        if not build:
            payload = store.read(path)
            if payload is not None:
                return payload
            continue
        try:
            options = [*DEVICE_FLAGS, *flags]
            return store.read_or_build(path, functools.partial(make, compiler, csrc_dir() / source, arch, options))
        except BuildError as error:  # e.g. nvcc without a host compiler: NVRTC needs none
            failure = failure or error
    if failure is not None:
        raise failure
    if not makers:
        finished = _any_finished(folder, f"{stem}.*.cubin")
        if finished is not None:
            return finished[1]
    raise MissingToolError(_NO_CUDA_COMPILER if not makers else f"{stem} is not in the cache {folder}")


def launcher() -> Path:
    """The launcher library, ready to be loaded. Raises MissingToolError, BuildError, or OSError (nowhere to put it)."""
    import tvm_ffi
    from tvm_ffi import libinfo

    folder = store.cache_root() / source_digest()[:16]
    stem = f"launcher-{platform.machine()}-tvmffi-{tvm_ffi.__version__}"
    cc = compilers.find_cc()
    if cc is None:
        finished = _any_finished(folder, f"{stem}.*.so")
        if finished is None:
            raise MissingToolError(_NO_C_COMPILER)
        return finished[0]
    path = folder / f"{stem}.{cc.tag}.so"
    library = Path(libinfo.find_libtvm_ffi())
    includes = {libinfo.find_include_path(), libinfo.find_dlpack_include_path(), str(csrc_dir())}
    flags = [*HOST_FLAGS, *(f"-I{i}" for i in sorted(includes)), f"-L{library.parent}", "-ltvm_ffi", "-ldl"]
    store.read_or_build(path, functools.partial(compilers.compile_c, cc, csrc_dir() / "launcher.c", flags))
    return store.as_file(path)


def _any_finished(folder: Path, pattern: str) -> tuple[Path, bytes] | None:
    for path in sorted(folder.glob(pattern)):
        payload = store.read(path)
        if payload is not None:
            return path, payload
    return None


def prebuild(archs: list[str]) -> list[tuple[str, str]]:
    """Builds the launcher and the production kernels for each arch, e.g. ["9.0a", "10.0"].

    Those are PRODUCTION of rope_specs, rope_axial and fna. Returns (arch, folder of the artefacts) per arch. Needs no
    GPU. Raises ValueError for an arch that is none, MissingToolError or BuildError where it cannot be built, OSError
    where the cache cannot be written.
    """
    from ltx_inductor.kernels import fna, rope_axial, rope_specs

    numbers = [arch_number(a) for a in archs]
    folder = launcher().parent
    for number in numbers:
        for spec in rope_specs.PRODUCTION:
            cubin(spec.name, number, spec.flags)
        for axial in rope_axial.PRODUCTION:
            rope_axial.cubin(axial, number)
        if number == arch_number(fna.ARCH):
            for window in fna.PRODUCTION:
                fna.cubin(window)
    if store.unpublished():
        raise OSError(f"the kernel cache {store.cache_root()} cannot be written: nothing was kept of what was built")
    return [(arch, str(folder)) for arch in archs]


def can_build() -> bool:
    """Is everything here that building a kernel takes?"""
    cuda = compilers.find_nvcc() or compilers.find_nvrtc()
    return cuda is not None and compilers.find_cc() is not None and importlib.util.find_spec("tvm_ffi") is not None


def toolchain() -> dict[str, Any]:
    """What a build would use.

    Keys: nvcc, nvrtc, cc (each {"path", "version"} or None), tvm_ffi (version or None), cache (folder).
    """
    found: dict[str, Any] = {}
    for name, find in (
        ("nvcc", compilers.find_nvcc),
        ("nvrtc", compilers.find_nvrtc),
        ("cc", compilers.find_cc),
    ):
        compiler = find()
        found[name] = None if compiler is None else {"path": compiler.path, "version": compiler.version}
    try:
        import tvm_ffi

        found["tvm_ffi"] = str(tvm_ffi.__version__)
    except ImportError:
        found["tvm_ffi"] = None
    found["cache"] = str(store.cache_root())
    return found
