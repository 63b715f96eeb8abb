"""The ways people compile models, on a GPU and with the code that Inductor generates.

Inductor tunes its own kernels, so two compiles of one model may differ in bits that are not ours. What is compared with
eager, bit for bit, is the part that we rewrite, on the very values that it got: the models return both sides of it, or,
where the model is not ours, every launch is watched.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import ltx_inductor
from ltx_inductor.kernels import gate
from ltx_inductor.ops import rope_direct
from ltx_inductor.ops.rope import reference, reference_pair

from ..modes import Attention, LoraLinear, gradients, unnumbered, with_us, without_us
from .fna_cases import error
from .test_end_to_end import BF16, HEADS, Rotate, compiled, inputs, same_bits

RULE = "rmsnorm_split_rope"
DEVICE = "cuda"
DIM, TOKENS = 64, 256
WIDTH = HEADS * DIM


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiles() -> int:
    """Graphs that went to the backend in this test."""
    return int(counters["stats"]["unique_graphs"])


def projection() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=BF16, device=DEVICE)


def attention(linear: Callable[[], nn.Module] = projection) -> Any:
    return Attention(linear, Rotate("diffusers", DIM, DEVICE), HEADS)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """x, cos, sin of `attention`."""
    _, _, cos, sin = inputs(TOKENS, dim=DIM, device=DEVICE)
    return torch.randn(1, TOKENS, WIDTH, device=DEVICE).to(BF16), cos, sin


def check(module: Any, found: Any, x: Tensor, cos: Tensor, sin: Tensor, *mask: Tensor) -> Tensor:
    """The rewritten part has eager's bits, and the rest is about what eager makes of it. Returns the result."""
    out, before, after = found
    assert same_bits(after, module.rotate(*before, cos, sin))
    want, wanted, _ = module(x, cos, sin, *mask)
    for got, expected in zip((out, *before), (want, *wanted), strict=True):
        assert error(got, expected.double()) < 2e-2
    return out  # type: ignore[no-any-return]


@torch.no_grad()
def test_autocast_on_and_off() -> None:
    module, args = attention().eval(), drawn()
    model = compiled(module)
    for enabled in (True, False, True):
        with torch.autocast(DEVICE, BF16, enabled=enabled):
            check(module, model(*args), *args)
    assert compiles() == 2
    ltx_inductor.last_report().expect(**{RULE: 4})


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_is_as_without_us(checkpointed: bool) -> None:
    """The same generated code, gradients that are close to eager's; and the graphs as they are: the same bits."""
    module, args = attention(), drawn()

    def wrapped(*given: Tensor) -> Any:
        return checkpoint(module, *given, use_reentrant=False) if checkpointed else module(*given)

    def grads_of(which: Any) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):  # the others add up gradients in no fixed order
            return gradients(which, wrapped, module, args)

    codes = []
    with inductor_config.patch(force_disable_caches=True):
        for backend in ("ltx", "inductor"):
            grads, code = run_and_get_code(grads_of, backend)
            codes.append(unnumbered(code))
            if backend == "ltx":
                ours, report = grads, ltx_inductor.last_report()
    assert report.count() == 0
    assert report.refusals
    assert all("training graph" in r.reason for r in report.refusals)
    assert len(codes[0]) == 2
    assert codes[0] == codes[1]
    for got, expected in zip(ours, grads_of(None), strict=True):
        assert error(got, expected.double()) < 5e-2
    theirs, ours = (grads_of(which) for which in (without_us, with_us))
    assert same_bits(ours, theirs)
    report = ltx_inductor.last_report()
    assert report.count() == 0
    assert all("training graph" in r.reason for r in report.refusals)


@torch.no_grad()
def test_lora_in_front_of_the_norm_swapped_hot_and_fused() -> None:
    module, args = attention(lambda: LoraLinear(WIDTH, 16, DEVICE)).eval(), drawn()
    model = compiled(module)
    first = check(module, model(*args), *args)
    for layer in (module.to_q, module.to_k):
        layer.swap()
    second = check(module, model(*args), *args)
    assert error(second, first.double()) > 0.1
    assert compiles() == 1
    for layer in (module.to_q, module.to_k):
        layer.fuse()
    third = check(module, model(*args), *args)
    assert error(third, second.double()) < 5e-2
    assert compiles() == 2
    assert [len(g.sites) for g in ltx_inductor.last_report().graphs] == [2, 2]


@torch.no_grad()
def test_a_perturbation_mask_recompiles_and_is_rewritten_again() -> None:
    module, args = attention().eval(), drawn()
    model, mask = compiled(module), torch.rand(1, TOKENS, 1, device=DEVICE).round().to(BF16)
    check(module, model(*args), *args)
    for m in (mask, 1 - mask):
        out = check(module, model(*args, m), *args, m)
        kept = (m == 0).expand_as(out)
        assert torch.equal(out[kept], args[0][kept])
    assert compiles() == 2
    report = ltx_inductor.last_report()
    assert [len(g.sites) for g in report.graphs] == [2, 2]
    assert not report.refusals


@torch.no_grad()
def test_regional_compile_of_48_blocks_is_one_compile() -> None:
    blocks = nn.ModuleList(attention() for _ in range(48)).eval()
    x, cos, sin = drawn()
    for b in blocks:
        b.compile(backend="ltx")
    ltx_inductor.stats(reset=True)
    for b in blocks:
        found = b(x, cos, sin)
        assert same_bits(found[2], b.rotate(*found[1], cos, sin))
        assert error(found[1][0], b.to_q(x).double()) < 2e-2  # its own weights
        x = found[0]
    assert compiles() == 1
    ltx_inductor.last_report().expect(**{RULE: 2})
    assert ltx_inductor.stats()["qk_rmsnorm_split_rope"]["kernel"] == 48


class Watch:
    """What compiled code has launched: how many sides, and how many elements that eager makes otherwise."""

    def __init__(self) -> None:
        self.sides = self.differing = 0

    def wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """In place of `rope_direct.rope_call`."""

        def rope_call(pair: bool, contract: str, layout: str, *numbers: Any) -> Callable[..., None]:
            launch = real(pair, contract, layout, *numbers)
            sides, eager = (2, reference_pair) if pair else (1, reference)
            rest = numbers if pair else (numbers[0], numbers[2])  # (q_eps, k_eps, q_heads, k_heads)

            def call(*tensors: Tensor) -> None:
                launch(*tensors)
                got, given = tensors[:sides], tensors[sides:]
                want = eager(*given, *rest, contract, layout)
                self.sides += sides
                self.differing += sum(gate.differing(g, w) for g, w in zip(got, want if pair else (want,), strict=True))

            return call

        return rope_call


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Not with the caches: code from there comes with another function."""
    found = Watch()
    monkeypatch.setattr(rope_direct, "rope_call", found.wrapped(rope_direct.rope_call))
    PyCodeCache.cache_clear()
    with inductor_config.patch(force_disable_caches=True):
        yield found
    PyCodeCache.cache_clear()


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(error(g, w.double()) < 5e-2 for g, w in zip(got, want, strict=True))


@torch.no_grad()
def test_compile_repeated_blocks_of_diffusers(watch: Watch) -> None:
    pytest.importorskip("diffusers")
    from ltx_inductor.demo import _diffusers, _inputs, _model

    model = _model(_diffusers()).to(DEVICE, BF16).eval()
    given = _inputs(torch.device(DEVICE))
    want = model(**given)
    model.compile_repeated_blocks(backend="ltx", fullgraph=True)
    for _ in range(2):
        assert close(model(**given), want)
    assert compiles() == 1
    report = ltx_inductor.last_report()
    report.expect(**{RULE: 8})  # of one block
    assert not report.refusals
    assert {s.contract for s in report.sites} == {"fp32-rope"}
    assert (watch.sides, watch.differing) == (2 * 2 * 8, 0)


@torch.no_grad()
def test_blocks_of_ltx_core_compiled_one_by_one(watch: Watch) -> None:
    pytest.importorskip("ltx_core")
    from ..models.ltx_core_av import CASES as LTX_CORE

    case = next(c for c in LTX_CORE if c.name == "ltx_core-block")
    given, blocks = [t.to(DEVICE) for t in case.inputs()], [case.build().to(DEVICE) for _ in range(3)]
    wants = [b(*given) for b in blocks]
    for b in blocks:
        b.module.compile(backend="ltx")
    assert all(close(b(*given), want) for b, want in zip(blocks, wants, strict=True))
    assert compiles() == 1
    report = ltx_inductor.last_report()
    report.expect(**{RULE: 8})
    assert not report.refusals
    assert {s.contract for s in report.sites} == {"bf16-chain"}
    assert (watch.sides, watch.differing) == (3 * 8, 0)


@torch.no_grad()
def test_a_module_wrapped_for_distributed_training(tmp_path: Path) -> None:
    if not (dist.is_available() and dist.is_nccl_available()):
        pytest.skip("this build of torch has no NCCL")
    device = torch.device(DEVICE, torch.cuda.current_device())
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        module, args = attention().eval(), drawn()
        model = compiled(nn.parallel.DistributedDataParallel(module, device_ids=[device.index]))
        check(module, model(*args), *args)
        ltx_inductor.last_report().expect(**{RULE: 2})
    finally:
        dist.destroy_process_group()


class Tail(nn.Module):
    """One product, tuned; what it gives, and its rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rotate = nn.Linear(256, WIDTH, dtype=BF16, device=DEVICE), Rotate("diffusers", DIM, DEVICE)

    def forward(self, x: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q = self.linear(x)
        return (q, *self.rotate(q, k, cos, sin))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_and_a_report_that_can_be_pickled(mode: str) -> None:
    module, (_, k, cos, sin) = Tail(), inputs(TOKENS, dim=DIM, device=DEVICE)
    model = compiled(module, mode=mode)
    for _ in range(5):
        x = torch.randn(1, TOKENS, 256, device=DEVICE).to(BF16)
        torch.compiler.cudagraph_mark_step_begin()
        q, *got = (t.clone() for t in model(x, k, cos, sin))
        assert same_bits(got, module.rotate(q, k, cos, sin))
        assert error(q, module.linear(x).double()) < 2e-2
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert "cudagraph_recorded_non_static_inputs" in counters["inductor"]
    report = ltx_inductor.last_report()
    report.expect(**{RULE: 2})
    again = pickle.loads(pickle.dumps(report))
    assert again.to_dict() == report.to_dict()
    assert str(again) == str(report)
    again.expect(**{RULE: 2})
