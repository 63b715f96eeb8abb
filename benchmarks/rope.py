"""Speed of the RoPE kernels against the byte floor, eager and stock Inductor, all in one run.

    python benchmarks/rope.py --out benchmarks/results/rope-h200.json            everything (three minutes)
    python benchmarks/rope.py --parts production --no-models                 ours and the floor

Method. Every contender's calls are captured in a CUDA graph that rotates among input sets which together are at
least four times the L2 cache, and keeps every result, so that all traffic is cold; a time is the median over replays,
divided by the calls in the graph, and contenders are replayed in turns. The floor (floor.cu) reads and writes the same
bytes and computes nothing; of its two versions the faster one counts. The launch path without CUDA graphs: host.py.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ltx_inductor.kernels import compilers, rope, rope_specs  # noqa: E402
from tests.gpu.rope_cases import BF16, FP16, FP32, PRODUCTION, Case, Side, differing, eager, make, prepare  # noqa: E402

Call = Callable[[], Any]

# Microseconds of the best earlier kernel and its floor, measured on one H200 (contract bf16-chain, bf16 cos/sin).
EARLIER = {
    "v1536": (24.9, 18.2),
    "v6144": (81.6, 63.3),
    "v8160": (106.0, 82.9),
    "v32640": (391.7, 319.1),
    "v6144b2": (155.1, 122.5),
    "a126": (5.17, 2.46),
    "a2v": (108.5, 95.0),
}
CONTRACTS = (
    ("bf16-chain", BF16),
    ("fp32-rope", BF16),
    ("fp32-all", BF16),
    ("fp32-rope", FP32),
    ("fp32-result", FP32),
)


def other_shapes() -> dict[str, Case]:
    """Off the tuned path: per head, other head dims and strides, batch-1 tables, fp16, both layouts."""
    row = {f"row d={d}, {h} heads": Case(Side(s, h), Side(s, h), d) for d, h, s in ((32, 32, 16384), (40, 48, 8192))}
    row |= {f"row d={d}, {h} heads": Case(Side(s, h), Side(s, h), d) for d, h, s in ((80, 32, 6144), (96, 32, 6144))}
    row |= {f"row d={d}, {h} heads": Case(Side(s, h), Side(s, h), d) for d, h, s in ((128, 40, 6144), (160, 32, 4096))}
    row |= {f"row d={d}, {h} heads": Case(Side(s, h), Side(s, h), d) for d, h, s in ((256, 16, 6144), (128, 128, 2048))}
    row |= {f"row d={d}, {h} heads": Case(Side(s, h), Side(s, h), d) for d, h, s in ((128, 64, 4096), (64, 8, 16384))}
    head = {
        f"per head d={d}": Case(Side(s, 32), Side(s, 32), d, per_head=True)
        for d, s in ((32, 16384), (64, 8192), (96, 6144), (128, 6144), (160, 4096), (256, 4096))
    }
    base, own = PRODUCTION["v6144"], PRODUCTION["a2v"]
    return {
        **row,
        **head,
        "per head d=128, one table for all heads": replace(head["per head d=128"], tables="head1"),
        "per head d=128, 32 q and 8 k heads": Case(Side(6144, 32), Side(6144, 8), 128, per_head=True, tables="head1"),
        "v6144b2, batch-1 tables": replace(PRODUCTION["v6144b2"], tables="batch1"),
        "v6144, contiguous [B, H, S, D/2] tables": replace(base, tables="contiguous"),
        "v6144, one table for all heads": replace(base, tables="head1"),
        "v6144, slices of a fused projection": replace(base, x="slice"),
        "v6144, layout bhsd": replace(base, layout="bhsd"),
        "v6144, fp16": replace(base, dtype=FP16, table_dtype=FP16),
        "v6144, own tables": replace(base, shared=False),
        "v6144, no weights": replace(base, q=replace(base.q, weight=False), k=replace(base.q, weight=False)),
        "a32640, shared tables": replace(PRODUCTION["a126"], q=Side(32640), k=Side(32640)),
        "a2v, contiguous tables": replace(own, tables="contiguous"),
        "v6144, odd strides (exact, slower)": replace(base, x="odd", tables="odd"),
    }


def floor_library() -> Any:
    nvcc = compilers.find_nvcc()
    assert nvcc is not None, "the floor kernel needs nvcc"
    major, minor = torch.cuda.get_device_capability()
    out = Path(tempfile.mkdtemp(), "floor.so")
    source = str(Path(__file__).with_name("floor.cu"))
    command = [nvcc.path, "-O3", "-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}", source, "-o", str(out)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(out))


def traffic(case: Case) -> int:
    """The compulsory bytes of a call."""
    out = 4 if rope_specs.CONTRACTS[case.contract][2] else 2
    table = 4 if case.table_dtype == FP32 else 2
    total = 0
    for i, side in enumerate(s for s in (case.q, case.k) if s is not None):
        row = side.heads * case.head_dim
        total += side.batch * side.seq * row * (2 + out)
        if i == 0 or not case.shared:
            batch = 1 if case.tables in ("batch1", "head1", "expanded") else side.batch
            heads = 1 if case.tables in ("head1", "expanded") else side.heads
            total += 2 * batch * side.seq * heads * case.head_dim // 2 * table
    return total


def floor_call(lib: Any, case: Case, args: Sequence[Any], no_allocate: bool) -> Call | None:
    """A call of the floor kernel on this case's own buffers; None where its pattern does not fit the case."""
    q, k = args[0], args[1]
    if case.tables in ("batch1", "expanded", "odd", "strided") or case.x not in ("plain", "slice"):
        return None
    f32 = rope_specs.CONTRACTS[case.contract][2]
    table = 0 if case.tables == "head1" else 2 if case.table_dtype == FP32 else 1
    own = args[4:6] if case.shared else args[6:8]
    p = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, *args[4:6], *own)]
    none, zero = ctypes.c_void_p(0), ctypes.c_longlong(0)
    same = case.shared and case.q == replace(case.k or case.q, weight=case.q.weight, eps=case.q.eps)
    n, n2 = (ctypes.c_longlong(t.numel()) for t in (q, k))

    def call() -> Any:
        outs = [torch.empty(t.shape, dtype=FP32 if f32 else t.dtype, device="cuda") for t in (q, k)]
        qo, ko = (ctypes.c_void_p(t.data_ptr()) for t in outs)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = (table, 2 if f32 else 1, int(no_allocate), stream)
        if same:
            code = lib.floor_move(*p[:4], qo, ko, n, none, none, none, none, zero, 2, *shape)
        else:
            code = lib.floor_move(p[0], none, p[2], p[3], qo, none, n, p[1], p[4], p[5], ko, n2, 1, *shape)
        assert code == 0, code
        return outs

    return call


def model_chain(contract: str, heads: int) -> Callable[..., Any]:
    """The chain as the models spell it (bf16-chain: ltx-core; fp32-rope: diffusers), for q and k of one attention."""

    def side(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-6)
        b, t, width = x.shape
        split = x.reshape(b, t, heads, -1).swapaxes(1, 2).unflatten(-1, (2, -1))
        if contract == "fp32-rope":
            split = split.float()
        first, second = split[..., :1, :], split[..., 1:, :]
        out = split * cos.unsqueeze(-2)
        out[..., :1, :].addcmul_(-sin.unsqueeze(-2), second)
        out[..., 1:, :].addcmul_(sin.unsqueeze(-2), first)
        return out.flatten(-2).swapaxes(1, 2).reshape(b, t, width).to(x.dtype)

    def model(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, qc: Tensor, qs: Tensor, kc: Any, ks: Any) -> Any:
        return side(q, qw, qc, qs), side(k, kw, qc if kc is None else kc, qs if ks is None else ks)

    return model


class Contender:
    """A CUDA graph of calls.

    All contenders write to the same memory: one pool, whose blocks are given back after each capture. Where buffers lie
    moves a time by up to 2 %, which is more than what is to be measured.
    """

    def __init__(self, calls: Sequence[Call], repeats: int, pool: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph, self.count = torch.cuda.CUDAGraph(), len(calls) * repeats
        with torch.cuda.graph(self.graph, pool=pool):
            kept = [[c() for c in calls] for _ in range(repeats)]  # no result overwrites another one
        del kept
        self.times: list[float] = []

    def replay(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end) * 1e3 / self.count)

    @property
    def us(self) -> float:
        return statistics.median(self.times[2:])


def measure(lib: Any, case: Case, with_models: bool, paths: Sequence[int], replays: int) -> dict[str, Any]:
    size = traffic(case)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = max(3, math.ceil(4 * l2 / size))
    args = [_plain(make(case, seed)) for seed in range(min(sets, 3))]
    args += [_copied(a) for a in args * (sets // 3 + 1)][: max(0, sets - 3)]
    wanted: dict[str, list[Call]] = {}
    for na in (False, True):
        floors = [floor_call(lib, case, a, na) for a in args]
        if floors[0] is not None:
            wanted[f"floor{'_na' if na else ''}"] = floors  # type: ignore[assignment]
    for path in paths:
        name = {rope.AUTO: "ours", rope.PAIR: "pair", rope.ROW: "row", rope.ANY: "any"}[path]
        wanted[name] = [lambda a=a, path=path: rope.launch_pair(*a, path=path) for a in args]
    if with_models:
        model = model_chain(case.contract, case.q.heads)
        wanted["eager"] = [lambda a=a: model(*a[:8]) for a in args]
        torch._dynamo.reset()
        compiled = torch.compile(model, dynamic=False)
        with torch.no_grad():
            for a in args:  # nothing may be compiled during capture
                compiled(*a[:8])
        wanted["inductor"] = [lambda a=a: compiled(*a[:8]) for a in args]
    repeats = max(1, 20 // sets)
    with torch.no_grad():
        found = rope.launch_pair(*args[0])  # type: ignore[arg-type]
        assert found is not None
        bits = sum(differing(a, b) for a, b in zip(found, eager(case, args[0]), strict=True))
        pool = torch.cuda.graph_pool_handle()
        slow = ("eager", "inductor")
        contenders = {n: Contender(calls, 1 if n in slow else repeats, pool) for n, calls in wanted.items()}
        for _ in range(replays + 2):
            for c in contenders.values():
                c.replay()
    result: dict[str, Any] = {name: round(c.us, 3) for name, c in contenders.items()}
    result["bytes"], result["different_elements"] = size, bits
    floors_us = [result[n] for n in ("floor", "floor_na") if n in result]
    if floors_us:
        result["floor_best"] = min(floors_us)
        result["of_floor"] = round(min(floors_us) / result["ours"], 4)
    else:
        result["gbps"] = round(size / result["ours"] / 1e3)
    return result


def _plain(args: Sequence[Any]) -> tuple[Any, ...]:
    """Weights as tensors: for a mixture of parameters and tensors Inductor would compile twice."""
    return tuple(t.detach() if isinstance(t, Tensor) else t for t in args)


def _copied(args: Sequence[Any]) -> tuple[Any, ...]:
    """The same call on other memory, with the same strides."""

    def one(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        span = 1 + sum((s - 1) * st for s, st in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        new = torch.empty(span, dtype=t.dtype, device=t.device).as_strided(t.shape, t.stride())
        return new.copy_(t.detach()) if 0 not in t.stride() else t.clone(memory_format=torch.preserve_format)

    return tuple(one(t) for t in args)


def environment() -> dict[str, Any]:
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        except OSError:
            return ""

    nvcc = compilers.find_nvcc()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": nvcc.version if nvcc else None,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"python benchmarks/{' '.join(Path(a).name if '/' in a else a for a in sys.argv)}",
        "kernel_sources": __import__("ltx_inductor.kernels", fromlist=["x"]).source_digest()[:16],
    }


def line(name: str, r: dict[str, Any]) -> str:
    skip = ("bytes", "different_elements", "floor_best")
    values = "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in r.items() if k not in skip)
    return f"{name:<58} {values}" + (f"  DIFFERENT BITS {r['different_elements']}" if r["different_elements"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["production", "paths", "other"])
    parser.add_argument("--rows", nargs="+", default=list(PRODUCTION))
    parser.add_argument("--no-models", action="store_true", help="leave out eager and stock Inductor")
    parser.add_argument("--commit", default="", help="the git commit, where git is not at hand")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lib = floor_library()
    data: dict[str, Any] = {
        "environment": environment() | {"commit": options.commit or _commit()},
        "unit": "us per call",
    }

    production = {f"{row} {c} {rope_specs.DTYPES[t]}": (row, c, t) for c, t in CONTRACTS for row in options.rows}
    others = other_shapes()
    todo = [replace(PRODUCTION[r], contract=c, table_dtype=t) for r, c, t in production.values()]
    prepare([*todo, *others.values()])

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(data, indent=1) + "\n")

    if "production" in options.parts:
        data["production"] = {}
        for (name, (row, contract, _)), case in zip(production.items(), todo, strict=True):
            models = contract in ("bf16-chain", "fp32-rope") and not options.no_models
            r = measure(lib, case, models, [rope.AUTO], options.replays)
            if row in EARLIER and contract == "bf16-chain":
                peer, peer_floor = EARLIER[row]
                r["earlier_kernel"] = peer
                r["earlier_over_ours"] = round(peer / peer_floor * r["floor_best"] / r["ours"], 3)  # both in floors
            data["production"][name] = r
            print(line(name, r), flush=True)
            save()
    if "paths" in options.parts:  # where one CTA per token overtakes one CTA per row
        data["paths"] = {}
        for d in (64, 128):
            for seq in (126, 256, 512, 1024, 1536, 3072):
                case = Case(Side(seq), Side(seq), d)
                data["paths"][f"s{seq} d={d}"] = r = measure(
                    lib, case, False, [rope.AUTO, rope.PAIR, rope.ROW], options.replays
                )
                print(line(f"s{seq} d={d}", r), flush=True)
    if "other" in options.parts:
        data["other"] = {}
        for name, case in others.items():
            data["other"][name] = measure(lib, case, False, [rope.AUTO], options.replays)
            print(line(name, data["other"][name]), flush=True)
    save()


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
