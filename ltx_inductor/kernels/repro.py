"""A wrong result, kept: the arguments of the op in one file, and the command that runs them again.

<cache>/repros/<op>-<digest>.pt      {"op", "args", "torch", "cuda", "device"}, read with weights_only
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ltx_inductor.kernels import store

log = logging.getLogger("ltx_inductor")


def save(op: str, args: Sequence[Any]) -> str:
    """Keeps a call of `op`; says how to run it again, or why that cannot be done."""
    moved = tree_map_only(Tensor, _on_the_cpu, list(args))
    device = device_name(next(a for a in args if isinstance(a, Tensor)))
    data = {"op": op, "args": moved, "torch": str(torch.__version__), "cuda": str(torch.version.cuda), "device": device}
    facts = tree_map_only(Tensor, lambda t: (tuple(t.shape), t.stride(), t.dtype), moved)
    digest = hashlib.sha256(repr([op, facts, torch.__version__, device]).encode()).hexdigest()[:12]
    path = store.cache_root() / "repros" / f"{op}-{digest}.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(data, path)
    except (OSError, RuntimeError) as error:
        log.warning("the inputs of a wrong result could not be saved: %s", error)
        return f"its inputs could not be saved: {error}"
    return f"to run it again: python -m ltx_inductor replay {path}"


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
