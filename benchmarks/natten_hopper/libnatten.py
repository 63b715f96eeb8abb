"""`natten.libnatten` with what 3D neighborhood attention forward on Hopper needs; every other function raises.

build.py puts this file beside libnatten_hopper.so in a copy of the natten package.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

torch.ops.load_library(str(Path(__file__).with_name("libnatten_hopper.so")))
_ops = torch.ops.libnatten_hopper

hopper_na3d_forward = _ops.hopper_na3d_forward
token_permute_3d = _ops.token_permute_3d
token_unpermute_3d = _ops.token_unpermute_3d


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"natten.libnatten.{name} was not built: benchmarks/natten_hopper builds only 3D neighborhood attention "
            "forward for sm_90a, bf16, head_dim 64, not causal; install NATTEN's own wheel for the rest"
        )

    return missing
