"""Is there a kernel? The answers the pass gets while a graph is compiled.

`DeviceKernels` makes kernels ready for the device the graph is for: looked up, built if need be, and proved once there,
to have eager's bits (gate.py) or to keep an error bound (fna_gate.py). `AssumedKernels` builds nothing and says what
would happen.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from ltx_inductor.kernels import axial_gate, fna, fna_gate, gate, rope, rope_axial, rope_specs
from ltx_inductor.kernels.profit import Table

_ROPE, _AXIAL, _NEIGHBORHOOD = "rmsnorm_split_rope", "rmsnorm_axial_rope", "neighborhood_attention"
_NOT_PROVED = "not compared with eager on this device: verify is off"
ASSUMED_ARCH = (9, 0)  # what a report about a CPU graph assumes: an H100 or H200


class Need(Protocol):
    """What the needs of `ltx_inductor.rewrite.needs` have in common; `kind` is the rule that asks."""

    kind: ClassVar[str]

    @property
    def device(self) -> torch.device: ...


class Family(Protocol):
    """The kernels of one kind of need."""

    def unsupported(self, need: Any, arch: tuple[int, int]) -> str | None:
        """Why there is no kernel for this, whatever is built; None if there is."""
        ...

    def ready(self, need: Any, arch: tuple[int, int], device: int) -> str | None:
        """Builds, loads and proves the kernel; None, or why it cannot be used."""
        ...

    def on_the_cpu(self, need: Any, assumed: bool) -> str | None:
        """Why the op may not run its reference there; None if it may. assumed: the graph is to run on a GPU later."""
        ...

    def proof(self, need: Any, device: int | None) -> str:
        """How it is known that the op is right; device None is the CPU."""
        ...


class _Rope:
    """Kernels that have eager's bits; `reference` is the eager chain. prove: compare with it before the first use."""

    def __init__(self, reference: Callable[..., torch.Tensor] | None = None, prove: bool = True) -> None:
        self._reference, self._prove = reference, prove

    def unsupported(self, need: Any, arch: tuple[int, int]) -> str | None:
        return rope_specs.unsupported(arch=arch, **_rope_facts(need))

    def ready(self, need: Any, arch: tuple[int, int], device: int) -> str | None:
        assert self._reference is not None
        facts = {**_rope_facts(need), "layout": need.layout, "shared": need.shared}
        missing = rope.prepare(arch, **facts, device=device, trial=self._prove)
        if missing is not None or not self._prove:
            return missing
        return gate.refusal(need, device, self._reference)

    def on_the_cpu(self, need: Any, assumed: bool) -> str | None:
        return self.unsupported(need, ASSUMED_ARCH) if assumed else None

    def proof(self, need: Any, device: int | None) -> str:
        if device is None:
            return "on the CPU the op runs its reference: the eager chain, op by op"
        return gate.proof(need, device) if self._prove else _NOT_PROVED


class _Axial:
    """Kernels that have eager's bits; `reference` is the eager chain. prove: compare with it before the first use."""

    def __init__(self, reference: Callable[..., torch.Tensor] | None = None, prove: bool = True) -> None:
        self._reference, self._prove = reference, prove

    def unsupported(self, need: Any, arch: tuple[int, int]) -> str | None:
        names = ("dtype", "table_dtype", "pairs", "token_axes", "contract")
        return rope_axial.unsupported(arch=arch, **{name: getattr(need, name) for name in names})

    def ready(self, need: Any, arch: tuple[int, int], device: int) -> str | None:
        spec = rope_axial.Spec(need.contract, need.dtype, need.pairs)
        missing = rope_axial.prepare(arch, spec, device, trial=self._prove)
        if missing is not None or not self._prove:
            return missing
        assert self._reference is not None
        return axial_gate.refusal(spec, device, self._reference)

    def on_the_cpu(self, need: Any, assumed: bool) -> str | None:
        return self.unsupported(need, ASSUMED_ARCH) if assumed else None

    def proof(self, need: Any, device: int | None) -> str:
        if device is None:
            return "on the CPU the op runs its reference: the eager chain, op by op"
        if not self._prove:
            return _NOT_PROVED
        return axial_gate.proof(rope_axial.Spec(need.contract, need.dtype, need.pairs), device)


class _Neighborhood:
    """Kernels with NATTEN's accuracy, or with its bits where `exact` is asked for; `reference` is the op's, in fp32."""

    def __init__(self, reference: Callable[..., torch.Tensor] | None = None, prove: bool = True) -> None:
        self._reference, self._prove = reference, prove

    def unsupported(self, need: Any, arch: tuple[int, int]) -> str | None:
        return fna.unsupported(arch=arch, **_neighborhood_facts(need))

    def ready(self, need: Any, arch: tuple[int, int], device: int) -> str | None:
        missing = fna.prepare(arch, **_neighborhood_facts(need), device=device, trial=self._prove)
        if missing is not None or not self._prove:
            return missing
        if need.exact:
            return fna_gate.exact_refusal(need.kernel_size, device)
        assert self._reference is not None
        return fna_gate.refusal(need.kernel_size, device, self._reference)

    def on_the_cpu(self, need: Any, assumed: bool) -> str | None:
        if assumed:
            return self.unsupported(need, ASSUMED_ARCH)
        if need.exact:
            return "on the CPU the op runs its reference, which has not NATTEN's bits, and exact=True asks for them"
        return None

    def proof(self, need: Any, device: int | None) -> str:
        if device is None:
            return "on the CPU the op runs its reference: fp32 throughout, one rounding of the result"
        if need.exact:
            return "schedule exact: NATTEN's bits; " + self._compared_with_natten(device)
        if self._reference is None:
            return "schedule fast: NATTEN's accuracy, not its bits"
        if not self._prove:
            return f"schedule fast: NATTEN's accuracy, not its bits; {_NOT_PROVED}"
        found = fna_gate.verdict(need.kernel_size, device, self._reference)
        worst = max(found["errors"].values())
        return (
            f"schedule fast: NATTEN's accuracy, not its bits; relative error {worst:.1e} against "
            f"attention in fp32, measured on {found['device']} with torch {found['torch']} (bound {found['bound']:.0e})"
        )

    def _compared_with_natten(self, device: int) -> str:
        if self._reference is None:
            return "compared with it before its first use, where NATTEN is on the machine"
        if not self._prove:
            return _NOT_PROVED
        found = fna_gate.exact_verdict(device)
        if found["natten"] is None:
            return "not compared here, where NATTEN is not imported (docs/kernels-fna-exact.md says on what they were)"
        return (
            f"compared with NATTEN {found['natten']} on {found['device']} with torch {found['torch']}: "
            f"{found['elements']:,} elements, no bit differs"
        )


class DeviceKernels:
    """Kernels of this process's devices; the references on the CPU.

    reference, neighborhood_reference, axial_reference: those of the RoPE ops, of na3d and of rmsnorm_axial_rope, which
    kernels are compared with before their first use. prove: whether they are (option verify="off"). profit: what is
    not worth it.
    """

    def __init__(
        self,
        reference: Callable[..., torch.Tensor],
        neighborhood_reference: Callable[..., torch.Tensor] | None = None,
        prove: bool = True,
        profit: Table | None = None,
        axial_reference: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self._families: dict[str, Family] = {
            _ROPE: _Rope(reference, prove),
            _AXIAL: _Axial(axial_reference, prove),
            _NEIGHBORHOOD: _Neighborhood(neighborhood_reference, prove),
        }
        self._profit = profit or Table()

    def refusal(self, need: Need) -> str | None:
        family = self._families[need.kind]
        if need.device.type == "cpu":
            return family.on_the_cpu(need, assumed=False)
        if need.device.type != "cuda" or torch.version.hip is not None:
            return f"no kernel for device {need.device}; expected an NVIDIA GPU"
        index = _index(need.device)
        arch = torch.cuda.get_device_capability(index)
        missing = family.unsupported(need, arch)
        if missing is None:
            missing = family.ready(need, arch, index)
            if missing is not None:
                _warn_once(missing)
        return missing

    def slower(self, need: Need, size: int | None) -> str | None:
        if need.device.type != "cuda":
            return None
        return self._profit.refusal(need.kind, torch.cuda.get_device_capability(_index(need.device)), size)

    def proof(self, need: Need) -> str:
        return self._families[need.kind].proof(need, None if need.device.type == "cpu" else _index(need.device))


class AssumedKernels:
    """For `explain`: a CPU graph is reported as it would be on an H100 or H200, a CUDA graph as on its device."""

    def __init__(self, profit: Table | None = None) -> None:
        self._families: dict[str, Family] = {_ROPE: _Rope(), _AXIAL: _Axial(), _NEIGHBORHOOD: _Neighborhood()}
        self._profit = profit or Table()

    def refusal(self, need: Need) -> str | None:
        family = self._families[need.kind]
        if need.device.type == "cpu":
            return family.on_the_cpu(need, assumed=True)
        if need.device.type != "cuda":
            return None
        return family.unsupported(need, torch.cuda.get_device_capability(need.device))

    def slower(self, need: Need, size: int | None) -> str | None:
        cuda = need.device.type == "cuda"
        arch = torch.cuda.get_device_capability(need.device) if cuda else ASSUMED_ARCH
        return self._profit.refusal(need.kind, arch, size)

    def proof(self, need: Need) -> str:
        if need.kind == _NEIGHBORHOOD:
            return "nothing was run for this report; " + self._families[_NEIGHBORHOOD].proof(need, 0)
        return (
            "nothing was run for this report; before its first use on a device the kernel is compared with eager there "
            f"(bits, at least {gate.ELEMENTS:,} elements through each of its entry points)"
        )


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else int(device.index)


def _rope_facts(need: Need) -> dict[str, Any]:
    names = ("dtype", "table_dtype", "head_dim", "hidden", "contract", "per_head")
    return {name: getattr(need, name) for name in names}


def _neighborhood_facts(need: Any) -> dict[str, Any]:
    return {name: getattr(need, name) for name in ("dtype", "head_dim", "kernel_size", "exact")}


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(f"ltx_inductor: a graph is left unfused: {sentence}", stacklevel=2)
