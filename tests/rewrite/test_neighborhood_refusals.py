"""What the rule neighborhood_attention refuses, by name, leaving the graph as it was."""

from __future__ import annotations

import pytest
import torch

from ltx_inductor.config import Config
from ltx_inductor.kernels.choice import AssumedKernels, DeviceKernels
from ltx_inductor.rewrite import neighborhood_rule
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import LostFusionError
from tests.harness import copy_graph, run_graph, trace
from tests.rewrite.neighborhood_cases import (
    CPU,
    NA3D,
    Call,
    LtxCore,
    also_read,
    edited,
    only_refusal,
    ops,
    qkv,
    rewritten,
    set_argument,
    traced,
)


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
