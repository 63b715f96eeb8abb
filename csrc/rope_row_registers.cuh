// RMSNorm over the row + split RoPE, the row in registers: the kernel for production shapes.
//
// group   64 threads (2 warps) do one row; no loop over rows: the CTAs of an SM overlap each other's loads, barriers
//         and stores
// grid    x: GROUPS = 2: tokens; group 0 does the q row and group 1 the k row, and what both read of cos and sin comes
//            from device memory once and from L1 the second time
//            GROUPS = 1: rows: the q rows, then the k rows, each with its own cos and sin (alternately if they share them)
//         y: batch
// bytes   every byte of x, cos, sin and out moves once; weights come from L1
//
// A row is N / 512 chunks of 128 vectors (4 elements, 8 bytes). torch gives vector v of a chunk to its thread v of 128.
// Here thread i of a group plays two of torch's threads, the two that hold a rotation pair:
//
//     i bits  ..k+1 k | k-1 .. 0        k = log2(D / 8); e.g. D = 128: k = 4
//     vector  = upper bits : half : lower bits          half = 0, 1 in the same thread
//
// so that the partner needs no shuffle, a warp's loads stay contiguous in runs of D bytes, and torch's sum can be kept:
//     per vector  acc = fma(v, v, acc), in element order, one accumulator per played thread
//     per warp    shfl_down 16, 8, 4, 2, 1  ==  xor 16, 8, 4, 2, 1 (addition commutes). The level whose distance is D / 8
//                 vectors is the addition inside the thread; the levels above it run on both halves
//     per block   (w0 + w2) + (w1 + w3) over torch's four warps, through one float4 in shared memory
// 8-byte loads are enough: 4 * N/512 of them per thread (32 for N = 4096) are in flight before the first is used.
#pragma once
#include "rope_math.cuh"

constexpr int CHUNKS = N / 512;
constexpr int CHUNK_HEADS = 512 / D;

// Weights behind the row: a short grid is done sooner (a126: 2.9 against 3.1 us). A long row hides them better in front
// (N = 8192: 83 against 90 us).
constexpr bool kWeightsFirst = CHUNKS > 8;

__host__ __device__ constexpr int blocks_per_sm(int groups) {
  const int registers = CHUNKS * (4 + 2 * TABLE_WORDS) + 30;
  const int fit = 65536 / (LTX_REGISTER_THREADS * registers);  // groups; 4 schedulers share the register file evenly,
  return fit / 2 * 2 / groups > 12 ? 12 : fit / 2 * 2 / groups;  // so that an odd number of 2-warp groups gains nothing
}

// The sums of squares of torch's warps out of the two halves' accumulators; see the picture above.
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

template <int GROUPS>
__device__ __forceinline__ void rope_row_registers(const LtxRopeParams& p) {
  constexpr int T = LTX_REGISTER_THREADS;
  const int i = threadIdx.x % T, group = GROUPS == 2 ? threadIdx.x / T : 0, b = blockIdx.y;
  const RowOfBlock row = GROUPS == 1 ? row_of_block(p) : RowOfBlock{false, blockIdx.x};
  const LtxRopeSide& side = p.side[GROUPS == 2 ? group : row.later];
  const LtxRopeSide& tables = GROUPS == 2 ? p.side[0] : side;
  const ltx_i64 s = row.s;
  if (GROUPS == 1 && b >= side.batch) return;

  const int head = i / HALF_VECS, within = i % HALF_VECS * 4;  // in the chunk; in the half head
  // The weights (of chunk n: vectors 2n of the first and 2n + 1 of the second half) wait in shared memory, fetched by
  // the SM's asynchronous copy: no registers while the row is in flight, and no barrier, since each thread reads only
  // what it fetched itself. The branch also keeps the assembler from mixing these with the loads of the row.
  __shared__ uint2 weights[GROUPS][CHUNKS * 2][T];
  auto park_weights = [&] {
    const u16* w = (const u16*)side.weight;
    if (w) {
#pragma unroll
      for (int v = 0; v < CHUNKS * 2; ++v) {
        const u32 target = (u32)__cvta_generic_to_shared(&weights[group][v][i]);
        const u16* source = w + head * D + within + v / 2 * 512 + v % 2 * (D / 2);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    } else {
#pragma unroll
      for (int v = 0; v < CHUNKS * 2; ++v) weights[group][v][i] = make_uint2(ONES, ONES);
    }
  };
  if constexpr (kWeightsFirst) park_weights();

  const u16* x = x_at(side.x, b * side.x_b + s * side.x_s + head * D + within);
  u32 x0[CHUNKS][2], x1[CHUNKS][2], cos_v[CHUNKS][TABLE_WORDS], sin_v[CHUNKS][TABLE_WORDS];
#pragma unroll
  for (int n = 0; n < CHUNKS; ++n) {
    load_streamed(x0[n], x + n * 512);
    load_streamed(x1[n], x + n * 512 + D / 2);
  }
  const ltx_i64 table = b * tables.cos_b + s * tables.cos_s + head * tables.cos_h + within;
  const ltx_i64 table_chunk = CHUNK_HEADS * tables.cos_h;
#pragma unroll
  for (int n = 0; n < CHUNKS; ++n) {
    if constexpr (GROUPS == 2) {
      load_twice(cos_v[n], table_at(tables.cos, table + n * table_chunk));
      load_twice(sin_v[n], table_at(tables.sin, table + n * table_chunk));
    } else {
      load_streamed(cos_v[n], table_at(tables.cos, table + n * table_chunk));
      load_streamed(sin_v[n], table_at(tables.sin, table + n * table_chunk));
    }
  }

  if constexpr (!kWeightsFirst) park_weights();

  __shared__ float4 warps[GROUPS];
  float first = 0.f, second = 0.f;
#pragma unroll
  for (int n = 0; n < CHUNKS; ++n) {
    first = square_sum(first, x0[n]);
    second = square_sum(second, x1[n]);
  }
  store_warp_sums(first, second, (float*)&warps[group], i);
  __syncthreads();
  const float rstd = rstd_of(sum_of_warps(warps[group]), side.eps);
  asm volatile("cp.async.wait_group 0;" ::: "memory");

  // Without this the compiler keeps the unpacked fp32 row alive across the barrier: 900 bytes of spills.
#pragma unroll
  for (int n = 0; n < CHUNKS; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) asm volatile("" : "+r"(x0[n][j]), "+r"(x1[n][j]));

  const ltx_i64 out = b * side.out_b + s * side.out_s + head * (kOutPacked ? D : side.out_h) + within;
  const ltx_i64 out_chunk = kOutPacked ? 512 : CHUNK_HEADS * side.out_h;
#pragma unroll
  for (int n = 0; n < CHUNKS; ++n) {
    const uint2 a = weights[group][n * 2][i], c = weights[group][n * 2 + 1][i];
    const u32 w0[2] = {a.x, a.y}, w1[2] = {c.x, c.y};
    u32 out0[OUT_WORDS], out1[OUT_WORDS];
    rotate_pair(x0[n], x1[n], w0, w1, cos_v[n], sin_v[n], rstd, out0, out1);
    store_streamed(out_at(side.out, out + n * out_chunk), out0);
    store_streamed(out_at(side.out, out + n * out_chunk + D / 2), out1);
  }
}
