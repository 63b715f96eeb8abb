"""The RoPE rule's search: from every RMS statistic of a graph to its sides, and to the refusals worth telling."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from ltx_inductor.rewrite.axes import SidePlan, has_strides_of_result, plans
from ltx_inductor.rewrite.digits import Refuse, internal_error
from ltx_inductor.rewrite.layout import FLIP, JOIN, LAYOUT
from ltx_inductor.rewrite.legality import check_region
from ltx_inductor.rewrite.lift import ARITHMETIC, CAST, Lifter
from ltx_inductor.rewrite.norm import NotANorm, Statistic, find_statistics
from ltx_inductor.rewrite.region import computed_inside, derived_from, looks_like_rotation, reached_inside
from ltx_inductor.rewrite.rope import CASES, LIFT, TERMS, Reader, Side
from ltx_inductor.rewrite.size import ONE, product
from ltx_inductor.rewrite.view import GraphView

_ENDS = ARITHMETIC | CAST | JOIN  # what the value of a rotation can be computed by
MAX_ADVANCE = 6  # layout ops between a rotation and the value that is replaced


@dataclass(frozen=True)
class Miss:
    """A near-match: where, why, and how far the reading got. certain: see `Refusal`."""

    node: Node
    why: Refuse
    stage: int
    certain: bool = True


@dataclass
class Found:
    sides: list[SidePlan] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    covered: set[Node] = field(default_factory=set)  # nodes of regions that a side or a miss speaks for


def search(view: GraphView) -> Found:
    """All sides of the graph, in program order of their statistics. Changes nothing."""
    out = Found()
    statistics, others = find_statistics(view.graph, view.sizes)
    rstds = {s.rstd for s in statistics} | {o.rstd for o in others}
    for statistic in statistics:
        try:
            _search_one(view, statistic, rstds, out)
        except Exception as e:  # one region we cannot read must not cost the others
            out.misses.append(Miss(statistic.rstd, internal_error(e), LIFT))
    for other in others:
        _other_norm(view, other, rstds, out)
    return out


def _search_one(view: GraphView, st: Statistic, rstds: set[Node], out: Found) -> None:
    region, whole = derived_from(st.rstd, rstds, view.order)
    if not any(n.target in JOIN or n.target in FLIP for n in region):
        return  # nothing in it depends on which half of a head is asked for
    if not whole:
        why = Refuse(
            f"too many operations are computed from {st.rstd.name} to search them",
            hint="report this graph: a rotation has about twenty",
        )
        out.misses.append(Miss(st.rstd, why, LIFT, certain=False))
        return
    dynamic = _dynamic_row(view, st, region)
    if dynamic:
        _tell(out, dynamic, region)
        return
    size = view.sizes.numel(st.x)
    candidates = [n for n in region if n.target in _ENDS and n in view.live and view.sizes.numel(n) == size]
    found: list[SidePlan] = []
    misses: list[Miss] = []
    for n in sorted(candidates, key=view.order.__getitem__, reverse=True):
        if any(_related(n, f.side.result, region) for f in found):
            continue
        lifter = Lifter(view, st.x, st.rstd, region)
        reader = Reader(lifter, st, n)
        try:
            found.append(_accept(view, st, region, reader.read()))
        except Refuse as why:
            miss = _worth_telling(view, reader, region, why)
            misses += [miss] if miss else []
    out.sides += sorted(found, key=lambda f: view.order[f.side.result])
    for f in found:
        out.covered |= computed_inside(f.side.result, region)
    # A value on the way to a site, or behind one, need not read as a rotation; another one beside it is a near-match.
    misses = [m for m in misses if not any(_related(m.node, f.side.result, region) for f in found)]
    best = max(misses, key=lambda m: m.stage, default=None)
    if not found:
        best = _broadcast(view, st, region) or best
    if best:
        _tell(out, best, region)


def _tell(out: Found, miss: Miss, region: set[Node]) -> None:
    """The miss speaks for all of the region that has to do with its node."""
    out.misses.append(miss)
    out.covered |= computed_inside(miss.node, region) | reached_inside(miss.node, region)


def _dynamic_row(view: GraphView, st: Statistic, region: set[Node]) -> Miss | None:
    """A rotation of rows whose length is a symbol: heads and halves cannot be told then, and no kernel serves all."""
    row = product(view.sizes.shape(st.x)[d] for d in st.dims)
    if row.known is not None:
        return None
    for n in sorted(region, key=view.order.__getitem__, reverse=True):
        if n.target in _ENDS and n in view.live and looks_like_rotation(n, region):
            why = Refuse(
                f"{st.x.name} is normalised over {row} elements, a size that is a symbol in this graph",
                expected="a hidden size, or head_dim, that is known at compile time",
                hint="leave only tokens and batch dynamic: torch._dynamo.mark_dynamic instead of dynamic=True",
            )
            return Miss(n, why, LIFT)
    return None


def _broadcast(view: GraphView, st: Statistic, region: set[Node]) -> Miss | None:
    """A rotation whose result has more elements than x: tables with a larger batch, or with heads x does not have."""
    size = view.sizes.numel(st.x)
    for n in sorted(region, key=view.order.__getitem__, reverse=True):
        total = view.sizes.numel(n)
        if n.target not in JOIN or n not in view.live or size is None or total is None:
            continue
        times = total.exactly_divided_by(size)
        if times not in (None, ONE) and looks_like_rotation(n, region):
            why = Refuse(
                f"{n.name} has {times} times as many elements as {st.x.name}: the tables repeat every token or head",
                expected="tables of x's own batch and heads, or of 1",
            )
            return Miss(n, why, LIFT)
    return None


def _accept(view: GraphView, st: Statistic, region: set[Node], side: Side) -> SidePlan:
    """The side with the layout, and at the value, where the op's output needs no copy; then the legality checks."""
    bhsd: SidePlan | None = None
    unusual: SidePlan | None = None  # B, S and H in another way than the natural one: x may not be viewed like that
    first: Refuse | None = None
    for _ in range(MAX_ADVANCE):
        for layout in ("bshd", "bhsd"):
            try:
                natural, *others = plans(side, layout)
            except Refuse as e:
                first = first or e
                break
            if has_strides_of_result(natural, view.sizes):
                if layout == "bshd":
                    return check_region(view, natural, region)
                bhsd = bhsd or natural
            unusual = unusual or next((p for p in others if has_strides_of_result(p, view.sizes)), None)
        following = _next_layout(view, st, region, side)
        if following is None:
            break
        side = following
    other = bhsd or unusual
    if other:
        return check_region(view, other, region)
    raise first or Refuse(
        f"{side.result.name} has strides {tuple(side.result.meta['val'].stride())}, which no layout of the op gives",
        expected="the memory order [B, S, H, D] or [B, H, S, D]",
        hint="make the result contiguous in one of these",
    )


def _next_layout(view: GraphView, st: Statistic, region: set[Node], side: Side) -> Side | None:
    """The same side read one layout op later, if that op is the only reader."""
    readers = [u for u in side.result.users if u in view.live]
    if len(readers) != 1 or readers[0] not in region or readers[0].target not in LAYOUT:
        return None
    n = readers[0]
    if view.sizes.numel(n) != view.sizes.numel(side.result):
        return None
    try:
        return Reader(Lifter(view, st.x, st.rstd, region), st, n).read()
    except Refuse:
        return None


def _related(a: Node, b: Node, region: set[Node]) -> bool:
    return a is b or b in reached_inside(a, region) or a in reached_inside(b, region)


def _worth_telling(view: GraphView, reader: Reader, region: set[Node], why: Refuse) -> Miss | None:
    """A miss only where the value looks like a rotation: a plain norm must make no noise."""
    n = reader.result
    like = reader.mixes if reader.stage > LIFT else looks_like_rotation(n, region)
    if reader.stage in (CASES, TERMS):
        for leaf in sorted(reader.foreign, key=view.order.__getitem__):
            op = _unknown_op_between(leaf, region)
            if op:
                like = True
                why = Refuse(
                    f"{n.name}: {leaf.name} comes from the normalised value through {op.name} = {op.target}, "
                    "which this rule does not know"
                )
                break
    return Miss(n, why, reader.stage) if like else None


def _unknown_op_between(leaf: Node, region: set[Node], limit: int = 30) -> Node | None:
    """The op through which a leaf comes from the region after all, if it is near."""
    todo, seen = [leaf], {leaf}
    while todo and len(seen) < limit:
        m = todo.pop(0)
        for a in m.all_input_nodes:
            if a in region:
                return m
            if a not in seen:
                seen.add(a)
                todo.append(a)
    return None


def _other_norm(view: GraphView, other: NotANorm, rstds: set[Node], out: Found) -> None:
    region, _ = derived_from(other.rstd, rstds, view.order)
    joins = [n for n in region if n.target in JOIN and n in view.live]
    last = max(joins, key=view.order.__getitem__, default=None)
    if last is None or not looks_like_rotation(last, region):
        return
    why = Refuse(
        f"{last.name} rotates a value that is normalised by something else than an RMSNorm: {other.reason}",
        expected="torch.rms_norm",
    )
    out.misses.append(Miss(last, why, LIFT))
    out.covered |= region
