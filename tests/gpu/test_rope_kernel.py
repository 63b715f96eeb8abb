"""The RoPE kernels against eager on the GPU, bit for bit: every contract, the production grid, and the odd rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ltx_inductor.kernels import rope
from tests.gpu.rope_cases import (
    BF16,
    FP16,
    FP32,
    PRODUCTION,
    Case,
    Side,
    contracts,
    differing,
    eager,
    make,
    prepare,
    run,
    with_contract,
)

HIDDEN_4096 = Case(Side(300), Side(300), 128)


def _general() -> list[Case]:
    """Shapes, strides and dtypes off the tuned path, each with at least 1e6 elements."""
    pair = {
        d: Case(Side(2 * s, h), Side(2 * s, h), d)
        for d, s, h in ((32, 600, 32), (40, 260, 50), (48, 700, 16), (64, 500, 33))
    }
    pair |= {d: Case(Side(2 * s, h), Side(2 * s, h), d) for d, s, h in ((80, 300, 24), (96, 250, 32), (120, 260, 20))}
    pair |= {d: Case(Side(2 * s, h), Side(2 * s, h), d) for d, s, h in ((128, 300, 40), (200, 130, 30), (256, 150, 16))}
    cases = [
        replace(c, contract=contract) for c in pair.values() for contract in ("bf16-chain", "fp32-rope", "fp32-all")
    ]
    cases += [replace(c, shared=False, table_dtype=FP32, contract="fp32-rope") for c in pair.values()]
    cases += [  # norm over up to 16384 elements
        Case(Side(70, 128), Side(70, 128), 128),
        Case(Side(90, 63), Side(90, 63), 256, contract="fp32-result", table_dtype=FP32),
        Case(Side(140, 81), Side(140, 81), 104, contract="fp32-rope"),
        Case(Side(9000, 1), Side(9000, 1), 128),
        Case(Side(5000, 4), Side(5000, 4), 64, contract="fp32-rope"),
    ]
    heads = [
        Case(Side(s, 8), Side(s, 8), d, per_head=True) for d, s in ((32, 4100), (40, 3300), (64, 2100), (72, 1900))
    ]
    heads += [
        Case(Side(s, 9), Side(s, 9), d, per_head=True) for d, s in ((96, 1300), (128, 1000), (136, 900), (160, 800))
    ]
    heads += [
        Case(Side(600, 7), Side(600, 7), 256, per_head=True),
        Case(Side(2000, 16), Side(2000, 4), 128, per_head=True),
    ]
    heads[-1] = replace(heads[-1], tables="head1")
    for c in heads:
        cases += [
            c,
            replace(c, contract="fp32-rope", table_dtype=FP32),
            replace(c, contract="fp32-all-result", tables="head1"),
        ]
        cases += [replace(c, shared=False, contract="fp32-rope", q=replace(c.q, seq=c.q.seq + 99), tables="view")]
    for base in (HIDDEN_4096, replace(heads[5], q=Side(1000, 9), k=Side(1000, 9)), pair[96]):
        cases += [replace(base, layout="bhsd"), replace(base, layout="bhsd", contract="fp32-result", table_dtype=FP32)]
        for contract in ("bf16-chain", "fp32-rope"):
            cases += [replace(base, dtype=FP16, table_dtype=FP16, contract=contract)]
        cases += [replace(base, dtype=FP16, table_dtype=FP32, contract="fp32-all")]
        for x in ("slice", "odd", "strided"):
            cases += [replace(base, x=x, contract=c) for c in ("bf16-chain", "fp32-all")]
        two = replace(base, q=replace(base.q, batch=2), k=replace(base.q, batch=2))
        cases += [
            replace(two, tables=t) for t in ("view", "batch1", "head1", "contiguous", "expanded", "odd", "strided")
        ]
        cases += [replace(two, tables=t, contract="fp32-rope", table_dtype=FP32) for t in ("batch1", "odd", "strided")]
        cases += [replace(two, x="seqfirst", tables="batch1"), replace(two, x="seqfirst", shared=False)]
        cases += [
            replace(base, q=replace(base.q, weight=False)),
            replace(base, q=replace(base.q, weight=False, eps=1e-3)),
        ]
        cases += [replace(base, k=replace(base.q, weight=False, eps=0.1), shared=False, contract="fp32-rope")]
        cases += [replace(base, k=None), replace(base, k=None, contract="fp32-rope-muladd", table_dtype=FP32)]
    # sides of different lengths, batches and rows; a table that serves a whole batch and all heads
    cases += [
        Case(Side(300, 32, 2), Side(87, 32, 3), 128, shared=False),
        Case(Side(300, 32), Side(500, 16), 128, shared=False),
        Case(Side(1000, 32), Side(1000, 8), 128, tables="head1", contract="fp32-rope"),
        Case(Side(1, 32, 400), Side(1, 32, 400), 128, tables="batch1"),
    ]
    return cases


GENERAL = _general()
SHORT = [replace(c, q=replace(c.q, seq=s), k=replace(c.q, seq=s)) for c in (HIDDEN_4096, GENERAL[15]) for s in (0, 1)]
_all = [with_contract(c, *t) for c in PRODUCTION.values() for t in contracts()] + GENERAL + SHORT


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    prepare(_all)


def check(case: Case, seed: int = 0, path: int = rope.AUTO) -> None:
    args = make(case, seed)
    expected = eager(case, args)
    found = run(case, args, path)
    assert found is not None, "the kernel asked for the reference"
    for name, a, b in zip("qk", found, expected, strict=False):
        assert a.is_contiguous(), name
        bad = differing(a, b)
        assert bad == 0, f"{name}: {bad} of {a.numel()} elements differ"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("contract", "table_dtype"), contracts())
@pytest.mark.parametrize("row", PRODUCTION)
def test_production_grid(row: str, contract: str, table_dtype: torch.dtype, seed: int) -> None:
    check(with_contract(PRODUCTION[row], contract, table_dtype), seed)


@pytest.mark.parametrize("path", [rope.PAIR, rope.ROW, rope.ANY])
@pytest.mark.parametrize(("contract", "table_dtype"), contracts())
@pytest.mark.parametrize("row", ["v1536", "a126"])
def test_every_path_has_the_same_bits(row: str, contract: str, table_dtype: torch.dtype, path: int) -> None:
    check(with_contract(PRODUCTION[row], contract, table_dtype), 3, path)


@pytest.mark.parametrize("case", GENERAL, ids=str)
def test_general(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_short(case: Case) -> None:
    check(case)


def test_misaligned_contiguous_input_asks_for_the_reference() -> None:
    case = replace(HIDDEN_4096, x="misaligned")
    args = make(case, 0)
    assert run(case, args) is None
    fp32 = replace(case, contract="fp32-all")  # eager's x.float() is aligned, whatever x was
    prepare([fp32])
    check(fp32)


def test_misaligned_and_strided_weight() -> None:
    args = list(make(HIDDEN_4096, 0))
    w = args[2]
    assert isinstance(w, Tensor)
    odd = torch.empty(w.numel() + 1, dtype=w.dtype, device="cuda")[1:].copy_(w.detach())
    args[2] = odd
    assert run(HIDDEN_4096, tuple(args)) is None  # eager sums in another order for such a weight
    strided = torch.empty(2 * w.numel(), dtype=w.dtype, device="cuda")[::2].copy_(w.detach())
    args[2] = strided
    found, expected = run(HIDDEN_4096, tuple(args)), eager(HIDDEN_4096, tuple(args))
    assert found is not None
    assert all(differing(a, b) == 0 for a, b in zip(found, expected, strict=True))


def test_eps_zero() -> None:
    """Exact for rows of 2^n elements; elsewhere the division could show (mean_of in rope_math.cuh): the reference."""
    case = replace(HIDDEN_4096, q=replace(HIDDEN_4096.q, eps=0.0), k=replace(HIDDEN_4096.q, eps=0.0))
    check(case)
    other = replace(case, head_dim=96)
    prepare([other])
    assert run(other, make(other, 0)) is None


@pytest.mark.parametrize("per_head", [False, True])
def test_offsets_beyond_2_31_in_a_view(per_head: bool) -> None:
    """Rows 2^20 elements apart: the last one starts past 2^31."""
    seq, stride = 2200, 1 << 20
    base = torch.empty(seq * stride, dtype=BF16, device="cuda")
    shape, inner = ((1, seq, 4, 128), (128, 1)) if per_head else ((1, seq, 512), (1,))
    x = base.as_strided(shape, (seq * stride, stride, *inner))
    x.copy_(torch.randn(shape, device="cuda"))
    case = Case(Side(seq, 4), None, 128, per_head=per_head)
    prepare([case])
    args = (x, *make(case, 0)[1:])
    found, expected = run(case, args), eager(case, args)
    assert found is not None
    assert differing(found[0], expected[0]) == 0


def test_more_than_2_31_elements() -> None:
    case = Case(Side(270_000, 64), None, 128, tables="head1")  # 2.2e9 elements
    prepare([case])
    args = make(case, 0)
    found = run(case, args)
    assert found is not None
    x, w, cos, sin, *rest = args
    for start in range(0, 270_000, 27_000):  # eager in slices: its intermediates would not fit
        rows = slice(start, start + 27_000)
        part = (x[:, rows], w, cos[:, :, rows], sin[:, :, rows], *rest)  # type: ignore[index]
        assert differing(found[0][:, rows], eager(case, part)[0]) == 0


def test_more_than_65535_in_the_batch() -> None:
    case = Case(Side(1, 4, 70_000), None, 64, tables="batch1")
    prepare([case])
    check(case)


def test_runs_on_the_current_stream() -> None:
    args = make(HIDDEN_4096, 0)
    expected = eager(HIDDEN_4096, args)
    q = args[0]
    assert isinstance(q, Tensor)
    source, late = q.clone(), torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)  # on another stream the kernel would read the zeros
        late.copy_(source)
        found = run(HIDDEN_4096, (late, *args[1:]))
        torch.cuda.current_stream().synchronize()
    assert found is not None
    assert differing(found[0], expected[0]) == 0


def test_cuda_graph_capture() -> None:
    case = replace(HIDDEN_4096, q=Side(310), k=Side(310), contract="fp32-result-muladd")
    prepare([case])
    args = make(case, 0)
    expected = eager(case, args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first launch of this configuration: it is loaded during capture
        found = rope.launch_pair(*args)  # type: ignore[arg-type]
    assert found is not None
    for t in found:
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(differing(a, b) == 0 for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_while_the_first_is_current() -> None:
    args = make(HIDDEN_4096, 0, "cuda:1")
    assert torch.cuda.current_device() == 0
    found, expected = run(HIDDEN_4096, args), eager(HIDDEN_4096, args)
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert found is not None
    assert all(differing(a, b) == 0 for a, b in zip(found, expected, strict=True))


def test_bad_arguments_raise() -> None:
    args = list(make(HIDDEN_4096, 0))
    assert isinstance(args[4], Tensor)
    with pytest.raises(ValueError, match="cos and sin must be"):
        rope.launch_pair(*args[:4], args[4][:, :, 1:], *args[5:])  # type: ignore[arg-type]
    with pytest.raises(rope.KernelNotReadyError, match="not in the cache"):
        rope.launch_pair(*args[:-2], "fp32-rope-muladd", "bhsd")  # type: ignore[arg-type]


def test_another_spelling_of_the_same_contracts() -> None:
    """ltx-core's in-place addcmul chain and diffusers' fp32 chain, written out as those projects write them."""
    case = PRODUCTION["v1536"]
    q, _, w, _, cos, sin = make(case, 5)[:6]
    assert isinstance(q, Tensor) and isinstance(cos, Tensor) and isinstance(sin, Tensor)  # noqa: PT018
    n = torch.nn.functional.rms_norm(q, (4096,), w, 1e-6)  # type: ignore[arg-type]
    split = n.view(1, -1, 32, 128).swapaxes(1, 2).unflatten(-1, (2, 64))
    out = split * cos.unsqueeze(-2)
    out[..., :1, :].addcmul_(-sin.unsqueeze(-2), split[..., 1:, :])
    out[..., 1:, :].addcmul_(sin.unsqueeze(-2), split[..., :1, :])
    chain = out.flatten(-2).swapaxes(1, 2).reshape(1, -1, 4096)
    single = replace(case, k=None)
    prepare([single, replace(single, contract="fp32-rope")])
    found = rope.launch_single(q, w, cos, sin, 1e-6, 32, "bf16-chain")  # type: ignore[arg-type]
    assert found is not None
    assert differing(found, chain) == 0

    split = split.float()
    out = split * cos.unsqueeze(-2)
    out[..., :1, :].addcmul_(-sin.unsqueeze(-2), split[..., 1:, :])
    out[..., 1:, :].addcmul_(sin.unsqueeze(-2), split[..., :1, :])
    chain = out.flatten(-2).swapaxes(1, 2).reshape(1, -1, 4096).to(BF16)
    found = rope.launch_single(q, w, cos, sin, 1e-6, 32, "fp32-rope")  # type: ignore[arg-type]
    assert found is not None
    assert differing(found, chain) == 0
