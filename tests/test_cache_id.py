"""The id under which Inductor's caches keep our graphs: what changes it, and what must not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from ltx_inductor import cache_id, kernels
from ltx_inductor.config import RULES, Config
from ltx_inductor.joint_pass import LtxPass
from ltx_inductor.kernels import proofs

ROOT = Path(__file__).parent.parent


SOURCES = (
    *("rewrite/report.py", "rewrite/dump.py", "ops/rope.py", "kernels/rope.py", "kernels/choice.py"),
    *("contract.py", "config.py", "joint_pass.py", "kernel_needs.py", "lowering.py"),
)
OTHER = {  # than the default, for every option
    "rules": ((), RULES[:1], RULES[::-1]),
    "cpu": (True,),
    "strict": (True,),
    "exact": (True,),
    "trust_block_mask": (True,),
    "verify": ("always", "off"),
    "profit": ("any",),
}


def test_the_id_covers_every_option():
    assert {*OTHER, "dump"} == {f.name for f in fields(Config)}
    configs = [Config(), *(Config(**{name: value}) for name, values in OTHER.items() for value in values)]
    ids = {cache_id.cache_id(c): c for c in configs}
    assert list(ids.values()) == configs


def test_dumps_are_no_part_of_the_id_and_bypass_the_caches():
    assert cache_id.cache_id(Config(dump="somewhere")) == cache_id.cache_id(Config())
    assert LtxPass(Config(dump="somewhere")).uuid() is None


def test_the_id_covers_whether_kernels_can_be_built(monkeypatch):
    """A graph that was left alone for want of a compiler is compiled anew when there is one; of TileLang if `exact`."""

    def ids(can_build, tilelang):
        monkeypatch.setattr(cache_id, "_can_build", lambda: can_build)
        monkeypatch.setattr(cache_id.importlib.util, "find_spec", lambda name: object() if tilelang else None)
        return [cache_id.cache_id(Config(exact=exact)) for exact in (False, True)]

    nothing, compiler, tilelang = ids(False, False), ids(True, False), ids(False, True)
    assert len({*nothing, *compiler}) == 4
    assert nothing[0] == tilelang[0]
    assert nothing[1] != tilelang[1]


def test_the_id_covers_kernels_that_failed(tmp_path, monkeypatch):
    """The graph that is left unfused where one fails is for that process: the next tries the kernel itself."""
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    before = cache_id.cache_id(Config())

    def settle(refusal):
        return proofs.settle("na3d", "the kernel", lambda: {"refusal": refusal}, lambda: None, lambda sentence: None)

    assert settle(None) is None
    assert cache_id.cache_id(Config()) == before
    assert settle("it is wrong") == "it is wrong"
    after = cache_id.cache_id(Config())
    assert after != before
    settle("it is wrong again")
    assert cache_id.cache_id(Config()) == after  # the same kernel: no process after the second pays


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
    for name in SOURCES:
        source = package / name
        content = source.read_bytes()
        source.write_bytes(content + b"#")
        assert cache_id.source_digest.__wrapped__() not in digests, name
        source.write_bytes(content)


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
