"""RoPE over several axes without a GPU: what is supported, what a launch is told, and the gate with a stand-in."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ltx_inductor.kernels import axial_gate, compilers, proofs, rope_axial, sources
from ltx_inductor.kernels.rope import KernelNotReadyError
from ltx_inductor.kernels.rope_axial import Spec
from ltx_inductor.ops.axial_rope import reference

BF16 = torch.bfloat16
SPEC = Spec("fp32-rope-muladd", BF16, (8, 12, 12))
GRID, HEADS = (2, 3, 4, 5), 3


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTX_INDUCTOR_CACHE", str(tmp_path))
    for name, empty in (("_functions", {}), ("_off", {}), ("_plans", {}), ("_accepted", set())):
        monkeypatch.setattr(rope_axial, name, empty)


def loaded(spec: Spec = SPEC, device: Any = None) -> None:
    """As after `prepare`, for tensors of the CPU (device index None)."""
    rope_axial._functions[device, spec] = rope_axial._Functions((1, 2), "digest")
    rope_axial.accept(device, spec)


def arguments(grid: tuple[int, ...] = GRID, spec: Spec = SPEC) -> tuple[Any, ...]:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn((*grid, HEADS, spec.head_dim), generator=gen).to(spec.dtype)
    cos, sin = [], []
    for axis, pairs in enumerate(spec.pairs):
        along = len(grid) - len(spec.pairs) + axis
        shape = [n if i == along else 1 for i, n in enumerate(grid)] + [1, pairs]
        cos.append(torch.randn(shape, generator=gen))
        sin.append(torch.randn(shape, generator=gen))
    return x, torch.randn(spec.head_dim, generator=gen).to(spec.dtype), cos, sin, 1e-6, 0.125, spec.contract


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"contract": "bf16-chain"}, "rounding contract 'bf16-chain'"),
        ({"dtype": torch.float32}, "activations in torch.float32"),
        ({"table_dtype": BF16}, "cos/sin in torch.bfloat16"),
        ({"pairs": (8, 8, 8, 8)}, "4 of them"),
        ({"pairs": (5, 5)}, "head_dim 20"),
        ({"pairs": (64, 64, 64)}, "head_dim 384"),
        ({"token_axes": 5}, "5 token axes"),
        ({"arch": (7, 5)}, "compute capability 7.5"),
        ({}, None),
        ({"arch": (13, 0)}, None),
    ],
)
def test_what_is_supported(change: dict[str, Any], sentence: str | None) -> None:
    given = {"arch": (9, 0), "dtype": BF16, "table_dtype": torch.float32, "pairs": (8, 12, 12), "token_axes": 4}
    said = rope_axial.unsupported(**{"contract": SPEC.contract, **given, **change})
    assert (said is None) if sentence is None else (said is not None and sentence in said)


def test_division_by_multiplication() -> None:
    draws = random.Random(0)
    sizes = [*range(1, 2000), *(draws.randrange(1, 1 << 31) for _ in range(2000)), (1 << 31) - 1]
    for size in sizes:
        multiplier, shift = rope_axial._division(size)
        assert multiplier < 1 << 33
        for n in (0, size - 1, size, (1 << 31) - 1, (1 << 31) // size * size - 1, draws.randrange(1 << 31)):
            if 0 <= n < 1 << 31:
                assert n * multiplier >> shift == n // size, (n, size)


def test_the_parameters_are_those_of_the_header(tmp_path: Path) -> None:
    found = compilers.find_cc()
    if found is None:
        pytest.skip("no C compiler")
    fields = [name for name, _ in rope_axial._Params._fields_]
    offsets = ", ".join(f"(int)offsetof(LtxRopeAxialParams, {name})" for name in fields)
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "rope_axial_params.h"\nint main(void) {\n'
        f"  int i, at[] = {{{offsets}, (int)sizeof(LtxRopeAxialParams)}};\n"
        '  for (i = 0; i < (int)(sizeof at / sizeof *at); ++i) printf("%d\\n", at[i]);\n  return 0;\n}\n'
    )
    program = tmp_path / "offsets"
    subprocess.run([found.path, f"-I{sources.csrc_dir()}", str(source), "-o", str(program)], check=True)
    said = [int(line) for line in subprocess.run([program], capture_output=True, text=True).stdout.split()]
    mine = [getattr(rope_axial._Params, name).offset for name in fields]
    assert said == [*mine, ctypes.sizeof(rope_axial._Params)]


def launched(monkeypatch: pytest.MonkeyPatch, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(function, blocks, parameters, result) of a launch on the CPU."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        rope_axial.driver, "launch", lambda function, blocks, *_: seen.append((function, blocks, _[-1][0]))
    )
    out = rope_axial.launch(*args)
    assert out is not None
    return *seen[0], out


LAYOUTS = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.movedim(-2, 1).contiguous().movedim(1, -2),
    "part of a fused projection": lambda x: torch.cat((x, x, x), -2)[..., HEADS : 2 * HEADS, :],
    "grid turned": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", [GRID, (3, 4, 5), (1, 1, 1, 7)], ids=str)
def test_the_kernel_is_sent_to_the_right_elements(
    layout: str, grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address arithmetic of csrc/rope_axial.cu, in Python, against torch's own."""
    loaded()
    x, weight, cos, sin, *rest = arguments(grid)
    if layout == "grid turned" and len(grid) < 4:
        pytest.skip("needs four token axes")
    x = LAYOUTS[layout](x)
    function, blocks, p, out = launched(monkeypatch, (x, weight, cos, sin, *rest))
    assert (function, p.x, p.weight, p.out) == (1, x.data_ptr(), weight.data_ptr(), out.data_ptr())
    assert p.tokens == x[..., 0, 0].numel()
    assert blocks * 16 >= p.tokens > (blocks - 1) * 16
    for token, index in enumerate(itertools.product(*map(range, grid))):
        left, at, tables = token, 0, [0, 0, 0]
        for i in (3, 2, 1, 0):
            following = left * p.multiplier[i] >> p.shift[i] if i else 0
            here, left = left - following * p.sizes[i], following
            at += here * p.x_stride[i]
            for axis in range(3):
                tables[axis] += here * p.table_stride[axis][i]
        assert x.data_ptr() + 2 * at == x[index].data_ptr()
        assert p.x_head == x.stride(-2)
        for axis, (c, s) in enumerate(zip(cos, sin, strict=True)):
            where = tuple(0 if n == 1 else i for i, n in zip(index, c.shape, strict=False))
            assert p.cos[axis] + 4 * tables[axis] == c[where].data_ptr()
            assert p.sin[axis] + 4 * tables[axis] == s[where].data_ptr()


def test_which_entry_and_which_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded()
    *first, _, contract = arguments()
    function, _, p, _ = launched(monkeypatch, (*first, -0.25, contract))
    assert function == 1
    assert p.scale_word == 0xBE80BE80
    rope_axial._plans.clear()
    function, _, p, _ = launched(monkeypatch, (*first, 72**-0.5, contract))
    assert function == 2
    assert p.scale == torch.tensor(72**-0.5).item()


def test_a_plan_is_made_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded()
    args, checks = arguments(), []
    monkeypatch.setattr(rope_axial.driver, "launch", lambda *_: None)
    for _ in range(3):
        rope_axial.launch(*args, check=lambda: checks.append(1))
    rope_axial.launch(*arguments((2, 3, 4, 6)), check=lambda: checks.append(1))
    assert len(checks) == len(rope_axial._plans) == 2


def test_a_plan_of_a_kernel_that_is_turned_off_meanwhile_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded()
    monkeypatch.setattr(rope_axial.driver, "launch", lambda *_: None)
    planned = rope_axial._planned

    def slow(*args: Any) -> Any:
        plan = planned(*args)
        rope_axial.turn_off(None, SPEC, "by another thread")  # type: ignore[arg-type]
        return plan

    monkeypatch.setattr(rope_axial, "_planned", slow)
    rope_axial.launch(*arguments())
    assert not rope_axial._plans
    with pytest.raises(KernelNotReadyError, match="by another thread"):
        rope_axial.launch(*arguments())


@pytest.mark.parametrize("table", ["own strides for sin", "every other", "off by one", "cos of a batch"])
def test_tables_that_the_kernel_cannot_read_are_copied(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies have to live until the launch."""
    loaded()
    x, weight, cos, sin, *rest = arguments()
    if table == "own strides for sin":
        sin = [torch.stack((t, t), -1)[..., 0] for t in sin]
    elif table == "every other":
        cos, sin = ([torch.stack((t, t), -1)[..., 0] for t in some] for some in (cos, sin))
    elif table == "off by one":
        cos, sin = ([torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in some] for some in (cos, sin))
    else:
        cos = [torch.cat((t, t + 1)) for t in cos]
    seen: list[Any] = []

    def launch(function: int, blocks: int, threads: int, shared: int, device: Any, params: list[Any]) -> None:
        p = params[0]
        for addresses, tables in ((p.cos, cos), (p.sin, sin)):
            for axis, t in enumerate(tables):
                whole = torch.broadcast_tensors(cos[axis], sin[axis])[0].shape
                want = t.expand(whole).reshape(-1, t.shape[-1])
                got = (ctypes.c_float * want.numel()).from_address(addresses[axis])
                assert torch.equal(torch.tensor(list(got)), want.flatten())
                seen.append(axis)

    monkeypatch.setattr(rope_axial.driver, "launch", launch)
    rope_axial.launch(x, weight, cos, sin, *rest)
    assert len(seen) == 6


def test_odd_numbers_of_pairs_need_no_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("fp32-rope", torch.float16, (3, 5, 8))
    loaded(spec)
    _, _, p, _ = launched(monkeypatch, args := arguments(spec=spec))
    assert list(p.cos) == [t.data_ptr() for t in args[2]]


def test_what_is_left_to_eager() -> None:
    loaded()
    x, weight, *rest = arguments()
    off = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert rope_axial.launch(off, weight, *rest) is None
    off = torch.empty(weight.numel() + 1, dtype=x.dtype)[1:].copy_(weight)
    assert rope_axial.launch(x, off, *rest) is None
    spec = Spec(SPEC.contract, BF16, (8, 8, 8))  # head_dim is no power of two: the mean is a division
    loaded(spec)
    *first, _, scale, contract = arguments(spec=spec)
    assert rope_axial.launch(*first, 1e-31, scale, contract) is None


def test_not_ready_not_accepted_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_axial.driver, "launch", lambda *_: None)
    args = arguments()
    with pytest.raises(KernelNotReadyError, match="is not ready"):
        rope_axial.launch(*args)
    loaded()
    rope_axial._accepted.clear()
    with pytest.raises(KernelNotReadyError, match="is not ready"):
        rope_axial.launch(*args)
    rope_axial.accept(None, SPEC)  # type: ignore[arg-type]
    assert rope_axial.launch(*args) is not None
    x, weight, cos, sin, *rest = args
    with pytest.raises(KernelNotReadyError, match="tables in torch.bfloat16"):
        rope_axial.launch(x, weight, [c.bfloat16() for c in cos], [s.bfloat16() for s in sin], *rest)
    rope_axial.turn_off_call(args, "it is wrong")
    with pytest.raises(KernelNotReadyError, match="it is wrong"):
        rope_axial.launch(*args)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate, on the CPU."""
    monkeypatch.setattr(proofs, "_key", lambda device, facts: "key-" + "-".join(facts))
    monkeypatch.setattr(proofs, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    draw = axial_gate.draw
    real = torch.device
    monkeypatch.setattr(axial_gate.torch, "device", lambda *_: real("cpu"))
    monkeypatch.setattr(axial_gate, "draw", draw)


def test_the_gate_takes_what_is_right_and_turns_off_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    loaded(device=0)
    rope_axial._accepted.clear()
    calls: list[tuple[Any, ...]] = []

    def right(*args: Any) -> Tensor:
        calls.append(args)
        return reference(*args)

    monkeypatch.setattr(rope_axial, "launch", right)
    assert axial_gate.refusal(SPEC, 0, reference) is None
    assert rope_axial._accepted == {(0, SPEC)}
    assert sum(c[0].numel() for c in calls) > 1 << 20
    assert {(c[0].is_contiguous(), c[1] is None, c[5] in (1.0, 0.125)) for c in calls} == set(
        itertools.product((True, False), repeat=3)
    )
    assert re.search(r"[\d,]+ elements, no bit differs", axial_gate.proof(SPEC, 0))

    monkeypatch.setattr(proofs, "_verdicts", {})
    rope_axial._functions[0, SPEC] = rope_axial._Functions((1, 2), "another compiler's")

    def wrong(*args: Any) -> Tensor:
        out = reference(*args)
        if args[5] not in (1.0, 0.125):
            out.view(torch.int16).view(-1)[3] ^= 1
        return out

    monkeypatch.setattr(rope_axial, "launch", wrong)
    sentence = axial_gate.refusal(SPEC, 0, reference)
    assert sentence is not None
    assert "differs from eager in 1 of" in sentence
    assert "replay" in sentence
    assert (0, SPEC) not in rope_axial._accepted
    assert rope_axial._off[0, SPEC] == sentence
