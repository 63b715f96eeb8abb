"""The C function that a compiled model calls (csrc/python_call.h), without a GPU: what it launches, what it hands on.

As in test_dispatch.py: configurations that are opened without an image launch nothing, and what the launch would have
been is recorded.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ltx_inductor.kernels import compilers, rope
from ltx_inductor.ops import rope_direct
from tests.kernels.test_dispatch import (
    BF16,
    CASE_TABLES,
    CASE_X,
    FP16,
    FP32,
    HEADS,
    MISALIGNED,
    STRIDED_WEIGHT,
    D,
    Recorded,
    _grown,
    expect,
    recorded,
    tables,
)

pytestmark = pytest.mark.skipif(compilers.find_cc() is None, reason="no C compiler")
__all__ = ["recorded"]


class Handed(Exception):
    """The C function handed its arguments on."""


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches the slow function, which raises Handed."""
    seen: list[tuple[Any, ...]] = []

    def slow(*args: Any) -> None:
        seen.append(args)
        raise Handed

    monkeypatch.setattr(rope_direct, "_slow", lambda *args: slow)
    rope_direct.rope_call.cache_clear()
    yield seen
    rope_direct.rope_call.cache_clear()


def out(like: Tensor, dtype: torch.dtype = BF16, layout: str = "bshd") -> Tensor:
    shape = like.shape if layout == "bshd" else (like.size(0), HEADS, like.size(1), D)
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("contract", "dtype", "table", "result"),
    [("bf16-chain", BF16, BF16, BF16), ("fp32-rope", BF16, FP32, BF16), ("fp32-result", FP16, FP32, FP32)],
)
def test_what_is_launched(
    recorded: Recorded, handed: list[Any], contract: str, dtype: torch.dtype, table: torch.dtype, result: torch.dtype,
    per_head: bool, layout: str,
) -> None:  # fmt: skip
    def x(batch: int, seq: int) -> Tensor:
        return torch.randn((batch, seq, HEADS, D) if per_head else (batch, seq, HEADS * D)).to(dtype)

    pair = rope_direct.rope_call(True, contract, layout, 1e-6, 0.25, HEADS, HEADS)
    single = rope_direct.rope_call(False, contract, layout, 0.5, 0.5, HEADS, HEADS)
    w = torch.randn(D if per_head else HEADS * D).to(dtype)
    q, k = x(2, 5), x(3, 7)
    (qc, qs), (kc, ks) = tables(5, table), tables(7, table, 3)
    a, b = out(q, result, layout), out(k, result, layout)
    before, counted = recorded.calls, (ctypes.c_int64 * 4).from_address(rope._library().get_function("rope_counted")())
    old = list(counted)
    assert pair(a, b, q, k, w, None, qc, qs, kc, ks) is None
    moved = sum(t.numel() * t.element_size() for t in (a, b, q, k, w, qc, qs, kc, ks))
    assert [now - then for then, now in zip(old, counted, strict=True)] == [0, 0, 1, moved]
    expect(recorded.side[0], q, w, qc, qs, 1e-6, a)
    expect(recorded.side[1], k, None, kc, ks, 0.25, b)
    k, b = x(2, 5), out(q, result, layout)
    pair(a, b, q, k, None, w, qc, qs, None, None)
    expect(recorded.side[0], q, None, qc, qs, 1e-6, a)
    expect(recorded.side[1], k, w, qc, qs, 0.25, b)
    single(b, k, w, qc, qs)
    expect(recorded.side[0], k, w, qc, qs, 0.5, b)
    assert recorded.side[1].seq == 0
    assert recorded.calls == before + 3


WIDE = torch.empty(1, 5, 2 * HEADS * D, dtype=BF16)
ARGUMENTS = ("q_out", "k_out", "q", "k", "q_weight", "k_weight", "q_cos", "q_sin", "k_cos", "k_sin")
ELSEWHERE = {  # what is not launched: no such configuration, the reference, an argument that does not fit, a bad output
    "dtype": {"q": CASE_X.half()},
    "k longer": {"k": torch.randn(1, 6, HEADS * D).to(BF16)},
    "2 axes": {"q": CASE_X[0]},
    "misaligned": {"q": MISALIGNED},
    "strided weight": {"k_weight": STRIDED_WEIGHT},
    "k_cos alone": {"k_cos": CASE_TABLES[0]},
    "no q": {"q": None},
    "no k": {"k": None},
    "no sin": {"q_sin": None},
    "no output": {"q_out": None},
    "not a tensor": {"q": 3},
    "output of another shape": {"k_out": torch.empty(1, 6, HEADS * D, dtype=BF16)},
    "output with more axes": {"k_out": torch.empty(1, 5, HEADS, D, dtype=BF16)},
    "output of another dtype": {"q_out": torch.empty(1, 5, HEADS * D)},
    "output in fp16": {"q_out": torch.empty(1, 5, HEADS * D, dtype=FP16)},
    "strided output": {"k_out": WIDE[..., : HEADS * D]},
    "misaligned output": {"k_out": MISALIGNED},
    "output elsewhere": {"q_out": torch.empty(1, 5, HEADS * D, dtype=BF16, device="meta")},
}


@pytest.mark.parametrize("changes", ELSEWHERE.values(), ids=ELSEWHERE)
def test_everything_else_is_handed_on_as_it_came(
    recorded: Recorded, handed: list[tuple[Any, ...]], changes: dict[str, Any]
) -> None:
    call = rope_direct.rope_call(True, "bf16-chain", "bshd", 1e-6, 1e-6, HEADS, HEADS)
    args = dict.fromkeys(ARGUMENTS) | {"q_out": out(CASE_X), "k_out": out(CASE_X), "q": CASE_X, "k": CASE_X}
    args |= {"q_cos": CASE_TABLES[0], "q_sin": CASE_TABLES[1]}
    before = recorded.calls
    call(*args.values())
    assert recorded.calls == before + 1
    with pytest.raises(Handed):
        call(*(args | changes).values())
    assert recorded.calls == before + 1
    assert [a is b for a, b in zip(handed[0], (args | changes).values(), strict=True)] == [True] * 10


def test_a_wrong_number_of_arguments_is_handed_on(recorded: Recorded, handed: list[tuple[Any, ...]]) -> None:
    call = rope_direct.rope_call(False, "bf16-chain", "bshd", 1e-6, 1e-6, HEADS, HEADS)
    for args in ((), (CASE_X,), (None,) * 6):
        with pytest.raises(Handed):
            call(*args)
    assert [len(a) for a in handed] == [0, 1, 6]


def test_the_slow_way_runs_the_op(recorded: Recorded) -> None:
    cos, sin = CASE_TABLES
    expected = torch.ops.ltx_inductor.rmsnorm_split_rope(MISALIGNED, None, cos, sin, 1e-6, HEADS, "bf16-chain", "bhsd")
    a, b = out(MISALIGNED, layout="bhsd"), out(MISALIGNED, layout="bhsd")
    rope_direct.rope_call(False, "bf16-chain", "bhsd", 1e-6, 1e-6, HEADS, HEADS)(a, MISALIGNED, None, cos, sin)
    assert torch.equal(a, expected)
    pair = rope_direct.rope_call(True, "bf16-chain", "bhsd", 1e-6, 1e-6, HEADS, HEADS)
    pair(a.zero_(), b, MISALIGNED, MISALIGNED, None, None, cos, sin, None, None)
    assert torch.equal(a, expected)
    assert torch.equal(b, expected)
    with pytest.raises(ValueError, match="bf17"):
        rope_direct.rope_call(False, "bf17", "bshd", 1e-6, 1e-6, HEADS, HEADS)(out(CASE_X), CASE_X, None, cos, sin)


def test_nothing_leaks(recorded: Recorded, handed: list[tuple[Any, ...]]) -> None:
    x, (cos, sin), q, k = CASE_X.clone(), CASE_TABLES, out(CASE_X), out(CASE_X)
    call = rope_direct.rope_call(True, "bf16-chain", "bshd", 1e-6, 1e-6, HEADS, HEADS)
    counts = [(t._use_count(), sys.getrefcount(t)) for t in (x, cos, sin, q, k)]

    def failing() -> None:
        with pytest.raises(Handed):
            call(q, k, x, x, None, None, cos, None, None, None)
        handed.clear()

    assert _grown(lambda: call(q, k, x, x, None, None, cos, sin, None, None), 20_000) < 1024
    assert _grown(failing, 5_000) < 1024
    gc.collect()
    assert [(t._use_count(), sys.getrefcount(t)) for t in (x, cos, sin, q, k)] == counts


def test_threads(recorded: Recorded, handed: list[tuple[Any, ...]]) -> None:
    call = rope_direct.rope_call(False, "bf16-chain", "bshd", 1e-6, 1e-6, HEADS, HEADS)
    before = recorded.calls

    def work() -> None:
        for _ in range(500):
            call(out(CASE_X), CASE_X, None, *CASE_TABLES)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not handed
    assert recorded.calls == before + 2000


def test_where_torch_has_no_exchange_table_the_op_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_direct, "_prepare_call", lambda: (None, "torch has no table"))
    rope_direct.rope_call.cache_clear()
    call = rope_direct.rope_call(False, "bf16-chain", "bshd", 1e-6, 1e-6, HEADS, HEADS)
    rope_direct.rope_call.cache_clear()
    found = out(CASE_X)
    call(found, CASE_X, None, *CASE_TABLES)
    expected = torch.ops.ltx_inductor.rmsnorm_split_rope(CASE_X, None, *CASE_TABLES, 1e-6, HEADS, "bf16-chain")
    assert torch.equal(found, expected)
