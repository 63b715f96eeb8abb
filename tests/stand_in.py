"""A rewrite small enough to follow through torch's machinery: relu becomes neg, and tanh is a refusal.

Tests of the backend, the hooks and the caches use it in place of the rules, so that what they see is the road and not
the matcher: `put_in()` replaces `ltx_inductor.rewrite.passes.rewrite_graph`, in a child process too.
"""

from __future__ import annotations

import sys
import types

import torch
from torch import nn

from ltx_inductor.rewrite.dump import source_comment
from ltx_inductor.rewrite.report import GraphReport, LostFusionError, Refusal, Site

RULE = "rmsnorm_split_rope"


class Model(nn.Module):
    """relu once: 1 site. Stand-in result: linear(x) negated; stock result: its relu."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


class Refused(nn.Module):
    def forward(self, x):
        return x.tanh() + 1


def rewrite_graph(graph, config, kernels=None):
    sites, refusals = [], []
    if RULE not in config.rules:
        return GraphReport(nodes=len(graph.nodes))
    for node in list(graph.nodes):
        source = source_comment(node).split(" ")[0]  # file.py:12
        if node.target == torch.ops.aten.tanh.default:
            refusals.append(Refusal(RULE, "it is a tanh", source=source, node=node.name))
        if node.target != torch.ops.aten.relu.default:
            continue
        if node.meta["val"].device.type == "cpu" and not config.cpu:
            refusals.append(Refusal(RULE, "the graph is on the CPU", source=source))
            continue
        node.target = torch.ops.aten.neg.default
        shapes = {"x": str(list(node.meta["val"].shape))}
        sites.append(Site(RULE, "aten::neg", None, None, source, shapes, "bf16-chain", node.name))
    if refusals and config.strict:
        raise LostFusionError("\n".join(r.reason for r in refusals))
    return GraphReport(sites, refusals, len(graph.nodes), 1.0)


def put_in(function=rewrite_graph):
    """Returns what was there, to be put back with `put_in(that)`."""
    import ltx_inductor.rewrite

    name = "ltx_inductor.rewrite.passes"
    try:
        import ltx_inductor.rewrite.passes as passes
    except ImportError:
        passes = sys.modules[name] = types.ModuleType(name)
        ltx_inductor.rewrite.passes = passes
    old = getattr(passes, "rewrite_graph", rewrite_graph)
    passes.rewrite_graph = function
    return old
