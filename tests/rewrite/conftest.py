"""Graphs that several modules look at, traced once."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def hopper():
    """natten.na3d of three inputs, as it is compiled on a Hopper GPU."""
    from tests.rewrite.neighborhood_cases import Call, qkv, traced

    return traced(Call(), qkv())
