// The arithmetic of NATTEN 0.21.7's Hopper kernel, operation for operation, for the TileLang schedule in
// ltx_inductor/kernels/fna_exact_schedule.py, which calls these functions on its register tiles.
//
// Who holds what: a warpgroup has a query tile of 64 rows, (t, h, w) with t fastest, so a warp has one w, and lane l the
// rows (t, h) = (l / 4 % 4, l / 16) and (l / 4 % 4, l / 16 + 2). A KV tile is up to 8 w-planes of 16 keys (t, h), t
// fastest; of each plane the lane holds keys t = 2 (l % 2) + e and h = l % 4 / 2 + 2 half. One accumulator element is
// s[8 plane + 4 half + 2 row + e]. The t and h masks are thus the same for all planes, and the w mask the same for a warp.
//
// Rounding. Where NATTEN rounds was read off the machine code nvcc 13.0 makes of it with its own flags (fast math: every
// operation flushes denormals). Explicit PTX keeps any compiler from contracting otherwise:
//   p     = ex2(fma(x, s, -(s * max)))         s = fp32(log2 e) * scale; max of the row so far, 0 while it is -inf
//   alpha = ex2((max_old - max) * s)
//   sum   = per lane, of the unrounded p. First KV tile: a tree over its 32 elements, i and i + 16, i and i + 8, ...
//           Later tiles: in order, and the first add is fused with the rescaling: fma(sum, alpha, p0).
//   out   = acc * rcp(sum), lanes added xor 1, then xor 2.
// A plane that no query of the tile sees holds only zeros of p: leaving it out of sums and of P V changes no bit.
#pragma once
#include <stdint.h>

namespace ltx_fna {

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fma(float a, float b, float c) {
  float y;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}
__device__ __forceinline__ float mul(float a, float b) {
  float y;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float add(float a, float b) {
  float y;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ uint32_t bf16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// One KV tile of PLANES planes, the first of which is plane `plane0` of NATTEN's tile of 8.
//   s: scores in, p out; p: the same in bf16; acc: the accumulator of P V, rescaled; m, sum: per row.
//   t_mask, h_mask0, h_mask1: bit i: row 0 (and 1) sees the tile's i-th t, or h; w_mask: bit i: this warp sees plane i.
//   FIRST: the query tile's first KV tile: PLANES is 8, acc is not touched.
template <int PLANES, bool FIRST>
__device__ __forceinline__ void softmax(float* s, void* p_tile, float* acc, float* m, float* sum, uint32_t t_mask,
                                        uint32_t h_mask0, uint32_t h_mask1, uint32_t w_mask, int plane0, float scale) {
  const float minus_infinity = __int_as_float(0xff800000);
  uint32_t* p = static_cast<uint32_t*>(p_tile);
  const int lane = threadIdx.x & 31;
  t_mask >>= 2 * (lane & 1);
  h_mask0 >>= lane >> 1 & 1;
  h_mask1 >>= lane >> 1 & 1;
  bool seen[8];
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const bool t = t_mask >> e & 1;
      seen[half * 4 + e] = t && (h_mask0 >> (2 * half) & 1);
      seen[half * 4 + 2 + e] = t && (h_mask1 >> (2 * half) & 1);
    }
  float top[2] = {m[0], m[1]};
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++)
    if (w_mask >> plane & 1) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float x = seen[j] ? s[plane * 8 + j] : minus_infinity;
        s[plane * 8 + j] = x;
        top[j >> 1 & 1] = fmaxf(top[j >> 1 & 1], x);
      }
    }
  float alpha[2], shift[2];
#pragma unroll
  for (int row = 0; row < 2; row++) {
    top[row] = fmaxf(top[row], __shfl_xor_sync(0xffffffffu, top[row], 1));
    top[row] = fmaxf(top[row], __shfl_xor_sync(0xffffffffu, top[row], 2));
    const float reference = top[row] == minus_infinity ? 0.f : top[row];
    alpha[row] = ex2(mul(add(m[row], -reference), scale));
    shift[row] = -mul(scale, reference);
    m[row] = top[row];
  }
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++) {
    if (w_mask >> plane & 1) {
#pragma unroll
      for (int j = 0; j < 8; j++) s[plane * 8 + j] = ex2(fma(s[plane * 8 + j], scale, shift[j >> 1 & 1]));
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) s[plane * 8 + j] = 0.f;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) p[plane * 4 + j] = bf16x2(s[plane * 8 + 2 * j], s[plane * 8 + 2 * j + 1]);
  }
#pragma unroll
  for (int row = 0; row < 2; row++) {
    if constexpr (FIRST) {
      float column[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int j = (k >> 1) * 4 + row * 2 + (k & 1);
        float pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pair[i] = add(s[i * 8 + j], s[(i + 4) * 8 + j]);
        column[k] = add(add(pair[0], pair[2]), add(pair[1], pair[3]));
      }
      sum[row] = add(add(column[0], column[2]), add(column[1], column[3]));
    } else {
      // the fused element is that of NATTEN's plane 0, a zero where that plane is left out
      float total = fma(sum[row], alpha[row], plane0 == 0 ? s[row * 2] : 0.f);
      total = add(total, plane0 == 0 ? 0.f : s[row * 2]);
#pragma unroll
      for (int i = 1; i < 4 * PLANES; i++) total = add(total, s[(i >> 2) * 8 + (i >> 1 & 1) * 4 + row * 2 + (i & 1)]);
      sum[row] = total;
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) acc[n * 4 + 2 * row + e] = mul(acc[n * 4 + 2 * row + e], alpha[row]);
    }
  }
}

// Divides by the sums and writes the rows that are in the grid. out: [T, H, W, heads, 64] bf16 (TileLang declares what it
// does not write itself const).
__device__ __forceinline__ void store(const void* out, const float* acc, const float* sum, int tile_t, int tile_h,
                                      int tile_w, int size_t_, int size_h, int size_w, int heads, int head) {
  const int lane = threadIdx.x & 31;
  const int t = tile_t * 4 + (lane >> 2 & 3), w = tile_w * 4 + (threadIdx.x >> 5);
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float total = sum[row];
    total = add(total, __shfl_xor_sync(0xffffffffu, total, 1));
    total = add(total, __shfl_xor_sync(0xffffffffu, total, 2));
    const float inverse = total == 0.f ? 1.f : __frcp_rn(total);
    const int h = tile_h * 4 + (lane >> 4) + 2 * row;
    if (t < size_t_ && h < size_h && w < size_w) {
      const int64_t token = (static_cast<int64_t>(t) * size_h + h) * size_w + w;
      uint32_t* to = static_cast<uint32_t*>(const_cast<void*>(out)) + (token * heads + head) * 32 + (lane & 3);
#pragma unroll
      for (int n = 0; n < 8; n++)
        to[n * 4] = bf16x2(mul(acc[n * 4 + 2 * row], inverse), mul(acc[n * 4 + 2 * row + 1], inverse));
    }
  }
}

}  // namespace ltx_fna
