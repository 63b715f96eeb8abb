"""Every Python and console block of the docs runs, page by page, in the order in which a reader meets it.

python blocks share one namespace per page; with title="x.py" they are written to that file instead (and with
replaces="text" put in place of a part of it). console blocks: the lines after a "$ command" have to be in its output,
in that order, but for spacing; "..." stands for anything. So do those of an output block, in what the python block
before it has printed. A command whose output shows a failure has to exit with 1, all others with 0. A comment before a
block says why it is not run (`<!-- not run: reason -->`) or that it needs a GPU (`<!-- gpu -->`). No code is generated
but by scripts in a process of their own. sh blocks install, build or take minutes: of them `doctor` is run, the
arguments of our other commands are parsed, and targets of make have to be there.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import linecache
import re
import shlex
import subprocess
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from ltx_inductor import cli
from ltx_inductor.explainer import _eager
from tests.installed import ROOT, environment

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
NEEDS = {"integrations": ("diffusers", "ltx_core")}
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<kind>\w*) *(?P<facts>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)
TEXT_ONLY = {"", "text", "diff", "json", "toml"}
FAILURE = re.compile(r"\b[1-9]\d* (?:failed|lost)\b|^expected \d+ ", re.M)  # of tests, of a diff, of explain --expect


@dataclass
class Block:
    kind: str
    text: str
    line: int
    mark: str
    title: str
    replaces: str


def blocks(text: str) -> list[Block]:
    found = []
    for m in FENCE.finditer(text):
        facts = dict(re.findall(r'(\w+)="([^"]*)"', m["facts"]))
        line = text.count("\n", 0, m.start("text")) + 1
        title, replaces = facts.get("title", ""), facts.get("replaces", "")
        found.append(Block(m["kind"], m["text"], line, m["mark"] or "", title, replaces))
    return found


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty folder with the model of the quick start; no code is generated; the CPU stands for a GPU."""
    from torch._inductor import compile_fx

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=_eager))
    monkeypatch.setenv("COLUMNS", "160")
    write(next(b for b in blocks((ROOT / "docs/index.md").read_text()) if b.title == "my_model.py"))
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    sys.modules.pop("my_model", None)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_page(path, monkeypatch, capsys):
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    module = types.ModuleType(f"page_{re.sub(r'[^a-zA-Z]', '_', path.stem)}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks the globals of a function up by its name
    names = vars(module)
    if path.stem == "README":  # speaks of "model" and "inputs"
        names["model"], names["inputs"] = importlib.import_module("my_model").build()
    for block in blocks(path.read_text()):
        if block.mark.startswith("not run") or (block.mark == "gpu" and not torch.cuda.is_available()):
            continue
        if block.title:
            write(block)
        elif block.kind == "python":
            # as if the page were the file, so that lines in reports and tracebacks are those of the page
            linecache.checkcache(str(path))
            capsys.readouterr()
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), names)
        elif block.kind == "output":
            check(block.text, capsys.readouterr().out, f"line {block.line} of {path.name}")
        elif block.kind == "console":
            console(block, capsys)
        elif block.kind == "sh":
            shell(block)
        else:
            assert block.kind in TEXT_ONLY, f"{path.name}:{block.line}: a block of kind {block.kind!r} is not run"


def write(block: Block) -> None:
    path, text = Path(block.title), block.text
    if block.replaces:
        old = path.read_text()
        assert block.replaces in old
        text = old.replace(block.replaces, text.rstrip("\n"))
    path.write_text(text)
    sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()


def console(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command, _, expected = part.partition("\n")
        status, said = run(command, capsys)
        assert status == bool(FAILURE.search(expected)), f"exit status {status} of {command}:\n{said}"
        check(expected, said, command)


def check(expected: str, output: str, what: str) -> None:
    said, at = " ".join(output.split()), 0
    for line in expected.splitlines():
        parts = (" ".join(part.split()) for part in line.split("..."))
        found = re.compile(" ?.*? ?".join(map(re.escape, parts))).search(said, at)
        assert found, f"{line!r} is not in the output of {what}:\n{said}"
        at = found.end()


def run(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit status, what it says; without stdout where that goes "> into" a file)."""
    words = shlex.split(command, comments=True)
    if words[:3] == ["python", "-m", "ltx_inductor"]:  # in this process: importing torch again takes seconds
        sys.modules.pop("my_model", None)
        capsys.readouterr()
        words, into = (words[:-2], words[-1]) if words[-2] == ">" else (words, None)
        status = cli.main(words[3:])
        out, err = capsys.readouterr()
        if into is None:
            return status, out + err
        Path(into).write_text(out)
        return status, err
    given = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    words = words[len(given) :]
    assert words[0] == "python", command
    env = environment(Path.cwd(), TORCHINDUCTOR_CACHE_DIR=str(Path.cwd() / "cache"), **given)
    done = subprocess.run([sys.executable, *words[1:]], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def shell(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in filter(None, (shlex.split(line, comments=True) for line in block.text.splitlines())):
        if words[:3] == ["python", "-m", "ltx_inductor"]:
            cli._parser().parse_args(words[3:])  # exits where they are wrong
            assert words[3:] != ["doctor"] or cli.main(["doctor"]) == 0
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M), words
        else:
            assert words == ["pip", "install", "."]


@pytest.mark.parametrize("text", ["python -m ltx_inductor explain --nonsense\n", "make nothing\n", "rm -rf x\n"])
def test_a_wrong_sh_block_would_be_seen(text):
    with pytest.raises((SystemExit, AssertionError)):
        shell(Block("sh", text, 1, "", "", ""))


@pytest.mark.parametrize("text", ["$ python -c 'exit(1)'\n", "$ python -c 'print(\"1 lost\")'\n1 lost\n"])
def test_a_wrong_exit_status_would_be_seen(text, capsys):
    with pytest.raises(AssertionError, match="exit status"):
        console(Block("console", text, 1, "", "", ""), capsys)


@pytest.fixture(scope="module")
def rule_pages():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = generate  # its dataclass looks its module up
    spec.loader.exec_module(generate)
    return generate.pages()


def test_the_rule_pages_are_made_from_the_rules(rule_pages):
    from ltx_inductor.config import RULES
    from ltx_inductor.contract import CONTRACTS

    assert set(rule_pages) == {f"{rule}.md" for rule in RULES}
    rope, neighborhood = (rule_pages[f"{rule}.md"] for rule in ("rmsnorm_split_rope", "neighborhood_attention"))
    assert all(f"| `{name}` |" in rope for name in CONTRACTS)
    assert all(f"| `{name}` |" in neighborhood for name in ("fast", "exact"))
    assert "is written out by hand, so eager adds up its squares" in rope
    assert ": interleaved RoPE, where neighbours are rotated together" in rope
    assert "no kernel for head\\_dim" in rope
    assert "NVIDIA H200" in rope
    assert "NVIDIA H200" in neighborhood
    assert "no neighborhood-attention kernel for compute capability" in neighborhood
    assert "no neighborhood-attention kernel with NATTEN's bits for window" in neighborhood
    for text in rule_pages.values():
        assert "ltx_inductor::" in text
        assert "no CUDA compiler was found" in text


def test_a_rule_page_has_no_empty_section(rule_pages):
    for name, text in rule_pages.items():
        for section in re.split(r"^## ", text, flags=re.M)[1:]:
            title, *lines = filter(None, section.splitlines())
            assert lines, f"{name}: nothing under {title!r}"
            assert not lines[-1].endswith(":"), f"{name}: nothing follows {lines[-1]!r}"
        assert {"Contracts", "How it is known to be right"} <= set(re.findall(r"^## (.*)$", text, re.M)), name


def test_a_rule_page_has_the_sentences_of_its_rule_only(rule_pages):
    """Modules that rules share, such as legality, have sentences of one rule only too."""
    refusals = {name: text.split("## How each refusal reads")[1].split("## ")[0] for name, text in rule_pages.items()}
    rope, neighborhood = refusals["rmsnorm_split_rope.md"], refusals["neighborhood_attention.md"]
    for words in ("rotat", "norm of", "norm's", "symbolic axis", "addcmul"):
        assert words in rope
        assert words not in neighborhood.replace("before the norm or the rotation", "")
    for words in ("na3d", "the mask"):
        assert words in neighborhood
        assert words not in rope


def test_every_refusal_of_the_package_is_on_a_rule_page(rule_pages):
    said = " ".join(rule_pages.values()).replace("\\", "").replace("&lt;", "<")
    where = {"Refuse": 0, "BadLeaf": 0, "Refusal": 1, "NotANorm": 1}
    count = 0
    for path in (ROOT / "ltx_inductor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            argument = node.args[where.get(getattr(node.func, "id", ""), len(node.args)) :][:1]
            for part in ast.walk(argument[0]) if argument else ():
                words = " ".join(str(getattr(part, "value", "")).split())
                if isinstance(part, ast.Constant) and " " in words:
                    assert words in said, f"{path.name}:{node.lineno}: {words!r} is on no page"
                    count += 1
    assert count > 200


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert "://" in target or (ROOT / target).exists(), target


def test_the_readme_says_how_the_decoder_was_measured():
    text = " ".join(
        (ROOT / "README.md").read_text().split("**The LTX-2.5 diffusion decoder**")[1].split("\n| ")[0].split()
    )
    videos = {}
    for name in ("decoder-h200", "decoder-1080p-h200"):
        data = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        assert f"16,384 tokens; here, for all three alike, they have {data['swiglu_tile']:,}" in text
        videos |= {(r["frames"], r["height"]): r["stage_5"] for r in data["rows"]}
    samples = {video: set(stage["samples"].values()) for video, stage in videos.items()}
    assert samples == {(33, 256): {17}, (121, 512): {2}, (121, 1088): {2}}
    assert "33 frames are medians of 17 samples (12 for the latent), both columns of 121 frames medians of 2." in text
    (error,) = (stage["error_to_fp32"] for stage in videos.values() if "error_to_fp32" in stage)
    assert f"measured at 33 frames only: {error['ltx']:.2e} both".replace("e-03", "e-3") in text
