"""Inductor's caches, in a second process: hits, the same result, the report; and misses where there has to be one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import ltx_inductor
from ltx_inductor import cache_id, kernel_needs, kernels, report_store
from ltx_inductor.config import Config
from ltx_inductor.joint_pass import LtxPass, PassChain
from ltx_inductor.rewrite.drawn import Drawing, DrawnNode
from ltx_inductor.rewrite.needs import KernelNeed
from ltx_inductor.rewrite.report import GraphReport, Refusal, Site
from tests import stand_in

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("test_caches")  # one worker: the module's fixture is expensive
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
    third = child(folder, {"strict": {"options": STRICT}, "fx only": {"delete": "aotautograd"}}, stand_in=True)
    with open(folder / "code" / "ltx_inductor" / "contract.py", "a") as f:
        f.write("# edited\n")
    fourth = child(folder, {"edited": {}}, stand_in=True)
    return {**first, **second, **third, **fourth}


def test_the_first_process_fills_the_caches(answers):
    a = answers["first"]
    assert (a["aot"], a["fx"], a["rewritten"]) == ("miss", "miss", True)
    assert not a["report"]["cached"]
    assert a["report"]["counts"] == {stand_in.RULE: 1}


@pytest.mark.parametrize("case", ["second", "lines moved", "registered"])
def test_a_hit_has_the_rewrite_and_its_report(answers, case):
    """The child had no stand-in: had the pass run, nothing would have been rewritten."""
    a = answers[case]
    assert (a["aot"], a["rewritten"]) == ("hit", True)
    assert a["report"]["cached"]
    assert a["report"]["pass_ms"] == 0
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


def test_edited_sources_miss(answers):
    a = answers["edited"]
    assert (a["aot"], a["fx"], a["rewritten"]) == ("miss", "miss", True)
    assert not a["report"]["cached"]


def test_fx_graph_cache_alone_runs_the_pass(answers):
    a = answers["fx only"]
    assert (a["aot"], a["fx"], a["rewritten"]) == ("miss", "hit", True)
    assert not a["report"]["cached"]
    assert a["report"]["counts"] == {stand_in.RULE: 1}


def test_the_id_covers_options():
    ids = {cache_id.cache_id(c) for c in (Config(), Config(cpu=True), Config(strict=True), Config(rules=()))}
    assert len(ids) == 4
    assert LtxPass(Config(dump="somewhere")).uuid() is None


def test_the_id_covers_versions_and_schemas(monkeypatch):
    before = cache_id.cache_id(Config())
    changes = {
        "__version__": "another",
        "source_digest": lambda: "another",
        "kernel_digest": lambda: "another",
        "_schemas": lambda: ["another"],
    }
    for name, value in changes.items():
        with monkeypatch.context() as m:
            m.setattr(cache_id, name, value)
            assert cache_id.cache_id(Config()) != before, name
    monkeypatch.setattr(torch, "__version__", "another")
    assert cache_id.cache_id(Config()) != before


def test_the_id_covers_every_source(tmp_path, monkeypatch):
    """Copies of the package at two places have one digest; a changed byte anywhere in the rewrite makes another."""
    digests = {cache_id.source_digest.__wrapped__()}
    for where in ("a", "b"):
        package = tmp_path / where / "ltx_inductor"
        for source in (ROOT / "ltx_inductor").rglob("*.py"):
            target = package / source.relative_to(ROOT / "ltx_inductor")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        monkeypatch.setattr(cache_id, "_PACKAGE", package)
        digests.add(cache_id.source_digest.__wrapped__())
    assert len(digests) == 1
    for name in ("rewrite/report.py", "rewrite/dump.py", "ops/rope.py", "contract.py", "config.py", "joint_pass.py"):
        source = package / name
        content = source.read_bytes()
        source.write_bytes(content + b"#")
        digests.add(cache_id.source_digest.__wrapped__())
        source.write_bytes(content)
    assert len(digests) == 7


def test_the_id_covers_kernel_sources(tmp_path, monkeypatch):
    monkeypatch.delattr(kernels, "source_digest", raising=False)
    monkeypatch.setattr(cache_id, "_CSRC", (tmp_path,))
    seen = {cache_id.kernel_digest.__wrapped__()}
    for text in ("one", "two"):
        (tmp_path / "kernel.cu").write_text(text)
        seen.add(cache_id.kernel_digest.__wrapped__())
    assert len(seen) == 3
    monkeypatch.setattr(kernels, "source_digest", lambda: "theirs", raising=False)
    assert cache_id.kernel_digest.__wrapped__() == "theirs"


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


def capture(function, *args, **kwargs):
    """(Dynamo's graph, its inputs), and the text the fingerprint is made of."""
    found = []

    def backend(gm, example_inputs):
        found.append(list(report_store._lines(gm, example_inputs, "id")))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, **kwargs)(*args)
    return found[0]


def test_the_fingerprint_tells_graphs_apart():
    norm = nn.RMSNorm(8)
    x = torch.ones(3, 8)
    variants = {
        "itself": capture(lambda x: norm(x).relu(), x),
        "input shape": capture(lambda x: norm(x).relu(), torch.ones(4, 8)),
        "input stride": capture(lambda x: norm(x).relu(), torch.ones(8, 3).t()),
        "input dtype": capture(lambda x: norm(x).relu(), x.double()),
        "dynamic": capture(lambda x: norm(x).relu(), x, dynamic=True),
        "op": capture(lambda x: norm(x).tanh(), x),
        "constant": capture(lambda x: norm(x).relu() * 2, x),
        "other constant": capture(lambda x: norm(x).relu() * 3, x),
        "order": capture(lambda x: norm(x.relu()), x),
    }
    with torch.no_grad():
        variants["no grad"] = capture(lambda x: norm(x).relu(), x)
    with torch.autocast("cpu", torch.bfloat16):
        variants["autocast"] = capture(lambda x: norm(x).relu(), x)
    texts = ["\n".join(v) for v in variants.values()]
    assert len(set(texts)) == len(texts)
    again = capture(lambda x: norm(x).relu(), x)
    assert again == variants["itself"]
    assert not any("0x" in line for text in texts for line in text.splitlines())


def example() -> report_store.Kept:
    site = Site("rule", "op", "q", 0, "model.py:3", {"x": "[1, s0]"}, "bf16-chain", "add_1")
    graph = GraphReport([site], [Refusal("rule", "because", "model.py:9")], 7, 1.5, notes=["a note"])
    node = DrawnNode("x", "input", "aten.add.Tensor", "", "f32[1]", (), "model.py:9 in f: x + 1")
    graph.drawings.append(Drawing((node,), (replace(node, source=""),), ""))
    return report_store.Kept([graph], ["model.py:3", "model.py:9"], [{"head_dim": 64}])


def test_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    kept = example()
    assert report_store.load("abcd", []) is None
    report_store.save("abcd", kept)
    assert report_store.load("abcd", kept.frames) == kept
    moved = report_store.load("abcd", ["model.py:5", "model.py:11"]).graphs[0]
    assert (moved.sites[0].source, moved.refusals[0].source) == ("model.py:5", "model.py:11")
    assert [n.source for n in (*moved.drawings[0].before, *moved.drawings[0].after)] == ["model.py:11 in f: x + 1", ""]
    assert [p.name for p in report_store.folder().rglob("*") if p.is_file()] == ["abcd.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 0}', '{"format": 1, "frames": [], "graphs": [{}]}'])
def test_a_broken_report_counts_as_absent(tmp_path, monkeypatch, content):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    report_store.save("abcd", example())
    report_store._path("abcd").write_text(content)
    assert report_store.load("abcd", []) is None


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    report_store.save("abcd", example())
    assert report_store.load("abcd", []) is None


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
