"""An environment for child processes in which the hook of `import torch` is installed, however this checkout was."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """This process's environment and `variables`, with the package; the entry point is put into `folder`.

    The CPU stands for a GPU there.
    """
    info = folder / "ltx_inductor_test-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ltx-inductor-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nltx_inductor_test = ltx_inductor_autoload:autoload\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "LTX_INDUCTOR_CPU": "1", **variables}
