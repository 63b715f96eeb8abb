"""The exactness gate on a GPU: right kernels pass it, and a wrong one is off, also for a graph out of Inductor's cache.

What the C dispatch serves is for ever in a process, so whole compiles are done in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx_inductor
from ltx_inductor.kernels import choice, counts, fna, gate, proofs, rope
from ltx_inductor.kernels.rope_specs import PRODUCTION, Spec, unsupported
from ltx_inductor.ops import na3d
from ltx_inductor.ops.rope import reference
from ltx_inductor.replay import replay
from ltx_inductor.rewrite.needs import KernelNeed, NeighborhoodNeed

ROOT = Path(__file__).resolve().parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROW = Spec("bf16-chain", BF16, BF16, 128, 4096, False, "bshd", True)
HEAD = Spec("fp32-rope", BF16, FP32, 64, 64, True, "bhsd", True)
SPECS = [
    *PRODUCTION,
    *(replace(s, dtype=FP16, table_dtype=FP16) for s in (ROW, HEAD)),
    *(replace(s, contract="fp32-all-result-muladd", table_dtype=FP32) for s in (ROW, HEAD)),
    replace(ROW, head_dim=40, norm=2000),
    replace(ROW, head_dim=256, norm=16384),  # too long for a rope_pair
    HEAD,
    replace(HEAD, shared=False),
    replace(HEAD, head_dim=248, norm=248),
    replace(HEAD, head_dim=32, norm=32, layout="bshd"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_a_right_kernel_passes(spec: Spec) -> None:
    facts: dict[str, Any] = {"dtype": spec.dtype, "table_dtype": spec.table_dtype, "head_dim": spec.head_dim}
    facts |= {"hidden": spec.norm, "contract": spec.contract, "per_head": spec.per_head}
    arch = torch.cuda.get_device_capability()
    assert unsupported(arch=arch, **facts) is None
    assert rope.prepare(arch, **facts, layout=spec.layout, shared=spec.shared, device=0) is None
    with torch.no_grad():
        record = gate._compare(spec, 0, reference)
    assert record["refusal"] is None
    assert record["elements"] >= (3 if spec.shared else 2) * gate.ELEMENTS


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built, proved, accepted or off, as far as Python knows."""
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(proofs, "_verdicts", {})
    for module, name in ((rope, "_images"), (rope, "_handles"), (rope, "_plans"), (rope, "_off"), (fna, "_off")):
        monkeypatch.setattr(module, name, {})
    for module, name in ((rope, "_accepted"), (rope, "_served"), (fna, "_accepted")):
        monkeypatch.setattr(module, name, set())
    choice._warn_once.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_nothing_is_compared_inside_a_capture() -> None:
    need = KernelNeed(torch.device("cuda", 0), BF16, BF16, 64, 512, False, "bf16-chain", "bshd", True)
    kernels = choice.DeviceKernels(reference)
    facts: dict[str, Any] = {**choice._rope_facts(need), "layout": "bshd", "shared": True}
    assert rope.prepare(torch.cuda.get_device_capability(), **facts, device=0, trial=True) is None
    before = ltx_inductor.stats()["qk_rmsnorm_split_rope"]["postponed"]
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.warns(UserWarning, match="a CUDA graph is being captured"):
            sentence = kernels.refusal(need)
    assert sentence is not None
    assert ltx_inductor.stats()["qk_rmsnorm_split_rope"]["postponed"] == before + 1
    graph.replay()
    assert x.tolist() == [1.0] * 4
    assert kernels.refusal(need) is None


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="not Hopper")
def test_a_wrong_neighborhood_kernel_is_off_and_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = fna.launch

    def wrong(*args: Any) -> Tensor:
        return launch(*args) * 1.01

    need = NeighborhoodNeed(torch.device("cuda", 0), BF16, 64, (3, 5, 5), False)
    before = ltx_inductor.stats()["na3d"]["differing"]
    monkeypatch.setattr(fna, "launch", wrong)
    with pytest.warns(UserWarning, match="has a relative error of 1"):
        sentence = choice.DeviceKernels(reference, na3d.reference).refusal(need)
    assert sentence is not None
    assert ltx_inductor.stats()["na3d"]["differing"] > before
    monkeypatch.setattr(fna, "launch", launch)
    q = torch.zeros(1, 4, 6, 7, 1, 64, dtype=BF16, device="cuda")
    refused = counts._state.ops["na3d"].refused
    with pytest.warns(UserWarning, match="na3d runs its reference"):
        torch.ops.ltx_inductor.na3d(q, q, q, (3, 5, 5), 1.0)
    assert counts._state.ops["na3d"].refused == refused + 1
    (file,) = tmp_path.rglob("na3d-*.pt")
    assert sentence.endswith(str(file))
    monkeypatch.setattr(fna, "_off", {})
    found = replay(file)
    assert (found["op"], found["differing"]) == ("na3d", 0)


# Processes. Each compiles Rotate, the pair that uses one kernel, and calls it twice.

CHILD = """
import json, sys, warnings
import torch
import ltx_inductor
from ltx_inductor.kernels import rope
from tests.gpu.test_end_to_end import Rotate, inputs, same_bits

wrong, stock, mode = json.loads(sys.argv[1])
right = rope.launch_pair

def one_bit_off(*args, **kwargs):
    out = right(*args, **kwargs)
    if out is not None:
        out[0].view(torch.int16).view(-1)[5] ^= 1
    return out

if wrong:
    rope.launch_pair = one_bit_off
torch.manual_seed(0)
module, args = Rotate("diffusers"), inputs(640)
with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = torch.compile(module, backend="ltx", mode=mode)
    want, same = module(*args), []
    for _ in range(4 if mode else 2):
        torch.compiler.cudagraph_mark_step_begin()
        same.append(same_bits([t.clone() for t in model(*args)], want))
    report, stats = ltx_inductor.last_report(), ltx_inductor.stats()["qk_rmsnorm_split_rope"]
    got, equal = [t.clone() for t in model(*args)], None
    if stock:
        torch._dynamo.reset()
        equal = same_bits(got, torch.compile(module)(*args))
print("FOUND", json.dumps({
    "same": same, "stock": equal, "cached": report.cached, "sites": report.count(), "stats": stats,
    "refusals": [r.reason for r in report.refusals], "notes": list(report.notes),
    "warnings": [str(w.message) for w in caught if "ltx_inductor" in str(w.message)],
    "proofs": [s.proof for s in report.sites],
}))
"""


def child(tmp_path: Path, wrong: bool = False, stock: bool = False, mode: str | None = None) -> dict[str, Any]:
    """What a process found that has its caches under tmp_path; wrong: one bit of its kernel's results is."""
    caches = {"LTX_INDUCTOR_CACHE": str(tmp_path / "kernels"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, "-c", CHILD, json.dumps([wrong, stock, mode])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **caches})
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def test_a_graph_whose_kernel_fails_the_gate_is_left_as_it_is(tmp_path: Path) -> None:
    found = child(tmp_path, wrong=True, stock=True)
    assert found["sites"] == 0
    assert found["stock"] is True  # what is left alone is Inductor's
    (reason,) = {r for r in found["refusals"] if "differs from eager" in r}
    (file,) = (tmp_path / "kernels").rglob("*.pt")
    assert reason.endswith(f"python -m ltx_inductor replay {file}")
    assert [w for w in found["warnings"] if reason in w] == found["warnings"]
    assert len(found["warnings"]) == 1
    assert found["stats"]["kernel"] == 0
    assert found["stats"]["differing"] > 0
    assert not list((tmp_path / "kernels").rglob("*.proof"))

    command = [sys.executable, "-m", "ltx_inductor", "replay", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr  # a right kernel is right on them
    assert "0 of" in done.stdout
    again = child(tmp_path)  # and another process finds out for itself
    assert (again["sites"], again["same"]) == (2, [True, True])


def test_a_graph_out_of_the_cache_whose_kernel_fails_the_gate_runs_as_eager(tmp_path: Path) -> None:
    first = child(tmp_path)
    assert (first["cached"], first["sites"], first["same"]) == (False, 2, [True, True])
    assert first["stats"]["kernel"] == 2
    assert all("no bit differs" in p for p in first["proofs"])
    shutil.rmtree(tmp_path / "kernels" / "proofs")
    found = child(tmp_path, wrong=True)
    assert found["cached"] is True
    assert found["same"] == [True, True]
    assert (found["stats"]["kernel"], found["stats"]["refused"]) == (0, 2)
    assert any("a cached graph runs without its kernel" in n and "differs from eager" in n for n in found["notes"])
    assert sum("running the eager chain" in w for w in found["warnings"]) == 1
    assert list((tmp_path / "kernels").rglob("*.pt"))


def test_a_graph_out_of_the_cache_whose_report_is_lost_uses_a_kernel_only_with_a_proof(tmp_path: Path) -> None:
    child(tmp_path)
    (reports,) = (p for p in (tmp_path / "inductor").rglob("reports") if p.parent.name == "ltx_inductor")
    shutil.rmtree(reports)
    proved = child(tmp_path)
    assert (proved["same"], proved["stats"]["kernel"], proved["warnings"]) == ([True, True], 2, [])
    shutil.rmtree(reports, ignore_errors=True)
    shutil.rmtree(tmp_path / "kernels" / "proofs")
    found = child(tmp_path)
    assert (found["same"], found["stats"]["kernel"], found["stats"]["refused"]) == ([True, True], 0, 2)
    (warning,) = found["warnings"]
    assert "nobody has compared it with eager" in warning
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in warning


def test_reduce_overhead_with_a_cold_kernel_cache(tmp_path: Path) -> None:
    """Kernels are built, loaded and proved while the graph is compiled: the capture, which comes later, meets none."""
    found = child(tmp_path, mode="reduce-overhead")
    assert (found["sites"], found["same"]) == (2, [True] * 4)
    assert (found["stats"]["refused"], found["stats"]["postponed"]) == (0, 0)
    assert list((tmp_path / "kernels").rglob("*.cubin"))
    assert list((tmp_path / "kernels").rglob("*.proof"))
