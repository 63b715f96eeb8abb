// The arithmetic of norm and rotation, rounding step by rounding step, and the memory accesses.
//
// Every operation that eager rounds is an explicit _rn intrinsic or a PTX instruction: nvcc contracts a*b+c into an fma
// unless it is told not to, and a flag is easily lost on the way to a just-in-time compile (it cost other projects one ulp).
#pragma once
#include "rope_config.cuh"

// ---- 16-bit words: two elements, the first in the low half -------------------------------------------------------
__device__ __forceinline__ float low_f32(u32 v) {
  if constexpr (!kFp16) return __uint_as_float(v << 16);
  float r;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ float high_f32(u32 v) {
  if constexpr (!kFp16) return __uint_as_float(v & 0xffff0000u);
  float r;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ u32 pack(float first, float second) {
  u32 r;
  if constexpr (kFp16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}
// Two products, each rounded once to 16 bits. Eager multiplies in fp32, where the product of two 16-bit numbers is exact
// for bf16 (8+8 bits) and fp16 (11+11 bits), and rounds that: the same bits. Saves 8 % of the instructions.
__device__ __forceinline__ u32 mul_16(u32 a, u32 b) {
  u32 r;
  if constexpr (kFp16) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else {
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else  // before sm_90 there is only the fma; adding -0 keeps every product, signed zeros too
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  }
  return r;
}
constexpr u32 ONES = kFp16 ? 0x3c003c00u : 0x3f803f80u;

// ---- the norm ------------------------------------------------------------------------------------------------------
// One vector into torch's accumulator: four fmas in element order.
__device__ __forceinline__ float square_sum(float acc, const u32 (&x)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float a = low_f32(x[i]), b = high_f32(x[i]);
    acc = __fmaf_rn(a, a, acc);
    acc = __fmaf_rn(b, b, acc);
  }
  return acc;
}
__device__ __forceinline__ float add_lane(float v, int mask) {
  return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, mask));
}
// sum / N, rounded once, as torch divides. Where N is a power of two, the product with 1/N is that number. Elsewhere the
// product is off by an ulp at most, and one exact remainder corrects it (Markstein; tests/kernels checks every mantissa).
// Unlike __fdiv_rn this has no branch, so that several heads can be under way together. It may be wrong where the mean is
// below 2^-126; the launcher refuses an eps so small (< 1e-30) that the sum with it would show that.
__device__ __forceinline__ float mean_of(float sum) {
  constexpr float inverse = 1.0f / N;
  const float quotient = __fmul_rn(sum, inverse);
  if constexpr ((N & (N - 1)) == 0) return quotient;
  const float corrected = __fmaf_rn(__fmaf_rn(-quotient, (float)N, sum), inverse, quotient);
  return quotient == __int_as_float(0x7f800000) ? quotient : corrected;  // infinity has no remainder
}
__device__ __forceinline__ float rstd_of(float sum, float eps) { return rsqrtf(__fadd_rn(mean_of(sum), eps)); }
// torch's last step over its four warps.
__device__ __forceinline__ float sum_of_warps(float4 w) {
  return __fadd_rn(__fadd_rn(w.x, w.z), __fadd_rn(w.y, w.w));
}

// Two normed elements: fp32 values, and their 16-bit word where the contract rounds here.
struct Normed {
  float a, b;
  u32 word;
};
__device__ __forceinline__ Normed normed_from_word(u32 word) { return {low_f32(word), high_f32(word), word}; }
// weight * (rstd * x): two multiplications, in torch's order. A missing weight is 1: exact.
__device__ __forceinline__ Normed normed(u32 x, u32 weight, float rstd) {
  float a = __fmul_rn(low_f32(weight), __fmul_rn(rstd, low_f32(x)));
  float b = __fmul_rn(high_f32(weight), __fmul_rn(rstd, high_f32(x)));
  if constexpr (kRounding == ALL) return {a, b, 0u};
  else return normed_from_word(pack(a, b));
}

// ---- the rotation --------------------------------------------------------------------------------------------------
enum Half { FIRST, SECOND };
// own*c -+ s*partner for elements 2i, 2i+1 of a vector: the first half of a head has -s. Negation is exact, and the sign of
// an operand costs no instruction.
template <Half half>
__device__ __forceinline__ float2 rotated(const Normed& own, const Normed& partner, const u32 (&c)[TABLE_WORDS],
                                          const u32 (&s)[TABLE_WORDS], int i) {
  float ca, cb, sa, sb, pa, pb;
  if constexpr (kTableF32) {
    ca = __uint_as_float(c[2 * i]), cb = __uint_as_float(c[2 * i + 1]);
    sa = __uint_as_float(s[2 * i]), sb = __uint_as_float(s[2 * i + 1]);
  } else {
    ca = low_f32(c[i]), cb = high_f32(c[i]);
    sa = low_f32(s[i]), sb = high_f32(s[i]);
  }
  if constexpr (half == FIRST) sa = -sa, sb = -sb;
  if constexpr (kRounding == CHAIN) {
    const u32 p = mul_16(own.word, c[i]);
    pa = low_f32(p), pb = high_f32(p);
  } else {
    pa = __fmul_rn(own.a, ca), pb = __fmul_rn(own.b, cb);
  }
  if constexpr (kFma) return {__fmaf_rn(sa, partner.a, pa), __fmaf_rn(sb, partner.b, pb)};
  else return {__fadd_rn(pa, __fmul_rn(sa, partner.a)), __fadd_rn(pb, __fmul_rn(sb, partner.b))};
}
__device__ __forceinline__ void put(u32 (&out)[OUT_WORDS], int i, float2 y) {
  if constexpr (kOutF32) out[2 * i] = __float_as_uint(y.x), out[2 * i + 1] = __float_as_uint(y.y);
  else out[i] = pack(y.x, y.y);
}

// Norm and rotation of a vector in the first half of a head (x0) and its partner in the second (x1).
__device__ __forceinline__ void rotate_pair(const u32 (&x0)[2], const u32 (&x1)[2], const u32 (&w0)[2], const u32 (&w1)[2],
                                            const u32 (&c)[TABLE_WORDS], const u32 (&s)[TABLE_WORDS], float rstd,
                                            u32 (&out0)[OUT_WORDS], u32 (&out1)[OUT_WORDS]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Normed n0 = normed(x0[i], w0[i], rstd), n1 = normed(x1[i], w1[i], rstd);
    put(out0, i, rotated<FIRST>(n0, n1, c, s, i));
    put(out1, i, rotated<SECOND>(n1, n0, c, s, i));
  }
}

// ---- memory --------------------------------------------------------------------------------------------------------
// Streamed loads pass by L1: each byte is used once, and the lines would push out the weights, which every row reads.
// Loads of a table that another thread of the CTA reads at the same time are kept by L1 until then, and are the first to go.
//
// Ordinary loads, although nobody writes what is read here: .nc ones the assembler may move behind a barrier to save
// registers, and then their latency is paid twice (v1536: 18.6 -> 20.0 us). rope_row_staged.cuh, which has registers to
// spare, is up to a tenth faster with .nc.
enum Cache { ORDINARY, NC };
#define LTX_LOAD(name, hint)                                                                          \
  template <Cache cache = ORDINARY> __device__ __forceinline__ void name(u32 (&r)[2], const void* p) { \
    if constexpr (cache == NC)                                                                        \
      asm volatile("ld.global.nc" hint ".v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));  \
    else                                                                                              \
      asm volatile("ld.global" hint ".v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));     \
  }                                                                                                   \
  template <Cache cache = ORDINARY> __device__ __forceinline__ void name(u32 (&r)[4], const void* p) { \
    if constexpr (cache == NC)                                                                        \
      asm volatile("ld.global.nc" hint ".v4.u32 {%0, %1, %2, %3}, [%4];"                              \
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));                        \
    else                                                                                              \
      asm volatile("ld.global" hint ".v4.u32 {%0, %1, %2, %3}, [%4];"                                 \
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));                        \
  }
LTX_LOAD(load_streamed, ".L1::no_allocate")
LTX_LOAD(load_twice, ".L1::evict_first")
LTX_LOAD(load_cached, "")
#undef LTX_LOAD
// Any alignment, any stride (in elements) between the elements of a vector.
__device__ __forceinline__ void load_elements_16(u32 (&r)[2], const void* p, ltx_i64 stride) {
  const u16* e = (const u16*)p;
#pragma unroll
  for (int i = 0; i < 2; ++i) r[i] = (u32)__ldg(e + 2 * i * stride) | (u32)__ldg(e + (2 * i + 1) * stride) << 16;
}
__device__ __forceinline__ void load_table_elements(u32 (&r)[TABLE_WORDS], const void* p, ltx_i64 stride) {
  if constexpr (kTableF32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = __ldg((const u32*)p + i * stride);
  } else {
    u32 t[2];
    load_elements_16(t, p, stride);
    r[0] = t[0], r[1] = t[1];
  }
}
// Results are written once and not read again by this kernel.
__device__ __forceinline__ void store_streamed(void* p, const u32 (&r)[2]) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(r[0]), "r"(r[1]) : "memory");
}
__device__ __forceinline__ void store_streamed(void* p, const u32 (&r)[4]) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// Ends a burst of loads. The assembler likes to put some of them off until the first have arrived and freed their
// registers; across a branch it does not. The loop is never entered: `size` is not negative, which it cannot know.
__device__ __forceinline__ void end_of_loads(int size) {
  while (size < 0) asm volatile("" ::: "memory");
}
// The row of a CTA in a kernel that does one row per CTA. Where q and k share cos and sin, their rows take turns, so that the
// second finds the tables in L2 (N = 16384: read from memory again, they would be a sixth of the bytes).
struct RowOfBlock {
  bool later;  // a row of side[1]
  ltx_i64 s;
};
__device__ __forceinline__ RowOfBlock row_of_block(const LtxRopeParams& p) {
  if constexpr (kShared) return {(blockIdx.x & 1) != 0, blockIdx.x >> 1};
  const bool later = (int)blockIdx.x >= p.side[0].seq;
  return {later, later ? blockIdx.x - p.side[0].seq : blockIdx.x};
}
__device__ __forceinline__ const char* table_at(const void* base, ltx_i64 element) {
  return (const char*)base + element * TABLE_BYTES;
}
__device__ __forceinline__ const u16* x_at(const void* base, ltx_i64 element) { return (const u16*)base + element; }
__device__ __forceinline__ char* out_at(void* base, ltx_i64 element) { return (char*)base + element * OUT_BYTES; }
