"""What a call of the RoPE ops costs the host, without CUDA graphs: as an op, and as compiled models call it.

    python benchmarks/host.py --out benchmarks/results/host-h200.json

Audio attention (126 tokens, 32 heads x 64), whose kernel takes 3 us: less than any way to launch it. Microseconds of
wall time per call, median of rounds in which all contenders take turns: these hosts change their speed within seconds.

`compiled` are the calls that compiled code consists of. `compiled model` is measured from outside: models that rotate
4 and 12 times, each time what the last one left; the difference, divided by 8. `kept`: every result is returned, so
that none is written over and each call allocates two. `as an op`: without `ltx_inductor.lowering`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rope import _commit, _plain, environment, model_chain
from ltx_inductor import lowering
from ltx_inductor.kernels import rope
from ltx_inductor.ops.rope import _pair_on_cuda
from ltx_inductor.ops.rope_direct import rope_call
from tests.gpu.rope_cases import PRODUCTION, make, prepare

Call = Callable[[], Any]
FEW, MANY = 4, 12
_LIBRARY = torch.library.Library("ltx_bench", "DEF")


def single_calls() -> dict[str, Call]:
    """Everything that takes one call."""
    case = PRODUCTION["a126"]
    prepare([case, replace(case, k=None)])
    args: Any = _plain(make(case, 0))
    q, k, qw, kw, qc, qs = args[:6]
    ops = torch.ops.ltx_inductor
    op, single = ops.qk_rmsnorm_split_rope.default, ops.rmsnorm_split_rope.default
    short: Any = (*(t[:, :0] for t in args[:2]), *args[2:4], *(t[:, :, :0] for t in args[4:6]), *args[6:])
    _LIBRARY.define(str(op._schema).removeprefix("ltx_inductor::"))
    _LIBRARY.impl("qk_rmsnorm_split_rope", _pair_on_cuda, "CUDA")
    in_python = torch.ops.ltx_bench.qk_rmsnorm_split_rope.default
    rope.launch_pair(*args)
    single(q, qw, qc, qs, 1e-6, 32, "bf16-chain")
    plan = next(p for p in rope._plans.values() if p.q_out[0] == q.shape)
    allocate, form, stream = plan.empty_here, plan.q_out, plan.stream(0)
    a, b = allocate(*form), allocate(*form)
    raw = (*args[:8], a, b, 1e-6, 1e-6, 32, 32)
    direct = rope_call(True, "bf16-chain", "bshd", 1e-6, 1e-6, 32, 32)
    direct_single = rope_call(False, "bf16-chain", "bshd", 1e-6, 1e-6, 32, 32)
    model = model_chain(case.contract, case.q.heads)
    return {
        "op": lambda: op(*args),
        "op, all but the launch (S = 0, so empty allocations)": lambda: op(*short),
        "op of a single tensor": lambda: single(q, qw, qc, qs, 1e-6, 32, "bf16-chain"),
        "op with its kernel in Python": lambda: in_python(*args),
        "launch_pair": lambda: rope.launch_pair(*args),
        "two allocations": lambda: (allocate(*form), allocate(*form)),
        "tvm-ffi call and checks": lambda: plan.launch(plan.handle, stream, rope.DRY, *raw),
        "tvm-ffi call, checks and launch": lambda: plan.launch(plan.handle, stream, rope.AUTO, *raw),
        "compiled": lambda: direct(a, b, q, k, qw, kw, qc, qs, None, None),
        "compiled, with two allocations": lambda: direct(
            allocate(*form), allocate(*form), q, k, qw, kw, qc, qs, None, None
        ),
        "compiled, all but the launch (S = 0)": lambda: direct(a[:, :0], b[:, :0], *short[:6], None, None),
        "of that: two slices": lambda: (a[:, :0], b[:, :0]),
        "compiled, a single tensor": lambda: direct_single(a, q, qw, qc, qs),
        "for scale: torch.add(q, k, out=q)": lambda: torch.add(q, k, out=a),
        "eager": lambda: model(*args[:8]),
    }


def models() -> dict[str, tuple[Call, Call]]:
    """Compiled models that rotate FEW and MANY times."""
    case = PRODUCTION["a126"]
    args: Any = _plain(make(case, 0))[:6]
    rotate = model_chain(case.contract, case.q.heads)

    def chain(times: int, keep: bool) -> Callable[..., list[Tensor]]:
        def run(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
            kept = []
            for _ in range(times):
                q, k = rotate(q, k, qw, kw, cos, sin, None, None)
                kept += [q, k]
            return kept if keep else [q, k]

        return run

    def compiled(times: int, keep: bool, devices: tuple[str, ...]) -> Call:
        run = chain(times, keep)
        # Dynamo keeps what it compiled by the code object; this one is new
        own = types.FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
        lowering._DEVICES = devices
        model = torch.compile(own, backend="ltx", fullgraph=True)
        model(*args)
        lowering._DEVICES = ("cuda",)
        return lambda: model(*args)

    kinds = {
        "compiled model": (False, ("cuda",)),
        "compiled model, kept": (True, ("cuda",)),
        "compiled model, as an op": (False, ()),
    }
    with torch._inductor.config.patch(force_disable_caches=True):  # their key does not know _DEVICES
        return {n: (compiled(FEW, keep, d), compiled(MANY, keep, d)) for n, (keep, d) in kinds.items()}


def microseconds(call: Call, calls: int) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def host_cost(rounds: int = 11, calls: int = 2000) -> dict[str, dict[str, float]]:
    """Per contender the median, and the least and the most of all rounds."""
    found, whole = single_calls(), models()
    times: dict[str, list[float]] = {name: [] for name in (*found, *whole)}
    for _ in range(rounds):
        with torch.inference_mode():
            for name, call in found.items():
                times[name].append(microseconds(call, calls // (10 if name == "eager" else 1)))
        for name, (few, many) in whole.items():
            times[name].append((microseconds(many, calls // MANY) - microseconds(few, calls // MANY)) / (MANY - FEW))
    return {
        name: {"median": round(statistics.median(ts), 2), "least": round(min(ts), 2), "most": round(max(ts), 2)}
        for name, ts in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="", help="the git commit, where git is not at hand")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with torch.no_grad():
        costs = host_cost()
    for name, cost in costs.items():
        print(f"{name:<58} {cost['median']:7.2f}   ({cost['least']:.2f} to {cost['most']:.2f})")
    data = {
        "environment": environment() | {"commit": options.commit or _commit()},
        "unit": "us per call",
        "host_us": {name: cost["median"] for name, cost in costs.items()},
        "range_us": {name: [cost["least"], cost["most"]] for name, cost in costs.items()},
    }
    if options.out:
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
