"""The ops as torch sees them: opcheck, fakes, errors, and a reference that is the eager chain of every contract."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.library import opcheck

from ltx_inductor.contract import CONTRACTS, lookup
from ltx_inductor.ops.rope import LAYOUTS, reference
from tests.harness import bit_difference

BF16 = torch.bfloat16
ONE = torch.ops.ltx_inductor.rmsnorm_split_rope.default
PAIR = torch.ops.ltx_inductor.qk_rmsnorm_split_rope.default


def operands(batch=2, tokens=5, heads=4, dim=16, table=BF16, per_head=False):
    torch.manual_seed(0)
    shape = (batch, tokens, heads, dim) if per_head else (batch, tokens, heads * dim)
    x, weight = torch.randn(shape).to(BF16), torch.randn(shape[-1]).to(BF16)
    angle = torch.rand(batch, tokens, heads, dim // 2) * 6.3
    return x, weight, *(t.to(table).transpose(1, 2) for t in (angle.cos(), angle.sin()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("contract", list(CONTRACTS))
def test_opcheck(contract, per_head, layout):
    x, w, cos, sin = operands(per_head=per_head)
    opcheck(ONE, (x, w, cos, sin, 1e-6, 4, contract, layout))
    opcheck(ONE, (x, None, cos[:1, :1], sin[:1, :1], 1e-6, 4, contract, layout))
    opcheck(PAIR, (x, x * 2, w, None, cos, sin, None, None, 1e-6, 1e-5, 4, 4, contract, layout))


@pytest.mark.parametrize("contract", list(CONTRACTS))
def test_the_reference_is_the_eager_chain(contract):
    """Written as the models write it: in-place addcmul_ on slices, or products and sums; a million elements."""
    c = lookup(contract)
    table = BF16 if c.narrow_product else torch.float32
    x, w, cos, sin = operands(1, 512, 32, 64, table)
    n = F.rms_norm(x, (2048,), w, 1e-6) if c.narrow_norm else F.rms_norm(x.float(), (2048,), w.float(), 1e-6)
    n = n.unflatten(-1, (32, 2, 32)).permute(0, 2, 1, 3, 4)
    n = n if c.narrow_product else n.float()
    if c.fused_sum:
        out = n * cos.unsqueeze(-2)
        out[..., :1, :].addcmul_(-sin.unsqueeze(-2), n[..., 1:, :])
        out[..., 1:, :].addcmul_(sin.unsqueeze(-2), n[..., :1, :])
    else:
        a, b = n.unbind(-2)
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], -2)
    out = out.flatten(-2).transpose(1, 2).flatten(2)
    assert x.numel() >= 1e6
    got = ONE(x, w, cos, sin, 1e-6, 32, contract)
    assert bit_difference(got, out.to(BF16) if c.narrow_result else out) is None


def test_both_sides_are_two_single_ones():
    x, w, cos, sin = operands()
    k = x.flip(1)[:, :3].contiguous()
    k_tables = cos[:, :, :3] * 0.5, sin[:, :, :3]
    got = PAIR(x, k, w, None, cos, sin, *k_tables, 1e-6, 1e-3, 4, 4, "bf16-chain", "bhsd")
    want = (
        reference(x, w, cos, sin, 1e-6, 4, "bf16-chain", "bhsd"),
        reference(k, None, *k_tables, 1e-3, 4, "bf16-chain", "bhsd"),
    )
    assert bit_difference(got, want) is None
    assert [t.shape for t in got] == [(2, 4, 5, 16), (2, 4, 3, 16)]


X, W, COS, SIN = operands()
WRONG = {
    "x has 2 axes": ((X[0], W, COS, SIN, 1e-6, 4, "bf16-chain"), {}),
    "x is torch.float32": ((X.float(), W, COS, SIN, 1e-6, 4, "bf16-chain"), {}),
    "num_heads=5 does not fit": ((X, W, COS, SIN, 1e-6, 5, "bf16-chain"), {}),
    "weight is torch.float32": ((X, W.float(), COS, SIN, 1e-6, 4, "bf16-chain"), {}),
    "cos has shape": ((X, W, COS[..., :3], SIN, 1e-6, 4, "bf16-chain"), {}),
    "sin is torch.float32": ((X, W, COS, SIN.float(), 1e-6, 4, "fp32-rope"), {}),
    "expected torch.bfloat16 for contract bf16-chain": ((X, W, COS.float(), SIN.float(), 1e-6, 4, "bf16-chain"), {}),
    "contract='nonsense' is not": ((X, W, COS, SIN, 1e-6, 4, "nonsense"), {}),
    r"cos has shape \[2, 4, 1, 8\]; expected \[2 or 1, 4 or 1, 5, 8\]": (
        (X, W, COS[:, :, :1], SIN[:, :, :1], 1e-6, 4, "bf16-chain"),
        {},
    ),
    r"cos has shape \[2, 4, 5, 8\]; expected \[2 or 1, 4 or 1, 1, 8\]": (
        (X[:, :1], W, COS, SIN, 1e-6, 4, "bf16-chain"),
        {},
    ),
    r"sin has shape \[2, 4, 4, 8\]; expected .* 5, 8\] for x": ((X, W, COS, SIN[:, :, :4], 1e-6, 4, "bf16-chain"), {}),
    r"cos has shape \[3, 4, 5, 8\]; expected": ((X, W, COS[[0, 1, 1]], SIN, 1e-6, 4, "bf16-chain"), {}),
    r"cos has shape \[2, 4, 5, 8\]; expected \[1 or 1,": ((X[:1], W, COS, SIN, 1e-6, 4, "bf16-chain"), {}),
    "cos is on meta; expected the device of x, cpu": ((X, W, COS.to("meta"), SIN, 1e-6, 4, "bf16-chain"), {}),
    "sin is on meta; expected the device of x, cpu": ((X, W, COS, SIN.to("meta"), 1e-6, 4, "bf16-chain"), {}),
    "weight is on meta; expected the device of x, cpu": ((X, W.to("meta"), COS, SIN, 1e-6, 4, "bf16-chain"), {}),
    "layout='hbsd'": ((X, W, COS, SIN, 1e-6, 4, "bf16-chain"), {"layout": "hbsd"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_argument_value_and_what_is_accepted(message):
    args, kwargs = WRONG[message]
    with pytest.raises(ValueError, match=message):
        ONE(*args, **kwargs)


def test_an_error_of_a_pair_names_its_side():
    with pytest.raises(ValueError, match=r"k as x: cos has shape \[2, 4, 1, 8\]"):
        PAIR(X, X, W, W, COS, SIN, COS[:, :, :1], SIN[:, :, :1], 1e-6, 1e-6, 4, 4, "bf16-chain")


def test_an_error_of_both_sides_names_none():
    for wrong, message in ((("bf17", "bshd"), "^contract='bf17'"), (("bf16-chain", "sbhd"), "^layout='sbhd'")):
        with pytest.raises(ValueError, match=message):
            PAIR(X, X, W, W, COS, SIN, None, None, 1e-6, 1e-6, 4, 4, *wrong)


def fake(t, mode, dynamic):
    sizes = [DimDynamic.DYNAMIC if axis in dynamic else DimDynamic.STATIC for axis in range(t.dim())]
    return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


@pytest.mark.parametrize("op", ["one", "pair"])
def test_dynamic_tokens_and_batch_add_no_guard(op):
    """Tables have symbols of their own here: that they are those of x is not known, nor that they are not."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        x, cos, sin = (fake(t, mode, axes) for t, axes in ((X, (0, 1)), (COS, (0, 2)), (SIN, (0, 2))))
        w, before = fake(W, mode, ()), len(env.guards)
        if op == "one":
            assert ONE(x, w, cos, sin, 1e-6, 4, "bf16-chain").shape == x.shape
        else:
            assert PAIR(x, x, w, w, cos, sin, None, None, 1e-6, 1e-6, 4, 4, "bf16-chain")[1].shape == x.shape
        assert len(env.guards) == before
        with pytest.raises(ValueError, match="expected .* or 1, 4 or 1, "):
            ONE(x, w, cos[:, :3], sin, 1e-6, 4, "bf16-chain")


def test_half_of_the_tables_of_k_is_an_error():
    with pytest.raises(ValueError, match="k_cos and k_sin: expected both"):
        PAIR(X, X, W, W, COS, SIN, COS, None, 1e-6, 1e-6, 4, 4, "bf16-chain")
