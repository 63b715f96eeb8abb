/* What follows from a window (wt, wh, ww), for the kernel (fna.cu) and for who launches it: kernels/fna.py computes the same
 * numbers, and a test compares. */
#ifndef LTX_FNA_CONFIG_H
#define LTX_FNA_CONFIG_H

/* Keys of a box row: ww + 3, rounded up to what an MMA step can use. */
#define LTX_FNA_BOX_W(ww) ((ww) <= 5 ? 8 : (ww) <= 13 ? 16 : 32)
/* Rows of a box: wh + 3; even where a row is half an MMA step. */
#define LTX_FNA_BOX_H(wh, ww) ((wh) + 3 + (LTX_FNA_BOX_W(ww) == 8 ? ((wh) + 3) % 2 : 0))
/* Rows fetched in one piece: all but the three pairs (see fna.cu), or all. */
#define LTX_FNA_MIDDLE(wh, ww) (LTX_FNA_BOX_H(wh, ww) - ((wh) >= 3 ? 6 : 0))
#define LTX_FNA_SLICE_BYTES(wh, ww) (LTX_FNA_BOX_H(wh, ww) * LTX_FNA_BOX_W(ww) * 128)
/* Consumers: a tile is busy for wt + 3 slices, and gets a new one every 4 * WARPGROUPS. */
#define LTX_FNA_WARPGROUPS(wt) ((wt) <= 5 ? 2 : (wt) <= 9 ? 3 : 4)
#define LTX_FNA_THREADS(wt) (128 * (LTX_FNA_WARPGROUPS(wt) + 1))
#define LTX_FNA_Q_BYTES 8192
#define LTX_FNA_ONES_BYTES 2048
#define LTX_FNA_FIXED_BYTES(wt) (LTX_FNA_WARPGROUPS(wt) * LTX_FNA_Q_BYTES + LTX_FNA_ONES_BYTES + 256 + 1024)
/* An SM has 228 KB, of which every CTA keeps 1 KB. Two CTAs where there are two consumers each and two stages fit. */
#define LTX_FNA_FIT(ctas, wt, wh, ww) \
  ((228 * 1024 / (ctas) - 1024 - LTX_FNA_FIXED_BYTES(wt)) / (2 * LTX_FNA_SLICE_BYTES(wh, ww)))
#define LTX_FNA_CTAS(wt, wh, ww) ((wt) <= 5 && LTX_FNA_FIT(2, wt, wh, ww) >= 2 ? 2 : 1)
/* Slices of K and of V in shared memory: up to 4; 1 where a slice is that large. */
#define LTX_FNA_STAGES(wt, wh, ww) \
  (LTX_FNA_FIT(LTX_FNA_CTAS(wt, wh, ww), wt, wh, ww) < 4 ? LTX_FNA_FIT(LTX_FNA_CTAS(wt, wh, ww), wt, wh, ww) : 4)
#define LTX_FNA_SMEM_BYTES(wt, wh, ww) \
  (LTX_FNA_FIXED_BYTES(wt) + 2 * LTX_FNA_STAGES(wt, wh, ww) * LTX_FNA_SLICE_BYTES(wh, ww))

#endif
