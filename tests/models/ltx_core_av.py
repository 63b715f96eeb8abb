"""ltx-core: BasicAVTransformerBlock and its attention."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .real_common import (
    A_DIM,
    AUDIO,
    BF16,
    BLOCK,
    HEADS,
    SELF,
    V_DIM,
    VIDEO,
    B,
    S,
    attention_cases,
    attention_inputs,
    block_inputs,
    case,
    ready,
)


def _core(name: str) -> Any:
    return importlib.import_module("ltx_core.model.transformer." + name)


def _core_attention(cross: bool = False, gated: bool = False) -> nn.Module:
    return ready(
        _core("attention").Attention(
            query_dim=V_DIM,
            context_dim=A_DIM if cross else None,
            heads=HEADS,
            dim_head=VIDEO,
            rope_type=_core("rope").LTXRopeType.SPLIT,
            attention_function=_core("attention").PytorchAttention(),
            apply_gated_attention=gated,
        )
    )


def _core_self(m, x, cos, sin):
    return m(x, pe=(cos, sin))


def _core_masked(m, x, cos, sin, mask):
    return m(x, pe=(cos, sin), mask=mask)


def _core_cross(m, x, ctx, cos, sin, kcos, ksin):
    return m(x, context=ctx, pe=(cos, sin), k_pe=(kcos, ksin))


def _core_perturbed(m, x, cos, sin, mask):
    return m(x, pe=(cos, sin), perturbation_mask=mask)


def _core_block() -> nn.Module:
    t = _core("transformer")
    block = ready(
        t.BasicAVTransformerBlock(
            0,
            t.TransformerConfig(V_DIM, HEADS, VIDEO, V_DIM),
            t.TransformerConfig(A_DIM, HEADS, AUDIO, A_DIM),
            rope_type=_core("rope").LTXRopeType.SPLIT,
            attention_function=_core("attention").PytorchAttention(),
        )
    )
    block.args_class = _core("transformer_args").TransformerArgs
    return block


def _core_block_call(m, x, a, tx, ta, cv, sv, ca, sa, ccv, csv, cca, csa):
    ones = x.new_ones(x.shape[0], 1, 1)

    def side(x, text, dim, pe, cross_pe):
        more = {"embedded_timestep": ones, "enabled": True, "context_mask": None}
        more |= {"timesteps": ones.expand(-1, -1, 6 * dim), "cross_gate_timestep": ones.expand(-1, -1, dim)}
        scale = ones.expand(-1, -1, 4 * dim)
        pes = {"positional_embeddings": pe, "cross_positional_embeddings": cross_pe}
        return m.args_class(x=x, context=text, cross_scale_shift_timestep=scale, **pes, **more)

    v, a = m(side(x, tx, V_DIM, (cv, sv), (ccv, csv)), side(a, ta, A_DIM, (ca, sa), (cca, csa)))
    return v.x, a.x


CASES = [
    *attention_cases(_core_self, "bf16-chain", BF16, _core_attention, (_core_cross, _core_perturbed, _core_attention)),
    case(
        "attention-masked",
        _core_attention,
        _core_masked,
        attention_inputs(BF16, lambda: torch.zeros(B, 1, 1, S, dtype=BF16)),
        2,
        "bf16-chain",
        SELF | {3: 3},
        range(4),
        1,
    ),
    case("block", _core_block, _core_block_call, lambda: block_inputs(BF16), 8, "bf16-chain", BLOCK, (), 4),
]
