"""Compiled models on a GPU call the C function of csrc/python_call.h, and keep eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import ltx_inductor
from ltx_inductor.ops import rope_direct
from tests.gpu.test_end_to_end import BF16, HEADS, Rotate, inputs, same_bits


@pytest.fixture
def only_c(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launch that reaches Python fails. Not with the caches: their code would come with another function."""

    def unexpected(*args: Any) -> None:
        raise AssertionError("the C function handed the call to Python")

    monkeypatch.setattr(rope_direct, "_slow", lambda *args: unexpected)
    rope_direct.rope_call.cache_clear()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    rope_direct.rope_call.cache_clear()


class Chain(nn.Module):
    """Three pairs and a single tensor, one after the other, so that buffers are reused. What Inductor does in between
    moves values only: Triton's negation, for one, makes 0 of 0."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.rotate = Rotate("diffusers", device=device)

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            q, k = self.rotate(k.flip(1), q, cos, sin)
        return self.rotate.rope(self.rotate.norm_q(q.flip(1)), cos, sin), k


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}], ids=str)
def test_bits_of_eager_without_python(only_c: None, how: dict[str, Any]) -> None:
    module = Chain()
    compiled = torch.compile(module, backend="ltx", **how)
    args = inputs(777)
    found, code = run_and_get_code(compiled, *args)
    assert same_bits([t.clone() for t in found], module(*args))
    ltx_inductor.last_report().expect(rmsnorm_split_rope=7)
    assert "torch.ops.ltx_inductor" not in code[0]
    for tokens in (777, 777, 130, 1):
        args = inputs(tokens)
        torch.compiler.cudagraph_mark_step_begin()
        assert same_bits([t.clone() for t in compiled(*args)], module(*args))


@torch.no_grad()
def test_it_runs_on_the_current_stream(only_c: None) -> None:
    module, args = Chain(), inputs(300)
    compiled = torch.compile(module, backend="ltx")
    expected, late = module(*args), torch.zeros_like(args[0])
    compiled(*args)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        late.copy_(args[0])
        found = compiled(late, *args[1:])
        torch.cuda.current_stream().synchronize()
    assert same_bits(found, expected)


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_second_device_while_the_first_is_current(only_c: None) -> None:
    module, args = Chain("cuda:1"), inputs(300, device="cuda:1")
    found = torch.compile(module, backend="ltx")(*args)
    assert torch.cuda.current_device() == 0
    assert found[0].device.index == 1
    assert same_bits(found, module(*args))


@torch.no_grad()
def test_what_eager_sums_in_another_order_runs_as_eager() -> None:
    module, (q, k, cos, sin) = Rotate("diffusers"), inputs(129)
    q = torch.empty(q.numel() + 1, dtype=BF16, device="cuda")[1:].copy_(q.flatten()).view_as(q)
    out, weight = torch.empty_like(k), module.norm_q.weight
    rope_direct.rope_call(False, "fp32-rope", "bshd", 1e-6, 1e-6, HEADS, HEADS)(out, q, weight, cos, sin)
    assert same_bits([out], [module(q, k, cos, sin)[0]])
