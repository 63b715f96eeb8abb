"""What a graph asked of the kernels, remembered so that a cached graph finds them ready too.

The pass asks for kernels while a graph is compiled, and asking builds them. When Inductor's caches answer, no pass
runs, and a kernel cache that was emptied (or another machine) would make the first forward run without kernels, or
CUDA-graph capture load one. So the needs are kept with the report and asked again before the cached graph runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

log = logging.getLogger("ltx_inductor")


def device_kernels(prove: bool = True, profit: str = "measured") -> Any:
    """The kernels of this process's devices: looked up, built if need be, and proved, while they are asked for.

    prove: compare them with eager before their first use. profit: as the option of that name.
    """
    from ltx_inductor.kernels.choice import DeviceKernels
    from ltx_inductor.kernels.profit import table
    from ltx_inductor.ops import axial_rope, na3d, rope

    return DeviceKernels(rope.reference, na3d.reference, prove, table(profit), axial_rope.reference)


def assumed_kernels(profit: str = "measured") -> Any:
    """For `explain`: builds nothing and answers as if everything that can be built were."""
    from ltx_inductor.kernels.choice import AssumedKernels
    from ltx_inductor.kernels.profit import table

    return AssumedKernels(table(profit))


class Remembering:
    """`kernels`, with `needs` growing by every launch that it can serve on a GPU.

    prove: whether `kernels` compares them with eager; so does who asks again.
    """

    def __init__(self, kernels: Any, prove: bool = True) -> None:
        self._kernels, self._prove = kernels, prove
        self.needs: list[dict[str, Any]] = []

    def refusal(self, need: Any) -> str | None:
        sentence: str | None = self._kernels.refusal(need)
        if sentence is None and need.device.type != "cpu":
            data = {**_to_json(need), "prove": self._prove}
            if data not in self.needs:
                self.needs.append(data)
        return sentence

    def slower(self, need: Any, size: int | None) -> str | None:
        sentence: str | None = self._kernels.slower(need, size)
        return sentence

    def proof(self, need: Any) -> str:
        sentence: str = self._kernels.proof(need)
        return sentence


def ask_again(needs: Iterable[Mapping[str, Any]], example_inputs: Sequence[Any]) -> list[str]:
    """Makes the kernels of a cached graph ready on the device of its inputs; what is missing, as sentences."""
    wanted = list(needs)
    if not wanted:
        return []
    device = next((t.device for t in example_inputs if isinstance(t, torch.Tensor) and t.device.type != "cpu"), None)
    missing = []
    for data in wanted:
        sentence = device_kernels(data.get("prove", True)).refusal(_from_json(data, device))
        if sentence is not None:
            missing.append(f"a cached graph runs without its kernel: {sentence}")
    return missing


def _to_json(need: Any) -> dict[str, Any]:
    """Without the device's index: ranks share what is kept."""
    data = {"kind": need.kind, **asdict(need), "device": need.device.type}
    return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in data.items()}


def _from_json(data: Mapping[str, Any], device: torch.device | None) -> Any:
    """Inverse of `_to_json`, on `device`."""
    from ltx_inductor.rewrite.needs import NEEDS

    def value(name: str, v: Any) -> Any:
        if name.endswith("dtype"):
            return getattr(torch, v)
        return tuple(v) if isinstance(v, list) else v

    fields = {k: value(k, v) for k, v in data.items() if k not in ("kind", "device", "prove")}
    return NEEDS[data["kind"]](device=device or torch.device(data["device"]), **fields)
