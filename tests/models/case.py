"""One case of the corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn


@dataclass(frozen=True, eq=False)
class Case:
    """A model, what it is called with, and what the rewrite must make of it.

    sites:    sides that must be rewritten; None: either way, but the bits must be right and a loss reported.
    pairs:    how many `qk_` ops they must form; None: not this case's business.
    contract: the rounding contract of every site; None when there is none.
    refusal:  a regular expression that the reason or hint of one refusal must match; None: there may be none.
    dynamic:  {"seq": ..., "batch": ...}, each {index of input: axis}. An empty one cannot be made dynamic.
    head_dim: size of a head; the draws need it to make halves cancel. 0: the inputs are not to be redrawn.
    grad:     trace forward and backward. edit: changes the traced graph, for what no module can be traced to.
    needs:    the package it comes from, if any.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    sites: int | None
    contract: str | None = None
    refusal: str | None = None
    dynamic: dict[str, dict[int, int | Sequence[int]]] = field(default_factory=dict)
    notes: str = ""
    pairs: int | None = None
    head_dim: int = 8
    grad: bool = False
    needs: str = ""
    edit: Callable[[fx.GraphModule], None] | None = None

    def __str__(self) -> str:
        return self.name
