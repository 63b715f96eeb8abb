"""End to end: one real LTX-2 block (diffusers, production width, random weights) eager, stock Inductor, backend="ltx".

    python benchmarks/block.py --out benchmarks/results/block-h200.json

Video 32 heads x 128, audio 32 heads x 64 (126 tokens), text 1024 tokens, bf16, cos/sin in fp32 as diffusers makes them.
`prologue` is the norm -> RoPE part alone (its eight sides, the same shapes), compiled both ways: the saving that it
predicts is compared with the saving of the whole block. Times are medians of CUDA-event times of single calls. The two
compiled contenders take turns in both orders (A B B A): a block of 60 ms leaves the GPU at another clock than it found
it, and in a fixed order that alone moved the difference by 4 ms. `kernels_*` are sums of kernel times from torch's
profiler, free of gaps between launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ltx_inductor
from benchmarks.models import Block


class Prologue(nn.Module):
    """The eight sides of a block: norm and rotation of q and k of self and cross (a2v, v2a) attention."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(
            [block.attn1, block.audio_attn1, block.audio_to_video_attn, block.video_to_audio_attn]
        )

    def forward(self, qk: list[tuple[Tensor, Tensor]], tables: list[Any]) -> list[Tensor]:
        from diffusers.models.transformers.transformer_ltx2 import apply_split_rotary_emb as rotate

        out = []
        for attention, (q, k), (tq, tk) in zip(self.attentions, qk, tables, strict=True):
            out += [rotate(attention.norm_q(q), tq), rotate(attention.norm_k(k), tk)]
        return out


def times(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, in turns: forwards, then backwards."""
    for call in contenders.values():
        for _ in range(5):
            call()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(repeats):
        for name, call in list(contenders.items())[:: 1 if i % 2 else -1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end))
    return {name: statistics.median(ts) for name, ts in found.items()}


def kernel_ms(call: Callable[[], Any], repeats: int = 6) -> float:
    """Milliseconds in kernels per call, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in p.key_averages()) / repeats / 1e3


def compiled(module: nn.Module, backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, fullgraph=True)


def measure(tokens: int, repeats: int) -> dict[str, Any]:
    """One sequence length: milliseconds per block and per prologue, and what follows from them."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        block = Block().to(torch.bfloat16).eval()
        args = Block.inputs(tokens)
        video, audio = Block.HEADS * Block.VIDEO, Block.HEADS * Block.AUDIO
        n, a = tokens, 126
        shapes = [
            ((n, video), (n, video)),
            ((a, audio), (a, audio)),
            ((n, audio), (a, audio)),
            ((a, audio), (n, audio)),
        ]
        qk = [tuple(torch.randn(1, *s, dtype=torch.bfloat16) for s in pair) for pair in shapes]
        tv, ta, cv, ca = args[-1]
        tables = [(tv, tv), (ta, ta), (cv, ca), (ca, cv)]
    prologue = Prologue(block.block)
    calls: dict[str, dict[str, Callable[[], Any]]] = {"block": {}, "prologue": {}}
    reports = {}
    for name, module, inputs in (("block", block, args), ("prologue", prologue, (qk, tables))):
        calls[name]["eager"] = lambda m=module, i=inputs: m(*i)
        for label, backend in (("inductor", "inductor"), ("ltx", "ltx")):
            f = compiled(module, backend)
            f(*inputs)
            calls[name][label] = lambda f=f, i=inputs: f(*i)
        reports[name] = ltx_inductor.last_report()
        reports[name].expect(rmsnorm_split_rope=8)
    row: dict[str, Any] = {"tokens": tokens}
    for name, contenders in calls.items():
        eager = {"eager": contenders.pop("eager")}
        for label, ms in (times(eager, repeats // 4) | times(contenders, repeats)).items():
            row[f"{name}_{label}_ms"] = round(ms, 4)
        for label, call in contenders.items():
            row[f"kernels_{name}_{label}_ms"] = round(kernel_ms(call), 4)
    kernels = {k: row[f"kernels_{k}_inductor_ms"] - row[f"kernels_{k}_ltx_ms"] for k in calls}
    saving = row["block_inductor_ms"] - row["block_ltx_ms"]
    predicted = row["prologue_inductor_ms"] - row["prologue_ltx_ms"]
    row |= {
        "prologue_share_inductor": round(row["prologue_inductor_ms"] / row["block_inductor_ms"], 4),
        "prologue_share_ltx": round(row["prologue_ltx_ms"] / row["block_ltx_ms"], 4),
        "saving_ms": round(saving, 4),
        "predicted_saving_ms": round(predicted, 4),
        "saving_over_predicted": round(saving / predicted, 3),
        "kernel_saving_ms": round(kernels["block"], 4),
        "kernel_predicted_saving_ms": round(kernels["prologue"], 4),
        "kernel_saving_over_predicted": round(kernels["block"] / kernels["prologue"], 3),
        "pass_ms": round(reports["block"].pass_ms, 1),
        "kernel_build_ms": round(reports["block"].kernel_ms, 1),
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8160, 32640])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/block.py: no GPU here; nothing measured")
        return
    rows = []
    with torch.no_grad():
        for tokens in args.tokens:
            rows.append(measure(tokens, args.repeats))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "commit": commit or None,
            "command": "python benchmarks/block.py",
            "rows": rows,
        }
        args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
