"""Is a kernel worth its launch? What was measured of it against Inductor's own code, by size and compute capability.

The table is data, profit.json beside this file or a file of the user's, written by `python benchmarks/profit.py`:

    {"device": ..., "torch": ..., "date": ..., "command": ...,
     "rows": [{"rule": "rmsnorm_split_rope", "arch": "9.0", "size": 262144, "ltx_us": 2.9, "other_us": 8.1}, ...]}

size is what the rule counts: the bytes that a launch has to move, or queries times heads for neighborhood_attention.
other_us is the time of what is replaced: Inductor's own code, or NATTEN for neighborhood_attention.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURED, ANY = "measured", "any"  # the table of the package; no table: everything legal is rewritten
_PACKAGED = Path(__file__).with_name("profit.json")
_UNITS = {
    "rmsnorm_axial_rope": "bytes to move",
    "rmsnorm_split_rope": "bytes to move",
    "neighborhood_attention": "queries",
}
_OTHER = {"neighborhood_attention": "NATTEN"}  # for the other rules Inductor's own code


@dataclass(frozen=True)
class Row:
    """One measurement: microseconds of a call on compute capability `arch`, "9.0"."""

    rule: str
    arch: str
    size: int
    ltx_us: float
    other_us: float


@dataclass(frozen=True)
class Table:
    """Measurements, and where they are from."""

    rows: tuple[Row, ...] = ()
    source: str = ""

    def nearest(self, rule: str, arch: tuple[int, int], size: int) -> Row | None:
        """The row whose size is nearest, by ratio; None if nothing was measured of the rule on that arch."""
        name = f"{arch[0]}.{arch[1]}"
        rows = [r for r in self.rows if r.rule == rule and r.arch == name]
        return min(rows, key=lambda r: abs(math.log(r.size / max(size, 1))), default=None)

    def refusal(self, rule: str, arch: tuple[int, int], size: int | None) -> str | None:
        """Why a legal launch of that size should be left alone; None if it is faster, or nobody has measured it."""
        row = None if size is None else self.nearest(rule, arch, size)
        if row is None or row.ltx_us < row.other_us:
            return None
        other = _OTHER.get(rule, "Inductor's own code")
        return (
            f"it would be slower here: at {row.size:,} {_UNITS.get(rule, 'units')}, the nearest size measured to "
            f"{size:,}, the kernel takes {row.ltx_us:.1f} us and {other} {row.other_us:.1f} us ({self.source})"
        )


def table(which: str) -> Table:
    """MEASURED, ANY, or the path of a table. Raises ValueError, naming the file, for one that cannot be read."""
    if which == ANY:
        return Table()
    path = _PACKAGED if which == MEASURED else Path(which)
    try:
        path = path.resolve()
        state = path.stat()
        return _read(path, state.st_mtime_ns, state.st_size)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"profit={str(path)!r} cannot be read ({type(error).__name__}: {error}); expected {MEASURED!r}, {ANY!r}, "
            "or a file written by benchmarks/profit.py"
        ) from None


def digest(which: str) -> str:
    """What the answers depend on, for a cache's id."""
    return repr(table(which))


@functools.lru_cache(maxsize=8)
def _read(path: Path, mtime_ns: int, size: int) -> Table:
    """mtime_ns, size: of the file, which may be rewritten while we run: another one is read anew."""
    data = json.loads(path.read_text())
    source = ", torch ".join((str(data["device"]), str(data["torch"]))) + f", {data['date']}"
    return Table(tuple(_rows(data["rows"])), source)


def _rows(data: Iterable[Mapping[str, Any]]) -> Iterable[Row]:
    for r in data:
        row = Row(str(r["rule"]), str(r["arch"]), int(r["size"]), float(r["ltx_us"]), float(r["other_us"]))
        if not all(0 < number < math.inf for number in (float(row.size), row.ltx_us, row.other_us)):
            raise ValueError(f"sizes and times must be positive and finite, not {dict(r)}")
        yield row
