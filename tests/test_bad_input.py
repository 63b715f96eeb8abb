"""Wrong arguments of the public functions: what was given, what is accepted, and nothing global changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch._inductor import config as inductor_config

import ltx_inductor
from ltx_inductor import registration
from ltx_inductor.backend import split_options
from ltx_inductor.rewrite.report import RewriteReport

L = ltx_inductor
CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "register, unknown option": (
        lambda: L.register({"ltx_inductor.speed": 1}), ValueError,
        r"unknown option 'ltx_inductor.speed'; the options are: .*ltx_inductor.strict",
    ),
    "register, Inductor's option": (
        lambda: L.register({"max_autotune": True}), ValueError, r"'max_autotune' is not ours: expected keys with the",
    ),
    "register, no mapping": (lambda: L.register(["strict"]), TypeError, r"options=\['strict'\]: expected a mapping"),
    "register, empty list": (lambda: L.register([]), TypeError, r"options=\[\]: expected a mapping"),
    "register, key": (lambda: L.register({1: True}), TypeError, r"the key 1 is no string"),
    "enabled, value": (
        lambda: L.enabled({"ltx_inductor.cpu": 1}).__enter__(), TypeError,
        r"ltx_inductor.cpu=1: expected True or False",
    ),
    "backend, rules": (
        lambda: split_options(None, {"ltx_inductor.rules": ["norm"]}), ValueError, r"'norm' is not a rule; the rules",
    ),
    "backend, no mapping": (lambda: split_options(None, "strict"), TypeError, r"options='strict': expected a mapping"),
    "Config, rules": (lambda: L.Config(rules="rmsnorm"), TypeError, r"rules='rmsnorm': expected a list of rule names"),
    "Config, strict": (lambda: L.Config(strict="yes"), TypeError, r"strict='yes': expected True or False"),
    "Config, dump": (lambda: L.Config(dump=3), TypeError, r"dump=3: expected a folder path or None"),
    "Config, verify": (lambda: L.Config(verify="maybe"), ValueError, r"verify='maybe': expected one of first, always"),
    "explain, model": (lambda: L.explain(3, 4), TypeError, r"model=3\): expected a module or a function"),
    "explain, dynamic": (lambda: L.explain(torch.relu, dynamic="yes"), TypeError, r"dynamic='yes'\): expected True"),
    "explain, options": (
        lambda: L.explain(torch.relu, torch.ones(2), options={"ltx_inductor.nothing": 0}), ValueError,
        r"unknown option 'ltx_inductor.nothing'",
    ),
    "stats": (lambda: L.stats(reset="yes"), TypeError, r"reset='yes'\): expected True or False"),
    "count": (lambda: RewriteReport().count("rope"), ValueError, r"'rope' is not a rule; the rules are: rmsnorm"),
    "expect, rule": (lambda: RewriteReport().expect(rope=0), ValueError, r"'rope' is not a rule"),
    "expect, count": (
        lambda: RewriteReport().expect(rmsnorm_split_rope="2"), TypeError, r"split_rope='2'\): expected a whole number",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_global_changes() -> Iterator[None]:
    def state() -> tuple[object, ...]:
        ours = (registration._on_start, registration._on_end)  # stay, and do nothing while nothing is registered
        callbacks = [c for c in (*callback_handler.start_callbacks, *callback_handler.end_callbacks) if c not in ours]
        return inductor_config.joint_custom_pre_pass, list(registration._active), callbacks, torch.is_grad_enabled()

    before, report = state(), L.last_report().to_dict()
    yield
    assert state() == before
    assert L.last_report().to_dict() == report


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(name: str) -> None:
    call, kind, message = CALLS[name]
    with pytest.raises(kind) as caught:
        call()
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("variable", ["CPU", "STRICT", "VERIFY"])
def test_a_wrong_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LTX_INDUCTOR_{variable}", "perhaps")
    with pytest.raises(ValueError, match=r"'perhaps': expected one of"):
        L.register()


def test_a_model_that_fails_leaves_no_trace() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("the model's own")

    with pytest.raises(Exception, match="the model's own"):
        L.explain(model, torch.ones(2))


def test_an_error_inside_enabled_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), L.enabled():
        raise ZeroDivisionError
