"""What the tests of the rule neighborhood_attention share: calls, their graphs, and the graphs after the pass.

natten is the real front end with a library that runs on the CPU (see tests/natten_stand_in.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ltx_inductor.config import Config
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import RewriteReport
from tests.harness import copy_graph, trace
from tests.natten_stand_in import natten_with_ops, window_attention

pytest.importorskip("natten")
NATTEN = natten_with_ops()
RULE = "neighborhood_attention"
BF16 = torch.bfloat16
CPU = Config(cpu=True)
NA3D = torch.ops.ltx_inductor.na3d.default


def qkv(shape=(1, 5, 6, 9, 2, 64), dtype=BF16):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=gen).to(dtype) for _ in range(3)]


class Call(nn.Module):
    """natten.na3d of three inputs, as a model would call it."""

    def __init__(self, kernel_size=(3, 3, 5), **arguments):
        super().__init__()
        self.arguments = {"kernel_size": kernel_size, "scale": 0.5, **arguments}

    def forward(self, q, k, v):
        return NATTEN.na3d(q, k, v, **self.arguments)


def traced(module, inputs, dynamic=None):
    with torch.no_grad():
        return trace(module, inputs, dynamic)[0]


def rewritten(t, config=CPU, kernels=None):
    """(the graph after the pass, the report)."""
    gm = copy_graph(t.gm)
    report = rewrite_graph(gm.graph, config, kernels)
    gm.recompile()
    return gm, RewriteReport([report])


def ops(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def only_refusal(t, config=CPU, kernels=None, rule=RULE):
    """The only refusal; the graph is as it was, and nothing was rewritten."""
    gm, report = rewritten(t, config, kernels)
    assert not report.sites
    assert [str(n.format_node()) for n in gm.graph.nodes] == [str(n.format_node()) for n in t.gm.graph.nodes]
    (refusal,) = (r for r in report.refusals if r.rule == rule)
    return refusal


def close(got, want, inputs):
    """Two roundings to bf16 of values that are averages of v, and of probabilities to bf16 on one side."""
    return float((got.double() - want.double()).abs().max()) <= 2**-7 * float(inputs[2].double().abs().max())


LTX_CORE = torch.library.Library("ltx_core", "FRAGMENT")
for _name in ("na_attention_triton", "na_attention_eager"):
    LTX_CORE.define(f"{_name}(Tensor q, Tensor k, Tensor v, SymInt[] kernel_size) -> Tensor")
    LTX_CORE.impl(
        _name,
        lambda q, k, v, window: torch.empty_like(q).copy_(window_attention(q, k, v, window, 1.0)[0]),
        "CompositeExplicitAutograd",
    )
    torch.library.register_fake(f"ltx_core::{_name}", lambda q, k, v, window: torch.empty_like(q), lib=LTX_CORE)
LTX_CORE.define("na_attention_dsl(Tensor q, Tensor k, Tensor v, SymInt[] kernel_size, Tensor bound) -> Tensor")
LTX_CORE.impl("na_attention_dsl", lambda q, k, v, window, bound: q.flatten(-2) + 1, "CompositeExplicitAutograd")


class LtxCore(nn.Module):
    """As ltx-core calls its fallbacks: the window as a list, no scale, since q has it."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, q, k, v):
        return getattr(torch.ops.ltx_core, self.name)(q, k, v, [3, 3, 5]).flatten(-2)


def edited(t, edit):
    """A copy of a traced graph, changed by `edit(graph, nodes by name)`."""
    gm = copy_graph(t.gm)
    edit(gm.graph, {n.name: n for n in gm.graph.nodes})
    gm.graph.lint()
    return type(t)(gm, t.args)


def set_argument(name, index, value):
    def edit(graph, nodes):
        args = list(nodes[name].args)
        args[index] = value
        nodes[name].args = tuple(args)

    return edit


def also_read(name):
    def edit(graph, nodes):
        output = next(iter(reversed(graph.nodes)))
        output.args = ((*output.args[0], nodes[name]),)

    return edit
