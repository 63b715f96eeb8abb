"""Who imports whom: downwards only, and the rewrite knows no kernel. Read from the sources, lazy imports included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ltx_inductor"
# A part may import those of lower numbers, and of its own. What is not named is in the middle: the roads into the pass.
LEVEL = {"config": 0, "contract": 0, "views": 0, "kernels": 0, "ops": 1, "rewrite": 2, "cli": 9, "__main__": 9}
MIDDLE = 5
NEVER = {
    "views": {"kernels", "ops", "rewrite"},  # they read a dict
    "kernels": {"config", "views"},
    "rewrite": {"kernels"},  # it asks an object that it is given
    "config": {"contract", "views", "kernels"},
}


def part(module: str) -> str:
    """ "rewrite" for ltx_inductor.rewrite.rope, "__init__" for the package itself."""
    return [*module.split("."), "__init__"][1]


def imports(path: Path) -> set[str]:
    """The parts that a module imports anywhere in it; `from ltx_inductor import x` counts as x."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ltx_inductor":
            found |= {part(f"ltx_inductor.{a.name}") for a in node.names if a.name != "__version__"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ltx_inductor."):
            found.add(part(node.module))
        elif isinstance(node, ast.Import):
            found |= {part(a.name) for a in node.names if a.name.startswith("ltx_inductor.")}
    return found


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_go_downwards(path):
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in imports(path) - {mine}:
        assert LEVEL.get(other, MIDDLE) <= LEVEL.get(mine, MIDDLE), f"{mine} imports {other}, which is above it"
        assert other not in NEVER.get(mine, ()), f"{mine} must not know {other}"


def test_it_would_be_seen(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f():\n    import ltx_inductor.kernels.rope\n    from ltx_inductor import cli, __version__\n")
    assert imports(path) == {"kernels", "cli"}
