"""A call of natten.na3d, taken at trace time, where NATTEN has no binary of its own.

With its binary, NATTEN's ops are in the graph and the rule finds them there. Without, na3d is pure Python that Dynamo
cannot trace: the graph breaks before any backend is called. So the decision has to fall while Dynamo traces, and it is
made where Dynamo inlines a Python function. There the compile knows its backend: a call in a compile that is ours, with
arguments that the rule takes, becomes the op `ltx_inductor::natten_na3d`; in any other compile, and for any other
arguments, Dynamo goes on as if we were not there. natten itself is never touched, nor imported.

The one thing that is changed, while somebody needs it, is a method of Dynamo: its callbacks would be forgotten at
`torch._dynamo.reset()`, and a polyfill would have to know natten before the user has imported it, and be the same for
all backends.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ltx_inductor.ops.natten_na3d  # noqa: F401  (registers the op)
from ltx_inductor import session
from ltx_inductor.config import Config
from ltx_inductor.rewrite.digits import Refuse
from ltx_inductor.rewrite.needs import NeighborhoodNeed
from ltx_inductor.rewrite.neighborhood import RULE
from ltx_inductor.rewrite.report import Refusal
from ltx_inductor.rewrite.rule import on_the_cpu
from ltx_inductor.rewrite.source import Origin, module_path, short_path

log = logging.getLogger("ltx_inductor")
_MODULE = "natten.functional"
_FUNCTIONS = ("na3d", "neighborhood_attention_generic")  # the second is what natten.NeighborhoodAttention3D calls
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class Compile:
    """What one of our compiles was asked to do, and whom it asks for kernels."""

    config: Config
    kernels: Any


Ours = Callable[[Any, Mapping[str, Any]], Compile | None]
"""Given a backend and its keyword arguments: what the compile was asked to do, or None where it is not ours."""

_lock = threading.RLock()
_owners: dict[object, Ours] = {}  # whose compiles are ours; the last one is asked first


def install(token: object, ours: Ours) -> None:
    """From now on calls in compiles that `ours` knows are taken. Again, with the same token: no effect but `ours`."""
    with _lock:
        _owners[token] = ours
        _sync()


def remove(token: object) -> None:
    """Undoes `install`; with the last token, Dynamo is as it was."""
    with _lock:
        _owners.pop(token, None)
        _sync()


def _sync() -> None:
    from torch._dynamo.variables import UserFunctionVariable

    mine = getattr(UserFunctionVariable.call_function, "_ltx_inductor", None)
    if _owners and mine is None:
        UserFunctionVariable.call_function = _wrapped(UserFunctionVariable.call_function)
    elif not _owners and mine is not None:  # somebody else's wrapper around ours stays, and ours does nothing in it
        UserFunctionVariable.call_function = mine


def _wrapped(original: Callable[..., Any]) -> Any:
    """Dynamo's inlining of a Python function, with a look at the function first."""

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self.fn, "__module__", None) == _MODULE and self.fn.__name__ in _FUNCTIONS:
            call = _taken(self.fn, tx, args, kwargs)
            if call is not None:
                return _emit(tx, call)
        return original(self, tx, args, kwargs)

    call_function._ltx_inductor = original  # type: ignore[attr-defined]
    return call_function


@dataclass(frozen=True)
class _Call:
    """A call that becomes the op. tensors: Dynamo's variables of query, key and value."""

    tensors: tuple[Any, Any, Any]
    kernel_size: tuple[int, int, int]
    scale: float


def _emit(tx: Any, call: _Call) -> Any:
    from torch._dynamo.variables import TorchInGraphFunctionVariable, VariableTracker

    op = TorchInGraphFunctionVariable(torch.ops.ltx_inductor.natten_na3d.default)
    rest = [VariableTracker.build(tx, list(call.kernel_size)), VariableTracker.build(tx, call.scale)]
    return op.call_function(tx, [*call.tensors, *rest], {})


def _taken(fn: Any, tx: Any, args: Any, kwargs: Any) -> _Call | None:
    """The call, if it is ours to take; if it could have been, the reason why not is kept for the report."""
    try:
        asked = _asked(tx.output.compiler_fn)
        if asked is None or RULE not in asked.config.rules or _has_binary(fn):
            return None
        return _read(fn, args, kwargs, asked)
    except Refuse as why:
        where = _origin(tx)
        if (
            where.source
        ):  # else it is natten's own frame, traced after the graph broke at the user's call, which was told
            facts = {"node": fn.__name__, "expected": why.expected, "found": why.found, "hint": why.hint}
            session.tell(Refusal(RULE, why.reason, **facts, **vars(where)))
    except Exception as error:  # the user's compile goes on as if we were not there
        log.warning("a call of natten.%s could not be read", fn.__name__, exc_info=error)
    return None


def _asked(backend: Any) -> Compile | None:
    with _lock:
        owners = list(reversed(_owners.values()))
    innermost, kwargs = _innermost(backend)
    return next((c for c in (ours(innermost, kwargs) for ours in owners) if c is not None), None)


def _innermost(backend: Any) -> tuple[Any, dict[str, Any]]:
    """The backend in the wrappers that Dynamo and torch.compile put around it, and the arguments it will be given."""
    kwargs: dict[str, Any] = {}
    while True:
        if hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif isinstance(backend, torch._TorchCompileWrapper):
            kwargs = {**backend.kwargs, **kwargs}
            backend = backend.compiler_fn
        elif isinstance(backend, functools.partial):
            kwargs = {**backend.keywords, **kwargs}
            backend = backend.func
        else:
            return backend, kwargs


def _has_binary(fn: Any) -> bool:
    """NATTEN's own kernels are there: its ops will be in the graph, where the rule reads them.

    Where the natten that is imported is not the one that is called, nobody knows, and the call is left alone.
    """
    package, module = sys.modules.get("natten"), sys.modules.get(_MODULE)
    if module is None or vars(module) is not fn.__globals__:
        return True
    return bool(getattr(package, "HAS_LIBNATTEN", True))


def _read(fn: Any, args: Any, kwargs: Any, asked: Compile) -> _Call | None:
    """The call as the op takes it. Raises Refuse; None where the call is wrong, which natten says itself."""
    given = inspect.signature(fn).bind(*args, **kwargs).arguments
    tensors = tuple(given[name].realize() for name in ("query", "key", "value"))
    q, k, v = (_fake(t) for t in tensors)
    if q is None or k is None or v is None or q.dim() != 6 or k.dim() != 6 or v.dim() != 6:
        return None
    constants = {name: _constant(name, given[name]) for name in given if name not in ("query", "key", "value")}
    _check_plain(constants)
    _check_tensors(q, k, v, asked)
    kernel_size = _three(constants["kernel_size"])
    if kernel_size is None:
        return None
    head_dim = q.shape[-1]
    if not isinstance(head_dim, int):
        raise Refuse(f"head_dim of na3d is {head_dim}", expected="a size that is known at compile time")
    need = NeighborhoodNeed(q.device, q.dtype, head_dim, kernel_size, exact=False)
    missing = asked.kernels.refusal(need) if asked.kernels is not None else None
    if missing:
        raise Refuse(missing)
    # As natten does it: a scale of 0 is the default too.
    return _Call(tensors, kernel_size, float(constants.get("scale") or head_dim**-0.5))


def _fake(variable: Any) -> Tensor | None:
    from torch._dynamo.variables import TensorVariable

    if not isinstance(variable, TensorVariable):
        return None
    value = variable.as_proxy().node.meta["example_value"]
    return value if isinstance(value, Tensor) else None


_HOW = (  # arguments that say how to compute, not what
    "attention_kwargs", "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape",
    "backward_kv_splits", "backward_use_pt_reduction", "run_persistent_kernel", "kernel_schedule", "torch_compile",
)  # fmt: skip


def _constant(name: str, variable: Any) -> Any:
    from torch._dynamo.variables import TensorVariable

    variable = variable.realize()
    if name in _HOW or isinstance(variable, TensorVariable):
        return variable
    try:
        return variable.as_python_constant()
    except Exception as error:
        raise Refuse(
            f"{name} is only known while the model runs", expected="a literal, or an attribute of the module"
        ) from error


def _three(value: Any) -> tuple[int, int, int] | None:
    """An argument that natten takes per axis or for all axes; None for what it does not take."""
    values = (value,) * 3 if isinstance(value, (int, bool)) else value
    if not isinstance(values, (tuple, list)) or len(values) != 3 or not all(isinstance(x, int) for x in values):
        return None
    return values[0], values[1], values[2]


def _check_plain(constants: Mapping[str, Any]) -> None:
    """Raises Refuse for whatever is more than plain neighborhood attention."""
    for name, plain in (("stride", 1), ("dilation", 1), ("is_causal", False)):
        value = constants.get(name, plain)
        if _three(value) != (plain,) * 3:
            raise Refuse(f"na3d is called with {name}={value}", expected=f"{name}={plain}")
    for name in ("additional_keys", "additional_values"):
        if constants.get(name) is not None:
            raise Refuse(f"na3d is called with {name}", expected="attention to the window only")
    if constants.get("return_lse", False):
        raise Refuse("na3d is called with return_lse=True: the op computes no logsumexp", expected="return_lse=False")
    backend = constants.get("backend")
    if backend is not None:
        raise Refuse(
            f"na3d is called with backend={backend!r}, one of NATTEN's own kernels",
            expected="backend=None",
            hint="leave the choice of the backend to NATTEN",
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, asked: Compile) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise Refuse(
            "na3d is called on tensors that need gradients, and the op has no backward",
            expected="inference",
            hint="call the model under torch.no_grad() or torch.inference_mode()",
        )
    for name, t in (("key", k), ("value", v)):
        if tuple(t.shape) != tuple(q.shape) or t.dtype != q.dtype or t.device != q.device:
            raise Refuse(
                f"{name} of na3d is {t.dtype} {list(t.shape)} on {t.device}",
                expected=f"as query: {q.dtype} {list(q.shape)} on {q.device}",
            )
    if q.device.type == "cpu" and not asked.config.cpu:
        raise on_the_cpu()


def _origin(tx: Any) -> Origin:
    """Of the line that calls, innermost outside torch and natten. tx: Dynamo's, which knows the modules."""
    file = getattr(sys.modules.get("natten"), "__file__", None)
    inside = (_TORCH, os.path.dirname(file) + os.sep) if file else (_TORCH,)
    for frame in reversed(torch._guards.TracingContext.extract_stack()):
        if not frame.filename.startswith(inside):
            source = f"{os.path.basename(frame.filename)}:{frame.lineno}"
            return Origin(source, short_path(frame.filename), frame.line or "", module_path(tx.nn_module_stack))
    return Origin()
