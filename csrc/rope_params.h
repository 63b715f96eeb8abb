/* What the launcher hands to every RoPE kernel, by value. Read by C (launcher.c) and by CUDA (nvcc and NVRTC, which has
 * no <stdint.h>), so it uses plain types only. All strides and offsets are in elements and 64 bits wide. */
#ifndef LTX_ROPE_PARAMS_H
#define LTX_ROPE_PARAMS_H

typedef long long ltx_i64;

/* One side (q or k) of a call. x is [B, S, heads, head_dim]: a [B, S, N] input is passed with x_h = head_dim * x_e.
 * Parameters are in constant memory, cold at every launch: what a kernel needs for its first loads is in the first line. */
typedef struct {
  int seq, batch, heads;
  float eps;
  const void* x;      /* 16-bit */
  ltx_i64 x_b, x_s;
  const void* cos;    /* [B, heads, S, head_dim / 2]; strides are 0 where a size of 1 is broadcast */
  const void* sin;
  const void* weight; /* 16-bit, contiguous, aligned to 8 bytes; NULL: no weight */

  ltx_i64 cos_b, cos_s, cos_h;
  void* out;
  ltx_i64 out_b, out_s, out_h; /* the innermost stride of an output is always 1 */
  ltx_i64 x_h;

  ltx_i64 x_e, cos_e, sin_b, sin_s, sin_h, sin_e; /* any-stride kernels only; else the elements are 1 and sin_* is cos_* */
  ltx_i64 pad[2];
} LtxRopeSide;

typedef struct {
  LtxRopeSide side[2]; /* q, k. A single tensor is a pair whose second side has seq = 0 */
} LtxRopeParams;

#endif
