"""The gate of neighborhood attention, with a stand-in for the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx_inductor
from ltx_inductor import replay
from ltx_inductor.kernels import choice, driver, fna, fna_exact, fna_gate, proofs
from ltx_inductor.kernels.rope import KernelNotReadyError
from ltx_inductor.ops import na3d
from ltx_inductor.rewrite.needs import NeighborhoodNeed

WINDOW = (3, 5, 5)
NEED = NeighborhoodNeed(torch.device("cuda", 0), torch.bfloat16, 64, WINDOW, False)
LAUNCH = fna.launch
ON_A_GPU: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(0,), dtype=torch.bfloat16)


def right(q: Tensor, k: Tensor, v: Tensor, window: Any, scale: float, exact: bool = False) -> Tensor:
    """As the kernel does it: what is not finite reaches the queries that see it, and no others."""
    broken = (~v.isfinite()).float()
    seen = na3d.reference(broken * 0, broken * 0, broken, window, 1.0) > 0
    return na3d.reference(q, k, v.nan_to_num(0, 0, 0), window, scale).masked_fill(seen, torch.nan)


@pytest.fixture(autouse=True)
def _a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compute capability 9.0, where the kernel is right."""
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(fna, "cubin", lambda window: b"image")
    monkeypatch.setattr(driver, "load", lambda *_: 1)
    monkeypatch.setattr(fna, "launch", right)
    monkeypatch.setattr(choice, "_warn_once", lambda sentence: None)
    monkeypatch.setattr(fna_gate, "draw", draw)
    another_process(monkeypatch)
    device = {
        "device": lambda device: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(major=9, minor=0),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device: "a GPU",
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in device.items():
        monkeypatch.setattr(torch.cuda, name, value)
    ltx_inductor.stats(reset=True)


def draw(window: Any, device: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, *(w + 3 for w in window), 2, 64) for _ in "qkv")
    return (q / 8 * factor).bfloat16(), k.bfloat16(), v.bfloat16()


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "_verdicts", {})
    monkeypatch.setattr(fna, "_accepted", set())
    for name in ("_functions", "_off", "_digests"):
        monkeypatch.setattr(fna, name, {})


def refusal(prove: bool = True) -> str | None:
    return choice.DeviceKernels(lambda *_: None, na3d.reference, prove=prove).refusal(NEED)


def test_a_right_kernel_is_accepted_after_its_proof_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*args: Any) -> Tensor:
        assert not fna._accepted
        return right(*args)

    monkeypatch.setattr(fna, "launch", launch)
    assert refusal() is None
    assert fna._accepted == {(0, WINDOW, False)}
    assert (ltx_inductor.stats()["na3d"]["checks"], ltx_inductor.stats()["na3d"]["differing"]) == (3, 0)
    proof = choice.DeviceKernels(lambda *_: None, na3d.reference).proof(NEED)
    assert "relative error" in proof


FAULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "error": (lambda out: out.mul_(1.01), "has a relative error of 1"),
    "not finite": (lambda out: out[0, -1, -1, -1, 1, 5:6].fill_(torch.inf), "has a relative error of inf"),
    "a NaN that spreads": (lambda out: out.masked_fill_(out.isnan().any(), torch.nan), "spreads a NaN"),
    "a NaN that is lost": (lambda out: out.nan_to_num_(0.0), "spreads a NaN, or loses one"),
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_kernel_is_off_and_its_inputs_are_kept(
    fault: Callable[[Tensor], Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(*args: Any) -> Tensor:
        out = right(*args)
        fault(out)
        return out

    monkeypatch.setattr(fna, "launch", wrong)
    sentence = refusal()
    assert sentence is not None
    assert words in sentence
    assert (fna._accepted, fna._off) == (set(), {(0, WINDOW, False): sentence})
    assert not list(tmp_path.rglob("*.proof"))
    assert ltx_inductor.stats()["na3d"]["differing"] > 0
    with pytest.raises(KernelNotReadyError, match="so it is not used"):
        LAUNCH(ON_A_GPU, ON_A_GPU, ON_A_GPU, WINDOW, 1.0)
    assert refusal() == refusal(prove=False) == sentence

    (file,) = tmp_path.rglob("na3d-*.pt")
    assert sentence.endswith(f"python -m ltx_inductor replay {file}")
    another_process(monkeypatch)
    args = torch.load(file, weights_only=True)["args"]
    assert replay._neighborhood(args)[1] > 0
    monkeypatch.setattr(fna, "launch", right)
    assert replay._neighborhood(args)[1] == 0


def test_a_kernel_on_trial_is_for_its_gate_only(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"dtype": torch.bfloat16, "head_dim": 64, "kernel_size": WINDOW}
    assert fna.prepare((9, 0), **facts, device=0, trial=True) is None  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(numel=lambda: 0))

    def launch() -> None:
        LAUNCH(ON_A_GPU, ON_A_GPU, ON_A_GPU, WINDOW, 1.0)

    with pytest.raises(KernelNotReadyError, match="is not ready on cuda:0"):
        launch()
    proofs.verdict(0, ("a",), lambda: {"refusal": launch()})
    assert fna.prepare((9, 0), **facts, device=0) is None  # type: ignore[arg-type]
    launch()


def test_inside_a_capture_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "a CUDA graph is being captured" in str(refusal())
    assert ltx_inductor.stats()["na3d"]["postponed"] == 1
    assert (fna._accepted, fna._off) == (set(), {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert refusal() is None


def test_a_proof_is_of_one_artefact(monkeypatch: pytest.MonkeyPatch) -> None:
    for image, checks in ((b"by nvcc 12", 3), (b"by nvcc 12", 3), (b"by nvcc 13", 6)):
        monkeypatch.setattr(fna, "cubin", lambda window, image=image: image)
        another_process(monkeypatch)
        assert refusal() is None
        assert ltx_inductor.stats()["na3d"]["checks"] == checks


def test_the_digest_of_the_exact_kernel_is_that_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tilelang")
    found = []
    for source in ("a", "b", "a"):
        monkeypatch.setattr(fna_exact, "_kernel", SimpleNamespace(get_kernel_source=lambda source=source: source))
        found.append(fna.facts(WINDOW, exact=True))
    assert found[0] == found[2] != found[1]
