"""What a launch asks of the kernels, and whom the rules ask. The `kind` of a need is the rule that has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch


@dataclass(frozen=True)
class KernelNeed:
    """What one launch asks of a kernel: dtypes of x and of cos/sin, sizes in elements, contract, layout, device.

    shared: both sides of a pair use the same cos and sin and have the same number of heads.
    """

    kind: ClassVar[str] = "rmsnorm_split_rope"

    device: torch.device
    dtype: torch.dtype
    table_dtype: torch.dtype
    head_dim: int
    hidden: int
    per_head: bool
    contract: str
    layout: str
    shared: bool


@dataclass(frozen=True)
class AxialNeed:
    """What one call of `ltx_inductor::rmsnorm_axial_rope` asks: dtypes of x and of cos/sin, contract, device.

    pairs: of every axis of the rotation, together half of head_dim; token_axes: axes of x in front of the heads.
    """

    kind: ClassVar[str] = "rmsnorm_axial_rope"

    device: torch.device
    dtype: torch.dtype
    table_dtype: torch.dtype
    pairs: tuple[int, ...]
    token_axes: int
    contract: str


@dataclass(frozen=True)
class NeighborhoodNeed:
    """What one call of `ltx_inductor::na3d` asks: dtype of q, head_dim in elements, window in keys per axis T, H, W.

    exact: NATTEN's bits are wanted, not just its accuracy.
    """

    kind: ClassVar[str] = "neighborhood_attention"

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    kernel_size: tuple[int, int, int]
    exact: bool


Need = KernelNeed | AxialNeed | NeighborhoodNeed
NEEDS: dict[str, type[Need]] = {need.kind: need for need in (KernelNeed, AxialNeed, NeighborhoodNeed)}


class Kernels(Protocol):
    """Knows which kernels exist, and may build or load them: it is asked when a graph is compiled."""

    def refusal(self, need: Need) -> str | None:
        """None if the launch can run, or a sentence that says what is missing and what to do."""
        ...

    def slower(self, need: Need, size: int | None) -> str | None:
        """None if the launch is worth it, or not measured; else a sentence. size: see `ltx_inductor.kernels.profit`."""
        ...

    def proof(self, need: Need) -> str:
        """How it is known that the launch has eager's bits; asked where `refusal` gave None."""
        ...


class NoKernels:
    """Where nothing may be rewritten. `reason` is told of every candidate, whatever else may be wrong with it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def refusal(self, need: Need) -> str | None:
        return self.reason

    def slower(self, need: Need, size: int | None) -> str | None:
        return None

    def note(self, need: Need) -> str | None:
        return None

    def proof(self, need: Need) -> str:
        return self.reason
