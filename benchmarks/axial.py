"""RMSNorm, scale and 3-axis RoPE of q and k, as before the LTX-2.5 decoder's attention: ours, Inductor, eager.

    python benchmarks/axial.py --out benchmarks/results/axial-h200.json

x is what the decoder's projections give, [1, T, H, W, heads, 64] in bf16; cos and sin are made from positions inside
the model, as diffusers makes them (in fp64, rounded to fp32). `ltx` and `stock` are the same module, compiled; `op` are
the two launches alone; `floor` copies both tensors, which is what has to be moved. `ms` is what the GPU takes, by
replays of CUDA graphs, `ms_called` what calls in a row take, host included. Contenders take turns, in both orders.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ltx_inductor
from benchmarks.fna_timing import in_turns, once, replay_of
from ltx_inductor.kernels.repro import differing

# grid and heads: the decoder's stage 5 at several sizes, then its stages 1 to 4 for 121 frames at 512 x 768
SHAPES = [
    ((33, 64, 96), 4),
    ((65, 96, 160), 4),
    ((121, 136, 240), 4),
    ((18, 16, 24), 32),
    ((18, 32, 48), 16),
    ((35, 32, 48), 8),
    ((69, 64, 96), 8),
]


class Prologue(nn.Module):
    """diffusers' norms, scale and rotation, without the projections."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeRotaryPosEmbed3D

        self.norm_q, self.norm_k = nn.RMSNorm(64, eps=1e-6), nn.RMSNorm(64, eps=1e-6)
        self.rope = LTX2VideoVaeRotaryPosEmbed3D(64)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.rope(self.norm_q(q) * 64**-0.5), self.rope(self.norm_k(k))


def compiled(grid: tuple[int, int, int], heads: int, options: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """(stock, ltx, q, k): the module, compiled twice, and its inputs; ltx has rewritten both sides."""
    torch._dynamo.reset()
    model = Prologue().to("cuda", torch.bfloat16).eval()
    q, k = torch.randn((2, 1, *grid, heads, 64), device="cuda", dtype=torch.bfloat16).unbind(0)
    stock, ours = torch.compile(model), torch.compile(model, backend="ltx", options=options)
    ours(q, k)
    report = ltx_inductor.last_report()
    assert report is not None
    report.expect(rmsnorm_axial_rope=2)
    return stock, ours, q, k


def measure(grid: tuple[int, int, int], heads: int, rounds: int) -> dict[str, Any]:
    stock, ours, q, k = compiled(grid, heads)
    model = ours._orig_mod
    found, want = ours(q, k), model(q, k)
    row: dict[str, Any] = {"grid": grid, "heads": heads}
    row["elements_that_differ_from_eager"] = sum(differing(a, b) for a, b in zip(found, want, strict=True))
    others = stock(q, k)
    row["of_stock"] = sum(differing(a, b) for a, b in zip(others, want, strict=True))
    del want, others
    cos, sin = tables(model, grid)
    op = torch.ops.ltx_inductor.rmsnorm_axial_rope

    def alone() -> list[Tensor]:
        sides = ((q, model.norm_q, 64**-0.5), (k, model.norm_k, 1.0))
        return [op(x, norm.weight, cos, sin, 1e-6, scale, "fp32-rope-muladd") for x, norm, scale in sides]

    def floor() -> None:
        for x, out in zip((q, k), found, strict=True):
            out.copy_(x)

    calls = {"ltx": lambda: ours(q, k), "op": alone, "stock": lambda: stock(q, k), "floor": floor}
    if math.prod(grid) < 1 << 20:
        calls["eager"] = lambda: model(q, k)
    row["ms"] = _on_the_gpu(calls, q.nbytes, rounds)
    times = {name: max(1, round(2.0 / once(call))) for name, call in calls.items()}
    row["ms_called"] = {name: statistics.median(ms) for name, ms in in_turns(calls, rounds, times).items()}
    row["tb_per_s"] = {name: 4 * q.nbytes / ms / 1e9 for name, ms in row["ms"].items()}
    row["times_stock"] = row["ms"]["stock"] / row["ms"]["ltx"]
    row["of_floor"] = row["ms"]["floor"] / row["ms"]["op"]
    return row


def _on_the_gpu(calls: dict[str, Any], size: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a call by replays of CUDA graphs; each graph keeps its results, so large ones are of one call."""
    several = 1 if size > 1 << 28 else 8
    replays = {name: replay_of(call, several) for name, call in calls.items()}
    for replay in replays.values():
        replay()
    times = {name: max(1, round(2.0 / once(replay))) for name, replay in replays.items()}
    return {name: statistics.median(ms) / several for name, ms in in_turns(replays, rounds, times).items()}


def tables(model: Prologue, grid: tuple[int, int, int]) -> tuple[list[Tensor], list[Tensor]]:
    angles = []
    for axis, (size, dim) in enumerate(zip(grid, model.rope.rope_dim_split, strict=True)):
        frequencies = model.rope._inv_freqs(dim, torch.device("cuda"))
        angle = torch.arange(size, dtype=torch.float32, device="cuda")[:, None] * frequencies[None, :]
        shape = [1, 1, 1, 1, 1, dim // 2]
        shape[axis + 1] = size
        angles.append(angle.view(shape))
    return [a.cos() for a in angles], [a.sin() for a in angles]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=21, help="samples per contender")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": [],
    }
    for grid, heads in SHAPES:
        row = measure(grid, heads, args.rounds)
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
