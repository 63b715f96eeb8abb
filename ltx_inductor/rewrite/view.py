"""What the rules look up about a graph while they read it, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch.fx import Graph, Node

from ltx_inductor.rewrite.region import live_nodes, value_numbers
from ltx_inductor.rewrite.size import Sizes


class GraphView:
    """Order, liveness, value numbers and sizes of a graph that is not being changed."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sizes = Sizes()
        self.order: dict[Node, float] = {n: i for i, n in enumerate(graph.nodes)}

    @cached_property
    def live(self) -> set[Node]:
        return live_nodes(self.graph)

    @cached_property
    def same(self) -> Callable[[Node], Node]:
        return value_numbers(self.graph)

    @cached_property
    def writes(self) -> list[tuple[Node, Node]]:
        """(node, the argument it writes to) of every op that mutates an input."""
        found = []
        for n in self.graph.nodes:
            if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
                continue
            schema = n.target._schema
            if schema.is_mutable:
                for i, a in enumerate(schema.arguments):
                    value = n.args[i] if i < len(n.args) else n.kwargs.get(a.name)
                    written = a.alias_info is not None and a.alias_info.is_write
                    if written and isinstance(value, Node):
                        found.append((n, value))
        return found

    @cached_property
    def subclass_inputs(self) -> bool:
        """Was the graph traced for tensor subclasses (DTensor and the like)? AOTAutograd hides them from the graph."""
        context = torch._guards.TracingContext.try_get()
        metadata = getattr(context, "fw_metadata", None)
        kinds = [*getattr(metadata, "subclass_inp_meta", ()), *getattr(metadata, "subclass_fw_graph_out_meta", ())]
        return any(type(k).__name__ == "SubclassCreationMeta" for k in kinds)

    @cached_property
    def is_training(self) -> bool:
        """A joint graph of forward and backward."""
        return any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in self.graph.nodes)
