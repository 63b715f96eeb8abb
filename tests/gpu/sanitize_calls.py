"""What sanitize.sh runs under compute-sanitizer: every kernel, on small tensors of awkward shapes and strides."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from ltx_inductor.kernels import axial_gate, fna, rope, rope_axial
from ltx_inductor.kernels.rope_axial import Spec
from tests.gpu.rope_cases import FP32, Case, Side, make, prepare, run

PATHS = (rope.AUTO, rope.PAIR, rope.ROW, rope.ANY)
ROW = Case(Side(5, heads=4), Side(5, heads=4), 128)
ODD = Case(Side(3, heads=3), Side(3, heads=3), 40)
HEADS = Case(Side(7, heads=3), Side(7, heads=3), 64, per_head=True)
CALLS = [
    ROW,
    ODD,
    HEADS,
    *(replace(base, k=None) for base in (ROW, ODD, HEADS)),
    *(replace(base, layout="bhsd") for base in (ROW, HEADS)),
    *(replace(base, contract="fp32-rope", table_dtype=FP32) for base in (ROW, ODD, HEADS)),
    *(replace(base, contract="fp32-all-result-muladd", table_dtype=FP32) for base in (ROW, ODD, HEADS)),
    *(replace(base, x="odd", tables="odd") for base in (ROW, ODD, HEADS)),
    *(replace(base, x="slice", tables="expanded") for base in (ROW, ODD, HEADS)),
    *(
        replace(base, q=Side(1, heads=base.q.heads, batch=3), k=Side(1, heads=base.q.heads, batch=3))
        for base in (ROW, ODD)
    ),
    replace(ROW, shared=False, k=Side(2, heads=4)),
    replace(HEADS, k=Side(7, heads=1), head_dim=248, tables="head1"),  # tables that serve any number of heads
    Case(Side(2, heads=64), Side(2, heads=64), 256),  # the largest row: 16384
    Case(Side(130, heads=32), Side(130, heads=32), 128),
]
AXIAL = [  # configuration, token axes and heads, scale
    (Spec("fp32-rope-muladd", torch.bfloat16, (8, 12, 12)), (1, 3, 5, 7), 4, 0.125),
    (Spec("fp32-rope-muladd", torch.bfloat16, (8, 12, 12)), (2, 2, 3, 9), 1, 72**-0.5),
    (Spec("fp32-rope", torch.float16, (3, 5, 8)), (2, 5, 3), 3, 1.0),
    (Spec("fp32-rope", torch.bfloat16, (32, 48, 48)), (2, 3, 3, 3), 5, 72**-0.5),
    (Spec("fp32-rope-muladd", torch.bfloat16, (12, 16, 20)), (1, 1, 1, 11), 2, 0.125),
]
GRIDS = [((4, 5, 9), (3, 3, 3)), ((11, 11, 11), (11, 11, 11)), ((12, 7, 33), (11, 5, 7)), ((2, 2, 2), (2, 2, 2))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", action="store_true", help="only build the kernels")
    build_only = parser.parse_args().build
    prepare(CALLS)
    arch, launched = torch.cuda.get_device_capability(), 0
    neighborhoods = []
    for exact, (grid, window) in itertools.product((False, True), GRIDS):
        kernel: Any = {"dtype": torch.bfloat16, "head_dim": 64, "kernel_size": window, "exact": exact}
        if (exact and not find_spec("tilelang")) or fna.unsupported(arch=arch, **kernel):
            continue
        missing = fna.prepare(arch, device=0, **kernel)
        assert missing is None, missing
        neighborhoods.append((grid, window, exact))
    for spec, *_ in AXIAL:
        missing = rope_axial.prepare(arch, spec, 0)
        assert missing is None, missing
    if build_only:
        return
    for spec, grid, heads, scale in AXIAL:
        x, *rest = axial_gate.draw(spec, grid, heads, 0)
        apart = torch.nn.functional.pad(x, (0, 12))[..., : x.shape[-1]]
        for source in (x, apart):
            launched += rope_axial.launch(source, *rest, 1e-6, scale, spec.contract) is not None
    for case, path in itertools.product(CALLS, PATHS):
        launched += run(case, make(case, 0), path) is not None
    for grid, window, exact in neighborhoods:
        q, k, v = (torch.randn(1, *grid, 2, 64, device="cuda").bfloat16() for _ in "qkv")
        fna.launch(q, k, v, window, 0.125, exact)
        launched += 1
    torch.cuda.synchronize()
    wanted = len(CALLS) * len(PATHS) + 2 * len(AXIAL) + len(neighborhoods)  # 122 with both schedules of na3d
    assert launched == wanted, f"launched {launched} of {wanted} calls"
    print(f"launched {launched} calls")


if __name__ == "__main__":
    main()
