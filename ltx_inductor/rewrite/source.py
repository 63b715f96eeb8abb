"""Where in the user's code a graph value comes from."""

from __future__ import annotations

import re

from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(n: Node) -> str:
    """ "file.py:123", the innermost line outside torch itself; "" where the node carries no stack trace."""
    frames = _FRAME.findall(str(n.meta.get("stack_trace") or ""))
    for path, line in reversed(frames):
        if "/torch/" not in path.replace("\\", "/"):
            return f"{path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"
    return ""
