"""From a Side's digits to tensors of the op: which layout nodes turn each operand into [B, S, ...] form.

A Plan is a recipe (split axes, fix positions, permute, merge) that is worked out from digits alone, so it can be
tried before anything is written into the graph, compared (two sides share tables if their plans are equal), and
emitted later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ltx_inductor.rewrite.digits import Atom, Const, Coords, Digit, Digits, Refuse, radix
from ltx_inductor.rewrite.rope import Operand, Side
from ltx_inductor.rewrite.size import ONE, Size, Sizes, product


@dataclass(frozen=True)
class Plan:
    """How to read `node` as a tensor with one axis per group of digits.

    split:  sizes of the axes after cutting every axis at group borders, or None where nothing is cut.
    fixed:  (axis, index) to select, last axis first.
    order:  permutation of what is left, in group order; None for the identity.
    groups: for every group, the sizes to merge into one axis; () for a group the operand does not have (size 1).
    """

    node: Node
    split: tuple[Size, ...] | None
    fixed: tuple[tuple[int, int], ...]
    order: tuple[int, ...] | None
    groups: tuple[tuple[Size, ...], ...]
    negated: bool


def plan(operand: Operand, groups: Sequence[Digits]) -> Plan:
    """Raises Refuse where the operand has part of a group, or digits of a group in another order."""
    name = operand.node.name
    where: dict[Digit, tuple[int, int]] = {d: (g, i) for g, digits in enumerate(groups) for i, d in enumerate(digits)}
    pieces: list[tuple[int, int, Size]] = []  # (group, position in it, size) of every axis after cutting
    fixed: list[tuple[int, int]] = []
    cut = False
    for axis in operand.coords:
        runs = list(_runs(axis, where, name))
        cut |= len(runs) > 1
        for run in runs or [()]:
            if not run:
                pieces.append((-1, 0, ONE))  # an axis of size 1
            elif isinstance(run[0], Const):
                fixed.append((len(pieces), run[0].value))
                pieces.append((-2, 0, run[0].size))
            else:
                g, i = where[run[0]]
                pieces.append((g, i, radix(run)))
    left = _place_unit_axes([p for p in pieces if p[0] != -2], [g for g, digits in enumerate(groups) if not digits])
    order = tuple(sorted(range(len(left)), key=lambda a: (left[a][0] < 0, left[a][:2])))
    merged = tuple(tuple(s for g, _, s in (left[a] for a in order) if g == want) for want in range(len(groups)))
    for digits, sizes in zip(groups, merged, strict=True):
        if sizes and radix(digits) != product(sizes):
            raise Refuse(f"{name} is indexed by a part of the token axes, {list(operand.coords)}")
    return Plan(
        operand.node,
        tuple(s for _, _, s in pieces) if cut else None,
        tuple(reversed(fixed)),
        None if order == tuple(range(len(left))) else order,
        merged,
        operand.negated,
    )


def _place_unit_axes(axes: list[tuple[int, int, Size]], empty: list[int]) -> list[tuple[int, int, Size]]:
    """Gives axes of size 1 to groups without digits where that keeps the order: then nothing has to be moved."""
    out = list(axes)
    for i, (g, _, size) in enumerate(out):
        if g != -1:
            continue
        before = max((p[0] for p in out[:i]), default=-1)
        after = [p[0] for p in out[i + 1 :] if p[0] >= 0]
        fits = [e for e in empty if before < e and all(e < a for a in after)]
        if fits:
            out[i] = (fits[0], 0, size)
            empty = [e for e in empty if e != fits[0]]
    return out


def _runs(axis: Digits, where: dict[Digit, tuple[int, int]], name: str) -> Iterator[Digits]:
    """The axis cut wherever two neighbouring digits are not neighbours of one group."""
    run: list[Atom] = []
    for d in axis:
        if isinstance(d, Const):
            if run:
                yield tuple(run)
                run = []
            yield (d,)
            continue
        if d not in where:
            raise Refuse(f"{name} is indexed by {d}, which is no digit of the result")
        if run and where[d] != (where[run[-1]][0], where[run[-1]][1] + 1):
            yield tuple(run)
            run = []
        run.append(d)
    if run:
        yield tuple(run)


@dataclass(frozen=True)
class SidePlan:
    """The operands of the op for one side.

    batch, seq, heads: the digits that play these roles. per_head: x is [B, S, H, D] and normalised over D; otherwise it
    is [B, S, H*D] and normalised over the row. layout: memory order of the result, see `ltx_inductor.ops.rope`.
    """

    side: Side
    batch: Digits
    seq: Digits
    heads: Digits
    per_head: bool
    layout: str
    x: Plan
    weight: Plan | None
    cos: Plan
    sin: Plan

    @property
    def num_heads(self) -> int:
        return radix(self.heads).known or 1

    @property
    def memory_order(self) -> Digits:
        """Digits of the op's output, slowest first."""
        half = (self.side.half, *self.side.pair)
        if self.layout == "bhsd":
            return (*self.batch, *self.heads, *self.seq, *half)
        return (*self.batch, *self.seq, *self.heads, *half)


def plans(side: Side, layout: str) -> list[SidePlan]:
    """Every assignment of the token axes to B, S and H under which all operands can be read, the most natural first.

    Raises Refuse, where there is none, with the reason of the most natural one.
    """
    first: Refuse | None = None
    found: list[SidePlan] = []
    for batch, seq, heads, per_head in _assignments(side):
        try:
            found.append(_plan_with(side, layout, batch, seq, heads, per_head))
        except Refuse as e:
            first = first or e
    if not found:
        raise first or Refuse(f"{side.result.name}: no assignment of {list(side.rows)} to batch, token and head axes")
    return found


def _assignments(side: Side) -> Iterator[tuple[Digits, Digits, Digits, bool]]:
    rows = side.rows
    by_row = [(rows[:k], rows[k:], side.heads, False) for k in _middle_out(len(rows))]
    if side.heads:
        yield from by_row
        return
    by_head = [
        (rest[:k], rest[k:], rows[h : h + 1], True)
        for h in reversed(range(len(rows)))
        for rest in [rows[:h] + rows[h + 1 :]]
        for k in _middle_out(len(rest))
        if rows[h].size.known is not None
    ]
    many_axes = side.statistic.x.meta["val"].dim() - len(side.statistic.dims) > 2
    yield from by_head + by_row if many_axes else by_row + by_head


def _middle_out(n: int) -> list[int]:
    """Where to cut n token axes into batch and sequence: one batch axis first, then none, then more.

    A single axis is the sequence, unless the tables say otherwise (B > 1, S = 1, tables of batch 1).
    """
    return {0: [0], 1: [0, 1]}.get(n, [1, 0, *range(2, n + 1)])


def _plan_with(side: Side, layout: str, batch: Digits, seq: Digits, heads: Digits, per_head: bool) -> SidePlan:
    half = (side.half, *side.pair)
    if radix(heads).known is None:
        raise Refuse(f"{side.result.name}: the number of heads, {radix(heads)}, is not a constant")
    x_groups = [batch, seq, heads, half] if per_head else [batch, seq, (*heads, *half)]
    table_groups = [batch, heads, seq, side.pair]
    tables = [plan(t, table_groups) for t in (side.cos, side.sin)]
    for t in tables:
        if seq and not t.groups[2]:
            raise Refuse(
                f"{t.node.name} has the same angle for every token of {side.x.node.name}",
                expected="a table with a token axis",
            )
    normed = half if per_head else (*heads, *half)
    weight = plan(side.weight, [normed]) if side.weight else None
    x = plan(side.x, x_groups)
    return SidePlan(side, batch, seq, heads, per_head, layout, x, weight, tables[0], tables[1])


def result_axes(sp: SidePlan) -> tuple[tuple[Size, ...], tuple[int, ...], Coords]:
    """(sizes to cut the op's output into, permutation to the result's digit order, the result's coordinates).

    Each size is a run of digits that stay together in the result.
    """
    memory, out = sp.memory_order, sp.side.out
    place = {d: i for i, d in enumerate(memory)}
    runs: list[list[Atom]] = []
    for axis in out:
        run: list[Atom] = []
        for d in axis:
            assert isinstance(d, Atom)
            if run and place[d] != place[run[-1]] + 1:
                runs.append(run)
                run = []
            run.append(d)
        if run:
            runs.append(run)
    in_memory = sorted(range(len(runs)), key=lambda r: place[runs[r][0]])
    position = {r: i for i, r in enumerate(in_memory)}
    return tuple(radix(runs[r]) for r in in_memory), tuple(position[r] for r in range(len(runs))), out


def has_strides_of_result(sp: SidePlan, sizes: Sizes) -> bool:
    """Is the result a view of the op's contiguous output, with the strides that it has now?"""
    stride: dict[Digit, Size] = {}
    total = ONE
    for d in reversed(sp.memory_order):
        stride[d] = total
        total = total * d.size
    value = sp.side.result.meta["val"]
    for axis, size, now in zip(sp.side.out, value.shape, value.stride(), strict=True):
        if not axis or sizes.of(size) == ONE:
            continue
        for high, low in itertools.pairwise(axis):
            if stride[high] != stride[low] * low.size:
                return False
        if stride[axis[-1]] != sizes.of(now):
            return False
    return True
