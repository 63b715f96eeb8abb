"""Neighborhood attention that is one op on un-permuted tensors already: ltx-core's fallbacks, and natten.na3d traced.

ltx-core wraps its Triton kernel and its tiled eager code in custom ops, so that its graph stays whole. Its other
neighborhood ops compute something else (attention to keyframes too) or have kernels of their own; they are named.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.neighborhood import Miss, NeighborhoodCall, bound_arguments, reader, window_of
from ltx_inductor.rewrite.view import GraphView

# op -> its arguments, and the scale where it is no argument
_FORMS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "ltx_core::na_attention_triton": (("q", "k", "v", "kernel_size"), 1.0),
    "ltx_core::na_attention_eager": (("q", "k", "v", "kernel_size"), 1.0),
    "ltx_inductor::natten_na3d": (("query", "key", "value", "kernel_size", "scale"), None),
}
_OTHERS = "ltx_core::na_attention_"


@reader
def opaque_calls(view: GraphView) -> Iterator[NeighborhoodCall | Miss]:
    for n in view.graph.nodes:
        if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            continue
        name: str = n.target._schema.name
        if name not in _FORMS:
            if name.startswith(_OTHERS) and n in view.live:
                yield Miss(n, Refuse(f"{name} is another attention than that of a query to its window", hint=_LEFT))
            continue
        if n not in view.live:
            continue
        expected, scale = _FORMS[name]
        args = bound_arguments(n)
        if tuple(args) != expected:
            why = Refuse(f"{name} takes {', '.join(args)}", expected=", ".join(expected))
            yield Miss(n, why)
            continue
        q, k, v, kernel_size = list(args.values())[:4]
        try:
            window = window_of(kernel_size, name)
        except Refuse as why:
            yield Miss(n, why)
            continue
        yield NeighborhoodCall(q, k, v, window, args["scale"] if scale is None else scale, n, name, n)


_LEFT = "it runs as before"
