"""diffusers: LTX2VideoTransformer3DModel, its block and its attention."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from .real_common import (
    A_DIM,
    AUDIO,
    BLOCK,
    FP32,
    HEADS,
    V_DIM,
    VIDEO,
    A,
    B,
    S,
    T,
    attention_cases,
    block_inputs,
    case,
    rand,
    ready,
)


def _diffusers() -> Any:
    return importlib.import_module("diffusers.models.transformers.transformer_ltx2")


def _diffusers_attention(cross: bool = False, perturbed: bool = False, gated: bool = False) -> nn.Module:
    ltx2 = _diffusers()
    return ready(
        ltx2.LTX2Attention(
            query_dim=V_DIM,
            heads=HEADS,
            kv_heads=HEADS,
            dim_head=VIDEO,
            cross_attention_dim=A_DIM if cross else None,
            rope_type="split",
            apply_gated_attention=gated,
            processor=ltx2.LTX2PerturbedAttnProcessor() if perturbed else None,
        )
    )


def _self(m, x, cos, sin):
    return m(x, query_rotary_emb=(cos, sin))


def _cross(m, x, ctx, cos, sin, kcos, ksin):
    return m(x, ctx, query_rotary_emb=(cos, sin), key_rotary_emb=(kcos, ksin))


def _perturbed(m, x, cos, sin, mask):
    return m(x, query_rotary_emb=(cos, sin), perturbation_mask=mask, all_perturbed=False)


def _diffusers_block(**kw: Any) -> nn.Module:
    return ready(
        _diffusers().LTX2VideoTransformerBlock(
            dim=V_DIM,
            num_attention_heads=HEADS,
            attention_head_dim=VIDEO,
            cross_attention_dim=V_DIM,
            audio_dim=A_DIM,
            audio_num_attention_heads=HEADS,
            audio_attention_head_dim=AUDIO,
            audio_cross_attention_dim=A_DIM,
            rope_type="split",
            **kw,
        )
    )


def _block(m, x, a, tx, ta, cv, sv, ca, sa, ccv, csv, cca, csa):
    ones = x.new_ones(x.shape[0], 1, 1)
    return m(
        x,
        a,
        tx,
        ta,
        ones.expand(-1, -1, 6 * V_DIM),
        ones.expand(-1, -1, 6 * A_DIM),
        ones.expand(-1, -1, 4 * V_DIM),
        ones.expand(-1, -1, 4 * A_DIM),
        ones.expand(-1, -1, V_DIM),
        ones.expand(-1, -1, A_DIM),
        video_rotary_emb=(cv, sv),
        audio_rotary_emb=(ca, sa),
        ca_video_rotary_emb=(ccv, csv),
        ca_audio_rotary_emb=(cca, csa),
    )


def _transformer() -> nn.Module:
    return ready(
        _diffusers().LTX2VideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=HEADS,
            attention_head_dim=VIDEO,
            cross_attention_dim=V_DIM,
            audio_in_channels=8,
            audio_out_channels=8,
            audio_num_attention_heads=HEADS,
            audio_attention_head_dim=AUDIO,
            audio_cross_attention_dim=A_DIM,
            num_layers=2,
            caption_channels=V_DIM,
            rope_type="split",
        )
    )


def _whole(m, x, a, text, text_a, timestep):
    sizes = {"num_frames": 2, "height": 3, "width": 4, "audio_num_frames": A}
    return m(x, a, text, text_a, timestep, return_dict=False, **sizes)


def _whole_coords(m, x, a, text, text_a, timestep, coords, coords_a):
    return m(x, a, text, text_a, timestep, video_coords=coords, audio_coords=coords_a, return_dict=False)


def _whole_inputs() -> tuple[Tensor, ...]:
    text = rand(B, T, V_DIM), rand(B, T, V_DIM)
    return rand(B, S, 8), rand(B, A, 8), *text, torch.tensor([[500.0], [10.0]])


def _coords() -> tuple[Tensor, ...]:
    return *_whole_inputs(), torch.rand(B, 3, S, 2) * 50, torch.rand(B, 1, A, 2) * 5


CASES = [
    *attention_cases(
        _self,
        "fp32-rope",
        FP32,
        _diffusers_attention,
        (_cross, _perturbed, lambda: _diffusers_attention(perturbed=True)),
    ),
    case("block", _diffusers_block, _block, lambda: block_inputs(FP32), 8, "fp32-rope", BLOCK, (), 4),
    case("transformer", _transformer, _whole, _whole_inputs, 16, "fp32-rope", {}, (), 8, "2 layers"),
    case("transformer-coords", _transformer, _whole_coords, _coords, 16, "fp32-rope", {0: 1, 1: 1, 5: 2, 6: 2}, (), 8),
]
