"""What the ops have done in this process, for `ltx_inductor.stats()`.

The C kernels count their own launches (csrc/torch_dispatch.h), the rest is counted here, where an op goes another way.
A CUDA graph that is replayed calls no op: only its capture counts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

_C_OPS = ("rmsnorm_split_rope", "qk_rmsnorm_split_rope")
OPS = (*_C_OPS, "rmsnorm_axial_rope", "na3d")


@dataclass
class Counts:
    """Of one op. bytes: of the tensors that kernels read and wrote, each element once."""

    kernel: int = 0
    reference: int = 0
    refused: int = 0
    bytes: int = 0
    checks: int = 0
    checked_elements: int = 0
    postponed: int = 0
    differing: int = 0


@dataclass
class _State:
    ops: dict[str, Counts] = field(default_factory=lambda: {op: Counts() for op in OPS})
    before: dict[str, tuple[int, int]] = field(default_factory=dict)  # the C counters at the last reset


_lock = threading.Lock()
_state = _State()
_library: list[Any] = []  # the address of the C counters, once there are any


def watch(address: int) -> None:
    """The launcher is loaded: its counters are there."""
    _library[:] = [(ctypes.c_int64 * 4).from_address(address)]


def _in_c() -> dict[str, tuple[int, int]]:
    now = list(_library[0]) if _library else [0] * 4
    return {op: (now[2 * i], now[2 * i + 1]) for i, op in enumerate(_C_OPS)}


def called(op: str, how: str, tensors: Iterable[Any] = (), moved: int = 0) -> None:
    """One call of `op`, run by its "kernel", on purpose by its "reference", or so because the kernel "refused" it.

    tensors: that were read and written, or `moved`: their bytes.
    """
    moved += sum(bytes_of(t) for t in tensors if isinstance(t, Tensor))
    with _lock:
        counts = _state.ops[op]
        setattr(counts, how, getattr(counts, how) + 1)
        counts.bytes += moved


def checked(op: str, elements: int, differing: int = 0) -> None:
    """A comparison of the kernel with eager."""
    with _lock:
        counts = _state.ops[op]
        counts.checks += 1
        counts.checked_elements += elements
        counts.differing += differing


def postponed(op: str) -> None:
    """A comparison that could not be made where it was due: a CUDA graph was being captured."""
    with _lock:
        _state.ops[op].postponed += 1


def bytes_of(t: Tensor) -> int:
    """Of its elements, those that share memory through a stride of 0 counted once."""
    size = t.element_size()
    for n, stride in zip(t.shape, t.stride(), strict=True):
        size *= n if stride else 1
    return size


def stats(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """What the ops have done in this process since it started, or since the last reset.

    {op: {...}} for rmsnorm_split_rope, qk_rmsnorm_split_rope, rmsnorm_axial_rope and na3d, with

        kernel            calls that a kernel ran
        reference         calls on the CPU, which run the eager chain
        refused           calls on a GPU that ran the eager chain since no kernel was ready, or since eager itself takes
                          another path for such tensors (docs/kernels-rope.md)
        bytes             that kernels read and wrote, each element once
        checks            comparisons of a kernel with eager: at first use, and with `verify="always"` at every call
        checked_elements  elements compared; differing: how many of them differed in a bit
        postponed         comparisons not made because a CUDA graph was being captured

    reset: start again from zero after this. Replays of a CUDA graph call no op and are not counted.
    """
    if not isinstance(reset, bool):
        raise TypeError(f"stats(reset={reset!r}): expected True or False")
    with _lock:
        found = {op: asdict(counts) for op, counts in _state.ops.items()}
        now = _in_c()
        for op, (calls, moved) in now.items():
            calls_before, moved_before = _state.before.get(op, (0, 0))
            found[op]["kernel"] += calls - calls_before
            found[op]["bytes"] += moved - moved_before
        if reset:
            _state.ops = {op: Counts() for op in OPS}
            _state.before = now
    return found
