"""What the two kinds of needs are asked of, and that they outlive a process."""

from __future__ import annotations

import json

import pytest
import torch

from ltx_inductor import kernel_needs
from ltx_inductor.kernels import fna
from ltx_inductor.kernels.choice import DeviceKernels
from ltx_inductor.rewrite.needs import NeighborhoodNeed

RULE = "neighborhood_attention"
BF16 = torch.bfloat16


def test_needs_through_json():
    need = NeighborhoodNeed(torch.device("cuda:1"), BF16, 64, (11, 11, 11), False)

    class Asked:
        def __init__(self):
            self.needs = []

        def refusal(self, need):
            self.needs.append(need)

    remembering = kernel_needs.Remembering(Asked())
    for _ in range(2):
        remembering.refusal(need)
    (kept,) = json.loads(json.dumps(remembering.needs))
    assert kept == {
        "kind": RULE,
        "device": "cuda",
        "dtype": "bfloat16",
        "head_dim": 64,
        "kernel_size": [11, 11, 11],
        "exact": False,
        "prove": True,
    }
    assert kernel_needs._from_json(kept, torch.device("cuda:1")) == need


def test_kernels_on_a_device(monkeypatch):
    """The questions that reach the kernels, on a machine that has none of the devices."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fna, "prepare", lambda arch, **facts: asked.append((arch, facts)) or "no compiler today")
    kernels = DeviceKernels(lambda *_: None)
    need = NeighborhoodNeed(torch.device("cuda:1"), BF16, 64, (11, 11, 11), False)
    with pytest.warns(UserWarning, match="a graph is left unfused: no compiler today"):
        assert kernels.refusal(need) == "no compiler today"
    facts = {"dtype": BF16, "head_dim": 64, "kernel_size": (11, 11, 11), "exact": False, "device": 1, "trial": True}
    assert asked == [((9, 0), facts)]
    assert "not its bits" in kernels.proof(need)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "compute capability 8.0" in kernels.refusal(need)
    assert len(asked) == 1
