// RMSNorm per head + split RoPE (Qwen3, Gemma3 style): a head is one vector (4 elements) per lane, in registers.
//
// group   G = 8, 16 or 32 lanes hold one head: lane l has vector l, and l + 32 for head_dim > 128
// unit    a group does HEAD_UNROLL consecutive heads of a token, of q and of k if they share cos/sin (ROWS = 2): their
//         loads are all in flight together; cos/sin that are the same for all heads are hits in L1
// grid    x: units of q, then units of k (ROWS = 1), 128 / G to a block of 128 threads;  y: batch
// sum     torch gives a row of head_dim <= 256 to its threads 0..63, one vector each: acc of four fmas; warp tree
//         16, 8, 4, 2, 1, of which the levels >= G add zeros (exact: squares are never -0); then (w0 + 0) + (w1 + 0)
// partner the normed vector half a head away, by shuffle
// bytes   every byte of x and out moves once, and of cos/sin too unless heads share them
#pragma once
#include "rope_math.cuh"

constexpr int HEAD_VECS = D / 4;
constexpr int GROUP = LTX_HEAD_GROUP(D);
constexpr int SLOTS = HEAD_VECS > 32 ? 2 : 1;
constexpr int UNROLL = LTX_HEAD_UNROLL;

template <int ROWS, bool kVectors>
__device__ __forceinline__ void rope_per_head(const LtxRopeParams& p) {
  constexpr int GROUPS = LTX_HEAD_THREADS / GROUP;
  const int lane = threadIdx.x % GROUP, b = blockIdx.y;
  const int blocks_q = (p.side[0].seq * ((p.side[0].heads + UNROLL - 1) / UNROLL) + GROUPS - 1) / GROUPS;
  const bool is_k = ROWS == 1 && (int)blockIdx.x >= blocks_q;
  const LtxRopeSide& tables = p.side[is_k];
  if (ROWS == 1 && b >= tables.batch) return;
  const int per_token = (tables.heads + UNROLL - 1) / UNROLL;
  const int unit = (blockIdx.x - (is_k ? blocks_q : 0)) * GROUPS + threadIdx.x / GROUP;
  const ltx_i64 s = unit / per_token;
  const int head0 = unit % per_token * UNROLL;
  const int heads = s < tables.seq ? min(UNROLL, tables.heads - head0) : 0;  // all lanes stay: they shuffle

  u32 x[ROWS][UNROLL][SLOTS][2], cos_v[UNROLL][SLOTS][TABLE_WORDS], sin_v[UNROLL][SLOTS][TABLE_WORDS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const LtxRopeSide& side = ROWS == 2 ? p.side[r] : tables;
    const u16* base = x_at(side.x, b * side.x_b + s * side.x_s + head0 * side.x_h);
#pragma unroll
    for (int h = 0; h < UNROLL; ++h)
#pragma unroll
      for (int k = 0; k < SLOTS; ++k) {
        const int v = lane + 32 * k;
        x[r][h][k][0] = x[r][h][k][1] = 0u;
        if (h >= heads || v >= HEAD_VECS) continue;
        if constexpr (kVectors) load_streamed(x[r][h][k], base + h * side.x_h + v * 4);
        else load_elements_16(x[r][h][k], base + h * side.x_h + v * 4 * side.x_e, side.x_e);
      }
  }
  const char* cos_p = table_at(tables.cos, b * tables.cos_b + s * tables.cos_s + head0 * tables.cos_h);
  const char* sin_p = kVectors ? table_at(tables.sin, b * tables.cos_b + s * tables.cos_s + head0 * tables.cos_h)
                               : table_at(tables.sin, b * tables.sin_b + s * tables.sin_s + head0 * tables.sin_h);
#pragma unroll
  for (int h = 0; h < UNROLL; ++h)
#pragma unroll
    for (int k = 0; k < SLOTS; ++k) {
      const int v = lane + 32 * k, within = (v < HALF_VECS ? v : v - HALF_VECS) * 4;
#pragma unroll
      for (int w = 0; w < TABLE_WORDS; ++w) cos_v[h][k][w] = sin_v[h][k][w] = 0u;
      if (h >= heads || v >= HEAD_VECS) continue;
      if constexpr (kVectors) {
        load_cached(cos_v[h][k], cos_p + (h * tables.cos_h + within) * TABLE_BYTES);
        load_cached(sin_v[h][k], sin_p + (h * tables.cos_h + within) * TABLE_BYTES);
      } else {
        load_table_elements(cos_v[h][k], cos_p + (h * tables.cos_h + within * tables.cos_e) * TABLE_BYTES, tables.cos_e);
        load_table_elements(sin_v[h][k], sin_p + (h * tables.sin_h + within * tables.sin_e) * TABLE_BYTES, tables.sin_e);
      }
    }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const LtxRopeSide& side = ROWS == 2 ? p.side[r] : tables;
    const u16* w = (const u16*)side.weight;
    u32 weight[SLOTS][2];
#pragma unroll
    for (int k = 0; k < SLOTS; ++k) {
      weight[k][0] = weight[k][1] = ONES;
      if (w && lane + 32 * k < HEAD_VECS) load_cached(weight[k], w + (lane + 32 * k) * 4);
    }
    char* out = out_at(side.out, b * side.out_b + s * side.out_s + head0 * side.out_h);
#pragma unroll
    for (int h = 0; h < UNROLL; ++h) {
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int k = 0; k < SLOTS; ++k) {
        sum[k] = square_sum(0.f, x[r][h][k]);
#pragma unroll
        for (int level = GROUP / 2; level > 0; level /= 2) sum[k] = add_lane(sum[k], level);
      }
      const float rstd = rstd_of_warps(make_float4(sum[0], sum[1], 0.f, 0.f), side.eps);
      Normed n[SLOTS][2];
#pragma unroll
      for (int k = 0; k < SLOTS; ++k)
#pragma unroll
        for (int j = 0; j < 2; ++j) n[k][j] = normed(x[r][h][k][j], weight[k][j], rstd);
#pragma unroll
      for (int k = 0; k < SLOTS; ++k) {
        const int v = lane + 32 * k, other = v < HALF_VECS ? v + HALF_VECS : v - HALF_VECS;
        u32 y[OUT_WORDS];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          Normed partner = {0.f, 0.f, 0u};
#pragma unroll
          for (int from = 0; from < SLOTS; ++from) {  // every lane asks both slots of the partner's lane and keeps one
            Normed got;
            if constexpr (kRounding == ALL) {
              got = {__shfl_sync(0xffffffffu, n[from][j].a, other, GROUP), __shfl_sync(0xffffffffu, n[from][j].b, other, GROUP), 0u};
            } else {
              got = normed_from_word(__shfl_sync(0xffffffffu, n[from][j].word, other, GROUP));
            }
            if (other / 32 == from) partner = got;
          }
          put(y, j, rotated(n[k][j], partner, cos_v[h][k], sin_v[h][k], j, v < HALF_VECS ? FIRST_HALF : SECOND_HALF));
        }
        if (h < heads && v < HEAD_VECS) store_streamed(out + (h * side.out_h + v * 4) * OUT_BYTES, y);
      }
    }
  }
}
