"""One rank of test_distributed.py: what torch.distributed does around the attention, on gloo and the CPU.

    RANK=0 WORLD_SIZE=2 ... python tests/distributed_child.py OUT

On GPUs, with NCCL, it is a script of its own; every rank then writes OUT.<rank> and says whether all is as expected:

    BACKEND=nccl torchrun --nproc-per-node 2 tests/distributed_child.py OUT

Ranks beyond the number of GPUs share them. NCCL refuses two ranks on one GPU of a host, so each rank then says that it
is a host of its own (NCCL_HOSTID), and what they send goes through sockets instead of NVLink.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ltx_inductor
from ltx_inductor.explainer import _eager
from tests.end_to_end_child import QueriesAndKeys

BACKEND = os.environ.get("BACKEND", "gloo")
DEVICE = torch.device("cpu")
if BACKEND == "nccl":
    DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
HEADS, DIM, TOKENS = 4, 32, 64
ROW = HEADS * DIM
OPTIONS = {"ltx_inductor.cpu": True}


def rotate(n, cos, sin):
    """n [B, S, H*D], cos and sin [B, H, S, D/2] in fp32; [B, H, S, D], rounded once."""
    a, b = n.unflatten(-1, (-1, DIM)).transpose(1, 2).float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(n.dtype)


def heads(t):
    return t.unflatten(-1, (-1, DIM)).transpose(1, 2)


class SequenceParallel(nn.Module):
    """Queries of the own tokens, keys and values of all: gathered after the rotation with the own cos/sin."""

    def __init__(self):
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(ROW, eps=1e-6), nn.RMSNorm(ROW, eps=1e-6)

    def forward(self, q, k, v, cos, sin):
        q, k, v = rotate(self.norm_q(q), cos, sin), rotate(self.norm_k(k), cos, sin), heads(v)
        everybody = dist.group.WORLD
        k, v = (collectives.all_gather_tensor(t.contiguous(), 2, everybody) for t in (k, v))
        return q, k, scaled_dot_product_attention(q, k, v)


def all_reduce(squares):
    return collectives.all_reduce(squares, "sum", dist.group.WORLD)


def all_reduce_in_place(squares):
    dist.all_reduce(squares)
    return squares


def all_gather(squares):
    everybody = [torch.empty_like(squares) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, squares)
    return torch.stack(everybody).sum(0)


@torch.library.custom_op("ltx_test::all_reduce", mutates_args=())
def engines_all_reduce(squares: torch.Tensor) -> torch.Tensor:
    """An engine's own, as vLLM has one: for the graph an op like any other."""
    return all_reduce_in_place(squares.clone())


engines_all_reduce.register_fake(torch.empty_like)
COMBINE = {f.__name__: f for f in (all_reduce, all_reduce_in_place, all_gather)} | {"engine": engines_all_reduce}


class TensorParallel(nn.Module):
    """Each rank has some heads of every token; the norm is over all of them, so the sums of squares are combined."""

    def __init__(self, combine):
        super().__init__()
        self.combine = combine

    def forward(self, x, weight, cos, sin):
        squares = self.combine(x.float().pow(2).sum(-1, keepdim=True))
        n = (x.float() * torch.rsqrt(squares / ROW + 1e-6)).to(x.dtype) * weight
        return rotate(n, cos, sin)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(ROW, 3 * ROW, bias=False)
        self.norm_q, self.norm_k = nn.RMSNorm(ROW, eps=1e-6), nn.RMSNorm(ROW, eps=1e-6)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(x).chunk(3, -1)
        out = scaled_dot_product_attention(rotate(self.norm_q(q), cos, sin), rotate(self.norm_k(k), cos, sin), heads(v))
        return x + out.transpose(1, 2).flatten(2)


def rand(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def tables():
    return torch.randn(2, 1, HEADS, TOKENS, DIM // 2, device=DEVICE).unbind(0)


def same(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def sequence_parallel(rank, world):
    torch.manual_seed(0)  # every rank draws the whole, and takes its part
    (q, k, v), (cos, sin) = rand(3, 1, TOKENS, ROW), tables()
    model = SequenceParallel().to(DEVICE, torch.bfloat16).eval()
    mine = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    local = [t[:, mine] for t in (q, k, v)] + [t[:, :, mine] for t in (cos, sin)]
    got_q, got_k, got = torch.compile(model, backend="ltx", options=OPTIONS)(*local)
    want_q, want_k = rotate(model.norm_q(q), cos, sin), rotate(model.norm_k(k), cos, sin)
    want = scaled_dot_product_attention(want_q, want_k, heads(v))[:, :, mine]
    equal = [same(got_q, want_q[:, :, mine]), same(got_k, want_k), torch.allclose(got, want, atol=2e-2)]
    return {"equal": equal, "report": ltx_inductor.last_report().to_dict()}


def tensor_parallel(rank, world, combine):
    torch.manual_seed(0)
    x, weight, (cos, sin) = rand(1, TOKENS, ROW), rand(ROW), tables()
    mine, own = (
        slice(rank * ROW // world, (rank + 1) * ROW // world),
        slice(rank * HEADS // world, (rank + 1) * HEADS // world),
    )
    args = [x[..., mine].contiguous(), weight[mine], cos[:, own], sin[:, own]]
    got = torch.compile(TensorParallel(COMBINE[combine]), backend="ltx", options=OPTIONS)(*args)
    want = rotate(rms_norm(x, (ROW,), weight, 1e-6), cos, sin)[:, own]
    return {"close": torch.allclose(got, want, rtol=2e-2, atol=2e-2), "report": ltx_inductor.last_report().to_dict()}


def dtensors(rank, world):
    """Queries and keys as DTensors, with their tokens over the ranks; the same model, which is rewritten without."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE.type, (world,))
    x, weight, (cos, sin) = rand(1, TOKENS, ROW), rand(ROW), tables()
    args = (x, weight, cos, sin)
    places = (Shard(1), Replicate(), Shard(2), Shard(2))
    given = [distribute_tensor(t, mesh, [place]) for t, place in zip(args, places, strict=True)]

    def model(x, weight, cos, sin):
        return rotate(rms_norm(x, (ROW,), weight, 1e-6), cos, sin)

    got = torch.compile(model, backend="ltx", options=OPTIONS)(*given).full_tensor()
    return {"close": torch.allclose(got, model(*args), rtol=2e-2), "report": ltx_inductor.last_report().to_dict()}


def wrapped(rank, world, wrap):
    """A compiled block in DDP or FSDP2, against the same block alone."""
    torch.manual_seed(0)
    block = Block().to(DEVICE, torch.bfloat16).eval()
    x, (cos, sin) = rand(1, TOKENS, ROW), tables()
    want = block(x, cos, sin)
    if wrap == "ddp":
        model = torch.compile(DistributedDataParallel(block), backend="ltx", options=OPTIONS)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        block.compile(backend="ltx", options=OPTIONS)
        model = fully_shard(block, mesh=init_device_mesh(DEVICE.type, (world,)))
    return {"equal": same(model(x, cos, sin), want), "report": ltx_inductor.last_report().to_dict()}


def shared_caches(rank, world):
    """Rank 0 compiles, code and all, while the others wait for it; then they find what it left."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = QueriesAndKeys(64).to(DEVICE, torch.bfloat16)
    q, k = rand(2, 1, 16, 64)
    cos, sin = torch.randn(2, 1, 16, 2, 16, device=DEVICE).transpose(2, 3)
    for turn in range(world):
        if turn == rank:
            got = torch.compile(model, backend="ltx", options=OPTIONS)(q, k, cos, sin)
        dist.barrier()
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    equal = all(same(a, b) for a, b in zip(got, model(q, k, cos, sin), strict=True))
    return {"hits": hits, "equal": equal, "report": ltx_inductor.last_report().to_dict()}


def verdict(found):
    """One word a case, for people."""
    good = {
        "sequence_parallel": all(found["sequence_parallel"]["equal"]),
        **{name: case["close"] and not sides(case) for name, case in found.items() if "close" in case},
        **{name: found[name]["equal"] and sides(found[name]) == 2 for name in ("ddp", "fsdp2", "shared_caches")},
    }
    return ", ".join(f"{name} {'ok' if fine else 'WRONG'}" for name, fine in good.items())


def sides(case):
    return sum(len(g["sites"]) for g in case["report"]["graphs"])


def main() -> None:
    from torch._inductor import compile_fx

    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    real, found = compile_fx.compile_fx, {}
    cases = {
        "sequence_parallel": sequence_parallel,
        **{f"tensor_parallel {name}": partial(tensor_parallel, combine=name) for name in COMBINE},
        "dtensors": dtensors,
        "ddp": partial(wrapped, wrap="ddp"),
        "fsdp2": partial(wrapped, wrap="fsdp2"),
        "shared_caches": shared_caches,
    }
    with torch.no_grad():
        for name, case in cases.items():
            torch._dynamo.reset()
            if (
                name != "shared_caches" and DEVICE.type == "cpu"
            ):  # all but code generation, which takes most of the time
                compile_fx.compile_fx = partial(real, inner_compile=_eager)
                with torch._inductor.config.patch(force_disable_caches=True):
                    found[name] = case(rank, world)
            else:
                compile_fx.compile_fx = real
                found[name] = case(rank, world)
            dist.barrier()
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(found))
    print(f"rank {rank} of {world} on {DEVICE}: {verdict(found)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
