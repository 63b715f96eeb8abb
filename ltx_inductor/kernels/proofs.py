"""What was found when a kernel was tried, once per (kernel, compute capability, torch, CUDA); it is kept on disk.

The records lie beside the artefacts. gate.py and fna_gate.py say what is tried. A record is JSON-ready and has at least
the keys device, torch and refusal: None, or why the kernel is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ltx_inductor.kernels import store
from ltx_inductor.kernels.sources import source_digest

Record = dict[str, Any]
log = logging.getLogger("ltx_inductor")
_lock = threading.Lock()
_verdicts: dict[str, Record] = {}


def verdict(device: int, facts: Sequence[str], measure: Callable[[], Record]) -> Record:
    """The record of the kernel that `facts` stand for: this process's, the disk's, or what `measure` finds now.

    `measure` runs outside of any fake-tensor or tracing mode, with `device` current, and never inside CUDA-graph
    capture: no graph is compiled there.
    """
    key = _key(device, facts)
    with _lock:
        if key not in _verdicts:
            path = _folder() / f"{key}.proof"
            found = _read(path)
            if found is None:
                with real_tensors(), torch.cuda.device(device):
                    found = measure()
                try:
                    store.publish(path, json.dumps(found, indent=2).encode())
                except OSError as error:  # such as a cache that was filled elsewhere and is read-only here
                    log.warning("a proof is kept for this process only: %s cannot be written: %s", path, error)
            _verdicts[key] = found
        return _verdicts[key]


def kept(device: int, facts: Sequence[str]) -> Record | None:
    """The record on disk, if there is one."""
    return _read(_folder() / f"{_key(device, facts)}.proof")


def all_kept() -> list[Record]:
    """Every record on this machine's disk."""
    found = (_read(path) for path in sorted(_folder().glob("*.proof")))
    return [record for record in found if record is not None]


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Kernels are asked for while a graph is compiled, under a fake-tensor mode; in here tensors have memory."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
        yield


def _key(device: int, facts: Sequence[str]) -> str:
    properties = torch.cuda.get_device_properties(device)
    where = [source_digest(), torch.__version__, str(torch.version.cuda), f"{properties.major}.{properties.minor}"]
    return hashlib.sha256("\n".join([*where, *facts]).encode()).hexdigest()[:24]


def _folder() -> Path:
    return store.cache_root() / "proofs"


def _read(path: Path) -> Record | None:
    payload = store.read(path)
    return None if payload is None else dict(json.loads(payload))
