"""Where in the user's code, and in the user's model, a graph value comes from."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NATTEN = re.compile(r"[/\\]natten[/\\]")  # a library in a wheel, or somewhere in the cache of the Hugging Face Hub
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in [^\n]*\n *([^\n]*))?')
_MODULE_NAME = re.compile(r"\['(\w+)'\]|\.(\w+)|\[(\d+)\]")


@dataclass(frozen=True)
class Origin:
    """source: "file.py:123". path: of the file, as it would be imported, "pkg/models/file.py". code: the line's text.
    module: the innermost of the user's modules, "blocks.3.attn1". Each is "" where the graph does not know it."""

    source: str = ""
    path: str = ""
    code: str = ""
    module: str = ""


def origin(n: Node) -> Origin:
    """The innermost line outside torch and natten, and the module whose forward it is part of."""
    module = module_path(n.meta.get("nn_module_stack") or {})
    for file, line, code in reversed(_FRAME.findall(str(n.meta.get("stack_trace") or ""))):
        if not is_library(file):
            return Origin(f"{os.path.basename(file)}:{line}", short_path(file), code, module)
    return Origin(module=module)


def source_line(n: Node) -> str:
    """ "file.py:123" of that line; "" where the node carries no stack trace."""
    return origin(n).source


def module_path(stack: Mapping[str, tuple[Any, Any]]) -> str:
    """The innermost module that is not torch's own (of attn1.norm_q that is attn1), as named from the compiled one on.

    stack: nn_module_stack, {any key: (how Dynamo reaches the module, its class)}, the outermost first.
    """
    for reached, kind in reversed(list(stack.values())):
        if not str(getattr(kind, "__module__", kind)).startswith("torch."):
            # such as L['self'].__dict__['_modules']['blocks'].0.attn1: what is left of it are the names of attributes
            found = _MODULE_NAME.findall(re.sub(r"^.*cell_contents|^[LG]\['\w+'\]", "", str(reached)))
            names = ("".join(parts) for parts in found)
            return ".".join(name for name in names if name not in ("__dict__", "_modules"))
    return ""


@functools.lru_cache(maxsize=4096)
def short_path(file: str) -> str:
    """A file's path from where Python imports it, so that it says nothing of the machine: "diffusers/models/x.py"."""
    if not os.path.isabs(file):  # such as <string>
        return file
    parents = Path(file).parents
    roots = [p for p in parents if str(p) in {os.path.abspath(entry) for entry in sys.path}]
    root = roots[0] if roots else parents[0]
    while (root / "__init__.py").is_file():
        root = root.parent
    return Path(file).relative_to(root).as_posix()


def is_library(path: str) -> bool:
    """Is it the code of torch or natten, which no user wants to be pointed to?"""
    return path.startswith(_TORCH) or _NATTEN.search(path) is not None
