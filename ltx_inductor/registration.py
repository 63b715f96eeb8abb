"""The pass in Inductor's global hook, so that a plain `torch.compile(model)` is rewritten.

Inductor's config is per thread (a ContextVar), and `config.patch` restores whatever was there, so a hook set once
would be missing in other threads and could be lost in a nested patch. Therefore the pass is put in twice: into this
thread's hook right away, which serves direct calls of `compile_fx`, and, from a callback at the start of every Dynamo
compile, into the hook of the compiling thread if it is not there, for that compile only.

What no hook can serve: `torch.compile(options={"joint_custom_pre_pass": ...})` replaces the hook inside Inductor; the
pass given there runs and ours does not. `backend="ltx"` with the same option runs both. And what Dynamo has compiled
stays compiled: a model whose code went through Inductor before keeps that result until `torch._dynamo.reset()`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._dynamo.callback import callback_handler
from torch._inductor import config as inductor_config

import ltx_inductor.ops.rope  # noqa: F401  (a graph out of a cache finds its ops)
from ltx_inductor import natten_calls, session
from ltx_inductor.config import PREFIX, Config, check_mapping, from_environment
from ltx_inductor.joint_pass import LtxPass, flatten, with_ours, without_ours
from ltx_inductor.kernel_needs import device_kernels
from ltx_inductor.kernels import profit

_lock = threading.RLock()
_active: list[tuple[object, Config]] = []  # who asked for the pass, and how; the last one's options count
_EXPLICIT = object()  # the token of register(), which is idempotent
_local = threading.local()


def register(options: Mapping[str, Any] | None = None) -> None:
    """From now on every Inductor compile of this process runs the pass. Again: no effect but for new options.

    options: keys "ltx_inductor.*", on top of the environment's, e.g. {"ltx_inductor.cpu": True}.
    A user's own `joint_custom_pre_pass` keeps running, before ours.
    """
    _add(_EXPLICIT, _parse(options))


def unregister() -> None:
    """Undoes `register`; harmless if nothing is registered. Models compiled meanwhile stay as they are."""
    _remove(_EXPLICIT)


@contextlib.contextmanager
def enabled(options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """`register`, for compiles that happen inside the `with`; nests, and may end in any order."""
    token = object()
    _add(token, _parse(options))
    try:
        yield
    finally:
        _remove(token)


def _parse(options: Mapping[str, Any] | None) -> Config:
    options = {} if options is None else options
    check_mapping(options)
    foreign = [key for key in options if not key.startswith(PREFIX)]
    if foreign:
        raise ValueError(f"option {foreign[0]!r} is not ours: expected keys with the prefix {PREFIX!r}")
    config = from_environment().with_options(options)
    profit.table(config.profit)  # a table that cannot be read is told here, not in a later compile
    return config


def _add(token: object, config: Config) -> None:
    with _lock:
        _active[:] = [entry for entry in _active if entry[0] is not token] + [(token, config)]
        _sync()


def _remove(token: object) -> None:
    with _lock:
        _active[:] = [entry for entry in _active if entry[0] is not token]
        _sync()


def current_config() -> Config | None:
    """The options the registered pass runs with, or None while nothing is registered."""
    with _lock:
        return _active[-1][1] if _active else None


class RegisteredPass(LtxPass):
    """Our pass with the options of the moment; does nothing where it was left in a hook after `unregister`."""

    def __init__(self) -> None:
        super().__init__(Config())

    @property
    def active(self) -> bool:
        return current_config() is not None

    def __call__(self, graph: fx.Graph) -> None:
        config = current_config()
        if config is not None:
            _install_callbacks()
            LtxPass(config)(graph)

    def uuid(self) -> str | None:
        config = current_config()
        if config is None:
            return "ltx_inductor is not registered"
        _install_callbacks()
        return LtxPass(config).uuid()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegisteredPass)

    def __hash__(self) -> int:
        return hash(RegisteredPass)


def _sync() -> None:
    """Makes this thread's hook, and the callbacks, agree with `_active`."""
    old = inductor_config.joint_custom_pre_pass
    if _active:
        _install_callbacks()
        natten_calls.install(_EXPLICIT, _ours)
        inductor_config.joint_custom_pre_pass = with_ours(old, RegisteredPass())
        return
    natten_calls.remove(_EXPLICIT)
    new = without_ours(old)
    if new is not old:
        inductor_config.joint_custom_pre_pass = new


def _ours(backend: Any, _: Mapping[str, Any]) -> natten_calls.Compile | None:
    """Every compile with Inductor is ours while somebody is registered; where a custom backend ends, nobody knows."""
    config = current_config()
    if config is None or not (isinstance(backend, torch._TorchCompileInductorWrapper) or backend in _inductors()):
        return None
    return natten_calls.Compile(config, device_kernels(config.prove, config.profit))


def _inductors() -> tuple[Any, ...]:
    from torch._dynamo.backends.inductor import inductor
    from torch._inductor.compile_fx import compile_fx

    return inductor, compile_fx


def _install_callbacks() -> None:
    """`torch._dynamo.reset()` drops all callbacks, so this is called whenever we have the word."""
    with _lock:
        if _on_start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(_on_start)
            callback_handler.register_end_callback(_on_end)


def _on_start(_: Any) -> None:
    """In the compiling thread, before Inductor reads its hook."""
    _local.handled = sys.exc_info()[1]  # where the user's code compiles while it handles an exception
    old = inductor_config.joint_custom_pre_pass
    if current_config() is None or any(isinstance(p, LtxPass) for p in flatten(old)):
        return
    new = with_ours(old, RegisteredPass())
    inductor_config.joint_custom_pre_pass = new
    _local.put_in = (old, new)


def _on_end(_: Any) -> None:
    error = sys.exc_info()[1]
    session.finish(None if error is getattr(_local, "handled", None) else error)
    _local.handled = None
    old, new = getattr(_local, "put_in", None) or (None, None)
    _local.put_in = None
    if new is not None and inductor_config.joint_custom_pre_pass is new:
        inductor_config.joint_custom_pre_pass = old
