/* What the launcher hands to every RoPE kernel, by value. Read by C (launcher.c) and by CUDA (nvcc and NVRTC, which has
 * no <stdint.h>), so it uses plain types only. All strides and offsets are in elements and 64 bits wide. */
#ifndef LTX_ROPE_PARAMS_H
#define LTX_ROPE_PARAMS_H

typedef long long ltx_i64;

/* One side (q or k) of a call. x is [B, S, heads, head_dim]: a [B, S, N] input is passed with x_h = head_dim * x_e. */
typedef struct {
  const void* x;      /* 16-bit */
  const void* weight; /* 16-bit, contiguous; NULL: no weight */
  const void* cos;    /* [B, heads, S, head_dim / 2]; strides are 0 where a size of 1 is broadcast */
  const void* sin;
  void* out;
  ltx_i64 x_b, x_s, x_h, x_e;
  ltx_i64 cos_b, cos_h, cos_s, cos_e;
  ltx_i64 sin_b, sin_h, sin_s, sin_e; /* only the any-stride kernels read these: elsewhere they equal cos_* */
  ltx_i64 out_b, out_s, out_h;        /* the innermost stride of an output is always 1 */
  int batch, seq, heads;
  float eps;
} LtxRopeSide;

typedef struct {
  LtxRopeSide side[2]; /* q, k. A single tensor is a pair whose second side has seq = 0 */
} LtxRopeParams;

#endif
