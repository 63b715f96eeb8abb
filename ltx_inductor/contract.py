"""Rounding contracts: where the eager RMSNorm -> split-RoPE chain rounds, and to which dtype.

"16" below is the 16-bit dtype of the activations x (bf16 or fp16). With n = RMSNorm(x), (n0, n1) its two halves
and (a, b) the halves of the result,

    a = n0*cos - n1*sin        b = n1*cos + n0*sin

every eager spelling of this rounds n, the product with cos, the sum, and the stored result in its own way:

| contract     | n    | n*cos | sum                    | result | met in                                       |
|--------------|------|-------|------------------------|--------|----------------------------------------------|
| bf16-chain   | 16   | 16    | one fma                | 16     | ltx-core, sglang, vllm-omni, ComfyUI         |
| fp32-rope    | 16   | fp32  | one fma, or two steps  | 16     | diffusers                                    |
| fp32-result  | 16   | fp32  | one fma, or two steps  | fp32   | bf16-chain code that is given fp32 cos/sin   |
| fp32-all     | fp32 | fp32  | one fma, or two steps  | 16     | either under autocast (rms_norm on the list) |

"-muladd" marks the two-step sum: the product with sin is rounded to fp32 before it is added. "-result" marks an
fp32-all chain whose result is never rounded. A contract is read off the graph and selects the kernel variant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """Where the chain rounds. `narrow` means "to the dtype of x", otherwise the value stays fp32."""

    name: str
    narrow_norm: bool
    narrow_product: bool
    fused_sum: bool
    narrow_result: bool

    def describe(self) -> str:
        """The contract as a phrase, for reports and messages."""
        where = {True: "16-bit", False: "fp32"}
        total = "one fma" if self.fused_sum else "product and sum rounded apart"
        return (
            f"norm {where[self.narrow_norm]}, n*cos {where[self.narrow_product]}, {total}, "
            f"result {where[self.narrow_result]}"
        )


def _table() -> dict[str, Contract]:
    rows = [Contract("bf16-chain", True, True, True, True)]
    for suffix, fused in (("", True), ("-muladd", False)):
        rows += [
            Contract("fp32-rope" + suffix, True, False, fused, True),
            Contract("fp32-result" + suffix, True, False, fused, False),
            Contract("fp32-all" + suffix, False, False, fused, True),
            Contract("fp32-all-result" + suffix, False, False, fused, False),
        ]
    return {c.name: c for c in rows}


CONTRACTS: dict[str, Contract] = _table()


def lookup(name: str) -> Contract:
    """The contract of that name. Raises ValueError, listing the known names, for any other."""
    try:
        return CONTRACTS[name]
    except KeyError:
        known = ", ".join(sorted(CONTRACTS))
        raise ValueError(f"contract={name!r} is not a rounding contract; the known ones are: {known}") from None


def find(*, narrow_norm: bool, narrow_product: bool, fused_sum: bool, narrow_result: bool) -> Contract | None:
    """The contract with exactly these roundings, or None: recognition does not depend on what has a name."""
    key = (narrow_norm, narrow_product, fused_sum, narrow_result)
    for c in CONTRACTS.values():
        if (c.narrow_norm, c.narrow_product, c.fused_sum, c.narrow_result) == key:
            return c
    return None
