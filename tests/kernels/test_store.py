"""The artefact store: atomic, sealed, built once, and never stuck."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import filelock
import pytest

from ltx_inductor.kernels import store


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_kept", {})
    monkeypatch.setattr(store, "_warned", set())


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


PAYLOAD = b"payload" * 1000
FORK = multiprocessing.get_context("fork")  # the children only touch files


def _build_slowly(path: Path, seconds: float) -> None:
    def build() -> bytes:
        with open(path.parent / "log", "a") as file:
            file.write("built\n")
        time.sleep(seconds)
        return PAYLOAD

    assert store.read_or_build(path, build) == PAYLOAD


def _started(path: Path, seconds: float) -> BaseProcess:
    """A process that is in the middle of its build, and holds the lock."""
    worker = FORK.Process(target=_build_slowly, args=(path, seconds))
    worker.start()
    while not (path.parent / "log").exists():
        time.sleep(0.01)
    return worker


def test_processes_that_want_the_same_artefact_build_it_once(tmp_path: Path) -> None:
    workers = [FORK.Process(target=_build_slowly, args=(tmp_path / "kernel.cubin", 0.3)) for _ in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0] * 8
    assert (tmp_path / "log").read_text() == "built\n"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_process_killed_in_the_middle_of_a_build_leaves_no_lock_and_no_artefact(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    worker = _started(path, 60)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)
    assert store.read(path) is None
    start = time.monotonic()
    assert store.read_or_build(path, lambda: PAYLOAD, timeout_s=30) == PAYLOAD
    assert time.monotonic() - start < 10


def test_a_stopped_process_that_holds_the_lock_is_waited_for_only_so_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kernel.cubin"
    worker = _started(path, 1)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        assert store.read_or_build(path, lambda: PAYLOAD, timeout_s=0.2) == PAYLOAD
        assert "may hang: building without it" in caplog.text
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    worker.join(60)
    assert worker.exitcode == 0
    assert store.read(path) == PAYLOAD


def _with_a_full_disk(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # a write beyond it fails, as it does on a full disk
    with pytest.raises(OSError):
        store.publish(path, PAYLOAD)
    assert list(path.parent.iterdir()) == []
    assert store.read_or_build(path, lambda: PAYLOAD) == PAYLOAD
    assert not path.exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    worker = FORK.Process(target=_with_a_full_disk, args=(tmp_path / "kernel.cubin",))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_os_error_of_publish_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="ermission"):
        store.publish(tmp_path / "a" / "kernel.cubin", b"payload")
    assert store.read_or_build(tmp_path / "a" / "kernel.cubin", lambda: b"payload") == b"payload"


def test_what_cannot_be_published_is_built_once_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    paths = [tmp_path / "file" / "cache" / name for name in ("a.so", "b.so")]
    built = []
    for path in (*paths, *paths):
        assert store.read_or_build(path, lambda: built.append(1) or b"payload") == b"payload"
    assert len(built) == 2
    assert caplog.text.count("the kernel cache cannot be written") == 1
    assert store.unpublished() == paths
    copy = store.as_file(paths[0])
    assert copy == store.as_file(paths[0])
    assert copy.read_bytes().startswith(b"payload")
    assert copy.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_published_is_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    store.read_or_build(path, lambda: b"payload")
    assert store.as_file(path) == path
    assert store.unpublished() == []


def test_the_environment_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path / "here"))
    assert store.cache_root() == tmp_path / "here"
    monkeypatch.delenv("LTX_INDUCTOR_CACHE")
    assert store.cache_root().name == "ltx_inductor"
