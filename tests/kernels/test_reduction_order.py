"""The kernels sum in torch's order: proved on sums as expressions, so for every input at once.

A sum is written as an expression over accumulators; an accumulator is the tuple of the vectors (4 elements each) that
go into it, in order. Addition commutes in floating point and does nothing else; a missing accumulator is an exact zero.
"""

from __future__ import annotations

import numpy as np
import pytest

Expr = tuple  # ("acc", vector, ...) or ("add", Expr, Expr)
ZERO: Expr = ()


def add(a: Expr, b: Expr) -> Expr:
    if not a or not b:
        return a or b
    return ("add", *sorted((a, b), key=repr))


def xor(lanes: list[Expr], mask: int) -> list[Expr]:
    return [add(v, lanes[i ^ mask]) for i, v in enumerate(lanes)]


def torch_sum(norm: int) -> Expr:
    """vectorized_layer_norm_kernel: 128 threads, shfl_down 16..1, then (w0 + w2) + (w1 + w3)."""
    vectors = norm // 4
    threads: list[Expr] = [("acc", *range(t, vectors, 128)) if t < vectors else ZERO for t in range(128)]
    warps = []
    for w in range(4):
        lanes = threads[32 * w : 32 * w + 32]
        for offset in (16, 8, 4, 2, 1):
            lanes = [add(v, lanes[i + offset]) if i + offset < 32 else v for i, v in enumerate(lanes)]
        warps.append(lanes[0])
    return add(add(warps[0], warps[2]), add(warps[1], warps[3]))


def register_sum(norm: int, d: int) -> Expr:
    """store_warp_sums of rope_row_registers.cuh."""
    half, chunks = d // 8, norm // 512
    start = [i // half * (2 * half) + i % half for i in range(64)]  # the first-half vector of thread i in a chunk
    halves = [[("acc", *(s + k * half + 128 * n for n in range(chunks))) for s in start] for k in (0, 1)]
    sums: list[Expr] = [ZERO] * 4
    for warp in (0, 1):
        first, second = (h[32 * warp : 32 * warp + 32] for h in halves)
        level = 16
        while level > half:
            first, second = xor(first, level // 2), xor(second, level // 2)
            level //= 2
        if half <= 16:
            both = [add(a, b) for a, b in zip(first, second, strict=True)]
            level = half // 2
            while level:
                both = xor(both, level)
                level //= 2
            for lane in (0, 16):
                sums[(32 * warp + lane) // 16] = both[lane]
        else:
            for level in (16, 8, 4, 2, 1):
                first, second = xor(first, level), xor(second, level)
            sums[2 * warp], sums[2 * warp + 1] = first[0], second[0]
    return add(add(sums[0], sums[2]), add(sums[1], sums[3]))


def head_sum(d: int) -> list[Expr]:
    """head_sum of rope_per_head.cuh, in every lane of a group."""
    half = d // 8
    group = 4 if d <= 32 else 8 if d <= 64 else 16 if d <= 128 else 32
    first: list[Expr] = [("acc", lane) if lane < half else ZERO for lane in range(group)]
    second: list[Expr] = [("acc", lane + half) if lane < half else ZERO for lane in range(group)]
    low, high = list(first), list(second)
    if half != group:
        low = [second[(i - half) % group] if i >= half else first[i] for i in range(group)]
        high = [second[(i + group - half) % group] if i + group < 2 * half else ZERO for i in range(group)]
    if group < 32:
        low = [add(a, b) for a, b in zip(low, high, strict=True)]
        level = group // 2
        while level:
            low = xor(low, level)
            level //= 2
        return low
    low, high = xor(low, 16), xor(high, 16)
    warp = low[:16] + high[16:]
    for level in (8, 4, 2, 1):
        warp = xor(warp, level)
    return xor(warp, 16)


@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("norm", [512, 1024, 2048, 4096, 5120, 8192])
def test_row_in_registers(norm: int, d: int) -> None:
    assert register_sum(norm, d) == torch_sum(norm)


@pytest.mark.parametrize("d", range(32, 257, 8))
def test_per_head(d: int) -> None:
    assert set(map(repr, head_sum(d))) == {repr(torch_sum(d))}


@pytest.mark.parametrize("n", [40, 96, 160, 1920, 3072, 16376])
def test_division_by_the_row_length_is_correctly_rounded(n: int) -> None:
    """mean_of of rope_math.cuh against a true division, for every mantissa (an exponent only scales the result)."""
    total = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    inverse = np.float32(1) / np.float32(n)
    quotient = total * inverse
    remainder = (total.astype(np.float64) - quotient.astype(np.float64) * n).astype(np.float32)  # exact, as in the fma
    corrected = (quotient + remainder.astype(np.longdouble) * np.longdouble(inverse)).astype(np.float32)
    assert np.array_equal(corrected, total / np.float32(n))
