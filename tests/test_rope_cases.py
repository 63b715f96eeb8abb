"""The corpus through the pass: what is rewritten, under which contract, why not, and that no bit changes.

Bits are compared with the graph the pass was given and with eager, on about a thousand elements for every way to trace
a case; and with eager on a million for every spelling whose sequence can be dynamic (the same graph, run on a long one)
and for one case of every contract that is traced at that size ("full-...").
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Sequence

import pytest
import torch

from . import draws
from .harness import ADDCMUL_KEPT, Traced, bit_difference, copy_graph, rewritten, run_graph, trace
from .models import either, real, refusals, spellings
from .models.case import Case

passes = pytest.importorskip("ltx_inductor.rewrite.passes")
from ltx_inductor.config import Config  # noqa: E402

ONE, TWO = "ltx_inductor.rmsnorm_split_rope.default", "ltx_inductor.qk_rmsnorm_split_rope.default"
rewrite = functools.partial(passes.rewrite_graph, config=Config(cpu=True))


def modes(cases: list[Case]) -> list:
    """Every case static, two of three with a dynamic sequence, one of three with a dynamic batch; full size static."""
    out = []
    for i, c in enumerate(cases):
        small = not c.name.startswith("full-")
        wanted = {"": True, "seq": small and i % 3 != 1, "batch": small and i % 3 == 1}
        out += [
            pytest.param(c, m, id=f"{c.name}-{m or 'static'}")
            for m, want in wanted.items()
            if want and (not m or c.dynamic.get(m))
        ]
    return out


def traced(case: Case, mode: str = "") -> tuple[torch.nn.Module, tuple, list[Traced]]:
    if case.needs:
        pytest.importorskip(case.needs)
    torch.manual_seed(0)
    module, inputs = case.build(), case.inputs()
    return module, inputs, trace(module, inputs, case.dynamic.get(mode), case.grad)


def grown(t: torch.Tensor, axes: int | Sequence[int], times: int) -> torch.Tensor:
    """t, `times` as long along `axes`, with the same order of axes in memory; expanded axes stay expanded."""
    kept = tuple(slice(0, 1) if st == 0 else slice(None) for st in t.stride())
    order = sorted(range(t.dim()), key=lambda d: -t.stride(d))
    repeats = [times if d in ([axes] if isinstance(axes, int) else axes) else 1 for d in order]
    dense = t[kept].permute(order).repeat(repeats).permute([order.index(d) for d in range(t.dim())])
    return dense.expand([n if st == 0 else m for n, st, m in zip(t.shape, t.stride(), dense.shape, strict=True)])


def texts(report) -> list[str]:
    return [f"{r.reason} | {r.hint}" for r in report.refusals]


def count(gm: torch.fx.GraphModule, target: str) -> int:
    return sum(str(n.target) == target for n in gm.graph.nodes)


def check_bits(case: Case, module, inputs, before: Traced, after: torch.fx.GraphModule) -> None:
    """Same bits as the graph before, and as eager, for draws in which every kind of token meets every position."""
    decomposed = not ADDCMUL_KEPT and case.contract != "bf16-chain" and "muladd" not in (case.contract or "")
    if not case.head_dim:
        if not decomposed:
            assert bit_difference(run_graph(after, before.args), run_graph(before.gm, before.args)) is None
        return
    seq = case.dynamic.get("seq", {})
    tokens = inputs[0].shape[seq[0]] if seq else 1
    for seed, first in enumerate(range(0, len(draws.KINDS), tokens) if tokens < len(draws.KINDS) else (0, 4)):
        draws.redraw(module, inputs, seq, case.head_dim, seed, first, special=seed > 0)
        got = run_graph(after, fresh(before.args))
        if not decomposed:
            assert bit_difference(got, run_graph(before.gm, fresh(before.args))) is None
        eager = as_list(module, fresh(inputs))
        assert bit_difference(got[-len(eager) :], eager) is None


def fresh(values) -> list:
    """Copies of the dense ones: a graph may write to its inputs."""
    return [v.clone() if isinstance(v, torch.Tensor) and v.is_contiguous() else v for v in values]


@torch.no_grad()
def as_list(module, inputs) -> list:
    out = module(*inputs)
    return [out] if isinstance(out, torch.Tensor) else list(out)


@pytest.mark.parametrize(("case", "mode"), modes(spellings.CASES + real.CASES))
def test_rewritten(case: Case, mode: str) -> None:
    module, inputs, graphs = traced(case, mode)
    assert len(graphs) == 1
    before = graphs[0]
    after = copy_graph(before.gm)
    report = rewrite(after.graph)
    assert (len(report.sites), texts(report)) == (case.sites, [])
    assert {s.contract for s in report.sites} == {case.contract}
    assert count(after, ONE) + 2 * count(after, TWO) == case.sites
    if case.pairs is not None:
        assert count(after, TWO) == case.pairs
    after.graph.lint()
    check_bits(case, module, inputs, before, after)


# take-tokens-cut relates its lengths by a sum, which growing all of them by a factor would break.
LONG = [
    c
    for c in spellings.CASES
    if c.head_dim and c.dynamic.get("seq") and not c.name.startswith("full-") and c.name != "take-tokens-cut"
]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_a_million_elements(case: Case) -> None:
    torch.manual_seed(0)
    module, inputs, sites = case.build(), case.inputs(), []

    def hook(graph: torch.fx.Graph) -> None:
        sites.append(len(rewrite(graph).sites))

    seq = case.dynamic["seq"]
    call = rewritten(module, inputs, hook, seq)
    times = -(-1_000_000 // inputs[0].numel())
    long = tuple(grown(t, seq[i], times) if i in seq else t for i, t in enumerate(inputs))
    assert long[0].numel() >= 1_000_000
    draws.redraw(module, long, seq, case.head_dim, 7)
    got = call(*fresh(long))
    assert set(sites) == {case.sites}
    assert bit_difference([got] if isinstance(got, torch.Tensor) else list(got), as_list(module, fresh(long))) is None


@pytest.mark.parametrize(("case", "mode"), modes(refusals.CASES))
def test_refused(case: Case, mode: str) -> None:
    _, _, graphs = traced(case, mode)
    reasons = []
    for g in graphs:
        if case.edit:
            case.edit(g.gm)
        before = str(g.gm.graph)
        report = rewrite(g.gm.graph)
        assert report.sites == []
        assert str(g.gm.graph) == before
        reasons += texts(report)
    assert any(re.search(case.refusal, r) for r in reasons), reasons
    assert not any("internal error" in r for r in reasons)


@pytest.mark.parametrize(("case", "mode"), modes(either.CASES))
def test_either(case: Case, mode: str) -> None:
    module, inputs, graphs = traced(case, mode)
    after = copy_graph(graphs[0].gm)
    report = rewrite(after.graph)
    assert report.sites or report.refusals
    assert not any("internal error" in r for r in texts(report))
    if report.sites:
        check_bits(case, module, inputs, graphs[0], after)
    else:
        assert str(after.graph) == str(graphs[0].gm.graph)


@pytest.mark.parametrize("case", [spellings.CASES[0], refusals.CASES[0]], ids=str)
def test_report_names_the_users_line(case: Case) -> None:
    report = rewrite(traced(case)[2][0].gm.graph)
    for entry in report.sites + report.refusals:
        file, line = entry.source.split(":")
        module = importlib.import_module(f"tests.models.{file.removesuffix('.py')}")
        assert 0 < int(line) <= len(inspect.getsourcelines(module)[0])


def test_second_run_finds_nothing_more() -> None:
    gm = traced(next(c for c in spellings.CASES if c.name == "pair"))[2][0].gm
    assert len(rewrite(gm.graph).sites) == 2
    after = str(gm.graph)
    again = rewrite(gm.graph)
    assert (again.sites, again.refusals, str(gm.graph)) == ([], [], after)


def test_cpu_graphs_are_left_alone_by_default() -> None:
    gm = traced(spellings.CASES[0])[2][0].gm
    before, report = str(gm.graph), passes.rewrite_graph(gm.graph, Config())
    assert (report.sites, str(gm.graph)) == ([], before)
    assert any("CPU" in r for r in texts(report))


def test_every_contract_is_proved_on_a_million_elements() -> None:
    full = {c.contract: c for c in spellings.CASES if c.name.startswith("full-")}
    contracts = importlib.import_module("ltx_inductor.contract").CONTRACTS
    assert full.keys() == contracts.keys()
    assert all(c.inputs()[0].numel() >= 1_000_000 for c in full.values())
