"""The rewrite as a pass in Inductor's `joint_custom_pre_pass` hook, alone or behind the user's own passes.

That hook sees the functionalised, decomposed ATen graph before Inductor's own patterns delete views and casts, in
inference too, and runs before FxGraphCache is asked. A pass with a `uuid()` keeps both of Inductor's caches working.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._dynamo.exc import ShortenTraceback
from torch._inductor.custom_graph_pass import CustomGraphPass

from ltx_inductor import session
from ltx_inductor.cache_id import cache_id
from ltx_inductor.config import Config
from ltx_inductor.kernel_needs import Remembering, device_kernels
from ltx_inductor.rewrite.needs import NoKernels
from ltx_inductor.rewrite.report import GraphReport, LostFusionError, Refusal, RewriteReport

log = logging.getLogger("ltx_inductor")
GraphPass = Callable[[fx.Graph], Any]
_PACKAGE = (
    "this graph is compiled by AOTInductor, whose packages run in processes that have neither our ops nor our kernels; "
    "torch.compile is rewritten"
)


class StrictError(LostFusionError, ShortenTraceback):
    """The LostFusionError of a compile: Dynamo wraps any other exception into BackendCompilerFailed."""

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)


def rewrite(graph: fx.Graph, config: Config, kernels: Any) -> GraphReport:
    """Rewrites `graph` in place. Raises StrictError under `strict`; any other error is logged and reported.

    The report begins with what was told while the graph was traced.
    """
    from ltx_inductor.rewrite import passes

    told = session.take_told()
    try:
        report = passes.rewrite_graph(graph, config, kernels=kernels)
        report.refusals[:0] = told
        if config.strict and told:
            raise LostFusionError(f"strict: something was left alone\n{RewriteReport([report])}")
        return report
    except LostFusionError as error:
        raise StrictError(str(error)) from error
    except Exception as error:
        log.exception("the rewrite failed; the graph is compiled as it is")
        graph.lint()
        reason = f"an internal error of ltx_inductor, {type(error).__name__}: {error}"
        hint = "please report it, with the log of TORCH_LOGS=+ltx_inductor"
        return GraphReport([], [*told, Refusal(", ".join(config.rules), reason, hint=hint)], len(graph.nodes))


class LtxPass(CustomGraphPass):
    """Our pass, with the options of one compile. Picklable; its reports go to the session."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, graph: fx.Graph) -> None:
        prove = self.config.prove
        kernels = Remembering(device_kernels(prove, self.config.profit), prove)
        session.deliver(rewrite(graph, self.config, _for_a_package() or kernels), kernels.needs)
        _lower_directly()

    @property
    def active(self) -> bool:
        """Does it do anything, and does its id say so?"""
        return True

    def uuid(self) -> str | None:
        """None, which bypasses the caches, where dumps are asked for: a cache hit would write none."""
        return None if self.config.dump is not None else cache_id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LtxPass) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)


def _for_a_package() -> NoKernels | None:
    """Its graphs are decomposed before the pass, so other reasons would mislead: no norm looks like a call any more."""
    from torch._inductor.virtualized import V

    return NoKernels(_PACKAGE) if V.aot_compilation else None


@functools.cache
def _lower_directly() -> None:
    """Once per process. Inductor's insides change: where ours does not fit them, the ops stay ops."""
    try:
        from ltx_inductor import lowering

        lowering.install()
    except (ImportError, AttributeError, TypeError) as error:
        log.warning("compiled models call the ops, 10 us slower: this torch's Inductor is not as expected: %s", error)


class PassChain(CustomGraphPass):
    """Passes in order, as one pass: torch 2.11 has room for one only. Ours comes last, so that the user's see the
    graph they would see without us."""

    def __init__(self, *passes: GraphPass) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for p in self.passes:
            p(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The passes' ids, or None where one has none: Inductor then bypasses its caches, as without us."""
        ids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        whole = ids if all(ids) else None
        session.observe(None if whole is None else repr(whole))
        return whole


def flatten(hook: Any) -> list[GraphPass]:
    """The passes in a hook's value: None, one pass, or (torch 2.13) a list of them; chains of ours are opened."""
    if hook is None:
        return []
    if isinstance(hook, (list, tuple)):
        return [p for h in hook for p in flatten(h)]
    if isinstance(hook, PassChain):
        return [p for h in hook.passes for p in flatten(h)]
    return [hook]


def with_ours(hook: Any, ours: LtxPass) -> PassChain:
    """A value for the hook that runs what is in it, without an older pass of ours, and then `ours`."""
    return PassChain(*(p for p in flatten(hook) if not isinstance(p, LtxPass)), ours)


def without_ours(hook: Any) -> Any:
    """The hook's value with no pass of ours in it; unchanged, as the same object, if there is none."""
    passes = flatten(hook)
    rest = [p for p in passes if not isinstance(p, LtxPass)]
    if len(rest) == len(passes) and not isinstance(hook, PassChain):
        return hook
    if not rest:
        return None
    return rest[0] if len(rest) == 1 else PassChain(*rest)
