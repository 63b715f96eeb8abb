"""`explain`: compile only, on any device, leaving nothing behind."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import ltx_inductor
from ltx_inductor import explain
from tests import stand_in

X = torch.arange(24.0).reshape(3, 8)


@pytest.fixture(autouse=True)
def _stand_in():
    old = stand_in.put_in()
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    stand_in.put_in(old)


def test_shows_what_would_happen_on_a_gpu():
    report = explain(stand_in.Model(), X)
    assert report.count() == 1
    report.expect(rmsnorm_split_rope=1)
    with pytest.raises(ltx_inductor.LostFusionError, match="expected 2 sides of rmsnorm_split_rope, found 1"):
        report.expect(rmsnorm_split_rope=2)


def test_generates_no_code_and_touches_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    explain(stand_in.Model(), X)
    assert not [f for _, _, files in os.walk(tmp_path) for f in files]
    assert not counters["inductor"]["fxgraph_cache_miss"]
    assert not counters["aot_autograd"]["autograd_cache_miss"]


def test_keyword_arguments_and_functions():
    model = stand_in.Model()
    report = explain(lambda x, *, scale: model(x) * scale, X, scale=2.0)
    assert report.count() == 1


def test_graph_breaks_are_got_over():
    model = stand_in.Model()

    def broken(x):
        x = model(x)
        torch._dynamo.graph_break()
        if x.sum() > 1e9:
            return x
        return model(x).tanh()

    report = explain(broken, X)
    assert [s.graph for s in report.sites] == [0, 2]
    assert len(report.graphs) == 3
    assert [r.graph for r in report.refusals] == [2]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = stand_in.Model()

    def forward(self, x):
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.body(x)


def test_graph_breaks_inside_the_model():
    assert explain(Inner(), X).count() == 2


def test_the_grad_mode_of_the_caller_counts():
    """A training graph is one with tangents: a rule sees them and refuses, as it would in a compile."""
    seen = []

    def look(graph, config, kernels=None):
        seen.append(any("tangents" in n.name for n in graph.nodes))
        return stand_in.rewrite_graph(graph, config)

    stand_in.put_in(look)
    model = stand_in.Model()
    explain(model, X)
    with torch.enable_grad():
        explain(model, X)
    with torch.inference_mode():
        explain(model, X)
    assert seen == [False, True, False]


def test_dynamic():
    assert "s" in explain(stand_in.Model(), X, dynamic=True).sites[0].shapes["x"]
    shapes = [explain(stand_in.Model(), torch.ones(n, 8)).sites[0].shapes["x"] for n in (3, 4, 5)]
    assert shapes == ["[3, 8]", "[4, 8]", "[5, 8]"]  # one call learns nothing from another


def test_compiled_models_stay_compiled():
    model = stand_in.Model()
    compiled = torch.compile(model, backend="ltx", options={"ltx_inductor.cpu": True})
    out = compiled(X)
    before, frames = ltx_inductor.last_report().to_dict(), counters["frames"]["ok"]
    for _ in range(10):  # more than Dynamo's recompile limit
        assert explain(compiled, X).count() == 1
    frames_of_explain = counters["frames"]["ok"] - frames
    assert torch.equal(compiled(X), out)
    assert counters["frames"]["ok"] - frames == frames_of_explain == 10
    assert ltx_inductor.last_report().to_dict() == before
    compiled(torch.ones(4, 8))
    assert counters["frames"]["ok"] - frames == 11
    torch.testing.assert_close(compiled(torch.ones(4, 8)), -model.linear(torch.ones(4, 8)))


def test_strict():
    with pytest.raises(ltx_inductor.LostFusionError, match="it is a tanh"):
        explain(stand_in.Refused(), X, options={"ltx_inductor.strict": True})
    assert len(explain(stand_in.Refused(), X).refusals) == 1


def test_a_users_pass_runs_ours_does_not_run_twice():
    seen = []
    with (
        torch._inductor.config.patch(joint_custom_pre_pass=lambda graph: seen.append(len(graph.nodes))),
        ltx_inductor.enabled({"ltx_inductor.cpu": True}),
    ):
        assert explain(stand_in.Model(), X).count() == 1
    assert len(seen) == 1


def test_wrong_options_and_models():
    with pytest.raises(ValueError, match="the options are"):
        explain(stand_in.Model(), X, options={"ltx_inductor.gpu": True})
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        explain(stand_in.Model(), X, options={"gpu": True})
    with pytest.raises(RuntimeError, match="fake tensor|cannot be multiplied"):
        explain(stand_in.Model(), torch.ones(3, 9))


def test_training_still_works_under_explain():
    model = nn.Linear(8, 8)
    with torch.enable_grad():
        explain(lambda x: model(x).relu().sum().backward(), X)
    assert len(explain(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), X).graphs) == 1


def test_a_module_compiled_in_place():
    model = stand_in.Model()
    model.compile(backend="ltx", options={"ltx_inductor.cpu": True})
    assert explain(model, X).count() == 1


def test_the_random_generators_are_left_as_they_were():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ltx_inductor.explain(lambda x: x + torch.rand_like(x), torch.zeros(8))
    assert torch.equal(torch.get_rng_state(), before)
