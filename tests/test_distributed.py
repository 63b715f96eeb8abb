"""Two processes on gloo: what is rewritten under torch.distributed, what is refused by name, and what ranks share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed_child import sides, verdict

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.xdist_group("test_distributed"),  # one worker: the module's fixture is expensive
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "BACKEND": "gloo"}
    command = [sys.executable, str(ROOT / "tests" / "distributed_child.py"), str(folder / "out")]
    children = [
        subprocess.Popen(command, env=env | {"RANK": r}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in "01"
    ]
    try:
        said = [c.communicate(timeout=300)[0] for c in children]
    finally:
        for c in children:
            c.kill()
    assert [c.returncode for c in children] == [0, 0], said
    return [json.loads((folder / f"out.{r}").read_text()) for r in "01"]


def of(ranks, name):
    return [r[name] for r in ranks]


def only_refusal(case):
    assert sides(case) == 0
    (refusal,) = (r for g in case["report"]["graphs"] for r in g["refusals"])
    return refusal


def test_sequence_parallel_is_rewritten_and_equals_one_process(ranks):
    """Rotated queries and (gathered) keys bit for bit; attention splits its sums by the number of queries."""
    for case in of(ranks, "sequence_parallel"):
        assert case["equal"] == [True, True, True]
        assert sides(case) == 2


@pytest.mark.parametrize(
    ("combine", "sentence"),
    [
        ("all_reduce", "all_reduce = _c10d_functional.all_reduce.default combines the squares of all ranks"),
        ("all_reduce_in_place", "all_reduce = _c10d_functional.all_reduce.default combines the squares of all ranks"),
        ("all_gather", "_c10d_functional.all_gather_into_tensor.default combines the squares of all ranks"),
        ("engine", "ltx_test.all_reduce.default is not known here; it may combine the squares of all ranks"),
    ],
)
def test_a_tensor_parallel_norm_is_refused_by_name(ranks, combine, sentence):
    """However the sums of squares come together."""
    for case in of(ranks, f"tensor_parallel {combine}"):
        assert case["close"]
        refusal = only_refusal(case)
        assert sentence in refusal["reason"]
        assert refusal["reason"].endswith("as a tensor-parallel norm does, so that no rank has the whole row")
        assert refusal["source"].startswith("distributed_child.py:")


def test_dtensors_are_refused_by_name(ranks):
    for case in of(ranks, "dtensors"):
        assert case["close"]
        refusal = only_refusal(case)
        assert "tensor subclass, whose own operations are no longer visible in the graph" in refusal["reason"]
        assert refusal["hint"] == "compile the part of the model that works on plain local tensors"


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_models_are_rewritten(ranks, wrapper):
    for case in of(ranks, wrapper):
        assert case["equal"]
        assert sides(case) == 2


def test_one_rank_compiles_while_the_other_waits_and_shares_the_cache(ranks):
    first, second = of(ranks, "shared_caches")
    assert (first["hits"], second["hits"]) == (0, 1)
    assert (first["report"]["cached"], second["report"]["cached"]) == (False, True)
    assert first["equal"]
    assert second["equal"]
    assert sides(first) == sides(second) == 2


def test_the_verdict_can_be_wrong(ranks):
    assert "WRONG" not in verdict(ranks[0])
    assert "ddp WRONG" in verdict(ranks[0] | {"ddp": ranks[0]["ddp"] | {"equal": False}})
