// RMSNorm over the row + split RoPE for any head_dim and hidden size, and for any strides: the row waits in shared memory.
//
// grid    x: tokens (ROWS = 2) or q rows, then k rows (ROWS = 1);  y: batch
// block   128 threads, torch's own mapping: thread t sums vectors t, t + 128, ...; warp tree 16, 8, 4, 2, 1;
//         (w0 + w2) + (w1 + w3). Nothing about the order has to be emulated
// shared  the row, 2 * N bytes, written while it is summed; the barrier of the sum also publishes it, and afterwards
//         thread t takes the rotation pairs t, t + 128, ... (a pair: vector j of a first half and vector j of the second)
// bytes   every byte of x, cos, sin and out moves once; cos and sin of the first pairs are requested before the barrier
//
// kVectors = false reads element by element: strided or misaligned inputs. Slower (L1 serves the sectors again), same bits.
#pragma once
#include "rope_math.cuh"

constexpr int ROW_VECS = N / 4;
constexpr int ROW_PAIRS = N / 8;

template <int ROWS, bool kVectors>
__device__ __forceinline__ void rope_row_staged(const LtxRopeParams& p) {
  constexpr int T = LTX_STAGED_THREADS;
  constexpr int VEC_STEPS = (ROW_VECS + T - 1) / T, PAIR_STEPS = (ROW_PAIRS + T - 1) / T;
  constexpr int BATCH = VEC_STEPS < 8 ? VEC_STEPS : 8;           // loads in flight per row
  constexpr int AHEAD = PAIR_STEPS < 4 ? PAIR_STEPS : 4;         // pairs whose cos and sin are requested early
  const int t = threadIdx.x, b = blockIdx.y;
  const bool is_k = ROWS == 1 && (int)blockIdx.x >= p.side[0].seq;
  const LtxRopeSide& tables = p.side[is_k];
  const ltx_i64 s = is_k ? blockIdx.x - p.side[0].seq : blockIdx.x;
  if (ROWS == 1 && b >= tables.batch) return;

  __shared__ uint2 row[ROWS][ROW_VECS];
  __shared__ float4 warps[ROWS];
  const char* cos_p = table_at(tables.cos, b * tables.cos_b + s * tables.cos_s);
  const char* sin_p = table_at(tables.sin, b * (kVectors ? tables.cos_b : tables.sin_b) + s * (kVectors ? tables.cos_s : tables.sin_s));
  auto load_tables = [&](int pair, u32 (&c)[TABLE_WORDS], u32 (&sn)[TABLE_WORDS]) {
    const ltx_i64 head = pair / HALF_VECS, within = pair % HALF_VECS * 4;
    if constexpr (kVectors) {
      load_cached(c, cos_p + (head * tables.cos_h + within) * TABLE_BYTES);
      load_cached(sn, sin_p + (head * tables.cos_h + within) * TABLE_BYTES);
    } else {
      load_table_elements(c, cos_p + (head * tables.cos_h + within * tables.cos_e) * TABLE_BYTES, tables.cos_e);
      load_table_elements(sn, sin_p + (head * tables.sin_h + within * tables.sin_e) * TABLE_BYTES, tables.sin_e);
    }
  };

  float acc[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) acc[r] = 0.f;
#pragma unroll
  for (int first = 0; first < VEC_STEPS; first += BATCH) {
    u32 x[ROWS][BATCH][2];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const LtxRopeSide& side = ROWS == 2 ? p.side[r] : tables;
      const u16* base = x_at(side.x, b * side.x_b + s * side.x_s);
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int v = t + (first + j) * T;
        if (v >= ROW_VECS) continue;
        if constexpr (kVectors) load_streamed(x[r][j], base + v * 4);
        else load_elements_16(x[r][j], base + v * 4 * side.x_e, side.x_e);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int v = t + (first + j) * T;
        if (v >= ROW_VECS) continue;
        acc[r] = square_sum(acc[r], x[r][j]);
        row[r][v] = make_uint2(x[r][j][0], x[r][j][1]);
      }
  }

  u32 cos_v[AHEAD][TABLE_WORDS], sin_v[AHEAD][TABLE_WORDS];
#pragma unroll
  for (int j = 0; j < AHEAD; ++j)
    if (t + j * T < ROW_PAIRS) load_tables(t + j * T, cos_v[j], sin_v[j]);

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int level = 16; level > 0; level /= 2) acc[r] = add_lane(acc[r], level);
    if (t % 32 == 0) ((float*)&warps[r])[t / 32] = acc[r];
  }
  __syncthreads();
  float rstd[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) rstd[r] = rstd_of_warps(warps[r], (ROWS == 2 ? p.side[r] : tables).eps);

#pragma unroll
  for (int j = 0; j < PAIR_STEPS; ++j) {
    const int pair = t + j * T;
    if (pair >= ROW_PAIRS) continue;
    const int head = pair / HALF_VECS, v0 = head * 2 * HALF_VECS + pair % HALF_VECS, v1 = v0 + HALF_VECS;
    u32 c[TABLE_WORDS], sn[TABLE_WORDS];
    if (j < AHEAD) {
#pragma unroll
      for (int w = 0; w < TABLE_WORDS; ++w) c[w] = cos_v[j < AHEAD ? j : 0][w], sn[w] = sin_v[j < AHEAD ? j : 0][w];
    } else {
      load_tables(pair, c, sn);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const LtxRopeSide& side = ROWS == 2 ? p.side[r] : tables;
      const u16* w = (const u16*)side.weight;
      u32 w0[2] = {ONES, ONES}, w1[2] = {ONES, ONES}, out0[OUT_WORDS], out1[OUT_WORDS];
      if (w) {
        load_cached(w0, w + v0 * 4);
        load_cached(w1, w + v1 * 4);
      }
      const uint2 a = row[r][v0], d = row[r][v1];
      const u32 x0[2] = {a.x, a.y}, x1[2] = {d.x, d.y};
      rotate_pair(x0, x1, w0, w1, c, sn, rstd[r], out0, out1);
      char* out = out_at(side.out, b * side.out_b + s * side.out_s + head * (kOutPacked ? D : side.out_h) + pair % HALF_VECS * 4);
      store_streamed(out, out0);
      store_streamed(out + D / 2 * OUT_BYTES, out1);
    }
  }
}
