"""Building, caching and launching of the CUDA kernels behind the ops.

Importing this package initialises nothing: torch.cuda, tvm_ffi and the compilers are first touched inside functions.
"""

from ltx_inductor.kernels.sources import csrc_dir, source_digest

__all__ = ["csrc_dir", "source_digest"]
