/* Which kernel serves which configuration, and its launch shape. Shared by the kernels (CUDA) and the launcher (C), so
 * that the two cannot disagree. A "pair" kernel does q and k of a token in one CTA, with one group of threads for each. */
#ifndef LTX_ROPE_PLAN_H
#define LTX_ROPE_PLAN_H

/* rope_row_registers.cuh: head_dim a power of two, hidden a multiple of 512 that fits the registers. */
#define LTX_REGISTER_THREADS 64
#define LTX_USES_REGISTERS(head_dim, norm, per_head)                                                        \
  (!(per_head) && ((head_dim) == 32 || (head_dim) == 64 || (head_dim) == 128 || (head_dim) == 256) && \
   (norm) % 512 == 0 && (norm) <= 8192)

/* rope_row_staged.cuh: any other norm over the row, and all row norms whose strides forbid vectors. */
#define LTX_STAGED_THREADS 128
/* q and k rows of a token both wait in shared memory; 48 KB is what a kernel gets without asking. */
#define LTX_STAGED_PAIR_FITS(norm) ((norm) <= 8192)

/* rope_per_head.cuh: a warp does 32 / GROUP heads of HEAD_UNROLL tokens, of q and of k if it is a pair kernel. */
#define LTX_HEAD_THREADS 128
#define LTX_HEAD_UNROLL 4
#define LTX_HEAD_GROUP(head_dim) ((head_dim) <= 32 ? 4 : (head_dim) <= 64 ? 8 : (head_dim) <= 128 ? 16 : 32)

#define LTX_HEAD_WARPS(heads, head_dim) \
  (((heads) + 32 / LTX_HEAD_GROUP(head_dim) - 1) / (32 / LTX_HEAD_GROUP(head_dim))) /* per HEAD_UNROLL tokens */
#define LTX_HEAD_BLOCKS(seq, heads, head_dim)                                                    \
  ((((seq) + LTX_HEAD_UNROLL - 1) / LTX_HEAD_UNROLL * LTX_HEAD_WARPS(heads, head_dim) + 3) / 4) /* 4 warps each */

#endif
