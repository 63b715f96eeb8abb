"""For the scripts that reduce.py prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .judge import judge, run
from .near_miss import propagate


def check(forward: Callable[..., Any], inputs: Sequence[Any], fused: Sequence[int] = ()) -> None:
    """Rewrites the graph of `forward` and prints what is wrong with it, if anything.

    inputs: (shape, strides, dtype) of a tensor, or a number. fused: the nodes that a call of torch.rms_norm became.
    """
    gm = fx.symbolic_trace(forward)
    torch.manual_seed(0)
    args = []
    for spec in inputs:
        if isinstance(spec, tuple):
            shape, strides, dtype = spec
            spec = torch.randn(_span(shape, strides)).to(dtype).as_strided(shape, strides)
        args.append(spec)
    mode = FakeTensorMode()
    for n, value in zip(gm.graph.find_nodes(op="placeholder"), args, strict=True):
        n.meta["val"] = mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
    nodes = list(gm.graph.nodes)
    for i in fused:
        nodes[i].meta["original_aten"] = torch.ops.aten._fused_rms_norm.default
    propagate(gm, set(nodes))
    calls = [args]
    wants = run(gm, calls)
    assert wants is not None, "the graph does not run"
    verdict = judge(gm, calls, wants)
    print(gm.graph)
    print(f"{verdict.sides} sides rewritten; {verdict.why or 'nothing is wrong'}")


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
