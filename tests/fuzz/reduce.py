"""A failing graph, made as small as it stays failing, and printed as code that runs by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ltx_inductor.rewrite.norm import is_fused

from ..harness import copy_graph, output_node, same_memory
from .judge import Calls, Legal, judge, run
from .legal import writes
from .near_miss import edited
from .recipe import Recipe, neighbours

Node = fx.Node


@dataclass(frozen=True)
class Found:
    """A graph with something wrong: how to make it again, and what is wrong."""

    recipe: Recipe
    seed: int
    edits: int
    mutations: int
    why: str

    def __str__(self) -> str:
        graph = f"{self.seed},{self.edits},{self.mutations}"
        return f"{self.why}\n  python -m tests.fuzz --recipe {str(self.recipe)!r} --graph {graph}"


def kind(why: str) -> str:
    """What a smaller graph must have in common with the one it stands for."""
    for key in ("legal sides", "lost without", "internal error", "does not run", "guarded", "instead of", "differ"):
        if key in why:
            return key
    return why


def smaller_recipe(found: Found, tries: int = 60) -> Found:
    """The simplest recipe, with as few edits and mutations as possible, that fails in the same way."""

    def fails(recipe: Recipe, edits: int, mutations: int) -> Found | None:
        try:
            legal = Legal(recipe)
            if edits or mutations:  # a recipe of pieces that do not fit fails by itself: that is another failure
                unedited = legal.problem(found.seed, 0, 0)
                if unedited is None or unedited.why:
                    return None
            verdict = legal.problem(found.seed, edits, mutations)
        except Exception:  # no such model
            return None
        if verdict is None or verdict.why is None or kind(verdict.why) != kind(found.why):
            return None
        return Found(recipe, found.seed, edits, mutations, verdict.why)

    best, again = found, True
    while again and tries > 0:
        again = False
        for fewer in [(0, best.mutations), (best.edits, 0)]:
            if fewer != (best.edits, best.mutations) and (f := fails(best.recipe, *fewer)):
                best, again = f, True
        for recipe in neighbours(best.recipe):
            tries -= 1
            if tries > 0 and (f := fails(recipe, best.edits, best.mutations)):
                best, again = f, True
                break
    return best


def smaller_graph(
    gm: fx.GraphModule, calls: Calls, fails: Callable[[fx.GraphModule, Calls], bool]
) -> tuple[fx.GraphModule, Calls]:
    """Outputs dropped, and nodes replaced by inputs that hold their values, as long as `fails`. Static shapes only."""
    again = True
    while again:
        again = False
        for candidate in _steps(gm, calls):
            if candidate is not None and fails(*candidate):
                gm, calls = candidate
                again = True
                break
    return gm, calls


def _steps(gm: fx.GraphModule, calls: Calls) -> Any:
    outputs = len(output_node(gm.graph).args[0])
    for i in range(outputs if outputs > 1 else 0):
        yield _with(gm, calls, lambda g, i=i: _drop_output(g, i))
    for index, n in enumerate(gm.graph.nodes):
        if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor) and not writes(n):
            yield _as_input(gm, calls, index)


def _with(gm: fx.GraphModule, calls: Calls, edit: Callable[[fx.Graph], None]) -> tuple[fx.GraphModule, Calls] | None:
    made = edited(gm, edit)
    if made is None:
        return None
    return _without_unused(made, calls)


def _drop_output(g: fx.Graph, i: int) -> None:
    out = output_node(g)
    out.args = (tuple(a for j, a in enumerate(out.args[0]) if j != i),)
    _drop_unused(g)


def _drop_unused(g: fx.Graph) -> None:
    for n in reversed(list(g.nodes)):
        if n.op == "call_function" and not n.users and not writes(n):
            g.erase_node(n)


def _as_input(gm: fx.GraphModule, calls: Calls, index: int) -> tuple[fx.GraphModule, Calls] | None:
    made = copy_graph(gm)
    old, new = list(gm.graph.nodes)[index], list(made.graph.nodes)[index]
    values = []
    for args in calls:
        recorder = fx.Interpreter(gm, garbage_collect_values=False)
        with torch.no_grad():
            recorder.run(*[same_memory(a) for a in args])
        values.append(recorder.env[old])
    first = next(iter(made.graph.nodes))
    with made.graph.inserting_before(first):
        placeholder = made.graph.placeholder(f"from_{new.name}")
    placeholder.meta["val"] = new.meta["val"]
    new.replace_all_uses_with(placeholder)
    _drop_unused(made.graph)
    made.recompile()
    return _without_unused(made, [[v, *args] for v, args in zip(values, calls, strict=True)])


def _without_unused(gm: fx.GraphModule, calls: Calls) -> tuple[fx.GraphModule, Calls]:
    inputs = gm.graph.find_nodes(op="placeholder")
    kept = [bool(n.users) for n in inputs]
    for n in inputs:
        if not n.users:
            gm.graph.erase_node(n)
    gm.recompile()
    return gm, [[a for a, k in zip(args, kept, strict=True) if k] for args in calls]


def as_code(gm: fx.GraphModule, calls: Calls) -> str:
    """A script that builds the graph, rewrites it and says what is wrong. Shapes are those of `calls`."""
    body = gm.graph.python_code("self").src.strip().replace("def forward(self, ", "def forward(")
    inputs = [
        f"({tuple(a.shape)}, {a.stride()}, {a.dtype})" if isinstance(a, torch.Tensor) else repr(a) for a in calls[0]
    ]
    fused = [i for i, n in enumerate(gm.graph.nodes) if is_fused(n)]
    head = "import torch\nfrom torch import device, inf, nan\n\nfrom tests.fuzz.replay import check\n\n\n"
    return f"{head}{body}\n\n\ncheck(forward, [{', '.join(inputs)}], fused={fused})\n"


def report(found: Found) -> str:
    """The minimised graph, as a command and as code, under the command that makes the whole one again."""
    small = smaller_recipe(found)
    text = f"{found}\nminimised:\n{small}\n"
    legal = Legal(small.recipe)
    made = legal.graph(small.seed, small.edits, small.mutations)
    if made is None or small.recipe.dynamic:
        return text
    gm, calls = made[0], legal.calls

    def fails(g: fx.GraphModule, c: Calls) -> bool:
        wants = run(g, c)
        verdict = judge(g, c, wants) if wants else None
        return verdict is not None and verdict.why is not None and kind(verdict.why) == kind(small.why)

    if small.mutations:
        gm, calls = smaller_graph(gm, calls, fails)
    return text + as_code(gm, calls)
