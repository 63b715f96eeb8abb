"""The fused ops: schema, fake, reference and dispatch, one file per op. Importing it registers them."""

from ltx_inductor.ops import axial_rope as axial_rope
from ltx_inductor.ops import na3d as na3d
from ltx_inductor.ops import natten_na3d as natten_na3d
from ltx_inductor.ops import rope as rope
