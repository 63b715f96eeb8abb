"""A report in the terminal: the same facts, in any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ltx_inductor.rewrite.drawing import Drawing
from ltx_inductor.rewrite.report import GraphReport, Refusal, RewriteReport, Site
from ltx_inductor.views.terminal import show

RULE = "rmsnorm_split_rope"
SITE = {"rule": RULE, "op": "ltx_inductor::qk_rmsnorm_split_rope", "pair": 0, "source": "model.py:12"}
SITE |= {"shapes": {"x": "[1,8160,4096]", "out": "[1,8160,4096]"}, "contract": "bf16-chain", "drawing": 0}
SITE |= {"bytes": 167_116_800, "proof": "it was compared"}


def report():
    sites = [Site(side=side, node=f"node_{side}", **SITE) for side in "qk"]
    refusals = [
        Refusal(RULE, "it is [red]not[/red] one", "model.py:30", expected="one", found="two", hint="do this")
    ] * 2
    graph = GraphReport(sites, refusals, 100, 3.25, notes=["a note"])
    graph.drawings.append(Drawing((), (), "@@ -1 +1 @@\n-old[0]\n+new[1]\n"))
    return RewriteReport([graph], cached=True)


def shown(width, **options):
    console = Console(file=io.StringIO(), width=width)
    show(console, report().to_dict(), **options)
    return console.file.getvalue()


def test_wide():
    text = shown(160)
    for part in (
        "2 sides rewritten, 2 refused, in 1 graph (3.2 ms in the pass, read from cache)",
        "note: a note",
        "model.py:12  q and k, 1 launch",
        "x=[1,8160,4096] out=[1,8160,4096]",
        "bf16-chain",
        "it was compared",
        "about 303 µs a launch on an H200",
        "model.py:30  left alone  2 times",
        "it is [red]not[/red] one",
        "do this",
    ):
        assert part in text, part
    assert "-old" not in text


def test_diffs():
    text = shown(100, diffs=True)
    assert "-old[0]" in text
    assert "+new[1]" in text


@pytest.mark.parametrize("width", [40, 60])
def test_narrow(width):
    text = shown(width, diffs=True)
    assert max(map(len, text.splitlines())) <= width
    whole = "".join(line.strip() for line in text.splitlines()).replace(" ", "")
    for part in ("qk_rmsnorm_split_rope", "x=[1,8160,4096]out=[1,8160,4096]", "dothis"):
        assert part in whole, part


def test_empty():
    console = Console(file=io.StringIO(), width=80)
    show(console, RewriteReport().to_dict())
    assert "nothing in it looks like" in console.file.getvalue()
