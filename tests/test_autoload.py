"""LTX_INDUCTOR_REGISTER=1: a script that knows nothing of us and compiles with stock Inductor is rewritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys, time
start = time.perf_counter()
import torch
print("LOADED", sorted(m for m in sys.modules if m.startswith("ltx_inductor")), "torch._dynamo" in sys.modules)
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
torch._inductor.config.force_disable_caches = True
with torch.no_grad():
    torch.compile(QueriesAndKeys(64).bfloat16(), backend="inductor")(q, k, cos, sin)
"""


@pytest.fixture
def run(tmp_path):
    """In an environment where the entry point is installed, however this checkout was."""
    info = tmp_path / "ltx_inductor_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ltx-inductor-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nltx_inductor_test = ltx_inductor_autoload:autoload\n")

    def run(**variables: str) -> str:
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "LTX_INDUCTOR_CPU": "1", **variables}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
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
