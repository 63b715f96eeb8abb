"""`import ltx_inductor` is cheap, quiet, and enough for a compiled graph to find its ops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ltx_inductor

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("test_import")  # one worker: the module's fixture is expensive
CHILD = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import ltx_inductor
took = time.perf_counter() - start
import torch.cuda
print(json.dumps({
    "ms": took * 1000,
    "new": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "ops": [str(getattr(torch.ops.ltx_inductor, o).default) for o in ("qk_rmsnorm_split_rope", "na3d")],
}))
"""


@pytest.fixture(scope="module")
def imported():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True) for _ in range(3)]
    answers = [json.loads(r.stdout) for r in runs]
    return min(answers, key=lambda a: a["ms"])


def test_adds_less_than_100_ms(imported):
    assert imported["ms"] < 100


def test_imports_nothing_heavy(imported):
    heavy = ("tilelang", "natten", "tvm_ffi", "triton", "torch._dynamo", "torch._inductor", "rich", "diffusers")
    assert [m for m in imported["new"] if m.startswith(heavy)] == []
    assert not imported["cuda"]


def test_registers_the_ops(imported):
    assert imported["ops"] == ["ltx_inductor.qk_rmsnorm_split_rope.default", "ltx_inductor.na3d.default"]


def test_public_names():
    assert all(hasattr(ltx_inductor, name) for name in ltx_inductor.__all__)
    assert set(ltx_inductor.__all__) <= set(dir(ltx_inductor))
    assert callable(ltx_inductor.explain)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ltx_inductor.nonsense


def test_submodules_do_not_shadow_public_names():
    """`import ltx_inductor.explain` would turn the function into a module; hence `explainer` and `registration`."""
    modules = {p.stem for p in (ROOT / "ltx_inductor").iterdir()}
    assert not modules & set(ltx_inductor.__all__)


def test_version_is_the_distributions():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{ltx_inductor.__version__}"' in text
