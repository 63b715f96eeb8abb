"""python -m ltx_inductor replay FILE: runs a kept call again, by its kernel and by eager, and compares.

The RoPE ops are compared bit for bit, na3d as `verify="always"` compares it (ltx_inductor/ops/na3d_verified.py).
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ltx_inductor.kernels import fna, fna_gate, repro, rope, rope_axial
from ltx_inductor.ops import axial_rope, na3d, na3d_verified
from ltx_inductor.ops import rope as ops

_OPS: dict[str, tuple[Any, Any]] = {
    "rmsnorm_split_rope": (rope.launch_single, ops.reference),
    "qk_rmsnorm_split_rope": (rope.launch_pair, ops.reference_pair),
}

_NA3D, _AXIAL = "na3d", axial_rope.NAME
_DECLINED = "the kernel declines these inputs: eager sums them in another order, and the op runs eager"


class ReplayError(Exception):
    """The file cannot be replayed here; the message says why."""


def replay(path: str | Path) -> dict[str, Any]:
    """{"op", "elements", "differing", "recorded": {...}, "here": {...}}; differing is 0 where the kernel is right here.

    Raises ReplayError for a file that is no kept call, and where there is no GPU or no kernel to run it.
    """
    data = _load(Path(path))
    if not torch.cuda.is_available():
        raise ReplayError("there is no GPU here, and the kernel runs on one only")
    args, forced = _on_the_gpu(data["args"]), data.get("path", rope.AUTO)
    with torch.no_grad():
        others = {_NA3D: _neighborhood, _AXIAL: _axial}
        elements, wrong = others[data["op"]](args) if data["op"] in others else _rope(data["op"], args, forced)
    recorded = {k: data[k] for k in ("torch", "cuda", "device")}
    here = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "device": torch.cuda.get_device_name()}
    return {
        "op": data["op"],
        "elements": elements,
        "differing": wrong,
        "recorded": recorded,
        "here": here,
    }


def _rope(op: str, args: list[Any], path: int) -> tuple[int, int]:
    """(elements, how many of them differ)"""
    _prepare(args)
    launch, eager = _OPS[op]
    got, want = launch(*args, path=path), eager(*args)
    if got is None:
        raise ReplayError(_DECLINED)
    pairs = list(zip(_tuple(got), _tuple(want), strict=True))
    return sum(g.numel() for g, _ in pairs), sum(repro.differing(g, w) for g, w in pairs)


def _axial(args: list[Any]) -> tuple[int, int]:
    x, _, cos, *_, contract = args
    spec = rope_axial.Spec(contract, x.dtype, tuple(c.shape[-1] for c in cos))
    missing = rope_axial.prepare(torch.cuda.get_device_capability(), spec, torch.cuda.current_device())
    if missing is not None:
        raise ReplayError(missing)
    got = rope_axial.launch(*args)
    if got is None:
        raise ReplayError(_DECLINED)
    return got.numel(), repro.differing(got, axial_rope.reference(*args))


def _neighborhood(args: list[Any]) -> tuple[int, int]:
    q, k, v, kernel_size, scale, exact = args
    t, h, w = kernel_size
    if exact and importlib.util.find_spec("natten"):
        importlib.import_module("natten")  # then the bits are compared with it
    missing = fna.prepare(
        torch.cuda.get_device_capability(),
        dtype=q.dtype,
        head_dim=q.shape[-1],
        kernel_size=(t, h, w),
        exact=exact,
        device=torch.cuda.current_device(),
    )
    if missing is not None:
        raise ReplayError(missing)
    got = fna.launch(q, k, v, (t, h, w), scale, exact)
    elements, wrong, _ = na3d_verified.difference(got, q, k, v, (t, h, w), scale, exact, na3d.reference)
    if not exact and not wrong and q.isfinite().all() and k.isfinite().all():
        wrong = fna_gate.strays(got, v, (t, h, w), na3d.reference)
    return elements, wrong


def _load(path: Path) -> dict[str, Any]:
    try:
        data = torch.load(path, weights_only=True)
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror}") from None
    except Exception as error:  # whatever torch makes of a file that is none of its own
        raise ReplayError(f"{path} is not a kept call of ltx_inductor ({type(error).__name__})") from None
    if not isinstance(data, dict) or data.get("op") not in (*_OPS, _AXIAL, _NA3D) or "args" not in data:
        raise ReplayError(
            f"{path} is not a kept call of ltx_inductor; expected one of the ops {', '.join((*_OPS, _AXIAL, _NA3D))}"
        )
    return data


def _on_the_gpu(args: list[Any]) -> list[Any]:
    """With the strides they were kept with; `Tensor.cuda` makes shared elements separate."""

    def moved(t: Tensor) -> Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        return t.as_strided((span,), (1,)).cuda().as_strided(t.shape, t.stride())

    found: list[Any] = tree_map_only(Tensor, moved, args)
    return found


def _prepare(args: list[Any]) -> None:
    two = len(args) > 8
    cos, heads, layout = args[4 if two else 2], args[-4 if two else -3], args[-1]
    for x in args[: 1 + two]:
        shared = two and args[6] is None and args[-4] == args[-3] and args[0].size(-1) == args[1].size(-1)
        missing = rope.prepare(
            torch.cuda.get_device_capability(),
            dtype=x.dtype,
            table_dtype=cos.dtype,
            head_dim=2 * cos.size(-1),
            hidden=x.size(-1) * (heads if x.dim() == 4 else 1),
            contract=args[-2],
            per_head=x.dim() == 4,
            layout=layout,
            shared=shared,
            device=torch.cuda.current_device(),
        )
        if missing is not None:
            raise ReplayError(missing)


def _tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)
