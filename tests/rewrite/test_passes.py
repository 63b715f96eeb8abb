"""The pass as a whole: pairs, faults, notes, strictness."""

import pytest
import torch
import torch.nn.functional as F

from ltx_inductor.config import Config
from ltx_inductor.rewrite import replace, rope_rule, search
from ltx_inductor.rewrite.needs import KernelNeed
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import LostFusionError
from tests.harness import bit_difference, copy_graph, run_graph, trace

HEADS, DIM, TOKENS = 2, 8, 6
ROW = HEADS * DIM


def rope(x, w, cos, sin):
    n = F.rms_norm(x, (ROW,), w, 1e-6).unflatten(-1, (HEADS, DIM)).transpose(1, 2).float()
    a, b = n.chunk(2, -1)
    out = torch.cat([torch.addcmul(a * cos, -sin, b), torch.addcmul(b * cos, sin, a)], -1)
    return out.transpose(1, 2).flatten(2).to(x.dtype)


def heads(x):
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def attend(q, k, v):
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)


class Layers(torch.nn.Module):
    """A few attention layers that share one cos/sin."""

    def __init__(self, count):
        super().__init__()
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(ROW, 3 * ROW, bias=False) for _ in range(count))
        self.w = torch.nn.Parameter(torch.rand(ROW))
        self.bfloat16()

    def forward(self, x, cos, sin):
        for qkv in self.qkv:
            q, k, v = qkv(x).chunk(3, -1)
            x = x + attend(rope(q, self.w, cos, sin), rope(k, self.w, cos, sin), v)
        return x


def inputs():
    torch.manual_seed(0)
    cos, sin = torch.rand(1, HEADS, TOKENS, DIM // 2), torch.rand(1, HEADS, TOKENS, DIM // 2)
    return torch.randn(1, TOKENS, ROW).bfloat16(), cos, sin


@pytest.fixture(scope="module")
def layers():
    return trace(Layers(4), inputs())[0]


def rewritten(traced, config=Config(cpu=True), kernels=None):  # noqa: B008
    gm = copy_graph(traced.gm)
    report = rewrite_graph(gm.graph, config, kernels)
    gm.recompile()
    return gm, report


def test_layers_that_share_tables_pair_within_a_layer(layers):
    gm, report = rewritten(layers)
    ops = [n for n in gm.graph.nodes if "qk_rmsnorm" in str(n.target)]
    assert len(ops) == 4
    assert [s.pair for s in report.sites] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [s.side for s in report.sites] == ["q", "k"] * 4
    # q and k of one op come out of one projection
    assert all(n.args[0].args[0] is n.args[1].args[0] for n in ops)
    assert bit_difference(run_graph(gm, layers.args), layers.run()) is None


def test_a_key_made_from_the_rotated_query_is_not_paired():
    def f(x, w, cos, sin):
        q = rope(x, w, cos, sin)
        return q, rope(q, w, cos, sin)

    x, cos, sin = inputs()
    (traced,) = trace(f, (x, torch.rand(ROW).bfloat16(), cos, sin))
    gm, report = rewritten(traced)
    assert [s.pair for s in report.sites] == [None, None]
    assert bit_difference(run_graph(gm, traced.args), traced.run()) is None


def test_two_queries_are_no_pair():
    def f(x, y, w, cos, sin):
        k = heads(x)
        q = [F.scaled_dot_product_attention(heads(rope(t, w, cos, sin)), k, k) for t in (x, y)]
        return q[0] + q[1]

    x, cos, sin = inputs()
    (traced,) = trace(f, (x, x * 2, torch.rand(ROW).bfloat16(), cos, sin))
    _, report = rewritten(traced)
    assert [(s.side, s.pair) for s in report.sites] == [("q", None), ("q", None)]


@pytest.mark.parametrize("where", [(search, "derived_from"), (replace, "_as_result")])
def test_an_internal_error_leaves_the_graph_as_it_was(layers, monkeypatch, where):
    def broken(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(*where, broken)
    gm, report = rewritten(layers)
    assert not report.sites
    assert sum("ZeroDivisionError: planted" in r.reason for r in report.refusals) == 8
    assert [str(n.format_node()) for n in gm.graph.nodes] == [str(n.format_node()) for n in layers.gm.graph.nodes]


def test_a_broken_sweep_costs_no_site(layers, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(rope_rule, "uncovered_rotations", broken)
    _, report = rewritten(layers)
    assert len(report.sites) == 8
    assert "planted" in report.refusals[0].reason


def test_one_broken_launch_does_not_cost_the_others(layers, monkeypatch):
    real, calls = replace._as_result, []

    def sometimes(*args):
        calls.append(1)
        if len(calls) == 3:  # the first result of the second launch
            raise ZeroDivisionError("planted")
        return real(*args)

    monkeypatch.setattr(replace, "_as_result", sometimes)
    gm, report = rewritten(layers)
    assert (len(report.sites), len(report.refusals)) == (6, 2)
    assert bit_difference(run_graph(gm, layers.args), layers.run()) is None


def test_strict_raises_with_the_reasons(layers):
    with pytest.raises(LostFusionError, match=r"(?s)strict.*the graph is on the CPU"):
        rewritten(layers, Config(strict=True))


def test_rules_can_be_turned_off(layers):
    gm, report = rewritten(layers, Config(rules=(), cpu=True))
    assert not report.sites
    assert not report.refusals
    assert len(gm.graph.nodes) == len(layers.gm.graph.nodes)


class _Kernels:
    def __init__(self, refuse=None):
        self.refuse, self.needs = refuse, []

    def refusal(self, need: KernelNeed):
        self.needs.append(need)
        return self.refuse

    def slower(self, need, size):
        return None

    def proof(self, need):
        return "proved elsewhere"


def test_kernels_are_asked_once_per_launch_and_heard(layers):
    kernels = _Kernels()
    _, report = rewritten(layers, kernels=kernels)
    assert len(kernels.needs) == 4
    need = kernels.needs[0]
    assert (need.head_dim, need.hidden, need.per_head, need.shared) == (DIM, ROW, False, True)
    assert (need.contract, need.layout, need.table_dtype) == ("fp32-rope", "bshd", torch.float32)

    _, report = rewritten(layers, kernels=_Kernels("no kernel today; try tomorrow"))
    assert not report.sites
    assert {r.reason for r in report.refusals} == {"no kernel today; try tomorrow"}


def test_the_report_is_deterministic(layers):
    first, second = (rewritten(layers)[1] for _ in range(2))
    assert (first.sites, first.refusals) == (second.sites, second.refusals)
