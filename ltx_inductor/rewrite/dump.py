"""Graphs as text: before/after dumps that can be read and diffed, and the places they go to.

A line is one node, in program order, under its fx name (which a rewrite leaves alone, so diffs stay small); a comment
gives the user's source line where it changes. Files hold no path but base names, so dumps of two machines compare.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ltx_inductor.rewrite.source import is_library

log = logging.getLogger("ltx_inductor")

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)\n?(.*)')
_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def render(graph: fx.Graph) -> str:
    """`graph` as Python-like text, ending in a newline."""
    inputs = [f"    {n.name}{_annotation(n)},\n" for n in graph.nodes if n.op == "placeholder"]
    head = ["def graph(\n", *inputs, "):\n"] if inputs else ["def graph():\n"]
    return "".join(head) + _body(graph.nodes)


def excerpt(first: fx.Node, last: fx.Node) -> str:
    """The part of a graph from one node to another, both included, as `render` writes it."""
    nodes = [first]
    while nodes[-1] is not last and nodes[-1].op != "output":
        nodes.append(nodes[-1].next)
    return _body(nodes)


def _body(nodes: Iterable[fx.Node]) -> str:
    lines: list[str] = []
    last = ""
    for node in nodes:
        if node.op == "placeholder":
            continue
        where = "" if node.op == "output" else source_comment(node)
        if where and where != last:
            lines.append(f"\n    # {where}\n")
            last = where
        lines.append(f"    {_statement(node)}\n")
    return "".join(lines)


def unified(before: str, after: str, name: str) -> str:
    """Unified diff of two renderings; "" if they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"{name}/before.py",
        f"{name}/after.py",
    )
    return "".join(lines)


def write(
    folder: str | os.PathLike[str],
    index: int | None,
    before: str,
    after: str,
    per_site: Sequence[tuple[str, str]] = (),
) -> Path:
    """Writes before.py, after.py, graph.diff and one NNN-<name>.diff per rewrite into folder/graph-<index>.

    index:    number of the graph, or None for the next free one (safe with several processes on one folder).
    per_site: (name, diff) of every rewrite, in order; the name becomes part of a file name.
    Returns the folder written. Raises OSError if it cannot be written.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"graph-{index:03d}" if index is not None else _next_free(root)
    target.mkdir(exist_ok=True)
    (target / "before.py").write_text(before)
    (target / "after.py").write_text(after)
    (target / "graph.diff").write_text(unified(before, after, target.name))
    for i, (name, diff) in enumerate(per_site):
        (target / f"{i:03d}-{re.sub(r'[^A-Za-z0-9_.]+', '-', name)}.diff").write_text(diff)
    return target


def _next_free(root: Path) -> Path:
    number = 0
    while True:
        path = root / f"graph-{number:03d}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def wanted() -> bool:
    """Does anyone listen to `emit`? Rendering a large graph takes a while, so ask first."""
    return log.isEnabledFor(logging.DEBUG) or bool(torch._logging._internal.trace_log.handlers)


def emit(name: str, before: str, after: str) -> None:
    """To TORCH_LOGS="+ltx_inductor" (the diff), and to tlparse (both graphs and the diff) where a trace is taken."""
    diff = unified(before, after, name)
    log.debug("%s\n%s", name, diff or "unchanged\n" + before)
    for kind, text in (("before", before), ("after", after), ("diff", diff)):
        _trace(f"ltx_inductor_{name}_{kind}", text)


def _trace(name: str, text: str) -> None:
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text
    )


def source_comment(node: fx.Node) -> str:
    """The innermost line of the user, as "file.py:12 in forward: x = self.norm(x)"; else the module; else ""."""
    frames = _frames(node.stack_trace or "")
    if frames:
        return frames[-1]
    modules = node.meta.get("nn_module_stack") or {}
    return f"module {list(modules.values())[-1][0]}" if modules else ""


@functools.lru_cache(maxsize=65536)
def _frames(trace: str) -> tuple[str, ...]:
    found = _FRAME.findall(trace)
    users = [f for f in found if not is_library(f[0])] or found
    return tuple(f"{os.path.basename(path)}:{line} in {where}: {code.strip()}" for path, line, where, code in users)


def _statement(node: fx.Node) -> str:
    if node.op == "output":
        return call_text(node)
    return f"{node.name}{_annotation(node)} = {call_text(node)}"


def op_name(node: fx.Node) -> str:
    """Such as "aten.mul.Tensor", "getitem", "placeholder"."""
    if node.op == "call_function":
        return "getitem" if node.target is operator.getitem else _name(node.target)
    return node.op


def call_text(node: fx.Node) -> str:
    """The right side of a node's line: "aten.mul.Tensor(x, rsqrt)"; "" for an input."""
    if node.op == "placeholder":
        return ""
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    if node.op == "get_attr":
        return f"self.{node.target}"
    args = [_value(a) for a in node.args] + [f"{k}={_value(v)}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    name = f"self.{node.target}" if node.op == "call_module" else _name(node.target)
    return f"{name}({', '.join(args)})"


def _name(target: Callable[..., Any] | str) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", None) or str(target)


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_value(v) for v in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_value(value.start)}, {_value(value.stop)}, {_value(value.step)})"
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, (str, int, float, complex)) or value is None:
        return repr(value)
    return str(value)


def _annotation(node: fx.Node) -> str:
    """As in `x: "bf16[2, s0, 64]"`; strides follow where they are not those of a contiguous tensor."""
    text = type_text(node.meta.get("val"))
    return f': "{text}"' if text else ""


def type_text(value: Any) -> str:
    """dtype, sizes, and strides where they are not contiguous: "bf16[1, 24, 64]"; "" for no value."""
    if isinstance(value, torch.Tensor):
        dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        strides = "" if _contiguous(value) else f" strides [{', '.join(str(s) for s in value.stride())}]"
        device = "" if value.device.type == "cpu" else f" {value.device.type}"
        return f"{dtype}[{', '.join(str(s) for s in value.shape)}]{strides}{device}"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(type_text(v) for v in value)})"
    return ""


def _contiguous(tensor: torch.Tensor) -> bool:
    """Compared as expressions: asking the tensor could add a guard on a dynamic size."""
    if tensor.layout != torch.strided:
        return True
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if _expression(size) != 1 and _expression(stride) != expected:
            return False
        expected = expected * _expression(size)
    return True


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
