"""What tells the places of two sites apart: file, module, line. `source` alone is "attention.py:12" for many."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch
from torch import nn

from ltx_inductor.config import Config
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import RewriteReport
from ltx_inductor.rewrite.source import module_path, short_path
from ltx_inductor.views import groups
from ltx_inductor.views.page import page
from tests.harness import copy_graph, trace

ATTENTION = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(64), nn.RMSNorm(64)

    def forward(self, x, cos, sin):
        q = self.rope(self.norm_q(x), cos, sin)
        k = self.rope(self.norm_k(x), cos, sin)
        v = x.unflatten(-1, (2, 32)).transpose(1, 2)
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def rope(self, n, cos, sin):
        a, b = n.unflatten(-1, (2, 32)).transpose(1, 2).float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(n.dtype)
"""


class Model(nn.Module):
    def __init__(self, *attentions):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn1": a()}) for a in attentions)

    def forward(self, x, cos, sin):
        for block in self.blocks:
            x = x + block["attn1"](x, cos, sin)
        return x


@pytest.fixture
def attentions(tmp_path, monkeypatch):
    """The same class, in pkg/a/attention.py and pkg/b/attention.py."""
    for name in "ab":
        (tmp_path / "pkg" / name).mkdir(parents=True)
        (tmp_path / "pkg" / name / "attention.py").write_text(ATTENTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield [importlib.import_module(f"pkg.{name}.attention").Attention for name in "ab"]
    for name in [n for n in sys.modules if n.split(".")[0] == "pkg"]:
        del sys.modules[name]


def report_of(*attentions, cpu=True) -> RewriteReport:
    inputs = torch.randn(1, 24, 64).bfloat16(), *torch.randn(2, 1, 2, 24, 16)
    (traced,) = trace(Model(*attentions).bfloat16().eval(), inputs)
    return RewriteReport([rewrite_graph(copy_graph(traced.gm).graph, Config(cpu=cpu))])


def test_two_files_of_one_name_are_two_places(attentions):
    report = report_of(*attentions)
    assert [s.path for s in report.sites] == ["pkg/a/attention.py"] * 2 + ["pkg/b/attention.py"] * 2
    assert {s.source for s in report.sites} == {"attention.py:13", "attention.py:14"}
    assert [s.module for s in report.sites] == ["blocks.0.attn1"] * 2 + ["blocks.1.attn1"] * 2
    assert report.sites[0].code == "q = self.rope(self.norm_q(x), cos, sin)"
    assert "(q side, pair 1, blocks.1.attn1)" in str(report)
    cards = groups.groups(report.to_dict())
    assert [(g.paths, g.modules) for g in cards] == [
        (["pkg/a/attention.py"], "blocks.0.attn1"),
        (["pkg/b/attention.py"], "blocks.1.attn1"),
    ]
    html = page(report.to_dict())
    for text in (
        '<option value="pkg/a/attention.py">',
        'data-file="pkg/b/attention.py"',
        "blocks.1.attn1",
        "norm_q(x)",
    ):
        assert text in html


def test_one_file_in_many_layers_is_one_card(attentions):
    (card,) = groups.groups(report_of(*attentions[:1] * 3).to_dict())
    assert (card.modules, card.launches) == ("blocks.0-2.attn1", 3)


def test_a_refusal_says_where_too(attentions):
    report = report_of(attentions[0], attentions[0], attentions[1], cpu=False)
    assert {(r.path, r.module) for r in report.refusals} == {
        ("pkg/a/attention.py", "blocks.0.attn1"),
        ("pkg/a/attention.py", "blocks.1.attn1"),
        ("pkg/b/attention.py", "blocks.2.attn1"),
    }
    assert "      module:   blocks.0.attn1" in str(report)
    cards = {(r["path"], r["module"]) for r, _ in groups.refusals(report.to_dict())}
    assert cards == {("pkg/a/attention.py", "blocks.0-1.attn1"), ("pkg/b/attention.py", "blocks.2.attn1")}


def test_json_of_before_is_read(attentions):
    data = report_of(*attentions).to_dict()
    for site in data["graphs"][0]["sites"]:
        for name in ("path", "code", "module"):
            del site[name]
    old = RewriteReport.from_dict(json.loads(json.dumps(data)))
    assert (old.sites[0].path, old.sites[0].module) == ("", "")
    assert 'data-file="attention.py"' in page(old.to_dict())


@pytest.mark.parametrize(
    ("reached", "name"),
    [
        ("L['self']", ""),
        ("L['model'].__dict__['_modules']['transformer_blocks'].0.attn1", "transformer_blocks.0.attn1"),
        ("L['self']._modules['layers']._modules['12'].attn", "layers.12.attn"),
        ("G['net'].blocks[3].attn", "blocks.3.attn"),
        ("L['fn'].__closure__[0].cell_contents.blocks[3]", "blocks.3"),
    ],
)
def test_names_of_modules(reached, name):
    assert module_path({"1": (reached, Model), "2": (reached + ".norm", nn.RMSNorm)}) == name
    assert module_path({}) == module_path({"1": (reached, nn.Linear)}) == ""


def test_numbers_that_are_no_grid_are_not_drawn_together():
    names = ("a.0.x", "a.2.x", "b.0.y.0", "b.1.y.1", "c")
    sites = [{"module": name} for name in (*names, "", "c")]
    assert groups.Group(sites, None).modules == "a.[0,2].x, b.0.y.0, b.1.y.1, c"


def test_a_path_says_nothing_of_the_machine(tmp_path, monkeypatch):
    package = tmp_path / "deep" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert short_path(str(package / "x.py")) == "package/x.py"
    assert short_path(str(tmp_path / "deep" / "x.py")) == "x.py"
    assert short_path("<string>") == "<string>"
    short_path.cache_clear()
    monkeypatch.syspath_prepend(str(package))  # a script in it was run: the package is still the package
    assert short_path(str(package / "x.py")) == "package/x.py"
    assert short_path(torch.nn.__file__) == "torch/nn/__init__.py"
