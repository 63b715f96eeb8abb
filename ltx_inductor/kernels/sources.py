"""Where the CUDA sources are, and the digest that stands for them in every cache key."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

# Flags that shape the code, the same for nvcc and NVRTC. Exactness does not rest on them: csrc/ rounds explicitly.
DEVICE_FLAGS = ("-std=c++17",)
HOST_FLAGS = ("-std=c11", "-O2", "-shared", "-fPIC", "-fexceptions")


@functools.lru_cache(maxsize=1)
def csrc_dir() -> Path:
    """The folder of the CUDA sources: `ltx_inductor/csrc` in an installed wheel, `csrc` in a checkout.

    Raises FileNotFoundError, naming both places, if neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "csrc", package.parent / "csrc")
    for place in places:
        if (place / "rope.cu").is_file():
            return place
    raise FileNotFoundError(
        f"the kernel sources are missing: looked for rope.cu in {places[0]} and {places[1]}; reinstall ltx_inductor"
    )


@functools.lru_cache(maxsize=1)
def source_digest() -> str:
    """Hex digest of all kernel sources (names and contents) and compile flags.

    Depends on nothing else: no path, no device, no compiler. Two checkouts with the same sources agree.
    """
    root = csrc_dir()
    hasher = hashlib.sha256(repr((DEVICE_FLAGS, HOST_FLAGS)).encode())
    for file in sorted(p for p in root.rglob("*") if p.is_file() and p.suffix in {".cu", ".cuh", ".h", ".c"}):
        content = file.read_bytes()
        hasher.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode())
        hasher.update(content)
    return hasher.hexdigest()
