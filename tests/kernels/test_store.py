"""The artefact store: atomic, sealed, built once, and never stuck."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import filelock
import pytest

from ltx_inductor.kernels import store


def test_round_trip_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kernel.cubin"
    store.publish(path, b"payload")
    assert store.read(path) == b"payload"
    assert [f.name for f in path.parent.iterdir()] == ["kernel.cubin"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:5], lambda b: b"", lambda b: b"X" + b[1:], lambda b: b + b"\0"]
)
def test_damaged_artefacts_are_built_again(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "kernel.cubin"
    store.publish(path, b"payload")
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert store.read(path) is None
    assert store.read_or_build(path, lambda: b"again") == b"again"
    assert store.read(path) == b"again"


def test_a_finished_artefact_is_not_built(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    store.publish(path, b"payload")

    def fail() -> bytes:
        raise AssertionError("built although it was there")

    assert store.read_or_build(path, fail) == b"payload"


def test_a_failed_build_leaves_nothing_and_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"

    def fail() -> bytes:
        raise RuntimeError("compiler")

    with pytest.raises(RuntimeError, match="compiler"):
        store.read_or_build(path, fail)
    assert not path.exists()
    assert store.read_or_build(path, lambda: b"ok", timeout_s=1) == b"ok"


def test_a_lock_that_is_never_released_only_costs_time(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    with filelock.FileLock(str(path) + ".lock"):
        start = time.monotonic()
        assert store.read_or_build(path, lambda: b"payload", timeout_s=0.2) == b"payload"
        assert time.monotonic() - start < 5
    assert store.read(path) == b"payload"


def _build_slowly(path: str, log: str) -> None:
    def build() -> bytes:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return b"payload" * 1000

    assert store.read_or_build(Path(path), build) == b"payload" * 1000


def test_processes_that_want_the_same_artefact_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "kernel.cubin"), str(tmp_path / "log"))
    workers = [context.Process(target=_build_slowly, args=arguments) for _ in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="ermission"):
        store.read_or_build(tmp_path / "a" / "kernel.cubin", lambda: b"payload")


def test_the_environment_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path / "here"))
    assert store.cache_root() == tmp_path / "here"
    monkeypatch.delenv("LTX_INDUCTOR_CACHE")
    assert store.cache_root().name == "ltx_inductor"
