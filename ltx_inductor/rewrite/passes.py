"""The pass: find sites, check legality, pair sides, choose kernels, replace, lint; every candidate ends in the report.

`rewrite_graph` edits one graph in place and never raises because of what it finds in it: an internal error becomes a
refusal and the graph is left as it was. It launches nothing and looks at no device; what it may do is in the Config,
and whether a kernel is there is answered by the `Kernels` object it is given.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.fx import Graph, Node

import ltx_inductor.ops  # noqa: F401  (registers the ops that the pass writes)
from ltx_inductor.config import Config
from ltx_inductor.rewrite import dump
from ltx_inductor.rewrite.axes import SidePlan
from ltx_inductor.rewrite.digits import Refuse, internal_error
from ltx_inductor.rewrite.drawing import Drawings
from ltx_inductor.rewrite.pairs import Launch, input_nodes, pair_sides
from ltx_inductor.rewrite.pictures import Pictures
from ltx_inductor.rewrite.replace import Replacer
from ltx_inductor.rewrite.report import GraphReport, LostFusionError, Refusal, RewriteReport, Site
from ltx_inductor.rewrite.search import search
from ltx_inductor.rewrite.source import source_line
from ltx_inductor.rewrite.sweep import uncovered_rotations
from ltx_inductor.rewrite.view import GraphView

RULE = "rmsnorm_split_rope"


@dataclass(frozen=True)
class KernelNeed:
    """What one launch asks of a kernel: dtypes of x and of cos/sin, sizes in elements, contract, layout, device.

    shared: both sides of a pair use the same cos and sin and have the same number of heads.
    """

    device: torch.device
    dtype: torch.dtype
    table_dtype: torch.dtype
    head_dim: int
    hidden: int
    per_head: bool
    contract: str
    layout: str
    shared: bool


class Kernels(Protocol):
    """Knows which kernels exist, and may build or load them: it is asked when a graph is compiled."""

    def refusal(self, need: KernelNeed) -> str | None:
        """None if the launch can run, or a sentence that says what is missing and what to do."""
        ...

    def note(self, need: KernelNeed) -> str | None:
        """Something worth telling about a launch that is written all the same, or None."""
        ...

    def proof(self, need: KernelNeed) -> str:
        """How it is known that the launch has eager's bits; asked where `refusal` gave None."""
        ...


def rewrite_graph(graph: Graph, config: Config, kernels: Kernels | None = None) -> GraphReport:
    """Rewrites what the rules of `config` match, in place, and reports it.

    kernels: asked for every side on a device with kernels; None accepts all (the op then runs its reference).
    Raises LostFusionError with `config.strict` if anything was refused; nothing else.
    """
    report = GraphReport(nodes=len(graph.nodes))
    pictures = Pictures(graph, config.dump) if config.dump or dump.wanted() else None
    start = time.perf_counter()
    if RULE in config.rules:
        try:
            with _no_collections():
                _run(graph, config, kernels, report, pictures)
        except Exception as e:  # the user's compile goes on without us
            why = internal_error(e)
            report.refusals.append(Refusal(RULE, why.reason, hint=why.hint))
    report.pass_ms = (time.perf_counter() - start) * 1e3 - report.kernel_ms
    if pictures:
        report.notes += pictures.finish()
    if config.strict and any(r.certain for r in report.refusals):
        raise LostFusionError(f"strict: something was left alone\n{RewriteReport([report])}")
    return report


def _run(graph: Graph, config: Config, kernels: Kernels | None, report: GraphReport, pictures: Pictures | None) -> None:
    view = GraphView(graph)
    found = search(view)
    refusals: list[tuple[float, Refusal]] = []

    def refuse(node: Node, why: Refuse, certain: bool = True) -> None:
        refusals.append((view.order[node], _refusal(node, why, certain)))

    for miss in found.misses:
        refuse(miss.node, miss.why, miss.certain)
    try:
        for suspect in uncovered_rotations(view, found.covered):
            refuse(suspect.node, suspect.why, suspect.certain)
    except Exception as e:  # the sweep only tells; what was found is rewritten all the same
        report.refusals.append(Refusal(RULE, internal_error(e).reason, certain=False))
    kept: list[SidePlan] = []
    for side in found.sides:
        if side.side.x.node.meta["val"].device.type == "cpu" and not config.cpu:
            refuse(side.side.result, _on_the_cpu())
        else:
            kept.append(side)
    launches = pair_sides(view, kept)
    replacer = Replacer(view, launches)
    sites: list[tuple[float, Site]] = []
    pairs = 0
    drawings = Drawings(graph, view.order)
    for launch in launches:
        described = [(s, _shapes(s), source_line(s.side.statistic.rstd)) for s in launch.sides]
        alike = tuple((source, *shapes.values(), s.side.contract.name) for s, shapes, source in described)
        sizes = traffic(launch)
        try:
            proof = _ask(kernels, launch, report)
            inputs = [n for s in launch.sides for n in input_nodes(s)]
            drawn = drawings.before(alike, inputs, [s.side.result for s in launch.sides])
            before = pictures.before(view, launch) if pictures else None
            op = replacer.replace(launch)
        except Exception as e:  # the replacer has taken its nodes out again
            for s, _, _ in described:
                refuse(s.side.result, e if isinstance(e, Refuse) else internal_error(e))
            continue
        number, drawing = None, drawings.after(alike, drawn, op)
        if len(launch.sides) == 2:
            number, pairs = pairs, pairs + 1
        name = str(op.target).removesuffix(".default").replace(".", "::")
        for (s, shapes, source), role, size in zip(described, launch.roles, sizes, strict=True):
            site = Site(
                RULE,
                name,
                role,
                number,
                source,
                shapes,
                s.side.contract.name,
                s.side.result.name,
                drawing=drawing,
                bytes=size,
                proof=proof,
            )
            sites.append((view.order[s.side.result], site))
        if pictures and before:
            pictures.after(before, f"{RULE} {described[0][2]}")
    replacer.finish()
    graph.lint()
    report.drawings += drawings.done
    report.sites += [s for _, s in sorted(sites, key=lambda t: t[0])]
    report.refusals += [r for _, r in sorted(refusals, key=lambda t: t[0])]


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


def _on_the_cpu() -> Refuse:
    return Refuse(
        "the graph is on the CPU, where Inductor's C++ is faster than this op's reference",
        expected="a CUDA device",
        hint="option ltx_inductor.cpu=True (or LTX_INDUCTOR_CPU=1) rewrites it all the same",
    )


def _ask(kernels: Kernels | None, launch: Launch, report: GraphReport) -> str:
    """How it is known that the kernels have eager's bits. Raises Refuse where a side has no kernel.

    Notes what is worth telling, and the time it took to get the kernels ready.
    """
    proofs: dict[str, None] = {}
    start = time.perf_counter()
    try:
        for need in _needs(launch) if kernels else ():
            assert kernels
            sentence = kernels.refusal(need)
            if sentence:
                raise Refuse(sentence)
            note = kernels.note(need)
            if note and note not in report.notes:
                report.notes.append(note)
            proofs[kernels.proof(need)] = None
    finally:
        report.kernel_ms += (time.perf_counter() - start) * 1e3
    return "; ".join(proofs)


def _needs(launch: Launch) -> list[KernelNeed]:
    """One per kernel that the op will launch: sides of different row lengths are launched one after the other."""
    hidden = [2 * (s.side.pair_size.known or 0) * s.num_heads for s in launch.sides]
    one_launch = len(launch.sides) == 2 and (launch.sides[0].per_head or hidden[0] == hidden[1])
    shared = one_launch and launch.shares_tables and launch.sides[0].num_heads == launch.sides[1].num_heads
    needs = []
    for planned, size in zip(launch.sides, hidden, strict=True):
        x, cos = planned.side.x.node.meta["val"], planned.cos.node.meta["val"]
        need = KernelNeed(
            device=x.device,
            dtype=x.dtype,
            table_dtype=cos.dtype,
            head_dim=size // planned.num_heads,
            hidden=size,
            per_head=planned.per_head,
            contract=planned.side.contract.name,
            layout=planned.layout,
            shared=shared,
        )
        if need not in needs:
            needs.append(need)
    return needs


def traffic(launch: Launch) -> list[int | None]:
    """Bytes that the op has to move for each side: its operands and its result once, shared tables by the first.

    None where a size is dynamic.
    """
    counted: set[Node] = set()
    found: list[int | None] = []
    for s in launch.sides:
        nodes = [s.side.result, *(n for n in input_nodes(s) if n not in counted)]
        counted.update((s.cos.node, s.sin.node))
        sizes = [_size(n.meta["val"]) for n in nodes]
        found.append(None if None in sizes else sum(size or 0 for size in sizes))
    return found


def _size(value: torch.Tensor) -> int | None:
    """Bytes of the memory a tensor covers, broadcast axes once; None if dynamic."""
    pairs = list(zip(value.shape, value.stride(), strict=True))
    if not all(isinstance(i, int) for pair in pairs for i in pair):
        return None
    return math.prod(size for size, stride in pairs if stride) * value.element_size()


def _shapes(planned: SidePlan) -> dict[str, str]:
    def text(n: Node) -> str:
        value = n.meta["val"]
        return f"[{','.join(str(s) for s in value.shape)}]"

    side = planned.side
    return {"x": text(side.x.node), "cos": text(side.cos.node), "out": text(side.result)}


def _refusal(node: Node, why: Refuse, certain: bool) -> Refusal:
    return Refusal(
        RULE,
        why.reason,
        source=source_line(node),
        node=node.name,
        expected=why.expected,
        found=why.found,
        hint=why.hint,
        certain=certain,
    )
