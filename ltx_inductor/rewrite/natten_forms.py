"""NATTEN's compiled ops in a graph: neighborhood attention on permuted tokens, and on tokens as they are.

The kernels for Hopper and Blackwell want tokens tile by tile, so that natten.na3d calls

    q' = token_permute_3d(q, q_tile, dilation, True)        [B, padded tokens, heads, head_dim]; k' and v' with kv_tile
    out', lse = hopper_na3d_forward(q', k', v', kernel_size, stride, dilation, is_causal, scale,
                                    padded grid of q', of k', grid, q_tile, kv_tile, schedule)
    out = token_unpermute_3d(out', grid, q_tile, dilation, True)

The permutes undo each other whatever the tile, as long as all agree: then the call is one on q, k and v. The ops are
known by name and arguments, in any namespace: a build from the Hugging Face Hub has a hash in its.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.layout import aten
from ltx_inductor.rewrite.neighborhood import Miss, NeighborhoodCall, bound_arguments, reader, whole_numbers, window_of
from ltx_inductor.rewrite.view import GraphView

_QKV = ("query", "key", "value")
_WINDOW = (*_QKV, "kernel_size", "stride", "dilation", "is_causal", "scale")
_TILES = ("q_tile_shape", "kv_tile_shape")
_DEFAULT_TILES = ((4, 4, 4), (4, 4, 8))  # of NATTEN 0.21 for head_dim 64 on Hopper
_PERMUTED = (*_WINDOW, "q_shape", "kv_shape", "qkv_shape", *_TILES)
_VARLEN = ("cumulative_seqlen_Q", "cumulative_seqlen_KV", "max_seqlen_Q", "max_seqlen_KV")
_PERMUTE = ("input_tensor", "tile_shape", "dilation", "flip_tiled_dims")
_UNPERMUTE = ("input_tensor", "token_layout_shape", "tile_shape", "dilation", "flip_tiled_dims")
ARGUMENTS = {
    "hopper_na3d_forward": (*_PERMUTED, "kernel_schedule_int"),
    "blackwell_na3d_forward": (*_PERMUTED, "run_persistent_kernel"),
    "na3d_forward": (*_WINDOW, *_TILES),
    "reference_na3d_forward": (*_WINDOW, "qkv_shape", "num_extra_kv"),
    "token_permute_3d": _PERMUTE,
    "token_unpermute_3d": _UNPERMUTE,
}
_PLAIN_ATTENTION = ("hopper_fmha_forward", "blackwell_fmha_forward", "fmha_forward")


@reader
def natten_calls(view: GraphView) -> Iterator[NeighborhoodCall | Miss]:
    """Every call of one of NATTEN's forward ops in 3D, and of its plain attention."""
    for n in view.graph.nodes:
        if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            continue
        name = _name(n.target)
        if not name or n not in view.live:
            continue
        try:
            if name in ("hopper_na3d_forward", "blackwell_na3d_forward"):
                yield _permuted(view, n)
            elif name == "na3d_forward":
                yield _unpermuted(view, n)
            elif name == "reference_na3d_forward":
                raise Refuse(f"{n.target} is NATTEN's reference kernel, which nobody runs for speed")
            elif name in _PLAIN_ATTENTION and _is_window_of_whole_grid(n):
                yield Miss(n, _whole_grid(n))
        except Refuse as why:
            yield Miss(n, why)


@functools.cache
def _name(op: torch._ops.OpOverload) -> str:
    """The op's name without its namespace, where it is one of ours to read; else ""."""
    name: str = op._schema.name.split("::")[-1]
    return name if name in ARGUMENTS or name in _PLAIN_ATTENTION else ""


def _arguments(n: Node) -> dict[str, Any]:
    """By name. Raises Refuse where an op of this name takes other arguments than those of NATTEN 0.21."""
    expected = ARGUMENTS[_name(n.target)]
    found = tuple(a.name for a in n.target._schema.arguments)
    if found != expected:
        raise Refuse(
            f"{n.target} takes other arguments than NATTEN's op of this name",
            found=", ".join(found),
            expected=", ".join(expected),
        )
    return bound_arguments(n)


def _permuted(view: GraphView, n: Node) -> NeighborhoodCall:
    args = _arguments(n)
    window = _plain_window(n, args)
    out = _only_output(view, n)
    tiles = [whole_numbers(args[name]) for name in _TILES]
    if not all(t is not None and len(t) == 3 and min(t) > 0 for t in tiles):
        raise Refuse(f"the tiles of {n.name} are {args['q_tile_shape']} and {args['kv_tile_shape']}")
    q_tile, kv_tile = tiles
    permutes = [
        _permute(n, name, args[name], tile) for name, tile in zip(_QKV, (q_tile, kv_tile, kv_tile), strict=True)
    ]
    q, k, v = (_source(p) for p in permutes)
    grid = q.meta["val"].shape[1:4]
    _same_sizes(n, "qkv_shape", args["qkv_shape"], grid)
    for name, tile in (("q_shape", q_tile), ("kv_shape", kv_tile)):
        assert tile is not None
        padded = [(size + t - 1) // t * t for size, t in zip(grid, tile, strict=True)]
        _same_sizes(n, name, args[name], padded)
    result = _unpermute(view, n, out, grid, q_tile)
    # the kernel takes scale 0 for its default, and the maximum of a row is none where the scale is negative
    default = _name(n.target) == "hopper_na3d_forward" and (q_tile, kv_tile) == _DEFAULT_TILES and args["scale"] > 0
    inside = (*permutes, n, out)
    return NeighborhoodCall(q, k, v, window, args["scale"], result, _form(n), n, inside, hopper_bits=default)


def _unpermuted(view: GraphView, n: Node) -> NeighborhoodCall:
    args = _arguments(n)
    window = _plain_window(n, args)
    q, k, v = (_before_copy(_tensor(n, name, args[name])) for name in _QKV)
    return NeighborhoodCall(q, k, v, window, args["scale"], _only_output(view, n), _form(n), n, (n,))


def _plain_window(n: Node, args: dict[str, Any]) -> tuple[int, int, int]:
    """The window. Raises Refuse for what the op does not have: stride, dilation, causal axes, a scale not known."""
    form = _form(n)
    window = window_of(args["kernel_size"], form)
    for name in ("stride", "dilation"):
        if whole_numbers(args[name]) != (1, 1, 1):
            raise Refuse(
                f"{form} is called with {name}={list(args[name])}",
                expected=f"{name} 1 along every axis",
                hint="NATTEN runs it as before",
            )
    if any(value is not False for value in args["is_causal"]):
        raise Refuse(
            f"{form} is called with is_causal={list(args['is_causal'])}",
            expected="a window that is causal along no axis",
            hint="NATTEN runs it as before",
        )
    if not isinstance(args["scale"], (int, float)):
        raise Refuse(f"the scale of {form} is only known while the model runs", expected="a number")
    return window


def _only_output(view: GraphView, n: Node) -> Node:
    """The attention's result. Raises Refuse where somebody reads the logsumexp."""
    outputs: dict[Any, list[Node]] = {0: [], 1: []}
    for u in n.users:
        if u in view.live:
            if u.target is not operator.getitem or u.args[1] not in outputs:
                raise Refuse(
                    f"{u.name} reads both results of {n.name} at once", expected="that only its output is read"
                )
            outputs[u.args[1]].append(u)
    if outputs[1]:
        raise Refuse(
            f"{outputs[1][0].name}, the logsumexp of {_form(n)}, is read by "
            f"{next(iter(outputs[1][0].users)).name}: the op does not compute it",
            expected="that only the attention's output is read",
            hint="leave out return_lse and additional_keys/additional_values, or let NATTEN run",
        )
    if len(outputs[0]) != 1:
        raise Refuse(f"the output of {n.name} is taken {len(outputs[0])} times", expected="once")
    return outputs[0][0]


def _permute(n: Node, name: str, value: Any, tile: Any) -> Node:
    """The token_permute_3d that `n` reads as its query, key or value. Raises Refuse where it does not match."""
    found = _tensor(n, name, value)
    args = _of_library(n, found, "token_permute_3d")
    if args is None:
        raise Refuse(
            f"the {name} of {_form(n)} is computed by {_target(found)}",
            expected=f"{_namespace(n)}::token_permute_3d of a [B, T, H, W, heads, head_dim] tensor",
        )
    _same_permute(n, found, args, tile)
    return found


def _unpermute(view: GraphView, n: Node, out: Node, grid: Any, tile: Any) -> Node:
    readers = [u for u in out.users if u in view.live]
    found = [u for u in readers if _of_library(n, u, "token_unpermute_3d") is not None]
    others = [u for u in readers if u not in found]
    if others or len(found) != 1:
        what = f"read by {others[0].name}" if others else f"un-permuted {len(found)} times"
        raise Refuse(
            f"{out.name}, the output of {_form(n)} in its permuted order, is {what}",
            expected="one token_unpermute_3d that reads it, and nobody else",
        )
    args = bound_arguments(found[0])
    _same_permute(n, found[0], args, tile)
    _same_sizes(found[0], "token_layout_shape", args["token_layout_shape"], grid)
    return found[0]


def _same_permute(n: Node, permute: Node, args: dict[str, Any], tile: Any) -> None:
    given = (whole_numbers(args["tile_shape"]), whole_numbers(args["dilation"]), args["flip_tiled_dims"])
    if given != (tile, (1, 1, 1), True):
        raise Refuse(
            f"{permute.name} does not put tokens in the order that {n.name} works in",
            found=f"tile {args['tile_shape']}, dilation {args['dilation']}, flip_tiled_dims={args['flip_tiled_dims']}",
            expected=f"tile {list(tile)}, dilation [1, 1, 1], flip_tiled_dims=True",
        )


def _same_sizes(n: Node, name: str, given: Any, expected: Any) -> None:
    """Raises Refuse unless the sizes are equal for all values of their symbols; adds no guard."""
    values = [v.meta["val"] if isinstance(v, Node) else v for v in given]
    if len(values) != 3 or not all(statically_known_true(a == b) for a, b in zip(values, expected, strict=True)):
        raise Refuse(f"{name} of {n.name} is {values}", expected=str(list(expected)))


def _of_library(n: Node, other: Node, name: str) -> dict[str, Any] | None:
    """The arguments of `other`, if it is the op of that name of the library that n's op is of."""
    if not isinstance(other.target, torch._ops.OpOverload) or _name(other.target) != name:
        return None
    return _arguments(other) if _namespace(other) == _namespace(n) else None


def _source(permute: Node) -> Node:
    """The tensor that is permuted, before it was made contiguous for that."""
    return _before_copy(_tensor(permute, "input_tensor", bound_arguments(permute)["input_tensor"]))


def _before_copy(n: Node) -> Node:
    """n, or what it is a contiguous copy of: the op takes any strides."""
    if n.target is aten.clone.default and isinstance(n.args[0], Node):
        return n.args[0]
    return n


def _tensor(n: Node, name: str, value: Any) -> Node:
    if not isinstance(value, Node):
        raise Refuse(f"{name} of {n.name} is {value!r}", expected="a tensor")
    return value


def _is_window_of_whole_grid(n: Node) -> bool:
    """Are the operands flattened grids? natten.na3d calls plain attention where the window is the whole grid."""
    q = n.args[0] if n.args else None
    if not isinstance(q, Node) or q.target not in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return False
    grid = q.args[0]
    return isinstance(grid, Node) and grid.meta["val"].dim() == 6


def _whole_grid(n: Node) -> Refuse:
    return Refuse(
        f"the window is the whole grid, for which NATTEN runs plain attention, {_form(n)}: already one fused kernel",
        expected="a window smaller than the grid along an axis",
    )


def _form(n: Node) -> str:
    return _target(n).removesuffix(".default")


def _target(n: Node) -> str:
    if isinstance(n.target, torch._ops.OpOverload):
        return str(n.target).replace(".", "::", 1)
    return n.name if n.op != "call_function" else str(getattr(n.target, "__name__", n.target))


def _namespace(n: Node) -> str:
    assert isinstance(n.target, torch._ops.OpOverload)
    return n.target.namespace
