"""The code that Inductor writes for our ops: a direct launch into planned buffers, or the op where that cannot be.

On the CPU, which `lowering` otherwise leaves alone: no kernel is loaded there, so every launch is handed to the op.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import ltx_inductor
from ltx_inductor import lowering
from ltx_inductor.ops import rope_direct
from ltx_inductor.registration import RegisteredPass
from tests.end_to_end_child import QueriesAndKeys, rotate

BF16 = torch.bfloat16
CPU = {"ltx_inductor.cpu": True}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lowering, "_DEVICES", ("cpu",))
    # Tests of the C function leave recorded launches of CPU tensors in the launcher, for as long as the process lives.
    monkeypatch.setattr(rope_direct, "_prepare_call", lambda: (None, "these tests run the op itself"))
    calls = rope_direct.rope_call
    calls.cache_clear()
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):  # the caches' key knows nothing of the lines above
        yield
    calls.cache_clear()


class Chain(nn.Module):
    """Norm and rotation twice, of pairs, and once of a single tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = QueriesAndKeys(128), nn.RMSNorm(128, elementwise_affine=False, eps=1e-6)

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            q, k = self.first(q + 1, k * 2, cos, sin)
        return rotate(self.norm(q - k), cos, sin) + 1, k


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = torch.randn(2, 2, tokens, 128).to(BF16)
    cos, sin = torch.randn(2, 2, tokens, 4, 16).transpose(2, 3)
    return q, k, cos, sin


def equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, expected, strict=True))


def code_of(compiled: Any, args: Any) -> tuple[Any, str]:
    with torch.no_grad():
        found, code = run_and_get_code(compiled, *args)
    return found, "\n".join(code)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_launch_for_every_op_into_planned_buffers(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, seen = Chain().to(BF16), inputs(24), []

    def rope_call(*arguments: Any) -> Any:
        seen.append(arguments)
        return original(*arguments)

    original = rope_direct.rope_call
    monkeypatch.setattr(rope_direct, "rope_call", rope_call)
    if dynamic:
        for i, t in enumerate(args):
            torch._dynamo.mark_dynamic(t, 1 if i < 2 else 2)
    compiled = torch.compile(model, backend="ltx", options=CPU)
    found, code = code_of(compiled, args)
    assert equal(found, model(*args))
    ltx_inductor.last_report().expect(rmsnorm_split_rope=5)
    assert "torch.ops.ltx_inductor" not in code
    eps = torch.tensor(1e-6).item()
    assert seen == [(pair, "fp32-rope", "bshd", eps, eps, 4, 4) for pair in (True, False)]
    calls = [line for line in code.splitlines() if line.strip().startswith("ltx_rope_") and "(buf" in line]
    assert [line.count(", ") for line in calls] == [9, 9, 4]
    assert "# reuse" in code
    if dynamic:
        for tokens in (9, 2):
            args = inputs(tokens)
            assert equal(compiled(*args), model(*args))
        assert len(seen) == 2


@pytest.mark.parametrize("left_behind", [False, True])
def test_the_op_stays_in_compiles_that_are_not_ours(left_behind: bool) -> None:
    lowering.install()
    (q, _, cos, sin), op = inputs(8), torch.ops.ltx_inductor.rmsnorm_split_rope
    hook = RegisteredPass() if left_behind else None  # in a hook, after unregister(): it does nothing

    def model(x: Tensor) -> Tensor:
        return op(x + 1, None, cos, sin, 1e-6, 4, "fp32-rope") * 2

    with config.patch(joint_custom_pre_pass=hook):
        found, code = code_of(torch.compile(model), (q,))
    assert "ltx_rope_" not in code
    assert "torch.ops.ltx_inductor.rmsnorm_split_rope" in code
    assert equal([found], [model(q)])


def test_the_op_stays_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_DEVICES", ("cuda",))
    model, args = QueriesAndKeys(128).to(BF16), inputs(8)
    found, code = code_of(torch.compile(model, backend="ltx", options=CPU), args)
    assert "torch.ops.ltx_inductor.qk_rmsnorm_split_rope" in code
    assert "ltx_rope_" not in code
    with torch.no_grad():
        assert equal(found, model(*args))


@pytest.mark.slow
def test_the_op_stays_in_a_cpp_wrapper() -> None:
    model, args = QueriesAndKeys(128).to(BF16), inputs(8)
    with torch.no_grad():
        compiled = torch.compile(model, backend="ltx", options=CPU | {"cpp_wrapper": True})
        assert equal(compiled(*args), model(*args))
    ltx_inductor.last_report().expect(rmsnorm_split_rope=2)


def test_the_op_stays_where_inductor_is_not_as_expected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*args: Any, **kwargs: Any) -> None:
        raise AttributeError("no such thing in this torch")

    monkeypatch.setattr(lowering, "empty_strided", gone)
    model, args = QueriesAndKeys(128).to(BF16), inputs(8)
    found, code = code_of(torch.compile(model, backend="ltx", options=CPU), args)
    assert "torch.ops.ltx_inductor.qk_rmsnorm_split_rope" in code
    assert "stays an op" in caplog.text
    with torch.no_grad():
        assert equal(found, model(*args))


CHILD = """
import sys, torch
from tests.end_to_end_child import QueriesAndKeys
from tests.test_lowering import inputs, equal, CPU
import ltx_inductor
from ltx_inductor import lowering
from ltx_inductor.ops import rope_direct
lowering._DEVICES = ("cpu",) if sys.argv[1] == "first" else ()
torch.manual_seed(0)
model, args = QueriesAndKeys(128).to(torch.bfloat16), inputs(16)
with torch.no_grad():
    found = torch.compile(model, backend="ltx", options=CPU)(*args)
    print(ltx_inductor.last_report().cached, equal(found, model(*args)), rope_direct.rope_call.cache_info().misses)
"""


def test_code_out_of_the_cache_launches_too(tmp_path: Path) -> None:
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    said = []
    for which in ("first", "second"):
        run = subprocess.run([sys.executable, "-c", CHILD, which], env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        said.append(run.stdout.split()[-3:])
    assert said == [["False", "True", "1"], ["True", "True", "1"]]
