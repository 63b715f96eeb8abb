"""A failing graph, made as small as it stays failing, and printed as code that runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ltx_inductor.rewrite.lift import in_addcmul
from ltx_inductor.rewrite.norm import is_fused

from ..harness import copy_graph, output_node
from .judge import Calls, Legal, judge, node_values, run
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
    """Outputs dropped, and nodes replaced by inputs that hold their values in `gm`, as long as `fails`.

    A node's meta["whole"] is its name in `gm`.
    """
    values, gm = node_values(gm, calls), copy_graph(gm)
    for n in gm.graph.nodes:
        n.meta["whole"] = n.name
    again = True
    while again:
        again = False
        for candidate in _steps(gm):
            if candidate is None:
                continue
            inputs = [n.meta["whole"] for n in candidate.graph.find_nodes(op="placeholder")]
            args = [[of_call[name] for name in inputs] for of_call in values]
            if fails(candidate, args):
                gm, calls, again = candidate, args, True
                break
    return gm, calls


def _steps(gm: fx.GraphModule) -> Iterator[fx.GraphModule | None]:
    outputs = len(output_node(gm.graph).args[0])
    for i in range(outputs if outputs > 1 else 0):
        yield edited(gm, lambda g, i=i: _drop_output(g, i))
    for index, n in enumerate(gm.graph.nodes):
        if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor) and not writes(n):
            yield _as_input(gm, index)


def _drop_output(g: fx.Graph, i: int) -> None:
    out = output_node(g)
    out.args = (tuple(a for j, a in enumerate(out.args[0]) if j != i),)
    _drop_unused(g)


def _drop_unused(g: fx.Graph) -> None:
    for n in reversed(list(g.nodes)):
        if n.op in ("call_function", "placeholder") and not n.users and not writes(n):
            g.erase_node(n)


def _as_input(gm: fx.GraphModule, index: int) -> fx.GraphModule:
    made = copy_graph(gm)
    n = list(made.graph.nodes)[index]
    with made.graph.inserting_before(next(iter(made.graph.nodes))):
        placeholder = made.graph.placeholder(f"from_{n.name}")
    placeholder.meta.update({key: n.meta[key] for key in ("val", "whole")})
    n.replace_all_uses_with(placeholder)
    _drop_unused(made.graph)
    made.recompile()
    return made


def as_code(gm: fx.GraphModule, found: Found, sites: int | None = None) -> str:
    """A script that builds `gm`, the graph of `found` or a part of it, rewrites it and says what is wrong.

    It runs on the values that the recipe draws. sites: how many sides must be rewritten; None: any number.
    """
    body = gm.graph.python_code("self").src.strip().replace("def forward(self, ", "def forward(")
    inputs = [n.meta.get("whole", n.name) for n in gm.graph.find_nodes(op="placeholder")]
    origins = {i: op for i, n in enumerate(gm.graph.nodes) if (op := _origin(n))}
    graph = (found.seed, found.edits, found.mutations)
    return f"""import torch
from torch import device, inf, nan

from tests.fuzz.recipe import Recipe, Side
from tests.fuzz.replay import check


{body}


check(forward, {found.recipe}, {graph=}, {inputs=}, {origins=}, {sites=})
"""


def _origin(n: Node) -> str:
    """What the rule reads from the metadata: the op of torch that n is a part of, if it is one of these."""
    if is_fused(n):
        return "aten._fused_rms_norm.default"
    return "aten.addcmul.default" if in_addcmul(n) else ""


def report(found: Found) -> str:
    """The minimised graph, as a command and as code, under the command that makes the whole one again."""
    small = smaller_recipe(found)
    text = f"{found}\nminimised:\n{small}\n"
    legal = Legal(small.recipe)
    made = legal.graph(small.seed, small.edits, small.mutations)
    if made is None:
        return text
    if not small.mutations:
        return text + as_code(made[0], small, small.recipe.sites)

    def fails(g: fx.GraphModule, c: Calls) -> bool:
        wants = run(g, c)
        verdict = judge(g, c, wants) if wants else None
        return verdict is not None and verdict.why is not None and kind(verdict.why) == kind(small.why)

    return text + as_code(smaller_graph(made[0], legal.calls, fails)[0], small)
