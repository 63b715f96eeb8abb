"""One real stage-5 block of the LTX-2.5 diffusion decoder: stock Inductor with NATTEN, and backend="ltx", in one run.

    python benchmarks/decoder_block.py --out benchmarks/results/decoder-block-h200.json

diffusers' LTX2VideoVaeDiffusionNABlock, 256 channels, 4 heads of 64, window 11 x 11 x 11, NATTEN processor, random
weights, bf16. Both compiled blocks see the same inputs and take turns, in both orders. The error is that of the block's
output against the same block in fp32 with the op's reference for the attention (small grids: the reference is slow);
`difference` that between the two outputs. `kernels` are sums of kernel times from
torch's profiler, by what a kernel does. Needs NATTEN with its binary (benchmarks/natten_hopper builds one for Hopper).
The compilers unroll the MLP's loop over tiles, 241 at 121 x 136 x 240: --swiglu-tile 262144 makes 16 of them.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ltx_inductor
from benchmarks.fna_timing import in_turns
from ltx_inductor.ops.na3d import reference

CHANNELS, WINDOW, CONTEXT = 256, (11, 11, 11), 256


def natten_processor(na3d: Callable[..., Tensor]) -> Any:
    """diffusers' NATTEN processor, calling `na3d`; its __init__ would go to the Hub for NATTEN."""
    from diffusers.models.autoencoders import ltx2_diffusion_decoder as decoder

    processor = object.__new__(decoder.LTX2VideoVaeNeighborhoodNattenProcessor)
    processor._na3d, processor.backend = na3d, None
    return processor


def block(na3d: Callable[..., Tensor], dtype: torch.dtype) -> nn.Module:
    """The block on the GPU, with weights that a seed gives, calling `na3d` for its attention."""
    from diffusers.models.autoencoders import ltx2_diffusion_decoder as decoder

    torch.manual_seed(0)
    made = decoder.LTX2VideoVaeDiffusionNABlock(CHANNELS, WINDOW, CONTEXT)
    made.attn.set_processor(natten_processor(na3d))
    return made.to("cuda", dtype).eval().requires_grad_(False)


def inputs(grid: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    gen = torch.Generator("cuda").manual_seed(1)
    hidden, context = (
        torch.randn((1, *grid, c), generator=gen, device="cuda", dtype=torch.bfloat16) for c in (CHANNELS, CONTEXT)
    )
    modulation = tuple(
        0.1 * torch.randn((1, 1, 1, 1, CHANNELS), generator=gen, device="cuda", dtype=torch.bfloat16) for _ in range(7)
    )
    return hidden.to(dtype), context.to(dtype), tuple(m.to(dtype) for m in modulation)


def reference_na3d(q: Tensor, k: Tensor, v: Tensor, kernel_size: Any, scale: float, backend: Any) -> Tensor:
    return reference(q, k, v, kernel_size, scale)


def in_fp32(grid: tuple[int, int, int]) -> Tensor:
    with torch.no_grad():
        return block(reference_na3d, torch.float32)(*inputs(grid, torch.float32))


def kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a call by what its kernels do."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    sums: dict[str, float] = {}
    for event in profile.key_averages():
        name = event.key.lower()
        if "triton" not in name and any(part in name for part in ("fna", "permute", "natten")):
            kind = "neighborhood attention"
        elif any(part in name for part in ("gemm", "cutlass", "cublas", "nvjet")):
            kind = "matrix products"
        else:
            kind = "pointwise and norms"
        sums[kind] = sums.get(kind, 0.0) + event.self_device_time_total / 1e3
    return sums


def peak_gb(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error, a frame at a time: the whole in fp64 would not fit beside the rest."""
    wrong = sum(float((g.double() - w.double()).square().sum()) for g, w in zip(got[0], want[0], strict=True))
    return math.sqrt(wrong / sum(float(w.double().square().sum()) for w in want[0]))


def measure(grid: tuple[int, int, int], repeats: int, with_error: bool) -> dict[str, Any]:
    import natten

    arguments = inputs(grid, torch.bfloat16)
    stock_block = block(natten.na3d, torch.bfloat16)
    eager: Any = stock_block
    stock = torch.compile(copy.deepcopy(stock_block), fullgraph=True)
    ours = torch.compile(copy.deepcopy(stock_block), backend="ltx", fullgraph=True)
    row: dict[str, Any] = {"grid": grid}
    with torch.no_grad():
        outputs = {"stock": stock(*arguments)}
        outputs["ltx"] = ours(*arguments)
        report = ltx_inductor.last_report()
        print(report)
        assert report is not None
        report.expect(neighborhood_attention=1)
        row["difference"] = error(outputs["ltx"], outputs["stock"])
        if with_error:
            want = in_fp32(grid)
            row["error_to_fp32"] = {name: error(out, want) for name, out in outputs.items()}
            del want
        outputs.clear()
        calls = {
            "eager": lambda: eager(*arguments),
            "stock": lambda: stock(*arguments),
            "ltx": lambda: ours(*arguments),
        }
        for call in calls.values():
            call()
        row["ms"] = {name: statistics.median(found) for name, found in in_turns(calls, repeats).items()}
        row["peak_gb"] = {name: peak_gb(call) for name, call in calls.items()}
        row["kernels_ms"] = {name: kernels(call) for name, call in calls.items() if name != "eager"}
    row["times_stock"] = row["ms"]["stock"] / row["ms"]["ltx"]
    return row


def begin(swiglu_tile: int) -> dict[str, Any]:
    """Sets the tile of diffusers' MLP, in tokens; what the JSON says of the run, with no rows yet."""
    import natten
    from diffusers.models.autoencoders import ltx2_diffusion_decoder

    ltx2_diffusion_decoder._SWIGLU_TILE_SIZE = swiglu_tile
    return {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "natten": natten.__version__,
        "swiglu_tile": swiglu_tile,
        "rows": [],
    }


def add_row(result: dict[str, Any], row: dict[str, Any], out: Path | None) -> None:
    """Also prints it, and writes what there is so far: a later row may not fit into memory or time."""
    result["rows"].append(row)
    print(json.dumps(row, indent=1), flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--grids", default="33,64,96;121,136,240", help="T,H,W;T,H,W")
    parser.add_argument("--swiglu-tile", type=int, default=16384, help="tokens per tile of the MLP (diffusers: 16384)")
    args = parser.parse_args()
    result = begin(args.swiglu_tile)
    for text in args.grids.split(";"):
        t, h, w = map(int, text.split(","))
        row = measure((t, h, w), repeats=5 if t > 65 else 15, with_error=t * h * w <= 1 << 18)
        add_row(result, row, args.out)


if __name__ == "__main__":
    main()
