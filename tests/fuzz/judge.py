"""What is wrong with the rewrite of a graph: a legal one must be rewritten, any other rewritten rightly or refused."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ltx_inductor.config import Config
from ltx_inductor.rewrite import passes

from .. import draws
from ..harness import (
    ADDCMUL_KEPT,
    bit_difference,
    copy_graph,
    output_node,
    run_graph,
    same_memory,
    shape_facts,
    trace_calls,
)
from .legal import legal_edits
from .mutations import MUTATIONS
from .near_miss import edited, live_rotations
from .recipe import Recipe

rewrite = functools.partial(passes.rewrite_graph, config=Config(cpu=True))
Calls = list[list[Any]]


def comparable(contract: str) -> bool:
    """On torch < 2.12 the graph's own mul and add round where the fma of addcmul, and so the op, does not."""
    return ADDCMUL_KEPT or contract == "bf16-chain" or "muladd" in contract


def run(gm: fx.GraphModule, calls: Calls) -> list[list[Any]] | None:
    """The results of the graph for each call, and what it leaves in its inputs; None: ill-typed after all.

    What a mutant leaves uninitialised is filled, since else no two runs would agree.
    """
    try:
        torch.use_deterministic_algorithms(True)
        found = []
        for args in calls:
            mine = [same_memory(a) for a in args]
            found.append([*run_graph(gm, mine), *(a for a in mine if isinstance(a, torch.Tensor))])
        return found
    except (RuntimeError, IndexError):
        return None
    finally:
        torch.use_deterministic_algorithms(False)


def node_values(gm: fx.GraphModule, calls: Calls) -> list[dict[str, Any]]:
    """{name of a node: its value} for each call, as it is computed: before anything writes to it."""

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            found[-1][n.name] = same_memory(value)
            return value

    found: list[dict[str, Any]] = []
    for args in calls:
        found.append({})
        with torch.no_grad():
            Recorder(gm).run(*[same_memory(a) for a in args])
    return found


@dataclass
class Verdict:
    """sides: how many were rewritten. why: what is wrong, or None."""

    sides: int
    why: str | None


def judge(
    gm: fx.GraphModule, calls: Calls, wants: list[list[Any]], sites: int | None = None, contract: str = ""
) -> Verdict:
    """`sites`: how many sides must be rewritten, in that contract; None: any number, if what is left is named."""
    after, facts = copy_graph(gm), shape_facts(gm.graph)
    report = rewrite(after.graph)
    n = len(report.sites)
    if shape_facts(gm.graph) != facts:
        return Verdict(n, "the pass guarded on a size")
    for r in report.refusals:
        if "internal error" in r.reason:
            return Verdict(n, r.reason)
    if sites is not None:
        if n != sites or report.refusals:
            reasons = "; ".join(r.reason for r in report.refusals) or "no refusal"
            return Verdict(n, f"{n} of {sites} legal sides were rewritten: {reasons}")
        if {s.contract for s in report.sites} != {contract}:
            return Verdict(n, f"contract {report.sites[0].contract} instead of {contract}")
    elif n + len(report.refusals) < live_rotations(gm.graph):
        return Verdict(n, "a rotation was lost without a refusal")
    if n and all(comparable(s.contract) for s in report.sites):
        found = run(after, calls)
        if found is None:
            return Verdict(n, "the rewritten graph does not run")
        for got, want in zip(found, wants, strict=True):
            why = bit_difference(got, want)
            if why:
                return Verdict(n, f"{why}; contract {report.sites[0].contract}")
    return Verdict(n, None)


class Legal:
    """The graph of one recipe, what it is called with, and the graphs that are made of it.

    calls: two sets of values (tests/draws.py); where something is dynamic, the second has other sizes.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._capture()

    def _capture(self) -> None:
        torch.manual_seed(0)
        recipe, module = self.recipe, self.recipe.build()
        inputs = [recipe.inputs(), recipe.inputs(more=5)]
        for seed, given in enumerate(inputs):
            special = recipe.special and seed > 0
            draws.redraw(module, given, recipe.axes("seq"), recipe.head_dim, seed, 4 * seed, special)
        self.gm, self.calls = trace_calls(module, inputs, recipe.dynamic_axes())
        self.results = run(self.gm, self.calls)

    def graph(self, seed: int, edits: int, mutations: int) -> tuple[fx.GraphModule, list[str]] | None:
        """A legal edit of the graph, with that many mutations; None where the seed makes no graph to compile."""
        done: list[str] = []

        def change(g: fx.Graph) -> None:
            rng = random.Random(seed)
            done.extend(legal_edits(rng, g, edits))

        def spoil(g: fx.Graph) -> None:
            rng = random.Random(seed + 1)
            mutation = rng.choice(MUTATIONS)
            done.append(mutation.__name__)
            mutation(rng, g)

        gm: fx.GraphModule | None = self.gm
        if edits:
            gm = edited(self.gm, change)
        for i in range(mutations):
            seed += 1000003 * (i + 1)
            gm = gm and edited(gm, spoil)
        return None if gm is None else (gm, done)

    def problem(self, seed: int, edits: int, mutations: int) -> Verdict | None:
        """None where there is no such graph. The next one is judged as if this one had never been."""
        facts = shape_facts(self.gm.graph)
        try:
            return self._problem(seed, edits, mutations)
        finally:
            if shape_facts(self.gm.graph) != facts:
                self._capture()

    def _problem(self, seed: int, edits: int, mutations: int) -> Verdict | None:
        made = self.graph(seed, edits, mutations)
        wants = made and run(made[0], self.calls)
        if not made or not wants:
            return None
        if mutations:
            return judge(made[0], self.calls, wants)
        changed = self._changed(wants)
        if changed:  # swapped factors may give a result in another memory order, which need not be one of the op's
            return None if "strides" in changed else Verdict(0, f"the edit is not legal: {changed}")
        return judge(made[0], self.calls, wants, self.recipe.sites, self.recipe.contract)

    def _changed(self, wants: list[list[Any]]) -> str | None:
        """What legal edits changed after all; results that they added come last and are not compared."""
        n = len(output_node(self.gm.graph).args[0])
        assert self.results is not None
        return bit_difference([w[:n] for w in wants], [b[:n] for b in self.results])
