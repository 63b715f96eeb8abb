"""End to end: one real LTX-2 block (diffusers, production width, random weights) eager, stock Inductor, backend="ltx".

    python benchmarks/block.py --out benchmarks/results/block-h200.json

Video 32 heads x 128, audio 32 heads x 64 (126 tokens), text 1024 tokens, bf16, cos/sin in fp32 as diffusers makes them.
`prologue` is the norm -> RoPE part alone (its eight sides, the same shapes), compiled both ways. The saving that it
predicts is compared with the saving of the whole block, measured twice in the same run:

kernels     the claim. The time of all kernels but matrix products and attention, per call, from torch's profiler.
            Those two are the same kernels in both contenders and take nine tenths of a block, at whatever clock the
            power limit leaves; everything that the rewrite can change, for better or worse, is in the rest. Medians
            over calls; the confidence interval is a bootstrap over calls.
wall clock  the check. CUDA events around single calls in the order A B B A; each such four give one difference, free
            of any drift that is linear in time. Median of the differences, and its bootstrap confidence interval. It
            carries the clock of the matrix products: see benchmarks/NOTES.md.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ltx_inductor
from benchmarks.models import Block

Call = Callable[[], Any]
# Names of matrix products and attention; a fused Triton kernel may carry such a name of what it reads.
HEAVY = re.compile(r"(?!triton_(poi|red|per))(.*(gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|cudnn|flash|fmha))", re.I)
A, B = "inductor", "ltx"


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


def milliseconds(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def in_turns(contenders: dict[str, Call], quads: int) -> tuple[dict[str, list[float]], list[float]]:
    """Times of each, and per A B B A the mean of the two A less the mean of the two B."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    differences = []
    for _ in range(3):
        for call in contenders.values():
            call()
    for i in range(quads):
        order = (A, B, B, A) if i % 2 else (B, A, A, B)
        four = {A: 0.0, B: 0.0}
        for name in order:
            times[name].append(milliseconds(contenders[name]))
            four[name] += times[name][-1] / 2
        differences.append(four[A] - four[B])
    return times, differences


def kernel_times(contenders: dict[str, Call], repeats: int) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Per contender and call: milliseconds in kernels that are neither matrix products nor attention; and, per kernel,
    whether it counts as heavy and its milliseconds per call. Contenders take turns."""
    from torch.profiler import ProfilerActivity, profile

    rest: dict[str, list[float]] = {name: [] for name in contenders}
    kernels: dict[str, dict[str, Any]] = {name: {} for name in contenders}
    for i in range(repeats):
        for name in (A, B) if i % 2 else (B, A):
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                contenders[name]()
                torch.cuda.synchronize()
            rest[name].append(0.0)
            for event in p.events():
                if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
                    continue
                ms = event.self_device_time_total / 1e3
                heavy = HEAVY.match(event.name) is not None
                kernel = kernels[name].setdefault(event.name[:120], {"heavy": heavy, "calls": 0, "ms": 0.0})
                kernel["calls"] += 1 / repeats
                kernel["ms"] += ms / repeats
                rest[name][-1] += 0.0 if heavy else ms
    return rest, kernels


def interval(estimate: Callable[..., float], *samples: Sequence[float], rounds: int = 2000) -> list[float]:
    """The 95 % bootstrap confidence interval of an estimate made of these samples."""
    rng = random.Random(0)
    found = sorted(estimate(*(rng.choices(s, k=len(s)) for s in samples)) for _ in range(rounds))
    return [round(found[int(rounds * q)], 4) for q in (0.025, 0.975)]


def saved(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(a) - statistics.median(b)


def compiled(module: nn.Module, backend: str, inputs: Any) -> Call:
    f = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    f(*inputs)
    return lambda: f(*inputs)


def measure(tokens: int, quads: int, profiles: int) -> dict[str, Any]:
    """One sequence length: milliseconds per block and per prologue, and what follows from them."""
    torch._dynamo.reset()
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
    row: dict[str, Any] = {"tokens": tokens}
    rest: dict[str, dict[str, list[float]]] = {}
    for name, module, inputs in (("prologue", Prologue(block.block), (qk, tables)), ("block", block, args)):
        module(*inputs)
        eager = [milliseconds(lambda m=module, i=inputs: m(*i)) for _ in range(8)]
        calls = {A: compiled(module, A, inputs), B: compiled(module, B, inputs)}
        report = ltx_inductor.last_report()
        report.expect(rmsnorm_split_rope=8)
        times, differences = in_turns(calls, quads)
        rest[name], kernels = kernel_times(calls, profiles)
        found = {
            "eager_ms": statistics.median(eager),
            "inductor_ms": statistics.median(times[A]),
            "ltx_ms": statistics.median(times[B]),
            "saving_ms": statistics.median(differences),
            "kernels_inductor_ms": statistics.median(rest[name][A]),
            "kernels_ltx_ms": statistics.median(rest[name][B]),
            "kernel_saving_ms": saved(rest[name][A], rest[name][B]),
        }
        row[name] = {key: round(value, 4) for key, value in found.items()} | {
            "saving_95": interval(statistics.median, differences),
            "kernel_saving_95": interval(saved, rest[name][A], rest[name][B]),
            "pass_ms": round(report.pass_ms, 1),
        }
        if name == "block":
            row["block_kernels"] = {
                contender: {
                    kernel: {"heavy": k["heavy"], "calls": round(k["calls"], 2), "ms": round(k["ms"], 4)}
                    for kernel, k in sorted(of.items(), key=lambda item: -item[1]["ms"])
                }
                for contender, of in kernels.items()
            }
    whole, part = row["block"], row["prologue"]
    claim = whole["kernel_saving_ms"] / part["kernel_saving_ms"]
    row["kernels_saved_over_predicted"] = round(claim, 3)
    row["kernels_saved_over_predicted_95"] = interval(
        lambda a, b, c, d: saved(a, b) / saved(c, d),
        *(rest["block"][c] for c in (A, B)),
        *(rest["prologue"][c] for c in (A, B)),
    )
    row["wall_saved_over_predicted"] = round(whole["saving_ms"] / part["saving_ms"], 3)
    row["wall_saved_over_predicted_95"] = [round(v / part["saving_ms"], 3) for v in whole["saving_95"]]
    return row


def show(row: dict[str, Any]) -> None:
    print(f"{row['tokens']} tokens, ms per call         eager  inductor       ltx     saved   95 %")
    for name in ("block", "prologue"):
        r = row[name]
        times = "".join(f"{r[key]:>10}" for key in ("inductor_ms", "ltx_ms", "saving_ms"))
        print(f"  {name:<26}{r['eager_ms']:>12}{times}   {r['saving_95']}")
        print(
            f"  {name + ', other kernels':<26}{'':>12}{r['kernels_inductor_ms']:>10}{r['kernels_ltx_ms']:>10}"
            f"{r['kernel_saving_ms']:>10}   {r['kernel_saving_95']}"
        )
    for what in ("kernels", "wall"):
        key = f"{what}_saved_over_predicted"
        print(f"  saved over predicted, {what}: {row[key]}   {row[key + '_95']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8160, 32640])
    parser.add_argument("--quads", type=int, default=60, help="A B B A turns; each gives one difference")
    parser.add_argument("--profiles", type=int, default=12, help="profiled calls of each contender")
    parser.add_argument("--commit", default="", help="the git commit, where git is not at hand")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/block.py: no GPU here; nothing measured")
        return
    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit or None,
        "command": f"python benchmarks/{' '.join(Path(a).name if '/' in a else a for a in sys.argv)}",
        "claim": "kernels_saved_over_predicted",
        "rows": [],
    }
    with torch.no_grad():
        for tokens in args.tokens:
            facts["rows"].append(measure(tokens, args.quads, args.profiles))
            show(facts["rows"][-1])
            if args.out:
                args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
