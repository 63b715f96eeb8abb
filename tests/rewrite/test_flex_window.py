"""FlexAttention with a neighborhood window: recognised from what its mask computes, proved, replaced; or refused."""

from __future__ import annotations

import re
import resource
from functools import partial

import pytest
import torch
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import _identity, create_block_mask

import ltx_inductor
from ltx_inductor.config import Config
from ltx_inductor.explainer import _eager
from ltx_inductor.ops.na3d import reference
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import RewriteReport
from tests.harness import TORCH, Traced, copy_graph, run_graph, shape_facts, trace
from tests.harness import rewritten as compiled_with
from tests.rewrite.test_mask_window import NEAR_MISSES, SPELLINGS, diffusers, product

GRID, KERNEL, HEADS, DIM = (5, 6, 7), (3, 4, 5), 2, 32
S = product(GRID)
RULE = "neighborhood_attention"
CPU = Config(cpu=True)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
since_2_13 = pytest.mark.skipif(TORCH < (2, 13), reason="torch always keeps full blocks apart")


class Flex(nn.Module):
    """Attention of [B, S, heads, head_dim] to a mask that is made here, or comes in."""

    def __init__(
        self, mask_mod, other_mod=None, score_mod=None, heads_first=False, block=128, separate=True, scale=0.5
    ):
        super().__init__()
        self.mask_mod, self.other_mod, self.score_mod = mask_mod, other_mod or mask_mod, score_mod or _identity
        self.heads_first, self.block, self.separate, self.scale = heads_first, block, separate, scale
        self.output = 0

    def block_mask(self, length):
        options = {"BLOCK_SIZE": self.block, "device": "cpu"}
        if not self.separate:
            options["separate_full_blocks"] = False
        mask = create_block_mask(self.mask_mod, None, None, length, length, **options)
        mask.mask_mod = self.other_mod
        return mask

    def forward(self, q, k, v, block_mask=None):
        if block_mask is None:
            block_mask = self.block_mask(q.shape[2] if self.heads_first else q.shape[1])
        if not self.heads_first:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        # what torch.nn.attention.flex_attention calls, less its checks, and traced in seconds less
        out = flex_attention_op(q, k, v, self.score_mod, block_mask.as_tuple(), self.scale, OPTIONS)[self.output]
        return out if self.heads_first else out.transpose(1, 2)


OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def graph_of(module, inputs, sizes="fake"):
    """The functional, decomposed graph of a call: as the pass gets it, but for Dynamo, which takes long over masks.

    sizes: "symbolic" for dynamic ones.
    """
    with torch.no_grad():
        gm = make_fx(torch.func.functionalize(module), select_decomp_table(), tracing_mode=sizes)(*inputs)
    gm.graph.eliminate_dead_code()
    return Traced(gm, list(inputs))


def qkv(length=S, heads=HEADS, batch=2, heads_first=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, length, DIM) if heads_first else (batch, length, heads, DIM)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def rewritten(module, inputs, config=CPU):
    """(the traced graph, the graph after the pass, the report)."""
    return after_the_pass(graph_of(module, inputs), config)


def after_the_pass(traced, config=CPU):
    gm = copy_graph(traced.gm)
    report = rewrite_graph(gm.graph, config)
    gm.recompile()
    return traced, gm, RewriteReport([report])


def want(q, k, v, kernel_size=KERNEL, scale=0.5, grid=GRID):
    """[B, S, heads, head_dim] by the op's reference, which has tests of its own."""
    q, k, v = (t.unflatten(1, grid) for t in (q, k, v))
    return reference(q, k, v, kernel_size, scale).flatten(1, 3)


def check(module, inputs, expected, config=CPU):
    traced, gm, report = rewritten(module, inputs, config)
    report.expect(neighborhood_attention=1)
    assert not [r for r in report.refusals if r.rule == RULE]
    (out,) = run_graph(gm, traced.args)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert out.stride() == module(*inputs).stride()
    return gm, report


def largest(gm):
    return max(n.meta["val"].numel() for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))


def refusal(module, inputs, config=CPU):
    """The only refusal; the graph is as it was."""
    traced, gm, report = rewritten(module, inputs, config)
    assert not report.sites
    assert [n.format_node() for n in gm.graph.nodes] == [n.format_node() for n in traced.gm.graph.nodes]
    (found,) = (r for r in report.refusals if r.rule == RULE)
    return found


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling_is_replaced_and_its_mask_dies(spelling):
    inputs = qkv()
    gm, report = check(Flex(spelling(GRID, KERNEL)), inputs, want(*inputs))
    assert report.sites[0].form == "flex_attention"
    assert report.sites[0].shapes["grid"] == "[5,6,7]"
    assert report.sites[0].shapes["window"] == "[3,4,5]"
    assert "flex_attention" not in str(gm.graph)
    assert "sort" not in str(gm.graph)
    assert largest(gm) == inputs[0].numel()


def test_the_traced_graph_computes_what_it_is_replaced_by():
    """The recognised window is the one that flex attention itself computes, eagerly."""
    inputs, module = qkv(batch=1), Flex(diffusers(GRID, KERNEL), scale=0.7)
    check(module, inputs, module(*inputs))


@pytest.mark.parametrize("block", [64, (32, 64)], ids=str)
@pytest.mark.parametrize("separate", [True, pytest.param(False, marks=since_2_13)])
def test_other_block_masks(block, separate):
    inputs = qkv(batch=1)
    check(Flex(diffusers(GRID, KERNEL), block=block, separate=separate), inputs, want(*inputs))


def test_a_sequence_of_whole_blocks():
    inputs = qkv(length=256, batch=1)
    check(Flex(diffusers((4, 8, 8), KERNEL)), inputs, want(*inputs, grid=(4, 8, 8)))


def test_heads_first_in_memory():
    inputs = qkv(heads_first=True)
    expected = want(*(t.transpose(1, 2) for t in inputs)).transpose(1, 2)
    check(Flex(diffusers(GRID, KERNEL), heads_first=True), inputs, expected)


def test_scale():
    inputs = qkv()
    module = Flex(diffusers(GRID, KERNEL), scale=0.3)
    check(module, inputs, want(*inputs, scale=0.3))


def test_two_calls_share_a_mask():
    class Twice(Flex):
        def forward(self, q, k, v):
            mask = self.block_mask(S)
            return super().forward(super().forward(q, k, v, mask), k, v, mask)

    inputs = qkv()
    module = Twice(diffusers(GRID, KERNEL))
    traced, gm, report = rewritten(module, inputs)
    report.expect(neighborhood_attention=2)
    (out,) = run_graph(gm, traced.args)
    torch.testing.assert_close(out, want(want(*inputs), *inputs[1:]), **TOLERANCE)
    assert largest(gm) == inputs[0].numel()


class Given(Flex):
    """The tensors of the BlockMask come in; its mask_mod is code, as it always is."""

    def forward(self, q, k, v, *tensors):
        mask = self.block_mask(S)
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices = tensors
        return super().forward(q, k, v, mask)


def test_a_mask_that_comes_in_is_refused_unless_it_is_trusted():
    module = Given(diffusers(GRID, KERNEL))
    mask = module.block_mask(S)
    inputs = [*qkv(), mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    found = refusal(module, inputs)
    assert "the BlockMask comes into the graph as an input" in found.reason
    assert "ltx_inductor.trust_block_mask=True" in found.hint
    assert found.certain
    check(module, inputs, want(*inputs[:3]), Config(cpu=True, trust_block_mask=True))


def test_a_mask_of_another_mask_mod_is_refused():
    module = Flex(diffusers(GRID, (3, 4, 3)), other_mod=diffusers(GRID, KERNEL))
    assert "made from another mask than its mask_mod" in refusal(module, qkv()).reason


def test_a_mask_made_by_hand_is_refused():
    class Mine(Flex):
        def block_mask(self, length):
            mask = super().block_mask(length)
            mask.kv_num_blocks = mask.kv_num_blocks - 1
            return mask

    found = refusal(Mine(diffusers(GRID, KERNEL)), qkv())
    assert found.reason == "the BlockMask is not seen to be made from its mask_mod"
    assert "sub" in found.found


def test_exact_is_refused():
    found = refusal(Flex(diffusers(GRID, KERNEL)), qkv(), Config(cpu=True, exact=True))
    assert found.reason.startswith("flex_attention does not have the bits of NATTEN")


def test_the_cpu_is_refused():
    assert refusal(Flex(diffusers(GRID, KERNEL)), qkv(), Config()).reason.startswith("the graph is on the CPU")


@pytest.mark.parametrize("name", ["cut at the border", "causal", "off centre", "other grid", "head", "2D"])
def test_near_misses_are_named(name):
    mask_mod, sentence = NEAR_MISSES[name]
    found = refusal(Flex(mask_mod), qkv())
    assert not found.certain
    assert re.search(sentence, found.reason)


def test_a_score_mod_is_refused():
    module = Flex(diffusers(GRID, KERNEL), score_mod=lambda score, b, h, q, kv: score * 0.5)
    assert "score_mod" in refusal(module, qkv()).reason


def test_the_logsumexp_is_refused():
    class Lse(Flex):
        def forward(self, q, k, v):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mask = self.block_mask(S)
            return flex_attention_op(q, k, v, self.score_mod, mask.as_tuple(), self.scale, OPTIONS)[:2]

    assert "the logsumexp of flex_attention is read" in refusal(Lse(diffusers(GRID, KERNEL)), qkv()).reason


def test_fewer_heads_of_keys_are_refused():
    q, k, v = qkv(heads=4)[0], *qkv()[1:]
    assert "4 heads of queries, 2 of keys" in refusal(Flex(diffusers(GRID, KERNEL)), [q, k, v]).reason


def test_sizes_that_do_not_fit_the_sequence_are_refused():
    found = refusal(Flex(diffusers(GRID, KERNEL)), qkv(length=S + 5))
    assert "which does not fit a sequence of 215" in found.reason


@pytest.mark.parametrize(
    ("mask_mod", "certain"),
    [
        (diffusers(GRID, KERNEL), True),
        (NEAR_MISSES["causal"][0], False),
        (lambda b, h, q, kv: q // 9 == kv // 9, False),
    ],
    ids=["window", "causal", "documents"],
)
def test_a_dynamic_sequence_is_refused_for_certain_where_the_mask_is_a_window_now(mask_mod, certain):
    traced = graph_of(Flex(mask_mod), qkv(), "symbolic")
    before = shape_facts(traced.gm.graph)
    gm, report = after_the_pass(traced)[1:]
    assert "flex_attention" in str(gm.graph)
    (found,) = report.refusals
    assert "a size that is a symbol" in found.reason
    assert found.certain == certain
    assert shape_facts(traced.gm.graph) == before


@pytest.mark.parametrize("mask_mod", [lambda b, h, q, kv: kv <= q, lambda b, h, q, kv: (q - kv).abs() < 9])
def test_other_masks_are_no_candidates(mask_mod):
    _, _, report = rewritten(Flex(mask_mod), qkv())
    assert not report.sites
    assert not report.refusals


def test_attention_without_a_mask_is_no_candidate():
    class Plain(nn.Module):
        def forward(self, q, k, v):
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(q, k, v)

    with torch.no_grad():
        traced = trace(Plain(), qkv(heads_first=True))[-1]
    _, _, report = after_the_pass(traced)
    assert "flex_attention" in str(traced.gm.graph)
    assert not report.sites
    assert not report.refusals


decoder = pytest.importorskip("diffusers.models.autoencoders.ltx2_diffusion_decoder")


class Stage(nn.Module):
    """A stage of the decoder: blocks that share a mask, made from the grid as the decoder makes it."""

    def __init__(self, blocks=2, dim=64, kernel_size=KERNEL):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(decoder.LTX2VideoVaeNABlock(dim, kernel_size, head_dim=32) for _ in range(blocks))

    def forward(self, x, block_mask=None):
        mask = self.blocks[0].attn.build_block_mask(x) if block_mask is None else block_mask
        for block in self.blocks:
            x = block(x, mask)
        return x


def stage_graph(module, inputs):
    """Of the graphs that the pass is called with, that of the module: mask_mods and score_mods come first."""
    with torch.no_grad():
        return trace(module.eval(), inputs)[-1]


def test_a_stage_of_the_decoder_compiled_whole():
    x = torch.randn(1, *GRID, 64, generator=torch.Generator().manual_seed(0))
    traced = stage_graph(Stage(), [x])
    gm, report = after_the_pass(traced)[1:]
    report.expect(neighborhood_attention=2)
    assert not [r for r in report.refusals if r.rule == RULE]
    assert "flex_attention" not in str(gm.graph)
    assert largest(gm) <= 8 * x.numel()
    (out,) = run_graph(gm, traced.args)
    with torch.no_grad():
        torch.testing.assert_close(out, Stage()(x), rtol=1e-4, atol=1e-4)


def test_a_stage_of_the_decoder_given_its_mask():
    """As where every block is compiled by itself: the mask is an input."""
    x, stage = torch.randn(1, *GRID, 64), Stage(1)
    traced = stage_graph(stage, [x, stage.blocks[0].attn.build_block_mask(x)])
    _, _, report = after_the_pass(traced)
    assert "comes into the graph as an input" in report.refusals[-1].reason
    _, _, report = after_the_pass(traced, Config(cpu=True, trust_block_mask=True))
    report.expect(neighborhood_attention=1)


def test_strict_is_heard_at_the_second_video_length(monkeypatch):
    """Then torch makes the sizes symbols, unless dynamic=False keeps it from that."""
    monkeypatch.setattr(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=_eager))
    videos = [torch.randn(1, frames, *GRID[1:], 64) for frames in (5, 7)]
    options = {"ltx_inductor.cpu": True, "ltx_inductor.strict": True, "ltx_inductor.rules": [RULE]}
    stage = Stage(1).eval()
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        fixed = torch.compile(stage, backend="ltx", options=options, dynamic=False)
        for video in videos:
            fixed(video)
        ltx_inductor.last_report().expect(neighborhood_attention=2)
        torch._dynamo.reset()
        automatic = torch.compile(stage, backend="ltx", options=options)
        automatic(videos[0])
        with pytest.raises(ltx_inductor.LostFusionError, match="compile with dynamic=False"):
            automatic(videos[1])


def test_a_stage_compiled_whole_needs_no_memory_of_the_sequence_squared():
    """94,446 positions: a dense mask would take 8.9 GB, FlexAttention's scores on the CPU four times that."""
    x = torch.randn(1, 33, 53, 54, 32, generator=torch.Generator().manual_seed(0))
    stage, reports = Stage(1, dim=32, kernel_size=(2, 2, 2)).eval(), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compiled_with(stage, [x], lambda graph: reports.append(rewrite_graph(graph, CPU)))  # compiles and runs
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert sum(r.rule == RULE for report in reports for r in report.sites) == 1
    assert grown < 2, f"{grown:.1f} GiB"
