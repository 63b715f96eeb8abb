"""The configurations of the RoPE kernels: what tells them apart, and what there is a kernel for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYOUTS = ("bshd", "bhsd")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# contract -> (Rounding of csrc/rope_config.cuh, one fma, result in fp32)
CONTRACTS = {
    "bf16-chain": (0, 1, 0),
    "fp32-rope": (1, 1, 0),
    "fp32-rope-muladd": (1, 0, 0),
    "fp32-result": (1, 1, 1),
    "fp32-result-muladd": (1, 0, 1),
    "fp32-all": (2, 1, 0),
    "fp32-all-muladd": (2, 0, 0),
    "fp32-all-result": (2, 1, 1),
    "fp32-all-result-muladd": (2, 0, 1),
}


@dataclass(frozen=True)
class Spec:
    """One configuration. `norm` is the number of elements under one norm: hidden, or head_dim if `per_head`."""

    contract: str
    dtype: torch.dtype
    table_dtype: torch.dtype
    head_dim: int
    norm: int
    per_head: bool
    layout: str = "bshd"
    shared: bool = False  # q and k use the same cos and sin, and have the same number of heads

    @property
    def name(self) -> str:
        """The name of its artefact, e.g. rope-fp32-rope-bf16-fp32-d128-n4096-bshd-shared."""
        kind = "head" if self.per_head else f"n{self.norm}"
        tables = "shared" if self.shared else "separate"
        return (
            f"rope-{self.contract}-{DTYPES[self.dtype]}-{DTYPES[self.table_dtype]}-d{self.head_dim}-{kind}-"
            f"{self.layout}-{tables}"
        )

    @property
    def flags(self) -> tuple[str, ...]:
        rounding, fma, out_f32 = CONTRACTS[self.contract]
        values = {
            "FP16": self.dtype == torch.float16,
            "TABLE_F32": self.table_dtype == torch.float32,
            "OUT_F32": out_f32,
            "FMA": fma,
            "ROUNDING": rounding,
            "HEAD_DIM": self.head_dim,
            "NORM": self.norm,
            "PER_HEAD": self.per_head,
            "OUT_BHSD": self.layout == "bhsd",
            "SHARED": self.shared,
        }
        return tuple(f"-DLTX_{key}={int(value)}" for key, value in values.items())


def _production() -> tuple[Spec, ...]:
    """What LTX-2 meets: video (32 x 128) and audio (32 x 64) attention, self and cross, ltx-core and diffusers."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return tuple(
        Spec(contract, bf16, tables, head_dim, 32 * head_dim, False, "bshd", shared)
        for contract, tables in (("bf16-chain", bf16), ("fp32-rope", bf16), ("fp32-rope", fp32))
        for head_dim in (128, 64)
        for shared in (True, False)
    )


PRODUCTION = _production()


def unsupported(
    *,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    head_dim: int,
    hidden: int,
    contract: str,
    per_head: bool,
    arch: tuple[int, int],
) -> str | None:
    """None if a kernel exists for this, else a sentence: what was found, what is expected, what to do.

    dtype is that of x, table_dtype that of cos and sin; head_dim and hidden (heads * head_dim) in elements; arch is a
    compute capability: of one that is newer than any that is known, the compiler decides, and then the gate. Pure:
    builds nothing, looks at no device.
    """
    if contract not in CONTRACTS:
        return f"no kernel for rounding contract {contract!r}; kernels exist for {', '.join(CONTRACTS)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"no kernel for activations in {dtype}; expected torch.bfloat16 or torch.float16: cast the model"
    if table_dtype not in (dtype, torch.float32):
        return f"no kernel for cos/sin in {table_dtype} with activations in {dtype}; expected {dtype} or torch.float32"
    if contract == "bf16-chain" and table_dtype != dtype:
        return f"contract bf16-chain rounds every product to {dtype}, so cos/sin in {table_dtype} cannot be part of it"
    if not 32 <= head_dim <= 256 or head_dim % 8:
        return f"no kernel for head_dim {head_dim}; expected a multiple of 8 from 32 to 256"
    if hidden < head_dim or hidden % head_dim:
        return f"hidden size {hidden} is not a multiple of head_dim {head_dim}"
    if not per_head and hidden > 16384:
        return f"no kernel for a norm over {hidden} elements; expected at most 16384"
    if arch < (8, 0):
        return f"no kernel for compute capability {arch[0]}.{arch[1]}; expected 8.0 or later"
    return None
