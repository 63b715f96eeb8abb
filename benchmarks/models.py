"""Real models for the benchmarks: diffusers' LTX-2 transformer and its block, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel, LTX2VideoTransformerBlock
from torch import Tensor, nn


def transformer(blocks: int, heads: int = 2, video: int = 32, audio: int = 16) -> tuple[nn.Module, dict[str, Any]]:
    """The whole model with `blocks` blocks, and the keyword arguments of a call (24 video, 10 audio, 7 text tokens).

    heads, video, audio: attention heads and head_dim of the two streams. bf16, on the current default device.
    """
    model = LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=heads,
        attention_head_dim=video,
        cross_attention_dim=heads * video,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=heads,
        audio_attention_head_dim=audio,
        audio_cross_attention_dim=heads * audio,
        num_layers=blocks,
        caption_channels=heads * video,
        rope_type="split",
    )
    model = model.to(torch.bfloat16).eval()

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape).to(torch.bfloat16)

    inputs = {
        "hidden_states": rand(1, 24, 8),
        "audio_hidden_states": rand(1, 10, 8),
        "encoder_hidden_states": rand(1, 7, heads * video),
        "audio_encoder_hidden_states": rand(1, 7, heads * video),
        "timestep": torch.tensor([500.0]),
        "num_frames": 2,
        "height": 3,
        "width": 4,
        "audio_num_frames": 10,
        "return_dict": False,
    }
    return model, inputs


class Block(nn.Module):
    """One LTX2VideoTransformerBlock at production width: video 32 heads x 128, audio 32 heads x 64."""

    HEADS, VIDEO, AUDIO = 32, 128, 64

    def __init__(self) -> None:
        super().__init__()
        video, audio = self.HEADS * self.VIDEO, self.HEADS * self.AUDIO
        self.block = LTX2VideoTransformerBlock(
            dim=video,
            num_attention_heads=self.HEADS,
            attention_head_dim=self.VIDEO,
            cross_attention_dim=video,
            audio_dim=audio,
            audio_num_attention_heads=self.HEADS,
            audio_attention_head_dim=self.AUDIO,
            audio_cross_attention_dim=audio,
            rope_type="split",
        )

    def forward(self, x: Tensor, a: Tensor, text: Tensor, text_a: Tensor, mods: list[Tensor], tables: list[Any]) -> Any:
        """x [B, S, 4096], a [B, S_audio, 2048], text [B, T, 4096], text_a [B, T, 2048]; mods and tables as `inputs`."""
        names = ("video", "audio", "ca_video", "ca_audio")
        return self.block(
            x, a, text, text_a, *mods, **{f"{n}_rotary_emb": t for n, t in zip(names, tables, strict=True)}
        )

    @classmethod
    def inputs(cls, tokens: int, audio_tokens: int = 126, text_tokens: int = 1024) -> tuple[Any, ...]:
        """Random arguments of `forward` in bf16, cos/sin in fp32 as diffusers makes them, on the default device."""
        video, audio = cls.HEADS * cls.VIDEO, cls.HEADS * cls.AUDIO

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16)

        def table(s: int, head_dim: int) -> tuple[Tensor, Tensor]:
            angle = torch.rand(1, s, cls.HEADS, head_dim // 2) * 6.2831853
            return angle.cos().transpose(1, 2), angle.sin().transpose(1, 2)

        mods = [rand(1, 1, n * d) for n, d in ((6, video), (6, audio), (4, video), (4, audio), (1, video), (1, audio))]
        tables = [
            table(tokens, cls.VIDEO),
            table(audio_tokens, cls.AUDIO),
            table(tokens, cls.AUDIO),
            table(audio_tokens, cls.AUDIO),
        ]
        return (
            rand(1, tokens, video),
            rand(1, audio_tokens, audio),
            rand(1, text_tokens, video),
            rand(1, text_tokens, audio),
            mods,
            tables,
        )
