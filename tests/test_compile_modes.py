"""The ways people compile. Graphs go through Dynamo, AOTAutograd and our pass, and then run as they are: no code is
generated, so that what is looked at is the rewrite in each of them. tests/gpu has the rest: test_compile_modes.py and
test_model_modes.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.virtualized import V
from torch.utils.checkpoint import checkpoint

import ltx_inductor
from ltx_inductor.config import Config
from ltx_inductor.joint_pass import LtxPass

from .end_to_end_child import QueriesAndKeys
from .harness import ADDCMUL_KEPT, bit_difference, trace
from .models import pieces as p
from .models.sides import B, D, H, Pair, S, bf16, rope, table, weight, x
from .modes import Attention, LoraLinear, gradients, with_us, without_us

RULE = "rmsnorm_split_rope"
needs_fma = pytest.mark.skipif(not ADDCMUL_KEPT, reason="the graph's own mul and add round where eager's fma does not")
_compiles: list[int] = []


def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    _compiles.append(1)
    return with_us(gm, example_inputs)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    _compiles.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(module: Any, **kw: Any) -> Any:
    return torch.compile(module, backend=backend, **kw)


def projection(width: int) -> nn.Module:
    return nn.Linear(width, width, dtype=torch.bfloat16)


def attention(linear: Callable[[int], nn.Module] = projection) -> nn.Module:
    return Attention(lambda: linear(H * D), Pair(), H)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return x(), table(), table()


@torch.no_grad()
def test_regional_compile_of_48_blocks_is_one_compile() -> None:
    blocks = nn.ModuleList(attention() for _ in range(48)).eval()
    args = inputs()
    want = args[0]
    for b in blocks:
        want = b(want, *args[1:])[0]
        b.compile(backend=backend)
    got = args[0]
    for b in blocks:
        got = b(got, *args[1:])[0]
    assert len(_compiles) == 1
    ltx_inductor.last_report().expect(**{RULE: 2})
    assert bit_difference(got, want) is None or not ADDCMUL_KEPT


@torch.no_grad()
def test_compile_repeated_blocks_of_diffusers() -> None:
    pytest.importorskip("diffusers")
    from ltx_inductor.demo import _diffusers, _inputs, _model

    model = _model(_diffusers()).bfloat16().eval()
    given = _inputs(torch.device("cpu"))
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    model(**given)
    assert len(_compiles) == 1
    report = ltx_inductor.last_report()
    assert report.count(RULE) == 8  # of one block
    assert not report.refusals


@torch.no_grad()
def test_blocks_of_ltx_core_compiled_one_by_one() -> None:
    pytest.importorskip("ltx_core")
    from .models.ltx_core_av import CASES as LTX_CORE

    case = next(c for c in LTX_CORE if c.name == "ltx_core-block")
    given, blocks = case.inputs(), [case.build() for _ in range(3)]
    wants = [b(*given) for b in blocks]
    for b in blocks:
        b.module.compile(backend=backend)
    gots = [b(*given) for b in blocks]
    assert len(_compiles) == 1
    report = ltx_inductor.last_report()
    report.expect(**{RULE: 8})
    assert not report.refusals
    if ADDCMUL_KEPT:
        assert bit_difference(gots, wants) is None


@torch.no_grad()
@needs_fma
def test_a_perturbation_mask_recompiles_and_is_rewritten_again() -> None:
    module, args = attention().eval(), inputs()
    model, mask = compiled(module), torch.rand(B, S, 1).round().bfloat16()
    assert bit_difference(model(*args), module(*args)) is None
    assert bit_difference(model(*args, mask), module(*args, mask)) is None
    assert bit_difference(model(*args, 1 - mask), module(*args, 1 - mask)) is None
    assert len(_compiles) == 2
    report = ltx_inductor.last_report()
    assert [len(g.sites) for g in report.graphs] == [2, 2]
    assert not report.refusals


@torch.no_grad()
@needs_fma
def test_lora_in_front_of_the_norm_swapped_hot_and_fused() -> None:
    module, args = attention(LoraLinear).eval(), inputs()
    model = compiled(module)
    assert bit_difference(model(*args), module(*args)) is None
    for layer in (module.to_q, module.to_k):
        layer.swap()
    assert bit_difference(model(*args), module(*args)) is None
    assert len(_compiles) == 1
    module.to_q.fuse()
    module.to_k.fuse()
    assert bit_difference(model(*args), module(*args)) is None
    assert len(_compiles) == 2
    report = ltx_inductor.last_report()
    assert [len(g.sites) for g in report.graphs] == [2, 2]


@torch.no_grad()
@needs_fma
def test_lora_of_peft() -> None:
    """The same with PEFT's own layers, where it is installed (it is no dependency: it brings transformers along)."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    module, args = peft.inject_adapter_in_model(config, attention()).bfloat16().eval(), inputs()
    model = compiled(module)
    assert bit_difference(model(*args), module(*args)) is None
    state = {name: torch.randn_like(w) for name, w in peft.get_peft_model_state_dict(module).items()}
    peft.set_peft_model_state_dict(module, state)  # hot-swap
    assert bit_difference(model(*args), module(*args)) is None
    before = module(*args)[1]
    for layer in (module.to_q, module.to_k):
        layer.merge()
    assert bit_difference(model(*args), module(*args)) is None
    assert bit_difference(module(*args)[1], before) is not None  # the sum in the weight rounds elsewhere: it was fused
    report = ltx_inductor.last_report()
    assert {len(g.sites) for g in report.graphs} == {2}


class Fp8Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 32
        self.weight = nn.Parameter(torch.randn(self.n, self.n).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones((), device=x.device)
        flat = x.reshape(-1, self.n).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(flat, self.weight.t(), one, one, out_dtype=torch.bfloat16)
        return out.view(*x.shape[:-1], -1)


@torch.no_grad()
def test_an_fp8_linear_in_front_of_the_norm() -> None:
    linear, w = Fp8Linear(), weight(32)

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(linear(x), w, cos, sin, 4)

    args = bf16(1, 16, 32), table(4, 16, batch=1), table(4, 16, batch=1)
    try:
        want = model(*args)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this build of torch has no _scaled_mm here: {error}")
    got = compiled(model)(*args)
    ltx_inductor.last_report().expect(**{RULE: 1})
    assert bit_difference(got, want) is None or not ADDCMUL_KEPT


@needs_fma
def test_inference_mode() -> None:
    module, args = attention().eval(), inputs()
    with torch.inference_mode():
        got = compiled(module)(*args)
        assert bit_difference(got, module(*args)) is None
    ltx_inductor.last_report().expect(**{RULE: 2})


@torch.no_grad()
@needs_fma
def test_autocast_on_and_off() -> None:
    """On torch >= 2.12 rms_norm is on autocast's list of fp32 ops: another contract, the same promise."""
    w = weight(H * D)
    args = inputs()

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x, w, cos, sin, H, p.chunk_cat)

    run = compiled(model)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert bit_difference(run(*args), model(*args)) is None
    report = ltx_inductor.last_report()
    assert len(_compiles) == 2
    assert report.count(RULE) + len(report.refusals) == 2
    assert "bf16-chain" in {s.contract for s in report.sites}


def test_activation_checkpointing_trains_as_without_us() -> None:
    module, args = attention(), inputs()

    def wrapped(*args: Tensor) -> Any:
        return checkpoint(module, *args, use_reentrant=False)

    ours = gradients(backend, wrapped, module, args)
    report = ltx_inductor.last_report()
    assert report.count() == 0
    assert report.refusals
    assert all("training graph" in r.reason for r in report.refusals)
    assert bit_difference(ours, gradients(without_us, wrapped, module, args)) is None


@torch.no_grad()
def test_a_module_wrapped_for_distributed_training(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module, args = attention().eval(), inputs()
        model = compiled(nn.parallel.DistributedDataParallel(module))
        got = model(*args)
        ltx_inductor.last_report().expect(**{RULE: 2})
        assert bit_difference(got, module(*args)) is None or not ADDCMUL_KEPT
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("cpu", [True, False])
@torch.no_grad()
def test_aot_inductor_is_refused_by_name(cpu: bool) -> None:
    """A package runs where nobody has imported us. Here the graph still shows the calls of torch.rms_norm."""
    (traced,) = trace(attention().eval(), inputs())
    delivered: list[Any] = []
    with V.set_aot_compilation(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ltx_inductor.session, "deliver", lambda report, needs: delivered.append(report))
        LtxPass(Config(cpu=cpu))(traced.gm.graph)
    (report,) = delivered
    assert not report.sites
    assert len(report.refusals) == 2
    assert all("AOTInductor" in r.reason for r in report.refusals)


@pytest.mark.slow
@torch.no_grad()
def test_a_real_package_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export has decomposed the norms: nobody may be told to use torch.nn.RMSNorm, which they do."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q, k = torch.randn(2, 1, 8, 128).bfloat16()
    cos, sin = torch.randn(2, 1, 8, 4, 16).transpose(2, 3)
    torch._dynamo.reset()
    with ltx_inductor.enabled({"ltx_inductor.cpu": True}):
        program = torch.export.export(QueriesAndKeys(128).bfloat16().eval(), (q, k, cos, sin))
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    report = ltx_inductor.last_report()
    assert not report.sites
    assert len(report.refusals) == 2
    for r in report.refusals:
        assert "AOTInductor" in r.reason
        assert not r.hint


@torch.no_grad()
def test_a_report_can_be_pickled() -> None:
    compiled(attention().eval())(*inputs())
    report = ltx_inductor.last_report()
    again = pickle.loads(pickle.dumps(report))
    assert again.to_dict() == report.to_dict()
    assert str(again) == str(report)
    again.expect(**{RULE: 2})


@torch.no_grad()
@needs_fma
def test_one_graph_for_sequences_of_64_to_32640() -> None:
    w = weight(2 * 4)

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x, w, cos, sin, 2)

    def args(tokens: int) -> tuple[Tensor, ...]:
        return bf16(1, tokens, 8), *(torch.randn(1, 2, tokens, 2).bfloat16() for _ in "cs")

    run = compiled(model)
    for tokens in (64, 65, 1023, 4096, 32640):
        given = args(tokens)
        for t, axis in zip(given, (1, 2, 2), strict=True):
            torch._dynamo.mark_dynamic(t, axis)
        assert bit_difference(run(*given), model(*given)) is None
    assert len(_compiles) == 1
    ltx_inductor.last_report().expect(**{RULE: 1})
