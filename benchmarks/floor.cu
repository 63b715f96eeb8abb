// The byte floor: kernels that read and write what RMSNorm + split RoPE reads and writes, and compute nothing.
//
// A thread moves two 16-byte vectors of every row tensor (x and out), and the share of cos and sin that belongs to them.
// ROWS    row tensors that share one cos and sin: 2 for q and k of a self-attention, else 1
// TABLE   16-byte vectors of cos (and of sin) per two vectors of x: 1 for 16-bit tables, 2 for fp32; 0: tables that are small
//         enough (the same for all heads) to be left out
// OUT     16-byte vectors written per vector of x: 1, or 2 for an fp32 result
// NA      loads with L1::no_allocate (a floor has to be the faster of the two: neither wins everywhere)
#include <cuda_runtime.h>

template <bool NA> __device__ __forceinline__ uint4 load(const uint4* p) {
  uint4 r;
  if (NA) asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  else asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
__device__ __forceinline__ uint4 mix(uint4 a, uint4 b) { return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w); }

struct Part {  // q and k of a shared table; or one tensor with its own table
  const uint4 *x[2], *c, *s;
  uint4* o[2];
  long long pairs;  // of vectors of x, per row tensor
};

// blocks: those of the first part, then those of the second (a cross attention's k; may be empty)
template <int ROWS, int TABLE, int OUT, bool NA>
__global__ void __launch_bounds__(256) move(const __grid_constant__ Part first, const __grid_constant__ Part second, unsigned split) {
  const bool later = blockIdx.x >= split;
  const Part& p = later ? second : first;
  const long long i = (long long)(blockIdx.x - (later ? split : 0)) * 256 + threadIdx.x;
  if (i >= p.pairs) return;
  const int lane = i & 31;
  const long long j = 2 * i - lane;  // a warp moves 64 consecutive vectors, in two coalesced steps
  uint4 x[ROWS][2], t[2] = {make_uint4(1, 2, 3, 4), make_uint4(5, 6, 7, 8)};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) x[r][0] = load<NA>(p.x[r] + j), x[r][1] = load<NA>(p.x[r] + j + 32);
  if (TABLE == 1) t[0] = load<NA>(p.c + i), t[1] = load<NA>(p.s + i);
  if (TABLE == 2) {
    t[0] = mix(load<NA>(p.c + j), load<NA>(p.s + j));
    t[1] = mix(load<NA>(p.c + j + 32), load<NA>(p.s + j + 32));
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 y = mix(x[r][h], t[h]);
      if (OUT == 1) {
        __stcs(p.o[r] + j + 32 * h, y);
      } else {
        __stcs(p.o[r] + 2 * (j + 32 * h) - lane, y);
        __stcs(p.o[r] + 2 * (j + 32 * h) - lane + 32, y);
      }
    }
}

template <int ROWS, int TABLE, int OUT> static int go(const Part& a, const Part& b, int na, cudaStream_t st) {
  const unsigned na_blocks = (unsigned)((a.pairs + 255) / 256), nb_blocks = (unsigned)((b.pairs + 255) / 256);
  if (na_blocks + nb_blocks == 0) return 0;
  auto f = na ? move<ROWS, TABLE, OUT, true> : move<ROWS, TABLE, OUT, false>;
  f<<<na_blocks + nb_blocks, 256, 0, st>>>(a, b, na_blocks);
  return (int)cudaGetLastError();
}

// Elements of a row tensor must be a multiple of 512. Returns the CUDA error, or -1 for a combination that does not exist.
extern "C" int floor_move(const void* q, const void* k, const void* c, const void* s, void* qo, void* ko, long long elements,
                          const void* x2, const void* c2, const void* s2, void* o2, long long elements2, int rows, int table,
                          int out, int na, void* stream) {
  const Part a = {{(const uint4*)q, (const uint4*)k}, (const uint4*)c, (const uint4*)s, {(uint4*)qo, (uint4*)ko}, elements / 16};
  const Part b = {{(const uint4*)x2, nullptr}, (const uint4*)c2, (const uint4*)s2, {(uint4*)o2, nullptr}, elements2 / 16};
  cudaStream_t st = (cudaStream_t)stream;
#define GO(R, T, O) if (rows == R && table == T && out == O) return go<R, T, O>(a, b, na, st);
  GO(1, 0, 1) GO(1, 1, 1) GO(1, 2, 1) GO(2, 0, 1) GO(2, 1, 1) GO(2, 2, 1) GO(1, 1, 2) GO(1, 2, 2) GO(2, 1, 2) GO(2, 2, 2)
  return -1;
}
