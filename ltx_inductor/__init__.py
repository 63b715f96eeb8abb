"""ltx_inductor: a torch.compile pass that puts fused kernels into unchanged LTX video models, with eager's bits."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

import ltx_inductor.ops.rope as _rope  # noqa: F401  (whoever loads a compiled graph finds its ops)
from ltx_inductor.config import Config
from ltx_inductor.rewrite.report import LostFusionError, Refusal, RewriteReport, Site

if TYPE_CHECKING:
    from ltx_inductor.backend import ltx_backend
    from ltx_inductor.explainer import explain
    from ltx_inductor.kernels.counts import stats
    from ltx_inductor.registration import enabled, register, unregister
    from ltx_inductor.session import last_report

# Imported at first use: these import torch._dynamo, which alone takes a second.
_LAZY = {
    "ltx_backend": "backend",
    "explain": "explainer",
    "register": "registration",
    "unregister": "registration",
    "enabled": "registration",
    "last_report": "session",
    "stats": "kernels.counts",
}

__all__ = [
    "Config",
    "LostFusionError",
    "Refusal",
    "RewriteReport",
    "Site",
    "__version__",
    "enabled",
    "explain",
    "last_report",
    "ltx_backend",
    "register",
    "stats",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
