"""The pass: every rule finds its sites, checks legality, chooses kernels, replaces; every candidate ends in the report.

`rewrite_graph` edits one graph in place and never raises because of what it finds in it: an internal error becomes a
refusal and the graph is left as it was. It launches nothing and looks at no device; what it may do is in the Config,
and whether a kernel is there is answered by the `Kernels` object it is given.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

from torch.fx import Graph, Node

import ltx_inductor.ops  # noqa: F401  (registers the ops that the pass writes)
from ltx_inductor.config import Config
from ltx_inductor.rewrite import axial_rule, dump, neighborhood_rule, rope_rule
from ltx_inductor.rewrite.digits import internal_error
from ltx_inductor.rewrite.needs import Kernels
from ltx_inductor.rewrite.pictures import Pictures
from ltx_inductor.rewrite.report import GraphReport, LostFusionError, Refusal, RewriteReport
from ltx_inductor.rewrite.rule import Job, Rule

RULES: dict[str, Rule] = {
    axial_rule.RULE: axial_rule.run,
    rope_rule.RULE: rope_rule.run,
    neighborhood_rule.RULE: neighborhood_rule.run,
}


def rewrite_graph(graph: Graph, config: Config, kernels: Kernels | None = None) -> GraphReport:
    """Rewrites what the rules of `config` match, in place, and reports it.

    kernels: asked for every launch; None accepts all (the op then runs its reference).
    Raises LostFusionError with `config.strict` if anything was refused; nothing else.
    """
    report = GraphReport(nodes=len(graph.nodes))
    pictures = Pictures(graph, config.dump) if config.dump or dump.wanted() else None
    start = time.perf_counter()
    spoken_for: set[Node] = set()
    for rule in RULES:
        if rule not in config.rules:
            continue
        try:
            with _no_collections():
                RULES[rule](Job(rule, graph, config, kernels, report, pictures, spoken_for))
        except Exception as e:  # the user's compile goes on without this rule
            why = internal_error(e)
            report.refusals.append(Refusal(rule, why.reason, hint=why.hint))
    report.pass_ms = (time.perf_counter() - start) * 1e3 - report.kernel_ms
    if pictures:
        report.notes += pictures.finish()
    if config.strict and any(r.certain for r in report.refusals):
        raise LostFusionError(f"strict: something was left alone\n{RewriteReport([report])}")
    return report


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Python's cyclic garbage collector off: one full collection over a large graph takes as long as the pass itself.

    (16 blocks of LTX-2, 11,600 nodes: 0.3 s without, 1.2 s with an unlucky one.)
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
