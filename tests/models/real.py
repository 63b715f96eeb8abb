"""Models that people run, imported unchanged from the packages that ship them."""

from . import diffusers_ltx2, ltx_core_av

CASES = diffusers_ltx2.CASES + ltx_core_av.CASES
