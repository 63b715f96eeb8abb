"""What the tests of the rewrite stand on: graphs as the pass sees them, and a comparison of bits.

`trace` compiles a module up to the point where Inductor calls `joint_custom_pre_pass` and keeps a copy of each
graph there, with the arguments that the first call passed to it. Code generation never runs. The values that can see
a difference are in draws.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses import FakeTensor

TORCH = tuple(int(v) for v in torch.__version__.split(".")[:2])
ADDCMUL_KEPT = TORCH >= (2, 12)
"""On older torch the graph holds addcmul as mul, mul, add: run on CPU, it rounds where eager does not."""

Axes = Mapping[int, int | Sequence[int]]


@dataclass
class Traced:
    """A joint ATen graph and the tensors it was called with, which share storage with the module and its inputs."""

    gm: fx.GraphModule
    args: list[Any]

    def run(self, gm: fx.GraphModule | None = None) -> list[Any]:
        """The outputs of the graph, or of a rewritten copy of it, on those arguments."""
        return run_graph(gm or self.gm, self.args)


def run_graph(gm: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    with torch.no_grad():
        out = fx.Interpreter(gm).run(*args)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be edited; constants and fake values are shared with the original."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    out = graph.output(graph.graph_copy(gm.graph, nodes))
    out.meta = dict(output_node(gm.graph).meta)
    return fx.GraphModule(gm, graph)


@dataclass(frozen=True)
class ShapeFacts:
    """What a ShapeEnv has been told about its symbols. Nothing that only reads a graph may add to it."""

    guards: int
    asserts: int
    replaced: frozenset[Any]  # the symbols; what for is left out, since looking it up may shorten a chain of them
    divisible: frozenset[Any]
    ranges: dict[Any, Any]


def shape_facts(graph: fx.Graph) -> ShapeFacts | None:
    """Those of the ShapeEnv that all copies of a captured graph share; None where every size is a number."""
    vals = [n.meta.get("val") for n in graph.find_nodes(op="placeholder")]
    modes = [v.fake_mode for v in vals if isinstance(v, FakeTensor)]
    env = modes[0].shape_env if modes else None
    if env is None:
        return None
    return ShapeFacts(
        len(env.guards),
        env.num_deferred_runtime_asserts,
        frozenset(env.replacements),
        frozenset(env.divisible),
        dict(env.var_to_range),
    )


def output_node(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


Run = Callable[[list[Any]], Any]
Compiled = Callable[[fx.GraphModule], Run]
"""What Inductor makes of a graph, in these tests: a function that is called with the list of the graph's inputs."""


def compiled(
    module: nn.Module, made: Compiled, inputs: Sequence[Any], dynamic: Axes | None = None
) -> Callable[..., Any]:
    """`module`, to be compiled at its first call up to the hook; `made` says what runs then, and no code is generated.

    dynamic: {index of input: axis or axes} to mark dynamic.
    """

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Run:
        run = made(gm)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    for i, axes in (dynamic or {}).items():
        for axis in [axes] if isinstance(axes, int) else axes:
            torch._dynamo.mark_dynamic(inputs[i], axis)
    backend = functools.partial(compile_fx, inner_compile=inner_compile)
    return torch.compile(module, backend=backend, fullgraph=True)


@contextlib.contextmanager
def hooked(hook: Callable[[fx.Graph], Any], grad: bool = False) -> Iterator[None]:
    """With `hook` as `joint_custom_pre_pass`, and all caches off."""
    with (
        inductor_config.patch(joint_custom_pre_pass=hook, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        torch.set_grad_enabled(grad),
    ):
        yield


def trace(module: nn.Module, inputs: Sequence[Any], dynamic: Axes | None = None, grad: bool = False) -> list[Traced]:
    """The joint graphs of `module(*inputs)`, in the order of compilation, with all caches off.

    dynamic: as for `compiled`. grad: trace forward and backward together.
    """
    traced: list[Traced] = []

    def keep(graph: fx.Graph) -> None:
        traced.append(Traced(copy_graph(graph.owning_module), []))

    def made(gm: fx.GraphModule) -> Run:
        mine = traced[-1]

        def run(args: list[Any]) -> Any:
            mine.args = mine.args or list(args)
            return gm(*args)

        return run

    model = compiled(module, made, inputs, dynamic)
    with hooked(keep, grad):
        model(*inputs)
    return traced


def same_memory(t: Any) -> Any:
    """A copy with the strides of `t`, also where elements share memory."""
    if not isinstance(t, torch.Tensor):
        return t
    storage = t.detach().untyped_storage().clone()
    return torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.size(), t.stride())


def trace_calls(
    module: nn.Module, inputs: Sequence[Sequence[Any]], dynamic: Axes | None = None
) -> tuple[fx.GraphModule, list[list[Any]]]:
    """The joint graph of `module(*inputs[0])`, and copies of what it is called with for all inputs that it serves."""
    graphs: list[fx.GraphModule] = []
    calls: list[list[list[Any]]] = []

    def keep(graph: fx.Graph) -> None:
        graphs.append(copy_graph(graph.owning_module))
        calls.append([])

    def made(gm: fx.GraphModule) -> Run:
        mine = calls[-1]

        def run(args: list[Any]) -> Any:
            mine.append([same_memory(a) for a in args])
            return gm(*args)

        return run

    model = compiled(module, made, inputs[0], dynamic)
    with hooked(keep):
        for given in inputs:
            model(*given)
    return graphs[0], calls[0]


def rewritten(
    module: nn.Module, inputs: Sequence[Any], rewrite: Callable[[fx.Graph], Any], dynamic: Axes | None = None
) -> Callable[..., Any]:
    """`module`, compiled for `inputs` up to the hook, where `rewrite` edits the graph; it then runs as it is."""

    def made(gm: fx.GraphModule) -> Run:
        return lambda args: gm(*args)

    model = compiled(module, made, inputs, dynamic)

    def call(*args: Any) -> Any:
        with hooked(rewrite):
            return model(*args)

    call(*inputs)
    return call


def capture(
    module: nn.Module, inputs: Sequence[Any], dynamic: Axes | None = None, grad: bool = False
) -> list[fx.GraphModule]:
    """The joint ATen graphs that a `joint_custom_pre_pass` is called with. See `trace`."""
    return [t.gm for t in trace(module, inputs, dynamic, grad)]


_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_difference(got: Any, want: Any) -> str | None:
    """None if the trees hold the same bits in the same shapes and strides, else a sentence on the first difference.

    Values are compared as integers: -0 differs from +0. NaNs are equal to each other: which operand's payload and
    sign survives an operation is not defined, and the CPU's vector and scalar loops choose differently.
    """
    a, tree_a = pytree.tree_flatten(got)
    b, tree_b = pytree.tree_flatten(want)
    if tree_a != tree_b:
        return f"structure {tree_a} instead of {tree_b}"
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        why = _leaf_difference(x, y)
        if why:
            return f"value {i}: {why}"
    return None


def _leaf_difference(x: Any, y: Any) -> str | None:
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return None if type(x) is type(y) and x == y else f"{x!r} instead of {y!r}"
    for what in ("dtype", "device", "shape"):
        if getattr(x, what) != getattr(y, what):
            return f"{what} {getattr(x, what)} instead of {getattr(y, what)}"
    if _strides(x) != _strides(y):
        return f"strides {x.stride()} instead of {y.stride()} for shape {tuple(x.shape)}"
    x, y = x.detach().contiguous(), y.detach().contiguous()
    same = torch.eq(*(t.view(_INTS[t.element_size()]) for t in (x, y)))
    if x.is_floating_point():
        same |= x.isnan() & y.isnan()
    if bool(same.all()):
        return None
    at = tuple((~same).nonzero()[0].tolist())
    first = f"{x[at].item()} instead of {y[at].item()} at {at}"
    return f"{int((~same).sum())} of {same.numel()} elements differ, first {first}"


def _strides(t: torch.Tensor) -> list[int]:
    """The strides that matter: those of axes longer than one."""
    return [st for n, st in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else []
