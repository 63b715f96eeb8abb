"""What the real models share: sizes, random bf16 weights, and the flat call that a Case needs.

2 heads of 64 (video) and 32 (audio), which the kernels take, and B = 2. The wrappers only turn flat tensors into the
calls the packages want.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case

BF16, FP32 = torch.bfloat16, torch.float32
B, S, A, T = 2, 24, 10, 7  # batch, video tokens (2 x 3 x 4), audio tokens, text tokens
HEADS, VIDEO, AUDIO = 2, 64, 32
V_DIM, A_DIM = HEADS * VIDEO, HEADS * AUDIO


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def table(s: int, head_dim: int = VIDEO, dtype: torch.dtype = FP32, batch: int = B) -> Tensor:
    """[B, heads, S, head_dim/2], as the models make it: a view of [B, S, heads, head_dim/2]."""
    return rand(batch, s, HEADS, head_dim // 2, dtype=dtype).transpose(1, 2)


class Called(nn.Module):
    """A module of a package, and how the flat inputs become its call."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: Tensor) -> Any:
        return self.call(self.module, *args)


def ready(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) / max(1, p.shape[-1]) ** 0.5)
        for name, p in module.named_parameters():
            if "norm" in name:
                p.add_(1)
    return module.to(BF16).eval()


def case(name, build, call, inputs, sites, contract, seq, batch=(), pairs=None, notes=""):
    dynamic = {"seq": seq} | ({"batch": dict.fromkeys(batch, 0)} if batch else {})
    package = "diffusers" if contract == "fp32-rope" else "ltx_core"
    return Case(
        f"{package}-{name}",
        lambda: Called(build(), call),
        inputs,
        sites,
        contract,
        dynamic=dynamic,
        notes=notes,
        pairs=pairs,
        head_dim=0,
        needs=package,
    )


def block_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    tables = [table(n, d, dtype) for n, d in ((S, VIDEO), (A, AUDIO), (S, AUDIO), (A, AUDIO)) for _ in range(2)]
    return rand(B, S, V_DIM), rand(B, A, A_DIM), rand(B, T, V_DIM), rand(B, T, A_DIM), *tables


SELF, CROSS = {0: 1, 1: 2, 2: 2}, {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2}
BLOCK = {0: 1, 1: 1, 2: 1, 3: 1} | dict.fromkeys(range(4, 12), 2)


def attention_inputs(dtype, *more):
    return lambda: (rand(B, S, V_DIM), table(S, dtype=dtype), table(S, dtype=dtype), *(m() for m in more))


def _cross_inputs(dtype):
    return lambda: (rand(B, S, V_DIM), rand(B, A, A_DIM), *(table(n, dtype=dtype) for n in (S, S, A, A)))


def attention_cases(package_self, contract, dtype, build, calls):
    """The same attention, four ways."""
    inputs, cross = attention_inputs(dtype), _cross_inputs(dtype)
    mask = attention_inputs(dtype, lambda: torch.ones(B, 1, 1, dtype=BF16))
    return [
        case("attention-self", build, package_self, inputs, 2, contract, SELF, range(3), 1),
        case("attention-gated", lambda: build(gated=True), package_self, inputs, 2, contract, SELF, range(3), 1),
        case("attention-cross", lambda: build(cross=True), calls[0], cross, 2, contract, CROSS, range(6)),
        case("attention-perturbed", calls[2], calls[1], mask, 2, contract, SELF, range(4), 1),
    ]
