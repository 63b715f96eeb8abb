"""What one rewrite did to the graph, as plain data that a page or a terminal can draw: before, after, diff."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DrawnNode:
    """One graph node.

    role:   "input" (computed outside), "region" (replaced), "new" (written by the pass), "op" (the fused op) or
            "reader" (outside, reads the result).
    call:   the op with its arguments, as in a dump. type: such as "bf16[1, 24, 64]". inputs: names of drawn nodes.
    source: the user's line, "file.py:12 in forward: x = self.norm(x)", or "".
    """

    name: str
    role: str
    op: str
    call: str
    type: str
    inputs: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True)
class Drawing:
    """The nodes before and after one rewrite, in program order, and the diff of their text."""

    before: tuple[DrawnNode, ...]
    after: tuple[DrawnNode, ...]
    diff: str

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Drawing:
        """Inverse of `dataclasses.asdict`."""

        def nodes(found: Iterable[Mapping[str, Any]]) -> tuple[DrawnNode, ...]:
            return tuple(DrawnNode(**{**n, "inputs": tuple(n["inputs"])}) for n in found)

        return Drawing(nodes(data["before"]), nodes(data["after"]), data["diff"])
