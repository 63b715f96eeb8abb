"""The rule `rmsnorm_split_rope`: finds sides, pairs them, asks for kernels, replaces; nothing goes unreported."""

from __future__ import annotations

from torch.fx import Node

from ltx_inductor.rewrite.axes import SidePlan
from ltx_inductor.rewrite.digits import Refuse, internal_error
from ltx_inductor.rewrite.drawing import Drawings
from ltx_inductor.rewrite.needs import KernelNeed
from ltx_inductor.rewrite.pairs import Launch, input_nodes, pair_sides
from ltx_inductor.rewrite.replace import Replacer
from ltx_inductor.rewrite.report import Refusal, Site
from ltx_inductor.rewrite.rule import Job, on_the_cpu
from ltx_inductor.rewrite.search import search
from ltx_inductor.rewrite.source import origin
from ltx_inductor.rewrite.sweep import uncovered_rotations
from ltx_inductor.rewrite.traffic import bytes_of, total
from ltx_inductor.rewrite.view import GraphView

RULE = "rmsnorm_split_rope"


def run(job: Job) -> None:
    """See `ltx_inductor.rewrite.rule.Rule`."""
    view = GraphView(job.graph)
    found = search(view)

    def refuse(node: Node, why: Refuse, certain: bool = True) -> None:
        if node not in job.spoken_for:
            job.refuse(view.order[node], node, why, certain)

    for miss in found.misses:
        refuse(miss.node, miss.why, miss.certain)
    try:
        for suspect in uncovered_rotations(view, found.covered):
            refuse(suspect.node, suspect.why, suspect.certain)
    except Exception as e:  # the sweep only tells; what was found is rewritten all the same
        job.report.refusals.append(Refusal(RULE, internal_error(e).reason, certain=False))
    kept: list[SidePlan] = []
    for side in found.sides:
        if side.side.x.node.meta["val"].device.type == "cpu" and not job.config.cpu:
            refuse(side.side.result, on_the_cpu())
        else:
            kept.append(side)
    launches = pair_sides(view, kept)
    replacer = Replacer(view, launches, verify=job.config.verify == "always")
    pairs = 0
    drawings = Drawings(job.graph, view.order, len(job.report.drawings))
    for launch in launches:
        described = [(s, _shapes(s), origin(s.side.statistic.rstd)) for s in launch.sides]
        alike = tuple((o.path, o.source, *shapes.values(), s.side.contract.name) for s, shapes, o in described)
        sizes = traffic(launch)
        try:
            proof = job.ask(_needs(launch), total(sizes))
            inputs = [n for s in launch.sides for n in input_nodes(s)]
            results = [s.side.result for s in launch.sides]
            drawn = drawings.before(alike, inputs, results)
            before = job.pictures.before(view.order, inputs, results) if job.pictures else None
            op = replacer.replace(launch)
        except Exception as e:  # the replacer has taken its nodes out again
            for s, _, _ in described:
                refuse(s.side.result, e if isinstance(e, Refuse) else internal_error(e))
            continue
        number, drawing = None, drawings.after(alike, drawn, op)
        if len(launch.sides) == 2:
            number, pairs = pairs, pairs + 1
        name = str(op.target).removesuffix(".default").replace(".", "::")
        for (s, shapes, where), role, size in zip(described, launch.roles, sizes, strict=True):
            site = Site(
                RULE,
                name,
                role,
                number,
                shapes=shapes,
                contract=s.side.contract.name,
                node=s.side.result.name,
                drawing=drawing,
                bytes=size,
                proof=proof,
                **vars(where),
            )
            job.site(view.order[s.side.result], site)
        if job.pictures and before:
            job.pictures.after(before, f"{RULE} {described[0][2].source}")
    replacer.finish()
    job.graph.lint()
    job.report.drawings += drawings.done
    job.finish()


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
        found.append(total(bytes_of(n) for n in nodes))
    return found


def _shapes(planned: SidePlan) -> dict[str, str]:
    def text(n: Node) -> str:
        value = n.meta["val"]
        return f"[{','.join(str(s) for s in value.shape)}]"

    side = planned.side
    return {"x": text(side.x.node), "cos": text(side.cos.node), "out": text(side.result)}
