"""`verify="always"`: every call of a RoPE op runs the eager chain too, and its kernel has to give the same bits.

The rewrite then writes the contract as "bf16-chain+verify", say. The launcher serves no such contract, so the call
comes to Python, where `compared` looks at both results. A kernel that differs once is off for that configuration in
this process: eager's result is returned, there is one warning, and the inputs are kept, with the command that runs
them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ltx_inductor.kernels import counts, repro, rope

SUFFIX = "+verify"
notes: list[str] = []  # for reports: what was found since the process started
compared_calls: dict[str, tuple[int, int, int]] = {}  # op: calls, elements, and how many of them differed


def split(contract: str) -> tuple[str, bool]:
    """("bf16-chain", True) for "bf16-chain+verify"."""
    return contract.removesuffix(SUFFIX), contract.endswith(SUFFIX)


def compared(
    op: str,
    got: Any,
    eager: Callable[..., Any],
    args: Sequence[Any],
    turn_off: Callable[[Sequence[Any], str], None] = rope.turn_off_call,
) -> Any:
    """`got`, the kernel's, where it has the bits of `eager(*args)`; else those, with the kernel off and `args` kept.

    turn_off: switches the kernel of a call with `args` off, for a reason.

    Not inside CUDA-graph capture, where nothing can be looked at: the comparison is postponed to the next call outside
    of one (the warm-up before a capture is such a call).
    """
    results = _as_tuple(got)
    if postponed(op, results[0]):
        return got
    want = eager(*args)
    elements = sum(g.numel() for g in results)
    wrong = sum(repro.differing(g, w) for g, w in zip(results, _as_tuple(want), strict=True))
    tally(op, elements, wrong)
    if not wrong:
        return got
    sentence = (
        f"the kernel of {op} differs from eager in {wrong} of {elements} elements on "
        f"{repro.device_name(results[0])} with torch {torch.__version__}; it is off for this configuration in this "
        "process, which runs the eager chain; " + repro.save(op, args)
    )
    turn_off(args, sentence)
    tell(sentence)
    return want


def _as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def tally(op: str, elements: int, wrong: int) -> None:
    """Counts a comparison of one call of `op`."""
    counts.checked(op, elements, wrong)
    calls, before, differing = compared_calls.get(op, (0, 0, 0))
    compared_calls[op] = calls + 1, before + elements, differing + wrong


def told() -> list[str]:
    """For a report: what was compared in this process, and what was found."""
    return [
        f'verify="always": {calls:,} calls of {op} compared in this process: {elements:,} elements, {wrong:,} differ'
        for op, (calls, elements, wrong) in compared_calls.items()
    ] + notes


def postponed(op: str, result: Tensor) -> bool:
    """Is a CUDA graph being captured, so that `result` cannot be compared? That is counted and told."""
    if not (result.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    counts.postponed(op)
    _note(f"{op}: calls inside CUDA-graph capture were not compared with eager; those outside of it are")
    return True


def tell(sentence: str) -> None:
    """A kernel was wrong: a warning, and a note in the reports of this process."""
    _note(sentence)
    warnings.warn(f"ltx_inductor: {sentence}", stacklevel=3)


def _note(sentence: str) -> None:
    if sentence not in notes:
        notes.append(sentence)
