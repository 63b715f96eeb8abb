"""`backend="ltx"` behaves as Inductor's own backend does, plus the rewrite and its report."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

import ltx_inductor
from ltx_inductor.config import Config
from ltx_inductor.joint_pass import LtxPass, PassChain, flatten, with_ours, without_ours
from tests import stand_in

CPU = {"ltx_inductor.cpu": True}
X = torch.arange(24.0).reshape(3, 8)


@pytest.fixture(autouse=True)
def _stand_in():
    old = stand_in.put_in()
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        yield
    stand_in.put_in(old)


def negated(x=X):
    model = stand_in.Model()
    return -model.linear(x)


def compiled(model=None, backend="ltx", **kwargs):
    kwargs.setdefault("options", CPU)
    return torch.compile(model or stand_in.Model(), backend=backend, **kwargs)


@pytest.mark.parametrize("backend", ["ltx", ltx_inductor.ltx_backend])
def test_rewrites_and_reports(backend):
    torch.testing.assert_close(compiled(backend=backend)(X), negated())
    report = ltx_inductor.last_report()
    assert report.count() == 1
    assert not report.cached
    assert report.sites[0].source.startswith("stand_in.py:")


def test_cpu_is_left_alone_by_default():
    model = stand_in.Model()
    torch.testing.assert_close(compiled(model, options={})(X), model(X))
    (refusal,) = ltx_inductor.last_report().refusals
    assert "CPU" in refusal.reason


def test_environment_sets_the_defaults(monkeypatch):
    monkeypatch.setenv("LTX_INDUCTOR_CPU", "1")
    compiled(options={})(X)
    assert ltx_inductor.last_report().count() == 1


@pytest.mark.parametrize("arguments", [{"fullgraph": True}, {"dynamic": True}, {"dynamic": False}])
def test_arguments_of_torch_compile(arguments):
    torch.testing.assert_close(compiled(**arguments)(X), negated())


def test_inductor_options_reach_inductor():
    seen = []

    def own(graph):
        seen.append(torch._inductor.config.max_fusion_size)

    compiled(options={**CPU, "max-fusion-size": 7, "joint_custom_pre_pass": own})(X)
    assert seen == [7]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs", "default"])
def test_modes(monkeypatch, mode):
    monkeypatch.setenv("LTX_INDUCTOR_CPU", "1")
    seen = {}

    def read(graph, config, kernels=None):
        seen[mode] = {k: getattr(torch._inductor.config, k) for k in ("triton.cudagraphs", "max_autotune")}
        return stand_in.rewrite_graph(graph, config)

    stand_in.put_in(read)
    function = torch.compile(stand_in.Model(), backend="ltx", mode=mode)
    for _ in range(3):
        torch.testing.assert_close(function(X), negated())
    wanted = torch._inductor.list_mode_options(mode)
    assert {k: v for k, v in seen[mode].items() if v} == {k: v for k, v in wanted.items() if k in seen[mode]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"ltx_inductor.cpus": True}}, "ltx_inductor.cpu, .*ltx_inductor.strict"),
        ({"options": {"ltx_inductor.cpu": 1}}, "expected True or False"),
        ({"options": {"ltx_inductor.rules": ["rope"]}}, "the rules are: rmsnorm_axial_rope, rmsnorm_split_rope"),
        ({"options": {"no_such_thing": 1}}, "Unexpected optimization option no_such_thing"),
        ({"options": {"max_fusion_size": "x"}}, "Unexpected type of attr max_fusion_size"),
        ({"options": None, "mode": "fast"}, "Unrecognized mode=fast"),
    ],
)
def test_wrong_options(arguments, message):
    with pytest.raises(BackendCompilerFailed, match=message):
        compiled(**arguments)(X)


def test_strict_raises_the_error_itself():
    with pytest.raises(ltx_inductor.LostFusionError, match="it is a tanh"):
        compiled(stand_in.Refused(), options={**CPU, "ltx_inductor.strict": True})(X)
    assert "StrictError" in ltx_inductor.last_report().notes[0]


def test_an_error_in_the_rewrite_does_not_reach_the_user(caplog):
    def broken(graph, config, kernels=None):
        raise KeyError("oops")

    stand_in.put_in(broken)
    model = stand_in.Model()
    torch.testing.assert_close(compiled(model)(X), model(X))
    (refusal,) = ltx_inductor.last_report().refusals
    assert "KeyError: 'oops'" in refusal.reason


class Uncached(CustomGraphPass):
    def __init__(self, log):
        self.log = log

    def __call__(self, graph):
        self.log.append(any(n.target == torch.ops.aten.relu.default for n in graph.nodes))

    def uuid(self):
        return None


class Cached(Uncached):
    def uuid(self):
        return "mine"


@pytest.mark.parametrize("where", ["options", "config"])
def test_a_users_own_pass_runs_first_and_once(where):
    log = []
    if where == "options":
        compiled(options={**CPU, "joint_custom_pre_pass": Cached(log)})(X)
    else:
        with torch._inductor.config.patch(joint_custom_pre_pass=Cached(log)):
            compiled()(X)
    assert log == [True]  # it ran once, and saw the graph as it is without us
    assert ltx_inductor.last_report().count() == 1
    assert torch._inductor.config.joint_custom_pre_pass is None


def test_chain():
    ours, mine, plain = LtxPass(Config(cpu=True)), Cached([]), lambda graph: None
    assert with_ours(None, ours).passes == (ours,)
    assert with_ours([plain, mine], ours).passes == (plain, mine, ours)
    assert with_ours(PassChain(mine, LtxPass(Config())), ours).passes == (mine, ours)
    assert flatten(PassChain(PassChain(mine), ours)) == [mine, ours]
    assert without_ours(PassChain(mine, ours)) is mine
    assert without_ours(PassChain(ours)) is None
    assert without_ours(plain) is plain
    assert PassChain(mine, ours).uuid() == ("mine", ours.uuid())
    assert PassChain(Uncached([]), ours).uuid() is None
    assert PassChain(plain, ours).uuid() is None
    again = pickle.loads(pickle.dumps(PassChain(mine, ours)))
    assert again.uuid() == ("mine", ours.uuid())


@pytest.mark.skipif(not hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"), reason="torch < 2.13")
def test_a_list_of_passes():
    log = []
    compiled(options={**CPU, "joint_custom_pre_pass": [Cached(log), Cached(log)]})(X)
    assert log == [True, True]
    assert ltx_inductor.last_report().count() == 1


def test_report_covers_graph_breaks_and_recompiles():
    inner = stand_in.Model()

    def model(x):
        x = inner(x)
        torch._dynamo.graph_break()
        return inner(x) + 1

    function = compiled(model)
    function(X)
    assert [s.graph for s in ltx_inductor.last_report().sites] == [0, 1]
    compiled(stand_in.Refused())(X)
    assert ltx_inductor.last_report().count() == 0
    function(X[:2])  # recompiled, with a dynamic size
    assert [s.graph for s in ltx_inductor.last_report().sites] == [0, 1, 2, 3]
    torch._dynamo.reset()
    function(X)
    assert [s.graph for s in ltx_inductor.last_report().sites] == [0, 1]


def test_report_of_a_training_graph_and_its_gradients():
    with torch.enable_grad():
        model, twin = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        twin.load_state_dict(model.state_dict())
        compiled(model)(X).sum().backward()
        twin(X).sum().backward()
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)
    assert len(ltx_inductor.last_report().graphs) == 1


def test_reports_of_two_threads_do_not_mix():
    def work(i):
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            compiled(stand_in.Model() if i % 2 else stand_in.Refused())(X)
        assert len(ltx_inductor.last_report().graphs) == 1

    failures = []
    threading.excepthook, old = (lambda args: failures.append(args.exc_value)), threading.excepthook
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    threading.excepthook = old
    assert not failures


def test_called_by_hand():
    graph = torch.fx.symbolic_trace(stand_in.Model())
    torch.testing.assert_close(ltx_inductor.ltx_backend(graph, [X], options=CPU)(X), negated())
    assert ltx_inductor.last_report().count() == 1


def test_a_report_that_cannot_be_looked_up_does_not_reach_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no other test shall hit this entry

    def broken(*args):
        raise KeyError("oops")

    monkeypatch.setattr("ltx_inductor.report_store.fingerprint", broken)
    with torch._inductor.config.patch(force_disable_caches=False):
        torch.testing.assert_close(compiled()(X), negated())
    assert ltx_inductor.last_report().count() == 1
