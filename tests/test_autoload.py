"""LTX_INDUCTOR_REGISTER=1: a script that knows nothing of us and compiles with stock Inductor is rewritten.

And what it did can be seen: in the log, and in a file; of a graph that came out of Inductor's caches, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ltx_inductor import report_log
from ltx_inductor.rewrite.report import GraphReport, RewriteReport
from tests.installed import ROOT, environment

SCRIPT = """
import sys
import torch
print("LOADED", sorted(m for m in sys.modules if m.startswith("ltx_inductor")), "torch._dynamo" in sys.modules)
torch._inductor.config.force_disable_caches = True
from tests.end_to_end_child import QueriesAndKeys
q, k = torch.randn(2, 1, 16, 64).bfloat16()
cos, sin = torch.randn(2, 1, 16, 2, 16).transpose(2, 3)
from torch._inductor import compile_fx
from functools import partial
def inner(gm, inputs, **_):
    print("OPS", sum("ltx_inductor" in str(n.target) for n in gm.graph.nodes))
    run = lambda values: gm(*values)
    run._boxed_call = True
    return run
compile_fx.compile_fx = partial(compile_fx.compile_fx, inner_compile=inner)  # no code is generated
with torch.no_grad():
    torch.compile(QueriesAndKeys(64).bfloat16(), backend="inductor")(q, k, cos, sin)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script in an environment where the entry point is installed; what it says."""

    def run(script: str = SCRIPT, **variables: str) -> str:
        env = environment(tmp_path, **variables)
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def test_with_the_variable(run):
    out = run(LTX_INDUCTOR_REGISTER="1")
    assert "LOADED ['ltx_inductor_autoload'] False" in out  # `import torch` stays light
    assert "OPS 1" in out  # one op for queries and keys


def test_without_it_nothing_happens(run):
    out = run(LTX_INDUCTOR_REGISTER="0")
    assert "LOADED ['ltx_inductor_autoload'] False" in out
    assert "OPS 0" in out


def test_what_is_wrong_is_said_and_stops_nothing(run):
    out = run(LTX_INDUCTOR_REGISTER="1", LTX_INDUCTOR_STRICT="perhaps")
    assert "LTX_INDUCTOR_REGISTER had no effect: ValueError: LTX_INDUCTOR_STRICT='perhaps'" in out
    assert "OPS 0" in out


@pytest.mark.parametrize("value", ["y", "On"])
def test_other_ways_to_say_yes(run, value):
    assert "OPS 1" in run(LTX_INDUCTOR_REGISTER=value)


def test_a_value_that_is_none_is_told(run):
    (line,) = set(run("import torch", LTX_INDUCTOR_REGISTER="maybe").splitlines())  # once per installation, as here two
    assert line == (
        "ltx_inductor: LTX_INDUCTOR_REGISTER='maybe' had no effect: expected one of 1, true, yes, y, on, 0, false, no, "
        "n, off"
    )


def test_the_report_is_in_the_log_and_in_the_file(run, tmp_path):
    """Twice into one file; the second time Inductor's caches answer, so that this script generates code."""
    path = tmp_path / "reports.jsonl"
    script = """
import torch
torch._inductor.config.compile_threads = 1
from tests.end_to_end_child import QueriesAndKeys
q, k = torch.randn(2, 1, 16, 64).bfloat16()
cos, sin = torch.randn(2, 1, 16, 2, 16).transpose(2, 3)
with torch.no_grad():
    torch.compile(QueriesAndKeys(64).bfloat16(), backend="inductor")(q, k, cos, sin)
"""
    said = [
        run(
            script,
            LTX_INDUCTOR_REGISTER="1",
            TORCH_LOGS="ltx_inductor",
            LTX_INDUCTOR_REPORT=str(path),
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        )
        for _ in range(2)
    ]
    assert "ltx_inductor: 2 sides rewritten, 0 refused, in 1 graph" in said[0]
    assert "(one side, pair 0)" in said[0]
    assert "read from cache" in said[1]
    assert "(one side, pair 0)" in said[1]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    fresh, cached = (RewriteReport.from_dict(line) for line in lines)
    assert (fresh.cached, cached.cached) == (False, True)
    assert fresh.count() == cached.count() == 2
    assert lines[0]["pid"] != lines[1]["pid"]


def test_processes_share_the_file(tmp_path):
    """Lines of more than a pipe's or a page's size, from four processes at once, stay whole."""
    path = tmp_path / "reports.jsonl"
    script = """
from ltx_inductor import report_log
from ltx_inductor.rewrite.report import GraphReport, RewriteReport
for _ in range(20):
    report_log.publish(RewriteReport([GraphReport(notes=["x" * 100_000])]))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LTX_INDUCTOR_REPORT": str(path)}
    children = [subprocess.Popen([sys.executable, "-c", script], env=env) for _ in range(4)]
    assert [c.wait(timeout=120) for c in children] == [0] * 4
    pids = [json.loads(line)["pid"] for line in path.read_text().splitlines()]
    assert sorted(map(pids.count, {c.pid for c in children})) == [20] * 4


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LTX_INDUCTOR_REPORT", str(tmp_path / "no" / "folder"))
    report_log.publish(RewriteReport([GraphReport()]))
    assert "the report could not be written: No such file or directory" in caplog.text
