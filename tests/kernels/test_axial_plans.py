"""What the launcher of the axial kernel keeps from call to call, without a GPU: nothing is launched."""

from __future__ import annotations

import pytest
import torch

from ltx_inductor.kernels import counts, driver, rope_axial
from ltx_inductor.kernels.rope import KernelNotReadyError
from ltx_inductor.ops.axial_rope import _checked

CONTRACT = "fp32-rope-muladd"
SPEC = rope_axial.Spec(CONTRACT, torch.bfloat16, (8, 8))


@pytest.fixture
def call(monkeypatch):
    """(x, weight, cos, sin, scale) -> the parameters of the launch."""
    launched = []
    for name in ("_functions", "_off", "_plans"):
        monkeypatch.setattr(rope_axial, name, {})
    monkeypatch.setattr(rope_axial, "_accepted", set())
    monkeypatch.setattr(driver, "launch", lambda *args: launched.append(args[-1][0]))
    monkeypatch.setattr(counts, "called", lambda *args, **kwargs: None)
    rope_axial._functions[None, SPEC] = rope_axial._Functions((1, 2), "digest")
    rope_axial.accept(None, SPEC)

    def do(x, weight, cos, sin, scale=1.0):
        rope_axial.launch(
            x, weight, cos, sin, 1e-6, scale, CONTRACT, check=lambda: _checked(x, weight, cos, sin, CONTRACT)
        )
        return launched[-1]

    return do


def inputs():
    tables = [torch.randn(1, 5, 1, 8) for _ in range(4)]
    return torch.randn(2, 5, 3, 32).bfloat16(), torch.randn(32).bfloat16(), tables[:2], tables[2:]


@pytest.mark.parametrize("change", ["weight dtype", "weight shape", "sin dtype", "dtype of one axis", "more sin"])
def test_a_plan_of_other_arguments_is_not_reused(call, change):
    x, weight, cos, sin = inputs()
    call(x, weight, cos, sin)
    if change == "weight dtype":
        weight = weight.float()
    elif change == "weight shape":
        weight = weight[:16].clone()
    elif change == "sin dtype":
        sin = [sin[0], sin[1].bfloat16()]
    elif change == "dtype of one axis":
        cos, sin = [cos[0], cos[1].bfloat16()], [sin[0], sin[1].bfloat16()]
    else:
        cos, sin = cos[:1], [cos[1], *sin]
    with pytest.raises(ValueError, match="expected"):
        call(x, weight, cos, sin)


def test_the_sign_of_a_zero_scale(call):
    assert [call(*inputs(), scale).scale_word for scale in (0.0, -0.0)] == [0, 0x80008000]


def test_turned_off_while_planning(call, monkeypatch):
    planned = rope_axial._planned

    def racing(*args):
        plan = planned(*args)
        rope_axial.turn_off(None, SPEC, "another thread found a difference")
        return plan

    monkeypatch.setattr(rope_axial, "_planned", racing)
    call(*inputs())
    monkeypatch.setattr(rope_axial, "_planned", planned)
    with pytest.raises(KernelNotReadyError):
        call(*inputs())


def test_offsets_beyond_32_bits_are_declined(call):
    strides = ((1 << 30) - 2, (1 << 30) - 4, (1 << 30) - 8, 8, 1)
    table = torch.empty((2, 2, 2, 1, 8), device="meta").as_strided((2, 2, 2, 1, 8), strides)
    x = torch.empty((2, 2, 2, 3, 32), dtype=torch.bfloat16)
    assert rope_axial._planned(x, None, [table] * 2, [table] * 2, 1e-6, 1.0, CONTRACT).declined
