"""The schedule `exact` as far as no GPU is needed: what it refuses, and that it compiles for sm_90a."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from ltx_inductor.kernels import compilers, fna_exact
from ltx_inductor.kernels.rope import KernelNotReadyError

TAKES = {"arch": (9, 0), "dtype": torch.bfloat16, "head_dim": 64, "kernel_size": (11, 11, 11)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"arch": (8, 0)}, "for compute capability 8.0; expected 9.0 (H100, H200)"),
        ({"arch": (10, 0)}, "for compute capability 10.0; expected 9.0 (H100, H200)"),
        ({"dtype": torch.float16}, "for torch.float16; expected torch.bfloat16"),
        ({"head_dim": 128}, "for head_dim 128; expected 64"),
        ({"kernel_size": (11, 11, 17)}, "for window (11, 11, 17); expected three sizes from 2 to 15"),
        ({"kernel_size": (1, 11, 11)}, "for window (1, 11, 11); expected three sizes from 2 to 15"),
        ({"kernel_size": (11, 11)}, "for window (11, 11); expected three sizes from 2 to 15"),
    ],
)
def test_what_it_does_not_take_is_a_sentence(change: dict, expected: str) -> None:
    assert fna_exact.unsupported(**TAKES) is None
    found = fna_exact.unsupported(**(TAKES | change))
    assert found is not None
    assert found.endswith(expected)


def test_without_tilelang_prepare_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fna_exact, "_kernel", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = fna_exact.prepare((9, 0), dtype=torch.bfloat16, head_dim=64, kernel_size=(11, 11, 11), device=0)
    assert found is not None
    assert "pip install tilelang" in found


def test_a_launch_that_was_not_prepared() -> None:
    q = torch.zeros((1, 4, 4, 4, 1, 64), dtype=torch.bfloat16)
    with pytest.raises(KernelNotReadyError, match="not ready on cpu"):
        fna_exact.launch(q, q, q, (3, 3, 3), 1.0)
    with pytest.raises(ValueError, match="scale 0.0: .* needs a positive scale"):
        fna_exact.launch(q, q, q, (3, 3, 3), 0.0)


def test_tilelang_is_imported_only_when_a_kernel_is_wanted() -> None:
    import subprocess

    code = "import sys, ltx_inductor.kernels.fna_exact; print('tilelang' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="no tilelang")
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="no nvcc")
def test_the_tilelang_program_compiles_for_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    monkeypatch.setattr(fna_exact, "_kernel", None)
    assert fna_exact._compile() is None
    assert capfd.readouterr() == ("", ""), "TileLang is quiet"
    assert fna_exact._kernel is not None
    source = fna_exact._kernel.get_kernel_source()
    for part in ("ltx_fna::softmax<8, true>", "ltx_fna::softmax<5, false>", "wgmma_rs", "tma_load", "ltx_fna::store"):
        assert part in source
    assert any((tmp_path / "tilelang").rglob("*")), "TileLang keeps the kernel beside ours"


def test_the_first_call_is_on_real_tensors_while_a_graph_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass asks for a kernel under the compile's fake-tensor mode, and TileLang wants addresses."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    seen: list[torch.Tensor] = []
    monkeypatch.setattr(fna_exact, "launch", lambda q, k, v, window, scale: seen.extend((q, k, v)))
    with FakeTensorMode():
        fna_exact._first_call(torch.bfloat16, torch.device("cpu"))
        assert isinstance(torch.zeros(1), FakeTensor)
    assert len(seen) == 3
    assert not any(isinstance(t, FakeTensor) for t in seen)
    assert all(t.data_ptr() for t in seen)
