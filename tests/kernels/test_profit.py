"""What is legal and would be slower is left alone, by measurement; the measurements are data."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import ltx_inductor
from ltx_inductor.cache_id import cache_id
from ltx_inductor.config import Config, from_environment
from ltx_inductor.kernels import profit
from ltx_inductor.kernels.choice import AssumedKernels, DeviceKernels
from ltx_inductor.registration import current_config
from ltx_inductor.rewrite import passes

from ..end_to_end_child import QueriesAndKeys
from ..harness import copy_graph, trace

ROPE, HERE = "rmsnorm_split_rope", (9, 0)
TABLE = profit.Table(
    (
        profit.Row(ROPE, "9.0", 1000, 3.0, 2.0),
        profit.Row(ROPE, "9.0", 100_000, 3.0, 9.0),
        profit.Row("neighborhood_attention", "9.0", 10, 5.0, 4.0),
    ),
    "a GPU, torch 0, today",
)


def write(path: Path, rows: object) -> str:
    path.write_text(json.dumps({"device": "a GPU", "torch": "0", "date": "today", "rows": rows}))
    return str(path)


@pytest.mark.parametrize(("size", "faster"), [(1, False), (999, False), (9000, False), (11_000, True), (1 << 40, True)])
def test_the_nearest_size_decides(size: int, faster: bool) -> None:
    reason = TABLE.refusal(ROPE, HERE, size)
    assert (reason is None) == faster
    if reason:
        assert "3.0 us and Inductor's own code 2.0 us (a GPU, torch 0, today)" in reason
        assert f"nearest size measured to {size:,}" in reason


def test_what_nobody_measured_is_rewritten() -> None:
    assert TABLE.refusal(ROPE, (8, 0), 1) is None
    assert TABLE.refusal(ROPE, HERE, None) is None  # a dynamic size
    assert TABLE.refusal("another_rule", HERE, 1) is None
    assert profit.table(profit.ANY).refusal(ROPE, HERE, 1) is None
    assert "NATTEN 4.0 us" in str(TABLE.refusal("neighborhood_attention", HERE, 10))


def test_the_packages_table() -> None:
    table = profit.table(profit.MEASURED)
    for rule, sizes in ((ROPE, 18), ("rmsnorm_axial_rope", 5), ("neighborhood_attention", 5)):
        assert len({r.size for r in table.rows if r.rule == rule}) >= sizes
    assert {r.arch for r in table.rows} == {"9.0"}
    assert "H200" in table.source


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"rows": []}', '{"device": "", "torch": "", "date": "", "rows": [{"rule": "x"}]}'],
)
def test_a_table_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table.json.*cannot be read.*expected 'measured', 'any', or a file"):
        profit.table(str(path))


def test_register_does_not_wait_for_a_compile_to_say_so(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("no table")
    with pytest.raises(ValueError, match="cannot be read"):
        ltx_inductor.register({"ltx_inductor.profit": str(path)})
    assert current_config() is None


def test_times_have_to_be_positive(tmp_path: Path) -> None:
    row = {"rule": ROPE, "arch": "9.0", "size": 1, "ltx_us": 0, "other_us": 1}
    with pytest.raises(ValueError, match="must be positive"):
        profit.table(write(tmp_path / "t.json", [row]))


@pytest.mark.parametrize("number", ["Infinity", "1e400", "NaN", f"1{'0' * 400}"])
@pytest.mark.parametrize("name", ["size", "ltx_us", "other_us"])
def test_numbers_have_to_be_finite(tmp_path: Path, name: str, number: str) -> None:
    row = {"rule": ROPE, "arch": "9.0", "size": 1, "ltx_us": 1, "other_us": 1, name: "NUMBER"}
    path = Path(write(tmp_path / "table.json", [row]))
    path.write_text(path.read_text().replace('"NUMBER"', number))
    with pytest.raises(ValueError, match=r"table.json.*cannot be read.*expected 'measured', 'any', or a file"):
        profit.table(str(path))


def test_a_table_that_is_rewritten_in_place_is_read_again(tmp_path: Path) -> None:
    row = {"rule": ROPE, "arch": "9.0", "size": 1, "ltx_us": 2, "other_us": 1}
    path = write(tmp_path / "t.json", [row])
    before = profit.table(path), profit.digest(path), cache_id(Config(profit=path))
    write(Path(path), [{**row, "ltx_us": 1, "other_us": 2}])  # as long as before
    os.utime(path, ns=(0, 0))
    after = profit.table(path), profit.digest(path), cache_id(Config(profit=path))
    assert not set(before) & set(after)
    assert profit.table(path) is profit.table(path)


def test_a_relative_path_is_looked_up_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"rule": ROPE, "arch": "9.0", "size": 1, "ltx_us": 2, "other_us": 1}
    found = []
    for i in (1, 2):
        (tmp_path / str(i)).mkdir()
        monkeypatch.chdir(tmp_path / str(i))
        write(Path("t.json"), [{**row, "size": i}])
        os.utime("t.json", ns=(0, 0))
        found.append(profit.table("t.json").rows[0].size)
    assert found == [1, 2]


def test_the_option(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [])
    assert Config().profit == "measured"
    for value in ("any", path, Path(path)):
        assert Config().with_options({"ltx_inductor.profit": value}).profit == str(value)
    assert from_environment({"LTX_INDUCTOR_PROFIT": path}).profit == path
    with pytest.raises(ValueError, match=r"profit='often': expected one of measured, any, or a file"):
        Config(profit="often")
    with pytest.raises(TypeError, match=r"ltx_inductor.profit=True: expected one of measured, any"):
        Config().with_options({"ltx_inductor.profit": True})


def test_another_table_is_another_cache_entry(tmp_path: Path) -> None:
    row = {"rule": ROPE, "arch": "9.0", "size": 1, "ltx_us": 2, "other_us": 1}
    paths = [write(tmp_path / f"{i}.json", [row] * i) for i in (0, 1, 1)]
    ids = [cache_id(Config(profit=p)) for p in (*paths, "any", "measured")]
    assert ids[1] == cache_id(Config(profit=paths[1]))
    assert len(set(ids)) == 4  # the last two tables are the same, but for where they lie


def test_a_pair_that_is_not_worth_it_is_refused_by_name() -> None:
    q, k = torch.randn(2, 1, 16, 64).bfloat16()
    cos, sin = torch.randn(2, 1, 16, 2, 16).transpose(2, 3)
    with torch.no_grad():
        (traced,) = trace(QueriesAndKeys(64).bfloat16(), [q, k, cos, sin])  # heads of 32: there is a kernel
    slow, fast = (profit.Table((row,), "") for row in TABLE.rows[:2])
    for table, sites in ((slow, 0), (fast, 2), (None, 2)):
        report = passes.rewrite_graph(copy_graph(traced.gm).graph, Config(cpu=True), AssumedKernels(table))
        assert len(report.sites) == sites
        if not sites:
            assert len(report.refusals) == 2
            assert "it would be slower here" in report.refusals[0].reason
            assert 'ltx_inductor.profit="any"' in str(report.refusals[0].hint)


def test_a_cpu_graph_is_not_asked() -> None:
    kernels = DeviceKernels(lambda *_: None, profit=TABLE)
    need = type("Need", (), {"kind": ROPE, "device": torch.device("cpu")})()
    assert kernels.slower(need, 1) is None
