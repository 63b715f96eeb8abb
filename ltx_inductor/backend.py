"""`ltx_backend`: Inductor, with our pass behind the user's own passes. The entry point `ltx` leads here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import ltx_inductor.ops.rope  # noqa: F401  (a graph out of a cache finds its ops)
from ltx_inductor import natten_calls, session
from ltx_inductor.config import PREFIX, Config, check_mapping, from_environment
from ltx_inductor.joint_pass import LtxPass, with_ours
from ltx_inductor.kernel_needs import device_kernels

_HOOK = "joint_custom_pre_pass"


def ltx_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Backend for `torch.compile(model, backend="ltx")`: compiles with Inductor after the rewrite.

    mode, options and dynamic mean what they mean for backend="inductor", errors included. Keys of `options` with the
    prefix "ltx_inductor." are ours (see `ltx_inductor.Config`), all others are Inductor's.

    Raises TypeError for a wrong argument, ValueError or TypeError for a wrong option of ours, RuntimeError for a wrong
    one of Inductor's (Dynamo wraps them into BackendCompilerFailed), LostFusionError if `ltx_inductor.strict` is set
    and a site was lost or refused.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    if not isinstance(gm, fx.GraphModule):
        raise TypeError(f"ltx_backend(gm={gm!r}): expected the torch.fx.GraphModule that torch.compile gives a backend")
    if not isinstance(example_inputs, (list, tuple)):
        raise TypeError(f"ltx_backend(example_inputs={example_inputs!r}): expected a list of the graph's inputs")
    config, patches = split_options(mode, options, dynamic)
    hook = patches[_HOOK] if _HOOK in patches else getattr(inductor_config, _HOOK)
    patches[_HOOK] = chain = with_ours(hook, LtxPass(config))
    with inductor_config.patch(patches):
        pass_id = chain.uuid()
        with session.backend_call(gm, example_inputs, None if pass_id is None else repr(pass_id)):
            return compile_fx(gm, example_inputs, config_patches=patches)


def split_options(
    mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None = None
) -> tuple[Config, dict[str, Any]]:
    """Our options, on top of the environment's, and the config patches Inductor's own backend would apply."""
    options = {} if options is None else options
    check_mapping(options)
    config = from_environment().with_options(options)
    theirs = {key: value for key, value in options.items() if not key.startswith(PREFIX)}
    # Inductor's own wrapper: its checks and messages, the bisector's overrides and the CUPTI workaround come with it.
    wrapper = torch._TorchCompileInductorWrapper(mode, theirs, dynamic)
    return config, dict(wrapper.config)


def _ours(backend: Any, kwargs: Mapping[str, Any]) -> natten_calls.Compile | None:
    """Wrong options are the backend's to complain about, when it is called with them."""
    if backend is not ltx_backend:
        return None
    config, _ = split_options(kwargs.get("mode"), kwargs.get("options"), kwargs.get("dynamic"))
    return natten_calls.Compile(config, device_kernels(config.prove, config.profit))


natten_calls.install(ltx_backend, _ours)
