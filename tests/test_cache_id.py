"""The id under which Inductor's caches keep our graphs: what changes it, and what must not."""

from __future__ import annotations

from pathlib import Path

import torch

from ltx_inductor import cache_id, kernels
from ltx_inductor.config import Config
from ltx_inductor.joint_pass import LtxPass

ROOT = Path(__file__).parent.parent


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
