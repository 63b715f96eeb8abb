// RMSNorm per head -> scale -> RoPE over several token axes, neighbours rotated together (the LTX-2.5 diffusion decoder).
//
//   n = round(weight * (x * rstd));  m = round(n * scale);  (a, b) = (m[2j], m[2j+1])
//   out[2j], out[2j+1] = a*cos - b*sin, b*cos + a*sin        in fp32, rounded once
//
// Pair j belongs to one axis of the rotation: LTX_PAIRS_0, _1, _2 pairs each, in this order; cos and sin of an axis are small
// tables that vary along one token axis, or any other.
//
// group   G lanes hold one head as in rope_per_head.cuh, whose sum they share: lane l < D / 8 has vectors l and l + D / 8.
//         A group does all heads of a token, HEADS at a time, so that a table element is read once a token
// grid    one group per token, 128 threads a CTA
// bytes   x and out move once; the tables stay in L1
#include "rope_per_head.cuh"
#include "rope_axial_params.h"

constexpr int HEADS = 4;  // in flight together
__device__ constexpr int first_pair(int axis) { return axis == 0 ? 0 : axis == 1 ? LTX_PAIRS_0 : LTX_PAIRS_0 + LTX_PAIRS_1; }
static_assert(2 * (LTX_PAIRS_0 + LTX_PAIRS_1 + LTX_PAIRS_2) == D, "the axes share the head");
static_assert(kTableF32 && !kOutF32 && kRounding == ROPE && kPerHead, "fp32 tables, a rotation in fp32, a 16-bit result");

struct Rotation {
  float c, s;
};

// Of pair `pair`; `at` is the token's offset in the tables of every axis. (An index into p that is not a constant would
// make a copy of p in local memory.)
__device__ __forceinline__ Rotation rotation_of(const LtxRopeAxialParams& p, const ltx_i64 (&at)[LTX_ROPE_AXES], int pair) {
  const float *c = p.cos[0], *s = p.sin[0];
  ltx_i64 offset = at[0] + pair * p.table_pair[0];
#pragma unroll
  for (int axis = 1; axis < LTX_ROPE_AXES; ++axis) {
    if (pair < first_pair(axis)) continue;
    c = p.cos[axis], s = p.sin[axis], offset = at[axis] + (pair - first_pair(axis)) * p.table_pair[axis];
  }
  return {__ldg(c + offset), __ldg(s + offset)};
}

// A word of two neighbours, normalised, scaled and rotated.
__device__ __forceinline__ u32 rotate_word(u32 x, u32 weight, float rstd, float scale, Rotation r) {
  const Normed n = normed(x, weight, rstd);
  const Normed m = normed_from_word(pack(__fmul_rn(n.a, scale), __fmul_rn(n.b, scale)));  // scale 1 changes nothing
  const float even = __fmul_rn(m.a, r.c), odd = __fmul_rn(m.b, r.c);
  if constexpr (kFma) return pack(__fmaf_rn(-r.s, m.b, even), __fmaf_rn(r.s, m.a, odd));
  else return pack(__fadd_rn(even, __fmul_rn(-r.s, m.b)), __fadd_rn(odd, __fmul_rn(r.s, m.a)));
}

extern "C" __global__ void __launch_bounds__(128) rope_axial(const __grid_constant__ LtxRopeAxialParams p) {
  const int lane = threadIdx.x % GROUP, e = lane * 4;
  const u32 wanted = blockIdx.x * (128 / GROUP) + threadIdx.x / GROUP;
  const u32 token = min(wanted, p.tokens - 1);  // a group without work stays, for its warp's shuffles; it stores nothing
  const bool reads = lane < HALF_VECS;

  ltx_i64 x_at_token = 0, table_at_token[LTX_ROPE_AXES] = {};
  u32 rest = token;
#pragma unroll
  for (int i = LTX_TOKEN_AXES - 1; i >= 0; --i) {
    const u32 next = (u32)(rest * p.multiplier[i] >> p.shift[i]), index = rest - next * p.sizes[i];
    rest = next;
    x_at_token += index * p.x_stride[i];
#pragma unroll
    for (int axis = 0; axis < LTX_ROPE_AXES; ++axis)
      table_at_token[axis] += index * p.table_stride[axis][i];
  }
  const u16* x = (const u16*)p.x + x_at_token + e;
  u16* out = (u16*)p.out + (ltx_i64)token * p.heads * D + e;

  Rotation r0[2] = {}, r1[2] = {};
  u32 w0[2] = {ONES, ONES}, w1[2] = {ONES, ONES};
  for (u32 h = 0; h < p.heads; h += HEADS) {
    u32 x0[HEADS][2], x1[HEADS][2];
#pragma unroll
    for (int u = 0; u < HEADS; ++u) {
      x0[u][0] = x0[u][1] = x1[u][0] = x1[u][1] = 0u;
      if (!reads || h + u >= p.heads) continue;
      load_streamed(x0[u], x + (h + u) * p.x_head);
      load_streamed(x1[u], x + (h + u) * p.x_head + D / 2);
    }
    if (h == 0 && reads) {  // behind the first heads, which come from further away
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        r0[i] = rotation_of(p, table_at_token, 2 * lane + i);
        r1[i] = rotation_of(p, table_at_token, 2 * (lane + HALF_VECS) + i);
      }
      if (p.weight) {
        load_cached(w0, (const u16*)p.weight + e);
        load_cached(w1, (const u16*)p.weight + e + D / 2);
      }
    }
#pragma unroll
    for (int u = 0; u < HEADS; ++u) {
      const float rstd = rstd_of(head_sum(square_sum(0.f, x0[u]), square_sum(0.f, x1[u]), lane), p.eps);
      u32 y0[2], y1[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        y0[i] = rotate_word(x0[u][i], w0[i], rstd, p.scale, r0[i]);
        y1[i] = rotate_word(x1[u][i], w1[i], rstd, p.scale, r1[i]);
      }
      if (!reads || h + u >= p.heads || wanted != token) continue;
      store_streamed(out + (h + u) * D, y0);
      store_streamed(out + (h + u) * D + D / 2, y1);
    }
  }
}
