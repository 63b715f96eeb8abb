// RMSNorm per head -> scale -> RoPE over several token axes, neighbours rotated together (the LTX-2.5 diffusion decoder).
//
//   n = round(weight * (x * rstd));  m = round(n * scale);  (a, b) = (m[2j], m[2j+1])
//   out[2j], out[2j+1] = a*cos - b*sin, b*cos + a*sin        in fp32, rounded once
//
// Pair j belongs to one axis of the rotation: LTX_PAIRS_0, _1, _2 pairs each, in this order; cos and sin of an axis are small
// tables that vary along one token axis, or any other.
//
// group   G lanes hold one head as in rope_per_head.cuh, whose sum they share: lane l < D / 8 has vectors l and l + D / 8.
//         A group does all heads of a token, HEADS at a time, so that addresses are found and tables read once a token
// grid    one group per token, 128 threads a CTA
// bytes   x and out move once; the tables stay in L1
#include "rope_per_head.cuh"
#include "rope_axial_params.h"

constexpr int HEADS = 2;  // four, or fewer CTAs an SM, are slower (benchmarks/NOTES.md)
constexpr bool kEvenAxes = LTX_PAIRS_0 % 2 == 0 && LTX_PAIRS_1 % 2 == 0 && LTX_PAIRS_2 % 2 == 0;
static_assert(2 * (LTX_PAIRS_0 + LTX_PAIRS_1 + LTX_PAIRS_2) == D, "the axes share the head");
static_assert(kTableF32 && !kOutF32 && kRounding == ROPE && kPerHead, "fp32 tables, a rotation in fp32, a 16-bit result");
__device__ constexpr int first_pair(int axis) { return axis == 0 ? 0 : axis == 1 ? LTX_PAIRS_0 : LTX_PAIRS_0 + LTX_PAIRS_1; }

// cos and sin of the two pairs of a vector.
struct Rotations {
  float c[2], s[2];
};

// Of pairs `pair` and, where TWO, pair + 1 of the same axis. `at` is the token's offset in the tables of every axis. (An
// index into p that is not a constant would make a copy of p in local memory.)
template <bool TWO>
__device__ __forceinline__ void load_rotations(Rotations& r, int i, const LtxRopeAxialParams& p, const int (&at)[LTX_ROPE_AXES],
                                               int pair) {
  const float *c = p.cos[0], *s = p.sin[0];
  int offset = at[0] + pair;
#pragma unroll
  for (int axis = 1; axis < LTX_ROPE_AXES; ++axis)
    if (pair >= first_pair(axis)) c = p.cos[axis], s = p.sin[axis], offset = at[axis] + pair - first_pair(axis);
  if constexpr (TWO) {
    const float2 both = __ldg((const float2*)(c + offset)), sines = __ldg((const float2*)(s + offset));
    r = {{both.x, both.y}, {sines.x, sines.y}};
  } else {
    r.c[i] = __ldg(c + offset), r.s[i] = __ldg(s + offset);
  }
}
__device__ __forceinline__ Rotations rotations_of(const LtxRopeAxialParams& p, const int (&at)[LTX_ROPE_AXES], int vector) {
  Rotations r;
  load_rotations<kEvenAxes>(r, 0, p, at, 2 * vector);
  if constexpr (!kEvenAxes) load_rotations<false>(r, 1, p, at, 2 * vector + 1);
  return r;
}

// A word of two neighbours, normalised, scaled and rotated. Where scale is a 16-bit number, `word` has it twice: one
// multiplication for both (mul_16 in rope_math.cuh says why that is the same).
template <bool kScaleIs16Bit>
__device__ __forceinline__ u32 rotate_word(u32 x, u32 weight, float rstd, float scale, u32 word, float c, float s) {
  Normed n = normed(x, weight, rstd);
  if constexpr (kScaleIs16Bit) n = normed_from_word(mul_16(n.word, word));
  else n = normed_from_word(pack(__fmul_rn(n.a, scale), __fmul_rn(n.b, scale)));
  const float even = __fmul_rn(n.a, c), odd = __fmul_rn(n.b, c);
  if constexpr (kFma) return pack(__fmaf_rn(-s, n.b, even), __fmaf_rn(s, n.a, odd));
  else return pack(__fadd_rn(even, __fmul_rn(-s, n.b)), __fadd_rn(odd, __fmul_rn(s, n.a)));
}

// What is the same for all heads of a token.
struct Token {
  const u16* x;
  u16* out;
  bool reads, stores;
  Rotations r0, r1;
  u32 w0[2], w1[2];
};

template <int COUNT, bool kScaleIs16Bit, bool kFirst>
__device__ __forceinline__ void heads_of(const LtxRopeAxialParams& p, Token& t, const int (&at)[LTX_ROPE_AXES], int lane) {
  u32 x0[COUNT][2] = {}, x1[COUNT][2] = {};
  if (t.reads) {
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
      load_streamed(x0[u], t.x + u * p.x_head);
      load_streamed(x1[u], t.x + u * p.x_head + D / 2);
    }
    if constexpr (kFirst) {  // behind the heads, which come from further away
      t.r0 = rotations_of(p, at, lane), t.r1 = rotations_of(p, at, lane + HALF_VECS);
      if (p.weight) {
        load_cached(t.w0, (const u16*)p.weight + lane * 4);
        load_cached(t.w1, (const u16*)p.weight + lane * 4 + D / 2);
      }
    }
  }
  end_of_loads((int)p.tokens);
#pragma unroll
  for (int u = 0; u < COUNT; ++u) {
    const float rstd = rstd_of(head_sum(square_sum(0.f, x0[u]), square_sum(0.f, x1[u]), lane), p.eps);
    u32 y0[2], y1[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      y0[i] = rotate_word<kScaleIs16Bit>(x0[u][i], t.w0[i], rstd, p.scale, p.scale_word, t.r0.c[i], t.r0.s[i]);
      y1[i] = rotate_word<kScaleIs16Bit>(x1[u][i], t.w1[i], rstd, p.scale, p.scale_word, t.r1.c[i], t.r1.s[i]);
    }
    if (!t.stores) continue;
    store_streamed(t.out + u * D, y0);
    store_streamed(t.out + u * D + D / 2, y1);
  }
  t.x += COUNT * p.x_head, t.out += COUNT * D;
}

template <bool kScaleIs16Bit>
__device__ __forceinline__ void rope_axial(const LtxRopeAxialParams& p) {
  const int lane = threadIdx.x % GROUP;
  const u32 wanted = blockIdx.x * (128 / GROUP) + threadIdx.x / GROUP;
  const u32 token = min(wanted, p.tokens - 1);  // a group without work stays, for its warp's shuffles; it stores nothing
  Token t = {};
  int at[LTX_ROPE_AXES] = {};
  ltx_i64 x_at = lane * 4;
  u32 rest = token;
#pragma unroll
  for (int i = LTX_TOKEN_AXES - 1; i >= 0; --i) {
    const u32 next = i ? (u32)(rest * p.multiplier[i] >> p.shift[i]) : 0, index = rest - next * p.sizes[i];
    rest = next;
    x_at += index * p.x_stride[i];
#pragma unroll
    for (int axis = 0; axis < LTX_ROPE_AXES; ++axis) at[axis] += (int)index * p.table_stride[axis][i];
  }
  t.x = (const u16*)p.x + x_at;
  t.out = (u16*)p.out + (ltx_i64)token * (p.heads * D) + lane * 4;
  t.reads = HALF_VECS == GROUP || lane < HALF_VECS;
  t.stores = t.reads && wanted == token;
  t.w0[0] = t.w0[1] = t.w1[0] = t.w1[1] = ONES;
  int h = p.heads >= HEADS ? HEADS : 1;
  if (h == HEADS) heads_of<HEADS, kScaleIs16Bit, true>(p, t, at, lane);
  else heads_of<1, kScaleIs16Bit, true>(p, t, at, lane);
#pragma unroll 1
  for (; h + HEADS <= p.heads; h += HEADS) heads_of<HEADS, kScaleIs16Bit, false>(p, t, at, lane);
#pragma unroll 1
  for (; h < p.heads; ++h) heads_of<1, kScaleIs16Bit, false>(p, t, at, lane);
}

// rope_axial: scale is a number of the 16-bit type, such as 1 and 64 ** -0.5; rope_axial_scaled: any other.
#define LTX_ENTRY(name, scale) \
  extern "C" __global__ void __launch_bounds__(128, 10) name(const __grid_constant__ LtxRopeAxialParams p) { rope_axial<scale>(p); }
LTX_ENTRY(rope_axial, true)
LTX_ENTRY(rope_axial_scaled, false)
