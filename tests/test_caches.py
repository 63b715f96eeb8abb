"""Inductor's caches, in a second process: hits, the same result, the report; and misses where there has to be one."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import ltx_inductor
from ltx_inductor import kernel_needs
from ltx_inductor.config import Config
from ltx_inductor.joint_pass import LtxPass, PassChain
from ltx_inductor.rewrite.needs import KernelNeed
from tests import stand_in

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("test_caches")  # one worker: the module's fixture is expensive
NO_RULES = {"ltx_inductor.cpu": True, "ltx_inductor.rules": []}
STRICT = {"ltx_inductor.cpu": True, "ltx_inductor.strict": True}


def child(folder: Path, cases: dict[str, dict], stand_in: bool) -> dict[str, dict]:
    """Runs the cases in one fresh process on the cache in `folder`."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(folder / "code")}
    script = folder / "code" / "tests" / "cache_child.py"
    command = [sys.executable, str(script), str(folder), "yes" if stand_in else "no"]
    run = subprocess.run([*command, json.dumps(list(cases.values()))], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("ANSWER"))
    return dict(zip(cases, json.loads(line.removeprefix("ANSWER")), strict=True))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    for name in ("ltx_inductor", "csrc", "tests"):  # a copy, to be edited below
        shutil.copytree(ROOT / name, folder / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
    first = child(folder, {"first": {}}, stand_in=True)
    second = child(
        folder,
        {
            "second": {},
            "lines moved": {"lines_above": 5},
            "registered": {"backend": "registered"},
            "stock": {"backend": "inductor", "options": {}},
            "stock again": {"backend": "inductor", "options": {}},
            "report gone": {"delete": "ltx_inductor"},
        },
        stand_in=False,
    )
    third = child(
        folder,
        {
            "strict": {"options": STRICT},
            "no rules": {"options": NO_RULES},
            "no rules again": {"options": NO_RULES},
            "fx only": {"delete": "aotautograd"},
        },
        stand_in=True,
    )
    with open(folder / "code" / "ltx_inductor" / "contract.py", "a") as f:
        f.write("# edited\n")
    fourth = child(folder, {"edited": {}}, stand_in=True)
    return {**first, **second, **third, **fourth}


def test_the_first_process_fills_the_caches(answers):
    a = answers["first"]
    assert (a["aot"], a["fx"], a["rewritten"]) == ("miss", "miss", True)
    assert not a["report"]["cached"]
    assert a["report"]["counts"] == {stand_in.RULE: 1}


def graphs(answer, lines_above=0):
    """All that the report says of them but the time the pass took; with so many lines more above the model's code."""
    found = copy.deepcopy(answer["report"]["graphs"])
    for graph in found:
        graph["pass_ms"] = 0.0
        for item in (*graph["sites"], *graph["refusals"]):
            file, line = item["source"].split(":")
            item["source"] = f"{file}:{int(line) + lines_above}"
    return found


@pytest.mark.parametrize("case", ["second", "lines moved", "registered"])
def test_a_hit_has_the_rewrite_and_its_report(answers, case):
    """The child had no stand-in: had the pass run, nothing would have been rewritten."""
    a = answers[case]
    assert (a["aot"], a["rewritten"]) == ("hit", True)
    assert a["report"]["cached"]
    assert a["report"]["pass_ms"] == 0
    assert graphs(a) == graphs(answers["first"], lines_above=5 * (case == "lines moved"))
    assert a["report"]["counts"] == {stand_in.RULE: 1}
    assert a["report"]["notes"] == []


def test_a_hit_names_the_line_the_code_is_on_now(answers):
    line = [
        int(answers[c]["report"]["graphs"][0]["sites"][0]["source"].split(":")[1]) for c in ("first", "lines moved")
    ]
    assert line[1] == line[0] + 5


def test_a_lost_report_is_admitted(answers):
    a = answers["report gone"]
    assert (a["aot"], a["rewritten"]) == ("hit", True)
    assert a["report"]["graphs"] == []
    assert "not known" in a["report"]["notes"][0]


def test_stock_inductor_and_we_do_not_share(answers):
    assert (answers["stock"]["aot"], answers["stock"]["rewritten"]) == ("miss", False)
    assert (answers["stock again"]["aot"], answers["stock again"]["rewritten"]) == ("hit", False)
    assert (answers["strict"]["aot"], answers["strict"]["rewritten"]) == ("miss", True)


def test_another_option_misses(answers):
    assert (answers["strict"]["aot"], answers["strict"]["fx"]) == ("miss", "miss")
    assert not answers["strict"]["report"]["cached"]


def test_a_rule_that_is_switched_off_misses(answers):
    """And the graph is not rewritten; it has an entry of its own then."""
    first, again = answers["no rules"], answers["no rules again"]
    assert (first["aot"], first["fx"], first["rewritten"]) == ("miss", "miss", False)
    assert (again["aot"], again["rewritten"]) == ("hit", False)
    for a in (first, again):
        assert a["report"]["cached"] == (a is again)
        assert [g["sites"] for g in a["report"]["graphs"]] == [[]]
    assert graphs(again) == graphs(first)


def test_edited_sources_miss(answers):
    a = answers["edited"]
    assert (a["aot"], a["fx"], a["rewritten"]) == ("miss", "miss", True)
    assert not a["report"]["cached"]


def test_fx_graph_cache_alone_runs_the_pass(answers):
    a = answers["fx only"]
    assert (a["aot"], a["fx"], a["rewritten"]) == ("miss", "hit", True)
    assert not a["report"]["cached"]
    assert a["report"]["counts"] == {stand_in.RULE: 1}


@pytest.mark.parametrize("mine", [lambda graph: None, None])
def test_a_users_uncacheable_pass_bypasses_the_caches(mine, tmp_path, monkeypatch):
    """As it does without us; and without it, or with one that has an id, they are asked."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # other tests leave entries without a report
    old = stand_in.put_in()
    torch._dynamo.reset()
    counters.clear()
    options = {"ltx_inductor.cpu": True} | ({"joint_custom_pre_pass": mine} if mine else {})
    with torch.no_grad():
        torch.compile(stand_in.Model(), backend="ltx", options=options)(torch.ones(3, 8))
    stand_in.put_in(old)
    assert bool(counters["inductor"]["fxgraph_cache_bypass"]) == (mine is not None)
    assert bool(counters["aot_autograd"]["autograd_cache_bypass"]) == (mine is not None)
    assert ltx_inductor.last_report().count() == 1


class FakeKernels:
    """Says no to one head dim, and writes down what it was asked."""

    def __init__(self):
        self.asked = []

    def refusal(self, need):
        self.asked.append(need)
        return "no compiler" if need.head_dim == 48 else None

    def slower(self, need, size):
        return None

    def note(self, need):
        return None

    def proof(self, need):
        return "proved elsewhere"


def need(head_dim=64, device="cuda:1"):
    values = {"per_head": False, "contract": "bf16-chain", "layout": "bshd", "shared": True, "hidden": 4 * head_dim}
    dtypes = {"dtype": torch.bfloat16, "table_dtype": torch.float32}
    return KernelNeed(device=torch.device(device), head_dim=head_dim, **dtypes, **values)


def test_kernels_of_a_cached_graph_are_made_ready(monkeypatch):
    kernels = FakeKernels()
    remembering = kernel_needs.Remembering(kernels)
    for n in (need(), need(), need(48), need(device="cpu")):
        remembering.refusal(n)
    kept = json.loads(json.dumps(remembering.needs))
    assert len(kept) == 1
    monkeypatch.setattr(kernel_needs, "device_kernels", lambda *_: kernels)
    kernels.asked.clear()
    assert kernel_needs.ask_again(kept, [3, torch.ones(1, device="meta")]) == []
    assert kernels.asked == [need(device="meta")]
    assert kernel_needs.ask_again([{**kept[0], "head_dim": 48}], []) == [
        "a cached graph runs without its kernel: no compiler"
    ]
    assert kernel_needs.ask_again([], []) == []


def test_a_compile_asks_for_the_kernels_of_an_earlier_one(monkeypatch):
    """Whether or not the caches answer then; the pass itself is not on the road any more when they do."""
    kernels = FakeKernels()
    monkeypatch.setattr(kernel_needs, "device_kernels", lambda *_: kernels)
    monkeypatch.setattr("ltx_inductor.joint_pass.device_kernels", lambda *_: kernels)

    def asking(graph, config, kernels=None):
        kernels.refusal(need(80))
        return stand_in.rewrite_graph(graph, config)

    old = stand_in.put_in(asking)
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        kernels.asked.clear()
        with torch.no_grad():
            torch.compile(lambda x: x.relu() * 5, backend="ltx", options={"ltx_inductor.cpu": True})(torch.ones(7))
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert [n.head_dim for n in kernels.asked] == [80]
    stand_in.put_in(old)
    assert ltx_inductor.last_report().cached


def test_the_pass_can_be_pickled():
    import pickle

    chain = PassChain(LtxPass(Config(cpu=True)))
    assert pickle.loads(pickle.dumps(chain)).uuid() == chain.uuid()
