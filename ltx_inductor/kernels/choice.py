"""Is there a kernel? The answers the pass gets while a graph is compiled.

`DeviceKernels` makes kernels ready for the device the graph is for: looked up, built if need be, and proved once to
have eager's bits there (see gate.py). `AssumedKernels` builds nothing and says what would happen.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ltx_inductor.kernels import gate, rope

ASSUMED_ARCH = (9, 0)  # what a report about a CPU graph assumes: an H100 or H200


class Need(Protocol):
    """The fields of `ltx_inductor.rewrite.passes.KernelNeed`."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def table_dtype(self) -> torch.dtype: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def per_head(self) -> bool: ...
    @property
    def contract(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def shared(self) -> bool: ...


class DeviceKernels:
    """Kernels of this process's devices; the reference on the CPU. `reference` is the eager chain, for the proof."""

    def __init__(self, reference: Callable[..., torch.Tensor]) -> None:
        self._reference = reference

    def refusal(self, need: Need) -> str | None:
        if need.device.type == "cpu":
            return None
        if need.device.type != "cuda" or torch.version.hip is not None:
            return f"no kernel for device {need.device}; expected an NVIDIA GPU"
        index = torch.cuda.current_device() if need.device.index is None else need.device.index
        arch = torch.cuda.get_device_capability(index)
        missing = _unsupported(need, arch) or rope.prepare(
            arch, **_facts(need), layout=need.layout, shared=need.shared, device=index
        )
        if missing is None:
            missing = gate.refusal(need, index, self._reference)
        elif _unsupported(need, arch) is None:
            _warn_once(missing)
        return missing

    def note(self, need: Need) -> str | None:
        return None

    def proof(self, need: Need) -> str:
        if need.device.type == "cpu":
            return "on the CPU the op runs its reference: the eager chain, op by op"
        index = torch.cuda.current_device() if need.device.index is None else need.device.index
        return gate.proof(need, index)


class AssumedKernels:
    """For `explain`: a CPU graph is reported as it would be on an H100 or H200, a CUDA graph as on its device."""

    def refusal(self, need: Need) -> str | None:
        if need.device.type != "cuda":
            return None
        return _unsupported(need, torch.cuda.get_device_capability(need.device))

    def note(self, need: Need) -> str | None:
        if need.device.type != "cpu":
            return None
        missing = _unsupported(need, ASSUMED_ARCH)
        return f"on a GPU of compute capability 9.0: {missing}" if missing else None

    def proof(self, need: Need) -> str:
        return (
            "nothing was run for this report; before its first use on a device the kernel is compared with eager there "
            f"(bits, at least {gate.ELEMENTS:,} elements)"
        )


def _unsupported(need: Need, arch: tuple[int, int]) -> str | None:
    return rope.unsupported(arch=arch, **_facts(need))


def _facts(need: Need) -> dict[str, Any]:
    names = ("dtype", "table_dtype", "head_dim", "hidden", "contract", "per_head")
    return {name: getattr(need, name) for name in names}


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(f"ltx_inductor: a graph is left unfused: {sentence}", stacklevel=2)
