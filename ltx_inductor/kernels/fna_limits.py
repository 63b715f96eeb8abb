"""What the neighborhood-attention kernels take, both schedules."""

from __future__ import annotations

import torch

Window = tuple[int, int, int]  # keys per axis T, H, W
HEAD_DIM = 64
WINDOWS = range(2, 16)  # per axis
LOG2_E = 1.4426950408889634


def unsupported(
    kernel: str, *, arch: tuple[int, int], dtype: torch.dtype, head_dim: int, kernel_size: Window
) -> str | None:
    """None if a kernel takes this, else a sentence about `kernel`, such as "neighborhood-attention kernel". Pure."""
    if arch != (9, 0):
        return f"no {kernel} for compute capability {arch[0]}.{arch[1]}; expected 9.0 (H100, H200)"
    if dtype != torch.bfloat16:
        return f"no {kernel} for {dtype}; expected torch.bfloat16"
    if head_dim != HEAD_DIM:
        return f"no {kernel} for head_dim {head_dim}; expected {HEAD_DIM}"
    if len(kernel_size) != 3 or any(w not in WINDOWS for w in kernel_size):
        return f"no {kernel} for window {tuple(kernel_size)}; expected three sizes from 2 to 15"
    return None
