"""verify="always", the counters, and kept calls. Without a GPU a stand-in plays the kernel."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx_inductor
import ltx_inductor.ops.rope as ops
from ltx_inductor import joint_pass, kernel_needs
from ltx_inductor.cli import main
from ltx_inductor.config import Config, from_environment
from ltx_inductor.kernels import choice, compilers, counts, fna, fna_gate, gate, rope, rope_specs
from ltx_inductor.ops import na3d, na3d_verified, verified
from ltx_inductor.rewrite.needs import KernelNeed, NeighborhoodNeed

from .harness import bit_difference, copy_graph, run_graph, trace
from .models.sides import CASES as SIDES

passes = pytest.importorskip("ltx_inductor.rewrite.passes")
HEADS, DIM, SEQ = 2, 32, 5
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(rope, "_off", {})
    monkeypatch.setattr(rope, "_plans", {})
    monkeypatch.setattr(verified, "notes", [])
    monkeypatch.setattr(verified, "compared_calls", {})
    ltx_inductor.stats(reset=True)


def single(contract: str = "bf16-chain") -> tuple[Any, ...]:
    cos, sin = (torch.randn(1, HEADS, SEQ, DIM // 2).to(BF16) for _ in "cs")
    x = torch.randn(1, SEQ, HEADS * DIM).to(BF16)
    return x, torch.ones(HEADS * DIM, dtype=BF16), cos, sin, 1e-6, HEADS, contract, "bshd"


def pair(contract: str = "bf16-chain") -> tuple[Any, ...]:
    x, w, cos, sin, eps, heads, _, layout = single()
    return x, x * 2, w, w, cos, sin, None, None, eps, eps, heads, heads, contract, layout


def one_bit_off(function: Any) -> Any:
    def run(*args: Any) -> Any:
        out = function(*args)
        first = out[0] if isinstance(out, tuple) else out
        first.view(torch.int16).view(-1)[7] ^= 1
        return out

    return run


def test_the_option() -> None:
    assert Config().verify == "first"
    assert Config().with_options({"ltx_inductor.verify": "always"}).verify == "always"
    assert from_environment({"LTX_INDUCTOR_VERIFY": "Off"}).verify == "off"
    for wrong, error in (("sometimes", ValueError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"verify.*expected one of first, always, off"):
            Config().with_options({"ltx_inductor.verify": wrong})


def test_always_is_written_into_the_graph_and_not_into_the_report() -> None:
    case = next(c for c in SIDES if c.name == "pair")
    (traced,) = trace(case.build(), case.inputs())
    gm = copy_graph(traced.gm)
    report = passes.rewrite_graph(gm.graph, config=Config(cpu=True, verify="always"))
    (op,) = gm.graph.find_nodes(op="call_function", target=torch.ops.ltx_inductor.qk_rmsnorm_split_rope.default)
    assert op.args[-2] == "bf16-chain+verify"
    assert [s.contract for s in report.sites] == ["bf16-chain"] * 2
    assert bit_difference(run_graph(gm, traced.args), traced.run()) is None


@pytest.mark.parametrize(("name", "args"), [("single", single), ("pair", pair)])
def test_a_right_kernel_is_used_and_counted(name: str, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, f"launch_{name}", ops.reference if name == "single" else ops.reference_pair)
    run, op = (ops._on_cuda, counts.OPS[0]) if name == "single" else (ops._pair_on_cuda, counts.OPS[1])
    given = args("bf16-chain+verify")
    run(*given)
    sides = 1 if name == "single" else 2
    moved = (
        sum(t.numel() * t.element_size() for t in given if isinstance(t, torch.Tensor)) + sides * SEQ * HEADS * DIM * 2
    )
    assert ltx_inductor.stats()[op] == {
        "kernel": 1, "reference": 0, "refused": 0, "bytes": moved, "checks": 1,
        "checked_elements": sides * SEQ * HEADS * DIM, "postponed": 0, "differing": 0,
    }  # fmt: skip
    assert verified.told() == [
        f'verify="always": 1 calls of {op} compared in this process: {sides * SEQ * HEADS * DIM} elements, 0 differ'
    ]
    run(*args())
    assert ltx_inductor.stats()[op]["kernel"] == 2
    assert ltx_inductor.stats()[op]["checks"] == 1


@pytest.mark.parametrize(("name", "args"), [("single", single), ("pair", pair)])
def test_a_wrong_kernel_is_turned_off_with_a_repro(
    name: str, args: Any, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    right = ops.reference if name == "single" else ops.reference_pair
    monkeypatch.setattr(rope, f"launch_{name}", one_bit_off(right))
    run, op = (ops._on_cuda, counts.OPS[0]) if name == "single" else (ops._pair_on_cuda, counts.OPS[1])
    given = args()
    with pytest.warns(UserWarning, match=r"differs from eager in 1 of .* python -m ltx_inductor replay") as caught:
        got = run(*given[:-2], "bf16-chain+verify", "bshd")
    assert bit_difference(got, right(*given)) is None
    assert len(caught) == 1
    assert ltx_inductor.stats()[op]["differing"] == 1
    assert any("differs from eager" in note for note in verified.notes)

    (file,) = tmp_path.rglob("*.pt")
    kept = torch.load(file, weights_only=True)
    assert kept["op"] == op
    assert bit_difference(kept["args"], list(given)) is None

    facts = {"dtype": BF16, "table_dtype": BF16, "head_dim": DIM, "hidden": HEADS * DIM, "per_head": False}
    reason = rope.prepare((9, 0), contract="bf16-chain", **facts, shared=name == "pair", device=-1)  # type: ignore[arg-type]
    assert reason is not None
    assert "differs from eager" in reason
    assert (-1, rope_specs.Spec("fp32-rope", BF16, BF16, DIM, HEADS * DIM, False)) not in rope._off


def test_a_declined_call_is_counted_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "launch_single", lambda *args: None)
    given = single("bf16-chain+verify")
    assert bit_difference(ops._on_cuda(*given), ops.reference(*given)) is None
    assert ltx_inductor.stats()["rmsnorm_split_rope"]["refused"] == 1


def test_calls_on_the_cpu_and_the_reset() -> None:
    torch.ops.ltx_inductor.rmsnorm_split_rope(*single())
    torch.ops.ltx_inductor.qk_rmsnorm_split_rope(*pair())
    q = torch.randn(1, 3, 3, 3, 1, 8)
    torch.ops.ltx_inductor.na3d(q, q, q, [3, 3, 3], 1.0)
    table = [torch.randn(1, 3, 1, 1, 1, 4)]
    torch.ops.ltx_inductor.rmsnorm_axial_rope(q.bfloat16(), None, table, table, 1e-6, 1.0, "fp32-rope")
    assert {op: c["reference"] for op, c in ltx_inductor.stats(reset=True).items()} == dict.fromkeys(counts.OPS, 1)
    assert not any(value for c in ltx_inductor.stats().values() for value in c.values())
    with pytest.raises(TypeError, match=r"stats\(reset=1\): expected True or False"):
        ltx_inductor.stats(reset=1)  # type: ignore[arg-type]


def test_off_proves_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    need = KernelNeed(torch.device("cuda", 0), BF16, BF16, DIM, HEADS * DIM, False, "bf16-chain", "bshd", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(rope, "prepare", lambda *args, **kwargs: None)
    monkeypatch.setattr(choice, "_warn_once", lambda sentence: None)
    monkeypatch.setattr(gate, "refusal", lambda *args: "the gate was asked")
    assert choice.DeviceKernels(ops.reference).refusal(need) == "the gate was asked"
    off = choice.DeviceKernels(ops.reference, prove=False)
    assert off.refusal(need) is None
    assert "verify is off" in off.proof(need)


@pytest.mark.parametrize(
    ("options", "prove"), [({}, True), ({"verify": "off"}, False), ({"verify": "off", "exact": True}, True)]
)
def test_exact_proves_whatever_verify_says(
    options: dict[str, Any], prove: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    real = joint_pass.device_kernels
    monkeypatch.setattr(joint_pass, "device_kernels", lambda prove, profit: asked.append(prove) or real(prove, profit))
    with torch.no_grad():
        torch._dynamo.reset()
        options = {f"ltx_inductor.{k}": v for k, v in options.items()}
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.compile(lambda x: x + 1, backend="ltx", options=options)(torch.ones(3))
    assert asked == [prove]


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_replay_says_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ltx_inductor.kernels import repro

    for file, why in (
        ("missing.pt", "No such file"),
        ("text.pt", "is not a kept call"),
        ("other.pt", "expected one of"),
    ):
        if file == "text.pt":
            (tmp_path / file).write_text("{}")
        elif file == "other.pt":
            torch.save({"op": "relu"}, tmp_path / file)
        assert main(["replay", str(tmp_path / file)]) == 2
        assert why in " ".join(capsys.readouterr().err.split())
    kept = repro.save("rmsnorm_split_rope", single()).split()[-1]
    assert main(["replay", kept, "--json"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_repro_keeps_strides_and_no_more_of_the_storage(tmp_path: Path) -> None:
    from ltx_inductor.kernels import repro

    _, w, cos, *rest = single()
    wide = torch.randn(1, SEQ, 3 * HEADS * DIM).to(BF16)[..., HEADS * DIM : 2 * HEADS * DIM]
    table = cos[:, :1].expand(1, HEADS, -1, -1)
    kept = torch.load(repro.save("rmsnorm_split_rope", (wide, w, table, *rest)).split()[-1])
    assert (kept["args"][0].stride(), kept["args"][2].stride()) == (wide.stride(), table.stride())
    assert torch.equal(kept["args"][0], wide)
    assert kept["args"][0].untyped_storage().nbytes() < wide.untyped_storage().nbytes()


@pytest.mark.skipif(compilers.find_cc() is None, reason="no C compiler")
def test_counters_of_the_c_kernel_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    numbers = (ctypes.c_int64 * 4)(3, 100, 5, 200)
    monkeypatch.setattr(counts, "_library", [])
    ltx_inductor.stats(reset=True)
    counts.watch(ctypes.addressof(numbers))
    found = ltx_inductor.stats(reset=True)
    assert [(found[op]["kernel"], found[op]["bytes"]) for op in counts._C_OPS] == [(3, 100), (5, 200)]
    numbers[0] += 1
    assert json.loads(json.dumps(ltx_inductor.stats()))["rmsnorm_split_rope"]["kernel"] == 1
    monkeypatch.setattr(counts, "_library", [])
    ltx_inductor.stats(reset=True)


# Neighborhood attention

GRID, WINDOW = (6, 7, 9), (3, 5, 5)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """q, k, v, window, scale of a call."""
    monkeypatch.setattr(fna, "_off", {})
    torch.manual_seed(0)
    return (*(torch.randn(2, *GRID, 3, 64).to(BF16) for _ in "qkv"), WINDOW, 0.125)


def checked(out: torch.Tensor, attention: tuple[Any, ...], exact: bool = False) -> torch.Tensor:
    return na3d_verified.compared(out, *attention, exact, na3d.reference)


def test_an_accurate_result_passes_and_is_counted(attention: tuple[Any, ...]) -> None:
    right = na3d.reference(*attention)
    assert checked(right, attention) is right
    assert f"1 calls of na3d compared in this process: {right.numel():,} elements, 0 differ" in verified.told()[0]
    stats = ltx_inductor.stats()["na3d"]
    assert (stats["checks"], stats["checked_elements"], stats["differing"]) == (1, right.numel(), 0)


@pytest.mark.parametrize(
    ("value", "words"),
    [(30.0, r"has a relative error of .* more than 3e-03"), (float("nan"), "gives 1 inf or NaN")],
)
def test_a_wrong_result_turns_na3d_off(attention: tuple[Any, ...], value: float, words: str, tmp_path: Path) -> None:
    wrong = na3d.reference(*attention)
    wrong[0, 1, 2, 3, 1, 5] = value
    with pytest.warns(UserWarning, match=words + ".* python -m ltx_inductor replay"):
        got = checked(wrong, attention)
    assert bit_difference(got, na3d.reference(*attention)) is None
    assert ltx_inductor.stats()["na3d"]["differing"] == (wrong.numel() if value == value else 1)
    assert fna.prepare((9, 0), dtype=BF16, head_dim=64, kernel_size=WINDOW, device=None) is not None  # type: ignore[arg-type]
    with pytest.raises(rope.KernelNotReadyError, match="it is off in this process"):
        fna.launch(*attention)
    assert (None, WINDOW, True) not in fna._off
    (file,) = tmp_path.rglob("na3d-*.pt")
    q, *_, exact = torch.load(file, weights_only=True)["args"]
    assert bit_difference(q, attention[0]) is None
    assert exact is False


def test_a_value_that_is_not_finite_is_no_error_where_the_reference_has_it_too(attention: tuple[Any, ...]) -> None:
    attention[2][0, 0, 0, 0, 0, 0] = float("inf")
    right = na3d.reference(*attention)
    assert not right.isfinite().all()
    assert checked(right, attention) is right
    assert checked(right.nan_to_num(0, 0, 0), attention) is not None
    assert ltx_inductor.stats()["na3d"]["differing"] == 0


def test_of_a_large_grid_heads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(na3d_verified, "_QUERIES", 2 * 6 * 7 * 9)
    q = torch.empty(2, 6, 7, 9, 3, 64)
    seen = [q[na3d_verified._some(q, turn)].shape for turn in range(2)]
    assert seen == [(1, 6, 7, 9, 2, 64), (1, 6, 7, 9, 1, 64)]
    assert q[:1, ..., :2, :][na3d_verified._some(q[:1, ..., :2, :], 0)].shape == (1, 6, 7, 9, 2, 64)


def test_exact_is_compared_with_natten_where_that_is(
    attention: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = na3d.reference(*attention)
    natten = types.ModuleType("natten")
    natten.HAS_LIBNATTEN, natten.__version__ = True, "0.0"  # type: ignore[attr-defined]
    natten.na3d = lambda q, k, v, kernel_size, scale, **_: na3d.reference(q, k, v, kernel_size, scale)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "natten", natten)
    assert checked(right, attention, exact=True) is right
    other = right.clone()
    other.view(torch.int16).view(-1)[3] ^= 1
    assert checked(other, attention) is other  # well within the bound
    with pytest.warns(UserWarning, match="differs from NATTEN in 1 of"):
        assert bit_difference(checked(other, attention, exact=True), right) is None
    natten.HAS_LIBNATTEN = False  # type: ignore[attr-defined]
    assert checked(other, attention, exact=True) is other


@pytest.mark.parametrize("bit", [0, 1])
def test_the_exact_schedule_is_compared_before_its_first_use(bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, k: Any, v: Any, window: Any, scale: float, flip: int) -> torch.Tensor:
        out = q + k  # quick: what is compared is whether the two agree
        out.view(torch.int16).view(-1)[9] ^= flip
        return out

    natten = types.ModuleType("natten")
    natten.HAS_LIBNATTEN, natten.__version__ = True, "0.0"  # type: ignore[attr-defined]
    natten.na3d = lambda q, k, v, kernel_size, scale, **_: attend(q, k, v, kernel_size, scale, 0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "natten", natten)
    monkeypatch.setattr(fna, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(fna, "launch", lambda q, k, v, w, s, exact: attend(q, k, v, w, s, bit))
    monkeypatch.setattr(fna_gate, "draw", lambda *_: [torch.ones(1, 2, 3, 4, 2, 64).to(BF16) for _ in "qkv"])
    monkeypatch.setattr(fna_gate.proofs, "verdict", lambda device, facts, measure: measure())
    monkeypatch.setattr(fna, "facts", lambda window, exact: ("na3d exact", "digest"))
    monkeypatch.setattr(fna, "_off", {})
    monkeypatch.setattr(fna, "_accepted", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    need = NeighborhoodNeed(torch.device("cuda:0"), BF16, 64, (11, 11, 11), True)
    family = choice._Neighborhood(na3d.reference)
    missing = family.ready(need, (9, 0), 0)
    if bit:
        assert missing is not None
        assert "differs from NATTEN 0.0 in 4 of" in missing
        assert "python -m ltx_inductor replay" in missing
        assert fna._off == {(0, (11, 11, 11), True): missing}
        assert not fna._accepted
        assert choice._Neighborhood(na3d.reference, prove=False).ready(need, (9, 0), 0) is None
    else:
        assert missing is None
        assert fna._accepted == {(0, (11, 11, 11), True)}
        assert "compared with NATTEN 0.0 on a GPU" in family.proof(need, 0)
    natten.na3d = lambda *_, **__: 1 // 0  # type: ignore[attr-defined]
    assert family.ready(need, (9, 0), 0) is None
    assert "not compared here" in family.proof(need, 0)
    monkeypatch.delitem(sys.modules, "natten")
    assert family.ready(need, (9, 0), 0) is None
    assert "not compared here" in family.proof(need, 0)


def test_a_cached_graph_is_proved_only_where_the_first_compile_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Kernels:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def refusal(self, need: Any) -> None:
            return None

    monkeypatch.setattr(kernel_needs, "device_kernels", lambda prove: asked.append(prove) or Kernels())
    need = NeighborhoodNeed(torch.device("cuda:0"), BF16, 64, (11, 11, 11), False)
    for prove in (True, False):
        remembering = kernel_needs.Remembering(Kernels(), prove)
        remembering.refusal(need)
        assert kernel_needs.ask_again(json.loads(json.dumps(remembering.needs)), []) == []
    assert asked == [True, False]
