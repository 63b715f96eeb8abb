"""How our RoPE ops come out of Inductor: as a direct launch into planned buffers, instead of a call of the op.

As an opaque op each of them costs a compiled model 14 us a call: its arguments go through the dispatcher, it allocates
its results, and Inductor checks those. So the lowering allocates them as Inductor's own buffers, which are planned and
reused like all others, and writes a call of what `ops.rope_direct.rope_call` returns, as it would call a Triton kernel.
That is 5 us, 4 of them the driver's (benchmarks/host.py).

    buf3 = empty_strided_cuda(...)
    buf4 = empty_strided_cuda(...)
    ltx_rope_1f0c3a52(buf3, buf4, arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, None, None)

Only in compiles that our pass is part of: what is written depends on our sources, which the pass's cache id covers.
Anywhere else, on other devices, in C++ and FX wrappers and in AOTInductor, the op stays an op. So it does where torch
lacks something that this builds on; that is logged.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import empty_strided, fallback_handler, register_lowering
from torch._inductor.virtualized import V

from ltx_inductor.joint_pass import LtxPass, flatten

log = logging.getLogger("ltx_inductor")
_DEVICES = ("cuda",)
_IMPORT = "from ltx_inductor.ops.rope_direct import rope_call"


class RopeLaunch(ir.ExternKernel):
    """A call that writes `outputs`, which are buffers of the graph, from `tensors`, some of which may be None."""

    def __init__(self, outputs: Sequence[Any], tensors: Sequence[Any], call: str) -> None:
        unwrap = ir.InputsKernel.unwrap_storage_for_input
        self.arguments = [None if t is None else unwrap(t) for t in (*outputs, *tensors)]
        self.call = call
        self.device = outputs[0].get_device()
        nothing = ir.NoneLayout(device=self.device)
        super().__init__(None, nothing, [a for a in self.arguments if a is not None])
        self.mutation_outputs = [ir.MutationOutput(nothing, out, self) for out in outputs]
        V.graph.register_operation(self)

    def codegen(self, wrapper: Any) -> None:
        name = f"ltx_rope_{hashlib.sha256(self.call.encode()).hexdigest()[:8]}"
        wrapper.add_import_once(_IMPORT)
        wrapper.add_import_once(f"{name} = {self.call}")
        self.codegen_comment(wrapper)
        references = ("None" if a is None else a.codegen_reference() for a in self.arguments)
        wrapper.writeline(f"{name}({', '.join(references)})")

    def get_outputs(self) -> list[Any]:
        return list(self.mutation_outputs)

    def get_device(self) -> Any:
        return self.device

    def should_allocate(self) -> bool:
        return False

    def get_unbacked_symbol_defs(self) -> Any:
        return torch.utils._ordered_set.OrderedSet()


def _stays_an_op(tensors: Sequence[Any], rest: Sequence[Any]) -> bool:
    if not any(isinstance(p, LtxPass) and p.active for p in flatten(config.joint_custom_pre_pass)):
        return True
    graph = V.graph
    if graph.cpp_wrapper or graph.aot_mode or getattr(graph, "fx_wrapper", False):
        return True
    if any(t is not None and t.get_device().type not in _DEVICES for t in tensors):
        return True
    return not all(isinstance(v, (float, int, str)) and (isinstance(v, str) or math.isfinite(v)) for v in rest)


def _lower(op: Any, tensor_count: int) -> Callable[..., Any]:
    as_op = fallback_handler(op, add_to_fallback_set=False)
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    names = [a.name for a in op._schema.arguments]

    def lowered(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        values = [given[name] for name in names]
        tensors, rest = values[:tensor_count], values[tensor_count:]
        if _stays_an_op(tensors, rest):
            return as_op(*args, **kwargs)
        try:
            return _launch(tensors, rest)
        except Exception as error:
            log.warning("%s stays an op, 10 us slower: this torch's Inductor is not as expected", op, exc_info=error)
            return as_op(*args, **kwargs)

    return lowered


def _launch(tensors: Sequence[Any], rest: Sequence[Any]) -> Any:
    results = V.graph.current_node.meta["val"]
    pair = isinstance(results, (tuple, list))
    tensors = [None if t is None else ir.ExternKernel.realize_input(t) for t in tensors]
    outputs = [  # after the inputs: an output's memory is taken where it stands
        empty_strided(
            ir.convert_shape_to_inductor(t.size()),
            ir.convert_shape_to_inductor(t.stride()),
            dtype=t.dtype,
            device=t.device,
        )
        for t in (results if pair else [results])
    ]
    if pair:
        q_eps, k_eps, q_heads, k_heads, contract, layout = rest
    else:
        q_eps, q_heads, contract, layout = rest
        k_eps, k_heads = q_eps, q_heads
    arguments = (pair, contract, layout, float(q_eps), float(k_eps), q_heads, k_heads)
    RopeLaunch(outputs, tensors, f"rope_call({', '.join(map(repr, arguments))})")
    return tuple(outputs) if pair else outputs[0]


@functools.cache
def install() -> None:
    """Tells Inductor, once per process, how to lower our ops."""
    ops = torch.ops.ltx_inductor
    for op, tensor_count in ((ops.rmsnorm_split_rope.default, 4), (ops.qk_rmsnorm_split_rope.default, 8)):
        register_lowering(op, type_promotion_kind=None)(_lower(op, tensor_count))
