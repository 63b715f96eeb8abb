"""Composed graphs, legal edits of them, sequences of mutations: what `python -m tests.fuzz` runs, on a small scale."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .fuzz import judge as fuzz_judge
from .fuzz.__main__ import Tally, fuzz_recipe
from .fuzz.judge import Calls, Legal, Verdict, judge, run
from .fuzz.mutations import like, tensors, write_input
from .fuzz.near_miss import edited
from .fuzz.recipe import Recipe, Side, draw_recipe
from .fuzz.reduce import Found, as_code, smaller_graph
from .harness import ADDCMUL_KEPT, output_node, shape_facts

aten = torch.ops.aten
ROOT = Path(__file__).parent.parent
SEEDS, PER_RECIPE = range(80), 25  # 2,000 graphs: 4 minutes of one core
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
    "a guard on the strides of a table, on torch 2.11": Recipe(
        q=Side(norm="rms_per_head", enter="view_permute", rotate="inplace_sub", take="middle-slice"),
        rounding="fp32-all-result",
        fused=False,
        layout="offset",
        dynamic=("seq",),
        heads=1,
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
    assert tally.total == PER_RECIPE


@pytest.mark.parametrize("name", FOUND)
def test_found_by_the_campaign(name: str) -> None:
    verdict = Legal(FOUND[name]).problem(0, 0, 0)
    assert verdict is not None
    assert verdict.why is None
    assert verdict.sides == FOUND[name].sites


def judged(legal: Legal, edit: Callable[[torch.fx.Graph], None]) -> Verdict:
    gm = edited(legal.gm, edit)
    assert gm is not None
    wants = run(gm, legal.calls)
    assert wants is not None
    return judge(gm, legal.calls, wants)


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

    verdict = judged(legal, write)
    assert (verdict.sides, verdict.why) == (2, None)


def test_the_statistic_may_read_x_through_views() -> None:
    """A copy of the cast of x for the statistic, with views there and back on it: the norm still reads one x."""
    legal = Legal(Recipe(rounding="fp32-all", q=Side(norm="rms_per_head")))

    def views(g: torch.fx.Graph) -> None:
        (square,) = g.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)
        x = square.args[0]
        with g.inserting_before(square):
            there = g.call_function(aten.unsqueeze.default, (g.node_copy(x), 1))
            back = g.call_function(aten.squeeze.dim, (there, 1))
        square.replace_input_with(x, back)

    gm = edited(legal.gm, views)
    assert gm is not None
    wants = run(gm, legal.calls)
    assert wants is not None
    assert judge(gm, legal.calls, wants, 1, "fp32-all").why is None


def test_a_write_to_what_x_is_a_split_of() -> None:
    """x is q's part of a packed projection, by torch.split; the projection is written to after that."""
    legal = Legal(Recipe(q=Side(take="split")))

    def write(g: torch.fx.Graph) -> None:
        (cut,) = g.find_nodes(op="call_function", target=aten.split_with_sizes.default)
        with g.inserting_before(g.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)[0].args[0]):
            piece = g.call_function(aten.slice.Tensor, (cut.args[0], 2, 0, 1))
            g.call_function(aten.neg_.default, (piece,))

    verdict = judged(legal, write)
    assert (verdict.sides, verdict.why) == (0, None)


def test_a_write_between_two_tables_of_one_memory() -> None:
    """cos was read before the write, sin after it: that sin is right then does not make cos so."""
    legal = Legal(Recipe(q=Side(rotate="chunk_cat"), layout="cut to the sequence"))

    def write(g: torch.fx.Graph) -> None:
        cos, sin = g.find_nodes(op="call_function", target=aten.slice.Tensor)
        with g.inserting_before(g.find_nodes(op="call_function", target=aten.neg.default)[0]):
            g.call_function(aten.neg_.default, (cos.args[0],))
            sin.replace_all_uses_with(g.call_function(aten.slice.Tensor, cos.args))

    verdict = judged(legal, write)
    assert (verdict.sides, verdict.why) == (0, None)


def test_what_is_computed_before_a_write_is_not_what_is_computed_after_it() -> None:
    legal = Legal(Recipe())

    def write(g: torch.fx.Graph) -> None:
        sin = g.find_nodes(op="placeholder")[-1]
        users = list(sin.users)
        with g.inserting_before(users[0]):
            old = g.call_function(aten.abs.default, (sin,))
            g.call_function(aten.mul_.Tensor, (sin, 2))
            new = g.call_function(aten.abs.default, (sin,))
        for n in users:
            n.replace_input_with(sin, new)
        out = output_node(g)
        out.args = ((*out.args[0], old),)

    verdict = judged(legal, write)
    assert (verdict.sides, verdict.why) == (1, None)


DYNAMIC = Recipe(dynamic=("seq", "batch"), B=3)


def guard(graph: torch.fx.Graph) -> None:
    """What no reader of a graph may do: ask whether a symbolic size is the one of the example."""
    for n in graph.find_nodes(op="placeholder"):
        if isinstance(n.meta["val"], torch.SymInt):
            assert n.meta["val"] == n.meta["val"].node.hint


def test_a_graph_that_guards_is_none_and_leaves_nothing_behind() -> None:
    legal = Legal(DYNAMIC)
    captured, facts = legal.gm, shape_facts(legal.gm.graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.fuzz.judge.MUTATIONS", [lambda rng, g: (guard(g), write_input(rng, g))])
        assert legal.problem(0, 0, 1) is None
    assert shape_facts(captured.graph) != facts
    assert legal.gm is not captured
    assert legal.problem(7, 6, 0) == Legal(DYNAMIC).problem(7, 6, 0)


def test_sizes_that_agree_for_the_example_only_make_no_graph() -> None:
    """Two tokens, two heads: with guards suppressed, a view of [tokens, heads] as [heads, tokens] seems to be none."""
    q = Side(enter="permute_then_view", rotate="slice_writes", leave="permute_contiguous_view")
    k = Side(norm="rms_torch", enter="permute_then_view", leave="keep_bhsd")
    legal = Legal(
        Recipe(
            q=q,
            k=k,
            structure="same-x",
            rounding="fp32-rope",
            dtype="fp16",
            dynamic=("seq",),
            B=1,
            S=2,
            heads=2,
            head_dim=10,
        )
    )
    assert legal.problem(8001800065, 6, 2) is None


def test_a_pass_that_guards_is_seen() -> None:
    legal = Legal(DYNAMIC)
    with pytest.MonkeyPatch.context() as patch:
        right = fuzz_judge.rewrite
        patch.setattr(fuzz_judge, "rewrite", lambda g: (guard(g), right(g))[1])
        verdict = legal.problem(0, 0, 0)
    assert verdict is not None
    assert verdict.why == "the pass guarded on a size"


def test_sizes_are_compared_without_a_guard() -> None:
    legal = Legal(DYNAMIC)
    facts = shape_facts(legal.gm.graph)
    nodes = tensors(legal.gm.graph)
    alike = sum(like(a, b) for a in nodes for b in nodes)
    assert len(nodes) < alike < len(nodes) ** 2
    assert shape_facts(legal.gm.graph) == facts


def run_script(path: Path, code: str) -> tuple[int, str]:
    """Exit status and output of `code` in a process of its own."""
    path.write_text(code)
    done = subprocess.run([sys.executable, str(path)], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("dynamic", [(), ("seq", "batch")])
def test_a_failing_graph_becomes_small_code_that_runs(dynamic: tuple[str, ...], tmp_path: Path) -> None:
    """ "Failing" stands here for "something is rewritten", so what is left is one rotation, and its code says so."""
    found = Found(Recipe(structure="pair", writes="x after", dynamic=dynamic), 0, 0, 0, "")
    legal = Legal(found.recipe)

    def rewritten(gm: torch.fx.GraphModule, calls: Calls) -> bool:
        wants = run(gm, calls)
        return bool(wants) and judge(gm, calls, wants).sides > 0

    gm, calls = smaller_graph(legal.gm, legal.calls, rewritten)
    assert len(calls) == 2
    assert len(output_node(gm.graph).args[0]) == 1
    assert len(gm.graph.find_nodes(op="call_function", target=aten.rsqrt.default)) == 1
    status, said = run_script(tmp_path / "small.py", as_code(gm, found))
    assert (status, "1 sides rewritten; nothing is wrong" in said) == (0, True), said


# On N(0, 1) another eps, or a product that is rounded before it is added, changes next to no element.
PLANTED = {
    "eps": "rope._normalise = lambda x, w, eps, *rest, right=rope._normalise: right(x, w, eps * 1.01, *rest)",
    "fma": "torch.addcmul = lambda a, b, c: a + b * c",
}


@pytest.mark.skipif(not ADDCMUL_KEPT, reason="fp32 contracts are compared with eager only")
@pytest.mark.parametrize(("fault", "dynamic"), [("eps", ()), ("fma", ("seq",))])
def test_a_planted_fault_is_found_and_its_code_reproduces_it(
    fault: str, dynamic: tuple[str, ...], tmp_path: Path
) -> None:
    """Minimised and printed, it fails with the fault and passes without it."""
    recipe = Recipe(rounding="fp32-rope", dynamic=dynamic)
    plant = f"import torch\nfrom ltx_inductor.ops import rope\n\n{PLANTED[fault]}\n"
    finder = f"""
from tests.fuzz.judge import Legal
from tests.fuzz.recipe import Recipe
from tests.fuzz.reduce import Found, report

legal = Legal({recipe})
for seed in range(40):
    verdict = legal.problem(seed, 0, 1)
    if verdict and verdict.why:
        print(report(Found(legal.recipe, seed, 0, 1, verdict.why)))
        break
"""
    status, said = run_script(tmp_path / "find.py", plant + finder)
    assert (status, "differ" in said) == (0, True), said
    code = said[said.index("import torch\n") :]
    status, said = run_script(tmp_path / "with.py", plant + code)
    assert (status, "1 sides rewritten" in said, "elements differ" in said) == (1, True, True), said
    status, said = run_script(tmp_path / "without.py", code)
    assert (status, "1 sides rewritten; nothing is wrong" in said) == (0, True), said


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
