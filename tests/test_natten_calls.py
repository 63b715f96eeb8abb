"""natten.na3d without NATTEN's binary: taken while Dynamo traces, in our compiles only, and otherwise left alone.

Tracing natten's own Python takes many seconds, so that most tests put in a stand-in for it: a function of that name
and signature, in a module of that name.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
import warnings

import pytest
import torch
from torch import nn

import ltx_inductor
from ltx_inductor import natten_calls, session
from ltx_inductor.config import Config
from ltx_inductor.rewrite.passes import rewrite_graph
from tests.harness import rewritten

GRID, KERNEL = (5, 6, 7), (3, 4, 5)
CPU = {"ltx_inductor.cpu": True}
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    ltx_inductor.unregister()


@pytest.fixture
def natten():
    """NATTEN itself, without its binary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("natten")
    if module.HAS_LIBNATTEN:
        pytest.skip("NATTEN has its binary here")
    return module


SOURCE = """
def na3d(query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None, additional_keys=None,
         additional_values=None, attention_kwargs=None, backend=None, q_tile_shape=None, kv_tile_shape=None,
         backward_q_tile_shape=None, backward_kv_tile_shape=None, backward_kv_splits=None,
         backward_use_pt_reduction=False, run_persistent_kernel=True, kernel_schedule=None, torch_compile=False,
         return_lse=False):
    out = query * 2 + key.sum() * 0 + value.sum() * 0
    return (out, out.sum(-1)) if return_lse else out
"""


@pytest.fixture
def stand_in(monkeypatch):
    """A NATTEN whose na3d doubles the query."""
    package, functional = types.ModuleType("natten"), types.ModuleType("natten.functional")
    exec(SOURCE, vars(functional))
    package.functional, package.na3d, package.HAS_LIBNATTEN = functional, functional.na3d, False
    monkeypatch.setitem(sys.modules, "natten", package)
    monkeypatch.setitem(sys.modules, "natten.functional", functional)
    return package


def qkv(heads=2, head_dim=64, dtype=torch.bfloat16, grid=GRID):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, *grid, heads, head_dim, generator=generator).to(dtype) for _ in range(3)]


def call(natten, **kwargs):
    """A function with a call of natten.na3d and code of its own: Dynamo keeps what it compiled by code."""
    namespace = {"natten": natten, "kwargs": {"kernel_size": KERNEL, **kwargs}}
    exec("def model(q, k, v): return natten.na3d(q, k, v, **kwargs)", namespace)
    return namespace["model"]


class Recording:
    """A backend that keeps the graphs, and what was told on the way, and runs them as they are; ours while entered."""

    def __init__(self, config: Config | None = None) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.told: list[ltx_inductor.Refusal] = []
        self.asked = None if config is None else natten_calls.Compile(config, None)

    def __call__(self, gm, example_inputs, **kwargs):
        self.graphs.append(gm)
        self.told += session.take_told()
        return gm

    def __enter__(self):
        natten_calls.install(self, lambda backend, _: self.asked if backend is self else None)
        return self

    def __exit__(self, *_):
        natten_calls.remove(self)

    @property
    def targets(self):
        return [str(n.target) for gm in self.graphs for n in gm.graph.nodes if n.op == "call_function"]


OURS = "ltx_inductor.natten_na3d.default"
ON = Config(cpu=True)


def taken(model, inputs, backend, **kwargs) -> bool:
    """Did the call become our op, in a graph of its own?"""
    torch._dynamo.reset()
    before = len(getattr(backend, "graphs", ()))
    torch.compile(model, backend=backend, fullgraph=True, **kwargs)(*inputs)
    return any(OURS in str(gm.graph) for gm in backend.graphs[before:])


def left_alone(model, inputs, config=ON) -> list[str]:
    """The reasons why, each told once and with the line of the call."""
    with Recording(config) as backend:
        assert not taken(model, inputs, backend)
    assert all(r.source in ("<string>:1", "") and r.rule == "neighborhood_attention" for r in backend.told)
    return [r.reason for r in backend.told]


def test_the_stand_in_has_the_signature(natten, monkeypatch):
    namespace = {}
    exec(SOURCE, namespace)
    names = [f"{p.name}={p.default}" for p in inspect.signature(namespace["na3d"]).parameters.values()]
    assert names == [f"{p.name}={p.default}" for p in inspect.signature(natten.na3d).parameters.values()]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"scale": 0.3}, {"scale": 0.0}, {"kernel_size": 3}, {"stride": 1, "dilation": (1, 1, 1), "is_causal": False}],
    ids=str,
)
def test_the_call_becomes_one_op_that_runs_natten(natten, kwargs):
    inputs = qkv()
    want = call(natten, **kwargs)(*inputs)
    with Recording(ON) as backend:
        got = torch.compile(call(natten, **kwargs), backend=backend, fullgraph=True)(*inputs)
    assert backend.targets == [OURS]
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


def test_every_way_to_call_it(natten):
    from natten.functional import na3d

    def positional(q, k, v):
        return na3d(q, k, v, KERNEL)

    def partial(q, k, v):
        return functools.partial(na3d, kernel_size=KERNEL)(value=v, key=k, query=q)

    def imported_late(q, k, v):
        import natten.functional as late

        return late.na3d(q, k, v, kernel_size=list(KERNEL))

    class Processor:
        def __init__(self):
            self._na3d = na3d

        def __call__(self, q, k, v):
            return self._na3d(q, k, v, kernel_size=KERNEL, backend=None, kernel_schedule=None)

    module = natten.NeighborhoodAttention3D(64, 1, kernel_size=KERNEL).eval().bfloat16()
    calls = [(f, qkv()) for f in (positional, partial, imported_late, Processor().__call__)]
    for model, inputs in [*calls, (module, [torch.randn(1, *GRID, 64).bfloat16()])]:
        with Recording(ON) as backend:
            got = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
        assert backend.targets.count(OURS) == 1, model
        assert torch.equal(got, model(*inputs))


def test_other_compiles_are_as_without_us(stand_in):
    inputs, model = qkv(), call(stand_in)
    before = stand_in.na3d, dict(vars(stand_in.na3d))
    with Recording(ON) as backend:
        assert not taken(model, inputs, Recording())
        assert taken(model, inputs, backend)
        assert taken(model, inputs, backend, options={"a": 1})
        assert not taken(model, inputs, Recording())
    assert not taken(model, inputs, backend)
    assert (stand_in.na3d, dict(vars(stand_in.na3d))) == before
    assert left_alone(model, inputs, Config(rules=("rmsnorm_split_rope",), cpu=True)) == []


def test_natten_itself_breaks_the_graph_elsewhere(natten):
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(call(natten), backend="eager", fullgraph=True)(*qkv())


def test_dynamo_is_restored(monkeypatch):
    from torch._dynamo.variables import UserFunctionVariable

    monkeypatch.setattr(natten_calls, "_owners", {})
    natten_calls._sync()
    original = UserFunctionVariable.call_function
    with Recording(ON), Recording(ON):
        assert UserFunctionVariable.call_function is not original
    assert UserFunctionVariable.call_function is original
    ltx_inductor.register(CPU)
    assert UserFunctionVariable.call_function is not original
    torch._dynamo.reset()
    assert UserFunctionVariable.call_function is not original
    ltx_inductor.unregister()
    assert UserFunctionVariable.call_function is original
    monkeypatch.undo()
    natten_calls._sync()


def test_with_its_binary_natten_is_left_alone(stand_in):
    stand_in.HAS_LIBNATTEN = True
    assert left_alone(call(stand_in), qkv()) == []


def _more():
    return torch.randn(1, 4, 2, 64).bfloat16()


REFUSED = {
    "stride": ({"stride": 2}, "na3d is called with stride=2"),
    "dilation": ({"dilation": (1, 1, 2)}, "na3d is called with dilation=(1, 1, 2)"),
    "causal": ({"is_causal": (True, False, False)}, "na3d is called with is_causal=(True, False, False)"),
    "lse": ({"return_lse": True}, "na3d is called with return_lse=True: the op computes no logsumexp"),
    "more keys": ({"additional_keys": _more(), "additional_values": _more()}, "na3d is called with additional_keys"),
    "backend": (
        {"backend": "flex-fna"},
        "na3d is called with backend='flex-fna', one of NATTEN's own kernels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arguments_are_left_to_natten(stand_in, name):
    kwargs, sentence = REFUSED[name]
    assert left_alone(call(stand_in, **kwargs), qkv()) == [sentence]


def test_other_tensors_are_left_to_natten(stand_in):
    model = call(stand_in)
    q, k, v = qkv(heads=4)[0], *qkv(heads=2)[1:]
    assert left_alone(model, [q, k, v])[0].startswith("key of na3d is torch.bfloat16")
    assert left_alone(model, qkv(), Config())[0].startswith("the graph is on the CPU")
    with torch.enable_grad():
        reasons = left_alone(model, [t.requires_grad_() for t in qkv(dtype=torch.float32)])
    assert reasons == ["na3d is called on tensors that need gradients, and the op has no backward"]


def test_a_scale_of_the_running_model(stand_in):
    def model(q, k, v, scale):
        return stand_in.na3d(q, k, v, KERNEL, scale=scale)

    with Recording(ON) as backend:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(*qkv(), 0.5)
    assert OURS not in backend.targets
    assert [r.reason for r in backend.told] == ["scale is only known while the model runs"]


def test_a_wrong_call_is_natten_s_to_refuse(natten):
    with Recording(ON) as backend, pytest.raises(Exception, match=r"[Kk]ernel"):
        torch.compile(call(natten, kernel_size=(9, 9, 9)), backend=backend)(*qkv())


def test_the_op(stand_in):
    q, k, v = qkv(dtype=torch.float32, grid=(3, 3, 4))
    op = torch.ops.ltx_inductor.natten_na3d
    torch.library.opcheck(op.default, (q, k, v, [2, 2, 3], 0.5))
    assert torch.equal(op(q, k, v, [2, 2, 3], 0.5), q * 2)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="query requires a gradient"):
        op(q.requires_grad_(), k, v, [2, 2, 3], 0.5)


class Toy(nn.Module):
    def forward(self, q, k, v):
        from natten import na3d

        return (na3d(q * math.sqrt(0.5), k, v, kernel_size=KERNEL, scale=1.0) + v).flatten(-2)


def test_backend_ltx(natten):
    inputs = qkv()
    got = torch.compile(Toy(), backend="ltx", options=CPU, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, Toy()(*inputs), **TOLERANCE)
    report = ltx_inductor.last_report()
    report.expect(neighborhood_attention=1)
    assert report.sites[0].source.startswith("test_natten_calls.py:")
    assert report.sites[0].op == "ltx_inductor::na3d"


def test_registered_for_inductor_and_undone(stand_in):
    inputs, model = qkv(), call(stand_in)
    ltx_inductor.register(CPU)
    torch.compile(model, fullgraph=True)(*inputs)
    assert ltx_inductor.last_report().count("neighborhood_attention") == 1
    ltx_inductor.unregister()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, fullgraph=True)(*inputs), inputs[0] * 2)


def test_what_the_pass_refuses_runs_natten(stand_in):
    """exact=True: no kernel on the CPU has NATTEN's bits. The op stays, and calls natten."""
    inputs = qkv()
    options = {**CPU, "ltx_inductor.exact": True}
    got = torch.compile(call(stand_in), backend="ltx", options=options, fullgraph=True)(*inputs)
    assert torch.equal(got, inputs[0] * 2)
    assert not ltx_inductor.last_report().sites
    assert ltx_inductor.last_report().refusals


def test_strict_is_told_too(stand_in):
    model = call(stand_in, stride=2)
    with pytest.raises(ltx_inductor.LostFusionError, match="stride=2"):
        torch.compile(model, backend="ltx", options={**CPU, "ltx_inductor.strict": True})(*qkv())


def test_explain_lists_the_call(stand_in):
    ltx_inductor.explain(Toy(), *qkv()).expect(neighborhood_attention=1)
    report = ltx_inductor.explain(call(stand_in, stride=2), *qkv())
    assert [r.reason for r in report.refusals] == ["na3d is called with stride=2"]


def test_the_decoder_block_of_diffusers(natten):
    decoder = pytest.importorskip("diffusers.models.autoencoders.ltx2_diffusion_decoder")
    processor = object.__new__(decoder.LTX2VideoVaeNeighborhoodNattenProcessor)  # its constructor wants the Hub
    processor._na3d, processor.backend = natten.na3d, None
    torch.manual_seed(0)
    block = decoder.LTX2VideoVaeDiffusionNABlock(128, KERNEL, context_channels=32, head_dim=64).eval().bfloat16()
    block.attn.set_processor(processor)
    x, context = torch.randn(1, *GRID, 128).bfloat16(), torch.randn(1, *GRID, 32).bfloat16()
    modulation = tuple(torch.randn(1, 1, 1, 1, 128).bfloat16() * 0.1 for _ in range(7))
    want = block(x, context, modulation)
    reports = []

    def rewrite(graph):
        reports.append(rewrite_graph(graph, ON))

    token = object()
    natten_calls.install(token, lambda backend, _: natten_calls.Compile(ON, None))
    try:
        got = rewritten(block, (x, context, modulation), rewrite)(x, context, modulation)
    finally:
        natten_calls.remove(token)
    *axial, site = (s for r in reports for s in r.sites)
    assert [s.rule for s in axial] == ["rmsnorm_axial_rope"] * 2
    assert site.form == "ltx_inductor::natten_na3d"
    assert site.source.startswith("ltx2_diffusion_decoder.py:")
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)
