"""What the RoPE kernels accept, and the sentence for what they do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ltx_inductor.contract import CONTRACTS
from ltx_inductor.kernels import rope, rope_specs

GOOD: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "table_dtype": torch.float32,
    "head_dim": 128,
    "hidden": 4096,
    "contract": "fp32-rope",
    "per_head": False,
    "arch": (9, 0),
}


@pytest.mark.parametrize("arch", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_contract_has_a_kernel_on_every_arch(contract: str, arch: tuple[int, int]) -> None:
    for head_dim in range(32, 257, 8):
        for per_head in (False, True):
            case = {**GOOD, "contract": contract, "arch": arch, "head_dim": head_dim, "hidden": 4 * head_dim}
            assert rope_specs.unsupported(**{**case, "table_dtype": torch.bfloat16, "per_head": per_head}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contract": "bf16-chain-muladd"}, "no kernel for rounding contract 'bf16-chain-muladd'"),
        ({"dtype": torch.float32}, "expected torch.bfloat16 or torch.float16"),
        ({"table_dtype": torch.float64}, "expected torch.bfloat16 or torch.float32"),
        ({"dtype": torch.float16, "table_dtype": torch.bfloat16}, "expected torch.float16 or torch.float32"),
        ({"contract": "bf16-chain"}, "cos/sin in torch.float32 cannot be part of it"),
        ({"head_dim": 24, "hidden": 24}, "head_dim 24; expected a multiple of 8 from 32 to 256"),
        ({"head_dim": 100, "hidden": 100}, "head_dim 100"),
        ({"hidden": 4100}, "hidden size 4100 is not a multiple of head_dim 128"),
        ({"hidden": 16512}, "a norm over 16512 elements; expected at most 16384"),
        ({"arch": (7, 5)}, "compute capability 7.5; expected 8.0 or later"),
    ],
)
def test_refusals_say_found_and_expected(change: dict[str, Any], words: str) -> None:
    reason = rope_specs.unsupported(**{**GOOD, **change})
    assert reason is not None
    assert words in reason


def test_a_compute_capability_that_nobody_knows_yet_is_for_the_compiler_and_the_gate_to_decide() -> None:
    for arch in ((13, 0), (12, 9), (20, 1)):
        assert rope_specs.unsupported(**{**GOOD, "arch": arch}) is None


def test_a_norm_per_head_has_no_limit_on_hidden() -> None:
    assert rope_specs.unsupported(**{**GOOD, "per_head": True, "hidden": 128 * 1000}) is None


def test_names_and_flags_tell_configurations_apart() -> None:
    base = rope_specs.Spec("fp32-rope", torch.bfloat16, torch.float32, 128, 4096, False)
    changes: list[dict[str, Any]] = [{}, {"layout": "bhsd"}, {"shared": True}, {"norm": 2048}, {"head_dim": 64}]
    changes += [{"contract": c} for c in CONTRACTS if c not in ("fp32-rope", "bf16-chain")]
    changes += [{"dtype": torch.float16}, {"table_dtype": torch.bfloat16}, {"per_head": True, "norm": 128}]
    specs = [dataclasses.replace(base, **c) for c in changes]
    assert len({s.name for s in specs}) == len({s.flags for s in specs}) == len(specs)


def test_kernels_and_contract_table_agree() -> None:
    for name, c in CONTRACTS.items():
        rounding, fma, out_f32 = rope_specs.CONTRACTS[name]
        assert (rounding == 0, rounding < 2) == (c.narrow_product, c.narrow_norm)
        assert (bool(fma), not out_f32) == (c.fused_sum, c.narrow_result)


def test_cpu_tensors_are_refused() -> None:
    x = torch.zeros(1, 4, 512, dtype=torch.bfloat16)
    cos = torch.zeros(1, 8, 4, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="CUDA tensors"):
        rope.launch_single(x, None, cos, cos, 1e-6, 8, "bf16-chain")
