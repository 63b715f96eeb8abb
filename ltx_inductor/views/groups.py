"""The sites of a report as a reader wants them: rewrites that look alike together, with how often they occur."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Bytes per second that the query-and-key op and stock Inductor's code for it reach on an H200, from the row `v8160` of
# benchmarks/results/rope-h200.json (cold L2). Inductor's is that of the contract with bf16 or with fp32 tables.
OURS = 4.1e12
INDUCTOR = {"bf16-chain": 0.87e12}
INDUCTOR_FP32_TABLES = 1.39e12
# The same of RoPE over several axes, grid 121 x 136 x 240 of benchmarks/results/axial-h200.json. (Inductor makes the
# tables anew for every element.)
OURS_AXIAL, INDUCTOR_AXIAL = 4.1e12, 0.41e12
_LAUNCH_BOUND = 10e6  # bytes
# Useful floating-point operations per second in neighborhood attention on an H200, window 11 x 11 x 11, large grids:
# benchmarks/results/fna-h200.json and fna-exact-h200.json.
NATTEN = 31.5e12
SCHEDULES = {"fast": 240e12, "exact": 85e12}
_NUMBER = r"\b\d+\b"
_NOUNS = {"rmsnorm_axial_rope": "axial side", "rmsnorm_split_rope": "side", "neighborhood_attention": "call"}


@dataclass
class Group:
    """Rewrites of one kind at one place of the code. sites: as in the report's dict. drawing: or None."""

    sites: list[Mapping[str, Any]]
    drawing: Mapping[str, Any] | None

    @property
    def first(self) -> Mapping[str, Any]:
        return self.sites[0]

    @property
    def sources(self) -> list[str]:
        """The lines that start the chains, each once."""
        return list(dict.fromkeys(s["source"] or "<no source line>" for s in self.sites))

    @property
    def paths(self) -> list[str]:
        """The files of those lines, each once."""
        return list(dict.fromkeys(path(s) for s in self.sites))

    @property
    def code(self) -> list[str]:
        """The text of those lines, each once."""
        return list(dict.fromkeys(s["code"] for s in self.sites if s["code"]))

    @property
    def modules(self) -> str:
        """Those they are part of, such as "blocks.0-47.attn1"; "" where the graph does not know them."""
        return _modules(self.sites)

    @property
    def sides(self) -> str:
        """Such as "q and k"; of calls, how the graph spelled them."""
        return " and ".join(dict.fromkeys(s["side"] or s.get("form") or "one side" for s in self.sites))

    @property
    def shapes(self) -> list[tuple[str, dict[str, str]]]:
        """(side, shapes by operand), each once."""
        found = {(s["side"] or "", tuple(s["shapes"].items())): None for s in self.sites}
        return [(side, dict(shapes)) for side, shapes in found]

    @property
    def launches(self) -> int:
        """Calls of the op: two sides of a pair are one."""
        pairs = {(s["graph"], s["pair"]) for s in self.sites if s["pair"] is not None}
        return len(pairs) + sum(s["pair"] is None for s in self.sites)

    @property
    def proof(self) -> str:
        return str(self.first.get("proof") or "")

    @property
    def saving(self) -> str:
        """What one launch should save on a GPU whose rates were measured, as a sentence; "" where nothing is known."""
        if self.first["rule"] == "neighborhood_attention":
            return _attention_saving(self.first)
        axial = self.first["rule"] == "rmsnorm_axial_rope"
        if not axial and self.first["rule"] != "rmsnorm_split_rope":
            return ""
        if any(s.get("bytes") is None for s in self.sites):
            times = "5 to 10" if axial else "2.9 to 4.7"
            return f"sizes are dynamic; measured shapes run {times} times as fast as stock Inductor on an H200"
        moved = sum(s["bytes"] for s in self.sites) / self.launches
        stock, ours = INDUCTOR.get(self.first["contract"], INDUCTOR_FP32_TABLES), OURS
        if axial:
            stock, ours = INDUCTOR_AXIAL, OURS_AXIAL
        if moved < _LAUNCH_BOUND:
            return f"a few µs a launch: it moves only {_size(moved)}, and what counts is that there is one launch"
        return (
            f"about {moved * (1 / stock - 1 / ours) * 1e6:.0f} µs a launch on an H200: {_size(moved)} at the "
            f"{ours / 1e12:.1f} TB/s measured for this op, instead of the {stock / 1e12:.2f} of stock Inductor"
        )


def _attention_saving(site: Mapping[str, Any]) -> str:
    """4 * queries * keys of a window * head_dim * heads operations, at the measured rates."""
    schedule = site["contract"]
    try:
        q, window = (json.loads(site["shapes"][name]) for name in ("q", "window"))
        grid = json.loads(site["shapes"]["grid"]) if "grid" in site["shapes"] else q[1:4]  # of flattened tokens
    except (KeyError, ValueError):  # dynamic sizes
        return (
            f"sizes are dynamic; `{schedule}` ran {SCHEDULES[schedule] / NATTEN:.1f} times as fast as NATTEN on an H200"
        )
    if math.prod(window) < 1000 or math.prod(grid) < 50_000:
        return "small windows and grids run 2.6 (exact) to 11 (fast) times as fast as NATTEN on an H200"
    work = 4 * math.prod(q) * math.prod(window)
    return (
        f"about {work * (1 / NATTEN - 1 / SCHEDULES[schedule]) * 1e3:.1f} ms a call on an H200, where NATTEN needs "
        f"{work / NATTEN * 1e3:.1f} ms: measured at {SCHEDULES[schedule] / 1e12:.0f} useful TFLOP/s instead of "
        f"{NATTEN / 1e12:.1f}"
    )


def counted(report: Mapping[str, Any]) -> str:
    """Such as "16 sides and 1 call"."""
    found = Counter(_NOUNS.get(s["rule"], "site") for g in report["graphs"] for s in g["sites"]) or {"side": 0}
    return " and ".join(f"{n} {noun}{'s' * (n != 1)}" for noun, n in found.items())


def groups(report: Mapping[str, Any]) -> list[Group]:
    """The sites of all graphs: those that share a drawing together, in the order of their first ones."""
    found: dict[Any, Group] = {}
    for graph in report["graphs"]:
        for i, site in enumerate(graph["sites"]):
            number = site.get("drawing")
            drawing = graph["drawings"][number] if number is not None else None
            # alike in two graphs (a recompile, a repeated block) is alike
            where = tuple(dict.fromkeys(path(s) for s in graph["sites"] if drawing and s["drawing"] == number))
            alike = (site["rule"], site["op"], where, drawing["diff"] if drawing else (site["graph"], site["pair"], i))
            found.setdefault(alike, Group([], drawing)).sites.append(site)
    return list(found.values())


def refusals(report: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], int]]:
    """(refusal, how often it is there), those that say the same of the same line together, with all their modules."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for graph in report["graphs"]:
        for r in graph["refusals"]:
            keys = ("rule", "path", "source", "reason", "expected", "found", "hint", "certain")
            found.setdefault(tuple(r[k] for k in keys), []).append(r)
    return [({**alike[0], "module": _modules(alike)}, len(alike)) for alike in found.values()]


def summary(report: Mapping[str, Any]) -> dict[str, str]:
    """The figures for the head of a view, as text."""
    left = sum(len(g["refusals"]) for g in report["graphs"])
    number, _, noun = counted(report).partition(" ")
    launches = sum(g.launches for g in groups(report))
    shown = {
        f"{noun} rewritten": number,
        f"launch{'es' * (launches != 1)}": str(launches),
        "refused": str(left),
        "graphs": str(len(report["graphs"])),
        "ms in the pass": f"{report['pass_ms']:.1f}",
    }
    if report["kernel_ms"] >= 1:
        shown["ms for kernels"] = f"{report['kernel_ms']:.0f}"
    return shown


def path(found: Mapping[str, Any]) -> str:
    """The file of a site or refusal; its base name in a report of an older version."""
    return str(found["path"] or found["source"].rpartition(":")[0])


def _modules(sites: Iterable[Mapping[str, Any]]) -> str:
    """Their modules; those that differ in numbers only are one: a.0.x, a.1.x and a.2.x are a.0-2.x."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name in dict.fromkeys(s["module"] for s in sites if s["module"]):
        numbers = tuple(int(n) for n in re.findall(_NUMBER, name))
        found.setdefault(re.sub(_NUMBER, "{}", name), []).append(numbers)
    shown = []
    for template, many in found.items():
        columns = [sorted(set(c)) for c in zip(*many, strict=True)]
        spans = [tuple(map(_span, columns))] if math.prod(map(len, columns)) == len(many) else many
        shown += [template.format(*s) for s in spans]
    return ", ".join(shown)


def _span(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if last - first >= len(numbers):
        return f"[{','.join(map(str, numbers))}]"
    return f"{first}-{last}" if first < last else str(first)


def _size(size: float) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 10e6 else f"{size / 1e3:.0f} kB"
