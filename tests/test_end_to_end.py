"""The whole road with the real rule: a script that imports torch only, in two processes on one cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ltx_inductor
from tests.end_to_end_child import QueriesAndKeys

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("test_end_to_end")  # one worker: the module's fixture is expensive


def answer(cache: Path, **environment: str) -> dict:
    """What a process of its own says, on the Inductor cache in `cache`."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, str(ROOT / "tests" / "end_to_end_child.py")]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("ANSWER"))
    return json.loads(line.removeprefix("ANSWER"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return [answer(cache), answer(cache)]


def test_a_home_that_cannot_be_written(tmp_path):
    """Not even by root: it is a file. The model runs, rewritten and right."""
    (tmp_path / "home").write_text("")
    gone = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": "", "LTX_INDUCTOR_CACHE": ""}
    found = answer(tmp_path / "cache", **gone)
    assert found["differ"] == 0
    assert len(found["report"]["graphs"][0]["sites"]) == 2


def test_both_processes_have_eagers_bits(runs):
    assert [r["differ"] for r in runs] == [0, 0]


def test_the_second_hits_and_reports(runs):
    first, second = runs
    assert (first["hits"], second["hits"]) == (0, 1)
    assert (first["report"]["cached"], second["report"]["cached"]) == (False, True)
    for what in ("sites", "drawings"):
        assert first["report"]["graphs"][0][what] == second["report"]["graphs"][0][what]
    assert first["report"]["graphs"][0]["drawings"]
    assert "read from cache" in second["text"]


def test_the_report_names_what_was_done(runs):
    q, k = runs[0]["report"]["graphs"][0]["sites"]
    assert q["op"] == k["op"] == "ltx_inductor::qk_rmsnorm_split_rope"
    assert q["pair"] == k["pair"] == 0
    assert q["contract"] == "fp32-rope"
    assert q["source"].startswith("end_to_end_child.py:")


def inputs(tokens=16, dtype=torch.bfloat16, heads=2):
    q, k = torch.randn(2, 1, tokens, 64).to(dtype)
    cos, sin = torch.randn(2, 1, tokens, heads, 32 // heads).transpose(2, 3)
    return q, k, cos, sin


def test_explain_and_expect():
    with torch.no_grad():
        report = ltx_inductor.explain(QueriesAndKeys(64).to(torch.bfloat16), *inputs())
    report.expect(rmsnorm_split_rope=2)


def test_explain_counts_no_side_without_a_kernel():
    """The CPU stands for a GPU there, and no GPU has a kernel for heads of 16; the op on the CPU needs none."""
    model = QueriesAndKeys(64).to(torch.bfloat16).eval()
    report = ltx_inductor.explain(model, *inputs(heads=4))
    report.expect(rmsnorm_split_rope=0)
    assert [r.reason for r in report.refusals] == [
        "no kernel for head_dim 16; expected a multiple of 8 from 32 to 256"
    ] * 2
    with torch.no_grad():
        torch.compile(model, backend="ltx", options={"ltx_inductor.cpu": True})(*inputs(heads=4))
    ltx_inductor.last_report().expect(rmsnorm_split_rope=2)


def test_a_model_in_eval_mode_is_explained_for_inference_and_the_report_says_so():
    model = QueriesAndKeys(64).to(torch.bfloat16).eval()
    for given in (model, torch.compile(model, backend="ltx")):
        report = ltx_inductor.explain(given, *inputs())
        report.expect(rmsnorm_split_rope=2)
        assert "torch.no_grad()" in str(report)


def test_training_is_refused_with_a_hint():
    report = ltx_inductor.explain(QueriesAndKeys(64).to(torch.bfloat16), *inputs())
    assert report.count() == 0
    assert any("no_grad" in r.hint or "no_grad" in r.reason for r in report.refusals)
    with pytest.raises(ltx_inductor.LostFusionError, match="expected 2 sides of rmsnorm_split_rope, found 0"):
        report.expect(rmsnorm_split_rope=2)


def test_cpu_graphs_are_refused_by_default_and_strict_says_so():
    torch._dynamo.reset()
    model = QueriesAndKeys(64).to(torch.bfloat16)
    with torch.no_grad():
        torch.compile(model, backend="ltx")(*inputs())
        refusals = ltx_inductor.last_report().refusals
        assert len(refusals) == 2
        assert all("CPU" in r.reason and "ltx_inductor.cpu" in r.hint for r in refusals)
        strict = torch.compile(model, backend="ltx", options={"ltx_inductor.strict": True})
        with pytest.raises(ltx_inductor.LostFusionError, match="on the CPU"):
            strict(*inputs())


def test_rules_can_be_turned_off():
    torch._dynamo.reset()
    with torch.no_grad():
        report = ltx_inductor.explain(
            QueriesAndKeys(64).to(torch.bfloat16), *inputs(), options={"ltx_inductor.rules": []}
        )
    assert (report.sites, report.refusals) == ([], [])


def test_dumps(tmp_path):
    torch._dynamo.reset()
    options = {"ltx_inductor.cpu": True, "ltx_inductor.dump": tmp_path}
    with torch.no_grad():
        torch.compile(QueriesAndKeys(64).to(torch.bfloat16), backend="ltx", options=options)(*inputs())
    (folder,) = tmp_path.iterdir()
    assert "aten.rsqrt" in (folder / "before.py").read_text()
    assert "ltx_inductor.qk_rmsnorm_split_rope" in (folder / "after.py").read_text()
    diff = (folder / "graph.diff").read_text()
    assert "+    qk_rmsnorm_split_rope" in diff
    assert len(list(folder.glob("0*.diff"))) == 1  # one rewrite: the pair
