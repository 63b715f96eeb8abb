"""Building: which compiler is used, what is found again, and what is said when nothing can be built."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ltx_inductor.kernels import build, compilers, fna, rope, rope_axial, rope_specs, sources, store
from ltx_inductor.kernels.compilers import Compiler

needs_nvcc = pytest.mark.skipif(compilers.find_nvcc() is None, reason="no nvcc")
needs_nvrtc = pytest.mark.skipif(compilers.find_nvrtc() is None, reason="no NVRTC")
needs_cc = pytest.mark.skipif(compilers.find_cc() is None, reason="no C compiler")
SPEC = rope_specs.Spec("bf16-chain", torch.bfloat16, torch.bfloat16, 64, 512, False)
KERNEL = {
    "dtype": torch.bfloat16,
    "table_dtype": torch.bfloat16,
    "head_dim": 64,
    "hidden": 512,
    "contract": "bf16-chain",
    "per_head": False,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_kept", {})
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(rope, "_images", {})
    monkeypatch.setattr(rope, "_accepted", set())
    monkeypatch.setattr(rope, "_library", functools.lru_cache(maxsize=1)(rope._library.__wrapped__))
    monkeypatch.setattr(rope, "_registered", [False])  # the ops stay with the launcher of the process


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(compilers, f"find_{name}", lambda: None)


@pytest.mark.parametrize("spelling", [(9, 0), "9.0", "9.0a", "90", "90a", "sm_90", "sm_90a"])
def test_spellings_of_an_arch(spelling: str | tuple[int, int]) -> None:
    assert build.arch_number(spelling) == "90"


@pytest.mark.parametrize("wrong", ["7.5", "hopper", "", "sm_2", (7, 5)])
def test_an_arch_that_is_none(wrong: str | tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected a compute capability"):
        build.arch_number(wrong)


def test_two_digit_major() -> None:
    assert build.arch_number("12.0") == build.arch_number((12, 0)) == "120"
    assert build.arch_number("13.0") == build.arch_number((13, 0)) == "130"


@needs_nvcc
@needs_cc
def test_an_arch_that_the_compiler_does_not_know_is_a_sentence() -> None:
    reason = rope.prepare((99, 0), **KERNEL)
    assert reason is not None
    assert reason.startswith(
        "rope-bf16-chain-bf16-bf16-d64-n512-bshd-separate cannot be built for compute capability 99.0"
    )
    assert "sm_990" in reason


@needs_nvcc
def test_a_finished_artefact_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    image = build.cubin(SPEC.name, "90", SPEC.flags)
    assert image.startswith(b"\x7fELF")
    without(monkeypatch, "nvcc", "nvrtc")
    assert build.cubin(SPEC.name, "90", SPEC.flags) == image
    with pytest.raises(build.MissingToolError, match=r"install the CUDA toolkit, or NVRTC"):
        build.cubin(SPEC.name, "89", SPEC.flags)


@needs_nvcc
def test_a_truncated_artefact_is_built_again() -> None:
    image = build.cubin(SPEC.name, "90", SPEC.flags)
    (path,) = store.cache_root().rglob("*.cubin")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(build.MissingToolError, match="not in the cache"):
        build.cubin(SPEC.name, "90", SPEC.flags, build=False)
    assert build.cubin(SPEC.name, "90", SPEC.flags) == image


@needs_nvrtc
def test_nvrtc_stands_in_for_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "nvcc")
    assert build.cubin(SPEC.name, "90", SPEC.flags).startswith(b"\x7fELF")
    (path,) = store.cache_root().rglob("*.cubin")
    assert ".nvrtc-" in path.name


@needs_nvcc
def test_archs_share_a_cache_and_not_their_artefacts() -> None:
    """The low byte of e_flags, or the next one in later ELF ABIs, is the compute capability."""
    images = {arch: build.cubin(SPEC.name, arch, SPEC.flags) for arch in ("80", "90")}
    assert len(list(store.cache_root().rglob("*.cubin"))) == 2
    for arch, image in images.items():
        assert int(arch) in image[48:50]
        assert build.cubin(SPEC.name, arch, SPEC.flags, build=False) == image
    with pytest.raises(build.MissingToolError):
        build.cubin(SPEC.name, "86", SPEC.flags, build=False)


@needs_nvrtc
def test_nvcc_that_fails_is_replaced_by_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "find_nvcc", lambda: Compiler("nvcc", "/bin/false", "0.0.0"))
    assert build.cubin(SPEC.name, "90", SPEC.flags).startswith(b"\x7fELF")


def test_the_output_of_a_failing_compiler_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "find_nvcc", lambda: Compiler("nvcc", "/bin/false", "0.0.0"))
    without(monkeypatch, "nvrtc")
    with pytest.raises(build.BuildError, match="failed with exit code 1"):
        build.cubin(SPEC.name, "90", SPEC.flags)


@needs_nvcc
@needs_cc
def test_prepare_is_idempotent_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rope.prepare((9, 0), **KERNEL) is None
    without(monkeypatch, "nvcc", "nvrtc", "cc")
    assert rope.prepare((9, 0), **KERNEL) is None
    reason = rope.prepare((9, 0), **{**KERNEL, "hidden": 1024})
    assert reason is not None
    assert "install" in reason


@needs_nvcc
def test_prepare_without_a_c_compiler_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "cc")
    reason = rope.prepare((9, 0), **KERNEL)
    assert reason is not None
    assert reason.startswith("no C compiler")


@needs_nvcc
@needs_cc
def test_a_cache_that_cannot_be_written_costs_other_processes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path / "file"))
    compiled: list[list[str]] = []
    run = compilers._run
    monkeypatch.setattr(compilers, "_run", lambda command: compiled.append(command) or run(command))
    for _ in range(2):
        assert rope.prepare((9, 0), **KERNEL) is None
        monkeypatch.setattr(rope, "_images", {})  # even then it is not compiled again
    assert build.launcher() == build.launcher()  # one file: the loader would take another for another library
    assert len(compiled) == 2  # the kernels and the launcher
    assert caplog.text.count("the kernel cache cannot be written") == 1
    assert rope._library().get_function("rope_counted")() != 0
    monkeypatch.setattr(rope_specs, "PRODUCTION", ())
    with pytest.raises(OSError, match="nothing was kept"):
        build.prebuild(["8.0"])


@needs_nvcc
@needs_cc
def test_ninja_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the program, which tvm-ffi's own builds call, nor torch's way to it."""
    called = tmp_path / "called"
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text(f'#!/bin/sh\ntouch "{called}"\nexit 1\n')
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ninja.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "ninja", None)
    assert shutil.which("ninja") == str(ninja)
    assert rope.prepare((9, 0), **KERNEL) is None
    assert fna.cubin((3, 5, 5)).startswith(b"\x7fELF")
    assert not called.exists()


@needs_cc
def test_the_launcher_loads_and_refuses_wrong_arguments() -> None:
    library = rope._library()
    with pytest.raises(ValueError, match="rope_open takes 11 arguments"):
        library.get_function("rope_open")(1)
    with pytest.raises(ValueError, match="rope_launch takes 17 arguments"):
        library.get_function("rope_launch")(1)


@needs_nvcc
@needs_cc
def test_prebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_specs, "PRODUCTION", (SPEC,))
    monkeypatch.setattr(fna, "PRODUCTION", ((3, 5, 5),))
    monkeypatch.setattr(rope_axial, "PRODUCTION", (rope_axial.Spec("fp32-rope", SPEC.dtype, (8, 8)),))
    built = build.prebuild(["9.0a", "8.0"])
    assert [arch for arch, _ in built] == ["9.0a", "8.0"]
    names = sorted(f.name for f in Path(built[0][1]).glob("*.cubin"))
    kinds = [(n.split("-")[0:2], re.search(r"sm_\d+", n)[0]) for n in names]  # type: ignore[index]
    axial = [arch for (_, kind), arch in kinds if kind == "axial"]
    assert (len(kinds), axial) == (5, ["sm_80", "sm_90"])
    with pytest.raises(ValueError, match="expected a compute capability"):
        build.prebuild(["sm_20"])


def test_toolchain_names_everything() -> None:
    assert set(build.toolchain()) == {"nvcc", "nvrtc", "cc", "tvm_ffi", "cache"}


def test_the_digest_is_of_contents_not_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.source_digest.__wrapped__()
    copy = tmp_path / "elsewhere"
    shutil.copytree(sources.csrc_dir(), copy)
    monkeypatch.setattr(sources, "csrc_dir", lambda: copy)
    assert sources.source_digest.__wrapped__() == before
    for file in copy.iterdir():
        os.utime(file, (0, 0))
    assert sources.source_digest.__wrapped__() == before
    (copy / "rope_math.cuh").write_text((copy / "rope_math.cuh").read_text() + "\n")
    os.utime(copy / "rope_math.cuh", (0, 0))  # older than what was built from it
    assert sources.source_digest.__wrapped__() != before


def test_a_forked_process_can_do_everything(tmp_path: Path) -> None:
    """As the workers of a data loader or of a server are made: importing has started no thread and no CUDA context."""
    code = """
import os, threading, torch, ltx_inductor
before = threading.active_count()
pid = os.fork()
assert threading.active_count() == before == 1
x, t = torch.ones(1, 3, 64, dtype=torch.bfloat16), torch.ones(1, 2, 3, 16, dtype=torch.bfloat16)
torch.ops.ltx_inductor.rmsnorm_split_rope(x, None, t, t, 1e-6, 2, "bf16-chain")
assert ltx_inductor.stats()["rmsnorm_split_rope"]["reference"] == 1
assert not torch.cuda._is_in_bad_fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_touches_neither_cuda_nor_tvm_ffi() -> None:
    code = (
        "import sys, torch, ltx_inductor.kernels, ltx_inductor.kernels.rope\n"
        "assert not torch.cuda.is_initialized() and 'tvm_ffi' not in sys.modules and 'filelock' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


TUNED = [s for s in rope_specs.PRODUCTION if s.head_dim == 128]


def resources(spec: rope_specs.Spec, arch: str, tmp_path: Path) -> str:
    nvcc = compilers.find_nvcc()
    assert nvcc is not None
    command = [nvcc.path, "-cubin", f"-arch=sm_{arch}", "-O3", "-Xptxas", "-v", *sources.DEVICE_FLAGS, *spec.flags]
    done = subprocess.run(
        [*command, str(sources.csrc_dir() / "rope.cu"), "-o", str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "warning" not in done.stderr.lower()
    return done.stderr


@needs_nvcc
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "103", "120", "121"])
def test_every_arch_compiles_without_spills(arch: str, tmp_path: Path) -> None:
    for spec in (TUNED[0], replace(TUNED[-2], layout="bhsd")):
        text = resources(spec, arch, tmp_path)
        assert set(re.findall(r"(\d+) bytes spill", text)) == {"0"}
        assert set(re.findall(r"(\d+) bytes stack", text)) == {"0"}


@needs_nvcc
@pytest.mark.parametrize("spec", rope_specs.PRODUCTION, ids=lambda s: s.name)
def test_production_kernels_do_not_spill(spec: rope_specs.Spec, tmp_path: Path) -> None:
    assert set(re.findall(r"(\d+) bytes spill", resources(spec, "90", tmp_path))) == {"0"}


OTHERS = [
    rope_specs.Spec("fp32-all-result-muladd", torch.float16, torch.float32, 256, 8192, False, "bhsd", True),
    rope_specs.Spec("fp32-rope", torch.bfloat16, torch.float32, 40, 16360, False, "bshd", True),
    rope_specs.Spec("fp32-result-muladd", torch.float16, torch.float16, 248, 248, True, "bhsd", True),
    rope_specs.Spec("bf16-chain", torch.float16, torch.float16, 32, 32, True, "bshd", False),
]


@needs_nvcc
@pytest.mark.parametrize("spec", OTHERS, ids=lambda s: s.name)
def test_corners_compile(spec: rope_specs.Spec, tmp_path: Path) -> None:
    resources(spec, "90", tmp_path)
