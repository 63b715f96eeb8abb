"""Two threads, and an Inductor cache of its own for every session: no test sees what an earlier run left."""

import os
import tempfile

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-cache-")

import torch

torch.set_num_threads(min(2, torch.get_num_threads()))
