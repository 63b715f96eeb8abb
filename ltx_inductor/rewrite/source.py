"""Where in the user's code a graph value comes from."""

from __future__ import annotations

import os
import re

import torch
from torch.fx import Node

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NATTEN = re.compile(r"[/\\]natten[/\\]")  # a library in a wheel, or somewhere in the cache of the Hugging Face Hub
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(n: Node) -> str:
    """ "file.py:123", the innermost line outside torch and natten; "" where the node carries no stack trace."""
    frames = _FRAME.findall(str(n.meta.get("stack_trace") or ""))
    for path, line in reversed(frames):
        if not is_library(path):
            return f"{os.path.basename(path)}:{line}"
    return ""


def is_library(path: str) -> bool:
    """Is it the code of torch or natten, which no user wants to be pointed to?"""
    return path.startswith(_TORCH) or _NATTEN.search(path) is not None
