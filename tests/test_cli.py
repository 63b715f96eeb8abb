"""The command line: what it prints, its exit status, and what it says about wrong arguments."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ltx_inductor import bench, cli, demo, doctor, kernels
from ltx_inductor.config import RULES
from ltx_inductor.kernels import build, repro, store
from ltx_inductor.rewrite.report import GraphReport, Refusal, RewriteReport, Site
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


class Talkative(stand_in.Model):
    def forward(self, x):
        print("the model's own words")
        return super().forward(x)


def talkative():
    print("the factory's own words")
    subprocess.run(["echo", "and those of a child"], check=True)
    return Talkative(), torch.ones(3, 8)


def test_explain(capsys):
    assert cli.main(["explain", "tests.test_cli:one", "--expect", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 side rewritten, 0 refused" in out
    assert "[3, 8]" in out  # the brackets of a shape are no markup
    assert cli.main(["explain", "tests.test_cli:one", "--expect", "2"]) == 1
    assert "expected 2 sites of all rules, found 1" in capsys.readouterr().err


def test_explain_expects_by_rule(capsys):
    def expect(*counts):
        return cli.main(["explain", "tests.test_cli:one", *(word for c in counts for word in ("--expect", c))])

    rope, attention = "rmsnorm_split_rope", "neighborhood_attention"
    assert expect(f"{rope}=1", f"{attention}=0", "1") == 0
    capsys.readouterr()
    assert expect(f"{rope}=0", f"{attention}=1") == 1
    err = capsys.readouterr().err
    assert f"expected 0 sites of {rope}, found 1" in err
    assert f"expected 1 sites of {attention}, found 0" in err
    for wrong in ("rope=1", f"{rope}=one", "-1"):
        with pytest.raises(SystemExit, match="2"):
            expect(wrong)
        assert f"expected N or RULE=N, where RULE is one of {', '.join(RULES)}" in capsys.readouterr().err


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


def test_json_is_alone_on_stdout(capfd):
    target = f"tests.test_cli:{talkative.__name__}"
    assert cli.main(["explain", target, "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["counts"] == {"rmsnorm_split_rope": 1}
    for words in ("the factory's own words", "and those of a child", "the model's own words"):
        assert words in err
    assert cli.main(["explain", target]) == 0
    assert "the model's own words" in capfd.readouterr().out


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


def test_build_as_json(monkeypatch, capsys):
    monkeypatch.setattr(build, "prebuild", lambda archs: [(a, "the folder") for a in archs])
    assert cli.main(["build", "--arch", "9.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"arch": "9.0", "folder": "the folder"}]


@pytest.fixture
def no_natten(monkeypatch):
    """Importing natten in a process of its own takes seconds."""
    monkeypatch.setattr(doctor, "_natten", lambda: iter([doctor.Finding("natten", "1")]))


def test_doctor_finds_what_is_here(no_natten, capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert 'backend="ltx"' in out
    assert cli.main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["status"] == 0
    assert {f["name"] for f in data["findings"]} >= {"torch", "backend", "GPU", "nvcc", "kernel cache", "proofs"}


NOTHING = {"nvcc": None, "nvrtc": None, "cc": None, "tvm_ffi": None, "cache": "folder"}


def test_doctor_says_what_missing_costs_and_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(build, "toolchain", lambda: NOTHING)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    lines = {f.name: f for f in doctor.find()}
    for name in ("nvcc", "NVRTC", "C compiler", "tvm_ffi", "tilelang", "natten", "diffusers"):
        assert lines[name].cost, name
        assert lines[name].do, name
    assert lines["GPU"].cost
    assert lines["torch"].ok
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert cli.main(["doctor"]) == 1
    assert "do: pip install 'torch>=2.11'" in capsys.readouterr().out


def test_doctor_reports_nvrtc_instead_of_nvcc(monkeypatch):
    nvrtc = {"path": "somewhere", "version": "13.0"}
    monkeypatch.setattr(build, "toolchain", lambda: NOTHING | {"nvrtc": nvrtc, "tvm_ffi": "1"})
    lines = {f.name: f for f in doctor._build_tools()}
    assert (lines["nvcc"].cost, lines["nvcc"].do) == ("NVRTC is used", "")
    assert lines["NVRTC"].ok


def test_doctor_knows_the_cache_and_the_proofs(monkeypatch, tmp_path):
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path / "cache"))
    assert "0 artefacts" in doctor._kernel_cache().found
    assert "none yet" in doctor._proofs().found
    store.publish(tmp_path / "cache" / kernels.source_digest()[:16] / "a.cubin", b"1234")
    assert "1 artefacts, 0.0 MB, 1 of this version" in doctor._kernel_cache().found
    record = {"contract": "bf16-chain", "device": "a GPU", "torch": torch.__version__, "refusal": None}
    store.publish(tmp_path / "cache" / "proofs" / "a.proof", json.dumps(record).encode())
    assert doctor._proofs().found == "1 x bf16-chain on a GPU"
    attention = {"window": [11, 11, 11], "errors": {}, "device": "a GPU", "torch": torch.__version__, "refusal": None}
    store.publish(tmp_path / "cache" / "proofs" / "n.proof", json.dumps(attention).encode())
    assert doctor._proofs().found == "1 x bf16-chain on a GPU, 1 x window 11x11x11 on a GPU"
    command = repro.save("rmsnorm_split_rope", (torch.ones(2),))
    assert doctor._proofs().found == "1 wrong results of kernels are kept"
    assert command.endswith(doctor._proofs().do)


def test_doctor_knows_the_no_code_start(monkeypatch):
    monkeypatch.delenv("LTX_INDUCTOR_REGISTER", raising=False)
    assert doctor._autoload().found.startswith("off")
    monkeypatch.setenv("LTX_INDUCTOR_REGISTER", "1")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert "no effect" in doctor._autoload().cost
    entry = types.SimpleNamespace(value="ltx_inductor_autoload:autoload")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    assert doctor._autoload().ok
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "false")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in doctor._autoload().do
    monkeypatch.setenv("LTX_INDUCTOR_REGISTER", "maybe")
    assert doctor._autoload().cost.startswith("LTX_INDUCTOR_REGISTER='maybe': expected one of 1, true, yes, y, on, 0")


@pytest.mark.slow
def test_doctor_asks_natten_for_its_library():
    pytest.importorskip("natten")
    package, library = doctor._natten()
    assert package.ok
    assert library.found in ("there", "none")


def test_doctor_in_a_narrow_terminal(no_natten, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(build, "toolchain", lambda: NOTHING)
    assert cli.main(["doctor"]) == 0
    assert "do: pip install 'apache-tvm-ffi" in " ".join(capsys.readouterr().out.split())


def test_diff(tmp_path, capsys):
    sites = [
        Site("rmsnorm_split_rope", "op", s, 0, f"m.py:{n}", {"x": "[1]"}, "bf16-chain", s) for n, s in enumerate("qk")
    ]
    refusal = Refusal("rmsnorm_split_rope", "now it is read twice", "m.py:1", hint="undo that")
    before, after = RewriteReport([GraphReport(sites)]), RewriteReport([GraphReport(sites[:1], [refusal])])
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (before, after), strict=True):
        path.write_text(report.to_json())
    assert cli.main(["diff", *map(str, paths)]) == 1
    out = capsys.readouterr().out
    assert "0 gained, 1 lost, 1 refused that were not before" in out
    assert "- m.py:1" in out
    assert "now it is read twice" in out
    assert cli.main(["diff", *map(str, paths[::-1]), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gained"]) == 1
    moved = [replace(s, source="m.py:77", node="other") for s in sites]  # code moves
    assert not before.diff(RewriteReport([GraphReport(moved)])).lost
    assert len(before.diff(RewriteReport([GraphReport(moved * 2)])).gained) == 2
    paths[1].write_text("{}")
    assert cli.main(["diff", *map(str, paths)]) == 2
    assert "is not a report" in capsys.readouterr().err
    assert cli.main(["diff", str(tmp_path / "none"), str(paths[0])]) == 2


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ({"x": "[s50, s7, 64]", "out": "[s50, s7, 64]"}, {"x": "[s16, s9, 64]", "out": "[s16, s9, 64]"}, True),
        ({"x": "[s50, 42*s7]"}, {"x": "[s3, 42*u0]"}, True),
        ({"q": "[s1*s2, s1]"}, {"q": "[s3*s9, s9]"}, True),  # factors are printed by name
        ({"x": "[s50, s7]"}, {"x": "[s50, s50]"}, False),
        ({"x": "[s50, 64]"}, {"x": "[s50, 128]"}, False),
        ({"x": "[s50, 64]"}, {"x": "[3, 64]"}, False),
    ],
)
def test_names_of_symbols_are_no_difference(before, after, same):
    reports = [
        RewriteReport([GraphReport([Site("rmsnorm_split_rope", "op", "q", None, "m.py:1", s, "bf16-chain", "n")])])
        for s in (before, after)
    ]
    assert bool(reports[0].diff(reports[1]).lost) != same


def test_bench(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "rope", "block", "--out", str(tmp_path)]) == 1
    assert "rope: no GPU here: nothing was measured" in capsys.readouterr().out
    assert cli.main(["bench", "nonsense"]) == 2
    assert "no benchmark 'nonsense'" in capsys.readouterr().err
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench"]) == 2
    assert "clone of the repository" in capsys.readouterr().err


def test_bench_runs_a_script_and_shows_its_table(monkeypatch, tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "rope.py"
    rows = {"production": {"v1536": {"ours": 20.0, "inductor": 80.0, "of_floor": 0.97}}}
    script.write_text(
        f"import sys, pathlib; print('a row'); pathlib.Path(sys.argv[-1]).write_text({json.dumps(rows)!r})"
    )
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "_not_here", lambda script: "")
    assert cli.main(["bench", "rope", "--quick", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "4.00" in out
    assert "0.970" in out
    assert cli.main(["bench", "rope", "--quick", "--json", "--out", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["rope"] == rows


def test_the_tables_of_the_committed_results():
    """What the scripts wrote is what the tables read."""
    results = ROOT / "benchmarks" / "results"
    names = {
        "rope": "rope-h200",
        "axial": "axial-h200",
        "host": "host-h200",
        "fna": "fna-h200",
        "fna_exact": "fna-exact-h200",
        "block": "block-h200",
        "decoder_block": "decoder-block-h200",
        "decoder": "decoder-h200",
        "pass_cost": "pass_cost",
    }
    found = {"measured": {name: json.loads((results / f"{file}.json").read_text()) for name, file in names.items()}}
    assert [t.row_count for t in bench.tables(found)] == [40, 7, 18, 14, 8, 2, 2, 3, 4]


def test_demo_without_diffusers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "diffusers.models.transformers.transformer_ltx2", None)
    assert cli.main(["demo"]) == 2
    assert "pip install diffusers==" in capsys.readouterr().err


def test_demo_sees_a_wrong_bit():
    """The comparison that the demo ends with can fail."""
    from rich.console import Console

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
    """The real thing, in a process of its own; needs diffusers. With --json the text goes to stderr."""
    pytest.importorskip("diffusers")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "ltx_inductor", "demo", "--json"]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    data = json.loads(run.stdout)
    assert (data["status"], data["different_elements"]) == (0, 0)
    assert sum(len(g["sites"]) for g in data["report"]["graphs"]) == 16
    assert "16 sides rewritten, 0 refused" in run.stderr
    assert "all 16 rewritten sides equal eager bit for bit" in run.stderr
    assert "ltx_inductor.qk_rmsnorm_split_rope" in run.stderr  # in the diff
