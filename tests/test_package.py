"""The wheel and the sdist: what is in them, that they work in a clean environment, and what a missing package costs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("test_package")  # one worker: the module's fixture is expensive
CHILD = """
import json, os, sys
import torch, ltx_inductor
from importlib.metadata import distribution
from ltx_inductor.kernels.sources import csrc_dir, source_digest
from ltx_inductor.rewrite.report import RewriteReport
RewriteReport().to_html("empty.html")
found = distribution("ltx_inductor")
print(json.dumps({
    "file": ltx_inductor.__file__, "csrc": str(csrc_dir()), "digest": source_digest(),
    "entry_points": sorted(f"{e.group}:{e.name}" for e in found.entry_points),
    "license": found.metadata["License-Expression"],
    "backend": "ltx" in torch._dynamo.list_backends(), "page": os.path.getsize("empty.html"),
}))
"""


def run(*command: str, cwd: Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, target: Path, kind: str) -> Path:
    """As `pip wheel` does it, with the build backend of this environment: nothing is downloaded."""
    code = f"import sys; from hatchling import build; print(build.build_{kind}({str(target)!r}))"
    name = run(sys.executable, "-c", code, cwd=source, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    return target / name.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_carries_what_is_needed_and_nothing_else(wheel):
    found = names(wheel)
    csrc = {f"ltx_inductor/csrc/{p.relative_to(ROOT / 'csrc')}" for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert csrc <= found
    assert {f"ltx_inductor/views/page.{kind}" for kind in ("css", "js")} | {"ltx_inductor/py.typed"} <= found
    assert "ltx_inductor/kernels/profit.json" in found
    top = {n.split("/")[0] for n in found}
    assert {n for n in top if not n.endswith(".dist-info")} == {"ltx_inductor", "ltx_inductor_autoload.py"}


def test_the_sdist_gives_the_same_wheel(wheel, tmp_path):
    archive = build(ROOT, tmp_path, "sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    for part in (
        "tests/test_package.py",
        "docs/index.md",
        "benchmarks/floor.cu",
        "mkdocs.yml",
        "CHANGELOG.md",
        "LICENSE",
    ):
        assert (source / part).is_file(), part
    assert names(build(source, tmp_path, "wheel")) == names(wheel)


def test_it_works_in_a_clean_environment(wheel, tmp_path):
    """A new virtual environment with the wheel in it; torch and the like are lent by this one, the sources are not."""
    home, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    venv.create(home, with_pip=False)
    python = str(home / "bin" / "python")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=work).strip())
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
        cwd=work,
    )
    # a path in a .pth file is added as it is: the editable install there stays out of sight
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    data = json.loads(run(python, "-c", CHILD, cwd=work).splitlines()[-1])
    assert Path(data["file"]).parent == site / "ltx_inductor"
    assert data["csrc"] == str(site / "ltx_inductor" / "csrc")
    from ltx_inductor.kernels import source_digest

    assert data["digest"] == source_digest()
    assert data["entry_points"] == [
        "console_scripts:ltx-inductor",
        "torch.backends:ltx_inductor",
        "torch_dynamo_backends:ltx",
    ]
    assert data["backend"]
    assert data["license"] == "Apache-2.0"
    assert data["page"] > 5000


MISSING = """
import sys
for name in ("tvm_ffi", "tilelang", "natten"):
    sys.modules[name] = None
import importlib.util, torch, ltx_inductor
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("tvm_ffi", "tilelang", "natten") else real(name, *more)
from ltx_inductor.kernels import fna, rope
from tests.end_to_end_child import QueriesAndKeys
q, k = torch.randn(2, 1, 16, 64).bfloat16()
cos, sin = torch.randn(2, 1, 16, 2, 16).transpose(2, 3)
ltx_inductor.explain(QueriesAndKeys(64).bfloat16().eval(), q, k, cos, sin).expect(rmsnorm_split_rope=2)
facts = dict(dtype=torch.bfloat16, table_dtype=torch.float32, head_dim=32, hidden=64, per_head=False)
print(rope.prepare((9, 0), contract="fp32-rope", **facts))
from ltx_inductor import cli
sys.exit(cli.main(["doctor"]))
"""


def test_what_is_missing_costs_its_own_feature_only(tmp_path):
    """Without tvm_ffi, tilelang and natten: import, explain and doctor work, and the sentences say what to install."""
    out = run(sys.executable, "-c", MISSING, cwd=ROOT, LTX_INDUCTOR_CACHE=str(tmp_path), COLUMNS="200")
    assert "pip install" in out.splitlines()[0]
    for name, what in (("tvm_ffi", "no kernel of rmsnorm_split_rope"), ("tilelang", "no exact neighborhood attention")):
        line = next(line for line in out.splitlines() if line.startswith("missing") and name in line)
        assert what in out[out.index(line) :]
    assert "missing natten" in " ".join(out.split())


IMPORTED_AS = {"apache-tvm-ffi": "tvm_ffi"}  # distributions whose import is called otherwise


def declared(wheel: Path) -> dict[str, set[str]]:
    """{extra, or "" for what every install has: what the imports of its dependencies are called}."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
        said = message_from_bytes(packed.read(name))
    found: dict[str, set[str]] = {extra: set() for extra in ("", *said.get_all("Provides-Extra"))}
    for requirement in said.get_all("Requires-Dist"):
        name = re.match(r"[\w.-]+", requirement)[0]
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        found[extra[1] if extra else ""].add(IMPORTED_AS.get(name, name))
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, is it imported with the file?) for every import; those in functions and under TYPE_CHECKING are not."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, id(node) not in late) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{a.name}", id(node) not in late) for a in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            yield str(getattr(node.args[0], "value", "ltx_inductor")), id(node) not in late


def undeclared(files: list[Path], dependencies: dict[str, set[str]]) -> list[str]:
    """Imports of what is no dependency, or is an extra's and not behind a function that can do without."""
    always = dependencies[""] | set(sys.stdlib_module_names) | {"ltx_inductor", "ltx_inductor_autoload"}
    extras = set().union(*(dependencies[extra] for extra in ("tilelang", "natten", "demo")))
    found = [(path, *i) for path in files for i in imports(path)]
    loaded = {name.rpartition(".")[2] for _, name, early in found if early and name.startswith("ltx_inductor.")}
    wrong = []
    for path, name, early in found:
        top = name.partition(".")[0]
        guarded = not early or path.stem not in loaded  # a module that only functions import
        if top not in always and not (top in extras and guarded):
            wrong.append(f"{path.name} imports {name}")
    return wrong


def test_every_import_is_a_declared_dependency(wheel, tmp_path):
    files = [*(ROOT / "ltx_inductor").rglob("*.py"), ROOT / "ltx_inductor_autoload.py"]
    assert undeclared(files, declared(wheel)) == []
    late = "def f():\n    import natten\n"
    (tmp_path / "a.py").write_text(f"import torch, requests\nfrom ltx_inductor import b\n{late}")
    (tmp_path / "b.py").write_text("import natten\nimport yaml.reader\n")
    wrong = undeclared([tmp_path / "a.py", tmp_path / "b.py"], declared(wheel))
    assert wrong == ["a.py imports requests", "b.py imports natten", "b.py imports yaml.reader"]


def test_every_extra_can_be_installed(wheel):
    """That its requirements exist and agree; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
    there = subprocess.run([*pip, "--no-deps", "--ignore-installed", "filelock"], cwd=ROOT, capture_output=True)
    if there.returncode:
        pytest.skip("no package index can be reached from here")
    for extra in filter(None, declared(wheel)):
        run(*pip, f"{wheel}[{extra}]", cwd=ROOT)
