"""python -m ltx_inductor doctor|explain|diff|build|bench|replay|demo"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx_inductor.config import RULES

if TYPE_CHECKING:
    from rich.console import Console

    from ltx_inductor.rewrite.report import RewriteReport

USAGE_ERROR = 2


class UsageError(Exception):
    """Something the user can put right; printed without a traceback, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if something expected was not found or could not be built, 2 for wrong arguments."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(console, arguments)
        return status
    except UsageError as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {_plain(str(error))}")
        return USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ltx_inductor", description="Fused kernels in unchanged LTX models.")
    commands = parser.add_subparsers(required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="what is installed, what is missing, and what to do about it")
    doctor.set_defaults(run=_doctor)

    explain = commands.add_parser("explain", help="what would be rewritten in a model, and why the rest would not")
    explain.add_argument("target", help="module:callable; called without arguments, it returns (model, inputs)")
    explain.add_argument(
        "--expect",
        action="append",
        default=[],
        type=_expected,
        metavar="[RULE=]N",
        help="exit with 1 unless N sites are rewritten, by that rule or by all together; repeatable",
    )
    explain.add_argument("--dynamic", action="store_true", help="trace with dynamic sizes")
    explain.add_argument("--grad", action="store_true", help="with gradients (default: torch.no_grad())")
    explain.add_argument("--html", metavar="FILE", help="also write the report as one self-contained page")
    explain.add_argument("--diff", action="store_true", help="print what became of the graph, too")
    explain.add_argument("--dump", metavar="FOLDER", help="write before/after graphs and diffs there")
    explain.set_defaults(run=_explain)

    diff = commands.add_parser("diff", help="what was gained and lost between two reports; 1 if anything was lost")
    diff.add_argument("before", help="a report, as `explain --json` or report.to_json() gives it")
    diff.add_argument("after")
    diff.set_defaults(run=_diff)

    build = commands.add_parser("build", help="build the kernels ahead of time; needs a compiler and no GPU")
    build.add_argument(
        "--arch", action="append", metavar="X.Y", help="compute capability, repeatable (default: GPUs here)"
    )
    build.set_defaults(run=_build)

    bench = commands.add_parser("bench", help="the benchmark tables, again, on this machine")
    bench.add_argument("tables", nargs="*", metavar="TABLE", help="such as rope or decoder (default: all)")
    bench.add_argument("--quick", action="store_true", help="a few rows only")
    bench.add_argument(
        "--out", type=Path, default=Path("ltx-bench"), metavar="FOLDER", help="for the JSON and the plots"
    )
    bench.set_defaults(run=_bench)

    replay = commands.add_parser("replay", help="run a kept wrong result again; 1 if kernel and eager still differ")
    replay.add_argument("file", help="as the message about it says, in the kernel cache")
    replay.set_defaults(run=_replay)

    demo = commands.add_parser("demo", help="compile a small LTX-2 transformer of diffusers and look at it")
    demo.set_defaults(run=_demo)
    for command in (doctor, explain, diff, build, bench, replay, demo):
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _doctor(console: Console, arguments: argparse.Namespace) -> int:
    from ltx_inductor.doctor import examine

    return examine(console, arguments.json)


def _demo(console: Console, arguments: argparse.Namespace) -> int:
    from ltx_inductor.demo import MissingPackageError, run

    try:
        return run(console, arguments.json)
    except MissingPackageError as error:
        raise UsageError(str(error)) from None


def _explain(console: Console, arguments: argparse.Namespace) -> int:
    import torch

    import ltx_inductor
    from ltx_inductor.views import terminal

    options = {"ltx_inductor.dump": arguments.dump} if arguments.dump else None
    dynamic = True if arguments.dynamic else None
    with _stdout_for_json() if arguments.json else contextlib.nullcontext():
        model, args, kwargs = _load(arguments.target)
        with torch.set_grad_enabled(arguments.grad):
            report = ltx_inductor.explain(model, *args, options=options, dynamic=dynamic, **kwargs)
    if arguments.json:
        print(report.to_json())
    else:
        terminal.show(console, report.to_dict(), diffs=arguments.diff)
    if arguments.html:
        try:
            report.to_html(arguments.html, title=f"ltx_inductor: {arguments.target}")
        except OSError as error:
            raise UsageError(f"--html {arguments.html}: {error.strerror}") from None
    wrong = [(rule, n) for rule, n in arguments.expect if report.count(rule) != n]
    for rule, n in wrong:
        print(f"expected {n} sites of {rule or 'all rules'}, found {report.count(rule)}", file=sys.stderr)
    return int(bool(wrong))


def _expected(text: str) -> tuple[str | None, int]:
    """The rule, None for all of them, and the number of sites out of "16" or "rmsnorm_split_rope=16"."""
    rule, equals, n = text.rpartition("=")
    if not n.isdecimal() or (equals and rule not in RULES):
        raise argparse.ArgumentTypeError(f"{text!r}: expected N or RULE=N, where RULE is one of {', '.join(RULES)}")
    return rule or None, int(n)


@contextlib.contextmanager
def _stdout_for_json() -> Iterator[None]:
    """While code of the user's runs: what it, or a program that it starts, writes to stdout goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _load(target: str) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """The model and its arguments out of "module:callable"."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"target {target!r}: expected module:callable, such as my_model:build")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise UsageError(f"target {target!r}: {error}") from error
    except AttributeError:
        raise UsageError(f"target {target!r}: module {module_name} has no {attribute!r}") from None
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise UsageError(f"target {target!r} returned {type(made).__name__}; expected (model, inputs)")
    model, inputs = made
    if isinstance(inputs, Mapping):
        return model, (), inputs
    if isinstance(inputs, (list, tuple)):
        return model, inputs, {}
    return model, (inputs,), {}


def _diff(console: Console, arguments: argparse.Namespace) -> int:
    from ltx_inductor.rewrite.difference import difference

    found = difference(_report(arguments.before), _report(arguments.after))
    print(json.dumps(found.to_dict(), indent=2)) if arguments.json else console.print(_plain(str(found)))
    return int(bool(found.lost))


def _report(path: str) -> RewriteReport:
    from ltx_inductor.rewrite.report import RewriteReport

    try:
        return RewriteReport.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a report of ltx_inductor ({type(error).__name__}: {error})") from None


def _bench(console: Console, arguments: argparse.Namespace) -> int:
    from rich.console import Console as RichConsole

    from ltx_inductor.bench import BenchError, run, tables

    try:
        found = run(RichConsole(stderr=True), arguments.tables, arguments.out, arguments.quick)
    except BenchError as error:
        raise UsageError(str(error)) from None
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for table in tables(found):
            console.print(table)
        for name, why in (found["skipped"] | found["failed"]).items():
            console.print(_plain(f"{name}: {why}"))
        if found["measured"]:
            console.print(_plain(f"JSON and plots: {arguments.out}"))
    return int(bool(found["failed"]) or not found["measured"])


def _replay(console: Console, arguments: argparse.Namespace) -> int:
    from ltx_inductor.replay import ReplayError, replay

    try:
        found = replay(arguments.file)
    except ReplayError as error:
        raise UsageError(str(error)) from None
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        recorded, here = (", ".join(f"{k} {v}" for k, v in found[w].items()) for w in ("recorded", "here"))
        console.print(_plain(f"{found['op']}: {found['differing']} of {found['elements']} elements differ from eager"))
        console.print(_plain(f"kept with {recorded}; run with {here}"))
    return int(found["differing"] > 0)


def _build(console: Console, arguments: argparse.Namespace) -> int:
    archs = arguments.arch or _archs_here()
    if not archs:
        raise UsageError("no GPU here: say for which to build, such as --arch 9.0 (H100, H200)")
    try:
        from ltx_inductor.kernels.build import prebuild

        built = prebuild(archs)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except (ImportError, RuntimeError, OSError) as error:
        console.print(f"[red]not built:[/red] {_plain(str(error))}")
        console.print("`python -m ltx_inductor doctor` says what is missing")
        return 1
    if arguments.json:
        print(json.dumps([{"arch": arch, "folder": folder} for arch, folder in built], indent=2))
        return 0
    for arch, folder in built:
        console.print(f"[green]built[/green] {arch}: {_plain(str(folder))}")
    return 0


def _archs_here() -> list[str]:
    import torch

    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def _plain(text: str) -> str:
    """`text` with its square brackets kept: rich takes [1, 2] for markup."""
    from rich.markup import escape

    return escape(text)
