"""Graph dumps: what they look like, that they are stable, and where they go."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from ltx_inductor.rewrite import dump
from tests import stand_in

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("test_dump")  # one worker: the module's fixture is expensive


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)

    def forward(self, x):
        y = self.norm(x).unflatten(-1, (8, -1)).transpose(1, 2)
        a, b = y.split(4, -1)
        return torch.where(a > 0, b, float("-inf")).to(torch.bfloat16)


def graphs(model, *args, **kwargs):
    found = []
    torch._dynamo.reset()
    options = {"joint_custom_pre_pass": lambda g: found.append(dump.render(g))}
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(model, options=options, **kwargs)(*args)
    return found


@pytest.fixture(scope="module")
def text():
    (found,) = graphs(Model(), torch.randn(2, 5, 64), dynamic=True)
    return found


def test_render(text):
    """Symbols are numbered by torch as it likes, and 2.11 and 2.13 name a few nodes differently: both are evened out."""
    symbols = dict.fromkeys(re.findall(r"\bs\d+\b", text))
    for i, s in enumerate(symbols):
        text = re.sub(rf"\b{s}\b", f"S{i}", text)
    text = re.sub(r"add_\d+", "add", re.sub(r"mul_\d+", "mul", text))
    assert_expected_inline(
        text,
        """\
def graph(
    arg0_1: "f32[64]",
    arg1_1: "SymInt S0",
    arg2_1: "SymInt S1",
    arg3_1: "f32[S0, S1, 64]",
):

    # test_dump.py:31 in forward: y = self.norm(x).unflatten(-1, (8, -1)).transpose(1, 2)
    pow_1: "f32[S0, S1, 64]" = aten.pow.Tensor_Scalar(arg3_1, 2)
    mean: "f32[S0, S1, 1]" = aten.mean.dim(pow_1, [2], True)
    add: "f32[S0, S1, 1]" = aten.add.Scalar(mean, 9.999999974752427e-07)
    rsqrt: "f32[S0, S1, 1]" = aten.rsqrt.default(add)
    mul: "f32[S0, S1, 64]" = aten.mul.Tensor(arg3_1, rsqrt)
    mul: "f32[S0, S1, 64]" = aten.mul.Tensor(mul, arg0_1)
    view: "f32[S0, S1, 8, 8]" = aten.view.default(mul, [arg1_1, arg2_1, 8, 8])
    permute: "f32[S0, 8, S1, 8] strides [64*S1, 8, 64, 1]" = aten.permute.default(view, [0, 2, 1, 3])

    # test_dump.py:32 in forward: a, b = y.split(4, -1)
    split: "(f32[S0, 8, S1, 4] strides [64*S1, 8, 64, 1], f32[S0, 8, S1, 4] strides [64*S1, 8, 64, 1])" = aten.split.Tensor(permute, 4, -1)
    getitem: "f32[S0, 8, S1, 4] strides [64*S1, 8, 64, 1]" = split[0]
    getitem_1: "f32[S0, 8, S1, 4] strides [64*S1, 8, 64, 1]" = split[1]

    # test_dump.py:33 in forward: return torch.where(a > 0, b, float("-inf")).to(torch.bfloat16)
    gt: "b8[S0, 8, S1, 4] strides [32*S1, 4, 32, 1]" = aten.gt.Scalar(getitem, 0)
    scalar_tensor: "f32[]" = aten.scalar_tensor.default(float('-inf'), dtype=torch.float32, layout=torch.strided, device='cpu')
    where: "f32[S0, 8, S1, 4] strides [32*S1, 4, 32, 1]" = aten.where.self(gt, getitem_1, scalar_tensor)
    convert_element_type: "bf16[S0, 8, S1, 4] strides [32*S1, 4, 32, 1]" = prims.convert_element_type.default(where, torch.bfloat16)
    return (convert_element_type,)
""",
    )


def test_it_is_python(text):
    ast.parse(text)


def test_it_is_deterministic_and_adds_no_guard(text):
    (again,) = graphs(Model(), torch.randn(2, 5, 64), dynamic=True)
    assert again == text
    assert str(ROOT) not in text


def test_strange_values():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.full.default, ([2], float("nan")), {"device": torch.device("cuda", 1)})
    z = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, 9223372036854775807))
    w = graph.call_method("index", (z, (slice(None, 2, None), (y,))))
    v = graph.call_function(torch.sin, (w,), {"out": {"a": -float("inf")}})
    graph.output([v, None, "text"])
    text = dump.render(graph)
    ast.parse(text)
    assert_expected_inline(
        text,
        """\
def graph(
    x,
):
    full_default = aten.full.default([2], float('nan'), device='cuda:1')
    slice_tensor = aten.slice.Tensor(x, 0, 0, 9223372036854775807)
    index = slice_tensor.index((slice(None, 2, None), (full_default,)))
    sin = sin(index, out={'a': float('-inf')})
    return [sin, None, 'text']
""",
    )


def test_no_inputs():
    graph = torch.fx.Graph()
    graph.output(())
    assert dump.render(graph) == "def graph():\n    return ()\n"


def test_unified():
    assert dump.unified("a\nb\n", "a\nb\n", "g") == ""
    assert_expected_inline(
        dump.unified("a\nb\n", "a\nc\n", "g"),
        """\
--- g/before.py
+++ g/after.py
@@ -1,2 +1,2 @@
 a
-b
+c
""",
    )


def test_write(tmp_path):
    folder = dump.write(tmp_path / "new", None, "a\n", "b\n", [("q side/x", "D1"), ("k", "D2")])
    assert sorted(p.name for p in folder.iterdir()) == [
        "000-q-side-x.diff",
        "001-k.diff",
        "after.py",
        "before.py",
        "graph.diff",
    ]
    assert dump.write(tmp_path / "new", None, "a\n", "b\n").name == "graph-001"
    assert dump.write(tmp_path / "new", 7, "a\n", "b\n").name == "graph-007"
    assert (folder / "graph.diff").read_text() == dump.unified("a\n", "b\n", "graph-000")


def test_emit_logs_the_diff(caplog):
    with caplog.at_level(logging.DEBUG, "ltx_inductor"):
        assert dump.wanted()
        dump.emit("graph-000", "a\n", "b\n")
    assert "-a\n+b" in caplog.text


CHILD = """
import torch
from ltx_inductor.config import Config
from ltx_inductor.rewrite import dump
from tests import stand_in
def emit(graph):
    assert dump.wanted()
    before = dump.render(graph)
    stand_in.rewrite_graph(graph, Config(cpu=True))
    dump.emit("graph-000", before, dump.render(graph))
with torch.no_grad():
    torch.compile(stand_in.Model(), options={"joint_custom_pre_pass": emit})(torch.ones(3, 8))
"""


def test_torch_logs_and_tlparse(tmp_path):
    env = {**os.environ, "TORCH_LOGS": "+ltx_inductor", "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.search(r"-.*aten.relu.default", run.stderr)
    assert re.search(r"\+.*aten.neg.default", run.stderr)
    (log,) = tmp_path.iterdir()
    for kind in ("before", "after", "diff"):
        assert f'"name": "ltx_inductor_graph-000_{kind}"' in log.read_text()
    assert stand_in.RULE  # the child imports the same module
