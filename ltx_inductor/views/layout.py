"""Places for the nodes of a drawn graph: layers from top to bottom, few crossings, edges around nodes.

The usual layered method (Sugiyama, Tagawa, Toda 1981): a layer per longest path, dummy nodes where an edge skips some,
barycentre sweeps for the order within a layer, then columns as near to a node's neighbours as the order allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SWEEPS = 8


@dataclass
class Placed:
    """Column (a centre, in node widths) and layer of every node, and the points of every edge, ends included."""

    column: dict[str, float] = field(default_factory=dict)
    layer: dict[str, int] = field(default_factory=dict)
    edges: dict[tuple[str, str], list[tuple[float, int]]] = field(default_factory=dict)

    @property
    def width(self) -> float:
        return 1 + max(self.column.values(), default=0.0)

    @property
    def height(self) -> int:
        return 1 + max(self.layer.values(), default=0)


def place(inputs: Mapping[str, Sequence[str]], free: frozenset[str] = frozenset()) -> Placed:
    """A place for every node.

    inputs: the names a node reads, by name, in an order in which every name comes before its readers.
    free:   nodes that are drawn right above their first reader, however early they would be there.
    """
    layer = _layers(inputs, free)
    chains: dict[tuple[str, str], list[str]] = {}
    rows: list[list[str]] = [[] for _ in range(1 + max(layer.values(), default=0))]
    for name in inputs:
        rows[layer[name]].append(name)
    above: dict[str, list[str]] = {name: [] for name in inputs}
    for name, sources in inputs.items():
        for source in sources:
            chain = [source]
            for row in range(layer[source] + 1, layer[name]):
                dummy = f"{source}>{name}@{row}"
                rows[row].append(dummy)
                above[dummy] = [chain[-1]]
                chain.append(dummy)
            above[name].append(chain[-1])
            chains[source, name] = [*chain, name]
    below: dict[str, list[str]] = {name: [] for name in above}
    for name, sources in above.items():
        for source in sources:
            below[source].append(name)
    column = _columns(rows, above, below)
    at = {name: i for i, row in enumerate(rows) for name in row}
    edges = {ends: [(column[n], at[n]) for n in chain] for ends, chain in chains.items()}
    return Placed({n: column[n] for n in inputs}, layer, edges)


def _layers(inputs: Mapping[str, Sequence[str]], free: frozenset[str]) -> dict[str, int]:
    layer: dict[str, int] = {}
    for name, sources in inputs.items():
        layer[name] = 1 + max((layer[s] for s in sources), default=-1)
    for name in reversed(list(inputs)):
        readers = [layer[n] for n, sources in inputs.items() if name in sources]
        if name in free and readers:
            layer[name] = min(readers) - 1
    lowest = min(layer.values(), default=0)
    return {name: at - lowest for name, at in layer.items()}


def _columns(rows: list[list[str]], above: Mapping[str, list[str]], below: Mapping[str, list[str]]) -> dict[str, float]:
    column = {name: float(i) for row in rows for i, name in enumerate(row)}

    def wish(name: str, near: Mapping[str, list[str]]) -> float:
        places = [column[n] for n in near[name]]
        return sum(places) / len(places) if places else column[name]

    for sweep in range(_SWEEPS):
        near = above if sweep % 2 == 0 else below
        for row in rows if near is above else rows[::-1]:
            row.sort(key=lambda n: wish(n, near))
            _spread(row, {n: wish(n, near) for n in row}, column)
    left = min(column.values(), default=0.0)
    return {name: at - left for name, at in column.items()}


def _spread(row: list[str], wishes: Mapping[str, float], column: dict[str, float]) -> None:
    """Columns of a row: in its order, a width apart (a dummy takes less), as near to the wishes as that allows."""
    gaps = [0.0] + [(_room(a) + _room(b)) / 2 for a, b in itertools.pairwise(row)]
    starts = [sum(gaps[: i + 1]) for i in range(len(row))]
    # wish minus start must not fall along the row: the nearest such sequence, by pooling neighbours that violate it
    pools: list[tuple[float, int]] = []
    for name, start in zip(row, starts, strict=True):
        value, count = wishes[name] - start, 1
        while pools and pools[-1][0] > value:
            previous, n = pools.pop()
            value, count = (value * count + previous * n) / (count + n), count + n
        pools.append((value, count))
    shifts = [value for value, count in pools for _ in range(count)]
    for name, start, shift in zip(row, starts, shifts, strict=True):
        column[name] = start + shift


def _room(name: str) -> float:
    return 0.25 if "@" in name else 1.0
