"""What can be said of the fast neighborhood-attention kernel without a GPU: its numbers, its compile, its answers."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ltx_inductor.kernels import compilers, fna
from ltx_inductor.kernels.sources import csrc_dir

SIZES = range(2, 16)
TUNED = [(11, 11, 11), (3, 7, 7), (3, 5, 5)]
NVCC = compilers.find_nvcc()


def test_python_and_the_header_agree_on_every_window(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "print.c"
    names = ["BOX_W(ww)", "BOX_H(wh, ww)", "MIDDLE(wh, ww)", "WARPGROUPS(wt)", "CTAS(wt, wh, ww)"]
    names += ["STAGES(wt, wh, ww)", "SMEM_BYTES(wt, wh, ww)", "THREADS(wt)"]
    values = ", ".join(f"(int)LTX_FNA_{n}" for n in names)
    source.write_text(
        f'#include <stdio.h>\n#include "{csrc_dir() / "fna_config.h"}"\nint main(void) {{\n'
        "for (int wt = 2; wt < 16; ++wt) for (int wh = 2; wh < 16; ++wh) for (int ww = 2; ww < 16; ++ww)\n"
        f'printf("{" ".join(["%d"] * len(names))}\\n", {values});\n}}\n'
    )
    subprocess.run([compiler, source, "-o", tmp_path / "print"], check=True)
    lines = subprocess.run([tmp_path / "print"], check=True, capture_output=True, text=True).stdout.splitlines()
    for line, window in zip(lines, itertools.product(SIZES, SIZES, SIZES), strict=True):
        s = fna.Shape.of(window)
        mine = (s.box_w, s.box_h, s.middle, s.warpgroups, s.ctas, s.stages, s.shared_bytes, s.threads)
        assert tuple(map(int, line.split())) == mine, window


@pytest.mark.parametrize("window", itertools.product((2, 5, 6, 9, 12, 13, 15), repeat=3))
def test_a_window_fits_the_machine(window: tuple[int, int, int]) -> None:
    s = fna.Shape.of(window)
    assert s.box_w >= window[2] + 3
    assert s.box_h >= window[1] + 3
    assert s.box_h * s.box_w % 16 == 0
    assert s.stages >= 1
    assert (s.shared_bytes + 1024) * s.ctas <= 228 * 1024
    assert s.shared_bytes <= 227 * 1024
    assert s.threads * s.ctas <= 2048


@pytest.mark.parametrize("window", [(11, 11, 11), (3, 5, 5), (12, 3, 3), (13, 11, 11), (15, 15, 15), (9, 9, 9)])
def test_the_split_of_t_lets_a_consumer_finish_a_tile_before_its_next(window: tuple[int, int, int]) -> None:
    """But for the last tile of an item, whose slices come again (`resent` in csrc/fna.cu)."""
    wt = window[0]
    consumers = fna.Shape.of(window).warpgroups

    def start(i: int, n: int) -> int:
        return min(max(min(i, n - 1) - wt // 2, 0), n - wt)

    for n, columns in itertools.product(range(wt, 80), (1, 100, 10000)):
        tiles = -(-n // 4)
        part = fna.tiles_per_item(n, columns, window, 132)
        assert part >= 1
        for first in range(0, tiles, part):
            last = min(first + part, tiles) - 1
            for tile in range(first + consumers, last):
                before = start(4 * (tile - consumers) + 3, n) + wt
                assert before <= start(4 * tile, n), (n, part, tile)


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("window", [*TUNED, (15, 15, 15), (2, 2, 2)], ids=str)
def test_compiles_for_hopper(window: tuple[int, int, int], tmp_path: Path) -> None:
    assert NVCC is not None
    flags = [f"-DLTX_{axis}={size}" for axis, size in zip(("WT", "WH", "WW"), window, strict=True)]
    command = [NVCC.path, "-cubin", "-arch=sm_90a", "-O3", "-std=c++17", "-Xptxas", "-v", *flags]
    command += [str(csrc_dir() / "fna.cu"), "-o", str(tmp_path / "fna.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not re.search(r"C75\d\d", said), said  # wgmma serialised: registers, or a branch that is not uniform
    if window in TUNED:  # a few bytes outside of the loop over slices
        assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", said)) <= 32, said


ACCEPTED = {"arch": (9, 0), "dtype": torch.bfloat16, "head_dim": 64, "kernel_size": (11, 11, 11), "exact": False}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"kernel_size": (2, 15, 3)}, None),
        ({"arch": (8, 0)}, "compute capability 8.0; expected 9.0"),
        ({"arch": (10, 0)}, "compute capability 10.0"),
        ({"dtype": torch.float16}, "torch.float16; expected torch.bfloat16"),
        ({"head_dim": 128}, "head_dim 128; expected 64"),
        ({"kernel_size": (1, 11, 11)}, "(1, 11, 11); expected three sizes from 2 to 15"),
        ({"kernel_size": (11, 16, 11)}, "(11, 16, 11)"),
        ({"exact": True}, None),
        ({"exact": True, "head_dim": 128}, "no neighborhood-attention kernel with NATTEN's bits for head_dim 128"),
    ],
)
def test_what_there_is_a_kernel_for(change: dict[str, object], said: str | None) -> None:
    answer = fna.unsupported(**(ACCEPTED | change))  # type: ignore[arg-type]
    assert (answer is None) if said is None else (answer is not None and said in answer)


def test_what_a_launch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, strides and boxes of views of a packed projection, batch of 2 behind T."""
    maps: list[tuple[object, ...]] = []
    monkeypatch.setattr(fna.driver, "tensor_map", lambda *args: maps.append(args))
    monkeypatch.setattr(fna, "_multiprocessors", lambda device: 132)
    fna._arguments.cache_clear()
    packed = torch.empty(2, 12, 13, 16, 3 * 4 * 64, dtype=torch.bfloat16)
    q, k, v = (x.unflatten(-1, (4, 64)) for x in packed.chunk(3, dim=-1))
    params, _, blocks = fna._arguments((11, 11, 11), 0, *(fna._described(x) for x in (q, k, v)))
    fna._arguments.cache_clear()
    assert list(params.sizes) == [2, 12, 13, 16, 4]
    assert [list(s) for s in params.strides] == [[12 * 13 * 16 * 768, 13 * 16 * 768, 16 * 768, 768, 64]] * 3
    assert list(params.tensors)[:3] == [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    assert params.segment * params.segments >= 3  # tiles of T
    assert blocks == min(132, 4 * 4 * 4 * 2 * params.segments)
    address, sizes, steps, box = maps[0]
    assert (address, sizes, box) == (q.data_ptr(), (64, 4, 16, 24, 13), (64, 1, 4, 4, 4))
    assert steps == (128, 2 * 768, 2 * 13 * 16 * 768, 2 * 16 * 768)
    assert [m[3] for m in maps[1:]] == [(64, 1, 16, 1, 1), (64, 1, 16, 8, 1)] * 2
    assert maps[1][1] == (64, 4, 16, 13, 24)
