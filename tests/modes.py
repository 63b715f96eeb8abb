"""What the tests of the compile modes share, on the CPU and on a GPU: models, gradients, a compile without code."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx

import ltx_inductor
from ltx_inductor.config import Config
from ltx_inductor.joint_pass import LtxPass, with_ours


class Attention(nn.Module):
    """q and k of one x behind projections, normalised and rotated by `rotate`; mask: which tokens keep their value.

    The result, and what `rotate` was given and gave: the part whose bits have to be eager's.
    """

    def __init__(self, linear: Callable[[], nn.Module], rotate: nn.Module, heads: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.rotate, self.heads = linear(), linear(), rotate, heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Any, Any, Any]:
        before = self.to_q(x), self.to_k(x)
        after = self.rotate(*before, cos, sin)
        q, k = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in after)
        out = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return out if mask is None else out * mask + x * (1 - mask), before, after


class LoraLinear(nn.Linear):
    """As PEFT writes it: base(x) + B(A(x)) * scale. `fuse` adds the product to the weight and leaves A and B out."""

    def __init__(self, width: int, rank: int = 2, device: str = "cpu") -> None:
        super().__init__(width, width, dtype=torch.bfloat16, device=device)
        self.a = nn.Linear(width, rank, bias=False, dtype=torch.bfloat16, device=device)
        self.b = nn.Linear(rank, width, bias=False, dtype=torch.bfloat16, device=device)
        self.scale, self.fused = 0.5, False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.fused else out + self.b(self.a(x)) * self.scale

    def swap(self) -> None:
        """Other weights of the adapter, in place."""
        self.a.weight.normal_()
        self.b.weight.normal_()

    def fuse(self) -> None:
        self.weight += (self.b.weight @ self.a.weight) * self.scale
        self.fused = True


def gradients(which: Any, wrapped: Callable[..., Any], module: nn.Module, args: Sequence[Tensor]) -> list[Tensor]:
    """Of a loss on `wrapped(*args)`, which runs `module`: for the first argument and all parameters.

    which: a backend; None: eager.
    """
    torch._dynamo.reset()
    x = args[0].detach().clone().requires_grad_()
    model = wrapped if which is None else torch.compile(wrapped, backend=which)
    out, _, (q, k) = model(x, *args[1:])
    (out.float().square().sum() + (q * k).float().sum()).backward()
    found = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    assert all(g is not None for g in found)
    return found  # type: ignore[return-value]


def unnumbered(code: list[str]) -> list[str]:
    """Generated code without what numbers the compiles of a process."""
    return [re.sub(r"# (AOT ID|kernel path): .*", "", c) for c in code]


def as_it_is(gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return gm(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


without_us = functools.partial(compile_fx, inner_compile=as_it_is)
"""Inductor up to the graph, which runs as it is: what both backends have in common, and no code is generated."""


def with_us(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """The same with our pass, and with the caches off."""
    hook = with_ours(None, LtxPass(Config(cpu=True)))
    with (
        inductor_config.patch(joint_custom_pre_pass=hook, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        ltx_inductor.session.backend_call(gm, example_inputs, None),
    ):
        return compile_fx(gm, example_inputs, inner_compile=as_it_is)
