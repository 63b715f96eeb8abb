// The entry points of one configuration (rope_config.cuh). The launcher looks them up by name:
//   rope_pair  q and k of a token in one CTA, cos and sin read once; only where they are shared
//   rope_row   q rows, then k rows
//   rope_any   the same for any strides and alignment, element by element
#include "rope_config.cuh"

#define LTX_ENTRY(name, bounds, call) \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ LtxRopeParams p) { call; }

#if LTX_PER_HEAD
#include "rope_per_head.cuh"
#if LTX_SHARED
LTX_ENTRY(rope_pair, (LTX_HEAD_THREADS), (rope_per_head<2, true>(p)))
#endif
LTX_ENTRY(rope_row, (LTX_HEAD_THREADS), (rope_per_head<1, true>(p)))
LTX_ENTRY(rope_any, (LTX_HEAD_THREADS), (rope_per_head<1, false>(p)))
#else
#include "rope_row_staged.cuh"
#if LTX_USES_REGISTERS(LTX_HEAD_DIM, LTX_NORM, LTX_PER_HEAD)
#include "rope_row_registers.cuh"
#if LTX_SHARED
LTX_ENTRY(rope_pair, (2 * LTX_REGISTER_THREADS, blocks_per_sm(2)), (rope_row_registers<2>(p)))
#endif
LTX_ENTRY(rope_row, (LTX_REGISTER_THREADS, blocks_per_sm(1)), (rope_row_registers<1>(p)))
#else
#if LTX_SHARED && LTX_STAGED_PAIR_FITS(LTX_NORM)
LTX_ENTRY(rope_pair, (2 * LTX_STAGED_THREADS), (rope_row_staged<2, true>(p)))
#endif
LTX_ENTRY(rope_row, (LTX_STAGED_THREADS), (rope_row_staged<1, true>(p)))
#endif
LTX_ENTRY(rope_any, (LTX_STAGED_THREADS), (rope_row_staged<1, false>(p)))
#endif
