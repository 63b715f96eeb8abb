"""A report as one HTML page: no network, no other file, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from typing import Any

from ltx_inductor.views.groups import Group, groups, path, refusals, summary
from ltx_inductor.views.svg import draw

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def page(report: Mapping[str, Any], title: str = "ltx_inductor report") -> str:
    """The page for a report's `to_dict()`; nothing in it is taken for markup."""
    rewritten, left = groups(report), refusals(report)
    tiles = "".join(f"<li><b>{escape(v)}</b><span>{escape(k)}</span></li>" for k, v in summary(report).items())
    notes = "".join(f'<p class="note">{escape(n)}</p>' for n in report["notes"])
    cached = '<p class="note">read back from the cache: the pass did not run in this process</p>' * report["cached"]
    body = [
        f"<header><h1>{escape(title)}</h1><ul class='tiles'>{tiles}</ul>{cached}{notes}</header>",
        _bar(report),
        "<main>",
        _section("Rewritten", [_site(g, i) for i, g in enumerate(rewritten)], "nothing was rewritten"),
        _section("Left alone", [_refusal(r, n) for r, n in left], "nothing that looked like a site was left alone"),
        "</main>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head>\n<body>"
        f"{''.join(body)}<script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _bar(report: Mapping[str, Any]) -> str:
    found = [x for g in report["graphs"] for x in (*g["sites"], *g["refusals"])]
    rules = sorted({x["rule"] for x in found})
    files = sorted({path(x) for x in found} - {""})
    kinds = ["rewritten", "left alone"]
    return (
        '<div class="bar"><form role="search">'
        '<input type="search" name="q" placeholder="search: file, op, shape, reason …" aria-label="search">'
        f"{_choice('kind', 'everything', kinds)}{_choice('rule', 'every rule', rules)}"
        f"{_choice('file', 'every file', files)}"
        '<span id="shown" class="soft" role="status"></span>'
        '<button type="button" id="theme" title="light or dark">dark</button></form></div>'
    )


def _choice(name: str, everything: str, values: Iterable[str]) -> str:
    options = "".join(f'<option value="{escape(v)}">{escape(v)}</option>' for v in values)
    return f'<select name="{name}" aria-label="{name}"><option value="">{everything}</option>{options}</select>'


def _section(title: str, cards: list[str], nothing: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(cards) or f'<p class=soft>{nothing}</p>'}</section>"


def _card(kind: str, rule: str, paths: Iterable[str], text: Iterable[str], inner: str) -> str:
    files = "|".join(paths)
    searched = " ".join((kind, rule, *paths, *text)).lower()
    return (
        f'<article class="card" data-kind="{kind}" data-rule="{escape(rule)}" data-file="{escape(files)}" '
        f'data-text="{escape(searched)}">{inner}</article>'
    )


def _site(group: Group, number: int) -> str:
    first = group.first
    n, sides = group.launches, f", {len(group.sites)} sides" * (first["rule"] == "rmsnorm_split_rope")
    times = f' <span class="tag">{n} launch{"es" * (n != 1)}{sides}</span>'
    facts = {
        "module": f"<code>{escape(group.modules)}</code>" if group.modules else "",
        "file": f"<code>{escape(', '.join(group.paths))}</code>",
        "code": "<br>".join(f"<code>{escape(line)}</code>" for line in group.code),
        "rule": f"<code>{escape(first['rule'])}</code>",
        "op": f"<code>{escape(first['op'])}</code>",
        "of" if first["form"] else "sides": escape(group.sides),
        "contract": f"<code>{escape(first['contract'])}</code>" if first["contract"] else "",
        "shapes": "<br>".join(
            f"<code>{escape((side + ' ' if side else '') + ' '.join(f'{k}={v}' for k, v in shapes.items()))}</code>"
            for side, shapes in group.shapes
        ),
        "replaced": _nodes(group),
        "proof": escape(group.proof),
        "expected saving": escape(group.saving),
    }
    listed = "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in facts.items() if v)
    head = (
        f'<h3 class="mono">{escape(", ".join(group.sources))}</h3><p><span class="tag good">rewritten</span>{times}</p>'
    )
    drawn = _drawing(group.drawing, number) if group.drawing else ""
    text = [*group.sources, first["op"], first["contract"], *group.code]
    text += [s[k] for s in group.sites for k in ("node", "module")]
    text += [f"{k}={v}" for s in group.sites for k, v in s["shapes"].items()]
    return _card("rewritten", first["rule"], group.paths, text, f"{head}<dl>{listed}</dl>{drawn}")


def _nodes(group: Group) -> str:
    names = [s["node"] for s in group.sites]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"<code>{escape(', '.join(names[:8]))}</code>{more}"


def _drawing(drawing: Mapping[str, Any], number: int) -> str:
    figures = "".join(
        f"<figure><figcaption>{label}</figcaption><div class='scroll'>"
        f"{draw(drawing[when], f'graph {when} the rewrite')}</div></figure>"
        for when, label in (("before", "before: what eager computes, node by node"), ("after", "after"))
    )
    key = (
        '<p class="key soft"><span style="background:var(--region)"></span>replaced'
        '<span style="background:var(--op)"></span>the fused op'
        '<span style="background:var(--new)"></span>written with it'
        '<span style="background:var(--input)"></span>outside, unchanged</p>'
    )
    lines = "".join(
        f'<div class="{ {"+": "plus", "-": "minus"}.get(line[:1], "same") }">{escape(line)}</div>'
        for line in drawing["diff"].splitlines()
    )
    opened = " open" if number == 0 else ""
    return (
        f"<details{opened}><summary>graph before and after</summary>{key}<div class='sides'>{figures}</div></details>"
        f"<details><summary>diff</summary><pre class='diff'>{lines}</pre></details>"
    )


def _refusal(r: Mapping[str, Any], times: int) -> str:
    source = r["source"] or "<no source line>"
    tags = '<span class="tag bad">left alone</span>'
    if not r["certain"]:
        tags += '<span class="tag">only looks like one</span>'
    if times > 1:
        tags += f'<span class="tag">{times} times</span>'
    facts = {"file": path(r)} | {k: r[k] for k in ("module", "code", "rule", "node", "found", "expected", "hint")}
    facts = {k: v for k, v in facts.items() if v}
    listed = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    inner = f'<h3 class="mono">{escape(source)}</h3><p>{tags}</p><p>{escape(r["reason"])}</p><dl>{listed}</dl>'
    return _card("left alone", r["rule"], [path(r)], [source, r["reason"], *facts.values()], inner)
