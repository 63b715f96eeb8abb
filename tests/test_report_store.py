"""Reports on disk: the key, the file, and what becomes of damaged files, full disks and folders of others."""

from __future__ import annotations

import errno
import io
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ltx_inductor import report_store
from ltx_inductor.rewrite.drawn import Drawing, DrawnNode
from ltx_inductor.rewrite.report import GraphReport, Refusal, Site


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


def files() -> list[Path]:
    return [p for p in report_store.folder().rglob("*") if p.is_file()]


def test_a_report_can_be_read_by_others(tmp_path, monkeypatch):
    """A shared cache has graphs of several users: mkstemp alone would keep their reports from each other."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    report_store.save("abcd", example())
    (file,) = files()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize("where", ["write", "close", "rename"])
def test_a_full_disk_is_left_as_it_was(where, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(io.TextIOWrapper):
        write = full if where == "write" else io.TextIOWrapper.write

        def close(self):
            super().close()
            if where == "close":
                full()

    with monkeypatch.context() as patch:
        patch.setattr(report_store.os, "fdopen", lambda handle, mode: Full(io.FileIO(handle, mode)))
        if where == "rename":
            patch.setattr(report_store.os, "replace", full)
        report_store.save("abcd", example())
    assert files() == []
    assert "No space left on device" in caplog.text
