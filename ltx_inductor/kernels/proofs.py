"""What was found when a kernel was tried, once per (artefact, compute capability, torch, CUDA).

gate.py and fna_gate.py say what is tried. A record is JSON-ready and has at least the keys device, torch and refusal:
None, or why the kernel is not used. Kernels that passed are kept on disk, beside the artefacts; one that failed is
remembered by this process only, so that whatever was at fault (a driver, a card) can be mended.
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

from ltx_inductor.kernels import counts, store
from ltx_inductor.kernels.sources import source_digest

Record = dict[str, Any]
log = logging.getLogger("ltx_inductor")
_lock = threading.Lock()
_verdicts: dict[str, Record] = {}
_this_thread = threading.local()


class PostponedError(RuntimeError):
    """A kernel could not be tried now; the message says why. Nothing is known of it."""


def verdict(device: int, facts: Sequence[str], measure: Callable[[], Record]) -> Record:
    """The record of the kernel that `facts` stand for: this process's, the disk's, or what `measure` finds now.

    `measure` runs outside of any fake-tensor or tracing mode, with `device` current, and may launch kernels that nobody
    else may yet (`measuring`). Raises PostponedError while a CUDA graph is being captured, and what `measure` raises.
    """
    key = _key(device, facts)
    with _lock:
        if key not in _verdicts:
            path = _folder() / f"{key}.proof"
            found = _read(path)
            if found is None:
                with real_tensors(), torch.cuda.device(device):
                    if torch.cuda.is_current_stream_capturing():
                        raise PostponedError(
                            "a CUDA graph is being captured, in which no kernel can be compared with eager before its "
                            "first use; compile (or call the compiled model once) before the capture"
                        )
                    found = _measured(measure)
                if found["refusal"] is None:
                    _publish(path, found)
            _verdicts[key] = found
        return _verdicts[key]


def settle(
    op: str,
    kernel: str,
    ask: Callable[[], Record],
    accept: Callable[[], None],
    turn_off: Callable[[str], None],
) -> str | None:
    """The refusal in the record that `ask` gives, or None; and what follows from it for the kernel, which is loaded.

    After None it is accepted. One that failed, or that an error kept from being compared, is turned off in this
    process. While a CUDA graph is being captured, nothing is known: it is neither. op: whose comparison it is, for the
    counters; kernel: "the kernel for ...", for sentences.
    """
    try:
        sentence: str | None = ask()["refusal"]
    except PostponedError as error:
        counts.postponed(op)
        return f"{kernel} is not proved: {error}"
    except Exception as error:  # out of memory, say: the user's compile goes on without the kernel
        log.error("%s could not be tried", kernel, exc_info=error)
        sentence = f"{kernel} could not be tried ({type(error).__name__}: {error}), so it is not used in this process"
    if sentence is None:
        accept()
    else:
        turn_off(sentence)
        _note_failure(kernel, sentence)
    return sentence


def _note_failure(kernel: str, sentence: str) -> None:
    """Leaves a trace, for the id of Inductor's caches: another process must not be answered by the graph that this one
    leaves unfused, but try the kernel itself."""
    where = f"{kernel}\n{torch.__version__}\n{torch.version.cuda}"
    path = _folder() / f"{hashlib.sha256(where.encode()).hexdigest()[:24]}.failed"
    with contextlib.suppress(OSError):  # then nobody shares this cache
        store.publish(path, json.dumps({"kernel": kernel, "refusal": sentence}, indent=2).encode())


def failures() -> list[str]:
    """Names of the kernels that have failed on this machine, as far as they tell one from another."""
    return sorted(path.name for path in _folder().glob("*.failed"))


def _measured(measure: Callable[[], Record]) -> Record:
    _this_thread.measuring = True
    try:
        return measure()
    finally:
        _this_thread.measuring = False


def measuring() -> bool:
    """Is this thread trying a kernel? Then it may launch one that is not accepted yet."""
    return getattr(_this_thread, "measuring", False)


def _publish(path: Path, record: Record) -> None:
    try:
        store.publish(path, json.dumps(record, indent=2).encode())
    except OSError as error:  # such as a cache that was filled elsewhere and is read-only here
        log.warning("a proof is kept for this process only: %s cannot be written: %s", path, error)


def kept(device: int, facts: Sequence[str]) -> Record | None:
    """The record of a kernel that has passed: this process's, or the one on disk; None if there is none."""
    key = _key(device, facts)
    found = _verdicts.get(key)
    if found is not None:
        return found if found["refusal"] is None else None
    return _read(_folder() / f"{key}.proof")


def all_kept() -> list[Record]:
    """Every record on this machine's disk: what has passed."""
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
    record = None if payload is None else dict(json.loads(payload))
    return record if record is not None and record["refusal"] is None else None  # older versions kept failures too
