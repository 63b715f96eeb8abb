"""The rule rmsnorm_axial_rope: spellings are rewritten with the bits that they had, near-misses refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ltx_inductor.config import Config
from ltx_inductor.kernel_needs import assumed_kernels
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import RewriteReport
from tests.fuzz import near_miss
from tests.fuzz.judge import comparable, run
from tests.harness import bit_difference, copy_graph, run_graph, shape_facts, trace, trace_calls
from tests.models import axial
from tests.models.axial import Axial

RULE = "rmsnorm_axial_rope"
CPU = Config(cpu=True)
OP = torch.ops.ltx_inductor.rmsnorm_axial_rope.default


def rewritten(gm, config=CPU, kernels=None):
    """(the graph after the pass, the report)"""
    after, facts = copy_graph(gm), shape_facts(gm.graph)
    report = rewrite_graph(after.graph, config, kernels)
    assert shape_facts(gm.graph) == facts, "the pass guarded on a size"
    after.recompile()
    return after, RewriteReport([report])


def traced(module, inputs):
    with torch.no_grad():
        return trace(module, inputs)[0]


class UnderTokens(Axial):
    """x as [B, S, heads, head_dim], every table along all tokens."""

    def inputs(self, grid=axial.GRID, heads=axial.HEADS, seed=0):
        q, k, *tables = super().inputs(grid, heads, seed)
        flat = [t.flatten(1, 3) for t in (q, k)]
        return *flat, *(t.expand(1, *grid[1:], 1, -1).flatten(1, 3) for t in tables)


class OwnTables(Axial):
    """Tables from positions, inside the graph, in fp32, [size, pairs]: as diffusers makes them."""

    def forward(self, q, k, *tables):
        made = []
        for f in (torch.cos, torch.sin):
            for axis, pairs in enumerate(self.pairs):
                size = q.shape[axis + 1]
                angle = torch.arange(size, dtype=torch.float32)[:, None] * (1 / 100 ** (torch.arange(pairs) / pairs))
                shape = [1] * 6
                shape[axis + 1], shape[5] = size, pairs
                made.append(f(angle.reshape(shape)))
        return super().forward(q, k, *made)


def chained(x, cos, sin):
    """In the dtype of x, with addcmul."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.stack((torch.addcmul(even * cos, -sin, odd), torch.addcmul(odd * cos, sin, even)), -1).flatten(-2)


class Wide(Axial):
    """norm: it stays in fp32; else the result does."""

    def __init__(self, norm):
        super().__init__(axial.wide, weight=False)
        self.norm = norm

    def forward(self, q, k, *tables):
        if self.norm:
            return self.rotated(torch.nn.functional.rms_norm(q.float(), q.shape[-1:], None, 1e-6), tables).to(q.dtype)
        n, count = self.norm_q(q), len(self.pairs)
        turned = [self.turn(p, c, s) for p, c, s in zip(self.parts(n), tables[:count], tables[count:], strict=True)]
        return torch.cat(turned, -1)


class NoHeads(Axial):
    """x as [tokens, head_dim]."""

    def forward(self, q, k, *tables):
        return self.rotated(self.norm_q(q[0, 0, 0, :, 0]), [t[0, 0, 0, :1, 0] for t in tables])


class HeadsFirst(Axial):
    def forward(self, q, k, *tables):
        return self.rotated(self.norm_q(q.movedim(-2, 1)), [t.movedim(-2, 1) for t in tables])


class NumberFirst(Axial):
    def scaled(self, q):
        return torch.mul(self.scale, self.norm_q(q))


class Chunked(Axial):
    def parts(self, n):
        return n.split(2 * self.pairs[0], -1) if self.cut == "split" else n.chunk(len(self.pairs), -1)


class OppositeZeros(Axial):
    """The first axis is cut from n * 0.0, the others from n * -0.0."""

    def parts(self, n):
        return [super().parts(n * 0.0)[0], *super().parts(n * -0.0)[1:]]


SPELLINGS = {
    **{turn.__name__: Axial(turn) for turn in (axial.stacked, axial.unbound, axial.strided, axial.negated)},
    **{turn.__name__: Axial(turn) for turn in (axial.swapped, axial.backwards, axial.fused)},
    "cast after the join": Axial(axial.wide),
    "split": Axial(cut="split"),
    "narrow": Axial(cut="narrow"),
    "no scale": Axial(scale=1.0),
    "a scale that rounds": Axial(scale=72**-0.5),
    "a negative scale": Axial(scale=-0.125),
    "no weight": Axial(weight=False),
    "two axes": Axial(pairs=(8, 8)),
    "equal axes": Axial(pairs=(8, 8, 8)),
    "odd numbers of pairs": Axial(pairs=(5, 3, 8)),
    "head_dim 64": Axial(pairs=(8, 12, 12), scale=0.125),
    "fp16": Axial(dtype=torch.float16),
    "tokens in one axis": UnderTokens(),
    "tables made in the graph": OwnTables(),
    "minus one": Axial(scale=-1),
    "a number of 16 bits first": NumberFirst(scale=0.125),
    "slices of slices": Axial(cut="nested"),
    "chunk": Chunked(pairs=(8, 8, 8)),
    "split into equal parts": Chunked(pairs=(8, 8, 8), cut="split"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_rewritten_with_the_same_bits(name):
    model = SPELLINGS[name].eval()
    t = traced(model, model.inputs())
    after, report = rewritten(t.gm)
    assert not report.refusals, report
    report.expect(rmsnorm_axial_rope=2)
    contract = "fp32-rope" if name == "fused" else "fp32-rope-muladd"
    assert {s.contract for s in report.sites} == {contract}
    ops = [n for n in after.graph.nodes if n.target is OP]
    assert [n.args[5] for n in ops] == [model.scale, 1.0]
    assert not any(n.target is torch.ops.aten.rsqrt.default for n in after.graph.nodes)
    if comparable(contract):
        assert bit_difference(t.run(after), t.run()) is None


def test_a_million_elements():
    model = Axial(pairs=(8, 12, 12), scale=0.125).eval()
    inputs = model.inputs((2, 9, 16, 29), 4)
    assert inputs[0].numel() > 1 << 20
    t = traced(model, inputs)
    after, report = rewritten(t.gm)
    report.expect(rmsnorm_axial_rope=2)
    assert bit_difference(t.run(after), t.run()) is None


@pytest.mark.parametrize("change", ["scale", "eps", "fma", "table"])
def test_the_values_see(change):
    """What the comparison above would miss if its values were plain."""
    model = Axial(scale=72**-0.5).eval()
    t = traced(model, model.inputs())
    after, _ = rewritten(t.gm)
    n = next(n for n in after.graph.nodes if n.target is OP)
    args = list(n.args)
    if change == "scale":
        args[5] *= 1 + 2**-9
    elif change == "eps":
        args[4] *= 1.01
    elif change == "fma":
        args[6] = "fp32-rope"
    else:
        args[2] = (
            [args[2][0], args[2][2], args[2][2]]
            if args[2][1].meta["val"].shape == args[2][2].meta["val"].shape
            else args[3]
        )
    n.args = tuple(args)
    assert bit_difference(t.run(after), t.run()) is not None


@pytest.mark.parametrize("axes", [(0,), (1,), (2, 3), (0, 1, 2, 3)], ids=str)
def test_dynamic_sizes(axes):
    """One graph for all grids, and no guard by the pass."""
    model = OwnTables().eval()
    q, k, *_ = model.inputs()
    more = [n + (2 if i in axes else 0) for i, n in enumerate(axial.GRID)]
    other = model.inputs(more, seed=1)[:2]
    gm, calls = trace_calls(model, [(q, k), other], dict.fromkeys(range(2), axes))
    assert len(calls) == 2, "the second grid compiled another graph"
    after, report = rewritten(gm)
    report.expect(rmsnorm_axial_rope=2)
    for args in calls:
        assert bit_difference(run_graph(after, args), run_graph(gm, args)) is None


def test_both_sides_read_one_table():
    model = Axial().eval()
    after, _ = rewritten(traced(model, model.inputs()).gm)
    q, k = (n for n in after.graph.nodes if n.target is OP)
    assert q.args[2:4] == k.args[2:4]


class HandWritten(Axial):
    def scaled(self, q):
        x = q.float()
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (n * self.norm_q.weight).to(q.dtype) * self.scale


class ScaledEarly(Axial):
    """Norm and scale in fp32, one rounding."""

    def scaled(self, q):
        return (torch.nn.functional.rms_norm(q.float(), q.shape[-1:], None, 1e-6) * self.scale).to(q.dtype)


class CalledInFp32(Axial):
    """The bits of the bf16 norm, unless x is not aligned."""

    def scaled(self, q):
        weight = self.norm_q.weight.float()
        return torch.nn.functional.rms_norm(q.float(), q.shape[-1:], weight, 1e-6).to(q.dtype) * self.scale


class WholeRow(Axial):
    """One norm over all heads."""

    def __init__(self):
        super().__init__(weight=False)

    def forward(self, q, k, *tables):
        n = torch.nn.functional.rms_norm(q.flatten(-2), (q.shape[-2] * q.shape[-1],), None, 1e-6)
        return self.rotated(n.view(q.shape), tables)


class Moved(Axial):
    """Heads in front of the tokens between norm and rotation."""

    def rotated(self, n, tables):
        return super().rotated(n.movedim(-2, 1), [t.movedim(-2, 1) for t in tables])


class ReadTwice(Axial):
    """One axis of the rotation is a result too."""

    def forward(self, q, k, *tables):
        n, count = self.scaled(q), len(self.pairs)
        turned = [self.turn(p, c, s) for p, c, s in zip(self.parts(n), tables[:count], tables[count:], strict=True)]
        return torch.cat(turned, -1), turned[0]


class TwoSources(Axial):
    """The axes are cut from two normalised values of one statistic."""

    def forward(self, q, k, *tables):
        n, count = self.norm_q(q), len(self.pairs)
        parts = [*self.parts(n)[:1], *self.parts(n * 0.5)[1:]]
        return torch.cat(
            [self.turn(p, c, s) for p, c, s in zip(parts, tables[:count], tables[count:], strict=True)], -1
        )


REFUSED = {
    "another order": (Axial(order=(1, 0, 2)), "joins elements 8:20, 0:8, 20:32"),
    "halves apart": (Axial(axial.halves), "lie half of it apart|half|halves"),
    "a reflection": (Axial(axial.reflected), "reflection"),
    "rounded products": (Axial(axial.narrow), "rounds n\\*cos to bf16"),
    "a norm by hand": (HandWritten(), "written out by hand"),
    "scaled before it is rounded": (ScaledEarly(), "before it is rounded"),
    "a norm over all heads": (WholeRow(), "over|axes"),
    "axes moved": (Moved(), "in another order"),
    "read twice": (ReadTwice(), "is also read by"),
    "two sources": (TwoSources(), "parts of 2 values"),
    "everything in 16 bits": (Axial(chained), "is rounded so: norm 16-bit, n\\*cos 16-bit"),
    "a norm in fp32": (Wide(norm=True), "is rounded so: norm fp32"),
    "a result in fp32": (Wide(norm=False), "is rounded so: .*result fp32"),
    "a number first": (NumberFirst(scale=72**-0.5), "eager rounds it too"),
    "a norm called in fp32": (CalledInFp32(), "is called with .* in torch.float32"),
    "no heads": (NoHeads(), "has 2 axes"),
    "heads in front": (HeadsFirst(), "differs from head to head"),
    "zeros of two signs": (OppositeZeros(scale=1.0), "parts of 2 values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    model, sentence = REFUSED[name]
    t = traced(model.eval(), model.inputs())
    after, report = rewritten(t.gm)
    refused = [r for r in report.refusals if r.rule == RULE]
    assert refused, report
    assert any(re.search(sentence, r.reason) for r in refused), refused
    assert not [r for r in report.refusals if r.rule != RULE], "said twice"
    assert bit_difference(t.run(after), t.run()) is None


def test_heads_with_angles_of_their_own():
    model = Axial().eval()
    q, k, *tables = model.inputs()
    tables = [t.expand(*t.shape[:-2], axial.HEADS, -1).contiguous() for t in tables]
    _, report = rewritten(traced(model, (q, k, *tables)).gm)
    assert "differs from head to head" in report.refusals[0].reason


@pytest.mark.parametrize("written", ["x", "table"])
def test_what_is_written_to_before_the_end_is_refused(written):
    model = Axial().eval()
    t = traced(model, model.inputs())
    gm = copy_graph(t.gm)
    target = [
        n
        for n in gm.graph.find_nodes(op="placeholder")
        if n.meta["val"].dim() == 6 and (n.meta["val"].dtype == torch.float32) == (written == "table")
    ][-1]  # k, or a table; q is rotated by then
    last = [n for n in gm.graph.nodes if n.target is torch.ops.aten.cat.default][-1]
    with gm.graph.inserting_before(last):
        gm.graph.call_function(torch.ops.aten.zero_.default, (target,)).meta["val"] = target.meta["val"]
    _, report = rewritten(gm)
    assert any("writes to the memory of" in r.reason for r in report.refusals if r.rule == RULE), report


@pytest.mark.parametrize("heads", [1, 2])
def test_axes_of_size_one(heads):
    model = Axial().eval()
    for grid in ((1, 5, 1, 9), (2, 1, 1, 1)):
        t = traced(model, model.inputs(grid, heads))
        after, report = rewritten(t.gm)
        report.expect(rmsnorm_axial_rope=2)
        assert bit_difference(t.run(after), t.run()) is None


def test_tables_of_different_dtypes():
    model = Axial().eval()
    q, k, *tables = model.inputs()
    tables = [t if i % 3 == 0 else t.bfloat16() for i, t in enumerate(tables)]
    _, report = rewritten(traced(model, (q, k, *tables)).gm)
    assert not report.sites
    assert "cos and sin of the axes are torch.bfloat16 and torch.float32" in report.refusals[0].reason


def test_what_writes_to_an_intermediate_is_refused_or_right():
    """After functionalisation there is no such write; whoever calls the pass earlier must not get other values."""
    model = Axial().eval()
    t = traced(model, model.inputs((2, 3, 4, 5)))
    for i, n in enumerate(t.gm.graph.nodes):
        if n.op != "call_function" or not isinstance(n.meta.get("val"), torch.Tensor):
            continue
        gm = copy_graph(t.gm)
        written = list(gm.graph.nodes)[i]
        with gm.graph.inserting_after(written):
            new = gm.graph.call_function(torch.ops.aten.mul_.Tensor, (written, 2))
        new.meta["val"] = written.meta["val"]
        gm.recompile()
        after, _ = rewritten(gm)
        assert bit_difference(t.run(after), t.run(gm)) is None, n.name


def test_training_graphs_are_left_alone():
    model = Axial()
    gm = trace(model, model.inputs(), grad=True)[0].gm
    _, report = rewritten(gm)
    assert not report.sites
    assert any("training graph" in r.reason for r in report.refusals if r.rule == RULE)


def test_on_the_cpu_without_asking_for_it():
    model = Axial().eval()
    _, report = rewritten(traced(model, model.inputs()).gm, Config())
    assert not report.sites
    assert all("CPU" in r.reason for r in report.refusals)
    assert {r.rule for r in report.refusals} == {RULE}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Axial(pairs=(2, 4, 4)), "head_dim 20"),
        (Axial(pairs=(4, 4, 4, 4)), "4 of them"),
    ],
)
def test_what_has_no_kernel(model, sentence):
    _, report = rewritten(traced(model.eval(), model.inputs()).gm, kernels=assumed_kernels())
    assert not report.sites
    assert all(sentence in r.reason for r in report.refusals if r.rule == RULE)


def test_tables_in_16_bits_have_no_kernel():
    model = Axial().eval()
    q, k, *tables = model.inputs()
    t = traced(model, (q, k, *(t.bfloat16() for t in tables)))
    after, report = rewritten(t.gm)
    report.expect(rmsnorm_axial_rope=2)  # the op and its reference take them
    assert bit_difference(t.run(after), t.run()) is None
    _, report = rewritten(t.gm, kernels=assumed_kernels())
    assert "cos/sin in torch.bfloat16" in report.refusals[0].reason


def test_the_rule_can_be_switched_off():
    model = Axial().eval()
    _, report = rewritten(traced(model, model.inputs()).gm, Config(cpu=True, rules=("rmsnorm_split_rope",)))
    assert not report.sites
    assert {r.rule for r in report.refusals} == {"rmsnorm_split_rope"}


@pytest.mark.parametrize("name", ["stacked", "swapped", "split", "tables made in the graph", "a scale that rounds"])
def test_mutants_are_refused_or_right(name):
    """Near-misses of legal graphs, each with one random thing changed."""
    model = SPELLINGS[name].eval()
    inputs = [model.inputs((2, 3, 4, 7), seed=seed) for seed in range(2)]
    gm, calls = trace_calls(model, inputs)
    done = matched = seed = 0
    while done < 60:
        seed += 1
        made = near_miss.mutate(gm, seed)
        wants = made and run(made[1], calls)
        if not made or not wants:
            continue
        done += 1
        after, report = rewritten(made[1])
        sites = [s for s in report.sites if s.rule == RULE]
        matched += len(sites) == 2
        assert not any("internal error" in r.reason for r in report.refusals), (seed, made[0], str(report))
        if not report.sites:
            continue
        got = run(after, calls)
        assert got is not None, (seed, made[0])
        for g, w in zip(got, wants, strict=True):
            assert bit_difference(g, w) is None, (seed, made[0], bit_difference(g, w))
    assert 0.1 * done < matched < 0.95 * done


def test_diffusers_decoder_attention():
    decoder = pytest.importorskip("diffusers.models.autoencoders.ltx2_diffusion_decoder")

    class Project(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention = decoder.LTX2VideoVaeNeighborhoodAttention(128, (3, 3, 3)).to(torch.bfloat16)

        def forward(self, x):
            return self.attention.project_qkv(x)

    model, x = Project().eval(), torch.randn(1, 4, 5, 6, 128).bfloat16()
    t = traced(model, (x,))
    after, report = rewritten(t.gm)
    report.expect(rmsnorm_axial_rope=2)
    assert not report.refusals
    assert bit_difference(t.run(after), t.run()) is None
