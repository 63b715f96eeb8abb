"""What a compile did and did not rewrite: sites, refusals, and the report that carries both.

Plain data: everything here can be turned into JSON and back, so that a report outlives the process (see
`ltx_inductor.backend`, which finds it again when Inductor's caches skip the pass).
"""

from __future__ import annotations

import json
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ltx_inductor.config import RULES
from ltx_inductor.rewrite.difference import Difference, difference
from ltx_inductor.rewrite.drawn import Drawing


class LostFusionError(RuntimeError):
    """A rewrite that was asked for did not happen; the message lists what is missing and why."""


@dataclass(frozen=True)
class Site:
    """One rewritten side (one RMSNorm -> RoPE chain of one tensor), or one call of neighborhood attention.

    rule, op: names, such as "rmsnorm_split_rope" and "ltx_inductor::qk_rmsnorm_split_rope".
    side:     "q" or "k" where the attention that reads the result tells, else None; None for a call.
    pair:     number of the two-sided op this side shares with another side of the same graph, else None.
    source:   "file.py:123", the user's line that starts the chain; "" if the graph does not know it.
    shapes:   sizes as text, symbols for dynamic ones, by operand: x, cos, out; of a call q, k, v, out and its window.
    contract: the rounding contract, see `ltx_inductor.contract`; of a call the schedule, "fast" or "exact".
    node:     the graph value that was replaced.
    graph:    number of the graph in its report.
    drawing:  number of the before/after drawing in its graph's `drawings`, else None. Sites that look alike share one.
    bytes:    what the op at least has to move for this side (operands and result once); None for dynamic sizes.
    proof:    how it is known that the op is right here, as a sentence; "" where nobody was asked.
    form:     how the graph spelled a call, such as "natten::hopper_na3d_forward"; "" for a side.
    path, code, module: what tells places of one `source` apart, see `ltx_inductor.rewrite.source.Origin`.
    """

    rule: str
    op: str
    side: str | None
    pair: int | None
    source: str
    shapes: dict[str, str]
    contract: str
    node: str
    graph: int = 0
    drawing: int | None = None
    bytes: int | None = None
    proof: str = ""
    form: str = ""
    path: str = ""
    code: str = ""
    module: str = ""

    def __str__(self) -> str:
        side = self.form or (f"{self.side} side" if self.side else "one side")
        pair = f", pair {self.pair}" if self.pair is not None else ""
        pair += f", {self.module}" if self.module else ""
        shapes = " ".join(f"{k}={v}" for k, v in self.shapes.items())
        return (
            f"{self.source or '<no source line>'}  {self.rule} ({side}{pair})  {self.contract}  {shapes}  -> {self.op}"
        )


@dataclass(frozen=True)
class Refusal:
    """A near-match that was left alone: the reason as a sentence, and what to change.

    certain: it is what the rule is about: a normalised value that is rotated, a call of neighborhood attention. False:
    it only looks like one, which `strict` does not mind. path, code, module: as of a Site.
    """

    rule: str
    reason: str
    source: str = ""
    node: str = ""
    expected: str = ""
    found: str = ""
    hint: str = ""
    graph: int = 0
    certain: bool = True
    path: str = ""
    code: str = ""
    module: str = ""

    def __str__(self) -> str:
        lines = [f"{self.source or '<no source line>'}  {self.rule} not rewritten: {self.reason}"]
        for name in ("module", "found", "expected", "hint"):
            text = getattr(self, name)
            if text:
                lines.append(f"      {name + ':':<10}{text}")
        return "\n".join(lines)


@dataclass
class GraphReport:
    """Sites and refusals of one graph, in program order."""

    sites: list[Site] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    nodes: int = 0
    pass_ms: float = 0.0
    kernel_ms: float = 0.0  # building, loading and proving kernels; the second time it is next to nothing
    notes: list[str] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> GraphReport:
        """Inverse of `to_dict`; raises TypeError or KeyError where the data is not a graph report."""
        return GraphReport(
            [Site(**s) for s in data["sites"]],
            [Refusal(**r) for r in data["refusals"]],
            int(data["nodes"]),
            float(data["pass_ms"]),
            float(data["kernel_ms"]),
            list(data["notes"]),
            [Drawing.from_dict(d) for d in data["drawings"]],
        )


@dataclass
class RewriteReport:
    """All graphs of one compiled callable.

    cached: the report was read back because Inductor's caches answered and the pass did not run.
    remarks: sentences about the compile as a whole, such as why it has no report.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    cached: bool = False
    remarks: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Sentences worth telling: those of the compile and those of its graphs, each once."""
        return list(dict.fromkeys([*self.remarks, *(n for g in self.graphs for n in g.notes)]))

    @property
    def sites(self) -> list[Site]:
        """What was rewritten: by graph and rule, in program order."""
        return [s for g in self.graphs for s in g.sites]

    @property
    def refusals(self) -> list[Refusal]:
        """Near-matches that were left alone: by graph and rule, in program order."""
        return [r for g in self.graphs for r in g.refusals]

    @property
    def pass_ms(self) -> float:
        """Milliseconds spent in the pass, summed over graphs."""
        return sum(g.pass_ms for g in self.graphs)

    @property
    def kernel_ms(self) -> float:
        """Milliseconds spent on building, loading and proving kernels, summed over graphs; not part of pass_ms."""
        return sum(g.kernel_ms for g in self.graphs)

    def count(self, rule: str | None = None) -> int:
        """Sites of `rule` (sides, or calls), or of every rule. Raises ValueError for a name that is none."""
        if rule is not None:
            self._check_rule(rule)
        return sum(rule is None or s.rule == rule for s in self.sites)

    def expect(self, **counts: int) -> None:
        """Raises LostFusionError unless each named rule rewrote exactly that many sides (or calls).

        The message lists the sites that were found and every refusal, with its reason.
        Raises ValueError for a name that is no rule, and TypeError for a count that is no whole number.
        """
        for rule, n in counts.items():
            if isinstance(n, bool) or not isinstance(n, int):
                raise TypeError(f"expect({rule}={n!r}): expected a whole number of sites")
        wrong = {rule: n for rule, n in counts.items() if self.count(rule) != n}
        if not wrong:
            return
        head = "; ".join(
            f"expected {n} {_NOUNS.get(rule, 'site')}s of {rule}, found {self.count(rule)}" for rule, n in wrong.items()
        )
        raise LostFusionError(f"{head}\n{self}")

    def _check_rule(self, rule: str) -> None:
        known = [*RULES, *(s.rule for s in self.sites if s.rule not in RULES)]
        if rule not in known:
            raise ValueError(f"{rule!r} is not a rule; the rules are: {', '.join(known)}")

    def diff(self, after: RewriteReport) -> Difference:
        """What `after`, a later report of the same model, has gained and lost; `str()` of it is for people.

        Raises TypeError where `after` is no report.
        """
        if not isinstance(after, RewriteReport):
            raise TypeError(f"diff(after={after!r}): expected a RewriteReport (RewriteReport.from_dict makes one)")
        return difference(self, after)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict with keys graphs, cached, notes, pass_ms, counts."""
        rules = sorted({s.rule for s in self.sites})
        return {
            "graphs": [g.to_dict() for g in self.graphs],
            "cached": self.cached,
            "remarks": list(self.remarks),
            "notes": self.notes,
            "pass_ms": self.pass_ms,
            "kernel_ms": self.kernel_ms,
            "counts": {rule: self.count(rule) for rule in rules},
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self, path: str | os.PathLike[str], title: str = "ltx_inductor report") -> None:
        """Writes the report as one self-contained page: graphs before and after, diffs, reasons, search, filters.

        Raises OSError where it cannot be written, TypeError for a path or title that is none.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"to_html(path={path!r}): expected the path of a file")
        if not isinstance(title, str):
            raise TypeError(f"to_html(title={title!r}): expected text")
        from ltx_inductor.views.page import page

        Path(path).write_text(page(self.to_dict(), title), encoding="utf-8")

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RewriteReport:
        """Inverse of `to_dict`. Raises TypeError for what is no mapping, ValueError for one that is no report."""
        if not isinstance(data, Mapping):
            raise TypeError(f"from_dict(data={reprlib.repr(data)}): expected a mapping, as to_dict gives it")
        try:
            graphs = [GraphReport.from_dict(g) for g in data["graphs"]]
            return RewriteReport(graphs, bool(data["cached"]), list(data["remarks"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"from_dict(data={reprlib.repr(data)}): expected what to_dict gives, with the keys graphs, cached and "
                f"remarks ({type(error).__name__}: {error})"
            ) from error

    def __str__(self) -> str:
        return "\n".join(_render(self))


_NOUNS = {"rmsnorm_axial_rope": "axial side", "rmsnorm_split_rope": "side", "neighborhood_attention": "call"}


def _counted(sites: list[Site]) -> str:
    """Such as "16 sides and 1 call"."""
    counts = Counter(_NOUNS.get(s.rule, "site") for s in sites) or {"side": 0}
    return " and ".join(f"{n} {noun}{'s' * (n != 1)}" for noun, n in counts.items())


def _render(report: RewriteReport) -> Iterable[str]:
    m = len(report.refusals)
    origin = f", {report.kernel_ms:.0f} ms for kernels" if report.kernel_ms >= 1 else ""
    origin += ", read from cache" if report.cached else ""
    yield (
        f"ltx_inductor: {_counted(report.sites)} rewritten, {m} refused, in {len(report.graphs)} "
        f"graph{'s' * (len(report.graphs) != 1)} ({report.pass_ms:.1f} ms in the pass{origin})"
    )
    for note in report.notes:
        yield f"  note: {note}"
    if report.sites:
        yield "rewritten:"
        yield from (f"  {s}" for s in report.sites)
    if report.refusals:
        yield "left alone:"
        yield from (f"  {r}" for r in report.refusals)
    if not report.sites and not report.refusals:
        yield "  nothing in it looks like a rotation of a normalised query or key, or like neighborhood attention"
