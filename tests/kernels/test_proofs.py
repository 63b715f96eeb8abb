"""Verdicts on kernels: measured once, kept, and measured again where anything they depend on has changed."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ltx_inductor.kernels import proofs, store


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache, a device of compute capability 9.0, and what was measured since."""
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(proofs, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return []


def ask(measured: list[str], *facts: str, refusal: str | None = None) -> proofs.Record:
    def measure() -> proofs.Record:
        measured.append(facts[0])
        return {"refusal": refusal, "of": facts[0]}

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


def test_a_failure_is_remembered_by_its_process_only(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert ask(measured, "a", refusal="it differs")["refusal"] == "it differs"
    assert measured == ["a"]
    assert (proofs.kept(0, ("a",)), proofs.all_kept(), list(proofs._folder().glob("*"))) == (None, [], [])
    monkeypatch.setattr(proofs, "_verdicts", {})  # another process, with another driver, say
    assert ask(measured, "a")["refusal"] is None
    assert measured == ["a", "a"]


def test_a_failure_that_an_older_version_kept_is_no_verdict(measured: list[str]) -> None:
    path = proofs._folder() / f"{proofs._key(0, ('a',))}.proof"
    store.publish(path, json.dumps({"refusal": "it differs", "of": "a"}).encode())
    assert (proofs.kept(0, ("a",)), proofs.all_kept()) == (None, [])
    assert ask(measured, "a")["refusal"] is None


def test_a_proof_that_could_not_be_written_is_kept_by_its_process(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path / "file"))
    ask(measured, "a")
    assert proofs.kept(0, ("a",)) == {"refusal": None, "of": "a"}


def test_nothing_is_measured_while_a_graph_is_captured(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(proofs.PostponedError, match="a CUDA graph is being captured"):
        ask(measured, "a")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ask(measured, "a")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ask(measured, "a")["of"] == "a"  # known: nothing to measure
    assert measured == ["a"]


def test_only_the_thread_that_measures_may_launch_what_is_not_accepted(measured: list[str]) -> None:
    seen: list[bool] = []

    def measure() -> proofs.Record:
        seen.append(proofs.measuring())
        other = threading.Thread(target=lambda: seen.append(proofs.measuring()))
        other.start()
        other.join()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        proofs.verdict(0, ("a",), measure)
    assert [*seen, proofs.measuring()] == [True, False, False]


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
