"""`python -m ltx_inductor demo`: the LTX-2 transformer of diffusers, small, with random weights, on any device.

Compiles it with backend="ltx", prints the report and the diff of one rewrite, and compares every rewritten side with
eager: the model runs eagerly while norm inputs and RoPE results are recorded, then the op gets the same inputs.
"""

from __future__ import annotations

import importlib
import json
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from ltx_inductor.kernels import rope as kernel
from ltx_inductor.rewrite.report import RewriteReport
from ltx_inductor.views.terminal import show

if TYPE_CHECKING:
    from rich.console import Console

_HEADS, _VIDEO, _AUDIO, _LAYERS = 4, 64, 32, 2  # head dims of the two streams
_FRAMES, _HEIGHT, _WIDTH, _AUDIO_FRAMES, _TEXT = 4, 12, 16, 64, 32
_INTS = {2: torch.int16, 4: torch.int32}


class MissingPackageError(RuntimeError):
    """diffusers is not installed, or has no LTX-2."""


@dataclass
class Side:
    """One norm -> RoPE of an eager run."""

    name: str  # "transformer_blocks.0.attn1.norm_q"
    norm: nn.RMSNorm
    x: Tensor  # [B, S, heads*D], the input of the norm
    cos: Tensor  # [B, heads, S, D/2]
    sin: Tensor
    out: Tensor  # [B, S, heads*D], what eager makes of it


def run(console: Console, as_json: bool = False) -> int:
    """0 if at least one side was rewritten and all have eager's bits, else 1.

    as_json: prints {"status", "different_elements", "report"}; the text goes to stderr.
    """
    if as_json:
        from rich.console import Console as RichConsole

        console = RichConsole(stderr=True, soft_wrap=True)
    ltx2 = _diffusers()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model, inputs = _model(ltx2).to(device, torch.bfloat16).eval(), _inputs(device)
    count = sum(p.numel() for p in model.parameters())
    console.print(
        f"LTX2VideoTransformer3DModel, {_LAYERS} layers, {count / 1e6:.1f} M random bf16 weights, on {device}"
    )
    start = time.perf_counter()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        report = _compile(model, inputs, folder)
        console.print(f"compiled in {time.perf_counter() - start:.1f} s\n")
        show(console, report.to_dict())
        _print_diff(console, Path(folder))
        sides = _record(model, ltx2, inputs)
        wrong = _compare(console, sides, report)
    status = int(wrong > 0 or report.count() == 0)
    if as_json:
        print(json.dumps({"status": status, "different_elements": wrong, "report": report.to_dict()}, indent=2))
    return status


def _diffusers() -> Any:
    try:
        return importlib.import_module("diffusers.models.transformers.transformer_ltx2")
    except ImportError as error:
        raise MissingPackageError(f"the demo needs diffusers: pip install diffusers==0.42.1 numpy ({error})") from error


def _model(ltx2: Any) -> Any:
    video, audio = _HEADS * _VIDEO, _HEADS * _AUDIO
    return ltx2.LTX2VideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=_HEADS,
        attention_head_dim=_VIDEO,
        cross_attention_dim=video,
        audio_in_channels=16,
        audio_out_channels=16,
        audio_num_attention_heads=_HEADS,
        audio_attention_head_dim=_AUDIO,
        audio_cross_attention_dim=audio,
        num_layers=_LAYERS,
        caption_channels=video,
        rope_type="split",
    )


def _inputs(device: torch.device) -> dict[str, Any]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device, torch.bfloat16)

    return {
        "hidden_states": rand(1, _FRAMES * _HEIGHT * _WIDTH, 16),
        "audio_hidden_states": rand(1, _AUDIO_FRAMES, 16),
        "encoder_hidden_states": rand(1, _TEXT, _HEADS * _VIDEO),
        "audio_encoder_hidden_states": rand(1, _TEXT, _HEADS * _VIDEO),
        "timestep": torch.tensor([500.0], device=device),
        "num_frames": _FRAMES,
        "height": _HEIGHT,
        "width": _WIDTH,
        "audio_num_frames": _AUDIO_FRAMES,
        "return_dict": False,
    }


def _compile(model: Any, inputs: dict[str, Any], folder: str) -> RewriteReport:
    import ltx_inductor

    options = {"ltx_inductor.cpu": True, "ltx_inductor.dump": folder}
    torch.compile(model, backend="ltx", options=options)(**inputs)
    return ltx_inductor.last_report()


def _print_diff(console: Console, folder: Path) -> None:
    """The first rewrite's own diff, or the first hunk of the graph's."""
    diffs = sorted(folder.rglob("0*.diff")) or sorted(folder.rglob("graph.diff"))
    if not diffs:
        return
    console.print(f"\none rewrite, of the {len(diffs)} dumped (option ltx_inductor.dump):")
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for line in diffs[0].read_text().splitlines():
        console.print(line, style=colours.get(line[:1]), markup=False, highlight=False)
    console.print()


def _record(model: Any, ltx2: Any, inputs: dict[str, Any]) -> list[Side]:
    """Every RMSNorm -> split RoPE of an eager run, in order."""
    normed: dict[int, tuple[str, nn.RMSNorm, Tensor, Tensor]] = {}
    sides: list[Side] = []
    rotate = ltx2.apply_split_rotary_emb

    def recording(x: Tensor, freqs: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = rotate(x, freqs)
        if id(x) in normed:
            name, norm, before, _ = normed[id(x)]
            sides.append(Side(name, norm, before, *freqs, out))
        return out

    def after_norm(name: str) -> Any:
        def hook(norm: nn.RMSNorm, args: tuple[Tensor, ...], out: Tensor) -> None:
            normed[id(out)] = (name, norm, args[0], out)  # out is kept, so that its id stays its own

        return hook

    hooks = [
        m.register_forward_hook(after_norm(name))
        for name, m in model.named_modules()
        if re.search(r"norm_[qk]$", name) and isinstance(m, nn.RMSNorm)
    ]
    with mock.patch.object(ltx2, "apply_split_rotary_emb", recording):
        model(**inputs)
    for h in hooks:
        h.remove()
    return sides


def _make_ready(s: Side, contract: str) -> None:
    """The compiled model launches queries and keys together; the kernel for one side alone may not be built yet."""
    if s.x.is_cuda:
        kernel.prepare(
            torch.cuda.get_device_capability(s.x.device),
            dtype=s.x.dtype,
            table_dtype=s.cos.dtype,
            head_dim=2 * s.cos.shape[-1],
            hidden=s.x.shape[-1],
            contract=contract,
            per_head=False,
        )


def _compare(console: Console, sides: list[Side], report: RewriteReport) -> int:
    """Gives the op what eager's norm got; elements whose bits differ from what eager's RoPE gave."""
    contracts = {s.contract for s in report.sites}
    if len(contracts) != 1 or report.count() != len(sides):
        console.print(f"[red]eager has {len(sides)} norm -> RoPE sides, the report {report.count()}[/red]")
        return len(sides)
    (contract,) = contracts
    wrong = total = 0
    for s in sides:
        eps = torch.finfo(torch.float32).eps if s.norm.eps is None else s.norm.eps
        heads = s.x.shape[-1] // (2 * s.cos.shape[-1])
        _make_ready(s, contract)
        out = torch.ops.ltx_inductor.rmsnorm_split_rope(s.x, s.norm.weight, s.cos, s.sin, eps, heads, contract)
        ints = _INTS[out.element_size()]
        differ = int((out.view(ints) != s.out.contiguous().view(ints)).sum())
        total, wrong = total + out.numel(), wrong + differ
        verdict = "equal bit for bit" if differ == 0 else f"{differ} of {out.numel()} elements differ"
        console.print(f"  {s.name:<55} {list(s.x.shape)!s:<15} {verdict}", markup=False, highlight=False)
    if wrong == 0:
        console.print(f"[green]all {len(sides)} rewritten sides equal eager bit for bit[/green] ({total} elements)")
    else:
        console.print(f"[red]{wrong} of {total} elements differ from eager[/red]")
    return wrong
