// One compilation makes the kernels of one configuration: everything that shapes the code is a constant, given by -D flags
// (ltx_inductor/kernels/rope.py writes them). Works under nvcc and NVRTC: no host headers.
#pragma once
#include "rope_params.h"
#include "rope_plan.h"

typedef unsigned int u32;
typedef unsigned short u16;

// Where the chain rounds (docs/kernels-rope.md has the whole table).
enum Rounding {
  CHAIN = 0,  // the norm, then x*cos, then the result, each to 16 bits
  ROPE = 1,   // the norm to 16 bits, the rotation in fp32
  ALL = 2,    // nothing is rounded before the result
};

constexpr bool kFp16 = LTX_FP16;           // 16-bit type of x, weight and 16-bit tables: fp16, else bf16
constexpr bool kTableF32 = LTX_TABLE_F32;  // cos and sin are fp32, else the 16-bit type
constexpr bool kOutF32 = LTX_OUT_F32;      // the result stays fp32
constexpr bool kFma = LTX_FMA;             // sin * partner is added by one fma; else rounded to fp32, then added
constexpr Rounding kRounding = (Rounding)LTX_ROUNDING;
constexpr int D = LTX_HEAD_DIM;
constexpr int N = LTX_NORM;                      // elements under one norm: heads * D, or D for a norm per head
constexpr bool kPerHead = LTX_PER_HEAD;
constexpr bool kOutPacked = !LTX_OUT_BHSD;       // the heads of one token follow each other in the output
constexpr bool kShared = LTX_SHARED;             // q and k use the same cos and sin

// The unit of all memory traffic is torch's: a vector of 4 elements (8 bytes of x). A half head is a whole number of them.
constexpr int HALF_VECS = D / 8;                 // vectors between an element and its rotation partner
constexpr int TABLE_WORDS = kTableF32 ? 4 : 2;   // 32-bit words of a vector of cos or sin
constexpr int TABLE_BYTES = kTableF32 ? 4 : 2;
constexpr int OUT_WORDS = kOutF32 ? 4 : 2;
constexpr int OUT_BYTES = kOutF32 ? 4 : 2;

static_assert(D % 8 == 0 && D >= 32 && D <= 256, "head_dim");
static_assert(N % D == 0 && N <= 16384, "hidden");
static_assert(kRounding != CHAIN || (!kTableF32 && kFma && !kOutF32), "the 16-bit chain has 16-bit tables and one fma");
