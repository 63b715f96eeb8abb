"""The ways people compile, on a GPU: CUDA graphs, autotuning, streams, two devices, one artefact for all lengths.

test_model_modes.py has training, adapters, blocks and whole models.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import ltx_inductor
from ltx_inductor.kernels import counts, rope
from ltx_inductor.ops import verified

from ..modes import unnumbered
from .test_end_to_end import BF16, HEADS, Rotate, compiled, empty_cache, inputs, same_bits

__all__ = ["empty_cache"]
ROOT = Path(__file__).resolve().parents[2]
RULE = "rmsnorm_split_rope"


@torch.no_grad()
def test_a_cuda_graph_around_a_compiled_call() -> None:
    module, args = Rotate("ltx-core"), inputs(640, table=BF16)
    model = compiled(module)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = model(*args)
    for _ in range(2):
        for a in args[:2]:
            a.mul_(-1)
        graph.replay()
        assert same_bits(got, module(*args))


@torch.no_grad()
def test_max_autotune() -> None:
    module = nn.Sequential(nn.Linear(256, HEADS * 64, dtype=BF16, device="cuda"))
    tail, (_, k, cos, sin) = Rotate("diffusers", 64), inputs(256, dim=64)

    def model(x: Tensor, k: Tensor) -> Any:
        return tail(module(x), k, cos, sin)

    x = torch.randn(1, 256, 256, device="cuda", dtype=BF16)
    got = compiled(model, mode="max-autotune-no-cudagraphs")(x, k)
    assert same_bits(got[1:], tail(k, k, cos, sin)[1:])
    ltx_inductor.last_report().expect(**{RULE: 2})


@torch.no_grad()
def test_one_artefact_for_sequences_of_64_to_32640() -> None:
    module = Rotate("diffusers")
    model, frames = compiled(module), torch._dynamo.utils.counters["stats"]
    frames.clear()
    for tokens in (64, 1000, 8160, 32640):
        args = inputs(tokens)
        for t, axis in zip(args, (1, 1, 2, 2), strict=True):
            torch._dynamo.mark_dynamic(t, axis)
        assert same_bits(model(*args), module(*args))
    assert frames["unique_graphs"] == 1


@torch.no_grad()
def test_a_side_stream() -> None:
    module, args = Rotate("diffusers"), inputs(2000)
    model = compiled(module)
    model(*args)
    late = args[0].clone().zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(args[0])
        got = model(late, *args[1:])
    stream.synchronize()
    assert same_bits(got, module(*args))


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_turns() -> None:
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        module, args = Rotate("ltx-core", device=device), inputs(300, table=BF16, device=device)
        got = compiled(module)(*args)
        assert same_bits(got, module(*args))
        ltx_inductor.last_report().expect(**{RULE: 2})


def test_inference_mode() -> None:
    module, args = Rotate("diffusers"), inputs(128)
    with torch.inference_mode():
        assert same_bits(compiled(module)(*args), module(*args))
    ltx_inductor.last_report().expect(**{RULE: 2})


@torch.no_grad()
def test_an_fp8_linear_in_front_of_the_norm() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 matrix products here")
    module, (_, k, cos, sin) = Rotate("diffusers", 64), inputs(256, dim=64)
    one = torch.ones((), device="cuda")
    w = torch.randn(HEADS * 64, 256, device="cuda").to(torch.float8_e4m3fn)

    def model(x: Tensor, k: Tensor) -> Any:
        q = torch._scaled_mm(x, w.t(), one, one, out_dtype=BF16).unsqueeze(0)
        return (q, *module(q, k, cos, sin))

    x = torch.randn(256, 256, device="cuda").to(torch.float8_e4m3fn)
    q, *got = compiled(model)(x, k)
    assert same_bits(got, module(q, k, cos, sin))
    ltx_inductor.last_report().expect(**{RULE: 2})


@torch.no_grad()
def test_calls_are_counted_in_c_and_verified_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = Rotate("diffusers"), inputs(300)
    moved = sum(counts.bytes_of(t) for t in (*args, *module(*args), module.norm_q.weight, module.norm_k.weight))
    model = compiled(module)
    model(*args)
    ltx_inductor.stats(reset=True)
    for _ in range(3):
        model(*args)
    pair = ltx_inductor.stats(reset=True)["qk_rmsnorm_split_rope"]
    assert (pair["kernel"], pair["refused"], pair["checks"], pair["bytes"]) == (3, 0, 0, 3 * moved)

    always = compiled(module, options={"ltx_inductor.verify": "always"})
    assert same_bits(always(*args), module(*args))
    ltx_inductor.stats(reset=True)
    always(*args)
    pair = ltx_inductor.stats()["qk_rmsnorm_split_rope"]
    assert (pair["kernel"], pair["checks"], pair["differing"]) == (1, 1, 0)
    assert pair["checked_elements"] == 2 * args[0].numel()
    assert any("qk_rmsnorm_split_rope compared" in note for note in ltx_inductor.last_report().notes)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        always(*args)
    assert ltx_inductor.stats()["qk_rmsnorm_split_rope"]["postponed"] == 1


@torch.no_grad()
def test_a_kernel_that_goes_wrong_is_turned_off_and_can_be_replayed(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, args = Rotate("diffusers"), inputs(100)
    model = compiled(module, options={"ltx_inductor.verify": "always"})
    model(*args)
    right = rope.launch_pair

    def wrong(*given: Any) -> Any:
        out = right(*given)
        out[0].view(torch.int16).view(-1)[5] ^= 1
        return out

    monkeypatch.setattr(rope, "launch_pair", wrong)
    monkeypatch.setattr(rope, "_off", {})
    with pytest.warns(UserWarning, match="differs from eager in 1 of"):
        got = model(*args)
    assert same_bits(got, module(*args))
    assert any("differs" in note for note in ltx_inductor.last_report().notes)
    monkeypatch.setattr(rope, "launch_pair", right)
    with pytest.warns(UserWarning, match="running the eager chain"):
        assert same_bits(model(*args), module(*args))  # it stays off
    with inductor_config.patch(force_disable_caches=True):  # nor does a new compile use it: that is stock Inductor's
        ours, theirs = (run_and_get_code(torch.compile(module, backend=b), *args)[1] for b in ("ltx", "inductor"))
    assert ltx_inductor.last_report().count() == 0
    assert unnumbered(ours) == unnumbered(theirs)
    (file,) = empty_cache.rglob("*.pt")
    command = [sys.executable, "-m", "ltx_inductor", "replay", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of" in done.stdout
    verified.notes.clear()
    verified.compared_calls.clear()
