"""Which rules' kernels can run on the GPUs of this machine; what `doctor` says of every rule. Builds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx_inductor.kernel_needs import assumed_kernels
from ltx_inductor.rewrite.needs import AxialNeed, KernelNeed, Need, NeighborhoodNeed

_GPU, _BF16 = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True)
class _Kernel:
    """need: a launch as LTX has it. stem: how its artefacts' names begin, as a glob. launcher: a C one, by tvm_ffi."""

    need: Need
    stem: str
    launcher: bool


_KERNELS = {
    "rmsnorm_split_rope": _Kernel(
        KernelNeed(_GPU, _BF16, torch.float32, 128, 4096, False, "fp32-rope", "bshd", True), "rope-[!a]", launcher=True
    ),
    "rmsnorm_axial_rope": _Kernel(
        AxialNeed(_GPU, _BF16, torch.float32, (8, 12, 12), 3, "fp32-rope-muladd"), "rope-axial-", launcher=False
    ),
    "neighborhood_attention": _Kernel(
        NeighborhoodNeed(_GPU, _BF16, 64, (11, 11, 11), exact=False), "fna-", launcher=False
    ),
}


def gpus() -> dict[tuple[int, int], tuple[int, str]]:
    """{compute capability: (index of the first GPU that has it, its name)}; empty without a GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for i in range(count):
        found.setdefault(torch.cuda.get_device_capability(i), (i, torch.cuda.get_device_name(i)))
    return found


def unsupported(rule: str, device: int) -> str:
    """Why there is no kernel of the rule for that GPU, whatever is installed; "" if there is."""
    need = replace(_KERNELS[rule].need, device=torch.device("cuda", device))
    return assumed_kernels("any").refusal(need) or ""


def missing(rule: str, arch: tuple[int, int], tools: Mapping[str, Any]) -> str:
    """What a kernel of the rule lacks to be built and launched, where none is in the cache; "" if nothing.

    tools: what `kernels.build.toolchain` found.
    """
    from ltx_inductor.kernels import build, source_digest, store

    kernel, folder = _KERNELS[rule], store.cache_root() / source_digest()[:16]
    lacks = []
    cubins = f"{kernel.stem}*-sm_{build.arch_number(arch)}.*.cubin"
    if not (tools["nvcc"] or tools["nvrtc"] or any(folder.glob(cubins))):
        lacks.append("a CUDA compiler")
    if kernel.launcher and not (tools["cc"] or any(folder.glob("launcher-*.so"))):
        lacks.append("a C compiler")
    if kernel.launcher and not tools["tvm_ffi"]:
        lacks.append("tvm_ffi")
    return f"needs {', '.join(lacks)}, and nothing prebuilt is in the kernel cache" if lacks else ""
