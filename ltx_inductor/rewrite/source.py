"""Where in the user's code a graph value comes from."""

from __future__ import annotations

import os
import re

import torch
from torch.fx import Node

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(n: Node) -> str:
    """ "file.py:123", the innermost line outside torch itself; "" where the node carries no stack trace."""
    frames = _FRAME.findall(str(n.meta.get("stack_trace") or ""))
    for path, line in reversed(frames):
        if not path.startswith(_TORCH):
            return f"{os.path.basename(path)}:{line}"
    return ""
