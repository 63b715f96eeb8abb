"""The drawings of a report: what is in them, that they are few, and that they survive JSON."""

from __future__ import annotations

import json
import logging

import pytest

from ltx_inductor.config import Config
from ltx_inductor.rewrite import drawing
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import RewriteReport
from tests.harness import copy_graph, trace
from tests.rewrite.test_passes import ROW, Layers, inputs


@pytest.fixture(scope="module")
def traced():
    return trace(Layers(2), inputs())[0]


@pytest.fixture
def report(traced):
    return RewriteReport([rewrite_graph(copy_graph(traced.gm).graph, Config(cpu=True))])


def test_layers_that_look_alike_share_a_drawing(report):
    assert [s.drawing for s in report.sites] == [0, 0, 0, 0]
    assert len(report.graphs[0].drawings) == 1


def test_before_and_after(report):
    (drawn,) = report.graphs[0].drawings
    before = {n.name: n for n in drawn.before}
    region = [n for n in drawn.before if n.role == "region"]
    assert sum(n.op == "aten.rsqrt.default" for n in region) == 2
    assert {s.node for s in report.sites[:2]} <= {n.name for n in region}
    assert all(n.type.startswith("f32") for n in drawn.before if n.role == "input" and "cos" in n.name)
    (op,) = (n for n in drawn.after if n.role == "op")
    assert op.op == "ltx_inductor.qk_rmsnorm_split_rope.default"
    assert {n.role for n in drawn.after} == {"input", "op", "new", "reader"}
    # every edge leads to a node that is drawn, and the inputs of the op were drawn before too
    for nodes in (drawn.before, drawn.after):
        names = [n.name for n in nodes]
        assert all(a in names[: names.index(n.name)] for n in nodes for a in n.inputs)
    assert {n.name for n in drawn.after if n.role == "input"} <= before.keys()
    assert {n.name for n in drawn.before if n.role == "reader"} <= {n.name for n in drawn.after}
    assert region[0].source.startswith("test_passes.py:")


def test_the_diff_has_what_went_and_what_came(report):
    lines = report.graphs[0].drawings[0].diff.splitlines()
    assert any(line.startswith("-") and "aten.rsqrt" in line for line in lines)
    assert any(line.startswith("+") and "ltx_inductor.qk_rmsnorm_split_rope" in line for line in lines)
    assert not any("aten.rsqrt" in line for line in lines if not line.startswith("-"))


def test_json_and_back(report):
    assert RewriteReport.from_dict(json.loads(report.to_json())) == report


def test_bytes(report):
    x = 6 * ROW * 2  # 6 tokens, bf16; the tables are fp32, and the second side reads the first one's
    tables = 2 * 6 * ROW // 2 * 4
    assert [s.bytes for s in report.sites[:2]] == [2 * x + ROW * 2 + tables, 2 * x + ROW * 2]


def test_dynamic_sizes_have_no_bytes():
    traced = trace(Layers(1), inputs(), dynamic={0: 1, 1: 2, 2: 2})[0]
    report = rewrite_graph(copy_graph(traced.gm).graph, Config(cpu=True))
    assert [s.bytes for s in report.sites] == [None, None]
    assert report.drawings[0].before


def test_a_drawing_that_fails_costs_no_site(traced, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(drawing, "_readers", broken)
    with caplog.at_level(logging.WARNING, "ltx_inductor"):
        report = rewrite_graph(copy_graph(traced.gm).graph, Config(cpu=True))
    assert [s.drawing for s in report.sites] == [None] * 4
    assert "could not be drawn" in caplog.text
