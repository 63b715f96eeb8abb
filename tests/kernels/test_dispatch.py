"""The ops' C kernel, without a GPU: what it reads from torch's stack, what it makes of it, and what it hands to Python.

It is registered for the CPU, in a namespace of its own. A configuration that is opened without an image launches
nothing: the launcher keeps what the launch would have been.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import resource
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx_inductor.ops.rope as ops
from ltx_inductor.kernels import build, compilers, gate, rope, rope_specs

pytestmark = pytest.mark.skipif(compilers.find_cc() is None, reason="no C compiler")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS, D = 4, 32
_LIBRARY = torch.library.Library("ltx_dispatch_test", "DEF")
for _name in ("rmsnorm_split_rope", "qk_rmsnorm_split_rope"):
    _LIBRARY.define(str(getattr(torch.ops.ltx_inductor, _name).default._schema).removeprefix("ltx_inductor::"))


class Side(ctypes.Structure):
    """LtxRopeSide of csrc/rope_params.h."""

    _fields_ = (
        *((n, ctypes.c_int) for n in ("seq", "batch", "heads")),
        ("eps", ctypes.c_float),
        ("x", ctypes.c_uint64),
        *((n, ctypes.c_int64) for n in ("x_b", "x_s")),
        *((n, ctypes.c_uint64) for n in ("cos", "sin", "weight")),
        *((n, ctypes.c_int64) for n in ("cos_b", "cos_s", "cos_h")),
        ("out", ctypes.c_uint64),
        *((n, ctypes.c_int64) for n in ("out_b", "out_s", "out_h", "x_h", "x_e", "cos_e")),
        *((n, ctypes.c_int64) for n in ("sin_b", "sin_s", "sin_h", "sin_e", "pad0", "pad1")),
    )


class Recorded(ctypes.Structure):
    _fields_ = (("side", Side * 2), ("vectors", ctypes.c_int64), ("calls", ctypes.c_int64))


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """The C kernels are registered; what they would have launched last."""
    library = rope._library()
    assert rope.register(library, "ltx_dispatch_test", "CPU"), "torch lacks a symbol of its stable ABI"
    specs = [
        rope_specs.Spec(contract, dtype, tables, D, D if per_head else HEADS * D, per_head, layout, shared)
        for contract, dtype, tables in (
            ("bf16-chain", BF16, BF16),
            ("fp32-rope", BF16, FP32),
            ("fp32-result", FP16, FP32),
        )
        for per_head in (False, True)
        for layout in ("bshd", "bhsd")
        for shared in (False, True)
    ]
    for s in specs:
        rounding, _, out_f32 = rope_specs.CONTRACTS[s.contract]
        flags = (s.dtype == FP16, s.table_dtype == FP32, out_f32, rounding == 2, s.layout == "bhsd", s.shared)
        handle = library.get_function("rope_open")(0, 0, s.head_dim, s.norm, int(s.per_head), *map(int, flags))
        library.get_function("rope_serve")(handle, -1, rope._address(s.contract))
    return Recorded.from_address(library.get_function("rope_recorded")())


@pytest.fixture(autouse=True)
def _no_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that expects the slow op says so."""

    def unexpected(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the C kernel handed the call to Python")

    monkeypatch.setattr(ops.kernel, "launch_single", unexpected)
    monkeypatch.setattr(ops.kernel, "launch_pair", unexpected)


def single(*args: Any) -> Tensor:
    return torch.ops.ltx_dispatch_test.rmsnorm_split_rope(*args)


def pair(*args: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.ltx_dispatch_test.qk_rmsnorm_split_rope(*args)


def tables(seq: int, dtype: torch.dtype = BF16, batch: int = 1, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.randn(batch, seq, heads, D // 2).to(dtype).transpose(1, 2) for _ in range(2))
    return cos, sin


def stride(t: Tensor, axis: int) -> int:
    return 0 if t.size(axis) == 1 else t.stride(axis)


def expect(side: Side, x: Tensor, w: Tensor | None, cos: Tensor, sin: Tensor, eps: float, out: Tensor) -> None:
    heads = x.size(2) if x.dim() == 4 else HEADS
    assert (side.batch, side.seq, side.heads) == (x.size(0), x.size(1), heads)
    assert side.eps == ctypes.c_float(eps).value
    assert (side.x, side.cos, side.sin, side.out) == tuple(t.data_ptr() for t in (x, cos, sin, out))
    assert side.weight == (0 if w is None else w.data_ptr())
    assert (side.x_b, side.x_s, side.x_e) == (stride(x, 0), stride(x, 1), stride(x, -1))
    assert side.x_h == (stride(x, 2) if x.dim() == 4 else D * stride(x, -1))
    assert (side.cos_b, side.cos_h, side.cos_s, side.cos_e) == tuple(stride(cos, i) for i in range(4))
    assert (side.sin_b, side.sin_h, side.sin_s, side.sin_e) == tuple(stride(sin, i) for i in range(4))


def expect_output(out: Tensor, x: Tensor, dtype: torch.dtype, layout: str) -> None:
    shape = x.shape if layout == "bshd" else (x.size(0), HEADS, x.size(1), D)
    assert out.shape == shape
    assert out.dtype == dtype
    assert out.stride() == torch.empty(shape, device="meta").stride()
    assert out.device == x.device


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("contract", "dtype", "table", "result"),
    [("bf16-chain", BF16, BF16, BF16), ("fp32-rope", BF16, FP32, BF16), ("fp32-result", FP16, FP32, FP32)],
)
@pytest.mark.parametrize("weights", [(True, True), (False, True), (True, False), (False, False)])
def test_what_a_pair_is_read_as(
    recorded: Recorded, contract: str, dtype: torch.dtype, table: torch.dtype, result: torch.dtype, per_head: bool,
    layout: str, weights: tuple[bool, bool],
) -> None:  # fmt: skip
    def x(batch: int, seq: int) -> Tensor:
        return torch.randn((batch, seq, HEADS, D) if per_head else (batch, seq, HEADS * D)).to(dtype)

    n = D if per_head else HEADS * D
    w, v = (torch.randn(n).to(dtype) if wanted else None for wanted in weights)
    q, k = x(2, 5), x(3, 7)
    (qc, qs), (kc, ks) = tables(5, table), tables(7, table, 3)
    a, b = pair(q, k, w, v, qc, qs, kc, ks, 1e-6, 0.25, HEADS, HEADS, contract, layout)
    expect(recorded.side[0], q, w, qc, qs, 1e-6, a)
    expect(recorded.side[1], k, v, kc, ks, 0.25, b)
    assert recorded.vectors == 1
    for out, t in ((a, q), (b, k)):
        expect_output(out, t, result, layout)
    k = x(2, 5)
    a, b = pair(q, k, w, v, qc, qs, None, None, 1e-5, 1e-3, HEADS, HEADS, contract, layout)
    expect(recorded.side[0], q, w, qc, qs, 1e-5, a)
    expect(recorded.side[1], k, v, qc, qs, 1e-3, b)
    out = single(k, v, qc, qs, 0.5, HEADS, contract, layout)
    expect(recorded.side[0], k, v, qc, qs, 0.5, out)
    expect_output(out, k, result, layout)
    assert recorded.side[1].seq == 0


def test_the_layout_may_be_left_out(recorded: Recorded) -> None:
    x, (cos, sin) = torch.randn(1, 5, HEADS * D).to(BF16), tables(5)
    expect_output(single(x, None, cos, sin, 1e-6, HEADS, "bf16-chain"), x, BF16, "bshd")
    for out in pair(x, x, None, None, cos, sin, None, None, 1e-6, 1e-6, HEADS, HEADS, "bf16-chain"):
        expect_output(out, x, BF16, "bshd")


def test_views_offsets_and_broadcast(recorded: Recorded) -> None:
    wide = torch.randn(2, 9, 3 * HEADS * D).to(BF16)
    x = wide[:, 2:7, HEADS * D : 2 * HEADS * D]
    w = torch.randn(2 * HEADS * D).to(BF16)[HEADS * D :]
    cos, sin = (t.expand(2, HEADS, 5, D // 2) for t in tables(5, heads=1))
    out = single(x, w, cos, sin, 1e-6, HEADS, "bf16-chain")
    expect(recorded.side[0], x, w, cos, sin, 1e-6, out)
    assert (recorded.side[0].cos_b, recorded.side[0].cos_h) == (0, 0)
    assert x.storage_offset() > 0
    assert recorded.vectors == 1
    every_second = torch.randn(1, 5, 2 * HEADS * D).to(BF16)[..., ::2]
    out = single(every_second, w, *tables(5), 1e-6, HEADS, "bf16-chain")
    assert recorded.side[0].x_e == 2
    assert recorded.vectors == 0


@pytest.mark.parametrize("shape", [(1, 0, HEADS * D), (0, 5, HEADS * D)])
def test_empty(recorded: Recorded, shape: tuple[int, int, int]) -> None:
    x, (cos, sin) = torch.empty(shape, dtype=BF16), tables(shape[1])
    out = single(x, None, cos, sin, 1e-6, HEADS, "bf16-chain", "bhsd")
    expect_output(out, x, BF16, "bhsd")
    assert recorded.side[0].seq == 0


CASE_X = torch.randn(1, 5, HEADS * D).to(BF16)
CASE_TABLES = tables(5)


def call(**changes: Any) -> tuple[Tensor, Tensor]:
    cos, sin = CASE_TABLES
    named = {"q": CASE_X, "k": CASE_X, "q_weight": None, "k_weight": None, "q_cos": cos, "q_sin": sin, "k_cos": None}
    named |= {"k_sin": None, "q_eps": 1e-6, "k_eps": 1e-6, "q_heads": HEADS, "k_heads": HEADS, "contract": "bf16-chain"}
    return torch.ops.ltx_dispatch_test.qk_rmsnorm_split_rope(**(named | changes))


MISALIGNED = torch.randn(5 * HEADS * D + 1).to(BF16)[1:].view(1, 5, HEADS * D)
STRIDED_WEIGHT = torch.randn(2 * HEADS * D).to(BF16)[::2]
ELSEWHERE = {  # what is not served: no such configuration, or the reference, or an argument that does not fit
    "contract": {"contract": "fp32-all"},
    "unknown contract": {"contract": "fp33"},
    "layout": {"layout": "sbhd"},
    "dtype": {"q": CASE_X.half()},
    "k of another dtype": {"k": CASE_X.half()},
    "fp32 x": {"q": CASE_X.float(), "k": CASE_X.float()},
    "heads": {"q_heads": 8},
    "k longer": {"k": torch.randn(1, 6, HEADS * D).to(BF16)},
    "k wider": {"k": torch.randn(1, 5, 8 * D).to(BF16), "k_heads": 8},
    "2 axes": {"q": CASE_X[0]},
    "misaligned": {"q": MISALIGNED},
    "strided weight": {"k_weight": STRIDED_WEIGHT},
    "k_cos alone": {"k_cos": CASE_TABLES[0]},
    "k_sin alone": {"k_sin": CASE_TABLES[0]},
}


@pytest.mark.parametrize("changes", ELSEWHERE.values(), ids=ELSEWHERE)
def test_everything_else_goes_to_python_as_it_came(
    recorded: Recorded, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def launch_pair(*args: Any) -> tuple[Tensor, Tensor]:
        seen.append(args)
        return torch.ones(3), torch.ones(4)

    monkeypatch.setattr(ops.kernel, "launch_pair", launch_pair)
    before = recorded.calls
    found = call(**changes)
    assert [t.tolist() for t in found] == [[1.0] * 3, [1.0] * 4]
    assert recorded.calls == before
    cos, sin = CASE_TABLES
    expected = [CASE_X, CASE_X, None, None, cos, sin, None, None, 1e-6, 1e-6, HEADS, HEADS, "bf16-chain", "bshd"]
    names = [a.name for a in torch.ops.ltx_dispatch_test.qk_rmsnorm_split_rope.default._schema.arguments]
    for name, value in changes.items():
        expected[names.index(name)] = value
    for got, want in zip(seen[0], expected, strict=True):
        if isinstance(want, Tensor):
            assert got.data_ptr() == want.data_ptr()
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        else:
            assert got == want
            assert type(got) is type(want)


def test_the_reference_runs_where_the_kernel_declines(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.kernel, "launch_pair", lambda *args, **kwargs: None)
    monkeypatch.setattr(ops.kernel, "launch_single", lambda *args, **kwargs: None)
    cos, sin = CASE_TABLES
    expected = ops.reference(MISALIGNED, None, cos, sin, 1e-6, HEADS, "bf16-chain")
    assert all(torch.equal(t, expected) for t in call(q=MISALIGNED, k=MISALIGNED))
    assert torch.equal(single(MISALIGNED, None, cos, sin, 1e-6, HEADS, "bf16-chain"), expected)
    with pytest.raises(ValueError, match=r"^layout='sbhd'; expected one of bshd, bhsd$"):
        call(layout="sbhd")


class Odd(ValueError):
    pass


@pytest.mark.parametrize("kind", [Odd, torch.OutOfMemoryError, KeyboardInterrupt, RuntimeError])
def test_exceptions_arrive_as_they_were_raised(
    recorded: Recorded, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = kind("as it was")

    def refuse(*args: Any) -> None:
        raise raised

    monkeypatch.setattr(ops.kernel, "launch_pair", refuse)
    monkeypatch.setattr(ops.kernel, "launch_single", refuse)
    found: list[BaseException] = []

    def attempt() -> None:
        try:
            call(contract="other")
        except BaseException as error:
            found.append(error)
        try:
            single(CASE_X, None, *CASE_TABLES, 1e-6, HEADS, "other")
        except BaseException as error:
            found.append(error)

    attempt()
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert [e is raised for e in found] == [True] * 4
    assert call()[0].shape == CASE_X.shape  # and the next call is as if nothing had been


def test_a_kernel_that_is_not_ready_is_reported(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise rope.KernelNotReadyError("nobody prepared it")

    monkeypatch.setattr(ops.kernel, "launch_pair", refuse)
    ops.without_kernel.cache_clear()
    with pytest.warns(UserWarning, match="running the eager chain.*nobody prepared it"):
        call(q=MISALIGNED, k=MISALIGNED)


def _grown(work: Any, rounds: int) -> int:
    """KiB that the process grows by, after a warm-up of the same length."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(rounds):
            work()
        gc.collect()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_nothing_leaks(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, (cos, sin) = CASE_X.clone(), torch.randn(HEADS * D).to(BF16), CASE_TABLES
    args = (w, w, cos, sin, cos, sin, 1e-6, 1e-6, HEADS, HEADS)
    long = "a contract with a name too long for any small-string optimisation"
    monkeypatch.setattr(ops.kernel, "launch_pair", lambda *a, **k: (torch.ones(1), torch.ones(1)))

    def refuse(*args: Any) -> None:
        raise Odd("no")

    def failing() -> None:
        with pytest.raises(Odd):
            single(x, w, cos, sin, 1e-6, HEADS, long)

    monkeypatch.setattr(ops.kernel, "launch_single", refuse)
    counts = [t._use_count() for t in (x, w, cos, sin)]
    assert _grown(lambda: pair(x, x, *args, "bf16-chain", "bshd"), 20_000) < 1024
    assert _grown(lambda: single(x, w, cos, sin, 1e-6, HEADS, "bf16-chain"), 20_000) < 1024
    assert _grown(lambda: pair(x, x, *args, long, "bshd"), 10_000) < 1024
    assert _grown(failing, 5_000) < 1024
    assert [t._use_count() for t in (x, w, cos, sin)] == counts


def test_threads(recorded: Recorded) -> None:
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(500):
            out = single(CASE_X, None, *CASE_TABLES, 1e-6, HEADS, "bf16-chain")
            if out.shape != CASE_X.shape:
                wrong.append(out.shape)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_where_torch_lacks_a_symbol_python_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Launcher:
        def get_function(self, name: str) -> Any:
            assert name == "rope_register"
            return lambda *args: 0

    monkeypatch.setattr(rope, "_registered", [])
    with caplog.at_level(logging.DEBUG, logger="ltx_inductor"):
        rope._take_over(Launcher())
        rope._take_over(Launcher())
    assert rope._registered == [False]
    assert caplog.text.count("the CUDA kernel stays in Python") == 1


def test_importing_registers_nothing_for_cuda() -> None:
    import subprocess
    import sys

    code = (
        "import torch, ltx_inductor\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "for name in ('rmsnorm_split_rope', 'qk_rmsnorm_split_rope'):\n"
        "    assert not has(f'ltx_inductor::{name}', 'CUDA')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_launcher_takes_over_the_cuda_key() -> None:
    rope._library()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has("ltx_inductor::rmsnorm_split_rope", "CUDA") == (torch.version.cuda is not None)
    assert build.launcher().is_file()


def test_launches_are_counted_and_a_configuration_can_be_taken_out(recorded: Recorded) -> None:
    """Each in one call: what is taken out here is a configuration of its own, which no other test meets."""
    library = rope._library()
    counted = (ctypes.c_int64 * 4).from_address(library.get_function("rope_counted")())
    x, (cos, sin) = torch.randn(1, 7, HEADS * D).to(FP16), tables(7, FP16)
    handle = library.get_function("rope_open")(0, 0, D, HEADS * D, 0, 1, 0, 0, 0, 0, 0)
    library.get_function("rope_serve")(handle, -1, rope._address("bf16-chain"))
    before = list(counted)
    out = single(x, None, cos[:, :1].expand(-1, HEADS, -1, -1), sin, 1e-6, HEADS, "bf16-chain")
    assert out.shape == x.shape
    moved = 2 * (2 * x.numel() + 7 * D // 2 + sin.numel())
    assert [b - a for a, b in zip(before, counted, strict=True)] == [1, moved, 0, 0]
    library.get_function("rope_unserve")(handle)
    with pytest.raises(AssertionError, match="handed the call to Python"):
        single(x, None, cos, sin, 1e-6, HEADS, "bf16-chain")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("contract", "dtype", "table"), [("bf16-chain", BF16, BF16), ("fp32-result", FP16, FP32)])
def test_calls_of_the_gate_are_taken_and_reach_their_entry_point(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, contract: str, dtype: torch.dtype, table: torch.dtype,
    per_head: bool, shared: bool, layout: str,
) -> None:  # fmt: skip
    """What forbids loads of 4 elements goes to rope_any, whatever is forced."""
    monkeypatch.setattr(gate, "ELEMENTS", 1 << 12)
    spec = rope_specs.Spec(contract, dtype, table, D, D if per_head else HEADS * D, per_head, layout, shared)
    before = recorded.calls
    for made, (path, args) in enumerate(gate.calls(spec, torch.device("cpu")), 1):
        (pair if len(args) > 8 else single)(*args)
        assert recorded.calls == before + made
        assert bool(recorded.vectors) == (path != rope.ANY)
