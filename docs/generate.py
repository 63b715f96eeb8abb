"""Writes docs/rules/*.md from what the rules themselves declare; mkdocs calls it before every build.

Ops from their schemas, contracts from `ltx_inductor.contract`, refusals, proofs and what has no kernel from the
sentences in the source, numbers from benchmarks/results. The pages are not kept in the tree: they are always those of
the sources. A new rule is one more entry in ABOUT.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from sentences import Sources  # noqa: E402

import ltx_inductor.ops  # noqa: E402, F401  (registers the ops)
from ltx_inductor.config import RULES  # noqa: E402
from ltx_inductor.contract import CONTRACTS  # noqa: E402

PROFIT = ROOT / "ltx_inductor" / "kernels" / "profit.json"
RESULTS = ROOT / "benchmarks" / "results"
ROADS = ("backend", "explainer", "registration")  # modules by which every rule is reached
# {what is called to say why something is left alone, or fails: which of its arguments is the sentence}
SAY_NO = {"Refuse": 0, "BadLeaf": 0, "Refusal": 1, "NotANorm": 1, "NoKernels": 0}
FAIL = {"MissingToolError": 0, "BuildError": 0, "DriverError": 0}


def _rope_numbers() -> Iterator[str]:
    data: dict[str, Any] = json.loads((RESULTS / "rope-h200.json").read_text())
    env = data["environment"]
    yield "## Numbers\n"
    yield f"{env['gpu']}, torch {env['torch']}, {env['date']}; µs per call of the query-and-key op, cold L2."
    yield "`python -m ltx_inductor bench rope` measures them again.\n"
    yield "| shape, contract, tables | byte floor | this op | stock Inductor | eager | Inductor / this |"
    yield "|---|---|---|---|---|---|"
    for row, r in data["production"].items():
        if "inductor" in r:
            values = [r["floor_best"], r["ours"], r["inductor"], r["eager"]]
            shown = " | ".join(f"{v:.3g}" if v < 100 else f"{v:.0f}" for v in values)
            yield f"| {row} | {shown} | {r['inductor'] / r['ours']:.2f} |"


def _axial_numbers() -> Iterator[str]:
    data = json.loads((RESULTS / "axial-h200.json").read_text())
    yield "## Numbers\n"
    yield f"{data['device']}, torch {data['torch']}, {data['date']}; µs of the GPU for q and k, by replays of a"
    yield "CUDA graph. The floor copies both tensors; `compiled` includes the tables.\n"
    yield "| grid | heads of 64 | floor | the op, twice | compiled | stock Inductor | eager | Inductor / compiled |"
    yield "|---|---|---|---|---|---|---|---|"
    for r in data["rows"]:
        us = {name: f"{ms * 1e3:.0f}" for name, ms in r["ms"].items()}
        shown = " | ".join(us.get(name, "not run") for name in ("floor", "op", "ltx", "stock", "eager"))
        yield f"| {' x '.join(map(str, r['grid']))} | {r['heads']} | {shown} | {r['times_stock']:.2f} |"


def _neighborhood_numbers() -> Iterator[str]:
    for schedule, name in (("ltx", "fna"), ("exact", "fna-exact")):
        data = json.loads((RESULTS / f"{name}-h200.json").read_text())
        yield f"## Numbers of `{'fast' if schedule == 'ltx' else schedule}`\n"
        yield f"{data['device']}, torch {data['torch']}, {data['date']}.\n"
        yield "| grid | window | heads | NATTEN, ms | this op, ms | NATTEN / this |\n|---|---|---|---|---|---|"
        for r in data["rows"]:
            size, window = (" x ".join(map(str, r[k])) for k in ("grid", "window"))
            ms = f"{r['natten']['ms']:.2f} | {r[schedule]['ms']:.2f}"
            yield f"| {size} | {window} | {r['heads']} | {ms} | {r['natten']['ms'] / r[schedule]['ms']:.2f} |"
        yield ""


@dataclass(frozen=True)
class About:
    """What the sources do not say of a rule.

    sentence:  what it is, under the title. more: the page of docs/ with the details, "" where there is none.
    modules:   where it begins, such as "rewrite.rope_rule"; what they import is found.
    ops:       the names of the ops that it writes.
    kernels:   the class in kernels/choice.py that answers for its kernels.
    contracts: {name: what holds for the result}.
    replaced:  what a launch is compared with in kernels/profit.json.
    numbers:   the lines of the section with the benchmarks, heading included.
    """

    sentence: str
    more: str
    modules: tuple[str, ...]
    ops: tuple[str, ...]
    kernels: str
    contracts: Mapping[str, str]
    replaced: str = "Inductor's code"
    numbers: Callable[[], Iterable[str]] = field(default=tuple)


def _bits_of_eager(*contracts: str) -> dict[str, str]:
    return {name: f"the bits of eager, which rounds so: {CONTRACTS[name].describe()}" for name in contracts}


ABOUT = {
    "rmsnorm_axial_rope": About(
        "RMSNorm per head, a scale, and RoPE over several token axes, of one tensor. The same bits as eager.",
        "axial-rope.md",
        modules=("rewrite.axial_rule",),
        ops=("rmsnorm_axial_rope",),
        kernels="_Axial",
        contracts=_bits_of_eager("fp32-rope", "fp32-rope-muladd"),
        numbers=_axial_numbers,
    ),
    "rmsnorm_split_rope": About(
        "RMSNorm, then split RoPE, of attention queries and keys. The same bits as eager, by rounding contract.",
        "rope.md",
        modules=("rewrite.rope_rule",),
        ops=("rmsnorm_split_rope", "qk_rmsnorm_split_rope"),
        kernels="_Rope",
        contracts=_bits_of_eager(*CONTRACTS),
        numbers=_rope_numbers,
    ),
    "neighborhood_attention": About(
        "3D neighborhood attention as NATTEN computes it. `fast` keeps an error bound; `exact` keeps NATTEN's bits.",
        "neighborhood-attention.md",
        modules=("rewrite.neighborhood_rule", "natten_calls"),
        ops=("na3d",),
        kernels="_Neighborhood",
        contracts={
            "fast": "as near to attention in fp32 as NATTEN is, within a bound; not NATTEN's bits",
            "exact": "the bits of NATTEN 0.21.7's hopper-fna kernel, with the option `ltx_inductor.exact`",
        },
        replaced="NATTEN",
        numbers=_neighborhood_numbers,
    ),
}


def pages() -> dict[str, str]:
    """{file name: text} of every rule's page."""
    sources = Sources(ROOT / "ltx_inductor")
    return {f"{rule}.md": "\n".join(_page(rule, sources)).rstrip() + "\n" for rule in RULES}


def _page(rule: str, sources: Sources) -> Iterator[str]:
    about = ABOUT[rule]
    yield f"# `{rule}`\n"
    yield f"<!-- Written by docs/generate.py from the sources: edit those. -->\n\n{about.sentence}\n"
    yield f"What it matches in detail, and why the result is right: [{about.more}](../{about.more}).\n"
    yield "## What it writes\n"
    yield "```text"
    yield from (str(getattr(torch.ops.ltx_inductor, op).default._schema) for op in about.ops)
    yield "```\n"
    yield "## Contracts\n\n| contract | what holds for the result |\n|---|---|"
    yield from (f"| `{name}` | {text} |" for name, text in about.contracts.items())
    yield "\n## How it is known to be right\n\nA report says it of every site, in one of these sentences:\n"
    yield from _bullets(sources.returned("kernels.choice", f"{about.kernels}.proof"))
    yield "\n## How each refusal reads\n"
    yield "`…` stands for a name, a number or a dtype of your graph; what is expected, and the hint, follow.\n"
    others = [m for name, other in ABOUT.items() if name != rule for m in other.modules]
    said = sources.said(sources.reached(sources.of((*about.modules, *ROADS)), others), SAY_NO)
    for reason, expected, hint in sorted(said):
        rest = [f"expected {expected}"] * bool(expected) + [f"hint: {hint}"] * bool(hint)
        yield f"* {_escaped(reason)}" + (f" — *{_escaped('; '.join(rest))}*" if rest else "")
    yield "\n## What has no kernel\n\nThe launch is left to Inductor, with one of these sentences:\n"
    none = sources.returned("kernels.choice", f"{about.kernels}.unsupported")
    yield from _bullets(none)
    yield "\n## When a kernel cannot be used\n\nIt could not be built or loaded, or it failed its proof:\n"
    ready = ("kernels.choice", f"{about.kernels}.ready")
    failed = sources.said(sources.reached([ready]), FAIL)
    yield from _bullets([t for t in sources.returned(*ready) if t not in none] + sorted(text for text, _, _ in failed))
    yield ""
    yield from _worth(rule, about.replaced, sources.returned("kernels.profit", "Table.refusal"))
    yield from about.numbers()


def _worth(rule: str, replaced: str, said: Iterable[str]) -> Iterator[str]:
    data = json.loads(PROFIT.read_text())
    rows = [r for r in data["rows"] if r["rule"] == rule]
    slower = [r for r in rows if r["ltx_us"] >= r["other_us"]]
    yield "## What is worth a launch\n"
    if not rows:
        yield "Nothing was measured for this rule: no launch is left alone for its size.\n"
        return
    yield (
        f"A launch that was measured to be slower than {replaced} is left alone (`ltx_inductor.profit`): here "
        + (f"{len(slower)} of the {len(rows)} sizes below." if slower else f"none of the {len(rows)} sizes below.")
        + " The report says:\n"
    )
    yield from _bullets(said)
    yield ""
    yield f"{data['device']}, torch {data['torch']}, {data['date']}; times on the GPU, replayed from a CUDA graph.\n"
    yield f"| what | this op, µs | {replaced}, µs | gain |\n|---|---|---|---|"
    for r in rows:
        yield f"| {r['what']} | {r['ltx_us']:.2f} | {r['other_us']:.2f} | {r['other_us'] / r['ltx_us']:.2f} |"
    yield ""


def _bullets(texts: Iterable[str]) -> Iterator[str]:
    return (f"* {_escaped(text)}" for text in texts)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;")


def on_pre_build(config: Any) -> None:
    """The hook of mkdocs."""
    folder = ROOT / "docs" / "rules"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
