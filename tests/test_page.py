"""The HTML page of a report: what is on it, that it needs nothing else, and that it works in a browser."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ltx_inductor.config import Config
from ltx_inductor.rewrite.passes import rewrite_graph
from ltx_inductor.rewrite.report import GraphReport, Refusal, RewriteReport, Site
from ltx_inductor.views import groups
from ltx_inductor.views.layout import place
from ltx_inductor.views.page import page
from ltx_inductor.views.svg import short
from tests import browser
from tests.harness import copy_graph, trace
from tests.rewrite.test_passes import Layers, inputs

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("test_page")  # one worker: the module's fixture is expensive
NASTY = '</script><b>it\'s "rotated" & not [red]known[/red]'


@pytest.fixture(scope="module")
def report():
    graph = rewrite_graph(copy_graph(trace(Layers(2), inputs())[0].gm).graph, Config(cpu=True))
    lost = Refusal(
        "rmsnorm_split_rope", NASTY, source="lost.py:7", node="cat_3", expected="a", found="b", hint="change it"
    )
    other = Refusal("another_rule", "another reason", source="other.py:9", certain=False)
    graph.refusals += [lost, lost, other]
    graph.notes.append("a note")
    return RewriteReport([graph])


@pytest.fixture(scope="module")
def html(report):
    return page(report.to_dict())


def test_the_page_has_everything_the_report_says(report, html):
    for site in report.sites:
        for text in (site.source, site.contract, site.node, site.op, *site.shapes.values()):
            assert text in html, text
    assert "a note" in html
    assert html.count("change it") == 2  # once to read, once to search: two refusals of one line are one card
    assert "2 times" in html
    assert "only looks like one" in html


def test_nothing_is_taken_for_markup_and_nothing_is_loaded(html):
    assert NASTY not in html
    assert html.count("<script>") == html.count("</script>") == 1
    assert not re.search(r"\b(?:src|href|action)\s*=|@import|url\(|https?://", html.replace("http-equiv", ""))


class _Tags(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_tags_are_balanced(html):
    parser = _Tags()
    parser.feed(html)
    assert parser.open == []


def test_to_html(report, html, tmp_path):
    report.to_html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == html
    RewriteReport.from_dict(json.loads(report.to_json())).to_html(tmp_path / "b.html", title="mine")
    assert (tmp_path / "b.html").read_text() == html.replace("ltx_inductor report", "mine")
    empty = page(RewriteReport().to_dict())
    assert "nothing was rewritten" in empty


def test_layers_that_look_alike_are_one_card(report, html):
    (group,) = groups.groups(report.to_dict())
    assert (len(group.sites), group.launches, group.sides) == (4, 2, "q and k")
    assert html.count("<svg") == 2


@pytest.mark.parametrize("name", ["a chain", "a skip", "a fan"])
def test_layout(name):
    graphs = {
        "a chain": {"a": [], "b": ["a"], "c": ["b"]},
        "a skip": {"a": [], "b": ["a"], "c": ["b"], "d": ["a", "c"], "e": ["d", "late"], "late": []},
        "a fan": {"a": [], "b": ["a"], "c": ["a"], "d": ["a"], "e": ["b", "c", "d"]},
    }
    inputs = dict(sorted(graphs[name].items(), key=lambda item: item[0] == "e"))  # before their readers
    found = place(inputs, frozenset({"late"}))
    for reader, sources in inputs.items():
        for source in sources:
            points = found.edges[source, reader]
            assert found.layer[source] < found.layer[reader]
            assert [layer for _, layer in points] == list(range(found.layer[source], found.layer[reader] + 1))
    for layer in set(found.layer.values()):
        columns = sorted(found.column[n] for n in inputs if found.layer[n] == layer)
        assert all(b - a > 0.999 for a, b in itertools.pairwise(columns))  # no node on another
    assert min(found.column.values()) >= 0
    if name == "a skip":
        assert found.layer["late"] == found.layer["e"] - 1


def test_names_of_ops():
    assert short("aten.mul.Tensor") == "mul"
    assert short("ltx_inductor.qk_rmsnorm_split_rope.default") == "qk_rmsnorm_split_rope"
    assert short("natten.na3d_forward.default") == "natten.na3d_forward"
    assert short("getitem") == "getitem"


def test_the_saving_is_the_measured_one(report):
    """The row that the rates come from is met again, within a twentieth."""
    data = json.loads((ROOT / "benchmarks/results/rope-h200.json").read_text())["production"]
    site = report.to_dict()["graphs"][0]["sites"][0] | {"pair": None}
    for row, contract in (("v8160 bf16-chain bf16", "bf16-chain"), ("v8160 fp32-rope fp32", "fp32-rope")):
        one = groups.Group([site | {"bytes": data[row]["bytes"], "contract": contract}], None)
        us = float(re.match(r"about (\d+) µs", one.saving).group(1))
        assert us == pytest.approx(data[row]["inductor"] - data[row]["ours"], rel=0.05)
    assert "dynamic" in groups.Group([site | {"bytes": None}], None).saving
    assert "a few µs" in groups.Group([site], None).saving


def test_the_saving_of_an_axial_side(report):
    data = json.loads((ROOT / "benchmarks" / "results" / "axial-h200.json").read_text())
    row = next(r for r in data["rows"] if r["grid"] == [121, 136, 240])
    moved = 2 * 121 * 136 * 240 * 4 * 64 * 2
    site = report.to_dict()["graphs"][0]["sites"][0] | {"pair": None, "rule": "rmsnorm_axial_rope"}
    us = float(re.match(r"about (\d+) µs", groups.Group([site | {"bytes": moved}], None).saving).group(1))
    assert us == pytest.approx((row["ms"]["stock"] - row["ms"]["op"]) * 1e3 / 2, rel=0.03)
    assert "5 to 10 times" in groups.Group([site | {"bytes": None}], None).saving


def test_a_call_of_neighborhood_attention():
    shapes = dict.fromkeys(("q", "k", "v", "out"), "[1,33,64,96,4,64]") | {"window": "[11,11,11]"}
    site = Site("neighborhood_attention", "ltx_inductor::na3d", None, None, "decoder.py:5", shapes, "fast", "out_1")
    site = replace(site, form="natten::hopper_na3d_forward")
    report = RewriteReport([GraphReport([site])]).to_dict()
    (group,) = groups.groups(report)
    data = json.loads((ROOT / "benchmarks/results/fna-h200.json").read_text())["rows"][0]
    saved = float(re.match(r"about ([\d.]+) ms", group.saving).group(1))
    assert data["grid"] == [33, 64, 96]
    assert saved == pytest.approx(data["natten"]["ms"] - data["ltx"]["ms"], rel=0.08)
    html = page(report)
    assert "natten::hopper_na3d_forward" in html
    assert "call rewritten" in html
    assert groups.counted(report) == "1 call"
    small = replace(site, shapes=shapes | {"window": "[3,5,5]"}, contract="exact")
    dynamic = replace(site, shapes=shapes | {"q": "[1,s0,64,96,4,64]"})
    sayings = [groups.groups(RewriteReport([GraphReport([s])]).to_dict())[0].saving for s in (small, dynamic)]
    assert sayings[0].startswith("small windows")
    assert "7.6 times as fast" in sayings[1]


COUNT = """
  const count = () => [...document.querySelectorAll('.card:not([hidden])')].map((c) => c.dataset.kind);
  const set = (name, value) => {
    const field = document.querySelector('.bar form').elements[name];
    field.value = value;
    field.dispatchEvent(new Event('input', { bubbles: true }));
    const found = count();
    field.value = ''; field.dispatchEvent(new Event('input', { bubbles: true }));
    return found;
  };
"""


def test_it_loads_and_filters(html, tmp_path):
    script = (
        COUNT
        + """
      const first = count();
      const theme = () => getComputedStyle(document.body).backgroundColor;
      const before = theme(); document.getElementById('theme').click();
      return { first, kind: set('kind', 'left alone'), rule: set('rule', 'another_rule'), file: set('file', 'lost.py'),
        search: set('q', 'CHANGE lost.py'), nothing: set('q', 'no such thing'), again: count(),
        shown: document.getElementById('shown').textContent, themes: [before, theme()],
        svg: [...document.querySelectorAll('details[open] svg')].map((s) => s.getBoundingClientRect().width > 100) };
    """
    )
    found, errors = browser.probe(html, tmp_path, script)
    assert errors == []
    assert found["first"] == found["again"] == ["rewritten", "left alone", "left alone"]
    assert found["kind"] == ["left alone", "left alone"]
    assert found["rule"] == found["file"] == found["search"] == ["left alone"]
    assert found["nothing"] == []
    assert found["shown"] == "3 of 3 shown"
    assert found["themes"][0] != found["themes"][1]
    assert found["svg"] == [True, True]


def test_the_filter_is_in_the_address_and_a_narrow_window_does_not_scroll_sideways(html, tmp_path):
    script = (
        COUNT
        + """
      location.hash = '#kind=rewritten'; dispatchEvent(new Event('hashchange'));
      return { kept: count(), wide: document.documentElement.scrollWidth, window: innerWidth };
    """
    )
    found, errors = browser.probe(html, tmp_path, script, ("--window-size=500,900",))
    assert errors == []
    assert found["kept"] == ["rewritten"]
    assert found["wide"] <= found["window"]


@pytest.mark.parametrize("width", [1100, 1440, 2600])
def test_no_drawing_is_cut_off_at_the_sides(html, tmp_path, width):
    script = """
      const cut = [...document.querySelectorAll('details[open] .scroll')].map((s) => s.scrollWidth - s.clientWidth);
      const text = [...document.querySelectorAll('details[open] .node')].filter((n) =>
        n.querySelector('.what').getBBox().width > n.querySelector('rect').getBBox().width);
      return { cut, wide: text.map((n) => n.textContent) };
    """
    found, _ = browser.probe(html, tmp_path, script, (f"--window-size={width},900",))
    assert found["cut"] == [0, 0]
    assert found["wide"] == []


def test_without_a_browser_the_tests_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(browser, "CHROMIUM", None)
    for required, outcome in ((False, pytest.skip.Exception), (True, pytest.fail.Exception)):
        monkeypatch.setattr(browser, "REQUIRED", required)
        with pytest.raises(outcome, match="no Chromium here"):
            browser.probe("<body></body>", tmp_path)


def test_an_error_would_be_seen(html, tmp_path):
    _, errors = browser.probe(html, tmp_path, "console.error('planted'); return {};")
    assert "planted" in errors[0]
    _, errors = browser.probe(html.replace("<main>", "<main><img src='https://example.com/x.png'>"), tmp_path)
    assert "Content Security Policy" in errors[0]
