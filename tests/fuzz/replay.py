"""For the scripts that reduce.py prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from .judge import Legal, judge, node_values, run
from .near_miss import propagate
from .recipe import Recipe


def check(
    forward: Callable[..., Any],
    recipe: Recipe,
    graph: tuple[int, int, int],
    inputs: Sequence[str],
    origins: Mapping[int, str],
    sites: int | None = None,
) -> None:
    """Rewrites `forward`, prints its graph and what is wrong with it, if anything; exits with 1 then.

    forward: the graph of the recipe with `graph` = (seed, edits, mutations), or a part of it.
    inputs:  what it is called with: nodes of the whole graph, by name. That runs on what the recipe draws
             (tests/draws.py), with its symbols where it is dynamic.
    origins: {number of a node of `forward`: the op of torch that it is a part of}.
    sites:   how many sides must be rewritten; None: any number.
    """
    legal = Legal(recipe)
    made = legal.graph(*graph)
    assert made is not None, "the recipe makes no such graph any more"
    whole, values = {n.name: n for n in made[0].graph.nodes}, node_values(made[0], legal.calls)
    gm = fx.symbolic_trace(forward)
    for n, name in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        n.meta["val"] = whole[name].meta["val"]
    nodes = list(gm.graph.nodes)
    for i, op in origins.items():
        nodes[i].meta["original_aten"] = op
    propagate(gm, set(nodes))
    calls = [[of_call[name] for name in inputs] for of_call in values]
    wants = run(gm, calls)
    assert wants is not None, "the graph does not run"
    verdict = judge(gm, calls, wants, sites, recipe.contract)
    print(gm.graph)
    print(f"{verdict.sides} sides rewritten; {verdict.why or 'nothing is wrong'}")
    if verdict.why:
        raise SystemExit(1)
