"""The kernel of rmsnorm_axial_rope: eager's bits for every configuration, memory layout and grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx_inductor
from ltx_inductor.kernels import axial_gate, proofs, rope_axial
from ltx_inductor.kernels.repro import differing
from ltx_inductor.kernels.rope_axial import Spec
from ltx_inductor.ops.axial_rope import reference
from ltx_inductor.replay import replay
from tests.models.axial import Axial

BF16, FP16 = torch.bfloat16, torch.float16
MULADD = "fp32-rope-muladd"
DECODER = Spec(MULADD, BF16, (8, 12, 12))
SPECS = [
    DECODER,
    Spec("fp32-rope", BF16, (8, 12, 12)),
    Spec(MULADD, FP16, (8, 12, 12)),
    Spec("fp32-rope", FP16, (3, 5, 8)),
    Spec(MULADD, BF16, (16,)),
    Spec(MULADD, BF16, (11, 9)),
    Spec(MULADD, BF16, (12, 16, 20)),
    Spec(MULADD, BF16, (16, 24, 24)),
    Spec(MULADD, BF16, (20, 30, 30)),
    Spec("fp32-rope", BF16, (32, 48, 48)),
]
op = torch.ops.ltx_inductor.rmsnorm_axial_rope


def prepare(spec: Spec) -> None:
    assert rope_axial.prepare(torch.cuda.get_device_capability(), spec, 0) is None


def drawn(spec: Spec, grid: Sequence[int], heads: int) -> tuple[Any, ...]:
    x, weight, cos, sin = axial_gate.draw(spec, grid, heads, 0)
    return x, weight, cos, sin, 1e-6, 0.125, spec.contract


def check(args: tuple[Any, ...]) -> None:
    """The op by its kernel, into memory that held something else, against the eager chain."""
    torch.full_like(args[0], 777.0, memory_format=torch.contiguous_format)  # freed: the result may land there
    ltx_inductor.stats(reset=True)
    got = op(*args)
    assert ltx_inductor.stats()["rmsnorm_axial_rope"]["kernel"] == 1
    assert got.is_contiguous()
    assert differing(got, reference(*args)) == 0


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("grid", [(2, 5, 23, 31), (7, 19, 37), (1301,)], ids=str)
@pytest.mark.parametrize("heads", [1, 4, 7])
def test_bits_of_eager(spec: Spec, grid: tuple[int, ...], heads: int) -> None:
    if len(grid) < len(spec.pairs):
        grid = (*(1,) * (len(spec.pairs) - len(grid)), *grid)
    prepare(spec)
    args = drawn(spec, grid, heads)
    check(args)
    check((args[0], None, *args[2:5], 72**-0.5, spec.contract))


def test_a_million_elements_and_more() -> None:
    prepare(DECODER)
    args = drawn(DECODER, (2, 33, 64, 96), 4)
    assert args[0].numel() > 100_000_000
    check(args)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "part of a fused projection": lambda x: torch.cat((x, x, x), -2).unflatten(-2, (3, -1))[..., 1, :, :],
    "heads first": lambda x: x.movedim(-2, 1).contiguous().movedim(1, -2),
    "grid turned": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "rows apart": lambda x: torch.nn.functional.pad(x, (0, 12))[..., : x.shape[-1]],
    "odd strides": lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]],
    "elements apart": lambda x: torch.stack((x, x), -1)[..., 0],
    "every other frame": lambda x: torch.cat((x, x), 1)[:, ::2],
    "one batch for all": lambda x: x[:1].expand(3, *x.shape[1:]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str) -> None:
    prepare(DECODER)
    x, *rest = drawn(DECODER, (2, 5, 11, 13), 3)
    check((LAYOUTS[layout](x), *rest))


@pytest.mark.parametrize("table", ["whole grid", "transposed", "own strides for sin", "batch", "batch of cos", "odd"])
def test_any_tables(table: str) -> None:
    prepare(DECODER)
    x, weight, cos, sin, *rest = drawn(DECODER, (2, 5, 11, 13), 3)
    if table == "whole grid":
        cos, sin = ([t.expand(2, 5, 11, 13, 1, -1).contiguous() for t in tables] for tables in (cos, sin))
    elif table == "transposed":
        cos, sin = ([t.transpose(-1, 1).contiguous().transpose(-1, 1) for t in tables] for tables in (cos, sin))
    elif table == "own strides for sin":
        sin = [torch.stack((t, t), -1)[..., 0] for t in sin]
    elif table == "odd":
        cos, sin = ([torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in tables] for tables in (cos, sin))
    else:
        cos = [torch.cat((t, t.flip(-1))) for t in cos]
        sin = [torch.cat((t, t.flip(-1))) for t in sin] if table == "batch" else sin
    check((x, weight, cos, sin, *rest))


def test_misaligned_tensors_are_left_to_eager() -> None:
    """torch's vectorised norm does not take them, and sums in another order."""
    prepare(DECODER)
    x, *rest = drawn(DECODER, (1, 5, 11, 13), 3)
    off = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    ltx_inductor.stats(reset=True)
    got = op(off, *rest)
    assert ltx_inductor.stats()["rmsnorm_axial_rope"]["refused"] == 1
    assert differing(got, reference(off, *rest)) == 0


def test_more_than_2_to_the_31_elements() -> None:
    prepare(DECODER)
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn((1, 131, 256, 256, 4, 64), generator=gen, device="cuda", dtype=BF16)
    assert x.numel() > 1 << 31
    _, weight, cos, sin, *rest = drawn(DECODER, x.shape[:4], 1)
    got = op(x, weight, cos, sin, *rest)
    at = slice(129, 131)
    assert (
        differing(got[:, at], reference(x[:, at], weight, [cos[0][:, at], *cos[1:]], [sin[0][:, at], *sin[1:]], *rest))
        == 0
    )


def test_empty() -> None:
    prepare(DECODER)
    x, *rest = drawn(DECODER, (2, 5, 11, 13), 3)
    assert op(x[:0], *rest).shape == (0, 5, 11, 13, 3, 64)


@pytest.mark.parametrize("layout", ["contiguous", "part of a fused projection"])
def test_opcheck(layout: str) -> None:
    prepare(DECODER)
    x, weight, cos, sin, *rest = drawn(DECODER, (2, 3, 5, 7), 3)
    x = LAYOUTS.get(layout, lambda t: t)(x).nan_to_num(0.0, 1.0, -1.0)
    torch.library.opcheck(op, (x, weight, cos, sin, *rest))


def test_inside_a_cuda_graph() -> None:
    prepare(DECODER)
    args = drawn(DECODER, (1, 5, 11, 13), 3)
    op(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op(*args)
    found.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert differing(found, reference(*args)) == 0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_compiled(dynamic: bool, verify: str) -> None:
    torch._dynamo.reset()
    model = Axial(pairs=(8, 12, 12), scale=0.125).cuda().eval()
    compiled = torch.compile(model, backend="ltx", options={"ltx_inductor.verify": verify})
    with torch.no_grad():
        for grid in ((2, 5, 11, 13), (2, 7, 6, 29)) if dynamic else ((2, 5, 11, 13),):
            inputs = [t.cuda() for t in model.inputs(grid, 4)]
            for t in inputs if dynamic else ():
                for axis in (1, 2, 3):
                    if t.shape[axis] > 1:
                        torch._dynamo.mark_dynamic(t, axis)
            compiled(*inputs)
            report = ltx_inductor.last_report()
            assert report is not None
            report.expect(rmsnorm_axial_rope=2)
            assert "no bit differs" in report.sites[0].proof
            ltx_inductor.stats(reset=True)
            for got, want in zip(compiled(*inputs), model(*inputs), strict=True):
                assert differing(got, want) == 0
            counted = ltx_inductor.stats()["rmsnorm_axial_rope"]
            assert (counted["kernel"], counted["checks"]) == (2, 2 if verify == "always" else 0)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    torch._dynamo.reset()
    model = Axial(pairs=(8, 12, 12), scale=0.125).cuda().eval()
    inputs = [t.cuda() for t in model.inputs((2, 5, 11, 13), 4)]
    compiled = torch.compile(model, backend="ltx", mode=mode)
    with torch.no_grad():
        want = model(*inputs)
        for _ in range(4):
            for got, w in zip(compiled(*inputs), want, strict=True):
                assert differing(got.clone(), w) == 0


def test_a_wrong_kernel_is_refused_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    for name, empty in (("_functions", {}), ("_off", {}), ("_plans", {}), ("_accepted", set())):
        monkeypatch.setattr(rope_axial, name, empty)
    monkeypatch.setattr(proofs, "_verdicts", {})
    launch = rope_axial.launch

    def wrong(*args: Any, **options: Any) -> Tensor | None:
        out = launch(*args, **options)
        if out is not None:
            out.view(torch.int16).view(-1)[77] ^= 1
        return out

    monkeypatch.setattr(rope_axial, "launch", wrong)
    torch._dynamo.reset()
    model = Axial(pairs=(8, 12, 12), scale=0.125).cuda().eval()
    inputs = [t.cuda() for t in model.inputs((2, 5, 11, 13), 4)]
    nothing_cached = torch._inductor.config.patch(force_disable_caches=True)
    with torch.no_grad(), nothing_cached, pytest.warns(UserWarning, match="left unfused"):
        torch.compile(model, backend="ltx")(*inputs)
    report = ltx_inductor.last_report()
    assert report is not None
    assert not report.sites
    sentence = next(r.reason for r in report.refusals if "differs from eager" in r.reason)
    path = sentence.split("replay ")[1].split()[0]
    monkeypatch.setattr(rope_axial, "_off", {})  # as in another process
    assert replay(path)["differing"] == 1
    monkeypatch.setattr(rope_axial, "launch", launch)
    assert replay(path)["differing"] == 0
