"""`explain`: what would be rewritten in a model on a GPU, without generating any code."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_leaves

from ltx_inductor import natten_calls
from ltx_inductor.backend import split_options
from ltx_inductor.config import Config
from ltx_inductor.joint_pass import LtxPass, StrictError, flatten, rewrite
from ltx_inductor.kernel_needs import assumed_kernels
from ltx_inductor.rewrite.report import GraphReport, LostFusionError, RewriteReport
from ltx_inductor.session import numbered

_numbers = itertools.count()
_FOR_INFERENCE = (
    "explained for inference, since the model is in eval mode and no input requires a gradient; called like this, with "
    "autograd on, it gives a training graph, which is left alone: call it under torch.no_grad() or inference_mode()"
)


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> RewriteReport:
    """Captures `model(*args, **kwargs)` and reports what the pass does to it; nothing is code-generated.

    Dynamo, AOTAutograd, Inductor's decompositions and a user's own passes run as in a compile; the captured graphs
    then run eagerly, so graph breaks are got over, and the inputs' side effects happen as in eager. CPU graphs are
    treated as they would be on a GPU. The grad mode of the caller counts: without `torch.no_grad()` a model with
    parameters gives a training graph, whose sites are refused. Only a module in eval mode, called with inputs that
    require no gradient, is explained for inference all the same, and the report says so.

    model:   a module or function; one that is already compiled is looked at as it was before.
    options: as for the backend; keys "ltx_inductor.*" are ours, the others Inductor's.
    dynamic: as for torch.compile.

    Raises LostFusionError under `ltx_inductor.strict`, TypeError or ValueError for wrong arguments. Caches are neither
    read nor written; `last_report()` and models compiled before are left alone.
    """
    if not callable(model):
        raise TypeError(f"explain(model={model!r}): expected a module or a function, followed by its arguments")
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(f"explain(dynamic={dynamic!r}): expected True, False or None")
    config, patches = split_options(None, options, dynamic)
    config = replace(config, cpu=True)
    found: list[GraphReport] = []
    lost: list[StrictError] = []

    def look(graph: fx.Graph) -> None:
        try:
            found.append(rewrite(graph, config, assumed_kernels(config.profit)))
        except StrictError as error:
            lost.append(error)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        hook = patches.get("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass)
        users = [p for p in flatten(hook) if not isinstance(p, LtxPass)]

        def passes(graph: fx.Graph) -> None:
            for p in (*users, look):
                p(graph)

        quiet = {"joint_custom_pre_pass": passes, "force_disable_caches": True, "shape_padding": False}
        return compile_fx(gm, example_inputs, inner_compile=_eager, config_patches={**patches, **quiet})

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    inference = _is_inference(_uncompiled(model), args, kwargs)
    with (
        _natten_calls_in(backend, config),
        torch.set_grad_enabled(torch.is_grad_enabled() and not inference),
        torch.random.fork_rng(devices=devices),
    ):  # the run draws from the generators, and leaves them as they were
        torch.compile(_entry(_uncompiled(model)), backend=backend, dynamic=dynamic)(*args, **kwargs)
    if lost:
        raise LostFusionError(str(lost[0]))
    return RewriteReport(numbered(found), remarks=[_FOR_INFERENCE] if inference else [])


@contextlib.contextmanager
def _natten_calls_in(backend: Any, config: Config) -> Iterator[None]:
    token = object()
    asked = natten_calls.Compile(config, assumed_kernels(config.profit))
    natten_calls.install(token, lambda other, _: asked if other is backend else None)
    try:
        yield
    finally:
        natten_calls.remove(token)


def _is_inference(model: Any, args: Any, kwargs: Any) -> bool:
    """Autograd is on, but only because nobody turned it off: a module in eval mode, and no input wants a gradient."""
    if not torch.is_grad_enabled() or not isinstance(model, torch.nn.Module) or model.training:
        return False
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return not any(t.requires_grad for t in tensors) and any(p.requires_grad for p in model.parameters())


def _eager(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """In place of Inductor's code generation: the graph as it is, called with a list that it may empty."""

    def run(inputs: list[Any]) -> Any:
        values = list(inputs)
        inputs.clear()
        return gm.forward(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _entry(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `model`, whose code object is its own.

    Dynamo keeps compiled code, its recompile count and what it has learnt about dynamic sizes by code object: with a
    fresh one the model's own code stays untouched (but for the frames after a graph break).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_name=f"explain_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def _uncompiled(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "_torchdynamo_orig_callable", model)
