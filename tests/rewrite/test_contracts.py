"""Contracts: one fma and two roundings differ, even with 16-bit operands."""

import pytest
import torch

from ltx_inductor.contract import CONTRACTS, find, lookup
from ltx_inductor.ops.rope import _rotate


def test_names_are_looked_up_and_listed():
    assert lookup("fp32-rope").narrow_norm
    with pytest.raises(ValueError, match=r"contract='bf16' .*bf16-chain.*fp32-rope"):
        lookup("bf16")
    assert find(narrow_norm=True, narrow_product=True, fused_sum=False, narrow_result=True) is None
    assert all(c.describe() for c in CONTRACTS.values())


def test_fma_and_two_steps_differ_with_16_bit_operands():
    """The product of two bf16 values is exact in fp32 unless it underflows.

    n0*cos = 32767 * 2^-149 and n1*sin = 1.5 * 2^-149: rounded by itself the product is 2 * 2^-149, and the sum lies
    above the tie between 0 and the smallest bf16 number; in one fma it lies on the tie, which rounds to 0.
    """
    n = torch.tensor([[217 * 2.0**-75, -3 * 2.0**-75]]).bfloat16()
    cos = torch.tensor([[151 * 2.0**-74]]).bfloat16()
    sin = torch.tensor([[2.0**-75]]).bfloat16()
    fused = _rotate(n, cos, sin, lookup("fp32-rope")).bfloat16()
    apart = _rotate(n, cos, sin, lookup("fp32-rope-muladd")).bfloat16()
    assert fused[0, 0].item() == 0.0
    assert apart[0, 0].item() == 2.0**-133
