"""Options: where they come from, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

import ltx_inductor_autoload
from ltx_inductor import config
from ltx_inductor.backend import split_options
from ltx_inductor.config import RULES, Config, from_environment
from ltx_inductor.registration import current_config, enabled


def test_defaults():
    assert Config() == Config(rules=RULES, cpu=False, strict=False, dump=None, exact=False)
    assert from_environment({}) == Config()


def test_options_are_taken_by_prefix():
    options = {
        "max_autotune": True,
        "ltx_inductor.cpu": True,
        "ltx_inductor.strict": True,
        "ltx_inductor.rules": list(RULES),
        "ltx_inductor.dump": Path("folder"),
        "ltx_inductor.exact": True,
    }
    assert Config().with_options(options) == Config(RULES, True, True, "folder", True)
    ours, patches = split_options(None, options)
    assert (ours.cpu, patches) == (True, {"max_autotune": True})


def test_environment():
    flags = {"LTX_INDUCTOR_CPU": "1", "LTX_INDUCTOR_STRICT": "yes", "LTX_INDUCTOR_EXACT": "on"}
    environ = {**flags, "LTX_INDUCTOR_DUMP": "folder"}
    assert from_environment(environ) == Config(cpu=True, strict=True, dump="folder", exact=True)
    assert from_environment(dict.fromkeys(environ, "")) == Config()
    assert from_environment({"LTX_INDUCTOR_CPU": "off"}) == Config()


def test_rules_come_from_the_environment():
    attention, rope = "neighborhood_attention", "rmsnorm_split_rope"
    assert from_environment({"LTX_INDUCTOR_RULES": attention}).rules == (attention,)
    assert from_environment({"LTX_INDUCTOR_RULES": f" {attention}, {rope},"}).rules == (attention, rope)
    assert from_environment({"LTX_INDUCTOR_RULES": " "}).rules == RULES
    with pytest.raises(ValueError, match=f"LTX_INDUCTOR_RULES='{rope},rope': expected names out of {', '.join(RULES)}"):
        from_environment({"LTX_INDUCTOR_RULES": f"{rope},rope"})


def test_the_hook_of_import_torch_reads_a_flag_as_all_of_us_do():
    """It cannot import the package, which is what it is there to put off."""
    assert (ltx_inductor_autoload._TRUE, ltx_inductor_autoload._FALSE) == (config._TRUE, config._FALSE)


def test_options_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("LTX_INDUCTOR_CPU", "1")
    assert split_options(None, {})[0].cpu
    assert not split_options(None, {"ltx_inductor.cpu": False})[0].cpu
    with enabled():
        assert current_config().cpu


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"ltx_inductor.cpus": True},
            ValueError,
            ["'ltx_inductor.cpus'", *(f"ltx_inductor.{k}" for k in ("cpu", "dump"))],
        ),
        ({"ltx_inductor.cpu": 1}, TypeError, ["ltx_inductor.cpu=1", "True or False"]),
        ({"ltx_inductor.strict": "yes"}, TypeError, ["ltx_inductor.strict='yes'", "True or False"]),
        ({"ltx_inductor.dump": 3}, TypeError, ["ltx_inductor.dump=3", "folder"]),
        ({"ltx_inductor.rules": "rmsnorm_split_rope"}, TypeError, ["ltx_inductor.rules=", "list", *RULES]),
        ({"ltx_inductor.rules": 7}, TypeError, ["ltx_inductor.rules=7", "list"]),
        ({"ltx_inductor.rules": ["rope"]}, ValueError, ["'rope'", *RULES]),
    ],
)
def test_wrong_options_say_what_is_right(options, error, words):
    with pytest.raises(error) as raised:
        Config().with_options(options)
    for word in words:
        assert word in str(raised.value)


def test_wrong_environment():
    with pytest.raises(ValueError, match="LTX_INDUCTOR_CPU='maybe': expected one of 1, true"):
        from_environment({"LTX_INDUCTOR_CPU": "maybe"})
