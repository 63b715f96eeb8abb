"""torch.compile(backend="ltx") on a GPU: the rewritten rotation has eager's bits, and the kernels are there in time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ltx_inductor
from ltx_inductor.kernels import choice, compilers, gate, proofs, rope, store
from ltx_inductor.ops.rope import reference
from ltx_inductor.rewrite.needs import KernelNeed

HEADS, DIM, BF16 = 32, 128, torch.bfloat16
ROW = HEADS * DIM
ROOT = Path(__file__).resolve().parents[2]


class Rotate(torch.nn.Module):
    """RMSNorm -> split RoPE of q and k: nothing else, so that the whole result has to be eager's, bit for bit.

    how: "diffusers" (fp32-rope), "ltx-core" (bf16-chain), "muladd" (fp32-rope-muladd).
    """

    def __init__(self, how: str, dim: int = DIM, device: str = "cuda"):
        super().__init__()
        self.how, self.dim = how, dim
        self.norm_q = torch.nn.RMSNorm(HEADS * dim, eps=1e-6, device=device, dtype=BF16)
        self.norm_k = torch.nn.RMSNorm(HEADS * dim, eps=1e-6, device=device, dtype=BF16)
        with torch.no_grad():
            for n in (self.norm_q, self.norm_k):
                n.weight.copy_(torch.randn(HEADS * dim))

    def rope(self, n, cos, sin):
        x = n.unflatten(-1, (HEADS, self.dim)).transpose(1, 2)
        if self.how == "muladd":
            a, b = x.float().chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).transpose(1, 2).flatten(2).to(n.dtype)
        x = x.unflatten(-1, (2, -1))
        x = x.float() if self.how == "diffusers" else x
        out = x * cos.unsqueeze(-2)
        out[..., :1, :].addcmul_(-sin.unsqueeze(-2), x[..., 1:, :])
        out[..., 1:, :].addcmul_(sin.unsqueeze(-2), x[..., :1, :])
        return out.flatten(-2).transpose(1, 2).flatten(2).to(n.dtype)

    def forward(self, q, k, cos, sin):
        return self.rope(self.norm_q(q), cos, sin), self.rope(self.norm_k(k), cos, sin)


def inputs(tokens, batch=1, dim=DIM, table=torch.float32, device="cuda"):
    gen = torch.Generator(device).manual_seed(0)

    def x():
        t = torch.randn(batch, tokens, HEADS * dim, generator=gen, device=device)
        t[..., ::97] *= 1000
        t[..., 5::89] = 0.0
        t[..., 7::83] = -0.0
        t[:, ::5] *= 1e-6
        return t.to(BF16)

    angle = torch.rand(batch, tokens, HEADS, dim // 2, generator=gen, device=device) * 6.3
    return x(), x(), angle.cos().to(table).transpose(1, 2), angle.sin().to(table).transpose(1, 2)


def same_bits(got, want):
    return all(g.dtype == w.dtype and gate.differing(g, w) == 0 for g, w in zip(got, want, strict=True))


def compiled(module, **kw):
    torch._dynamo.reset()
    return torch.compile(module, backend="ltx", **kw)


HOWS = [("diffusers", torch.float32), ("diffusers", BF16), ("ltx-core", BF16), ("muladd", torch.float32)]


@torch.no_grad()
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("how", "table"), HOWS)
def test_bits_of_eager(how, table, dim):
    module, args = Rotate(how, dim), inputs(1031, 2, dim, table)
    assert same_bits(compiled(module)(*args), module(*args))
    ltx_inductor.last_report().expect(rmsnorm_split_rope=2)


@torch.no_grad()
def test_a_dynamic_sequence_compiles_once_and_keeps_the_bits():
    module = Rotate("diffusers")
    model = compiled(module, dynamic=True)
    for tokens in (1000, 37, 2, 513):
        args = inputs(tokens)
        assert same_bits(model(*args), module(*args))


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2])
def test_short_sequences(tokens):
    module, args = Rotate("ltx-core"), inputs(tokens, 1, DIM, BF16)
    assert same_bits(compiled(module)(*args), module(*args))
    ltx_inductor.last_report().expect(rmsnorm_split_rope=2)


@torch.no_grad()
def test_cuda_graphs_capture_the_kernel():
    module, args = Rotate("diffusers"), inputs(777)
    model = compiled(module, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        got = [t.clone() for t in model(*args)]
        assert same_bits(got, module(*args))
    ltx_inductor.last_report().expect(rmsnorm_split_rope=2)


@torch.no_grad()
def test_a_misaligned_view_has_the_bits_of_eager_too():
    """A contiguous view at an odd offset makes torch take another kernel, with another order of summation."""
    module, (q, k, cos, sin) = Rotate("diffusers"), inputs(129)
    storage = torch.empty(q.numel() + 1, dtype=BF16, device="cuda")
    q = storage[1:].copy_(q.flatten()).view_as(q)
    assert q.data_ptr() % 8
    op = torch.ops.ltx_inductor.rmsnorm_split_rope
    got = op(q, module.norm_q.weight, cos, sin, 1e-6, HEADS, "fp32-rope")
    assert same_bits([got], [module(q, k, cos, sin)[0]])


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_graph_on_the_second_device_while_the_first_is_current():
    module, args = Rotate("diffusers", device="cuda:1"), inputs(300, device="cuda:1")
    assert torch.cuda.current_device() == 0
    got = compiled(module)(*args)
    assert got[0].device.index == 1
    assert same_bits(got, module(*args))
    ltx_inductor.last_report().expect(rmsnorm_split_rope=2)


@torch.no_grad()
def test_addcmul_with_a_scale_is_refused():
    def f(q, w, cos, sin):
        n = F.rms_norm(q, (ROW,), w, 1e-6).unflatten(-1, (HEADS, DIM)).transpose(1, 2).float()
        a, b = n.chunk(2, -1)
        return torch.cat([torch.addcmul(a * cos, sin, b, value=-1), torch.addcmul(b * cos, sin, a)], -1)

    q, _, cos, sin = inputs(64)
    compiled(f)(q, torch.ones(ROW, device="cuda", dtype=BF16), cos, sin)
    assert ltx_inductor.last_report().count() == 0
    assert any("value=-1" in r.reason for r in ltx_inductor.last_report().refusals)


def need(**change):
    device = torch.device("cuda", 0)
    return replace(KernelNeed(device, BF16, BF16, DIM, ROW, False, "bf16-chain", "bshd", True), **change)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(proofs, "_verdicts", {})
    monkeypatch.setattr(rope, "_images", {})
    monkeypatch.setattr(rope, "_handles", {})
    monkeypatch.setattr(rope, "_plans", {})
    monkeypatch.setattr(rope, "_off", {})
    monkeypatch.setattr(rope, "_accepted", set())
    monkeypatch.setattr(rope, "_served", set())
    return tmp_path


def test_the_gate_proves_once_and_remembers(empty_cache, monkeypatch):
    kernels = choice.DeviceKernels(reference)
    assert kernels.refusal(need()) is None
    assert list(empty_cache.rglob("*.proof"))
    monkeypatch.setattr(proofs, "_verdicts", {})
    monkeypatch.setattr(gate, "_compare", None)  # a second proof would fail
    assert kernels.refusal(need()) is None


def test_the_gate_turns_a_wrong_kernel_off_and_keeps_its_inputs(empty_cache):
    def one_ulp(*args):
        out = reference(*args)
        out.view(torch.int16).view(-1)[12345] ^= 1
        return out

    reason = choice.DeviceKernels(one_ulp).refusal(need())
    assert reason is not None
    assert "differs from eager in 12 of" in reason  # 6 launches of two sides
    assert list(empty_cache.rglob("*.pt"))


@torch.no_grad()
def test_without_a_compiler_the_graph_stays_unfused_with_one_warning(empty_cache, monkeypatch):
    for find in ("find_nvcc", "find_nvrtc"):
        monkeypatch.setattr(compilers, find, lambda: None)
    choice._warn_once.cache_clear()
    module, args = Rotate("diffusers"), inputs(300)
    with pytest.warns(UserWarning, match="install the CUDA toolkit") as caught:
        compiled(module)(*args)
    assert sum("left unfused" in str(w.message) for w in caught) == 1
    assert ltx_inductor.last_report().count() == 0
    assert any("no CUDA compiler" in r.reason for r in ltx_inductor.last_report().refusals)
    assert store.cache_root() == empty_cache


CHILD = """
    import sys, torch
    sys.path.insert(0, {root!r})
    import ltx_inductor
    from tests.gpu.test_end_to_end import Rotate, inputs, same_bits
    torch.manual_seed(0)
    module, args = Rotate("diffusers"), inputs(640)
    with torch.no_grad():
        got = torch.compile(module, backend="ltx")(*args)
        print(ltx_inductor.last_report().cached, ltx_inductor.last_report().count(), same_bits(got, module(*args)))
"""


def test_a_second_process_takes_graph_report_and_kernel_from_the_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path / "kernels"))
    said = []
    for _ in range(2):
        child = [sys.executable, "-c", textwrap.dedent(CHILD).format(root=str(ROOT))]
        done = subprocess.run(child, capture_output=True, text=True, check=True)
        said.append(done.stdout.split()[-3:])
    assert said == [["False", "2", "True"], ["True", "2", "True"]]
