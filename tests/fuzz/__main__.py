"""The campaign: python -m tests.fuzz --graphs 20000"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from .judge import Legal
from .recipe import Recipe, Side, draw_recipe
from .reduce import Found, report


@dataclass
class Tally:
    """How many graphs of each kind were judged, and how many of their sides were rewritten."""

    graphs: Counter[str] = field(default_factory=Counter)
    rewritten: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.graphs.values())


def fuzz_recipe(recipe: Recipe, seed: int, graphs: int, tally: Tally) -> None:
    """The graph of one recipe as it is, a fifth legal edits of it, the rest near-misses of those: 1 to 4 mutations."""
    legal, tried, until = Legal(recipe), 0, tally.total + graphs
    while tally.total < until and tried < 20 * graphs:
        which = seed * 10_000 + tried
        edits, mutations = (0, 0) if not tried else (1 + tried % 12, 0 if tried % 5 == 1 else tried % 4 + 1)
        tried += 1
        verdict = legal.problem(which, edits, mutations)
        if verdict is None:
            continue
        kind = f"{mutations} mutations" if mutations else "legal edits" if edits else "legal"
        tally.graphs[kind] += 1
        tally.rewritten[kind] += verdict.sides > 0
        if verdict.why:
            tally.found.append(Found(recipe, which, edits, mutations, verdict.why))


def campaign(graphs: int, seed: int, per_recipe: int, seconds: float = float("inf"), quiet: bool = False) -> Tally:
    """At least `graphs` graphs, or as many as are done after `seconds`."""
    tally, start, reported = Tally(), time.monotonic(), 0
    while tally.total < graphs and time.monotonic() - start < seconds:
        fuzz_recipe(draw_recipe(seed), seed, min(per_recipe, graphs - tally.total), tally)
        seed += 1
        for found in tally.found[reported:]:
            if not quiet:
                print(found, flush=True)
        reported = len(tally.found)
        if not quiet and seed % 10 == 0:
            print(f"{tally.total} graphs, {len(tally.found)} failing, {time.monotonic() - start:.0f} s", flush=True)
    return tally


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--graphs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first recipe")
    parser.add_argument("--per-recipe", type=int, default=50, help="graphs made of each")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after the recipe that is in work then"
    )
    parser.add_argument("--recipe", help="replay: a recipe, as printed")
    parser.add_argument("--graph", default="0,0,0", help="replay: seed,edits,mutations of one graph, as printed")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # of mutants that are no graphs
    if args.recipe:
        recipe = eval(args.recipe, {"Recipe": Recipe, "Side": Side})
        seed, edits, mutations = map(int, args.graph.split(","))
        verdict = Legal(recipe).problem(seed, edits, mutations)
        print("no such graph" if verdict is None else verdict)
        if verdict and verdict.why:
            print(report(Found(recipe, seed, edits, mutations, verdict.why)))
        return int(bool(verdict and verdict.why))
    tally = campaign(args.graphs, args.seed, args.per_recipe, args.seconds)
    for found in tally.found[:3]:
        print(f"\n{'=' * 100}\n{report(found)}")
    print(json.dumps({"graphs": tally.graphs, "rewritten": tally.rewritten, "failing": len(tally.found)}))
    return int(bool(tally.found))


if __name__ == "__main__":
    sys.exit(main())
