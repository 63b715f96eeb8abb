"""What the result of the pass depends on, as one digest: the id under which Inductor's caches keep our graphs.

A change of any of these has to miss: the sources of the rewrite, of the ops and of the contracts; the kernel sources;
the op schemas; the options that change a graph; our version and torch's. Nothing here may depend on the rank, the
device index, a path or the environment, or else two ranks (or two checkouts) of one job would never share an entry.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import torch

import ltx_inductor.ops  # noqa: F401  (registers the ops whose schemas are part of the id)
from ltx_inductor import __version__
from ltx_inductor.config import Config
from ltx_inductor.kernels import counts, profit, proofs

_PACKAGE = Path(__file__).resolve().parent
# Every source that has a say in what the pass writes into a graph.
_SOURCES = ("rewrite", "ops", "kernels", "config.py", "contract.py", "joint_pass.py", "kernel_needs.py", "lowering.py")
_CSRC = (_PACKAGE / "csrc", _PACKAGE.parent / "csrc")  # in a wheel, in a checkout


def cache_id(config: Config) -> str:
    """Hex digest for `config`. `dump` is left out: it names a folder, and a graph does not depend on it. Of `profit`
    the table counts, not its path.

    `strict` is in, although it changes no graph: a strict compile must not be answered by an entry that was made
    without the check.
    """
    parts = [
        f"ltx_inductor {__version__}",
        f"torch {torch.__version__}",
        *(f"{f.name} {getattr(config, f.name)}" for f in fields(config) if f.name not in ("dump", "profit")),
        f"profit {profit.digest(config.profit)}",
        source_digest(),
        kernel_digest(),
        f"kernels can be built: {_can_build()}",
        f"kernels that have failed: {proofs.failures()}",
        f"exact kernels can be built: {config.exact and importlib.util.find_spec('tilelang') is not None}",
        *_schemas(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def source_digest() -> str:
    """Digest of the Python sources that decide what a graph looks like after the pass."""
    files: list[Path] = []
    for name in _SOURCES:
        path = _PACKAGE / name
        files += path.rglob("*.py") if path.is_dir() else [path]
    return digest_of_files(files, _PACKAGE)


@functools.lru_cache(maxsize=1)
def kernel_digest() -> str:
    """Digest of the kernel sources, as `ltx_inductor.kernels` defines it, or of everything in csrc/."""
    from ltx_inductor import kernels

    own = getattr(kernels, "source_digest", None)
    if own is not None:
        return str(own())
    folder = next((f for f in _CSRC if f.is_dir()), None)
    return digest_of_files(folder.rglob("*"), folder) if folder else "no kernel sources"


def digest_of_files(files: Iterable[Path], root: Path) -> str:
    """Digest of names relative to `root` and contents, in name order; folders and compiled files do not count."""
    hasher = hashlib.sha256()
    for path in sorted(f for f in files if f.is_file() and "__pycache__" not in f.parts):
        content = path.read_bytes()
        hasher.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        hasher.update(content)
    return hasher.hexdigest()


def _can_build() -> bool:
    """Part of the id: a graph that was left unfused for want of a compiler is compiled anew when there is one."""
    if torch.version.cuda is None:
        return False
    from ltx_inductor.kernels.build import can_build

    return can_build()


def _schemas() -> list[str]:
    """Schemas of all ops of our namespace that the rewrite can put into a graph."""
    return [str(getattr(torch.ops.ltx_inductor, name).default._schema) for name in counts.OPS]
