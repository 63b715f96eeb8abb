"""The command line: what it prints, its exit status, and what it says about wrong arguments."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ltx_inductor import cli, demo, doctor, kernels
from ltx_inductor.kernels import build
from tests import stand_in

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    old = stand_in.put_in()
    monkeypatch.setenv("COLUMNS", "200")
    torch._dynamo.reset()
    yield
    stand_in.put_in(old)


def one():
    return stand_in.Model(), torch.ones(3, 8)


def by_name():
    return stand_in.Refused(), {"x": torch.ones(3, 8)}


def nothing():
    return None


def test_explain(capsys):
    assert cli.main(["explain", "tests.test_cli:one", "--expect", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 side rewritten, 0 refused" in out
    assert "[3, 8]" in out  # the brackets of a shape are no markup
    assert cli.main(["explain", "tests.test_cli:one", "--expect", "2"]) == 1
    assert "expected 2 sides, found 1" in capsys.readouterr().err


def test_explain_writes_a_page(tmp_path, capsys):
    path = tmp_path / "report.html"
    assert cli.main(["explain", "tests.test_cli:one", "--html", str(path), "--diff"]) == 0
    assert "tests.test_cli:one" in path.read_text()
    assert cli.main(["explain", "tests.test_cli:one", "--html", str(tmp_path / "no" / "folder")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_explain_as_json(capsys):
    assert cli.main(["explain", "tests.test_cli:by_name", "--json", "--dynamic"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["graphs"][0]["refusals"][0]["reason"] == "it is a tanh"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests.test_cli", "expected module:callable"),
        ("tests.no_such_module:one", "No module named"),
        ("tests.test_cli:two", "has no 'two'"),
        ("tests.test_cli:nothing", "returned NoneType; expected (model, inputs)"),
    ],
)
def test_wrong_targets(target, message, capsys):
    assert cli.main(["explain", target]) == 2
    assert message in capsys.readouterr().err


def test_build(monkeypatch, capsys):
    monkeypatch.setattr(build, "prebuild", lambda archs: [(a, "the folder") for a in archs])
    assert cli.main(["build", "--arch", "9.0", "--arch", "10.0"]) == 0
    assert "10.0: the folder" in capsys.readouterr().out

    def fail(archs):
        raise build.MissingToolError("no nvcc [and no NVRTC]")

    monkeypatch.setattr(build, "prebuild", fail)
    assert cli.main(["build", "--arch", "9.0"]) == 1
    out = capsys.readouterr().out
    assert "no nvcc [and no NVRTC]" in out
    assert "doctor" in out


def test_build_wants_an_arch(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["build"]) == 2
    assert "--arch 9.0" in capsys.readouterr().err
    assert cli.main(["build", "--arch", "hopper"]) == 2
    assert "hopper" in capsys.readouterr().err


def test_doctor_finds_what_is_here(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert 'backend="ltx"' in out


def test_doctor_says_what_missing_costs(monkeypatch):
    nothing_there = {"nvcc": None, "nvrtc": None, "cc": None, "tvm_ffi": None, "cache": "folder"}
    monkeypatch.setattr(build, "toolchain", lambda: nothing_there)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    costs = {f.name: f.cost for f in doctor.find()}
    for name in ("GPU", "nvcc", "NVRTC", "C compiler", "tvm_ffi", "tilelang", "natten", "diffusers"):
        assert costs[name], name
    assert not costs["torch"]
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert "2.11" in doctor._torch().cost
    assert kernels


def test_doctor_reports_nvrtc_instead_of_nvcc(monkeypatch):
    nvrtc = {"path": "somewhere", "version": "13.0"}
    monkeypatch.setattr(
        build, "toolchain", lambda: {"nvcc": None, "nvrtc": nvrtc, "cc": None, "tvm_ffi": "1", "cache": ""}
    )
    costs = {f.name: f.cost for f in doctor.find()}
    assert costs["nvcc"] == "NVRTC is used"
    assert not costs["NVRTC"]


def test_demo_without_diffusers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "diffusers.models.transformers.transformer_ltx2", None)
    assert cli.main(["demo"]) == 2
    assert "pip install 'ltx_inductor[demo]'" in capsys.readouterr().err


def test_demo_sees_a_wrong_bit():
    """The comparison that the demo ends with can fail."""
    from rich.console import Console

    from ltx_inductor.rewrite.report import GraphReport, RewriteReport, Site

    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(64, eps=1e-6).to(torch.bfloat16)
    x = torch.randn(1, 8, 64).to(torch.bfloat16)
    cos, sin = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    out = torch.ops.ltx_inductor.rmsnorm_split_rope(x, norm.weight, cos, sin, 1e-6, 2, "fp32-rope").detach()
    site = Site("rmsnorm_split_rope", "op", "q", None, "", {}, "fp32-rope", "node")
    report = RewriteReport([GraphReport([site])])
    console = Console(quiet=True)
    sides = [demo.Side("q", norm, x, cos, sin, out)]
    with torch.no_grad():
        assert demo._compare(console, sides, report) == 0
        sides[0].out = out.clone()
        sides[0].out[0, 0, 0] = -out[0, 0, 0]
        assert demo._compare(console, sides, report) == 1
        assert demo._compare(console, sides * 2, report) == 2  # a side that the report lacks


@pytest.mark.slow
def test_demo(tmp_path):
    """The real thing, in a process of its own; needs diffusers."""
    pytest.importorskip("diffusers")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-m", "ltx_inductor", "demo"], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "16 sides rewritten, 0 refused" in run.stdout
    assert "all 16 rewritten sides equal eager bit for bit" in run.stdout
    assert "ltx_inductor.qk_rmsnorm_split_rope" in run.stdout  # in the diff
