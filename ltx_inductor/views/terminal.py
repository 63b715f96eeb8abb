"""A report in the terminal, with rich: what the page has, but for the drawings; fits 40 columns and up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleRenderable, Group, RichCast
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ltx_inductor.views import groups as grouped

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def show(console: Console, report: Mapping[str, Any], *, diffs: bool = False) -> None:
    """Prints a report's `to_dict()`. diffs: with the diff of every kind of rewrite."""
    for part in _parts(report, diffs):
        console.print(part, soft_wrap=False)


def _parts(report: Mapping[str, Any], diffs: bool) -> Iterator[ConsoleRenderable | RichCast]:
    yield _head(report)
    for note in report["notes"]:
        yield Padding(Text(f"note: {note}", "cyan"), (0, 0, 0, 2))
    for g in grouped.groups(report):
        yield Text()
        yield from _site(g, diffs)
    for r, times in grouped.refusals(report):
        yield Text()
        yield from _refusal(r, times)
    if not any(g["sites"] or g["refusals"] for g in report["graphs"]):
        yield Padding(Text("nothing in it looks like what a rule rewrites"), (0, 0, 0, 2))


def _head(report: Mapping[str, Any]) -> Text:
    found = grouped.summary(report)
    left = found["refused"]
    text = Text.assemble(("ltx_inductor: ", "bold"), (f"{grouped.counted(report)} rewritten", "bold green"))
    text.append(f", {left} refused", "bold yellow" if left != "0" else "")
    text.append(
        f", in {found['graphs']} graph{'s' * (found['graphs'] != '1')} ({found['ms in the pass']} ms in the pass"
    )
    if "ms for kernels" in found:
        text.append(f", {found['ms for kernels']} ms for kernels")
    text.append(", read from cache)" if report["cached"] else ")")
    return text


def _site(group: grouped.Group, diffs: bool) -> Iterator[ConsoleRenderable | RichCast]:
    first, n = group.first, group.launches
    yield Text.assemble(
        ("ok ", "green"), (", ".join(group.sources), "bold"), f"  {group.sides}, {n} launch{'es' * (n != 1)}"
    )
    facts = {"module": group.modules, "rule": first["rule"], "op": first["op"], "contract": first["contract"]}
    for side, shapes in group.shapes:
        facts[f"shapes {side}".strip()] = " ".join(f"{k}={v}" for k, v in shapes.items())
    facts |= {"proof": group.proof, "saving": group.saving}
    yield _facts(facts)
    if diffs and group.drawing:
        yield Padding(Rule("diff", style="dim"), (0, 0, 0, 3))
        lines = [Text(line, _COLOURS.get(line[:1], "dim")) for line in group.drawing["diff"].splitlines()]
        yield Padding(Group(*lines), (0, 0, 0, 3))


def _refusal(r: Mapping[str, Any], times: int) -> Iterator[ConsoleRenderable | RichCast]:
    often = f"  {times} times" if times > 1 else ""
    sure = "" if r["certain"] else "  only looks like one"
    yield Text.assemble(("-  ", "yellow"), (r["source"] or "<no source line>", "bold"), f"  left alone{sure}{often}")
    yield Padding(Text(r["reason"], "yellow"), (0, 0, 0, 3))
    yield _facts({k: r[k] for k in ("module", "rule", "found", "expected", "hint")})


def _facts(facts: Mapping[str, str]) -> Padding:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, Text(value))
    return Padding(table, (0, 0, 0, 3))
