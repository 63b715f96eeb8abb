"""What the tests of the rewrite stand on: graphs as the pass sees them, bit comparison, and draws that see a difference.

`trace` compiles a module up to the point where Inductor calls `joint_custom_pre_pass` and keeps a copy of each graph there,
together with the arguments that the first call passed to it. Code generation never runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx

TORCH = tuple(int(v) for v in torch.__version__.split(".")[:2])
ADDCMUL_KEPT = TORCH >= (2, 12)
"""On older torch the graph holds addcmul decomposed to mul, mul, add: run on CPU, it rounds where eager does not."""


@dataclass
class Traced:
    """A joint ATen graph and what its placeholders were called with (the real tensors, aliasing module and inputs)."""

    gm: fx.GraphModule
    args: list[Any]

    def run(self, gm: fx.GraphModule | None = None) -> list[Any]:
        """The outputs of the graph (or of a rewritten copy of it) on the recorded arguments."""
        out = fx.Interpreter(gm or self.gm, garbage_collect_values=True).run(*self.args)
        return list(out) if isinstance(out, (tuple, list)) else [out]


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be edited; constants and fake values are shared with the original."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return _like(gm, graph)


def _like(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    new = fx.GraphModule(gm, graph)
    old_out, new_out = output_node(gm.graph), output_node(new.graph)
    new_out.meta = dict(old_out.meta)
    return new


def output_node(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def mark(inputs: Sequence[Any], dims: dict[int, int | Sequence[int]]) -> None:
    """Make axes of inputs dynamic: {index of input: axis or axes}."""
    for i, axes in dims.items():
        for axis in [axes] if isinstance(axes, int) else axes:
            torch._dynamo.mark_dynamic(inputs[i], axis)


def trace(
    module: nn.Module,
    inputs: Sequence[Any],
    dynamic: dict[int, int | Sequence[int]] | None = None,
    grad: bool = False,
) -> list[Traced]:
    """The joint graphs of `module(*inputs)`, in the order of compilation, on the default caches-off path.

    dynamic: {index of input: axis or axes} to mark dynamic. grad: trace with gradients (forward and backward graph).
    """
    traced: list[Traced] = []

    def keep(graph: fx.Graph) -> None:
        traced.append(Traced(copy_graph(graph.owning_module), []))

    def stop(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[[list[Any]], Any]:
        mine = traced[-1] if traced else None

        def run(args: list[Any]) -> Any:
            if mine is not None and not mine.args:
                mine.args = list(args)
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    if dynamic:
        mark(inputs, dynamic)
    backend = functools.partial(compile_fx, inner_compile=stop)
    patch = {"joint_custom_pre_pass": keep, "fx_graph_cache": False}
    with (
        inductor_config.patch(patch),
        functorch_config.patch(enable_autograd_cache=False),
        torch.set_grad_enabled(grad),
    ):
        torch.compile(module, backend=backend, fullgraph=True, dynamic=None)(*inputs)
    return traced


def capture(
    module: nn.Module,
    inputs: Sequence[Any],
    dynamic: dict[int, int | Sequence[int]] | None = None,
    grad: bool = False,
) -> list[fx.GraphModule]:
    """The joint ATen graphs that a `joint_custom_pre_pass` is called with. See `trace`."""
    return [t.gm for t in trace(module, inputs, dynamic, grad)]
