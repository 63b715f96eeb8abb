/* What kernels/rope_axial.py hands to csrc/rope_axial.cu, by value. Plain types only: NVRTC has no <stdint.h>. All
 * strides are in elements. Token axes are those of x in front of the heads, padded in front with axes of size 1. */
#ifndef LTX_ROPE_AXIAL_PARAMS_H
#define LTX_ROPE_AXIAL_PARAMS_H

#define LTX_TOKEN_AXES 4
#define LTX_ROPE_AXES 3

typedef struct {
  const void* x;      /* 16-bit, innermost stride 1, every row aligned to 8 bytes */
  const void* weight; /* 16-bit, contiguous, aligned to 8 bytes; NULL: no weight */
  void* out;          /* 16-bit, contiguous */
  const float* cos[LTX_ROPE_AXES]; /* of every axis of the rotation: innermost stride 1, rows aligned to 8 bytes */
  const float* sin[LTX_ROPE_AXES]; /* with the strides of cos */
  long long x_stride[LTX_TOKEN_AXES], x_head;
  int table_stride[LTX_ROPE_AXES][LTX_TOKEN_AXES]; /* 0 where broadcast */
  /* n / sizes[i] == n * multiplier[i] >> shift[i] for n < 2^31 (Granlund and Montgomery, PLDI 1994) */
  unsigned long long multiplier[LTX_TOKEN_AXES];
  unsigned shift[LTX_TOKEN_AXES], sizes[LTX_TOKEN_AXES];
  unsigned tokens; /* the product of sizes, below 2^31 */
  int heads;
  float eps, scale;    /* the norm, rounded, is multiplied by scale and rounded again */
  unsigned scale_word; /* rope_axial: scale as a number of the 16-bit type, twice */
} LtxRopeAxialParams;

#endif
