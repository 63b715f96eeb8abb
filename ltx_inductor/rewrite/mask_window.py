"""Is a mask the window of 3D neighborhood attention? Proved by evaluation, axis by axis.

The mask is a conjunction. Conditions that read the same digits of a position belong to one axis of the grid; an axis
of n points has n x n pairs of query and key, and the conditions on it are evaluated on all of them. If that is NATTEN's
window on each of three axes, it is on every pair of positions, however it is written. A digit that no condition reads
is an axis on which every query sees every key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.mask_expr import Apply, Expr, Linear, evaluate
from ltx_inductor.rewrite.mask_reader import Coords, Reader, Split

MAX_AXIS = 2048  # points per axis: 4 million pairs, 32 MiB per value
_EXPECTED = "a window on each of three axes (T, H, W)"


@dataclass(frozen=True)
class Window:
    """grid: points per axis, T, H, W; kernel_size: keys per axis that a query sees."""

    grid: tuple[int, int, int]
    kernel_size: tuple[int, int, int]


def window_of(mask: Node, coords: Coords, leaves: Mapping[Node, str], length: int, example: bool = False) -> Window:
    """What the mask value `mask` selects among length x length positions. Raises Refuse where it is no such window.

    coords, leaves, example: as for `mask_reader.Reader`.
    """
    with _disable_current_modes():
        reader, e = _read(mask, coords, leaves, length, example)
        try:
            axes = [_axis(reader.radices, digits, conditions) for digits, conditions in _by_axis(reader, e)]
        except Refuse:
            if reader.odd:
                raise _other_sequence(reader) from None
            raise
    if len(axes) != 3:
        raise Refuse(
            f"the mask is a window on {len(axes)} ax{'es' if len(axes) != 1 else 'is'}, {_sizes(reader.radices)}",
            expected=_EXPECTED,
        )
    (t, h, w), (wt, wh, ww) = zip(*axes, strict=True)
    return Window((t, h, w), (wt, wh, ww))


def reads_a_grid(mask: Node, leaves: Mapping[Node, str], length: int, example: bool = False) -> bool:
    """Does the mask take positions apart into coordinates, as every neighborhood mask does?"""
    with _disable_current_modes():
        try:
            reader, _ = _read(mask, (), leaves, length, example)
        except Refuse:
            return any("div" in str(n.target) or "remainder" in str(n.target) for n in mask.graph.nodes)
        return len(reader.radices) > 1 or bool(reader.odd)


def _read(mask: Node, coords: Coords, leaves: Mapping[Node, str], length: int, example: bool) -> tuple[Reader, Expr]:
    radices = [length]
    while True:
        reader = Reader(radices, leaves, example)
        try:
            return reader, reader.read(mask, coords)
        except Split as split:
            radices[split.digit : split.digit + 1] = [radices[split.digit] // split.low, split.low]


def _conditions(e: Expr) -> Iterator[Expr]:
    """The terms of a conjunction."""
    if isinstance(e, Apply) and e.name == "and":
        for a in e.args:
            yield from _conditions(a)
    elif isinstance(e, Apply) and e.name == "where" and e.args[2] == Linear(0):
        yield from _conditions(e.args[0])
        yield from _conditions(e.args[1])
    else:
        yield e


def _by_axis(reader: Reader, e: Expr) -> list[tuple[list[int], list[Expr]]]:
    """Digits that are read together, the most significant first, with the conditions on them."""
    axes: list[tuple[set[int], list[Expr]]] = [({i}, []) for i in range(len(reader.radices))]
    for condition in _conditions(e):
        read = {i for _, i in condition.digits}
        if not read:
            if condition == Linear(0):
                raise Refuse("the mask lets no query see any key", expected=_EXPECTED)
            continue
        joined = [axis for axis in axes if axis[0] & read]
        axes = [axis for axis in axes if not axis[0] & read]
        axes.append((set().union(*(a[0] for a in joined)), [c for a in joined for c in a[1]] + [condition]))
    found = sorted((sorted(digits), conditions) for digits, conditions in axes)
    for digits, _ in found:
        size = math.prod(reader.radices[i] for i in digits)
        if digits != list(range(digits[0], digits[-1] + 1)) or (size > MAX_AXIS and len(found) < 3):
            _not_separable(reader)
        if size > MAX_AXIS:
            raise Refuse(f"an axis of the mask has {size} points", expected=f"at most {MAX_AXIS}")
    return found


def _not_separable(reader: Reader) -> None:
    length = math.prod(reader.radices)
    raise Refuse(f"the mask over {length} positions is no conjunction of conditions on single axes", expected=_EXPECTED)


def _other_sequence(reader: Reader) -> Refuse:
    return Refuse(
        f"the mask divides positions by {reader.odd[0]}, which does not fit a sequence of {math.prod(reader.radices)}",
        expected="sizes T, H, W whose product is the length of the sequence",
    )


def _axis(radices: list[int], digits: list[int], conditions: list[Expr]) -> tuple[int, int]:
    """(points, keys that a query sees) of one axis, after looking at every pair of query and key on it."""
    n = math.prod(radices[i] for i in digits)
    if not conditions:
        return n, n
    at: dict[tuple[str, int], Tensor] = {}
    point, stride = torch.arange(n), 1
    for i in reversed(digits):
        coordinate = point // stride % radices[i]
        at["q", i], at["kv", i] = coordinate[:, None], coordinate
        stride *= radices[i]
    seen = torch.ones(n, n, dtype=torch.bool)
    for condition in conditions:
        seen &= evaluate(condition, at) != 0
    keys = seen.sum(1)
    least, most = int(keys.min()), int(keys.max())
    if least != most:
        raise Refuse(
            f"along an axis of {n} points a query sees {least} to {most} keys",
            expected="equally many for every query: a window that is shifted inward at the borders, not cut or causal",
        )
    start = torch.clamp(point - most // 2, 0, n - most)[:, None]
    if not torch.equal(seen, (point >= start) & (point < start + most)):
        raise Refuse(
            f"along an axis of {n} points a query sees {most} keys that are not NATTEN's window",
            expected=f"keys from min(max(i - {most // 2}, 0), {n - most}) on, without gaps",
        )
    return n, most


def _sizes(radices: list[int]) -> str:
    return " x ".join(map(str, radices))
