"""A wrong result, kept: the arguments of the op in one file, and the command that runs them again.

<cache>/repros/<op>-<digest>.pt      {"op", "args", "path", "torch", "cuda", "device"}, read with weights_only
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ltx_inductor.kernels import store

log = logging.getLogger("ltx_inductor")


def save(op: str, args: Sequence[Any], path: int = 0) -> str:
    """Keeps a call of `op`; says how to run it again, or why that cannot be done.

    path: what was forced on the launch (kernels/rope.py), 0 for nothing.
    """
    moved = tree_map_only(Tensor, _on_the_cpu, list(args))
    device = device_name(next(a for a in args if isinstance(a, Tensor)))
    where = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "device": device}
    data = {"op": op, "args": moved, "path": path, **where}
    facts = tree_map_only(Tensor, lambda t: (tuple(t.shape), t.stride(), t.dtype), moved)
    digest = hashlib.sha256(repr([op, facts, path, torch.__version__, device]).encode()).hexdigest()[:12]
    file = _folder() / f"{op}-{digest}.pt"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(data, file)
    except (OSError, RuntimeError) as error:
        log.warning("the inputs of a wrong result could not be saved: %s", error)
        return f"its inputs could not be saved: {error}"
    return f"to run it again: python -m ltx_inductor replay {file}"


def all_kept() -> list[Path]:
    """The files on this machine's disk, the oldest first."""
    return sorted(_folder().glob("*.pt"), key=lambda file: file.stat().st_mtime)


def _folder() -> Path:
    return store.cache_root() / "repros"


def _on_the_cpu(t: Tensor) -> Tensor:
    """With its strides, also where elements share memory, but no more of the storage than it spans."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.detach().as_strided((span,), (1,)).cpu().clone().as_strided(t.shape, t.stride())


def device_name(t: Tensor) -> str:
    return torch.cuda.get_device_name(t.device) if t.is_cuda else str(t.device)


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ as integers; any NaN equals any NaN, since eager does not define its payload."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    same = (a.view(ints) == b.view(ints)) | (a.isnan() & b.isnan())
    return int((~same).sum())
