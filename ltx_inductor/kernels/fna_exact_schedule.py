# mypy: ignore-errors
# TileLang's programs are Python syntax with another meaning: their annotations are values.
"""The TileLang program of 3D neighborhood attention with NATTEN's bits (schedule `exact`), for sm_90a.

One CTA has one query tile (4x4x4) of one head: 4 warps that compute, one that loads. KV tiles (4x4x8) come by TMA from
the un-permuted tensors, in NATTEN's order: T fastest, then H, then W; inside a tile too, but with W slowest, so that a
k16 step of P V is one w-plane. Of every KV tile only the planes that some query of the tile sees are loaded and
multiplied, rounded up to 1, 5 or 8 planes (a window of 11 needs exactly those): the others add zeros. The box of a
plane is zero-filled past the end of the grid. The masks come from the tables of fna_tiles; the arithmetic between the
two products is csrc/fna_exact.cuh. Shared memory: Q 8 KB, two stages of K and V 64 KB; three CTAs on an SM.

Grid, heads and tables are dynamic: one kernel serves every shape and window.
"""

import logging
from typing import Any

import tilelang
import tilelang.language as T

from ltx_inductor.kernels.sources import csrc_dir

BF16, F32, I32 = T.bfloat16, T.float32, T.int32
STAGES = 2
PRODUCER = 128  # its first thread
TARGET = {"kind": "cuda", "arch": "sm_90a"}


def passes():
    """What TileLang must not do by itself: specialise warps, add barriers, warn about boxes past the end."""
    key = tilelang.PassConfigKey
    return {
        key.TL_ENABLE_FAST_MATH: True,
        key.TL_DISABLE_WARP_SPECIALIZED: True,
        key.TL_DISABLE_THREAD_STORAGE_SYNC: True,
        key.TL_DISABLE_OUT_OF_BOUND_WARNING: True,
        key.TL_DISABLE_BUFFER_INIT_CHECK: True,  # it does not see that TMA copies write shared memory
    }


@T.macro
def load_box(planes, x, box, stage, phase, full, empty, w, h, t, head, tx):
    T.barrier_wait(empty[stage], phase ^ 1)
    T.tma_copy(
        x[w : w + planes, h : h + 4, t : t + 4, head, 0:64],
        box[stage, 0:planes, 0:4, 0:4, 0:64],
        barrier=full[stage],
        leader_scope_threads=32,
    )
    if tx == PRODUCER:
        T.barrier_arrive(full[stage])


@T.macro
def load(planes, k, v, k_box, v_box, stage, phase, k_full, v_full, k_empty, v_empty, w, h, t, head, tx):
    load_box(planes, k, k_box, stage, phase, k_full, k_empty, w, h, t, head, tx)
    load_box(planes, v, v_box, stage, phase, v_full, v_empty, w, h, t, head, tx)


@T.macro
def attend(
    planes, first, q, k, v, s, p, o, m, total, stage, phase, k_full, v_full, k_empty, v_empty, mt, mh0, mh1, mw,
    plane0, scale, tx
):  # fmt: skip
    T.barrier_wait(k_full[stage], phase)
    T.wgmma_gemm(
        q, k[stage, 0 : planes * 16, 0:64], s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
    )
    T.wait_wgmma(0)
    if tx % 32 == 0:
        T.barrier_arrive(k_empty[stage])
    T.call_extern(
        "handle",
        f"ltx_fna::softmax<{planes}, {'true' if first else 'false'}>",
        *(s.data, p.data, o.data, m.data, total.data, mt, mh0, mh1, mw, plane0, scale),
    )
    T.barrier_wait(v_full[stage], phase)
    T.wgmma_gemm(p, v[stage, 0 : planes * 16, 0:64], o, policy=T.GemmWarpPolicy.FullRow, clear_accum=first)
    T.wait_wgmma(0)
    if tx % 32 == 0:
        T.barrier_arrive(v_empty[stage])


@T.macro
def advance(stage: T.Ref, phase: T.Ref, ti: T.Ref, hi: T.Ref, nt):
    stage = stage + 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    ti = ti + 1
    if ti == nt:
        ti = 0
        hi = hi + 1


def program():
    """The prim_func.

    q, k, v as [W, H, T, heads, 64] views of contiguous [T, H, W, heads, 64] tensors; out; the tables of fna_tiles
    (order, and one per axis); the fp32 factor from scores to exponents of 2.
    """
    t_size, h_size, w_size, heads = (T.dynamic(n) for n in ("t_size", "h_size", "w_size", "heads"))
    tiles, t_tiles, h_tiles, w_tiles = (T.dynamic(n) for n in ("tiles", "t_tiles", "h_tiles", "w_tiles"))
    shape = [w_size, h_size, t_size, heads, 64]
    strides = [heads * 64, w_size * heads * 64, h_size * w_size * heads * 64, 64, 1]

    @T.prim_func
    def fna_exact(
        q: T.StridedTensor(shape, strides, BF16),
        k: T.StridedTensor(shape, strides, BF16),
        v: T.StridedTensor(shape, strides, BF16),
        out: T.Tensor([t_size, h_size, w_size, heads, 64], BF16),
        order: T.Tensor([tiles, 4], I32),
        axis_t: T.Tensor([t_tiles, 8], I32),
        axis_h: T.Tensor([h_tiles, 8], I32),
        axis_w: T.Tensor([w_tiles, 8], I32),
        scale: T.float32,
    ):
        with T.Kernel(tiles, heads, threads=PRODUCER + 32) as (tile, head):
            T.import_source((csrc_dir() / "fna_exact.cuh").read_text().replace("#pragma once", ""))
            T.annotate_min_blocks_per_sm(3)
            q_box = T.alloc_shared([4, 4, 4, 64], BF16)
            k_box = T.alloc_shared([STAGES, 8, 4, 4, 64], BF16)
            v_box = T.alloc_shared([STAGES, 8, 4, 4, 64], BF16)
            q_rows = T.reshape(q_box, [64, 64])
            k_rows = T.reshape(k_box, [STAGES, 128, 64])
            v_rows = T.reshape(v_box, [STAGES, 128, 64])
            q_full = T.alloc_barrier([1])
            k_full, v_full = T.alloc_barrier([1] * STAGES), T.alloc_barrier([1] * STAGES)
            k_empty, v_empty = T.alloc_barrier([4] * STAGES), T.alloc_barrier([4] * STAGES)
            tx = T.get_thread_binding()
            qt, qh, qw = T.alloc_var(I32), T.alloc_var(I32), T.alloc_var(I32)
            nt, nh, nw = T.alloc_var(I32), T.alloc_var(I32), T.alloc_var(I32)
            w0, low, high = T.alloc_var(I32), T.alloc_var(I32), T.alloc_var(I32)
            stage, phase, ti, hi = T.alloc_var(I32), T.alloc_var(I32), T.alloc_var(I32), T.alloc_var(I32)
            # of one column of KV tiles: how many tiles, the planes that are seen, the first plane loaded
            count, seen, plane0 = T.alloc_var(I32), T.alloc_var(I32), T.alloc_var(I32)
            qt = order[tile, 0]
            qh = order[tile, 1]
            qw = order[tile, 2]
            nt = axis_t[qt, 1]
            nh = axis_h[qh, 1]
            nw = axis_w[qw, 1]
            w0 = axis_w[qw, 0] * 8
            low = axis_w[qw, 2]
            high = axis_w[qw, 3]
            stage = 0
            phase = 0
            ti = 0
            hi = 0
            if tx >= PRODUCER:
                t0, h0 = T.alloc_var(I32), T.alloc_var(I32)
                t0 = axis_t[qt, 0] * 4
                h0 = axis_h[qh, 0] * 4
                T.tma_copy(
                    q[qw * 4 : qw * 4 + 4, qh * 4 : qh * 4 + 4, qt * 4 : qt * 4 + 4, head, 0:64],
                    q_box[0:4, 0:4, 0:4, 0:64],
                    barrier=q_full[0],
                    leader_scope_threads=32,
                )
                if tx == PRODUCER:
                    T.barrier_arrive(q_full[0])
                load(8, k, v, k_box, v_box, stage, phase, k_full, v_full, k_empty, v_empty, w0, h0, t0, head, tx)
                advance(stage, phase, ti, hi, nt)
                for wi in T.serial(nw):
                    plane0 = T.max(low - w0 - 8 * wi, 0)
                    seen = T.min(high - w0 - 8 * wi, 8) - plane0
                    plane0 = T.if_then_else(seen > 5, 0, T.if_then_else(seen > 1, T.min(plane0, 3), plane0))
                    count = nt * nh - T.if_then_else(wi == 0, 1, 0)
                    for _i in T.serial(T.if_then_else(seen > 5, count, 0)):
                        load(8, k, v, k_box, v_box, stage, phase, k_full, v_full, k_empty, v_empty,
                             w0 + 8 * wi, h0 + 4 * hi, t0 + 4 * ti, head, tx)  # fmt: skip
                        advance(stage, phase, ti, hi, nt)
                    for _i in T.serial(T.if_then_else(seen > 5 or seen < 2, 0, count)):
                        load(5, k, v, k_box, v_box, stage, phase, k_full, v_full, k_empty, v_empty,
                             w0 + 8 * wi + plane0, h0 + 4 * hi, t0 + 4 * ti, head, tx)  # fmt: skip
                        advance(stage, phase, ti, hi, nt)
                    for _i in T.serial(T.if_then_else(seen < 2, count, 0)):
                        load(1, k, v, k_box, v_box, stage, phase, k_full, v_full, k_empty, v_empty,
                             w0 + 8 * wi + plane0, h0 + 4 * hi, t0 + 4 * ti, head, tx)  # fmt: skip
                        advance(stage, phase, ti, hi, nt)
                    hi = 0
            else:
                s8, p8 = T.alloc_fragment([64, 128], F32), T.alloc_fragment([64, 128], BF16)
                s5, p5 = T.alloc_fragment([64, 80], F32), T.alloc_fragment([64, 80], BF16)
                s1, p1 = T.alloc_fragment([64, 16], F32), T.alloc_fragment([64, 16], BF16)
                o = T.alloc_fragment([64, 64], F32)
                m, total = T.alloc_local([2], F32), T.alloc_local([2], F32)
                warp = T.alloc_var(I32)
                warp = T.shfl_sync(tx // 32, 0)  # uniform, or wgmma is serialised
                mt, mh0, mh1, mw = T.alloc_var(I32), T.alloc_var(I32), T.alloc_var(I32), T.alloc_var(I32)
                mt = axis_t[qt, 4 + (tx // 4) % 4]
                mh0 = axis_h[qh, 4 + (tx % 32) // 16]
                mh1 = axis_h[qh, 6 + (tx % 32) // 16]
                mw = axis_w[qw, 4 + warp]
                m[0] = -T.infinity(F32)
                m[1] = -T.infinity(F32)
                total[0] = 0
                total[1] = 0
                T.barrier_wait(q_full[0], 0)
                attend(8, True, q_rows, k_rows, v_rows, s8, p8, o, m, total, stage, phase, k_full, v_full, k_empty,
                       v_empty, mt, mh0, mh1, mw, 0, scale, tx)  # fmt: skip
                advance(stage, phase, ti, hi, nt)
                for wi in T.serial(nw):
                    plane0 = T.max(low - w0 - 8 * wi, 0)
                    seen = T.min(high - w0 - 8 * wi, 8) - plane0
                    plane0 = T.if_then_else(seen > 5, 0, T.if_then_else(seen > 1, T.min(plane0, 3), plane0))
                    count = nt * nh - T.if_then_else(wi == 0, 1, 0)
                    for _i in T.serial(T.if_then_else(seen > 5, count, 0)):
                        attend(8, False, q_rows, k_rows, v_rows, s8, p8, o, m, total, stage, phase, k_full, v_full,
                               k_empty, v_empty, mt >> (4 * ti), mh0 >> (4 * hi), mh1 >> (4 * hi), mw >> (8 * wi), 0,
                               scale, tx)  # fmt: skip
                        advance(stage, phase, ti, hi, nt)
                    for _i in T.serial(T.if_then_else(seen > 5 or seen < 2, 0, count)):
                        attend(5, False, q_rows, k_rows, v_rows, s5, p5, o, m, total, stage, phase, k_full, v_full,
                               k_empty, v_empty, mt >> (4 * ti), mh0 >> (4 * hi), mh1 >> (4 * hi),
                               mw >> (8 * wi + plane0), plane0, scale, tx)  # fmt: skip
                        advance(stage, phase, ti, hi, nt)
                    for _i in T.serial(T.if_then_else(seen < 2, count, 0)):
                        attend(1, False, q_rows, k_rows, v_rows, s1, p1, o, m, total, stage, phase, k_full, v_full,
                               k_empty, v_empty, mt >> (4 * ti), mh0 >> (4 * hi), mh1 >> (4 * hi),
                               mw >> (8 * wi + plane0), plane0, scale, tx)  # fmt: skip
                        advance(stage, phase, ti, hi, nt)
                    hi = 0
                T.call_extern(
                    "handle",
                    "ltx_fna::store",
                    *(out.data, o.data, total.data, qt, qh, qw, t_size, h_size, w_size, heads, head),
                )

    return fna_exact


def compiled() -> Any:
    """The kernel, from TileLang's cache or compiled by nvcc. Raises what TileLang raises."""
    logger = logging.getLogger("tilelang")
    level = logger.level
    logger.setLevel(logging.WARNING)  # it tells of every compile on stdout, where `--json` writes
    try:
        return tilelang.compile(program(), out_idx=None, target=TARGET, pass_configs=passes())
    finally:
        logger.setLevel(level)
