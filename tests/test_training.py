"""Training is not ours: gradients come out as without us, and the report says why nothing was rewritten."""

from __future__ import annotations

import torch

import ltx_inductor
from tests.harness import bit_difference
from tests.rewrite.test_passes import Layers, inputs


def gradients(backend: str, **kw):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, (x, cos, sin) = Layers(2), inputs()
    x.requires_grad_()
    out = torch.compile(model, backend=backend, **kw)(x, cos, sin)
    out.float().square().sum().backward()
    return out.detach(), x.grad, [p.grad for p in model.parameters()]


def test_gradients_are_those_of_stock_inductor():
    ours = gradients("ltx", options={"ltx_inductor.cpu": True})
    report = ltx_inductor.last_report()
    assert report.count() == 0
    assert len(report.refusals) == 4
    assert all("training graph" in r.reason and "no_grad" in r.hint for r in report.refusals)
    assert bit_difference(ours, gradients("inductor")) is None
