"""The ops as torch calls them on CUDA: the C kernel of csrc/torch_dispatch.h, and what it hands to Python."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx_inductor.ops.rope as ops
from ltx_inductor.kernels import rope
from ltx_inductor.kernels.choice import DeviceKernels
from ltx_inductor.rewrite.needs import KernelNeed
from tests.gpu.rope_cases import BF16, FP32, PRODUCTION, Case, Side, _poison, differing, eager, make, prepare

BASE = Case(Side(300), Side(300), 128)
HEADS = Case(Side(500, 8), Side(500, 8), 128, per_head=True, tables="head1")
CASES = [
    BASE,
    PRODUCTION["v1536"],
    PRODUCTION["a126"],
    PRODUCTION["a2v"],
    replace(BASE, k=None),
    replace(BASE, layout="bhsd"),
    replace(BASE, contract="fp32-rope", table_dtype=FP32, q=Side(300, batch=2), k=Side(300, batch=2), tables="batch1"),
    replace(BASE, contract="fp32-result", table_dtype=FP32, shared=False, k=Side(77, batch=3)),
    replace(BASE, x="slice", q=replace(BASE.q, weight=False)),
    replace(BASE, x="odd", tables="odd"),
    HEADS,
    replace(HEADS, contract="fp32-all-result", k=None, layout="bhsd"),
    replace(HEADS, k=Side(500, 2)),
    replace(BASE, q=Side(0), k=Side(0)),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    prepare(CASES)
    rope._library()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("ltx_inductor::qk_rmsnorm_split_rope", "CUDA")


@contextmanager
def only_c() -> Iterator[None]:
    """Within, a call that reaches the implementation in Python fails."""

    def unexpected(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the C kernel handed the call to Python")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.kernel, "launch_single", unexpected)
        patch.setattr(ops.kernel, "launch_pair", unexpected)
        yield


def op(case: Case) -> Callable[..., Any]:
    name = "rmsnorm_split_rope" if case.k is None else "qk_rmsnorm_split_rope"
    return getattr(torch.ops.ltx_inductor, name).default  # type: ignore[no-any-return]


def run(case: Case, args: tuple[object, ...]) -> list[Tensor]:
    _poison(case, args)
    found = op(case)(*args)
    return [found] if isinstance(found, Tensor) else list(found)


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(differing(a, b) == 0 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits(case: Case) -> None:
    args = make(case, 0)
    expected = eager(case, args)
    assert equal(run(case, args), expected)  # the first call may have to load the kernel
    with only_c():
        found = run(case, args)
    assert equal(found, expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.parametrize("x", ["plain", "odd", "slice"])
@pytest.mark.parametrize("k", [None, BASE.k], ids=["single", "pair"])
def test_opcheck(x: str, k: Side | None) -> None:
    case = replace(BASE, x=x, k=k)
    prepare([case])
    args = make(case, 0)
    for a in args:
        if isinstance(a, Tensor):
            a.requires_grad_(False).nan_to_num_(
                0.0, 1.0, -1.0
            )  # opcheck compares values, and a NaN equals nothing there
    torch.library.opcheck(op(case), args)


def test_runs_on_the_current_stream() -> None:
    args = make(BASE, 0)
    expected = eager(BASE, args)
    q = args[0]
    assert isinstance(q, Tensor)
    source, late = q.clone(), torch.zeros_like(q)
    run(BASE, args)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), only_c():
        torch.cuda._sleep(20_000_000)
        late.copy_(source)
        found = run(BASE, (late, *args[1:]))
        torch.cuda.current_stream().synchronize()
    assert equal(found, expected)


def test_cuda_graph_capture() -> None:
    args = make(BASE, 0)
    expected = eager(BASE, args)
    run(BASE, args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), only_c():
        found = op(BASE)(*args)
    for t in found:
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert equal(list(found), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_while_the_first_is_current() -> None:
    args = make(BASE, 0, "cuda:1")
    expected = eager(BASE, args)
    run(BASE, args)
    with only_c():
        found = run(BASE, args)
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert equal(found, expected)
    assert {t.device for t in found} == {torch.device("cuda", 1)}


def test_threads_with_streams_of_their_own() -> None:
    args = make(BASE, 0)
    expected = eager(BASE, args)
    run(BASE, args)
    torch.cuda.synchronize()
    right: list[bool] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                found = list(op(BASE)(*args))
            torch.cuda.current_stream().synchronize()
        right.append(equal(found, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert right == [True] * 4


def test_what_eager_sums_in_another_order_runs_as_eager() -> None:
    case = replace(BASE, x="misaligned")
    args = make(case, 0)
    assert equal(run(case, args), eager(case, args))
    changed = list(make(BASE, 0))
    w = changed[2]
    assert isinstance(w, Tensor)
    changed[2] = torch.empty(2 * w.numel(), dtype=w.dtype, device="cuda")[::2].copy_(w.detach())
    assert equal(run(BASE, tuple(changed)), eager(BASE, tuple(changed)))


def test_errors_are_those_of_python() -> None:
    args = list(make(BASE, 0))
    cos = args[4]
    assert isinstance(cos, Tensor)
    with pytest.raises(ValueError, match="^rope kernel: cos and sin must be"):
        op(BASE)(*args[:4], cos[:, :, 1:], *args[5:])
    with pytest.raises(ValueError, match="^contract 'bf17'"):
        op(BASE)(*args[:12], "bf17")
    with pytest.warns(UserWarning, match="running the eager chain"):
        found = op(BASE)(*args[:12], "fp32-rope-muladd", "bhsd")
    assert found[0].shape == (1, 32, 300, 128)
    x = torch.zeros(1, 1, 4096, dtype=BF16, device="cuda").expand(1, 1 << 28, 4096)
    table = torch.zeros(1, 1, 1, 64, dtype=BF16, device="cuda").expand(1, 1, 1 << 28, 64)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        op(BASE)(x, x, None, None, table, table, None, None, 1e-6, 1e-6, 32, 32, "bf16-chain")
    torch.cuda.empty_cache()
    assert equal(run(BASE, tuple(args)), eager(BASE, tuple(args)))


def test_a_process_that_prepares_nothing() -> None:
    """As with a graph out of Inductor's cache: the first call finds artefact and proof, the second one is in C."""
    need = KernelNeed(torch.device("cuda", 0), BF16, BF16, 128, 4096, False, "bf16-chain", "bshd", True)
    assert DeviceKernels(ops.reference).refusal(need) is None
    code = """
import torch, ltx_inductor
import ltx_inductor.ops.rope as ops
from tests.gpu.rope_cases import Case, Side, differing, eager, make
case = Case(Side(300), Side(300), 128)
args = make(case, 0)
op = torch.ops.ltx_inductor.qk_rmsnorm_split_rope.default
has = lambda: torch._C._dispatch_has_kernel_for_dispatch_key("ltx_inductor::qk_rmsnorm_split_rope", "CUDA")
assert not has()
first = op(*args)
assert has()
ops.kernel.launch_pair = None
second = op(*args)
for found in (first, second):
    assert all(differing(a, b) == 0 for a, b in zip(found, eager(case, args), strict=True))
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)
