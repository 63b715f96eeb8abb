"""A drawn graph as inline SVG. Colours come from the page, by class: the role of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ltx_inductor.views.layout import place

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 158, 36, 12, 26, 8
_CHARACTERS = 23  # that fit into a node


def draw(nodes: Sequence[Mapping[str, Any]], label: str) -> str:
    """`nodes` of a drawing (`ltx_inductor.rewrite.drawing.DrawnNode`, as dicts); label: for screen readers."""
    free = frozenset(n["name"] for n in nodes if n["role"] == "input")
    found = place({n["name"]: n["inputs"] for n in nodes}, free)
    width = round(found.width * (_WIDTH + _GAP_X) + 2 * _MARGIN)
    height = found.height * (_HEIGHT + _GAP_Y) + 2 * _MARGIN
    roles = {n["name"]: n["role"] for n in nodes}
    parts = [
        f'<svg class="graph" role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" style="min-width:{round(0.7 * width)}px">'
    ]
    for (source, name), points in found.edges.items():
        inside = "outside" if "input" in (roles[source], roles[name]) or roles[name] == "reader" else "inside"
        parts.append(f'<path class="edge {inside}" d="{_curve(points)}"/>')
    for n in nodes:
        parts.append(_node(n, _x(found.column[n["name"]]), _y(found.layer[n["name"]])))
    return "".join([*parts, "</svg>"])


def _x(column: float) -> float:
    return round(_MARGIN + (column + 0.5) * (_WIDTH + _GAP_X), 1)


def _y(layer: int) -> int:
    return _MARGIN + layer * (_HEIGHT + _GAP_Y)


def _curve(points: Sequence[tuple[float, int]]) -> str:
    """From the lower edge of the first node through the dummies to the upper edge of the last."""
    (column, layer), *rest = points
    x, y = _x(column), _y(layer) + _HEIGHT
    path = [f"M{x} {y}"]
    for i, (column, layer) in enumerate(rest):
        end_x, end_y = _x(column), _y(layer)
        middle = (y + end_y) / 2
        path.append(f"C{x} {middle} {end_x} {middle} {end_x} {end_y}")
        if i < len(rest) - 1:
            path.append(f"V{end_y + _HEIGHT}")
        x, y = end_x, end_y + _HEIGHT
    return "".join(path)


def _node(n: Mapping[str, Any], x: float, y: int) -> str:
    title = "\n".join(t for t in (f"{n['name']}: {n['type']}", n["call"], n["source"]) if t)
    first = n["name"] if n["role"] == "input" else short(n["op"])
    left, middle = round(x - _WIDTH / 2, 1), x
    return (
        f'<g class="node {n["role"]}"><title>{escape(title)}</title>'
        f'<rect x="{left}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text class="what" x="{middle}" y="{y + 15}">{escape(_fit(first))}</text>'
        f'<text class="type" x="{middle}" y="{y + 29}">{escape(_fit(n["type"].split(" strides")[0], 24))}</text></g>'
    )


def short(op: str) -> str:
    """ "mul" for aten.mul.Tensor, "qk_rmsnorm_split_rope" for ours: without namespace and overload."""
    parts = op.split(".")
    if parts[0] in ("aten", "prims", "ltx_inductor") and len(parts) > 1:
        return parts[1]
    return ".".join(parts[:2])


def _fit(text: str, most: int = _CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
