"""What the ops may ask about sizes: fake tensors have symbols for dynamic ones, and an op must not guard on them."""

from __future__ import annotations

from typing import Any


def certainly(fact: Any) -> bool:
    """A comparison of sizes, where it holds for every value of their symbols."""
    if isinstance(fact, bool):
        return fact
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(fact)
