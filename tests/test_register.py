"""register, unregister, enabled: our pass in the global hook, with other passes there, other threads, any order."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import ltx_inductor
from ltx_inductor.explainer import _entry
from ltx_inductor.joint_pass import PassChain
from tests import stand_in

CPU = {"ltx_inductor.cpu": True}
X = torch.arange(24.0).reshape(3, 8)


@pytest.fixture(autouse=True)
def _stand_in():
    old = stand_in.put_in()
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        yield
    ltx_inductor.unregister()
    stand_in.put_in(old)
    assert inductor_config.joint_custom_pre_pass is None


def is_rewritten(**kwargs) -> bool:
    """Compiles a model with plain Inductor and looks at what it computes.

    Through a code object of its own: Dynamo would reuse what it compiled for an equal model before.
    """
    model = stand_in.Model()
    out = torch.compile(_entry(model), **kwargs)(X)
    rewritten = torch.allclose(out, -model.linear(X))
    assert rewritten or torch.allclose(out, model(X))
    return rewritten


class Mine(CustomGraphPass):
    def __init__(self):
        self.calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return "mine"


def test_register_and_unregister():
    assert not is_rewritten()
    ltx_inductor.register(CPU)
    assert is_rewritten()
    assert ltx_inductor.last_report().count() == 1
    ltx_inductor.unregister()
    assert not is_rewritten()


def test_a_compile_that_fails_is_not_taken_for_a_cache_hit():
    """In both the pass has delivered nothing."""
    strict = {**CPU, "ltx_inductor.strict": True}
    with (
        inductor_config.patch(force_disable_caches=False),
        fresh_cache(),
        ltx_inductor.enabled(strict),
        pytest.raises(ltx_inductor.LostFusionError),
    ):
        torch.compile(stand_in.Refused())(X)
    assert ltx_inductor.last_report().notes == ["the compile of one graph ended with StrictError; see that error"]


def test_a_cache_hit_while_the_user_handles_an_exception_is_no_failure():
    with inductor_config.patch(force_disable_caches=False), fresh_cache(), ltx_inductor.enabled(CPU):
        assert is_rewritten()
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            assert is_rewritten()
    report = ltx_inductor.last_report()
    assert report.cached
    assert (report.count(), report.notes) == (1, [])


def test_enabled_is_scoped_and_nests():
    with ltx_inductor.enabled(CPU):
        with ltx_inductor.enabled():  # the innermost options count: the CPU is left alone
            assert not is_rewritten()
        assert is_rewritten()
    assert not is_rewritten()


def test_twice_and_out_of_order():
    ltx_inductor.unregister()
    ltx_inductor.register(CPU)
    ltx_inductor.register(CPU)
    first, second = ltx_inductor.enabled(CPU), ltx_inductor.enabled(CPU)
    first.__enter__()
    second.__enter__()
    ltx_inductor.unregister()
    first.__exit__(None, None, None)
    assert is_rewritten()
    second.__exit__(None, None, None)
    ltx_inductor.unregister()
    assert not is_rewritten()


def test_from_two_threads():
    def work():
        for _ in range(50):
            ltx_inductor.register(CPU)
            ltx_inductor.unregister()
        ltx_inductor.register(CPU)

    run_in_threads(work, work)
    assert is_rewritten()  # here, where nobody registered
    ltx_inductor.unregister()
    assert not is_rewritten()


def test_registered_here_compiled_there():
    """Inductor's config is per thread: a hook that is only set here is not seen there."""
    ltx_inductor.register(CPU)
    seen = []
    run_in_threads(lambda: seen.append(is_rewritten()), no_grad=True)
    ltx_inductor.unregister()
    run_in_threads(lambda: seen.append(is_rewritten()), no_grad=True)
    assert seen == [True, False]


def run_in_threads(*work, no_grad=False):
    failures = []

    def guarded(function):
        try:
            with torch.set_grad_enabled(not no_grad), inductor_config.patch(force_disable_caches=True):
                function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(w,)) for w in work]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_a_users_pass_before_and_after():
    mine = Mine()
    with inductor_config.patch(joint_custom_pre_pass=mine):
        ltx_inductor.register(CPU)
        assert is_rewritten()
        assert mine.calls == 1
        ltx_inductor.unregister()
        assert inductor_config.joint_custom_pre_pass is mine
        assert not is_rewritten()
        assert mine.calls == 2


def test_a_users_pass_set_after_register():
    mine = Mine()
    ltx_inductor.register(CPU)
    inductor_config.joint_custom_pre_pass = mine
    assert is_rewritten()
    assert mine.calls == 1
    ltx_inductor.unregister()
    assert inductor_config.joint_custom_pre_pass is mine
    assert not is_rewritten()
    assert mine.calls == 2
    inductor_config.joint_custom_pre_pass = None


def test_nested_patches():
    mine, inner = Mine(), Mine()
    with inductor_config.patch(joint_custom_pre_pass=mine):
        ltx_inductor.register(CPU)
        with inductor_config.patch(joint_custom_pre_pass=inner):
            assert is_rewritten()
        assert is_rewritten()
    assert (mine.calls, inner.calls) == (1, 1)
    assert is_rewritten()  # although the outer patch has put the hook back to before register()
    assert (mine.calls, inner.calls) == (1, 1)
    ltx_inductor.unregister()
    assert not is_rewritten()


def test_after_a_reset_of_dynamo():
    ltx_inductor.register(CPU)
    torch._dynamo.reset()  # drops every callback, ours too
    assert is_rewritten()
    mine = Mine()
    with inductor_config.patch(joint_custom_pre_pass=mine):
        assert is_rewritten()
    assert mine.calls == 1


def test_a_forgotten_pass_does_nothing():
    with inductor_config.patch(joint_custom_pre_pass=None):
        ltx_inductor.register(CPU)
        forgotten = inductor_config.joint_custom_pre_pass
        active = forgotten.uuid()
        ltx_inductor.unregister()
    with inductor_config.patch(joint_custom_pre_pass=forgotten):
        assert isinstance(forgotten, PassChain)
        assert forgotten.uuid() != active
        assert not is_rewritten()


def test_our_backend_while_registered_runs_the_pass_once():
    calls = []

    def count(graph, config, kernels=None):
        calls.append(config.cpu)
        return stand_in.rewrite_graph(graph, config)

    stand_in.put_in(count)
    with ltx_inductor.enabled():
        assert is_rewritten(backend="ltx", options=CPU)
    assert calls == [True]


def test_a_users_pass_in_the_options_replaces_the_hook():
    """Inside Inductor; no hook can change that. backend="ltx" runs both (test_backend.py)."""
    mine = Mine()
    ltx_inductor.register(CPU)
    assert not is_rewritten(options={"joint_custom_pre_pass": mine})
    assert mine.calls == 1


def test_wrong_options():
    with pytest.raises(ValueError, match="max_autotune.*prefix"):
        ltx_inductor.register({"max_autotune": True})
    with (
        pytest.raises(ValueError, match="unknown option 'ltx_inductor.gpu'"),
        ltx_inductor.enabled({"ltx_inductor.gpu": 1}),
    ):
        pass
