"""Refused, or the same bits: thousands of near-misses of legal graphs, each with one random thing changed.

Every mutant runs on the CPU before and after the pass, on two draws of about 1,300 elements a side in which all kinds
of values of draws.py meet. A rotation that is left alone must be named by a refusal.
"""

from __future__ import annotations

import functools

import pytest
import torch

from . import draws
from .fuzz import near_miss
from .fuzz.judge import comparable, judge, run
from .harness import ADDCMUL_KEPT, Traced, bit_difference, copy_graph, run_graph, trace
from .models import pieces as p
from .models.sides import CASES as SIDES
from .models.spellings import spell

FP32, S = torch.float32, 27
PER_BASE = 130


_spell = functools.partial(spell, S=S)
BASES = [
    _spell("inplace", "bf16-chain", p.inplace_addcmul),
    _spell("inplace-flat", "bf16-chain", p.inplace_flat, enter=p.unflatten_transpose, leave=p.keep_bshd),
    _spell("chunk-cat", "bf16-chain", p.chunk_cat, enter=p.view_permute, leave=p.keep_bhsd),
    _spell("stack", "bf16-chain", p.split_stack_flatten, layout="flat row"),
    _spell("writes", "bf16-chain", p.select_writes, layout="sr"),
    _spell("rotate-half", "bf16-chain", p.rotate_half, layout="b1sr", norm=p.rms_no_weight),
    _spell("per-head", "bf16-chain", p.inplace_shared, norm=p.rms_per_head, weight=8),
    _spell(
        "packed", "bf16-chain", p.chunk_cat, take=lambda x, h: x.chunk(3, -1)[1], x_shape=lambda B, S, N: (B, S, 3 * N)
    ),
    _spell("fp32-rope", "fp32-rope", p.in_fp32(p.inplace_addcmul), table=FP32),
    _spell("fp32-rope-cat", "fp32-rope", p.in_fp32(p.chunk_cat), table=FP32, layout="batch-1"),
    _spell("fp32-rope-muladd", "fp32-rope-muladd", p.in_fp32(p.chunk_cat_sub), table=FP32),
    _spell("fp32-rotate-half", "fp32-rope-muladd", p.in_fp32(p.rotate_half_sum), table=FP32, layout="1sr"),
    _spell("fp32-result", "fp32-result", p.chunk_cat, table=FP32),
    _spell("fp32-all", "fp32-all", p.narrow_to(torch.bfloat16)(p.inplace_addcmul), table=FP32, norm=p.rms_fp32),
    _spell("fp32-all-muladd", "fp32-all-result-muladd", p.stack_sub, table=FP32, norm=p.rms_fp32),
    *[c for c in SIDES if c.name in ("pair", "pair-k-from-q")],
]
BASES = [c for c in BASES if comparable(c.contract)]


def snapshot(args: list) -> list:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


@functools.cache
def base(case) -> tuple[Traced, list[list]]:
    torch.manual_seed(0)
    module, inputs = case.build(), case.inputs()
    traced, calls = trace(module, inputs)[0], []
    for seed in range(2):
        draws.redraw(module, inputs, case.dynamic["seq"], case.head_dim, seed, 4 * seed, special=seed > 0)
        calls.append(snapshot(traced.args))
    return traced, calls


@pytest.mark.parametrize("case", BASES, ids=str)
def test_refused_or_bitwise_equal(case) -> None:
    traced, calls = base(case)
    wrong, done, matched, seed = [], 0, 0, 0
    while done < PER_BASE:
        seed += 1
        assert seed < 30 * PER_BASE, f"only {done} mutants"
        made = near_miss.mutate(traced.gm, seed)
        wants = made and run(made[1], calls)
        if not made or not wants:
            continue
        done += 1
        verdict = judge(made[1], calls, wants)
        matched += verdict.sides == case.sites
        if verdict.why:
            wrong.append(f"seed {seed}, {made[0]}: {verdict.why}")
    assert not wrong, f"{len(wrong)} of {done}\n" + "\n".join(wrong[:12])
    assert 0.1 * done < matched < 0.95 * done, (
        f"{matched} of {done} rewritten: the mutations are too weak or too strong"
    )


@pytest.mark.parametrize("change", ["fma", "eps", "round"])
def test_the_draws_see(change: str) -> None:
    """The three differences that plain N(0, 1) draws miss show here: otherwise the test above could not fail."""
    traced, calls = base(next(c for c in BASES if c.name == "fp32-rope-muladd"))
    other = copy_graph(traced.gm)
    aten = torch.ops.aten
    if change == "fma":
        n = next(n for n in other.graph.nodes if n.target is aten.add.Tensor and n.args[1].target is aten.mul.Tensor)
        n.target, n.args = aten.addcmul.default, (n.args[0], *n.args[1].args)
    elif change == "eps":
        n = next(n for n in other.graph.nodes if n.target in (aten.add.Scalar, aten.add.Tensor))
        n.args = (n.args[0], n.args[1] * 1.01)
    else:
        n = next(n for n in other.graph.nodes if n.target is aten.mul.Tensor and n.meta["val"].dim() == 4)
        with other.graph.inserting_after(n):
            fp16 = other.graph.call_function(torch.ops.prims.convert_element_type.default, (n, torch.float16))
            back = other.graph.call_function(torch.ops.prims.convert_element_type.default, (n, torch.float32))
        n.replace_all_uses_with(back, delete_user_cb=lambda u: u not in (fp16, back))
        back.args = (fp16, torch.float32)
        fp16.append(back)
    other.graph.lint()
    assert any(bit_difference(run_graph(other, args), run_graph(traced.gm, args)) for args in calls)


def test_enough_mutants() -> None:
    assert PER_BASE * len(BASES) >= 2000 or not ADDCMUL_KEPT
