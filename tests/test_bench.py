"""`bench`: what it skips, that a script that fails costs no other's table, and where it finds the scripts."""

from __future__ import annotations

import json
import types

import pytest
import torch

from ltx_inductor import bench, cli

HOST = {"host_us": {"a call": 4.0}}


@pytest.fixture
def clone(monkeypatch, tmp_path):
    """The current folder is a clone whose scripts write what their names say; the package is a wheel's."""
    (tmp_path / "benchmarks").mkdir()
    for name in bench.SCRIPTS:
        code = f"import sys, pathlib; print('a row'); pathlib.Path(sys.argv[-1]).write_text({json.dumps(HOST)!r})"
        (tmp_path / "benchmarks" / f"{name}.py").write_text(code)
    monkeypatch.setattr(bench, "ROOT", tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return tmp_path


def on(monkeypatch, arch, natten):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: arch)
    real = bench.subprocess.run
    asked = types.SimpleNamespace(returncode=int(not natten))
    monkeypatch.setattr(bench.subprocess, "run", lambda c, **k: asked if bench._ASK_NATTEN in c else real(c, **k))


def test_a_wheel_in_a_clone_finds_the_scripts(clone, monkeypatch, capsys):
    on(monkeypatch, (9, 0), natten=False)
    assert cli.main(["bench", "host", "--quick"]) == 0
    assert "4.00" in capsys.readouterr().out


def test_what_fails_is_told_and_the_rest_is_shown(clone, monkeypatch, capsys):
    on(monkeypatch, (9, 0), natten=False)
    (clone / "benchmarks" / "rope.py").write_text("raise SystemExit('it [red]broke[/red]')")
    assert cli.main(["bench", "rope", "host", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "rope ended with status 1" in out
    assert "it [red]broke[/red]" in out
    assert "4.00" in out
    assert cli.main(["bench", "rope", "host", "--quick", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (list(data["measured"]), list(data["failed"])) == (["host"], ["rope"])


@pytest.mark.parametrize(
    ("arch", "natten", "skipped"),
    [
        ((9, 0), True, {}),
        ((9, 0), False, dict.fromkeys(("fna_exact", "decoder_block", "decoder"), "NATTEN is not here")),
        ((10, 0), True, dict.fromkeys(("fna", "fna_exact", "decoder_block", "decoder"), "compute capability 10.0")),
        ((7, 5), True, dict.fromkeys(set(bench.SCRIPTS) - {"pass_cost"}, "compute capability 7.5")),
    ],
)
def test_what_this_gpu_cannot_run_is_skipped_with_a_sentence(monkeypatch, clone, arch, natten, skipped):
    on(monkeypatch, arch, natten)
    found = {name: why for name, script in bench.SCRIPTS.items() if (why := bench._not_here(script))}
    assert set(found) == set(skipped)
    assert all(skipped[name] in why for name, why in found.items())


def test_every_script_of_a_readme_table_is_there():
    assert {"rope", "host", "block", "fna", "fna_exact", "decoder_block", "decoder"} <= set(bench.SCRIPTS)
    assert set(bench.SCRIPTS) == set(bench._TABLES)
