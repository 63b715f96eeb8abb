"""The store under fire with the real thing: processes that compile one configuration at once, or die while they do.

test_store.py has the same with a build that only sleeps. Here the compilers are those of the machine, behind scripts
that write down every compile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ltx_inductor.kernels import compilers, store

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    compilers.find_nvcc() is None or compilers.find_cc() is None, reason="needs nvcc and a C compiler"
)
CHILD = """
import hashlib, sys, torch
from ltx_inductor.kernels import rope
print("ready", flush=True)
sys.stdin.readline()
dtypes = {"dtype": torch.bfloat16, "table_dtype": torch.bfloat16}
missing = rope.prepare((9, 0), head_dim=64, hidden=512, contract="bf16-chain", per_head=False, **dtypes)
print(missing, *(hashlib.sha256(image).hexdigest() for image in rope._images.values()))
"""
SCRIPT = """#!/bin/sh
case "$1" in --version | -dumpversion) ;; *) echo {name} >> "{log}" ;; esac
exec "{path}" "$@"
"""


class Racetrack:
    """A cold cache, compilers that are counted, and processes that use them."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.log = folder / "cache", folder / "compiles"
        for name, found in (("nvcc", compilers.find_nvcc()), ("cc", compilers.find_cc())):
            assert found is not None
            script = folder / "bin" / name
            script.parent.mkdir(exist_ok=True)
            script.write_text(SCRIPT.format(name=name, log=self.log, path=found.path))
            script.chmod(0o755)
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "LTX_INDUCTOR_CACHE": str(self.cache)}
        self.env |= {"CUDA_HOME": str(folder), "CC": str(folder / "bin" / "cc"), "TMPDIR": str(folder)}

    def start(self) -> subprocess.Popen[str]:
        """A process that has imported everything, and waits for `go`."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", CHILD], env=self.env, start_new_session=True, **pipes)

    def compiles(self) -> list[str]:
        return sorted(self.log.read_text().split()) if self.log.exists() else []

    def artefacts(self) -> list[Path]:
        return [*self.cache.rglob("*.cubin"), *self.cache.rglob("*.so")]


@pytest.fixture
def track(tmp_path: Path) -> Racetrack:
    return Racetrack(tmp_path)


def wait(children: list[subprocess.Popen[str]]) -> None:
    for c in children:
        assert c.stdout is not None
        assert c.stdout.readline() == "ready\n"


def go(children: list[subprocess.Popen[str]]) -> None:
    for c in children:
        assert c.stdin is not None
        c.stdin.write("\n")
        c.stdin.flush()


def answers(children: list[subprocess.Popen[str]]) -> list[str]:
    """What they say, once all have ended well."""
    said = [c.communicate(timeout=120) for c in children]
    assert [c.returncode for c in children] == [0] * len(children), said
    return [out for out, _ in said]


def test_eight_processes_with_a_cold_cache_compile_once(track: Racetrack) -> None:
    children = [track.start() for _ in range(8)]
    try:
        wait(children)
        go(children)
        said = answers(children)
    finally:
        for c in children:
            c.kill()
    assert said[0].startswith("None ")
    assert set(said) == {said[0]}
    assert track.compiles() == ["cc", "nvcc"]
    assert sorted(p.suffix for p in track.artefacts()) == [".cubin", ".so"]
    assert all(store.read(p) for p in track.artefacts())
    assert not list(track.cache.rglob("*.tmp"))


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_process_killed_while_it_compiles_is_no_obstacle(track: Racetrack, kill: Callable[[int, int], None]) -> None:
    """Alone, so that the compiler goes on without it; and with its compiler."""
    victim, next_one = track.start(), track.start()
    try:
        wait([victim, next_one])
        go([victim])
        while not track.compiles():
            assert victim.poll() is None
            time.sleep(0.01)
        kill(victim.pid, signal.SIGKILL)
        assert victim.wait(60) == -signal.SIGKILL
        assert track.compiles() == ["nvcc"]
        assert not track.artefacts()
        start = time.monotonic()
        go([next_one])
        (said,) = answers([next_one])
        assert time.monotonic() - start < store.LOCK_TIMEOUT_S / 5
    finally:
        for c in (victim, next_one):
            c.kill()
    assert said.startswith("None ")
    assert track.compiles() == ["cc", "nvcc", "nvcc"]
    assert all(store.read(p) for p in track.artefacts())
    assert not list(track.cache.rglob("*.tmp"))
