"""The exactness gate, with a stand-in for the kernels: what it goes through, and that only what passed is served."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ltx_inductor
import ltx_inductor.ops.rope as ops
from ltx_inductor import replay
from ltx_inductor.kernels import build, choice, gate, proofs, rope
from ltx_inductor.kernels.rope_specs import Spec
from ltx_inductor.rewrite.needs import KernelNeed

BF16, FP32 = torch.bfloat16, torch.float32
SHARED = KernelNeed(torch.device("cuda", 0), BF16, BF16, 32, 128, False, "bf16-chain", "bshd", True)
SEPARATE = replace(SHARED, shared=False, contract="fp32-rope", table_dtype=FP32)
PER_HEAD = replace(SHARED, per_head=True)
NEEDS = {
    "shared": SHARED,
    "separate": SEPARATE,
    "per head": PER_HEAD,
    "per head, separate": replace(PER_HEAD, shared=False, layout="bhsd"),
    "fp16": replace(SHARED, dtype=torch.float16, table_dtype=torch.float16),
}
LAUNCH_SINGLE = rope.launch_single
Log = list[tuple[str, tuple[Any, ...]]]


@pytest.fixture(autouse=True)
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """A device of compute capability 9.0 whose kernels are the eager chain; the calls of the launcher's functions."""
    log: Log = []

    class Library:
        def get_function(self, name: str) -> Callable[..., int]:
            def call(*args: Any) -> int:
                log.append((name, args))
                return 4 + len(log) if name == "rope_open" else 0

            return call

    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    for name in ("_images", "_handles", "_off", "_plans"):
        monkeypatch.setattr(rope, name, {})
    for name in ("_accepted", "_served"):
        monkeypatch.setattr(rope, name, set())
    monkeypatch.setattr(rope, "_library", lambda: Library())
    monkeypatch.setattr(rope, "launch_single", lambda *args, path=0: ops.reference(*args))
    monkeypatch.setattr(rope, "launch_pair", lambda *args, path=0: ops.reference_pair(*args))
    monkeypatch.setattr(build, "cubin", lambda name, *_, **__: name.encode())
    monkeypatch.setattr(gate, "ELEMENTS", 1 << 12)
    real = gate.calls
    monkeypatch.setattr(gate, "calls", lambda spec, device: real(spec, torch.device("cpu")))
    monkeypatch.setattr(choice, "_warn_once", lambda sentence: None)
    another_process(monkeypatch)
    device = {
        "device": lambda device: contextlib.nullcontext(),
        "get_device_properties": lambda device: SimpleNamespace(major=9, minor=0),
        "get_device_capability": lambda device=None: (9, 0),
        "current_device": lambda: 0,
        "get_device_name": lambda device: "a GPU",
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in device.items():
        monkeypatch.setattr(torch.cuda, name, value)
    ltx_inductor.stats(reset=True)
    return log


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "_verdicts", {})
    for name in ("_accepted", "_served"):
        monkeypatch.setattr(rope, name, set())
    for name in ("_off", "_plans", "_handles"):
        monkeypatch.setattr(rope, name, {})


def refusal(need: KernelNeed, prove: bool = True) -> str | None:
    return choice.DeviceKernels(ops.reference, prove=prove).refusal(need)


def names(log: Log) -> list[str]:
    return [name for name, _ in log]


def wrong_where(monkeypatch: pytest.MonkeyPatch, condition: Callable[[tuple[Any, ...], int], bool]) -> None:
    """One bit of the kernels' last result is wrong in calls for which the condition holds."""
    for name, chain in (("launch_single", ops.reference), ("launch_pair", ops.reference_pair)):

        def run(*args: Any, path: int = 0, chain: Any = chain) -> Any:
            out = chain(*args)
            if condition(args, path):
                last = out[-1] if isinstance(out, tuple) else out
                last.view(torch.int16).view(-1)[-1] ^= 1
            return out

        monkeypatch.setattr(rope, name, run)


@pytest.mark.parametrize("need", NEEDS.values(), ids=NEEDS)
def test_a_right_kernel_is_served_after_its_proof_and_not_before(need: KernelNeed, launcher: Log) -> None:
    real = gate._compare

    def compare(*args: Any) -> dict[str, Any]:
        assert names(launcher) == ["rope_open", "rope_load"]
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "_compare", compare)
        assert refusal(need) is None
    assert names(launcher) == ["rope_open", "rope_load", "rope_serve"]
    assert refusal(need) is None
    assert len(launcher) == 3
    proof = choice.DeviceKernels(ops.reference).proof(need)
    counted = ltx_inductor.stats()
    compared = sum(counted[op]["checked_elements"] for op in ("rmsnorm_split_rope", "qk_rmsnorm_split_rope"))
    assert proof == (
        f"the kernel was compared with eager on a GPU with torch {torch.__version__}: {compared:,} elements, "
        "no bit differs"
    )


def drawn(need: KernelNeed) -> Iterator[tuple[int, tuple[Any, ...], int]]:
    """Path, arguments, and elements of each call of the gate."""
    for path, args in gate.calls(gate._spec(need), torch.device("cuda")):
        yield path, args, sum(side[0].numel() for side in gate._sides(args))


@pytest.mark.parametrize("need", NEEDS.values(), ids=NEEDS)
def test_every_entry_point_has_a_million_elements(need: KernelNeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "ELEMENTS", 1 << 20)
    elements: Counter[int] = Counter()
    for path, args, count in drawn(need):
        elements[path] += count
        assert args[0].size(0) == 2
    assert set(elements) == ({rope.PAIR, rope.ROW, rope.ANY} if need.shared else {rope.ROW, rope.ANY})
    assert min(elements.values()) >= 1 << 20


@pytest.mark.parametrize("need", NEEDS.values(), ids=NEEDS)
def test_how_it_is_called(need: KernelNeed) -> None:
    for wanted in {path for path, *_ in drawn(need)}:
        found = [args for path, args, _ in drawn(need) if path == wanted]
        pairs = [a for a in found if len(a) > 8]
        assert {a[2] is None for a in pairs} == {True, False}
        if need.shared:
            assert all(a[6] is None for a in found)
        else:
            assert {a[1] is None for a in found if len(a) == 8} == {True, False}
            assert all(a[6] is not None and a[0].size(1) != a[1].size(1) for a in pairs)
        vectors = all(a[0].stride(-2) % 4 == 0 and a[0].data_ptr() % 8 == 0 for a in found)
        assert vectors == (wanted != rope.ANY)


def test_two_products_cancel_and_no_row_is_lost_to_infinities() -> None:
    for need in NEEDS.values():
        spec = gate._spec(need)
        q, *_, cos, sin = gate.draw(spec, 4)
        out = ops.reference(q.float().bfloat16(), None, cos[:1].bfloat16(), sin[:1].bfloat16(), 1e-6, 4, "bf16-chain")
        first = out.unflatten(-1, (-1, spec.head_dim))[0] if not need.per_head else out[0]
        finite = q.isfinite().flatten(2).all(-1).float().mean()
        small = first[::6, :, : spec.head_dim // 2].abs() < first[::6, :, spec.head_dim // 2 :].abs() / 64
        assert small.float().mean() > 0.4
        assert finite > 0.9


FAULTS: dict[str, tuple[KernelNeed, Callable[[tuple[Any, ...], int], bool]]] = {
    "rope_pair": (SHARED, lambda args, path: path == rope.PAIR),
    "rope_row": (SHARED, lambda args, path: path == rope.ROW),
    "rope_any": (SHARED, lambda args, path: path == rope.ANY),
    "odd strides": (SEPARATE, lambda args, path: not args[0].is_contiguous()),
    "no weight": (SHARED, lambda args, path: args[2] is None),
    "no weight, single": (SEPARATE, lambda args, path: len(args) == 8 and args[1] is None),
    "the second batch entry": (SHARED, lambda args, path: args[0].size(0) > 1),  # the last bit is there
    "two sides": (SEPARATE, lambda args, path: len(args) > 8),
    "one side": (SEPARATE, lambda args, path: len(args) == 8),
    "tables of one batch entry": (SHARED, lambda args, path: args[4].size(0) == 1),
    "a ragged number of heads": (PER_HEAD, lambda args, path: args[10] % 8 != 0),
    "heads that differ": (replace(PER_HEAD, shared=False), lambda args, path: len(args) > 8 and args[10] != args[11]),
}


@pytest.mark.parametrize(("need", "condition"), FAULTS.values(), ids=FAULTS)
def test_a_kernel_that_is_wrong_in_one_way_is_found_and_off(
    need: KernelNeed, condition: Any, launcher: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong_where(monkeypatch, condition)
    sentence = refusal(need)
    assert sentence is not None
    assert "differs from eager in" in sentence
    assert "rope_serve" not in names(launcher)
    assert names(launcher)[-1] == "rope_unserve"
    assert rope._off == {(0, gate._spec(need)): sentence}
    assert not list(tmp_path.rglob("*.proof"))
    (file,) = tmp_path.rglob("*.pt")
    assert sentence.endswith(f"python -m ltx_inductor replay {file}")
    kept = torch.load(file, weights_only=True)
    assert condition(tuple(kept["args"]), kept["path"])
    assert sum(c["differing"] for c in ltx_inductor.stats().values()) > 0
    assert refusal(need) == sentence  # and stays off, without another comparison
    assert refusal(need, prove=False) == sentence
    another_process(monkeypatch)
    monkeypatch.setitem(replay._OPS, "rmsnorm_split_rope", (rope.launch_single, ops.reference))
    monkeypatch.setitem(replay._OPS, "qk_rmsnorm_split_rope", (rope.launch_pair, ops.reference_pair))
    assert replay._rope(kept["op"], kept["args"], kept["path"])[1] > 0


def test_a_failure_turns_off_what_was_accepted_before(launcher: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(SHARED, prove=False) is None
    assert names(launcher)[-1] == "rope_serve"
    wrong_where(monkeypatch, lambda args, path: True)
    assert refusal(SHARED) is not None
    assert names(launcher)[-1] == "rope_unserve"
    assert rope._served == set()


def test_an_error_in_the_comparison_is_a_refusal(launcher: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(rope, "launch_pair", fail)
    sentence = refusal(SHARED)
    assert sentence is not None
    assert "could not be tried (OutOfMemoryError: no memory)" in sentence
    assert "rope_serve" not in names(launcher)
    assert refusal(SHARED) == sentence


def test_inside_a_capture_nothing_is_compared_and_nothing_decided(
    launcher: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sentence = refusal(SHARED)
    assert sentence is not None
    assert "a CUDA graph is being captured" in sentence
    counted = ltx_inductor.stats()["qk_rmsnorm_split_rope"]
    assert (counted["postponed"], counted["checks"]) == (1, 0)
    assert (rope._off, rope._accepted) == ({}, set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert refusal(SHARED) is None


def test_a_proof_is_of_one_artefact(launcher: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Spec] = []
    real = gate._compare
    monkeypatch.setattr(gate, "_compare", lambda spec, *rest: compared.append(spec) or real(spec, *rest))
    for image in (b"by nvcc 12", b"by nvcc 12", b"by nvcc 13"):
        monkeypatch.setattr(build, "cubin", lambda *_, image=image, **__: image)
        monkeypatch.setattr(rope, "_images", {})
        another_process(monkeypatch)
        assert refusal(SHARED) is None
    assert len(compared) == 2


class TestWithoutAsking:
    """A graph out of Inductor's cache calls the op, and nobody in this process has asked for its kernel."""

    @pytest.fixture(autouse=True)
    def _launches(self, monkeypatch: pytest.MonkeyPatch, launcher: Log) -> None:
        monkeypatch.setattr(rope, "launch_single", LAUNCH_SINGLE)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        empty = functools.partial(rope._empty_on, torch.device("cuda"))
        monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty)

    @staticmethod
    def launch() -> Any:
        with FakeTensorMode():
            x = torch.empty(1, 5, 128, dtype=BF16, device="cuda")
            cos = torch.empty(1, 4, 5, 16, device="cuda")
            return rope.launch_single(x, None, cos, cos, 1e-6, 4, "fp32-rope")

    def test_a_kernel_that_nobody_has_proved_is_not_launched(self, launcher: Log) -> None:
        with pytest.raises(rope.KernelNotReadyError, match="nobody has compared it with eager.*FORCE_DISABLE_CACHES=1"):
            self.launch()
        assert names(launcher) == []

    def test_one_with_a_kept_proof_is(self, launcher: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rope, "launch_single", lambda *args, path=0: ops.reference(*args))
        assert refusal(SEPARATE) is None
        monkeypatch.setattr(rope, "launch_single", LAUNCH_SINGLE)
        another_process(monkeypatch)
        del launcher[:]
        for _ in range(2):
            assert self.launch().shape == (1, 5, 128)
        assert names(launcher) == ["rope_open", "rope_load", "rope_serve", *["rope_launch"] * 2]

    @pytest.mark.parametrize("device", [None, 0])
    def test_one_that_was_prepared_without_a_trial_is(self, launcher: Log, device: int | None) -> None:
        facts = {"dtype": BF16, "table_dtype": FP32, "head_dim": 32, "hidden": 128, "per_head": False}
        assert rope.prepare((9, 0), contract="fp32-rope", **facts, device=device) is None  # type: ignore[arg-type]
        self.launch()
        assert names(launcher) == ["rope_open", "rope_load", "rope_serve", "rope_launch"]

    def test_one_that_is_turned_off_meanwhile_leaves_no_plan(
        self, launcher: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rope._accepted.add(("90", gate._spec(SEPARATE)))
        monkeypatch.setattr(rope, "accept", lambda device, spec: rope.turn_off(device, spec, "it was wrong"))
        with pytest.raises(rope.KernelNotReadyError, match="it was wrong"):
            self.launch()
        assert rope._plans == {}
        assert names(launcher)[-1] == "rope_unserve"

    def test_one_on_trial_is_for_its_gate_only(self, launcher: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = {"dtype": BF16, "table_dtype": FP32, "head_dim": 32, "hidden": 128, "per_head": False}
        rope.prepare((9, 0), contract="fp32-rope", **facts, device=0, trial=True)  # type: ignore[arg-type]
        with pytest.raises(rope.KernelNotReadyError):
            self.launch()
        proofs.verdict(0, ("another",), lambda: {"refusal": None, "shape": self.launch().shape})
        assert names(launcher) == ["rope_open", "rope_load", "rope_launch"]
        with pytest.raises(rope.KernelNotReadyError):  # the gate has left no plan behind
            self.launch()
