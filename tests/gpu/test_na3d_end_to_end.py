"""Neighborhood attention from torch.compile to the kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltx_inductor
from ltx_inductor.kernels import fna
from ltx_inductor.ops import verified
from ltx_inductor.ops.na3d import reference
from ltx_inductor.replay import replay
from tests.gpu.fna_cases import draw, error, expected, prepare

ELEVEN = (11, 11, 11)


def real_na3d() -> Callable[..., Tensor]:
    natten = pytest.importorskip("natten")
    try:
        natten.na3d(*draw((12, 13, 14)), kernel_size=ELEVEN)
    except Exception as problem:
        pytest.skip(f"NATTEN has no kernel here: {problem}")
    return natten.na3d


class Attention(nn.Module):
    """Projections, per-head norm, neighborhood attention: as in the decoder, but for the rotation."""

    def __init__(self, na3d: Callable[..., Tensor], window: tuple[int, int, int], heads: int = 4) -> None:
        super().__init__()
        self.na3d, self.window, self.heads = na3d, window, heads
        self.qkv = nn.Linear(heads * 64, 3 * heads * 64)
        self.norm_q, self.norm_k = nn.RMSNorm(64), nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, 64)) for t in self.qkv(x).chunk(3, dim=-1))
        out = self.na3d(self.norm_q(q) / 8, self.norm_k(k), v.contiguous(), kernel_size=self.window, scale=1.0)
        return out.flatten(-2)


def module(na3d: Callable[..., Tensor], window: tuple[int, int, int] = ELEVEN) -> nn.Module:
    torch.manual_seed(0)
    return Attention(na3d, window).to("cuda", torch.bfloat16).eval()


def plain(q: Tensor, k: Tensor, v: Tensor, kernel_size: tuple[int, int, int], scale: float) -> Tensor:
    return reference(q, k, v, kernel_size, scale).to(q.dtype)


@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_natten_is_replaced(mode: str | None) -> None:
    model = module(real_na3d())
    x = torch.randn(1, 13, 16, 18, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="ltx", mode=mode, fullgraph=True)
    with torch.no_grad():
        results = [compiled(x).clone() for _ in range(4)]
        report = ltx_inductor.last_report()
        assert report is not None
        report.expect(neighborhood_attention=1)
        want = module(plain)(x)
    assert error(results[0], want.double()) < 6e-3  # two results rounded to bf16, and the projection's own rounding
    assert all(torch.equal(results[0], r) for r in results[1:])


def test_one_artefact_for_every_grid() -> None:
    model = module(real_na3d(), (3, 5, 5))
    counter = torch._dynamo.testing.CompileCounterWithBackend("ltx")
    compiled = torch.compile(model, backend=counter, dynamic=True)
    with torch.no_grad():
        for grid in ((5, 8, 12), (9, 10, 17), (6, 21, 7), (4, 5, 9)):
            x = torch.randn(1, *grid, 256, device="cuda", dtype=torch.bfloat16)
            assert error(compiled(x), module(plain, (3, 5, 5))(x).double()) < 6e-3
    assert counter.frame_count == 1


class Bare(nn.Module):
    """Nothing but the call, on inputs as they come: Inductor computes nothing, so its own choices cannot show."""

    def __init__(self, na3d: Callable[..., Tensor], scale: float) -> None:
        super().__init__()
        self.na3d, self.scale = na3d, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.na3d(q, k, v, kernel_size=ELEVEN, scale=self.scale)


@pytest.mark.parametrize(("kind", "scale"), [("normed", 1.0), ("plain", 0.125), ("peaked", 0.125)])
def test_exact_gives_the_bits_of_natten(kind: str, scale: float) -> None:
    pytest.importorskip("tilelang")
    model = Bare(real_na3d(), scale)
    q, k, v = draw((13, 16, 18), heads=4, kind=kind)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ltx", options={"ltx_inductor.exact": True}, fullgraph=True)
    with torch.no_grad():
        got = compiled(q, k, v)
        report = ltx_inductor.last_report()
        assert report is not None
        report.expect(neighborhood_attention=1)
        assert "NATTEN's bits" in report.sites[0].proof
        assert torch.equal(got.view(torch.int16), model(q, k, v).view(torch.int16))


@pytest.mark.parametrize("exact", [False, True])
def test_verify_always(exact: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if exact:
        pytest.importorskip("tilelang")
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(fna, "_off", {})
    model = module(real_na3d())
    x = torch.randn(1, 13, 16, 18, 256, device="cuda", dtype=torch.bfloat16)
    options = {"ltx_inductor.exact": exact, "ltx_inductor.verify": "always"}
    compiled = torch.compile(model, backend="ltx", options=options, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        report = ltx_inductor.last_report()
        assert report is not None
        report.expect(neighborhood_attention=1)
        assert ("compared with NATTEN" if exact else "relative error") in report.sites[0].proof
        ltx_inductor.stats(reset=True)
        right = compiled(x)
        counted = ltx_inductor.stats()["na3d"]
        assert (counted["kernel"], counted["checks"], counted["differing"]) == (1, 1, 0)
        launch = fna.launch

        def wrong(*args: Any) -> Tensor:
            out = launch(*args)
            out.view(torch.int16).view(-1)[77] ^= 1 if exact else 1 << 14  # a last bit, or 2^128 times as much
            return out

        monkeypatch.setattr(fna, "launch", wrong)
        with pytest.warns(UserWarning, match=r"the kernel of na3d .* it is off in this process"):
            got = compiled(x)
        monkeypatch.setattr(fna, "launch", launch)
        assert error(got, right.double()) < 6e-3
        with pytest.warns(UserWarning, match="runs its reference"):
            compiled(x)
    (file,) = tmp_path.rglob("*.pt")
    monkeypatch.setattr(fna, "_off", {})
    found = replay(file)
    assert (found["op"], found["differing"]) == ("na3d", 0)
    verified.notes.clear()
    verified.compared_calls.clear()


def test_the_op_itself() -> None:
    prepare(ELEVEN)
    q, k, v = draw((13, 17, 21), heads=3)
    got = torch.ops.ltx_inductor.na3d(q, k, v, ELEVEN, 1.0)
    assert error(got, expected(q, k, v, ELEVEN, 1.0)) < 3e-3
    assert got.is_contiguous()


@pytest.mark.parametrize("contiguous", [True, False])
def test_opcheck(contiguous: bool) -> None:
    prepare((3, 5, 5))
    q, k, v = draw((5, 8, 12))
    if not contiguous:
        q, k, v = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, k, v))
    args: Any = (q, k, v, [3, 5, 5], 0.125)
    torch.library.opcheck(torch.ops.ltx_inductor.na3d.default, args)
