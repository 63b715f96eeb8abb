"""Writes docs/rules/*.md from what the rules themselves declare; mkdocs calls it before every build.

Ops from their schemas, contracts from `ltx_inductor.contract`, refusals from the sentences in the source, numbers from
benchmarks/results. The pages are not kept in the tree: they are always those of the sources.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ltx_inductor.ops  # noqa: E402, F401  (registers the ops)
from ltx_inductor.config import RULES  # noqa: E402
from ltx_inductor.contract import CONTRACTS  # noqa: E402

REWRITE = ROOT / "ltx_inductor" / "rewrite"
KERNELS = ROOT / "ltx_inductor" / "kernels"
# rule: (its modules; its ops; its kernels; the page about it; one sentence)
ABOUT: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str, str]] = {
    "rmsnorm_split_rope": (
        (
            "rope_rule",
            "rope",
            "axes",
            "lift",
            "layout",
            "norm",
            "search",
            "sweep",
            "pairs",
            "legality",
            "replace",
            "rule",
        ),
        ("rmsnorm_split_rope", "qk_rmsnorm_split_rope"),
        ("rope",),
        "rope.md",
        "RMSNorm, then split RoPE, of attention queries and keys. The same bits as eager, by rounding contract.",
    ),
    "neighborhood_attention": (
        (
            "neighborhood_rule",
            "neighborhood",
            "natten_forms",
            "opaque_forms",
            "flex_window",
            "block_mask",
            "mask_window",
            "legality",
            "rule",
        ),
        ("na3d",),
        ("fna", "fna_exact"),
        "neighborhood-attention.md",
        "3D neighborhood attention as NATTEN computes it. `fast` keeps an error bound; `exact` keeps NATTEN's bits.",
    ),
}


def pages() -> dict[str, str]:
    """{file name: text} of every rule's page."""
    return {f"{rule}.md": "\n".join(_page(rule)).rstrip() + "\n" for rule in RULES}


def _page(rule: str) -> Iterator[str]:
    modules, ops, kernels, more, sentence = ABOUT[rule]
    yield f"# `{rule}`\n"
    yield f"<!-- Written by docs/generate.py from the sources: edit those. -->\n\n{sentence}\n"
    if (ROOT / "docs" / more).is_file():
        yield f"What it matches in detail, and why the result is right: [{more}](../{more}).\n"
    yield "## What it writes\n"
    yield "```text"
    yield from (str(getattr(torch.ops.ltx_inductor, op).default._schema) for op in ops)
    yield "```\n"
    if rule == "rmsnorm_split_rope":
        yield "## Contracts\n\n| contract | where eager rounds |\n|---|---|"
        yield from (f"| `{name}` | {c.describe()} |" for name, c in CONTRACTS.items())
        yield ""
    yield "## How each refusal reads\n"
    yield "`…` stands for a name, a number or a dtype of your graph; what is expected, and the hint, follow.\n"
    for reason, expected, hint in sorted(_refusals(modules)):
        rest = [f"expected {expected}"] * bool(expected) + [f"hint: {hint}"] * bool(hint)
        yield f"* {_escaped(reason)}" + (f" — *{_escaped('; '.join(rest))}*" if rest else "")
    yield "\n## What has no kernel\n\nThe launch is left to Inductor, with one of these sentences:\n"
    for name in kernels:
        if (KERNELS / f"{name}.py").is_file():
            yield from (f"* {_escaped(text)}" for text in _returned(KERNELS / f"{name}.py"))
    yield ""
    yield from _worth(rule)
    yield from _numbers(rule)


def _worth(rule: str) -> Iterator[str]:
    data = json.loads((KERNELS / "profit.json").read_text())
    rows = [r for r in data["rows"] if r["rule"] == rule]
    replaced = "NATTEN" if rule == "neighborhood_attention" else "Inductor's code"
    slower = [r for r in rows if r["ltx_us"] >= r["other_us"]]
    yield "## What is worth a launch\n"
    yield (
        f"A launch that was measured to be slower than {replaced} is left alone (`ltx_inductor.profit`): here "
        + (f"{len(slower)} of the {len(rows)} sizes below." if slower else f"none of the {len(rows)} sizes below.")
    )
    yield f"{data['device']}, torch {data['torch']}, {data['date']}; times on the GPU, replayed from a CUDA graph.\n"
    yield f"| what | this op, µs | {replaced}, µs | gain |\n|---|---|---|---|"
    for r in rows:
        yield f"| {r['what']} | {r['ltx_us']:.2f} | {r['other_us']:.2f} | {r['other_us'] / r['ltx_us']:.2f} |"
    yield ""


def _refusals(modules: Iterable[str]) -> set[tuple[str, str, str]]:
    found = set()
    for path in (REWRITE / f"{name}.py" for name in modules):
        if not path.is_file():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refuse" and node.args:
                reason = _text(node.args[0])
                named = {k.arg: _text(k.value) for k in node.keywords}
                if reason.strip("… "):
                    found.add((reason, named.get("expected", ""), named.get("hint", "")))
    return found


def _returned(path: Path) -> list[str]:
    """The sentences that `unsupported` of a kernel module returns."""
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and "unsupported" in function.name:
            texts = [_text(n.value) for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
            found += [t for t in texts if t.strip("… ")]
    return found


def _text(node: ast.expr) -> str:
    """A string as written, with `…` for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return "…"


def _escaped(text: str) -> str:
    return text.replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;")


def _numbers(rule: str) -> Iterator[str]:
    if rule == "rmsnorm_split_rope":
        data: dict[str, Any] = json.loads((ROOT / "benchmarks/results/rope-h200.json").read_text())
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
        return
    for schedule, name in (("ltx", "fna"), ("exact", "fna-exact")):
        data = json.loads((ROOT / f"benchmarks/results/{name}-h200.json").read_text())
        yield f"## Numbers of `{'fast' if schedule == 'ltx' else schedule}`\n"
        yield f"{data['device']}, torch {data['torch']}, {data['date']}.\n"
        yield "| grid | window | heads | NATTEN, ms | this op, ms | NATTEN / this |\n|---|---|---|---|---|---|"
        for r in data["rows"]:
            size, window = (" x ".join(map(str, r[k])) for k in ("grid", "window"))
            ms = f"{r['natten']['ms']:.2f} | {r[schedule]['ms']:.2f}"
            yield f"| {size} | {window} | {r['heads']} | {ms} | {r['natten']['ms'] / r[schedule]['ms']:.2f} |"
        yield ""


def on_pre_build(config: Any) -> None:
    """The hook of mkdocs."""
    folder = ROOT / "docs" / "rules"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
