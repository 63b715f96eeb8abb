"""Reports on disk, beside Inductor's caches, for compiles in which the pass does not run.

When AOTAutogradCache answers, no pass is called, yet the compiled graph holds the rewrites of the compile that filled
the cache. That compile leaves its reports here, under a fingerprint of the graph Dynamo captured.

Concurrency: any process may write at any time. A file is written under a temporary name and renamed, so a reader
sees a whole report or none; two writers of one key write the same thing. Nothing here ever fails a compile: what
cannot be written or read is logged and counts as absent.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ltx_inductor.rewrite.drawn import DrawnNode
from ltx_inductor.rewrite.report import GraphReport

log = logging.getLogger("ltx_inductor")
_FORMAT = 2
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def folder() -> Path:
    """Where reports are kept: follows TORCHINDUCTOR_CACHE_DIR as Inductor does."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "ltx_inductor" / "reports"


@dataclass
class Kept:
    """What one backend call leaves for later cache hits.

    frames: as `source_frames` gives them. needs: as `kernel_needs.Remembering` collects them.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)
    needs: list[dict[str, Any]] = field(default_factory=list)


def save(key: str, kept: Kept) -> None:
    """Publishes what is to be kept under `key`."""
    data = {"format": _FORMAT, **asdict(kept)}
    try:
        _publish(_path(key), json.dumps(data))
    except OSError as error:
        log.warning("the report of this compile could not be kept for later cache hits: %s", error)


def _publish(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "w") as f:
            f.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a shared cache is read by others
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(key: str, frames: Sequence[str]) -> Kept | None:
    """What is kept under `key`, with source lines moved to where `frames` says the code is now; None if absent."""
    try:
        data = json.loads(_path(key).read_text())
        if data["format"] != _FORMAT:
            return None
        graphs = [_moved(GraphReport.from_dict(g), data["frames"], frames) for g in data["graphs"]]
        return Kept(graphs, list(frames), list(data["needs"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("a report kept for cache hits could not be read: %s", error)
        return None


def _path(key: str) -> Path:
    return folder() / key[:2] / f"{key}.json"


def _moved(graph: GraphReport, old: Sequence[str], new: Sequence[str]) -> GraphReport:
    """Inductor's keys ignore source lines, so a hit may come after lines were added above a model's code."""
    if len(old) != len(new):
        return graph
    line = dict(zip(old, new, strict=True))
    sites = [replace(s, source=line.get(s.source, s.source)) for s in graph.sites]
    refusals = [replace(r, source=line.get(r.source, r.source)) for r in graph.refusals]
    drawings = [replace(d, before=_redrawn(d.before, line), after=_redrawn(d.after, line)) for d in graph.drawings]
    return replace(graph, sites=sites, refusals=refusals, drawings=drawings)


def _redrawn(nodes: Sequence[DrawnNode], line: Mapping[str, str]) -> tuple[DrawnNode, ...]:
    """Their source is "file.py:12 in forward: code"."""
    found = []
    for n in nodes:
        place, _, rest = n.source.partition(" ")
        found.append(replace(n, source=f"{line.get(place, place)} {rest}") if rest else n)
    return tuple(found)


def source_frames(gm: fx.GraphModule) -> list[str]:
    """Every "file.py:123" of the graph's stack traces, in order of first appearance."""
    seen: dict[str, None] = {}
    for trace in dict.fromkeys(node.stack_trace or "" for node in gm.graph.nodes):
        for path, line in _FRAME.findall(trace):
            seen.setdefault(f"{os.path.basename(path)}:{line}")
    return list(seen)


def fingerprint(gm: fx.GraphModule, example_inputs: Sequence[Any], pass_id: str) -> str:
    """Digest of what the compiled graph is computed from: Dynamo's graph, its inputs, the global modes, the pass.

    Sizes are symbols where they are dynamic. Names of nodes, source lines, addresses and device indices do not count.
    """
    hasher = hashlib.sha256()
    for line in _lines(gm, example_inputs, pass_id):
        hasher.update(line.encode())
        hasher.update(b"\n")
    return hasher.hexdigest()


def _lines(gm: fx.GraphModule, example_inputs: Sequence[Any], pass_id: str) -> Iterator[str]:
    yield f"{_FORMAT} {pass_id}"
    yield f"grad {torch.is_grad_enabled()} inference {torch.is_inference_mode_enabled()}"
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            yield f"autocast {device} {torch.get_autocast_dtype(device)}"
    for value in example_inputs:
        yield _text(value, {})
    yield from _graph_lines(gm)


def _graph_lines(gm: fx.GraphModule) -> Iterator[str]:
    number: dict[fx.Node, int] = {}
    for i, node in enumerate(gm.graph.nodes):
        number[node] = i
        target = "" if node.op in ("placeholder", "output") else _text(node.target, number)
        yield f"{node.op} {target} {_text(node.args, number)} {_text(node.kwargs, number)}"
        if node.op == "get_attr" and isinstance(node.target, str):
            value = _attribute(gm, node.target)
            if isinstance(value, fx.GraphModule):
                yield from _graph_lines(value)
            else:
                yield _text(value, number)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _text(value: Any, number: Mapping[fx.Node, int]) -> str:
    """`value` as text that is the same in every process."""
    if isinstance(value, fx.Node):
        return f"%{number[value]}"
    if isinstance(value, torch.Tensor):
        return (
            f"{type(value).__name__}({list(value.shape)}, {list(value.stride()) if _strided(value) else ''}, "
            f"{value.dtype}, {value.device.type}, {value.requires_grad})"
        )
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_text(v, number) for v in value)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(k, number)}: {_text(v, number)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), number)}"
    if isinstance(value, torch.device):
        return value.type
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, _BY_STR):
        return str(value)
    if isinstance(value, Callable):  # type: ignore[arg-type]
        name = getattr(value, "__qualname__", None) or type(value).__qualname__
        return f"{getattr(value, '__module__', '')}.{name}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


_BY_STR = (
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
    enum.Enum,
)


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided
