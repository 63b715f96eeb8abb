"""Which graphs belong together: the reports of a compile, collected while it runs, and `last_report()`.

One *backend call* compiles one graph that Dynamo captured; one *compile* is every backend call of one compiled
callable: graph breaks, recompiles, all. What tells them apart is the object that `torch.compile` made, found on the
stack of the backend call (the outermost one: a compiled pipeline that calls compiled parts is one compile). Where
Dynamo is not on the stack (`compile_fx` called by hand), every backend call is a compile of its own.

Thread safe. `last_report()` is about the calling thread's last compile, or the process's where it has none.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import fx

from ltx_inductor import kernel_needs, report_log, report_store
from ltx_inductor.ops import verified
from ltx_inductor.rewrite.report import GraphReport, Refusal, RewriteReport

log = logging.getLogger("ltx_inductor")
_KEPT_COMPILES = 16
_NOTHING = "nothing was compiled with ltx_inductor in this process yet"
_NO_REPORT = (
    "Inductor's caches answered for one graph and no report of the compile that filled them is kept: "
    "what was rewritten in it is not known; set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 to see"
)


@dataclass(eq=False)
class BackendCall:
    """The reports of one graph that Dynamo captured (a graph with nested graphs has several).

    key:     where its report is kept for other processes, or None where the caches are bypassed.
    kept:    what an earlier compile of the same graph has left there.
    missing: kernels that such a graph wants and that are not to be had here, as sentences.
    """

    compile_id: str
    key: str | None = None
    kept: report_store.Kept | None = None
    made: report_store.Kept = field(default_factory=report_store.Kept)
    missing: list[str] = field(default_factory=list)
    cached: bool = False
    notes: list[str] = field(default_factory=list)
    settled: bool = False

    @property
    def graphs(self) -> list[GraphReport]:
        return self.made.graphs

    def add(self, report: GraphReport, needs: Sequence[dict[str, Any]]) -> None:
        """The pass ran on a graph of this call."""
        self.settled = True
        self.made.graphs.append(report)
        self.made.needs += needs
        if self.key is not None:
            report_store.save(self.key, self.made)

    def settle(self) -> None:
        """After the call: where the pass did not run, the report is the one of the compile that did."""
        if self.settled:
            return
        self.settled = True
        if self.kept is None:
            self.notes.append(_NO_REPORT)
        else:
            self.cached = True
            self.notes += self.missing
            self.made.graphs = [replace(g, pass_ms=0.0) for g in self.kept.graphs]
        report_log.publish(RewriteReport(numbered(self.graphs), self.cached, list(self.notes)))

    def fail(self, error: BaseException) -> None:
        """The call ended with an error, which the user sees."""
        self.settled = True
        self.notes.append(f"the compile of one graph ended with {type(error).__name__}; see that error")


@dataclass(eq=False)
class _Compile:
    calls: list[BackendCall] = field(default_factory=list)

    def open(self, call: BackendCall) -> None:
        """A compile id that comes again means `torch._dynamo.reset()`, or a restart: what followed it is gone."""
        for i, old in enumerate(self.calls):
            if old.compile_id == call.compile_id != "":
                del self.calls[i:]
                break
        self.calls.append(call)

    def report(self) -> RewriteReport:
        for call in self.calls:
            call.settle()
        graphs = numbered(g for call in self.calls for g in call.graphs)
        notes = list(dict.fromkeys([*(note for call in self.calls for note in call.notes), *verified.told()]))
        return RewriteReport(graphs, any(c.cached for c in self.calls), notes)


def numbered(graphs: Iterable[GraphReport]) -> list[GraphReport]:
    """The reports with every site and refusal told which graph of the list it is in."""
    return [
        replace(
            g,
            sites=[replace(s, graph=n) for s in g.sites],
            refusals=[replace(r, graph=n) for r in g.refusals],
        )
        for n, g in enumerate(graphs)
    ]


_lock = threading.RLock()
_compiles: dict[object, _Compile] = {}  # the newest last
_by_graph: weakref.WeakKeyDictionary[fx.GraphModule, BackendCall] = weakref.WeakKeyDictionary()
_local = threading.local()
_told: list[tuple[object, Refusal]] = []  # by compiled callable, from tracing until the pass takes them
_KEPT_TOLD = 256


def last_report() -> RewriteReport:
    """The report of the callable compiled last: all its graphs, recompiles included.

    Last means by this thread; a thread that has compiled nothing gets the last compile of the process. A graph that
    Inductor's caches answered for is reported as its first compile was, and the report says `cached`. With nothing
    compiled yet the report is empty and a note says so. `explain` leaves this alone.
    """
    with _lock:
        if not _compiles:
            return RewriteReport(remarks=[_NOTHING])
        mine: _Compile | None = getattr(_local, "last", None)
        return (mine or next(reversed(_compiles.values()))).report()


@contextlib.contextmanager
def backend_call(gm: fx.GraphModule, example_inputs: Sequence[Any], pass_id: str | None) -> Iterator[BackendCall]:
    """Around `compile_fx`: what the pass reports inside belongs to this call.

    pass_id: the id under which the caches keep the graph, or None where they are bypassed and so never answer.
    """
    call = _open(gm, example_inputs, pass_id)
    outer, _local.call = getattr(_local, "call", None), call
    try:
        yield call
        with _lock:
            call.settle()
        take_told()  # where a cache answered, the kept report tells it
    except BaseException as error:
        call.fail(error)
        raise
    finally:
        _local.call = outer


def deliver(report: GraphReport, needs: Sequence[dict[str, Any]] = ()) -> None:
    """From the pass: adds a report, and what it asked of the kernels, to the backend call it runs in."""
    call = getattr(_local, "call", None) or _observed(None)
    with _lock:
        call.add(report, needs)
    report_log.publish(RewriteReport(numbered([report])))


def finish(error: BaseException | None) -> None:
    """From a registered pass, after the last of the compiles that ran at once: settles what `observe` has opened.

    error: what ended the compile of this thread, or None.
    """
    with _lock:
        mine: _Compile | None = getattr(_local, "last", None)
        for compile_ in _compiles.values():
            for call in compile_.calls:
                if error is not None and compile_ is mine and not call.settled:
                    call.fail(error)
                else:
                    call.settle()


def tell(refusal: Refusal) -> None:
    """From tracing: something was left alone before there was a graph. Dynamo traces twice; it is told once."""
    key = _compiled_callable()
    with _lock:
        if not any(
            k is key and (r.reason, r.path, r.source) == (refusal.reason, refusal.path, refusal.source)
            for k, r in _told
        ):
            _told.append((key, refusal))
            del _told[:-_KEPT_TOLD]


def take_told() -> list[Refusal]:
    """What was told while the callable that is being compiled was traced, once."""
    key = _compiled_callable()
    with _lock:
        mine = [r for k, r in _told if k is key]
        _told[:] = [(k, r) for k, r in _told if k is not key]
    return mine


def observe(pass_id: str | None) -> None:
    """From `uuid()` of a globally registered pass: Inductor is about to ask its caches for a graph.

    This is the only moment at which a registered pass hears of a graph that the caches then answer for.
    """
    if getattr(_local, "call", None) is None and _compile_fx_frame() is not None:
        _observed(pass_id)


def _observed(pass_id: str | None) -> BackendCall:
    """The backend call of the `compile_fx` on the stack, opened now if this is the first we hear of it."""
    frame = _compile_fx_frame()
    gm = frame.f_locals.get("model_") if frame is not None else None
    if frame is None or not isinstance(gm, fx.GraphModule):
        return _open(None, (), None)
    with _lock:
        call = _by_graph.get(gm)
    if call is None:  # a graph is compiled by one thread
        call = _open(gm, frame.f_locals.get("example_inputs_", ()), pass_id)
        with _lock:
            _by_graph[gm] = call
    return call


def _open(gm: fx.GraphModule | None, example_inputs: Sequence[Any], pass_id: str | None) -> BackendCall:
    compile_id = torch._guards.CompileContext.current_compile_id()
    call = BackendCall("" if compile_id is None else str(compile_id))
    if gm is not None and pass_id is not None and _caches_enabled():
        try:
            _look_up(call, gm, example_inputs, pass_id)
        except Exception as error:  # the user's compile goes on without the report of an earlier one
            log.warning("the kept report of a graph could not be looked up", exc_info=error)
    key = _compiled_callable() or call
    with _lock:
        compile_ = _compiles.pop(key, None) or _Compile()
        _compiles[key] = compile_
        compile_.open(call)
        _local.last = compile_
        while len(_compiles) > _KEPT_COMPILES:
            del _compiles[next(iter(_compiles))]
    return call


def _look_up(call: BackendCall, gm: fx.GraphModule, example_inputs: Sequence[Any], pass_id: str) -> None:
    """What an earlier compile of this graph has left, if any; makes its kernels ready."""
    call.key = report_store.fingerprint(gm, example_inputs, pass_id)
    call.made.frames = report_store.source_frames(gm)
    call.kept = report_store.load(call.key, call.made.frames)
    if call.kept is not None:
        # The caches may answer now, and then nobody else makes the kernels ready.
        call.missing = kernel_needs.ask_again(call.kept.needs, example_inputs)


def _caches_enabled() -> bool:
    from torch._inductor import config

    return not config.force_disable_caches


def _compiled_callable() -> object | None:
    """What `torch.compile` made of the callable being compiled: the outermost one on the stack."""
    found = None
    for frame in _stack():
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            found = frame.f_locals.get("self", found)
    return found


def _compile_fx_frame() -> FrameType | None:
    for frame in _stack():
        if frame.f_code.co_name == "compile_fx" and frame.f_globals.get("__name__") == "torch._inductor.compile_fx":
            return frame
    return None


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
