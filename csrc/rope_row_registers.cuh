// RMSNorm over the row + split RoPE, the row in registers: the kernel for production shapes.
//
// grid    x: tokens (ROWS = 2: one CTA does the q and the k row of a token, cos/sin are read once)
//            or rows (ROWS = 1: the q rows, then the k rows, each with its own cos/sin);  y: batch
// block   64 threads = 2 warps; no loop over tokens: 8 CTAs per SM overlap each other's loads, barrier and stores
// bytes   every byte of x, cos, sin and out moves once; weights come from L1
//
// A row is N / 512 chunks of 128 vectors (4 elements, 8 bytes). torch gives vector v of a chunk to its thread v of 128.
// Here thread i plays two of torch's threads, the two that hold a rotation pair:
//
//     i bits  ..k+1 k | k-1 .. 0        k = log2(D / 8); e.g. D = 128: k = 4
//     vector  = upper bits : half : lower bits          half = 0, 1 in the same thread
//
// so that the partner needs no shuffle, a warp's loads stay contiguous in runs of D bytes, and torch's sum can be kept:
//     per vector  acc = fma(v, v, acc), in element order, one accumulator per played thread
//     per warp    shfl_down 16, 8, 4, 2, 1  ==  xor 16, 8, 4, 2, 1 (addition commutes). The level whose distance is D / 8
//                 vectors is the addition inside the thread; the levels above it run on both halves
//     per block   (w0 + w2) + (w1 + w3) over torch's four warps, through one float4 in shared memory
// 8-byte loads are enough: 2 * N/512 per row and as many for cos and sin (48 for D = 128, N = 4096) are in flight
// before the first is used.
#pragma once
#include "rope_math.cuh"

constexpr int CHUNKS = N / 512;
constexpr int CHUNK_HEADS = 512 / D;

// Short rows keep the weights in registers; long ones park them in shared memory, fetched by the copy engine of the
// SM (cp.async): no registers while the row is in flight, and no barrier, since each thread reads only what it fetched.
template <int ROWS> struct RegisterPlan {
  static constexpr bool kWeightsInRegisters = ROWS * CHUNKS <= 4;
  static constexpr int kRow = ROWS * CHUNKS * 4 * (kWeightsInRegisters ? 2 : 1);
  static constexpr int kWanted = kRow + CHUNKS * 2 * TABLE_WORDS + 32;  // 128 for D = 128, N = 4096, q and k
  // 4 warp schedulers share the register file evenly: 2 warps per CTA make an odd number of CTAs cost as much as the next.
  static constexpr int kFit = 65536 / (LTX_REGISTER_THREADS * kWanted) / 2 * 2;
  static constexpr int kBlocksPerSm = kFit > 12 ? 12 : kFit;
  static_assert(kFit >= 4, "the row does not fit the registers: LTX_USES_REGISTERS is too generous");
};

// The sum of squares of torch's warps out of the two halves' accumulators; see the picture above.
__device__ __forceinline__ void store_warp_sums(float first, float second, float* warps, int i) {
#pragma unroll
  for (int level = 16; level > HALF_VECS; level /= 2) {
    first = add_lane(first, level / 2);
    second = add_lane(second, level / 2);
  }
  if constexpr (HALF_VECS <= 16) {
    float sum = __fadd_rn(first, second);
#pragma unroll
    for (int level = HALF_VECS / 2; level > 0; level /= 2) sum = add_lane(sum, level);
    if (i % 16 == 0) warps[i / 16] = sum;
  } else {  // D = 256: the halves are different warps of torch
#pragma unroll
    for (int level = 16; level > 0; level /= 2) {
      first = add_lane(first, level);
      second = add_lane(second, level);
    }
    if (i % 32 == 0) warps[i / 32 * 2] = first, warps[i / 32 * 2 + 1] = second;
  }
}

// kTablePacked: the heads of a token follow each other in cos and sin, so that a chunk's offset is a constant.
template <int ROWS, bool kTablePacked>
__device__ __forceinline__ void rope_row_registers(const LtxRopeParams& p) {
  const int i = threadIdx.x, b = blockIdx.y;
  const bool is_k = ROWS == 1 && (int)blockIdx.x >= p.side[0].seq;
  const LtxRopeSide& tables = p.side[is_k];
  const ltx_i64 s = is_k ? blockIdx.x - p.side[0].seq : blockIdx.x;
  if (ROWS == 1 && b >= tables.batch) return;

  const int head = i / HALF_VECS, within = i % HALF_VECS * 4;  // in the chunk; in the half head
  const char* cos_p = table_at(tables.cos, b * tables.cos_b + s * tables.cos_s + head * tables.cos_h + within);
  const char* sin_p = table_at(tables.sin, b * tables.cos_b + s * tables.cos_s + head * tables.cos_h + within);
  const ltx_i64 table_chunk = (kTablePacked ? 256 : CHUNK_HEADS * tables.cos_h) * TABLE_BYTES;

  u32 x0[ROWS][CHUNKS][2], x1[ROWS][CHUNKS][2], cos_v[CHUNKS][TABLE_WORDS], sin_v[CHUNKS][TABLE_WORDS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const LtxRopeSide& side = ROWS == 2 ? p.side[r] : tables;
    const u16* x = x_at(side.x, b * side.x_b + s * side.x_s + head * D + within);
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n) {
      load_streamed(x0[r][n], x + n * 512);
      load_streamed(x1[r][n], x + n * 512 + D / 2);
    }
  }
#pragma unroll
  for (int n = 0; n < CHUNKS; ++n) {
    load_streamed(cos_v[n], cos_p + n * table_chunk);
    load_streamed(sin_v[n], sin_p + n * table_chunk);
  }

  constexpr bool kInRegisters = RegisterPlan<ROWS>::kWeightsInRegisters;
  constexpr int kSlots = kInRegisters ? 1 : ROWS * CHUNKS * 2;
  __shared__ uint2 parked[kSlots][LTX_REGISTER_THREADS];
  u32 weights[kInRegisters ? ROWS * CHUNKS * 2 : 1][2];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const u16* w = (const u16*)(ROWS == 2 ? p.side[r] : tables).weight;
    const u16* mine = w + head * D + within;
#pragma unroll
    for (int n = 0; n < CHUNKS * 2; ++n) {
      const u16* src = mine + n / 2 * 512 + n % 2 * (D / 2);
      const int slot = r * CHUNKS * 2 + n;
      if constexpr (kInRegisters) {
        weights[slot][0] = weights[slot][1] = ONES;
        if (w) load_cached(weights[slot], src);
      } else if (w) {
        u32 dst = (u32)__cvta_generic_to_shared(&parked[slot][i]);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
      } else {
        parked[slot][i] = make_uint2(ONES, ONES);
      }
    }
  }
  if constexpr (!kInRegisters) asm volatile("cp.async.commit_group;" ::: "memory");

  __shared__ float4 warps[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float first = 0.f, second = 0.f;
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n) {
      first = square_sum(first, x0[r][n]);
      second = square_sum(second, x1[r][n]);
    }
    store_warp_sums(first, second, (float*)&warps[r], i);
  }
  __syncthreads();  // one barrier serves q and k
  float rstd[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) rstd[r] = rstd_of_warps(warps[r], (ROWS == 2 ? p.side[r] : tables).eps);
  if constexpr (!kInRegisters) asm volatile("cp.async.wait_group 0;" ::: "memory");

  // Without this the compiler keeps the unpacked fp32 row alive across the barrier: 900 bytes of spills.
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) asm volatile("" : "+r"(x0[r][n][j]), "+r"(x1[r][n][j]));

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const LtxRopeSide& side = ROWS == 2 ? p.side[r] : tables;
    char* out = out_at(side.out, b * side.out_b + s * side.out_s + head * (kOutPacked ? D : side.out_h) + within);
    const ltx_i64 out_chunk = (kOutPacked ? 512 : CHUNK_HEADS * side.out_h) * OUT_BYTES;
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n) {
      u32 w0[2], w1[2], out0[OUT_WORDS], out1[OUT_WORDS];
      const int slot = (r * CHUNKS + n) * 2;
      if constexpr (kInRegisters) {
        w0[0] = weights[slot][0], w0[1] = weights[slot][1];
        w1[0] = weights[slot + 1][0], w1[1] = weights[slot + 1][1];
      } else {
        uint2 a = parked[slot][i], c = parked[slot + 1][i];
        w0[0] = a.x, w0[1] = a.y, w1[0] = c.x, w1[1] = c.y;
      }
      rotate_pair(x0[r][n], x1[r][n], w0, w1, cos_v[n], sin_v[n], rstd[r], out0, out1);
      store_streamed(out + n * out_chunk, out0);
      store_streamed(out + n * out_chunk + D / 2 * OUT_BYTES, out1);
    }
  }
}
