"""How benchmarks time: contenders in turns, several calls of a short one to a sample, or replays of a CUDA graph."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

Triple = tuple[int, int, int]
ELEVEN = (11, 11, 11)
# grid, window, heads: the decoder's stage 5 at several sizes, then its stages 1 to 4 for 121 frames at 512 x 768
STAGE_5 = [((33, 64, 96), ELEVEN, 4), ((65, 96, 160), ELEVEN, 4), ((121, 136, 240), ELEVEN, 4)]
LARGEST = ((121, 272, 480), ELEVEN, 4)
STAGES = [
    ((18, 16, 24), (3, 7, 7), 32),
    ((18, 32, 48), (3, 7, 7), 16),
    ((35, 32, 48), (3, 5, 5), 8),
    ((69, 64, 96), (3, 5, 5), 8),
]


def once(call: Callable[[], Any], times: int = 1) -> float:
    """Milliseconds of one of `times` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def replay_of(call: Callable[[], Any], times: int) -> Callable[[], None]:
    """The replay of a CUDA graph of that many calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(times)]
    del kept
    return graph.replay


def in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, times: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Milliseconds of every contender, `rounds` samples each; the order turns round after every round."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in list(calls.items())[:: 1 if i % 2 else -1]:
            samples[name].append(once(call, times[name] if times else 1))
    return samples


def measure(
    calls: Mapping[str, Callable[[], Any]], grid: Triple, window: Triple, heads: int, budget_ms: float, most: int
) -> dict[str, Any]:
    """What was measured of one shape: per contender ms, min_ms, samples and useful_tflops.

    budget_ms: GPU time to spend; 3 to `most` rounds. A sample is about 2 ms long, or one call.
    """
    for call in calls.values():
        once(call)
    first = {name: once(call) for name, call in calls.items()}
    times = {name: max(1, round(2.0 / ms)) for name, ms in first.items()}
    total = sum(times[name] * ms for name, ms in first.items())
    flop = 4 * math.prod(grid) * math.prod(window) * heads * 64
    row: dict[str, Any] = {"grid": grid, "window": window, "heads": heads}
    for name, found in in_turns(calls, max(3, min(most, int(budget_ms / total))), times).items():
        ms = statistics.median(found)
        row[name] = {"ms": ms, "min_ms": min(found), "samples": len(found), "useful_tflops": flop / ms / 1e9}
    return row
