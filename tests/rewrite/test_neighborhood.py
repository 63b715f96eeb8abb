"""The rule neighborhood_attention: every form in graphs of compiled modules, its values, and everything it refuses.

natten is the real front end with a library that runs on the CPU (see tests/natten_stand_in.py).
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import ltx_inductor
from ltx_inductor import kernel_needs
from ltx_inductor.config import Config
from ltx_inductor.kernels import fna
from ltx_inductor.kernels.choice import AssumedKernels, DeviceKernels
from ltx_inductor.rewrite import neighborhood_rule
from ltx_inductor.rewrite.needs import NeighborhoodNeed
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import GraphReport, LostFusionError, RewriteReport
from tests.harness import copy_graph, run_graph, trace
from tests.natten_stand_in import natten_with_ops, window_attention

pytest.importorskip("natten")
NATTEN = natten_with_ops()
RULE = "neighborhood_attention"
BF16 = torch.bfloat16
CPU = Config(cpu=True)
NA3D = torch.ops.ltx_inductor.na3d.default


def qkv(shape=(1, 5, 6, 9, 2, 64), dtype=BF16):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=gen).to(dtype) for _ in range(3)]


class Call(nn.Module):
    """natten.na3d of three inputs, as a model would call it."""

    def __init__(self, kernel_size=(3, 3, 5), **arguments):
        super().__init__()
        self.arguments = {"kernel_size": kernel_size, "scale": 0.5, **arguments}

    def forward(self, q, k, v):
        return NATTEN.na3d(q, k, v, **self.arguments)


def traced(module, inputs, dynamic=None):
    with torch.no_grad():
        return trace(module, inputs, dynamic)[0]


def rewritten(t, config=CPU, kernels=None):
    """(the graph after the pass, the report)."""
    gm = copy_graph(t.gm)
    report = rewrite_graph(gm.graph, config, kernels)
    gm.recompile()
    return gm, RewriteReport([report])


def ops(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def only_refusal(t, config=CPU, kernels=None, rule=RULE):
    """The only refusal; the graph is as it was, and nothing was rewritten."""
    gm, report = rewritten(t, config, kernels)
    assert not report.sites
    assert [str(n.format_node()) for n in gm.graph.nodes] == [str(n.format_node()) for n in t.gm.graph.nodes]
    (refusal,) = (r for r in report.refusals if r.rule == rule)
    return refusal


def close(got, want, inputs, scale=0.5):
    """Two roundings to bf16 of values that are averages of v, and of probabilities to bf16 on one side."""
    return float((got.double() - want.double()).abs().max()) <= 2**-7 * float(inputs[2].double().abs().max())


# The forms


@pytest.fixture(scope="module")
def hopper():
    return traced(Call(), qkv())


def test_the_hopper_form(hopper):
    gm, report = rewritten(hopper)
    report.expect(neighborhood_attention=1)
    assert ops(gm) == ["ltx_inductor.na3d.default"]  # permutes, getitem and unpermute are gone
    (site,) = report.sites
    assert (site.form, site.contract, site.side) == ("natten::hopper_na3d_forward", "fast", None)
    assert site.source.startswith("test_neighborhood.py:")
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


LTX_CORE = torch.library.Library("ltx_core", "FRAGMENT")
for _name in ("na_attention_triton", "na_attention_eager"):
    LTX_CORE.define(f"{_name}(Tensor q, Tensor k, Tensor v, SymInt[] kernel_size) -> Tensor")
    LTX_CORE.impl(
        _name,
        lambda q, k, v, window: torch.empty_like(q).copy_(window_attention(q, k, v, window, 1.0)[0]),
        "CompositeExplicitAutograd",
    )
    torch.library.register_fake(f"ltx_core::{_name}", lambda q, k, v, window: torch.empty_like(q), lib=LTX_CORE)
LTX_CORE.define("na_attention_dsl(Tensor q, Tensor k, Tensor v, SymInt[] kernel_size, Tensor bound) -> Tensor")
LTX_CORE.impl("na_attention_dsl", lambda q, k, v, window, bound: q.flatten(-2) + 1, "CompositeExplicitAutograd")


class LtxCore(nn.Module):
    """As ltx-core calls its fallbacks: the window as a list, no scale, since q has it."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, q, k, v):
        return getattr(torch.ops.ltx_core, self.name)(q, k, v, [3, 3, 5]).flatten(-2)


@pytest.mark.parametrize("name", ["na_attention_triton", "na_attention_eager"])
def test_the_ltx_core_forms(name):
    inputs = [0.1 * t for t in qkv()]
    t = traced(LtxCore(name), inputs)
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    (node,) = (n for n in gm.graph.nodes if n.target is NA3D)
    assert node.args[3:] == ([3, 3, 5], 1.0, False)
    assert report.sites[0].form == f"ltx_core::{name}"
    assert close(run_graph(gm, t.args)[0], t.run()[0], inputs, 1.0)


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


# Real models


def natten_processor():
    from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeNeighborhoodNattenProcessor

    processor = object.__new__(LTX2VideoVaeNeighborhoodNattenProcessor)  # its __init__ asks the Hub for a GPU's natten
    processor._na3d, processor.backend = NATTEN.na3d, None
    return processor


@pytest.fixture(scope="module")
def decoder():
    return pytest.importorskip("diffusers.models.autoencoders.ltx2_diffusion_decoder")


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


# What is refused


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"stride": (1, 2, 1)}, "natten::hopper_na3d_forward is called with stride=[1, 2, 1]"),
        ({"dilation": (1, 1, 2), "kernel_size": (3, 3, 3)}, "is called with dilation=[1, 1, 2]"),
        ({"is_causal": (True, False, False)}, "is called with is_causal=[True, False, False]"),
        ({"backend": "cutlass-fna", "stride": 2}, "natten::na3d_forward is called with stride=[2, 2, 2]"),
    ],
)
def test_what_the_op_does_not_have(arguments, reason):
    assert reason in only_refusal(traced(Call(**arguments), qkv())).reason


def test_a_logsumexp_that_is_read():
    class WithSums(Call):
        def forward(self, q, k, v):
            out, sums = super().forward(q, k, v)
            return out, sums * 2

    why = only_refusal(traced(WithSums(return_lse=True), qkv()))
    assert "the logsumexp of natten::hopper_na3d_forward, is read by" in why.reason
    assert "return_lse" in why.hint


def test_further_keys():
    class Further(Call):
        def forward(self, q, k, v):
            keys, values = k.flatten(1, 3)[:, :4], v.flatten(1, 3)[:, :4]
            self.arguments |= {"additional_keys": keys, "additional_values": values}
            return super().forward(q, k, v)

    _, report = rewritten(traced(Further(), qkv()))
    assert not report.sites
    assert "the logsumexp of" in report.refusals[0].reason
    assert "additional_keys" in report.refusals[0].hint


@pytest.mark.parametrize(
    ("inputs", "window", "reason"),
    [
        (qkv(dtype=torch.float16), (3, 3, 5), "no neighborhood-attention kernel for torch.float16"),
        (qkv((1, 5, 6, 9, 2, 32)), (3, 3, 5), "no neighborhood-attention kernel for head_dim 32"),
        (qkv((1, 18, 2, 3, 1, 64)), (17, 2, 2), "no neighborhood-attention kernel for window (17, 2, 2)"),
    ],
)
def test_what_there_is_no_kernel_for(inputs, window, reason):
    backend = "cutlass-fna" if 17 in window else None
    t = traced(Call(window, backend=backend), inputs)
    assert reason in only_refusal(t, kernels=AssumedKernels()).reason
    rewritten(t)[1].expect(neighborhood_attention=1)  # whom nobody asks takes it: the reference runs


def test_exact(hopper):
    exact = Config(cpu=True, exact=True)
    on_cpu = only_refusal(hopper, exact, DeviceKernels(lambda *_: None)).reason
    assert "has not NATTEN's bits, and exact=True asks for them" in on_cpu
    other = traced(Call(), qkv((1, 5, 6, 9, 2, 32)))
    assert "no neighborhood-attention kernel with NATTEN's bits for head_dim 32" in (
        only_refusal(other, exact, AssumedKernels()).reason
    )
    gm, report = rewritten(hopper, exact, AssumedKernels())
    assert report.sites[0].contract == "exact"
    assert next(n for n in gm.graph.nodes if n.target is NA3D).args[5] is True


@pytest.mark.parametrize("other", ["cutlass", "ltx_core", "tiles", "scale"])
def test_exact_takes_no_call_with_other_bits(other, hopper):
    if other == "cutlass":
        t = traced(Call(backend="cutlass-fna"), qkv())
    elif other == "ltx_core":
        t = traced(LtxCore("na_attention_eager"), qkv())
    elif other == "scale":
        t = edited(hopper, set_argument("hopper_na3d_forward", 7, 0.0))
    else:
        t = traced(Call(q_tile_shape=(4, 4, 4), kv_tile_shape=(2, 8, 8)), qkv())
    rewritten(t, CPU)[1].expect(neighborhood_attention=1)
    why = only_refusal(t, Config(cpu=True, exact=True), AssumedKernels())
    assert "does not have the bits of NATTEN's Hopper kernel" in why.reason
    assert "without exact=True it is replaced" in why.hint


def test_cpu_graphs_are_left_alone_by_default(hopper):
    assert "the graph is on the CPU" in only_refusal(hopper, Config()).reason
    with pytest.raises(LostFusionError, match="the graph is on the CPU"):
        rewrite_graph(copy_graph(hopper.gm).graph, Config(strict=True))


def test_a_training_graph():
    class Trained(LtxCore):
        def forward(self, q, k, v):
            with torch.no_grad():
                out = super().forward(q, k, v)
            return out * q.flatten(-2)

    q, k, v = qkv()
    t = trace(Trained("na_attention_eager"), [q.requires_grad_(), k, v], grad=True)[0]
    assert "this is a training graph" in only_refusal(t).reason


def edited(t, edit):
    """A copy of a traced graph, changed by `edit(graph, nodes by name)`."""
    gm = copy_graph(t.gm)
    edit(gm.graph, {n.name: n for n in gm.graph.nodes})
    gm.graph.lint()
    return type(t)(gm, t.args)


def set_argument(name, index, value):
    def edit(graph, nodes):
        args = list(nodes[name].args)
        args[index] = value
        nodes[name].args = tuple(args)

    return edit


def also_read(name):
    def edit(graph, nodes):
        output = next(iter(reversed(graph.nodes)))
        output.args = ((*output.args[0], nodes[name]),)

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (set_argument("token_permute_3d", 1, [4, 4, 8]), "token_permute_3d does not put tokens in the order"),
        (set_argument("token_permute_3d_2", 2, [1, 1, 2]), "token_permute_3d_2 does not put tokens in the order"),
        (set_argument("token_permute_3d_1", 3, False), "token_permute_3d_1 does not put tokens in the order"),
        (set_argument("token_unpermute_3d", 2, [4, 4, 8]), "token_unpermute_3d does not put tokens in the order"),
        (set_argument("token_unpermute_3d", 1, [5, 6, 8]), "token_layout_shape of token_unpermute_3d is [5, 6, 8]"),
        (set_argument("hopper_na3d_forward", 8, [8, 8, 16]), "q_shape of hopper_na3d_forward is [8, 8, 16]"),
        (set_argument("hopper_na3d_forward", 10, [6, 5, 9]), "qkv_shape of hopper_na3d_forward is [6, 5, 9]"),
        (set_argument("hopper_na3d_forward", 3, [3, 3]), "the window of natten::hopper_na3d_forward is [3, 3]"),
        (set_argument("hopper_na3d_forward", 3, [3, 7, 5]), "the window has 7 keys along H, the grid 6"),
        (also_read("getitem"), "in its permuted order, is read by output"),
    ],
)
def test_permutes_that_do_not_match(hopper, edit, reason):
    assert reason in only_refusal(edited(hopper, edit)).reason


def test_a_permuted_operand_with_another_reader_stays(hopper):
    t = edited(hopper, also_read("token_permute_3d_1"))
    gm, report = rewritten(t)
    report.expect(neighborhood_attention=1)
    assert sorted(ops(gm)) == ["ltx_inductor.na3d.default", "natten.token_permute_3d.default"]
    assert torch.equal(run_graph(gm, t.args)[1], t.run()[1])


def test_an_input_that_is_written_to(hopper):
    def edit(graph, nodes):
        with graph.inserting_after(nodes["token_permute_3d_1"]):
            graph.call_function(torch.ops.aten.zero_.default, (nodes["arg1_1"],))

    assert (
        "writes to the memory of arg1_1 before the attention is finished" in only_refusal(edited(hopper, edit)).reason
    )


def test_two_streams(hopper):
    def edit(graph, nodes):
        for i, name in enumerate(("token_permute_3d", "hopper_na3d_forward")):
            nodes[name].meta["custom"] = {"stream": i}

    assert "CUDA streams" in only_refusal(edited(hopper, edit)).reason


def test_a_part_of_a_tensor_subclass(hopper):
    def edit(graph, nodes):
        part = type("SubclassGetAttrAOTInput", (), {"attr": "qdata"})  # as AOTAutograd calls it
        nodes["arg0_1"].meta["desc"] = part()

    assert "arg0_1 is part of a tensor subclass" in only_refusal(edited(hopper, edit)).reason


def other_value(name, **changes):
    def edit(graph, nodes):
        value = nodes[name].meta["val"]
        with value.fake_mode:
            nodes[name].meta["val"] = torch.empty(
                changes.get("shape", value.shape), dtype=changes.get("dtype", value.dtype), device=value.device
            )

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (other_value("arg1_1", dtype=torch.float16), "arg1_1 is torch.float16, arg0_1 torch.bfloat16"),
        (other_value("arg2_1", shape=(1, 5, 6, 9, 1, 64)), "arg2_1 has shape [1, 5, 6, 9, 1, 64]"),
        (other_value("token_unpermute_3d", dtype=torch.float32), "the fused value would be torch.bfloat16"),
    ],
)
def test_operands_that_do_not_fit(hopper, edit, reason):
    assert reason in only_refusal(edited(hopper, edit)).reason


def test_a_size_that_only_the_running_model_knows():
    class Unbacked(Call):
        def forward(self, q, k, v, n):
            length = n.item()
            torch._check(length >= 3)
            torch._check(length <= 5)
            return torch.ops.ltx_core.na_attention_eager(q[:, :length], k[:, :length], v[:, :length], [3, 3, 5])

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        t = traced(Unbacked(), [*qkv(), torch.tensor(4)])
    assert "has a size that is only known while the model runs" in only_refusal(t).reason


def test_a_defect_of_ours_leaves_the_graph_as_it_was(hopper, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(neighborhood_rule, "same_form", broken)
    assert "ZeroDivisionError: planted" in only_refusal(hopper).reason
    monkeypatch.setattr(neighborhood_rule, "find_calls", broken)
    assert "ZeroDivisionError: planted" in only_refusal(hopper).reason


def test_the_rule_can_be_turned_off(hopper):
    _, report = rewritten(hopper, Config(cpu=True, rules=("rmsnorm_split_rope",)))
    assert not report.sites
    assert not report.refusals
    with pytest.raises(LostFusionError, match="expected 1 calls of neighborhood_attention, found 0"):
        report.expect(neighborhood_attention=1)


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


# Kernels


def test_needs_through_json():
    need = NeighborhoodNeed(torch.device("cuda:1"), BF16, 64, (11, 11, 11), False)

    class Asked:
        def __init__(self):
            self.needs = []

        def refusal(self, need):
            self.needs.append(need)

    remembering = kernel_needs.Remembering(Asked())
    for _ in range(2):
        remembering.refusal(need)
    (kept,) = json.loads(json.dumps(remembering.needs))
    assert kept == {
        "kind": RULE,
        "device": "cuda",
        "dtype": "bfloat16",
        "head_dim": 64,
        "kernel_size": [11, 11, 11],
        "exact": False,
    }
    assert kernel_needs._from_json(kept, torch.device("cuda:1")) == need


def test_kernels_on_a_device(monkeypatch):
    """The questions that reach the kernels, on a machine that has none of the devices."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fna, "prepare", lambda arch, **facts: asked.append((arch, facts)) or "no compiler today")
    kernels = DeviceKernels(lambda *_: None)
    need = NeighborhoodNeed(torch.device("cuda:1"), BF16, 64, (11, 11, 11), False)
    with pytest.warns(UserWarning, match="a graph is left unfused: no compiler today"):
        assert kernels.refusal(need) == "no compiler today"
    facts = {"dtype": BF16, "head_dim": 64, "kernel_size": (11, 11, 11), "exact": False, "device": 1}
    assert asked == [((9, 0), facts)]
    assert "not its bits" in kernels.proof(need)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "compute capability 8.0" in kernels.refusal(need)
    assert len(asked) == 1


def test_a_graph_report_of_both_rules():
    report = GraphReport()
    assert GraphReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
