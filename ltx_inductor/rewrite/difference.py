"""What was gained and what was lost between two reports of one model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx_inductor.rewrite.report import Refusal, RewriteReport, Site


@dataclass(frozen=True)
class Difference:
    """Sites that only the second report has (gained), or only the first (lost), and refusals only the second has.

    Sites are compared by what they are (rule, file, side, contract, shapes, op), not by line or node: code moves. So do
    the names of symbols in shapes, which say nothing; sizes that are numbers are part of a site.
    """

    gained: tuple[Site, ...]
    lost: tuple[Site, ...]
    refused: tuple[Refusal, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict with keys gained, lost, refused."""
        return {name: [asdict(x) for x in getattr(self, name)] for name in ("gained", "lost", "refused")}

    def __str__(self) -> str:
        lines = [f"{len(self.gained)} gained, {len(self.lost)} lost, {len(self.refused)} refused that were not before"]
        lines += [f"+ {s}" for s in self.gained] + [f"- {s}" for s in self.lost] + [f"? {r}" for r in self.refused]
        return "\n".join(lines)


def difference(before: RewriteReport, after: RewriteReport) -> Difference:
    """Each site and refusal counts as often as it is there."""
    return Difference(
        tuple(_only(after.sites, before.sites, _site)),
        tuple(_only(before.sites, after.sites, _site)),
        tuple(_only(after.refusals, before.refusals, _refusal)),
    )


def _only(mine: Iterable[Any], theirs: Iterable[Any], key: Any) -> Iterable[Any]:
    left = Counter(key(x) for x in theirs)
    for x in mine:
        if left[key(x)]:
            left[key(x)] -= 1
        else:
            yield x


def _site(s: Site) -> tuple[Any, ...]:
    return s.rule, _file(s.source), s.side, s.contract, s.op, _renamed(s.shapes)


_SYMBOL = re.compile(r"\b[su]\d+\b")  # as ShapeEnv names sizes: s27, and u0 for one that depends on data
_PRODUCT = re.compile(r"\w+(?:\*\w+)+")


def _renamed(shapes: Mapping[str, str]) -> str:
    """The shapes, with symbols numbered in order of appearance: first those that are a size alone, in plain order.

    Factors are printed in the order of their names, so they are sorted again.
    """
    text = " ".join(f"{name}={shape}" for name, shape in sorted(shapes.items()))
    number: dict[str, str] = {}
    for size in sorted(re.split(r"[ ,\[\]]+", text), key=lambda size: len(_SYMBOL.findall(size))):
        for symbol in _SYMBOL.findall(size):
            number.setdefault(symbol, f"size{len(number)}")
    text = _SYMBOL.sub(lambda m: number[m[0]], text)
    return _PRODUCT.sub(lambda m: "*".join(sorted(m[0].split("*"))), text)


def _refusal(r: Refusal) -> tuple[Any, ...]:
    return r.rule, _file(r.source), r.expected, r.hint, r.certain


def _file(source: str) -> str:
    return source.rpartition(":")[0]
