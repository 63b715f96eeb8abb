"""How many bytes a value is, as far as the graph tells: what the kernels have to move."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch.fx import Node


def bytes_of(n: Node) -> int | None:
    """Bytes of the memory that a tensor covers, broadcast axes once; None if dynamic."""
    value = n.meta["val"]
    pairs = list(zip(value.shape, value.stride(), strict=True))
    if not all(isinstance(i, int) for pair in pairs for i in pair):
        return None
    return math.prod(size for size, stride in pairs if stride) * int(value.element_size())


def total(sizes: Iterable[int | None]) -> int | None:
    """The sum; None if one is."""
    found = list(sizes)
    return None if None in found else sum(size or 0 for size in found)
