"""Verdicts on kernels: measured once, kept, and measured again where anything they depend on has changed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ltx_inductor.kernels import proofs


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache, a device of compute capability 9.0, and what was measured since."""
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(proofs, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0))
    return []


def ask(measured: list[str], *facts: str) -> proofs.Record:
    def measure() -> proofs.Record:
        measured.append(facts[0])
        return {"refusal": None, "of": facts[0]}

    return proofs.verdict(0, facts, measure)


def test_once_in_a_process_and_once_on_a_machine(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(measured, "a", "1") == ask(measured, "a", "1") == {"refusal": None, "of": "a"}
    monkeypatch.setattr(proofs, "_verdicts", {})  # another process
    assert ask(measured, "a", "1")["of"] == "a"
    assert measured == ["a"]
    assert proofs.kept(0, ("a", "1")) == {"refusal": None, "of": "a"}
    assert proofs.kept(0, ("b",)) is None
    ask(measured, "b")
    assert sorted(r["of"] for r in proofs.all_kept()) == ["a", "b"]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch, "__version__", "9.9"),
        (torch.version, "cuda", "99.9"),
        (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=10, minor=0)),
        (proofs, "source_digest", lambda: "other sources"),
    ],
)
def test_another_torch_cuda_gpu_or_source(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any
) -> None:
    ask(measured, "a")
    monkeypatch.setattr(owner, name, value)
    ask(measured, "a")
    assert measured == ["a", "a"]


def test_a_damaged_record_is_measured_again(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ask(measured, "a")
    (record,) = proofs._folder().glob("*.proof")
    record.write_bytes(record.read_bytes()[:-3])
    monkeypatch.setattr(proofs, "_verdicts", {})
    assert proofs.all_kept() == []
    ask(measured, "a")
    assert measured == ["a", "a"]


def test_a_cache_that_cannot_be_written_costs_only_the_next_process(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path / "file"))
    ask(measured, "a")
    ask(measured, "a")
    assert measured == ["a"]
    assert "a proof is kept for this process only" in caplog.text


def test_a_failed_measurement_leaves_nothing(measured: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        proofs.verdict(0, ("a",), lambda: {"refusal": 1 // 0})
    assert proofs.all_kept() == []
    ask(measured, "a")
    assert measured == ["a"]


def test_it_measures_real_tensors_while_a_graph_is_compiled(measured: list[str]) -> None:
    seen: list[torch.Tensor] = []

    def measure() -> proofs.Record:
        seen.append(torch.ones(2, requires_grad=True) * 2)
        return {"refusal": None}

    with FakeTensorMode():
        proofs.verdict(0, ("a",), measure)
        assert isinstance(torch.ones(1), FakeTensor)
    assert not isinstance(seen[0], FakeTensor)
    assert not seen[0].requires_grad
    assert seen[0].data_ptr()
