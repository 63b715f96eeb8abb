"""What doctor says of GPUs, rules and packages that are not as this machine has them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ltx_inductor import doctor, readiness
from ltx_inductor.config import RULES
from ltx_inductor.kernels import build, source_digest, store

ROOT = Path(__file__).parent.parent
ROPE, NEIGHBORHOOD = "rmsnorm_split_rope", "neighborhood_attention"
NOTHING = {"nvcc": None, "nvrtc": None, "cc": None, "tvm_ffi": None, "cache": "folder"}
ALL = {"nvcc": {"path": "p", "version": "13"}, "nvrtc": None, "cc": {"path": "p", "version": "12"}, "tvm_ffi": "1"}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that gives the machine GPUs and tools; returns (exit status, findings by name)."""
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "_natten", lambda: iter(()))

    def found(*archs, tools=ALL):
        monkeypatch.setattr(build, "toolchain", lambda: tools)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(archs))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(archs))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: archs[getattr(i, "index", i)])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: f"GPU {i}")
        status = doctor.examine(Console(file=io.StringIO()))
        return status, {f.name: f for f in doctor.find()}

    return found


def test_every_rule_is_known():
    assert set(readiness._KERNELS) == set(RULES)


def test_without_a_gpu_nothing_is_wrong_and_the_lines_say_so(machine):
    status, lines = machine(tools=NOTHING)
    assert status == 0
    assert all(lines[rule].found == "no GPU to run on" and lines[rule].cost for rule in RULES)


def test_hopper_runs_everything(machine):
    status, lines = machine((9, 0), (9, 0))
    assert status == 0
    assert all((lines[rule].found, lines[rule].cost) == ("runs on sm_90", "") for rule in RULES)


@pytest.mark.parametrize("arch", [(10, 0), (8, 0)])
def test_a_gpu_that_some_rules_have_no_kernel_for(machine, arch):
    status, lines = machine(arch)
    assert status == 0
    assert lines[ROPE].ok
    assert lines[NEIGHBORHOOD].found == "runs on no GPU here"
    assert f"compute capability {arch[0]}.{arch[1]}" in lines[NEIGHBORHOOD].cost


def test_a_gpu_that_no_rule_has_a_kernel_for(machine):
    status, lines = machine((7, 5))
    assert status == 1
    assert "compute capability 7.5" in lines[ROPE].cost
    assert all(lines[rule].vital for rule in RULES)
    status, lines = machine((7, 5), (9, 0))
    assert (status, lines[ROPE].found) == (0, "runs on sm_90")
    assert lines[ROPE].cost.startswith("sm_75: ")


def test_a_gpu_without_tools(machine, tmp_path):
    status, lines = machine((9, 0), tools=NOTHING)
    assert status == 1
    assert "needs a CUDA compiler, a C compiler, tvm_ffi" in lines[ROPE].cost
    assert "needs a CUDA compiler, and nothing prebuilt" in lines[NEIGHBORHOOD].cost
    store.publish(tmp_path / source_digest()[:16] / "fna-11x11x11-sm_90.nvcc-13.cubin", b"1")
    status, lines = machine((9, 0), tools=NOTHING)
    assert (status, lines[NEIGHBORHOOD].ok, lines[ROPE].ok) == (0, True, False)
    store.publish(tmp_path / source_digest()[:16] / "rope-x-sm_90.nvcc-13.cubin", b"1")
    store.publish(tmp_path / source_digest()[:16] / "launcher-x.so", b"1")
    _, lines = machine((9, 0), tools=NOTHING | {"tvm_ffi": "1"})
    assert lines[ROPE].ok


def test_a_package_without_metadata(monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", none)
    assert doctor._package("natten", "cost", "do") == doctor.Finding("natten", "there, of unknown version")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import ltx_no_such_package", "ModuleNotFoundError: No module named 'ltx_no_such_package'"),
        ("raise OSError('libcudart.so.13 is missing\\nand a second line')", "OSError: libcudart.so.13 is missing;"),
        ("raise SystemExit('no')", "no;"),
    ],
)
def test_a_natten_that_cannot_be_imported(monkeypatch, code, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.21.7")
    monkeypatch.setattr(doctor, "_ASK_NATTEN", code)
    (finding,) = doctor._natten()
    assert not finding.ok
    assert f"it cannot be imported: {said}" in finding.cost


def test_what_it_advises_to_install_is_what_the_package_declares():
    """With an index that does not have ltx_inductor, `pip install 'ltx_inductor[x]'` would not work."""
    declared = (ROOT / "pyproject.toml").read_text()
    for command in (doctor._TVM_FFI, doctor._TILELANG, doctor._NATTEN, doctor._DEMO):
        assert "ltx_inductor" not in command
        for wanted in command.removeprefix("pip install ").replace("'", "").split():
            name, _, version = wanted.partition("==")
            if version:
                assert re.search(rf'"{name}[=>]={re.escape(version)}"', declared), wanted
            else:
                assert f'"{wanted}"' in declared, wanted
