"""The LTX-2.5 diffusion decoder with random weights: eager, stock torch.compile and backend="ltx", in one run.

    python benchmarks/decoder.py --out benchmarks/results/decoder-h200.json

diffusers' LTX2VideoDiffusionDecoder3d at its shipped sizes, bf16, NATTEN processor (benchmarks/natten_hopper builds
NATTEN for Hopper). Every block is compiled on its own, as `compile_repeated_blocks` does. Two things are timed: one
denoising step of stage 5 (its eight blocks and what is around them; `per_block_ms` is an eighth of it) and the
decoding of a latent through all five stages. Contenders take turns, in both orders. `kernels_ms` are sums of kernel
times of stage 5 from torch's profiler, and `attention_share` is what neighborhood attention has of them.
`error_to_fp32` compares stage 5's output with that of the same stage in fp32 with the op's reference for the
attention; it is computed for grids up to 2^18 tokens, as the reference is slow. `swiglu_tile` is diffusers' constant
for the tiles of the MLP, 16,384 tokens as shipped: the compilers unroll that loop, 182 rounds for a 121-frame video of
512 x 768, which costs minutes; larger tiles compute the same.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ltx_inductor
from benchmarks.decoder_block import add_row, begin, error, kernels, natten_processor, peak_gb, reference_na3d
from benchmarks.fna_timing import in_turns, once

CONTENDERS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "stock": {"fullgraph": True, "dynamic": False},
    "ltx": {"fullgraph": True, "dynamic": False, "backend": "ltx"},
}


def decoder(na3d: Callable[..., Tensor], dtype: torch.dtype, stage_5_only: bool = False) -> Any:
    """The decoder on the GPU, with weights that a seed gives, calling `na3d` for its attention."""
    from diffusers.models.autoencoders import ltx2_diffusion_decoder as diffusers_decoder

    torch.manual_seed(0)
    depths = (0, 0, 0, 0, 8) if stage_5_only else (4, 6, 4, 2, 8)
    with torch.device("cuda"):
        made = diffusers_decoder.LTX2VideoDiffusionDecoder3d(stage_depths=depths)
    for module in made.modules():
        if isinstance(module, diffusers_decoder.LTX2VideoVaeNeighborhoodAttention):
            module.set_processor(natten_processor(na3d))
    return made.to(dtype).eval().requires_grad_(False)


def blocks(model: Any) -> Iterator[nn.Module]:
    for stage in (*model.det_stages, model.diff_blocks):
        yield from stage


def stage_5_inputs(frames: int, height: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """latent_context [1, T, H/4, W/4, 256], x_t [1, 3, T, H, W], timestep [1]"""
    gen = torch.Generator("cuda").manual_seed(1)
    context, pixels = (
        torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16).to(dtype)
        for shape in ((1, frames, height // 4, width // 4, 256), (1, 3, frames, height, width))
    )
    return context, pixels, torch.ones(1, device="cuda")


def run_or_out_of_memory(call: Callable[[], Any]) -> bool:
    try:
        call()
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return True


def compare(calls: dict[str, Callable[[], Any]], budget_ms: float) -> dict[str, Any]:
    """Median ms of each call that fits in memory, and its peak memory in GB."""
    fit = {name: call for name, call in calls.items() if run_or_out_of_memory(call)}
    total = sum(once(call) for call in fit.values())
    samples = in_turns(fit, max(2, min(20, int(budget_ms / total))))
    return {
        "ms": {name: statistics.median(found) for name, found in samples.items()},
        "samples": {name: len(found) for name, found in samples.items()},
        "peak_gb": {name: peak_gb(call) for name, call in fit.items()},
        "out_of_memory": sorted(set(calls) - set(fit)),
    }


def measure(video: tuple[int, int, int], whole: bool, budget_ms: float) -> dict[str, Any]:
    import natten

    frames, height, width = video
    made = decoder(natten.na3d, torch.bfloat16, stage_5_only=not whole)
    models: dict[str, Any] = {}
    for name, options in CONTENDERS.items():
        models[name] = copy.deepcopy(made)
        for block in blocks(models[name]) if options else ():
            block.compile(**options)
    del made
    inputs = stage_5_inputs(*video, torch.bfloat16)
    steps = {name: lambda m=m: m.forward_diffusion_step(*inputs) for name, m in models.items()}
    row: dict[str, Any] = {"frames": frames, "height": height, "width": width}
    row["grid"] = [frames, height // 4, width // 4]

    stage = row["stage_5"] = compare(steps, budget_ms)
    report = ltx_inductor.last_report()
    assert report is not None
    report.expect(neighborhood_attention=1)
    stage["per_block_ms"] = {name: ms / 8 for name, ms in stage["ms"].items()}
    stage["kernels_ms"] = {name: kernels(steps[name]) for name in stage["ms"]}
    stage["attention_share"] = {
        name: sums["neighborhood attention"] / sum(sums.values()) for name, sums in stage["kernels_ms"].items()
    }
    if frames * height * width // 16 <= 1 << 18:
        in_fp32 = decoder(reference_na3d, torch.float32, stage_5_only=not whole)
        want = in_fp32.forward_diffusion_step(*stage_5_inputs(*video, torch.float32))
        stage["error_to_fp32"] = {name: error(steps[name](), want) for name in stage["ms"]}
        del in_fp32, want
    print(json.dumps(row, indent=1), flush=True)
    if whole:
        gen = torch.Generator("cuda").manual_seed(2)
        shape = (1, 128, (frames - 1) // 8 + 1, height // 32, width // 32)
        latent = torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16)
        decodes = {name: lambda m=m: m(latent, generator=gen.manual_seed(3)) for name, m in models.items()}
        row["decode"] = compare(decodes, budget_ms)
    return row


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--videos", default="33,256,384;121,512,768;121,1088,1920", help="frames,height,width;...")
    parser.add_argument("--stage-5-only", type=int, default=1000, help="from this height on, no decoding")
    parser.add_argument("--swiglu-tile", type=int, default=1 << 18, help="tokens per tile of the MLP")
    parser.add_argument("--budget-ms", type=float, default=8000, help="GPU time of one comparison")
    args = parser.parse_args()
    result = begin(args.swiglu_tile)
    torch._dynamo.config.recompile_limit = 64  # five stages, two backends, one function
    for text in args.videos.split(";"):
        frames, height, width = map(int, text.split(","))
        torch._dynamo.reset()
        row = measure((frames, height, width), whole=height < args.stage_5_only, budget_ms=args.budget_ms)
        add_row(result, row, args.out)


if __name__ == "__main__":
    main()
