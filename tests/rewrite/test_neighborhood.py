"""The rule neighborhood_attention: every form in graphs of compiled modules, and the values after the pass."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import ltx_inductor
from ltx_inductor.config import Config
from ltx_inductor.rewrite.report import RewriteReport
from tests.harness import copy_graph, run_graph
from tests.natten_stand_in import window_attention
from tests.rewrite.neighborhood_cases import (
    BF16,
    NA3D,
    NATTEN,
    RULE,
    Call,
    LtxCore,
    close,
    only_refusal,
    ops,
    qkv,
    rewritten,
    traced,
)


def test_the_hopper_form(hopper):
    gm, report = rewritten(hopper)
    report.expect(neighborhood_attention=1)
    assert ops(gm) == ["ltx_inductor.na3d.default"]  # permutes, getitem and unpermute are gone
    (site,) = report.sites
    assert (site.form, site.contract, site.side) == ("natten::hopper_na3d_forward", "fast", None)
    assert site.source.startswith("neighborhood_cases.py:")
    assert site.shapes == {**dict.fromkeys(("q", "k", "v", "out"), "[1,5,6,9,2,64]"), "window": "[3,3,5]"}
    assert "1 call rewritten, 0 refused" in str(report)
    inputs = qkv()
    got, before = run_graph(gm, hopper.args)[0], hopper.run()[0]
    assert got.stride() == before.stride()
    assert close(got, before, inputs)
    oracle, _ = window_attention(*(t.double() for t in inputs), (3, 3, 5), 0.5)
    assert float((got - oracle).abs().max()) <= 2**-8 * float(oracle.abs().max())


def test_the_default_scale_is_in_the_graph():
    gm, _ = rewritten(traced(Call(scale=None), qkv()))
    (node,) = (n for n in gm.graph.nodes if n.target is NA3D)
    assert node.args[3:] == ([3, 3, 5], 64**-0.5, False)


@pytest.mark.parametrize(
    ("shape", "window"),
    [((3, 4, 7, 10, 1, 64), (2, 7, 3)), ((2, 3, 3, 17, 3, 64), (3, 3, 2)), ((1, 15, 8, 8, 1, 64), (15, 4, 8))],
)
def test_any_batch_grid_window_and_heads(shape, window):
    inputs = qkv(shape)
    t = traced(Call(window), inputs)
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    assert close(run_graph(gm, t.args)[0], t.run()[0], inputs)


def test_a_dynamic_batch_and_grid_get_no_guard():
    inputs = qkv((2, 5, 6, 9, 2, 64))
    t = traced(Call(), inputs, dynamic=dict.fromkeys(range(3), (0, 1, 2, 3)))
    env = next(n.meta["val"].node.shape_env for n in t.gm.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt))
    guards = len(env.guards)
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    assert len(env.guards) == guards
    assert report.sites[0].shapes["q"].startswith("[s")
    assert close(run_graph(gm, t.args)[0], t.run()[0], inputs)


def test_another_namespace_with_the_same_ops(hopper):
    """The Hub's build has a hash in its namespace."""
    library = torch.library.Library("natten_1f3a9c_stand_in", "DEF")
    names = ("token_permute_3d", "hopper_na3d_forward", "token_unpermute_3d")
    for name in names:
        schema = str(getattr(torch.ops.natten, name).default._schema).removeprefix("natten::")
        library.define(schema)
    there = torch.ops.natten_1f3a9c_stand_in
    t = type(hopper)(copy_graph(hopper.gm), hopper.args)
    for n in t.gm.graph.nodes:
        for name in names:
            if n.target is getattr(torch.ops.natten, name).default:
                n.target = getattr(there, name).default
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    assert report.sites[0].form == "natten_1f3a9c_stand_in::hopper_na3d_forward"
    assert ops(gm) == ["ltx_inductor.na3d.default"]

    mixed = type(hopper)(copy_graph(hopper.gm), hopper.args)
    for n in mixed.gm.graph.nodes:
        if n.name == "token_permute_3d_1":
            n.target = there.token_permute_3d.default
    assert "the key of natten::hopper_na3d_forward is computed by natten_1f3a9c" in only_refusal(mixed).reason

    library.define("na3d_forward(Tensor query, Tensor key, Tensor value, int[] window) -> (Tensor, Tensor)")
    other = type(hopper)(copy_graph(hopper.gm), hopper.args)
    for n in other.gm.graph.nodes:
        if n.name == "hopper_na3d_forward":
            n.target, n.args = there.na3d_forward.default, n.args[:4]
    why = only_refusal(other)
    assert "takes other arguments than NATTEN's op of this name" in why.reason
    assert why.found == "query, key, value, window"


def test_the_cutlass_form():
    inputs = qkv()
    t = traced(Call(backend="cutlass-fna"), inputs)
    assert "natten.na3d_forward.default" in ops(t.gm)
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    assert ops(gm) == ["ltx_inductor.na3d.default"]
    assert report.sites[0].form == "natten::na3d_forward"
    assert close(run_graph(gm, t.args)[0], t.run()[0], inputs)


def test_a_copy_for_natten_is_not_made():
    """natten wants contiguous tensors; the op does not."""

    class Packed(Call):
        def forward(self, qkv):
            return super().forward(*(t.contiguous() for t in qkv.unbind(-2)))

    packed = torch.stack(qkv(), -2)
    t = traced(Packed(), [packed])
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    assert "aten.clone.default" in ops(t.gm)
    assert "aten.clone.default" not in ops(gm)
    assert close(run_graph(gm, t.args)[0], t.run()[0], packed.unbind(-2))


def test_the_window_of_the_whole_grid_is_plain_attention():
    why = only_refusal(traced(Call((3, 4, 5)), qkv((1, 3, 4, 5, 2, 64))))
    assert "the window is the whole grid" in why.reason
    assert "natten::hopper_fmha_forward" in why.reason


def test_plain_attention_of_anything_else_is_nobodys_business():
    class Plain(nn.Module):
        def forward(self, q, k, v):
            return NATTEN.attention(q, k, v)

    _, report = rewritten(traced(Plain(), [t.flatten(1, 3) for t in qkv()]))
    assert not report.sites
    assert not report.refusals


@pytest.mark.parametrize("name", ["na_attention_triton", "na_attention_eager"])
def test_the_ltx_core_forms(name):
    inputs = [0.1 * t for t in qkv()]
    t = traced(LtxCore(name), inputs)
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    (node,) = (n for n in gm.graph.nodes if n.target is NA3D)
    assert node.args[3:] == ([3, 3, 5], 1.0, False)
    assert report.sites[0].form == f"ltx_core::{name}"
    assert close(run_graph(gm, t.args)[0], t.run()[0], inputs)


def test_a_result_keeps_its_strides():
    """ltx-core's ops give their result the strides of q."""

    class Raw(nn.Module):
        def forward(self, q, k, v):
            return torch.ops.ltx_core.na_attention_eager(q, k, v, [3, 3, 5])

    inputs = [0.1 * t.permute(0, 4, 1, 2, 3, 5).contiguous().permute(0, 2, 3, 4, 1, 5) for t in qkv()]
    t = traced(Raw(), inputs)
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    got, want = run_graph(gm, t.args)[0], t.run()[0]
    assert got.stride() == want.stride() == inputs[0].stride()
    assert close(got, want, inputs)


def test_ltx_cores_other_attentions_are_named():
    class Bound(nn.Module):
        def forward(self, q, k, v):
            return torch.ops.ltx_core.na_attention_dsl(q, k, v, [3, 3, 5], q.sum())

    assert "ltx_core::na_attention_dsl is another attention" in only_refusal(traced(Bound(), qkv())).reason


def test_calls_that_feed_each_other():
    class Twice(Call):
        def forward(self, q, k, v):
            out = super().forward(q, k, v)
            return super().forward(q, k, out)

    inputs = qkv()
    t = traced(Twice(), inputs)
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=2)
    assert ops(gm) == ["ltx_inductor.na3d.default"] * 2
    assert close(run_graph(gm, t.args)[0], t.run()[0], inputs)


def test_kernels_of_calls_of_the_op_itself_are_asked_for():
    class Direct(nn.Module):
        def forward(self, q, k, v):
            return torch.ops.ltx_inductor.na3d(q, k, v, [3, 3, 5], 0.5)

    class Kernels:
        def __init__(self, refusal):
            self.refused, self.needs = refusal, []

        def refusal(self, need):
            self.needs.append(need)
            return self.refused

        def slower(self, need, size):
            return None

        def proof(self, need):
            return "proved elsewhere"

    t = traced(Direct(), qkv())
    for refusal in (None, "no kernel today"):
        kernels = Kernels(refusal)
        gm, report = rewritten(t, kernels=kernels)
        assert not report.sites
        assert not report.refusals
        assert ops(gm) == ops(t.gm)
        assert [(n.kernel_size, n.head_dim, n.exact) for n in kernels.needs] == [((3, 3, 5), 64, False)]
    assert report.notes[0].endswith("ltx_inductor::na3d runs its reference: no kernel today")


# Real models


def natten_processor():
    from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeNeighborhoodNattenProcessor

    processor = object.__new__(LTX2VideoVaeNeighborhoodNattenProcessor)  # its __init__ asks the Hub for a GPU's natten
    processor._na3d, processor.backend = NATTEN.na3d, None
    return processor


@pytest.fixture(scope="module")
def decoder():
    return pytest.importorskip("diffusers.models.autoencoders.ltx2_diffusion_decoder")


@pytest.mark.slow
def test_diffusers_attention(decoder):
    torch.manual_seed(0)
    attention = decoder.LTX2VideoVaeNeighborhoodAttention(128, (3, 5, 5)).to(BF16)
    attention.set_processor(natten_processor())
    x = torch.randn(2, 4, 6, 7, 128).to(BF16)
    t = traced(attention, [x], dynamic={0: (1, 2, 3)})
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    assert report.sites[0].source.startswith("ltx2_diffusion_decoder.py:")
    assert not any("natten" in op for op in ops(gm))
    got, want = run_graph(gm, t.args)[0], t.run()[0]
    assert float((got - want).abs().max()) <= 2**-6 * float(want.abs().max())


@pytest.mark.slow
def test_diffusers_blocks(decoder):
    """Two blocks of stage 5, each with its own attention: two calls, in program order."""
    torch.manual_seed(0)

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            make = decoder.LTX2VideoVaeDiffusionNABlock
            self.blocks = nn.ModuleList(make(64, (3, 3, 3), context_channels=16) for _ in range(2))
            for block in self.blocks:
                block.attn.set_processor(natten_processor())

        def forward(self, x, *others):
            for block in self.blocks:
                x = block(x, *others)
            return x

    model = Blocks().to(BF16)
    x = torch.randn(1, 4, 5, 6, 64).to(BF16)
    t = traced(model, [x, torch.randn(1, 4, 5, 6, 16).to(BF16), [torch.randn(1, 1, 1, 1, 64).to(BF16)] * 7])
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=2)
    assert sum(op == "ltx_inductor.na3d.default" for op in ops(gm)) == 2
    got, want = run_graph(gm, t.args)[0], t.run()[0]
    assert float((got - want).abs().max()) <= 2**-6 * float(want.abs().max())


def test_nattens_own_module():
    torch.manual_seed(0)
    module = NATTEN.NeighborhoodAttention3D(128, 2, kernel_size=3).to(BF16)
    t = traced(module, [torch.randn(1, 4, 5, 6, 128).to(BF16)])
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    assert float((run_graph(gm, t.args)[0] - t.run()[0]).abs().max()) < 0.02


def test_the_backend_compiles_and_runs_it():
    """From torch.compile to a result, through Inductor; the report finds the call."""
    inputs = qkv()
    torch._dynamo.reset()
    compiled = torch.compile(Call(), backend="ltx", options={"ltx_inductor.cpu": True}, fullgraph=True)
    with torch.no_grad():
        got = compiled(*inputs)
    report = ltx_inductor.last_report()
    report.expect(neighborhood_attention=1)
    assert RewriteReport.from_dict(json.loads(report.to_json())).sites == report.sites
    assert report.graphs[0].drawings[report.sites[0].drawing].after
    assert torch.equal(got, NA3D(*inputs, [3, 3, 5], 0.5))
    assert ltx_inductor.explain(Call(), *inputs).count(RULE) == 1


@pytest.mark.parametrize(("verify", "last"), [("always", [False, True]), ("first", [0.5, False])])
def test_verify_always_is_an_argument_of_the_op(verify, last):
    gm, _ = rewritten(traced(Call(), qkv()), Config(cpu=True, verify=verify))
    (op,) = gm.graph.find_nodes(op="call_function", target=NA3D)
    assert list(op.args[-2:]) == last
