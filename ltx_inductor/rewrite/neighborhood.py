"""A call of neighborhood attention, in whatever form a graph holds it, and the readers that find the forms.

A reader looks through a graph for one form and says, for every candidate, which call it is or why it is none. What all
forms have in common (legality, kernels, the replacement) is in neighborhood_rule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.view import GraphView

RULE = "neighborhood_attention"


@dataclass(frozen=True)
class NeighborhoodCall:
    """One call of 3D neighborhood attention: stride 1, dilation 1, not causal, no further keys.

    q, k, v:     values [B, T, H, W, heads, head_dim] that it reads.
    kernel_size: window, keys per axis T, H, W. It shifts inward at the borders, as NATTEN's does.
    scale:       factor of the scores before the softmax.
    result:      the value that is replaced: elements in the order of [B, T, H, W, heads, head_dim].
    form:        how the graph spells it, for the report, such as "natten::hopper_na3d_forward".
    call:        the node that does the attention; its source line is reported.
    inside:      what the call consists of, besides `result`: replaced, unless somebody else reads it.
    hopper_bits: its result has the bits of NATTEN's Hopper kernel with the default tiles for head_dim 64, which are the
                 bits that the schedule `exact` reproduces.
    grid:        where given, points T, H, W: q, k, v and result are [B, heads, T*H*W, head_dim] instead.
    unproved:    why it is not certain that this is such a call; the option `trust_block_mask` takes it for one.
    """

    q: Node
    k: Node
    v: Node
    kernel_size: tuple[int, int, int]
    scale: float
    result: Node
    form: str
    call: Node
    inside: tuple[Node, ...] = ()
    hopper_bits: bool = False
    grid: tuple[int, int, int] | None = None
    unproved: Refuse | None = None


@dataclass(frozen=True)
class Miss:
    """A candidate that is no call that can be replaced, and why. certain: see `Refusal`."""

    node: Node
    why: Refuse
    certain: bool = True


Reader = Callable[[GraphView], Iterable[NeighborhoodCall | Miss]]
READERS: list[Reader] = []


def reader(function: Reader) -> Reader:
    """Registers a reader of one form."""
    READERS.append(function)
    return function


def find_calls(view: GraphView) -> Iterator[NeighborhoodCall | Miss]:
    """What all readers find. Changes nothing."""
    for read in READERS:
        yield from read(view)


def bound_arguments(n: Node) -> dict[str, Any]:
    """The arguments of a call of a torch op by name, defaults included."""
    values: dict[str, Any] = {}
    for i, a in enumerate(n.target._schema.arguments):
        if i < len(n.args):
            values[a.name] = n.args[i]
        elif a.name in n.kwargs:
            values[a.name] = n.kwargs[a.name]
        elif a.has_default_value():
            values[a.name] = a.default_value
    return values


def whole_numbers(value: Any) -> tuple[int, ...] | None:
    """A list of sizes as ints, where they are; a dynamic one is a node."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, int) for v in value):
        return None
    return tuple(value)


def window_of(value: Any, form: str) -> tuple[int, int, int]:
    """The window of a call. Raises Refuse unless it is three known sizes."""
    sizes = whole_numbers(value)
    if sizes is None or len(sizes) != 3:
        raise Refuse(f"the window of {form} is {value}", expected="three sizes that are known at compile time")
    return sizes[0], sizes[1], sizes[2]
