"""What the rules look up about a graph while they read it, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch.fx import Graph, Node

from ltx_inductor.rewrite.region import live_nodes, value_numbers
from ltx_inductor.rewrite.size import Sizes
from ltx_inductor.rewrite.there_and_back import origins


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
        return value_numbers(self.graph, self.origins)

    @cached_property
    def origins(self) -> dict[Node, Node]:
        """{the end of a chain of views there and back: the value that it is}"""
        return origins(self.graph, self.sizes)

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
    def subclass_parts(self) -> set[Node]:
        """Inputs that are parts of a tensor subclass: AOTAutograd takes subclasses apart before we see the graph."""
        descs = ((n, n.meta.get("desc")) for n in self.graph.nodes if n.op == "placeholder")
        return {n for n, d in descs if type(d).__name__ == "SubclassGetAttrAOTInput"}

    @cached_property
    def has_dtensor(self) -> bool:
        return any(n.meta["desc"].attr == "_local_tensor" for n in self.subclass_parts)

    @cached_property
    def backward(self) -> set[Node]:
        """The nodes of a training graph that depend on its tangents; empty for an inference graph."""
        found: set[Node] = set()
        for n in self.graph.nodes:
            tangent = n.op == "placeholder" and str(n.target).startswith("tangents")
            if tangent or (found and any(a in found for a in n.all_input_nodes)):
                found.add(n)
        return found

    @property
    def is_training(self) -> bool:
        """A joint graph of forward and backward."""
        return bool(self.backward)
