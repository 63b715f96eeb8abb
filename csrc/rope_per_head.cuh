// RMSNorm per head + split RoPE (Qwen3, Gemma3 style): both halves of a rotation pair in one thread, no shared memory.
//
// group   G = 4, 8, 16 or 32 lanes hold one head: lane l < D / 8 has vector l (4 elements) and its partner l + D / 8
// warp    32 / G groups on neighbouring heads, of HEAD_UNROLL tokens, of q and of k if they share cos/sin (ROWS = 2); all
//         its loads are in flight together. cos/sin that are the same for all heads are hits in L1
// grid    x: warps of q, then warps of k (ROWS = 1), four to a block, neighbouring heads first;  y: batch
// sum     torch gives a row of head_dim <= 256 to its threads 0..63, one vector each: acc of four fmas; warp tree
//         16, 8, 4, 2, 1, whose levels above what head_dim fills add zeros (exact: squares are never -0); then w0 + w1.
//         Lane l first collects the sums of vectors l and l + G; they meet at level G, or, for G = 32, as w0 + w1
// bytes   every byte of x and out moves once, and of cos/sin too unless heads share them
#pragma once
#include "rope_math.cuh"

constexpr int GROUP = LTX_HEAD_GROUP(D);
constexpr int UNROLL = LTX_HEAD_UNROLL;

// Sum of squares of a head, in every lane. first and second: of this lane's two vectors; 0 where it has none.
__device__ __forceinline__ float head_sum(float first, float second, int lane) {
  float low = first, high = second;
  if constexpr (HALF_VECS != GROUP) {  // head_dim is no power of two: vector HALF_VECS + l sits in lane l
    const float a = __shfl_sync(0xffffffffu, second, lane - HALF_VECS, GROUP);
    const float b = __shfl_sync(0xffffffffu, second, lane + GROUP - HALF_VECS, GROUP);
    if (lane >= HALF_VECS) low = a;
    high = lane + GROUP < 2 * HALF_VECS ? b : 0.f;
  }
  if constexpr (GROUP < 32) {
    low = __fadd_rn(low, high);
#pragma unroll
    for (int level = GROUP / 2; level > 0; level /= 2) low = add_lane(low, level);
    return low;
  }
  low = add_lane(low, 16), high = add_lane(high, 16);  // two warps of torch: from here on each has half of the lanes
  float warp = lane < 16 ? low : high;
#pragma unroll
  for (int level = 8; level > 0; level /= 2) warp = add_lane(warp, level);
  return add_lane(warp, 16);
}

template <int ROWS, bool kVectors>
__device__ __forceinline__ void rope_per_head(const LtxRopeParams& p) {
  const int lane = threadIdx.x % GROUP, b = blockIdx.y, e = lane * 4;
  const int blocks_q = LTX_HEAD_BLOCKS(p.side[0].seq, p.side[0].heads, D);
  const bool later = ROWS == 1 && (int)blockIdx.x >= blocks_q;
  const LtxRopeSide& tables = p.side[later];
  if (ROWS == 1 && b >= tables.batch) return;
  const int warp = (blockIdx.x - (later ? blocks_q : 0)) * (LTX_HEAD_THREADS / 32) + threadIdx.x / 32;
  const int warps_per_row = LTX_HEAD_WARPS(tables.heads, D);
  const ltx_i64 s0 = warp / warps_per_row * UNROLL;
  const ltx_i64 h = warp % warps_per_row * (32 / GROUP) + threadIdx.x % 32 / GROUP;
  // Tokens that this lane reads and writes. A lane without work stays: the others shuffle with it.
  const int tokens = h < tables.heads && lane < HALF_VECS ? (int)min((ltx_i64)UNROLL, tables.seq - s0) : 0;

  u32 x0[ROWS][UNROLL][2], x1[ROWS][UNROLL][2], cos_v[UNROLL][TABLE_WORDS], sin_v[UNROLL][TABLE_WORDS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const LtxRopeSide& side = ROWS == 2 ? p.side[r] : tables;
    const u16* x = x_at(side.x, b * side.x_b + s0 * side.x_s + h * side.x_h + (kVectors ? e : e * side.x_e));
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      x0[r][u][0] = x0[r][u][1] = x1[r][u][0] = x1[r][u][1] = 0u;
      if (u >= tokens) continue;
      if constexpr (kVectors) {
        load_streamed(x0[r][u], x + u * side.x_s);
        load_streamed(x1[r][u], x + u * side.x_s + D / 2);
      } else {
        load_elements_16(x0[r][u], x + u * side.x_s, side.x_e);
        load_elements_16(x1[r][u], x + u * side.x_s + D / 2 * side.x_e, side.x_e);
      }
    }
  }
  const ltx_i64 cos_at = b * tables.cos_b + s0 * tables.cos_s + h * tables.cos_h + (kVectors ? e : e * tables.cos_e);
  const ltx_i64 sin_at = kVectors ? cos_at : b * tables.sin_b + s0 * tables.sin_s + h * tables.sin_h + e * tables.sin_e;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if (u >= tokens) continue;
    if constexpr (kVectors) {
      load_cached(cos_v[u], table_at(tables.cos, cos_at + u * tables.cos_s));
      load_cached(sin_v[u], table_at(tables.sin, sin_at + u * tables.cos_s));
    } else {
      load_table_elements(cos_v[u], table_at(tables.cos, cos_at + u * tables.cos_s), tables.cos_e);
      load_table_elements(sin_v[u], table_at(tables.sin, sin_at + u * tables.sin_s), tables.sin_e);
    }
  }
  u32 w0[ROWS][2], w1[ROWS][2];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const u16* w = (const u16*)(ROWS == 2 ? p.side[r] : tables).weight;
    w0[r][0] = w0[r][1] = w1[r][0] = w1[r][1] = ONES;
    if (w && lane < HALF_VECS) {
      load_cached(w0[r], w + e);
      load_cached(w1[r], w + e + D / 2);
    }
  }
  if constexpr (kVectors) end_of_loads(tables.batch);

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const LtxRopeSide& side = ROWS == 2 ? p.side[r] : tables;
    const ltx_i64 out = b * side.out_b + s0 * side.out_s + h * side.out_h + e;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const float sum = head_sum(square_sum(0.f, x0[r][u]), square_sum(0.f, x1[r][u]), lane);
      const float rstd = rstd_of(sum, side.eps);
      u32 out0[OUT_WORDS], out1[OUT_WORDS];
      rotate_pair(x0[r][u], x1[r][u], w0[r], w1[r], cos_v[u], sin_v[u], rstd, out0, out1);
      if (u >= tokens) continue;
      store_streamed(out_at(side.out, out + u * side.out_s), out0);
      store_streamed(out_at(side.out, out + u * side.out_s + D / 2), out1);
    }
  }
}
