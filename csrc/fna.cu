// 3D neighborhood attention, the `fast` schedule, for Hopper (sm_90a): one persistent kernel per window.
//
//   out[b,t,h,w] = softmax(scale * q . k over the window of (t,h,w)) v      bf16 in and out, fp32 inside, head_dim 64
//   window of an axis of n tokens: w keys from clamp(i - w/2, 0, n - w)
//
// Who computes what. The queries of a head are cut into tiles of 4 x 4 x 4 (T, H, W); a tile is the M = 64 rows of one
// warpgroup's wgmma, and warp i of the warpgroup owns row h = i of the tile (its 16 rows are t, w). All keys a tile needs
// lie in a box of (wt+3) x (wh+3) x (ww+3) tokens. A *column* is all tiles of one head with the same h and w: their boxes
// are the same (wh+3) x (ww+3) rectangle of every T slice, one behind the other. So a CTA takes a column, streams its
// slices through shared memory once (TMA, 5-D boxes straight from the un-permuted tensor), and WARPGROUPS consumers ride
// on the stream: consumer g owns tiles g, g + WARPGROUPS, ..., each busy for wt+3 of every 4*WARPGROUPS slices.
//
//   producer warp     K slice, V slice  ->  ring of STAGES in shared memory, rows of BOX_W keys x 64 x bf16, 128B swizzle
//   consumer, slice   for each chunk of rows: S = Q K^T (wgmma) -> P = exp2(S*c - m) -> O += P V (wgmma)
//
// The H mask costs nothing: of box rows j and wh + j (j = 0, 1, 2) exactly one lies in a query's window, the same for the
// whole warp. They are stored side by side, the valid score is selected, and one exp serves both rows.
// The W and T masks cost nothing either: they are -inf in the addend of the exp's FFMA.
//
// The row sum is a matrix product too: the B operand of P V has 8 more columns, all ones (the `ones` area, reached through
// the leading-dimension offset of the descriptor). It sums P as rounded to bf16, so the weights that are applied add up to
// exactly what is divided by; and it saves one FADD per key, which matters: issue slots are what limits this kernel.
//
// Safe softmax. p = 2^(x - m - HEADROOM), where x is the score in log2 units and m the largest of the first chunk of the
// tile's first slice. When a chunk holds a p >= 2 (x above m by more than HEADROOM + 1; or inf or NaN), m becomes the row's
// maximum so far, O is scaled and the chunk done again. The test is one LOP3 per four keys: p >= 2, inf and NaN are the bf16
// values with the top exponent bit set. The first slice may lie outside of the window of a row, and so may the score that m is
// of; then the sum can come out very small (below LEAST_SUM). Such rows, and rows that come out not finite (NaN or inf in the
// box, sums beyond fp32), are computed again by a plain loop over the window.
#include <stdint.h>
#include <cuda_bf16.h>

#ifndef LTX_WT
#error "LTX_WT, LTX_WH, LTX_WW: the window, 2..15 each"
#endif
constexpr int WT = LTX_WT, WH = LTX_WH, WW = LTX_WW;

#include "fna_config.h"

constexpr int HEAD_DIM = 64, ROW_BYTES = 128;
constexpr int BOX_W = LTX_FNA_BOX_W(WW), BOX_H = LTX_FNA_BOX_H(WH, WW), MIDDLE = LTX_FNA_MIDDLE(WH, WW);
constexpr bool PAIRED = WH >= 3;
constexpr int WARPGROUPS = LTX_FNA_WARPGROUPS(WT), CTAS = LTX_FNA_CTAS(WT, WH, WW);
constexpr int STAGES = LTX_FNA_STAGES(WT, WH, WW);
constexpr int SLICE = LTX_FNA_SLICE_BYTES(WH, WW), Q_BYTES = LTX_FNA_Q_BYTES, ONES_BYTES = LTX_FNA_ONES_BYTES;
constexpr int THREADS = LTX_FNA_THREADS(WT);
// of a consumer's thread: what the launch gives to each (65536 / threads, down to a multiple of 8), and the producers' share
constexpr int REGISTERS = ((65536 / (THREADS * CTAS) / 8 * 8) * (WARPGROUPS + 1) - 24) / WARPGROUPS / 8 * 8;
// shared memory, from a 1024-byte boundary
constexpr int AT_K = 0, AT_V = STAGES * SLICE, AT_ONES = 2 * STAGES * SLICE, AT_Q = AT_ONES + ONES_BYTES;
constexpr int AT_BARRIERS = AT_Q + WARPGROUPS * Q_BYTES;
constexpr int K_FULL = 0, V_FULL = STAGES, K_EMPTY = 2 * STAGES, V_EMPTY = 3 * STAGES, Q_FULL = 4 * STAGES;
constexpr float HEADROOM = 16.0f;
constexpr float LEAST_SUM = 1.26e-29f;  // 2^-96: above it, no key that counts for a bf16 result was lost to underflow
static_assert(AT_BARRIERS + 8 * (4 * STAGES + WARPGROUPS) + 1024 <= LTX_FNA_SMEM_BYTES(WT, WH, WW), "shared memory");
static_assert(BOX_H * BOX_W % 16 == 0, "a slice is whole k16 steps");

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct Params {
  const __nv_bfloat16 *q, *k, *v;
  __nv_bfloat16* out;
  int64_t stride[3][5];  // of q, k, v, in elements: b, t, h, w, head
  int32_t batch, T, H, W, heads;
  int32_t segment, segments;  // tiles of T per item; segments per column
  float scale_log2;
};

// ---- PTX ------------------------------------------------------------------------------------------------------------
#define DEVICE __device__ __forceinline__
DEVICE void barrier_init(uint32_t b, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count)); }
DEVICE void barrier_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
DEVICE void barrier_expect(uint32_t b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(b),
      "r"(parity)
      : "memory");
}
DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE uint32_t pack(float low, float high) {  // round to nearest even
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Operands in shared memory: 128-byte rows, 128B swizzle, 1024 bytes from one group of 8 rows to the next. All that varies is
// in the low word of the descriptor: the address, and the leading-dimension offset, both in units of 16 bytes.
DEVICE uint32_t operand(uint32_t address, uint32_t leading = 16) { return (address & 0x3ffff) >> 4 | leading >> 4 << 16; }
#define DESCRIPTOR(name, low) ".reg .b64 " name ";\nmov.b64 " name ", {%" low ", 0x40000040};\n"

#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC8(d, i) ACC4(d, i), ACC4(d, i + 4)
#define ACC16(d, i) ACC8(d, i), ACC8(d, i + 8)
#define ACC32(d, i) ACC16(d, i), ACC16(d, i + 16)
#define REG8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define REG16 REG8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REG24 REG16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define REG32 REG24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define REG36 REG32 ",%32,%33,%34,%35"

// s [64, N] = q [64, 16] k^T [16, N] (+ s, but for the first step); both in shared memory, K-major.
template <int N>
DEVICE void wgmma_qk(float (&s)[N / 2], uint32_t q, uint32_t k, bool add) {
#define QK(N_, REGS, Q, K, ADD, ...)                                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADD ", 0;\n" DESCRIPTOR("q", Q) DESCRIPTOR("k", K) \
               "wgmma.mma_async.sync.aligned.m64n" N_ "k16.f32.bf16.bf16 {" REGS "}, q, k, p, 1, 1, 0, 0;\n}\n" \
               : __VA_ARGS__                                                                            \
               : "r"(q), "r"(k), "r"((int)add))
  if constexpr (N == 16) QK("16", REG8, "8", "9", "10", ACC8(s, 0));
  else if constexpr (N == 32) QK("32", REG16, "16", "17", "18", ACC16(s, 0));
  else if constexpr (N == 48) QK("48", REG24, "24", "25", "26", ACC16(s, 0), ACC8(s, 16));
  else if constexpr (N == 64) QK("64", REG32, "32", "33", "34", ACC32(s, 0));
  else static_assert(N == 64, "chunk width");
#undef QK
}

// o [64, 72] += p [64, 16] [v | ones] [16, 72]; p in registers, v in shared memory, hd-major.
DEVICE void wgmma_pv(float (&o)[36], const uint32_t* p, uint32_t v) {
  asm volatile("{\n" DESCRIPTOR("v", "40") "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {" REG36
               "}, {%36,%37,%38,%39}, v, 1, 1, 1, 1;\n}\n"
               : ACC32(o, 0), ACC4(o, 32)
               : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(v));
}

// ---- where things are -------------------------------------------------------------------------------------------------
DEVICE int window_start(int i, int n, int w) { return min(max(min(i, n - 1) - w / 2, 0), n - w); }

struct Item {  // what a CTA does at a time: one column, or a segment of its tiles
  int batch, head, h0, w0, box_h, box_w;
  int tile, tiles;           // first tile of T, one past the last
  int first;                 // slice at stream position 0
  int length;                // of the stream
  int resend, resent;        // the last tile may need slices that a consumer has passed: `resent` of them come again at `resend`
  DEVICE int slice(int x) const { return first + (x < resend ? x : x - resent); }
};

DEVICE Item item_of(int index, const Params& p) {
  const int tiles_t = (p.T + 3) / 4, tiles_h = (p.H + 3) / 4, tiles_w = (p.W + 3) / 4;
  Item c;
  c.head = index % p.heads;
  int r = index / p.heads;
  const int columns = tiles_h * tiles_w, all = r / columns;
  r -= all * columns;
  c.batch = all / p.segments;
  const int segment = all - c.batch * p.segments;
  const int band = r / (4 * tiles_w), rows = min(4, tiles_h - 4 * band);  // bands of four tiles of H share keys in L2
  r -= band * 4 * tiles_w;
  c.w0 = r / rows * 4;
  c.h0 = (band * 4 + r % rows) * 4;
  c.box_h = window_start(c.h0, p.H, WH), c.box_w = window_start(c.w0, p.W, WW);
  c.tile = segment * p.segment, c.tiles = min(c.tile + p.segment, tiles_t);
  const int last = c.tiles - 1, same = last - WARPGROUPS;  // of one consumer
  c.first = window_start(4 * c.tile, p.T, WT);
  const int end = window_start(4 * last + 3, p.T, WT) + WT;
  c.resend = 1 << 29, c.resent = 0;
  if (same >= c.tile) {
    const int passed = window_start(4 * same + 3, p.T, WT) + WT, needed = window_start(4 * last, p.T, WT);
    if (needed < passed) c.resent = passed - needed, c.resend = passed - c.first;
  }
  c.length = end - c.first + c.resent;
  return c;
}

struct Ring {
  int stage;
  uint32_t parity;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// ---- producer -----------------------------------------------------------------------------------------------------------
// Box rows in shared memory: 0, WH, 1, WH+1, 2, WH+2, 3, 4, ... (PAIRED), or in order.
DEVICE void load_slice(uint32_t to, const TensorMap* one, const TensorMap* middle, uint32_t barrier, const Item& c, int t) {
  barrier_expect(barrier, SLICE);
  int at = 0;
  if constexpr (PAIRED) {
#pragma unroll
    for (; at < 6; ++at)
      tma_load(to + at * BOX_W * ROW_BYTES, one, barrier, 0, c.head, c.box_w, c.box_h + at / 2 + (at & 1) * WH, t);
  }
  if constexpr (MIDDLE > 0)
    tma_load(to + at * BOX_W * ROW_BYTES, middle, barrier, 0, c.head, c.box_w, c.box_h + (PAIRED ? 3 : 0), t);
}

// ---- consumers ------------------------------------------------------------------------------------------------------------
constexpr int COLUMNS = BOX_W / 4;  // keys of a box row that a thread holds: 8b + 2*(lane%4) + {0, 1}

struct Rows {                // the two query rows of a thread: t = lane/16 and lane/16 + 2; w = lane/4 % 4
  float m[2];                // reference of the exponent, in log2 units
  float addend[2][COLUMNS];  // -m - HEADROOM, or -inf for keys outside of the window in W or T
  uint32_t columns;          // bit i: key column i of mine is in the window
  bool active[2];            // the slice is in the window of the row
  int h;                     // the window's first row in the box, 0..3; the same for the whole warp
  DEVICE void set_addends() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // a row that has only seen -inf has that for m; 0 does as well for its exponentials, and gives 0
      const float base = active[row] ? (m[row] == -INFINITY ? 0.0f : -m[row]) - HEADROOM : -INFINITY;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) addend[row][c] = (columns >> c) & 1 ? base : -INFINITY;
    }
  }
};

// Does box row (in its place in shared memory) `at` lie in the warp's window?
DEVICE bool row_valid(int at, int h) {
  if (PAIRED) return at < 6 ? ((at & 1) ? h > at / 2 : h <= at / 2) : at < WH + 3;
  return at >= h && at < h + WH;
}

// P of one chunk of rows [R0, R0 + NR) as the A operand, from its scores. Returns the bits to look for overflow in.
template <int R0, int NR>
DEVICE uint32_t exponentials(const float (&s)[NR * BOX_W / 2], uint32_t (&p)[NR * BOX_W / 4], const Rows& rows, float scale_log2) {
  uint32_t seen = 0;
#pragma unroll
  for (int r = 0; r < NR; ++r) {
    const int at = R0 + r;
    const bool pair = PAIRED && at < 6;
    if (pair && (at & 1)) continue;  // done with the one before
    const bool valid = row_valid(at, rows.h);
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int b = 0; b < BOX_W / 8; ++b) {
        const int i = (r * BOX_W / 8 + b) * 4 + 2 * row, other = i + BOX_W / 2;
        float x0 = s[i], x1 = s[i + 1];
        if (pair) x0 = valid ? x0 : s[other], x1 = valid ? x1 : s[other + 1];
        const uint32_t two = pack(exp2_approx(fmaf(x0, scale_log2, rows.addend[row][2 * b])),
                                  exp2_approx(fmaf(x1, scale_log2, rows.addend[row][2 * b + 1])));
        const bool always = !pair && PAIRED && at < WH + 3;
        p[i / 2] = always || valid ? two : 0;
        if (pair) p[other / 2] = valid ? 0 : two;
        seen |= pair ? two : p[i / 2];
      }
  }
  return seen;
}

// Moves m up to the largest score seen, this chunk included, and scales what has been summed. FRESH: for the first time, and
// for rows whose window starts at a later slice too.
template <int R0, int NR, bool FRESH>
DEVICE void raise_reference(const float (&s)[NR * BOX_W / 2], float (&o)[36], Rows& rows, float scale_log2) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float most = -INFINITY;
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int b = 0; b < BOX_W / 8; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool valid = row_valid(R0 + r, rows.h) && ((rows.columns >> (2 * b + e)) & 1);
          most = fmaxf(most, valid ? s[(r * BOX_W / 8 + b) * 4 + 2 * row + e] * scale_log2 : -INFINITY);
        }
    if (!FRESH && !rows.active[row]) most = -INFINITY;
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    if (FRESH) {
      rows.m[row] = most;
      continue;
    }
    const float old = rows.m[row], now = fmaxf(old, most);
    const float factor = now == old ? 1.0f : exp2_approx(old - now);
    rows.m[row] = now;
#pragma unroll
    for (int n = 0; n < 9; ++n) o[4 * n + 2 * row] *= factor, o[4 * n + 2 * row + 1] *= factor;
  }
  rows.set_addends();
}

struct Tile {  // addresses of one consumer
  uint32_t barriers;
  uint32_t q, k, v;  // operands; K and V at stage 0
  bool leader;       // one lane of each warp arrives
};

template <int R0, int NR, bool FIRST, bool LAST>
DEVICE void chunk(const Tile& tile, const Ring& ring, float (&o)[36], Rows& rows, float scale_log2, bool fresh, uint32_t& unreleased) {
  constexpr int STAGE = SLICE / 16, START = R0 * BOX_W * ROW_BYTES / 16, STEP = 16 * ROW_BYTES / 16;
  float s[NR * BOX_W / 2];
  uint32_t p[NR * BOX_W / 4];
  if (FIRST) barrier_wait(tile.barriers + 8 * (K_FULL + ring.stage), ring.parity);
  const uint32_t k = tile.k + ring.stage * STAGE + START;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; ++i) wgmma_qk<NR * BOX_W>(s, tile.q + 2 * i, k + 2 * i, i > 0);
  wgmma_commit();
  wgmma_wait();  // also for the P V of the chunk before, which was left running
  if (FIRST && unreleased && tile.leader) barrier_arrive(unreleased);
  if (LAST && tile.leader) barrier_arrive(tile.barriers + 8 * (K_EMPTY + ring.stage));
  if (FIRST) {
    if (fresh) raise_reference<R0, NR, true>(s, o, rows, scale_log2);
    else rows.set_addends();
  }
  const uint32_t seen = exponentials<R0, NR>(s, p, rows, scale_log2);
  if (__any_sync(0xffffffffu, (seen & 0x40004000u) != 0)) {
    raise_reference<R0, NR, false>(s, o, rows, scale_log2);
    exponentials<R0, NR>(s, p, rows, scale_log2);
  }
  if (FIRST) barrier_wait(tile.barriers + 8 * (V_FULL + ring.stage), ring.parity);
  // where the address moves on, the offset to the ones gets shorter
  const uint32_t v = tile.v + (ring.stage * STAGE + START) * (1 - (1 << 16));
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < NR * BOX_W / 16; ++i) wgmma_pv(o, p + 4 * i, v + i * STEP * (1 - (1 << 16)));
  wgmma_commit();
  if (LAST) unreleased = tile.barriers + 8 * (V_EMPTY + ring.stage);
}

// Chunks are as wide as registers allow, as equal as can be, and do not part a pair.
constexpr int WIDTH = CTAS == 2 ? 48 : 64, MOST = BOX_W == 32 ? 2 : WIDTH / BOX_W;
__host__ __device__ constexpr int chunk_rows(int from) {
  const int left = BOX_H - from, chunks = (left + MOST - 1) / MOST;
  int rows = (left + chunks - 1) / chunks;
  if (BOX_W == 8) rows += rows % 2;  // whole k16 steps
  if (PAIRED && from + rows < 6 && rows % 2) rows += rows < MOST ? 1 : -1;
  return rows;
}

// All chunks of a slice, the last rows first: those are in every query's window.
template <int FROM>
DEVICE void chunks(const Tile& tile, const Ring& ring, float (&o)[36], Rows& rows, float scale_log2, bool fresh, uint32_t& unreleased) {
  constexpr int to = FROM + chunk_rows(FROM);
  if constexpr (to < BOX_H) chunks<to>(tile, ring, o, rows, scale_log2, fresh, unreleased);
  chunk<FROM, to - FROM, to == BOX_H, FROM == 0>(tile, ring, o, rows, scale_log2, fresh, unreleased);
}

DEVICE void skip_slice(const Tile& tile, Ring& ring) {
  barrier_wait(tile.barriers + 8 * (K_FULL + ring.stage), ring.parity);
  barrier_wait(tile.barriers + 8 * (V_FULL + ring.stage), ring.parity);
  __syncwarp();
  if (tile.leader) {
    barrier_arrive(tile.barriers + 8 * (K_EMPTY + ring.stage));
    barrier_arrive(tile.barriers + 8 * (V_EMPTY + ring.stage));
  }
  ring.next();
}

// One query, by the whole warp: three passes over the window (maximum, sum, values), lane i holding dims 2i and 2i + 1.
// NaN and infinities come out as softmax(q k) v gives them, and a sum of weights times values cannot overflow.
__device__ __noinline__ void plain_query(const Params& p, int batch, int t, int h, int w, int head) {
  const int lane = threadIdx.x & 31;
  const int first[3] = {window_start(t, p.T, WT), window_start(h, p.H, WH), window_start(w, p.W, WW)};
  auto load = [&](const __nv_bfloat16* base, const int64_t* s, int ti, int hi, int wi) {
    const int64_t at = batch * s[0] + ti * s[1] + hi * s[2] + wi * s[3] + head * s[4] + 2 * lane;
    return __bfloat1622float2(*(const __nv_bfloat162*)(base + at));
  };
  const float2 q = load(p.q, p.stride[0], t, h, w);
  float most = -INFINITY, sum = 0.0f, inverse = 0.0f;
  float2 out = {0.0f, 0.0f};
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
#pragma unroll 1
    for (int i = 0; i < WT * WH * WW; ++i) {
      const int ti = first[0] + i / (WH * WW), hi = first[1] + i / WW % WH, wi = first[2] + i % WW;
      const float2 k = load(p.k, p.stride[1], ti, hi, wi);
      float x = fmaf(q.x, k.x, q.y * k.y);
#pragma unroll
      for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
      x = __fmul_rn(x, p.scale_log2);  // rounded, or x - most would not be 0 for the largest
      if (pass == 0) {
        most = fmaxf(most, x);
        continue;
      }
      const float weight = exp2_approx(x - most);
      sum += pass == 1 ? weight : 0.0f;
      if (pass == 2) {
        const float2 v = load(p.v, p.stride[2], ti, hi, wi);
        out.x = fmaf(weight * inverse, v.x, out.x), out.y = fmaf(weight * inverse, v.y, out.y);
      }
    }
    inverse = 1.0f / sum;
  }
  const int64_t at = ((((int64_t)batch * p.T + t) * p.H + h) * p.W + w) * p.heads + head;
  ((uint32_t*)p.out)[at * 32 + lane] = pack(out.x, out.y);
}

extern __shared__ uint8_t shared_memory[];

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    ltx_fna(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_one, const __grid_constant__ TensorMap k_middle,
            const __grid_constant__ TensorMap v_one, const __grid_constant__ TensorMap v_middle, const __grid_constant__ Params p) {
  const uint32_t shared = ((uint32_t)__cvta_generic_to_shared(shared_memory) + 1023) & ~1023u;
  const uint32_t barriers = shared + AT_BARRIERS;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(barriers + 8 * (K_FULL + i), 1);
      barrier_init(barriers + 8 * (V_FULL + i), 1);
      barrier_init(barriers + 8 * (K_EMPTY + i), 4 * WARPGROUPS);
      barrier_init(barriers + 8 * (V_EMPTY + i), 4 * WARPGROUPS);
    }
    for (int i = 0; i < WARPGROUPS; ++i) barrier_init(barriers + 8 * (Q_FULL + i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = threadIdx.x; i < ONES_BYTES / 4; i += THREADS)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared + AT_ONES + 4 * i), "r"(0x3f803f80) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const int items = p.heads * ((p.H + 3) / 4) * ((p.W + 3) / 4) * p.segments * p.batch;
  Ring ring{0, 0};

  if (warp >= 4 * WARPGROUPS) {  // the producer: one thread, in a warpgroup of its own that gives up its registers
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x != 128 * WARPGROUPS) return;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      const Item c = item_of(index, p);
      for (int x = 0; x < c.length; ++x) {
        const int t = c.batch * p.T + c.slice(x);
        const uint32_t k_full = barriers + 8 * (K_FULL + ring.stage), v_full = barriers + 8 * (V_FULL + ring.stage);
        barrier_wait(barriers + 8 * (K_EMPTY + ring.stage), ring.parity ^ 1);
        load_slice(shared + AT_K + ring.stage * SLICE, &k_one, &k_middle, k_full, c, t);
        barrier_wait(barriers + 8 * (V_EMPTY + ring.stage), ring.parity ^ 1);
        load_slice(shared + AT_V + ring.stage * SLICE, &v_one, &v_middle, v_full, c, t);
        ring.next();
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  const int group = warp / 4, row_h = warp % 4;
  const int row_t = lane / 16, row_w = lane / 4 % 4, column = lane % 4 * 2;
  const uint32_t q_at = shared + AT_Q + group * Q_BYTES, q_full = barriers + 8 * (Q_FULL + group);
  const Tile tile{barriers, operand(q_at), operand(shared + AT_K), operand(shared + AT_V, AT_ONES - AT_V), lane == 0};
  uint32_t q_parity = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item c = item_of(index, p);
    Rows rows;
    rows.h = window_start(c.h0 + row_h, p.H, WH) - c.box_h;
    const int first_w = window_start(c.w0 + row_w, p.W, WW) - c.box_w;
    rows.columns = 0;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i)
      rows.columns |= (uint32_t)(unsigned(column + i / 2 * 8 + i % 2 - first_w) < unsigned(WW)) << i;
    int x = 0;
#pragma unroll 1
    for (int i = c.tile + group; i < c.tiles; i += WARPGROUPS) {
      const int t0 = 4 * i;
      const bool last = i == c.tiles - 1;
      if (threadIdx.x % 128 == 0) {
        barrier_expect(q_full, Q_BYTES);
        tma_load(q_at, &q_map, q_full, 0, c.head, c.w0, c.batch * p.T + t0, c.h0);
      }
      const int low = window_start(t0, p.T, WT) - c.first, high = window_start(t0 + 3, p.T, WT) + WT - c.first;
      const int from = last || low >= c.resend ? low + c.resent : low;
      const int to = last || high > c.resend ? high + c.resent : high;
      const int first_0 = window_start(t0 + row_t, p.T, WT), first_1 = window_start(t0 + row_t + 2, p.T, WT);
      while (x < from) skip_slice(tile, ring), ++x;
      uint32_t unreleased = 0;
      float o[36];
#pragma unroll
      for (int n = 0; n < 36; ++n) o[n] = 0.0f;
      bool fresh = true;
      barrier_wait(q_full, q_parity);
      q_parity ^= 1;
#pragma unroll 1
      for (; x < to; ++x) {
        if (!last && x >= c.resend && x < c.resend + c.resent) {  // these come again for the last tile only
          wgmma_wait();
          if (unreleased && tile.leader) barrier_arrive(unreleased);
          unreleased = 0;
          skip_slice(tile, ring);
          continue;
        }
        const int t = c.slice(x);
        rows.active[0] = unsigned(t - first_0) < unsigned(WT), rows.active[1] = unsigned(t - first_1) < unsigned(WT);
        chunks<0>(tile, ring, o, rows, p.scale_log2, fresh, unreleased);
        fresh = false;
        ring.next();
      }
      wgmma_wait();
      if (unreleased && tile.leader) barrier_arrive(unreleased);
      const int h = c.h0 + row_h, w = c.w0 + row_w;
      unsigned again[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float sum = o[32 + 2 * row], inverse = sum < LEAST_SUM ? INFINITY : __frcp_rn(sum);
        const int t = t0 + row_t + 2 * row;
        const bool inside = t < p.T && h < p.H && w < p.W;
        const int64_t at = ((((int64_t)c.batch * p.T + t) * p.H + h) * p.W + w) * p.heads + c.head;
        float finite = 0.0f;  // 0 * x is NaN if x is not finite
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float a = o[4 * n + 2 * row] * inverse, b = o[4 * n + 2 * row + 1] * inverse;
          finite = fmaf(a, 0.0f, fmaf(b, 0.0f, finite));
          if (inside) ((uint32_t*)p.out)[at * 32 + 4 * n + lane % 4] = pack(a, b);
        }
        again[row] = __ballot_sync(0xffffffffu, inside && finite != 0.0f);
      }
#pragma unroll 1
      for (int row = 0; row < 2; ++row)
#pragma unroll 1
        for (unsigned left = again[row]; left;) {
          const int quad = (__ffs(left) - 1) / 4;  // rows are quads of lanes: t = quad / 4, w = quad % 4
          left &= ~(15u << 4 * quad);
          __syncwarp();
          plain_query(p, c.batch, t0 + quad / 4 + 2 * row, h, c.w0 + quad % 4, c.head);
        }
      asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");  // all warps are done with Q
    }
    while (x < c.length) skip_slice(tile, ring), ++x;
  }
}
