"""Wrong arguments of the public functions: what was given, what is accepted, and nothing global changed."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.variables import UserFunctionVariable
from torch._inductor import config as inductor_config

import ltx_inductor
from ltx_inductor import natten_calls, registration
from ltx_inductor.backend import split_options
from ltx_inductor.rewrite.report import RewriteReport

L = ltx_inductor
GRAPH = torch.fx.symbolic_trace(torch.nn.ReLU())
RULE = "rmsnorm_split_rope"
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
    "Config, rules twice": (
        lambda: L.Config(rules=(RULE, RULE)), ValueError, rf"'{RULE}'\]: '{RULE}' is there twice",
    ),
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
    "diff": (lambda: RewriteReport().diff(3), TypeError, r"diff\(after=3\): expected a RewriteReport"),
    "diff, None": (lambda: RewriteReport().diff(None), TypeError, r"diff\(after=None\): expected a RewriteReport"),
    "diff, dict": (
        lambda: RewriteReport().diff(RewriteReport().to_dict()), TypeError, r"expected a RewriteReport .*from_dict",
    ),
    "to_html, path": (lambda: RewriteReport().to_html(3), TypeError, r"to_html\(path=3\): expected the path of a file"),
    "from_dict, no mapping": (
        lambda: RewriteReport.from_dict([]), TypeError, r"from_dict\(data=\[\]\): expected a mapping",
    ),
    "from_dict, empty": (
        lambda: RewriteReport.from_dict({}), ValueError, r"from_dict\(data={}\): expected what to_dict gives",
    ),
    "from_dict, value": (
        lambda: RewriteReport.from_dict({"graphs": 3}), ValueError, r"data={'graphs': 3}.*expected what to_dict",
    ),
    "from_dict, graph": (
        lambda: RewriteReport.from_dict({"graphs": [{}]}), ValueError, r"expected what to_dict .*KeyError: 'sites'",
    ),
    "ltx_backend, graph": (
        lambda: L.ltx_backend(3, []), TypeError, r"ltx_backend\(gm=3\): expected the torch.fx.GraphModule",
    ),
    "ltx_backend, inputs": (
        lambda: L.ltx_backend(GRAPH, None), TypeError, r"ltx_backend\(example_inputs=None\): expected a list of",
    ),
    "ltx_backend, option": (
        lambda: L.ltx_backend(GRAPH, [torch.ones(2)], options={"ltx_inductor.cpu": 1}), TypeError,
        r"ltx_inductor.cpu=1: expected True or False",
    ),
}  # fmt: skip


def state() -> dict[str, object]:
    """What belongs to the process or the thread, and none of our functions may change when it fails."""
    ours = (registration._on_start, registration._on_end)  # stay, and do nothing while nothing is registered
    return {
        "hook": inductor_config.joint_custom_pre_pass,
        "registered": list(registration._active),
        "callbacks": [c for c in (*callback_handler.start_callbacks, *callback_handler.end_callbacks) if c not in ours],
        "natten": list(natten_calls._owners.items()),
        "dynamo": UserFunctionVariable.call_function,
        "grad": torch.is_grad_enabled(),
        "rng": (torch.get_rng_state().tolist(), random.getstate()),
        "warnings": list(warnings.filters),
        "report": L.last_report().to_dict(),
    }


@contextlib.contextmanager
def nothing_global_changes() -> Iterator[None]:
    """Not a fixture: pytest has put the warning filters back when a fixture could look at them again."""
    before = state()
    yield
    after = state()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, changed


CHANGES: dict[str, Callable[[], object]] = {
    "hook": lambda: setattr(inductor_config, "joint_custom_pre_pass", len),
    "registered": L.register,
    "callbacks": lambda: callback_handler.register_start_callback(print),
    "natten": lambda: natten_calls.install("token", lambda *_: None),
    "dynamo": lambda: setattr(UserFunctionVariable, "call_function", len),
    "grad": lambda: torch.set_grad_enabled(False),
    "rng": lambda: torch.rand(1),
    "warnings": lambda: warnings.simplefilter("error"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UserFunctionVariable, "call_function", UserFunctionVariable.call_function)
    with (
        inductor_config.patch(joint_custom_pre_pass=None),
        torch.set_grad_enabled(True),
        pytest.raises(AssertionError, match=f"'{name}'"),
        nothing_global_changes(),
    ):
        CHANGES[name]()
    L.unregister()
    natten_calls.remove("token")
    callback_handler.remove_start_callback(print) if print in callback_handler.start_callbacks else None


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(name: str) -> None:
    call, kind, message = CALLS[name]
    with nothing_global_changes(), pytest.raises(kind) as caught:
        call()
    assert re.search(message, str(caught.value)), str(caught.value)


def test_a_wrong_title_writes_no_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with nothing_global_changes(), pytest.raises(TypeError, match=r"to_html\(title=3\): expected text"):
        RewriteReport().to_html(page, title=3)  # type: ignore[arg-type]
    assert not page.exists()


@pytest.mark.parametrize("variable", ["CPU", "STRICT", "VERIFY"])
def test_a_wrong_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LTX_INDUCTOR_{variable}", "perhaps")
    with nothing_global_changes(), pytest.raises(ValueError, match=r"'perhaps': expected one of"):
        L.register()


def test_a_model_that_fails_leaves_no_trace() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("the model's own")

    with nothing_global_changes(), pytest.raises(Exception, match="the model's own"):
        L.explain(model, torch.ones(2))


def test_an_error_inside_enabled_ends_it() -> None:
    with nothing_global_changes(), pytest.raises(ZeroDivisionError), L.enabled():
        raise ZeroDivisionError
