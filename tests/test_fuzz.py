"""Composed graphs, legal edits of them, sequences of mutations: what `python -m tests.fuzz` runs, on a small scale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .fuzz.__main__ import Tally, fuzz_recipe
from .fuzz.judge import Calls, Legal, judge, run
from .fuzz.near_miss import edited
from .fuzz.recipe import Recipe, Side, draw_recipe
from .fuzz.reduce import as_code, smaller_graph
from .harness import ADDCMUL_KEPT, output_node

aten = torch.ops.aten
ROOT = Path(__file__).parent.parent
SEEDS, PER_RECIPE = range(4), 25
FOUND = {
    "cast before the heads": Recipe(q=Side(norm="rms_per_head"), rounding="fp32-all"),
    "cast before the heads, of a slice": Recipe(
        q=Side(norm="rms_per_head", take="middle-slice"),
        rounding="fp32-all",
        layout="flat row",
        dynamic=("seq", "batch"),
    ),
    "cast before the heads, once per row": Recipe(
        q=Side(norm="rms_per_head"), structure="same-x", rounding="fp32-all-result"
    ),
}


def check(tally: Tally) -> None:
    assert not tally.found, "\n".join(map(str, tally.found[:5]))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_composed_graph_and_what_becomes_of_it(seed: int) -> None:
    torch.set_num_threads(1)
    tally = Tally()
    fuzz_recipe(draw_recipe(seed), seed, PER_RECIPE, tally)
    check(tally)
    assert tally.total > 10


@pytest.mark.parametrize("name", FOUND)
def test_found_by_the_campaign(name: str) -> None:
    verdict = Legal(FOUND[name]).problem(0, 0, 0)
    assert verdict is not None
    assert verdict.why is None
    assert verdict.sides == FOUND[name].sites


def test_a_pair_does_not_meet_behind_a_write() -> None:
    """q's chain would move down to k's, past the write to q: two launches instead."""
    legal = Legal(Recipe(structure="pair"))

    def write(g: torch.fx.Graph) -> None:
        casts = g.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
        x = casts[0].args[0]
        last = [n for n in g.nodes if n.target is aten.slice_scatter.default][1]
        with g.inserting_after(last):
            piece = g.call_function(aten.slice.Tensor, (x, 2, 0, 1))
            with g.inserting_after(piece):
                g.call_function(aten.neg_.default, (piece,))

    gm = edited(legal.gm, write)
    assert gm is not None
    wants = run(gm, legal.calls)
    assert wants is not None
    verdict = judge(gm, legal.calls, wants)
    assert (verdict.sides, verdict.why) == (2, None)


def test_a_failing_graph_becomes_small_code_that_runs(tmp_path: Path) -> None:
    """ "Failing" stands here for "something is rewritten", so what is left is one rotation, and its code says so."""
    legal = Legal(Recipe(structure="pair", writes="x after"))

    def rewritten(gm: torch.fx.GraphModule, calls: Calls) -> bool:
        wants = run(gm, calls)
        return bool(wants) and judge(gm, calls, wants).sides > 0

    gm, calls = smaller_graph(legal.gm, legal.calls, rewritten)
    assert len(output_node(gm.graph).args[0]) == 1
    assert len(gm.graph.find_nodes(op="call_function", target=aten.rsqrt.default)) == 1
    script = tmp_path / "small.py"
    script.write_text(as_code(gm, calls))
    done = subprocess.run([sys.executable, str(script)], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 sides rewritten; nothing is wrong" in done.stdout


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--graphs", "6", "--seed", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tally = json.loads(done.stdout.splitlines()[-1])
    assert sum(tally["graphs"].values()) == 6
    assert tally["failing"] == 0


def test_a_wrong_rewrite_is_seen() -> None:
    """Else none of the above could fail: the reference's rotation is turned around."""
    from ltx_inductor.ops import rope

    if not ADDCMUL_KEPT:
        pytest.skip("fp32 contracts are compared with eager only")
    legal = Legal(Recipe())
    right = rope._rotate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "_rotate", lambda n, cos, sin, c: right(n, cos, -sin, c))
        verdict = legal.problem(0, 0, 0)
    assert verdict is not None
    assert verdict.why is not None
