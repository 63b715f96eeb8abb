// RMSNorm over the row + split RoPE for any head_dim and hidden size, and for any strides: the row waits in shared memory.
//
// group   128 threads do one row, in torch's own mapping: thread t sums vectors (4 elements) t, t + 128, ...; warp tree
//         16, 8, 4, 2, 1; (w0 + w2) + (w1 + w3). Nothing about the order has to be emulated
// grid    x: GROUPS = 2: tokens, group 0 does q and group 1 does k; GROUPS = 1: rows of q and k;  y: batch
// shared  the row, 2 * N bytes, written while it is summed; the barrier of the sum also publishes it, and afterwards
//         thread t takes the rotation pairs t, t + 128, ... (a pair: vector j of a first half and vector j of the second)
//         Where half a head is no whole number of 32-byte sectors, its results go back into the row and are stored from
//         there in order: stores that end inside sectors cost a tenth of the speed (head_dim 40, 80)
// bytes   every byte of x, cos, sin and out moves once (cos and sin a second time from L1 for the other group); as much
//         as the registers hold is in flight before the first byte is used
//
// kVectors = false reads element by element: strided or misaligned inputs. Slower (L1 serves the sectors again), same bits.
#pragma once
#include "rope_math.cuh"

constexpr int ROW_VECS = N / 4;
constexpr int ROW_PAIRS = N / 8;
constexpr bool kStoreInOrder = D % 32 != 0 && kOutPacked && !kOutF32;  // fp32 results do not fit where the row was

template <int GROUPS, bool kVectors>
__device__ __forceinline__ void rope_row_staged(const LtxRopeParams& p) {
  constexpr int T = LTX_STAGED_THREADS;
  constexpr int VEC_STEPS = (ROW_VECS + T - 1) / T, PAIR_STEPS = (ROW_PAIRS + T - 1) / T;
  constexpr int MOST = kVectors ? 32 / TABLE_WORDS : 4;               // pairs whose cos and sin are requested with x
  constexpr int AHEAD = PAIR_STEPS < MOST ? PAIR_STEPS : MOST;
  constexpr int BATCH = kVectors || VEC_STEPS < 8 ? VEC_STEPS : 8;    // vectors requested together
  const int t = threadIdx.x % T, group = GROUPS == 2 ? threadIdx.x / T : 0, b = blockIdx.y;
  const RowOfBlock block = GROUPS == 1 ? row_of_block(p) : RowOfBlock{false, blockIdx.x};
  const LtxRopeSide& side = p.side[GROUPS == 2 ? group : block.later];
  const LtxRopeSide& tables = GROUPS == 2 ? p.side[0] : side;
  const ltx_i64 s = block.s;
  if (GROUPS == 1 && b >= side.batch) return;

  __shared__ uint2 rows[GROUPS][ROW_VECS];
  __shared__ float4 warps[GROUPS];
  uint2* row = rows[group];
  const u16* x = x_at(side.x, b * side.x_b + s * side.x_s);
  const ltx_i64 cos_at = b * tables.cos_b + s * tables.cos_s;
  const ltx_i64 sin_at = kVectors ? cos_at : b * tables.sin_b + s * tables.sin_s;
  auto load_tables = [&](int pair, u32(&c)[TABLE_WORDS], u32(&sn)[TABLE_WORDS]) {
    const ltx_i64 head = pair / HALF_VECS, within = pair % HALF_VECS * 4;
    if constexpr (kVectors) {
      load_twice<NC>(c, table_at(tables.cos, cos_at + head * tables.cos_h + within));
      load_twice<NC>(sn, table_at(tables.sin, sin_at + head * tables.cos_h + within));
    } else {
      load_table_elements(c, table_at(tables.cos, cos_at + head * tables.cos_h + within * tables.cos_e), tables.cos_e);
      load_table_elements(sn, table_at(tables.sin, sin_at + head * tables.sin_h + within * tables.sin_e), tables.sin_e);
    }
  };

  u32 cos_v[AHEAD][TABLE_WORDS], sin_v[AHEAD][TABLE_WORDS];
  float acc = 0.f;
#pragma unroll
  for (int first = 0; first < VEC_STEPS; first += BATCH) {
    u32 v[BATCH][2];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int at = t + (first + j) * T;
      if (at >= ROW_VECS) continue;
      if constexpr (kVectors) load_streamed<NC>(v[j], x + at * 4);
      else load_elements_16(v[j], x + at * 4 * side.x_e, side.x_e);
    }
    if (first == 0) {
#pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        if (t + j * T < ROW_PAIRS) load_tables(t + j * T, cos_v[j], sin_v[j]);
    }
    if constexpr (kVectors) end_of_loads(side.batch);
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int at = t + (first + j) * T;
      if (at >= ROW_VECS) continue;
      acc = square_sum(acc, v[j]);
      row[at] = make_uint2(v[j][0], v[j][1]);
    }
  }

#pragma unroll
  for (int level = 16; level > 0; level /= 2) acc = add_lane(acc, level);
  if (t % 32 == 0) ((float*)&warps[group])[t / 32] = acc;
  __syncthreads();
  const float rstd = rstd_of(sum_of_warps(warps[group]), side.eps);

  const u16* weight = (const u16*)side.weight;
  const ltx_i64 out_at_row = b * side.out_b + s * side.out_s;
#pragma unroll
  for (int j = 0; j < PAIR_STEPS; ++j) {
    const int pair = t + j * T;
    if (pair >= ROW_PAIRS) continue;
    const int head = pair / HALF_VECS, within = pair % HALF_VECS, v0 = head * 2 * HALF_VECS + within, v1 = v0 + HALF_VECS;
    u32 c[TABLE_WORDS], sn[TABLE_WORDS];
    if (j < AHEAD) {
#pragma unroll
      for (int w = 0; w < TABLE_WORDS; ++w) c[w] = cos_v[j < AHEAD ? j : 0][w], sn[w] = sin_v[j < AHEAD ? j : 0][w];
    } else {
      load_tables(pair, c, sn);
    }
    u32 w0[2] = {ONES, ONES}, w1[2] = {ONES, ONES}, out0[OUT_WORDS], out1[OUT_WORDS];
    if (weight) {
      load_cached<NC>(w0, weight + v0 * 4);
      load_cached<NC>(w1, weight + v1 * 4);
    }
    const uint2 a = row[v0], d = row[v1];
    const u32 x0[2] = {a.x, a.y}, x1[2] = {d.x, d.y};
    rotate_pair(x0, x1, w0, w1, c, sn, rstd, out0, out1);
    if constexpr (kStoreInOrder) {  // only this thread reads these two vectors
      row[v0] = make_uint2(out0[0], out0[1]);
      row[v1] = make_uint2(out1[0], out1[1]);
    } else {
      const ltx_i64 out = out_at_row + head * (kOutPacked ? D : side.out_h) + within * 4;
      store_streamed(out_at(side.out, out), out0);
      store_streamed(out_at(side.out, out + D / 2), out1);
    }
  }
  if constexpr (kStoreInOrder) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < VEC_STEPS; ++j) {
      const int at = t + j * T;
      if (at >= ROW_VECS) continue;
      const u32 y[2] = {row[at].x, row[at].y};
      store_streamed(out_at(side.out, out_at_row + at * 4), y);
    }
  }
}
