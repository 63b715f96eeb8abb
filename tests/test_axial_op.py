"""The op rmsnorm_axial_rope as torch sees it: opcheck, fakes, errors, and a reference that is the eager chain."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ltx_inductor
from tests.harness import bit_difference
from tests.models.axial import Axial, fused

OP = torch.ops.ltx_inductor.rmsnorm_axial_rope.default
PAIRS = (8, 12, 12)


def arguments(grid=(2, 3, 4, 5), heads=3, scale=0.125, contract="fp32-rope-muladd"):
    model = Axial(pairs=PAIRS, scale=scale)
    q, _, *tables = model.inputs(grid, heads)
    weight = model.norm_q.weight.detach()
    return model, (q, weight, list(tables[:3]), list(tables[3:]), 1e-6, scale, contract)


@pytest.mark.parametrize("scale", [1.0, 0.125, 72**-0.5])
@pytest.mark.parametrize("contract", ["fp32-rope", "fp32-rope-muladd"])
def test_the_reference_is_the_eager_chain(scale, contract):
    model, args = arguments((2, 9, 16, 29), 4, scale, contract)
    model.turn = fused if contract == "fp32-rope" else model.turn
    assert args[0].numel() > 1 << 20
    with torch.no_grad():
        want = model.rotated(model.scaled(args[0]), [*args[2], *args[3]])
    assert bit_difference(OP(*args), want) is None


@pytest.mark.parametrize("layout", ["contiguous", "heads first", "no weight", "tables in bf16"])
def test_opcheck(layout):
    _, (x, weight, cos, sin, *rest) = arguments()
    x = x.nan_to_num(0.0, 1.0, -1.0)
    if layout == "heads first":
        x = x.movedim(-2, 1).contiguous().movedim(1, -2)
    if layout == "tables in bf16":
        cos, sin = [c.bfloat16() for c in cos], [s.bfloat16() for s in sin]
    torch.library.opcheck(OP, (x, None if layout == "no weight" else weight, cos, sin, *rest))


def test_fakes_have_the_strides_of_the_result():
    _, (x, *rest) = arguments()
    x = x.movedim(-2, 1).contiguous().movedim(1, -2)
    real = OP(x, *rest)
    with FakeTensorMode() as mode:
        fake = OP(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (x, *rest)))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


WRONG = {
    "contract='fp32-all'": lambda a: (*a[:6], "fp32-all"),
    "contract='nonsense'": lambda a: (*a[:6], "nonsense"),
    "x has 2 axes": lambda a: (a[0].flatten(0, -2), *a[1:]),
    "x is torch.float32": lambda a: (a[0].float(), *a[1:]),
    "weight is torch.float32": lambda a: (a[0], a[1].float(), *a[2:]),
    "cos has 2 tables, sin 3": lambda a: (*a[:2], a[2][:2], *a[3:]),
    "expected 32 together": lambda a: (*a[:2], a[2][:2], a[3][:2], *a[4:]),
    r"sin\[1\] has shape \[1, 1, 7, 1, 1, 12\]; expected \['2 or 1', '3 or 1', '4 or 1', '5 or 1', 1, 12\]": lambda a: (
        *a[:3],
        [a[3][0], torch.zeros(1, 1, 7, 1, 1, 12), a[3][2]],
        *a[4:],
    ),
    r"cos\[0\] has shape": lambda a: (*a[:2], [a[2][0].squeeze(0), *a[2][1:]], *a[3:]),
    r"cos\[2\] is torch.float64": lambda a: (*a[:2], [*a[2][:2], a[2][2].double()], *a[3:]),
    r"sin\[0\] is torch.bfloat16": lambda a: (*a[:3], [a[3][0].bfloat16(), *a[3][1:]], *a[4:]),
    "weight is on meta": lambda a: (a[0], a[1].to("meta"), *a[2:]),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_arguments_are_named(sentence):
    _, args = arguments()
    with pytest.raises(ValueError, match=sentence):
        OP(*WRONG[sentence](args))


def test_calls_are_counted():
    _, args = arguments()
    ltx_inductor.stats(reset=True)
    OP(*args)
    assert ltx_inductor.stats()["rmsnorm_axial_rope"]["reference"] == 1
