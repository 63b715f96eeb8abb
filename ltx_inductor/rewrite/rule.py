"""What every rule is given, and what it gives back: sites and refusals of one graph, in program order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.fx import Graph, Node

from ltx_inductor.config import Config
from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.needs import Kernels, Need, NoKernels
from ltx_inductor.rewrite.pictures import Pictures
from ltx_inductor.rewrite.report import GraphReport, Refusal, Site
from ltx_inductor.rewrite.source import origin


@dataclass
class Job:
    """One rule, one graph: what the rule may do, whom it asks, and where its findings go.

    report: the graph's; shared by the rules, which add to it with `finish`.
    spoken_for: nodes of regions that an earlier rule has refused by name; shared by the rules, too.
    """

    rule: str
    graph: Graph
    config: Config
    kernels: Kernels | None
    report: GraphReport
    pictures: Pictures | None = None
    spoken_for: set[Node] = field(default_factory=set)
    _sites: list[tuple[float, Site]] = field(default_factory=list)
    _refusals: list[tuple[float, Refusal]] = field(default_factory=list)

    def site(self, at: float, site: Site) -> None:
        """at: the program order of the replaced value."""
        self._sites.append((at, site))

    def refuse(self, at: float, node: Node, why: Refuse, certain: bool = True) -> None:
        """at: the program order of the node, which is left as it is. Without kernels, that is the reason for all."""
        if isinstance(self.kernels, NoKernels):
            why = Refuse(self.kernels.reason)
        refusal = Refusal(
            self.rule,
            why.reason,
            node=node.name,
            expected=why.expected,
            found=why.found,
            hint=why.hint,
            certain=certain,
            **vars(origin(node)),
        )
        self._refusals.append((at, refusal))

    def ask(self, needs: Sequence[Need], size: int | None = None) -> str:
        """How it is known that the kernels are right. Raises Refuse where one is missing, or is not worth it.

        size: of the launch, in what the rule counts (`ltx_inductor.kernels.profit`); None if it is not known. Adds
        the time it took to get the kernels ready to the report.
        """
        if self.kernels is None:
            return ""
        proofs: dict[str, None] = {}
        start = time.perf_counter()
        try:
            slower = self.kernels.slower(needs[0], size)
            if slower:
                raise Refuse(
                    slower,
                    expected="a size at which the kernel was measured to be faster",
                    hint='option ltx_inductor.profit="any" rewrites it all the same',
                )
            for need in needs:
                sentence = self.kernels.refusal(need)
                if sentence:
                    raise Refuse(sentence)
                proofs[self.kernels.proof(need)] = None
        finally:
            self.report.kernel_ms += (time.perf_counter() - start) * 1e3
        return "; ".join(proofs)

    def finish(self) -> None:
        """Puts what was found into the report."""
        self.report.sites += [s for _, s in sorted(self._sites, key=lambda t: t[0])]
        self.report.refusals += [r for _, r in sorted(self._refusals, key=lambda t: t[0])]


class Rule(Protocol):
    """Rewrites what it finds in `job.graph`, in place, and reports it. May raise: the graph is then as it was."""

    def __call__(self, job: Job) -> None: ...


def on_the_cpu() -> Refuse:
    return Refuse(
        "the graph is on the CPU, where Inductor's C++ is faster than this op's reference",
        expected="a CUDA device",
        hint="option ltx_inductor.cpu=True (or LTX_INDUCTOR_CPU=1) rewrites it all the same",
    )
