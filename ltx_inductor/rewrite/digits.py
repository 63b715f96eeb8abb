"""Coordinates as mixed-radix digits.

An axis of size n is indexed by a tuple of digits, most significant first, whose radices multiply to n. A digit is an
Atom (free) or a Const (fixed). An axis of size 1 has no digits at all, so squeeze, unsqueeze, expand, batch-1 tables
and S = 1 need no special case. Atoms are cut lazily and for everybody: the first view or slice that needs half of an
atom splits it, and every coordinate that mentions it sees the parts when it is next resolved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ltx_inductor.rewrite.size import ONE, Size, product

MAX_CASES = 16  # a join of more pieces than this is no rotation, and asking costs one lift per piece


class Refuse(Exception):
    """Why a value is not a site: a sentence, and optionally what was found, expected, and what to change."""

    def __init__(self, reason: str, *, expected: str = "", found: str = "", hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.expected, self.found, self.hint = reason, expected, found, hint


def internal_error(error: Exception) -> Refuse:
    """A defect of ours, as a refusal: the user's compile goes on without this rewrite. To be called in its handler."""
    logging.getLogger("ltx_inductor").warning("internal error; left unfused", exc_info=True)
    return Refuse(
        f"internal error in the rule: {type(error).__name__}: {error}",
        hint="the model is compiled without this rewrite; please report it with the log above",
    )


class BadLeaf(Refuse):
    """The operand itself is of a kind no op of ours takes, however it is reached."""


class Atom:
    """A free digit. Two atoms are the same digit only if they are the same object."""

    __slots__ = ("name", "parts", "size")

    def __init__(self, size: Size, name: str) -> None:
        self.size = size
        self.name = name
        self.parts: tuple[Atom, Atom] | None = None

    def __repr__(self) -> str:
        return f"{self.name}:{self.size}"


@dataclass(frozen=True)
class Const:
    """A digit with a fixed value in 0 .. size-1."""

    value: int
    size: Size

    def __repr__(self) -> str:
        return f"{self.value} of {self.size}"


Digit = Atom | Const
Digits = tuple[Digit, ...]
Coords = tuple[Digits, ...]  # one entry per axis of a tensor


class NeedCase(Exception):
    """The value depends on which value this atom has: lift once per value."""

    def __init__(self, atom: Atom) -> None:
        super().__init__(f"case split on {atom}")
        self.atom = atom


class Space:
    """The atoms of one lift, and the value that the current case gives to some of them."""

    def __init__(self) -> None:
        self.case: dict[Atom, int] = {}
        self._count = 0
        self._trail: list[Atom] = []

    def axis(self, size: Size) -> Digits:
        """A fresh coordinate for an axis of that size."""
        if size == ONE:
            return ()
        self._count += 1
        return (Atom(size, f"i{self._count}"),)

    def resolve(self, digits: Iterable[Digit]) -> Digits:
        """The digits with every cut atom replaced by its parts, cases filled in, adjacent constants merged."""
        digits = tuple(digits)
        fixed_before = False
        for d in digits:
            fixed = isinstance(d, Const)
            if (fixed and fixed_before) or (not fixed and (d.parts is not None or d in self.case)):  # type: ignore[union-attr]
                break
            fixed_before = fixed
        else:
            return digits  # the usual case: nothing to replace and nothing to merge
        out: list[Digit] = []
        todo = list(digits[::-1])
        while todo:
            d = todo.pop()
            if isinstance(d, Atom):
                if d in self.case:
                    d = Const(self.case[d], d.size)
                elif d.parts:
                    todo += d.parts[::-1]
                    continue
            if isinstance(d, Const) and out and isinstance(out[-1], Const):
                radix = d.size.known
                if radix is not None and out[-1].size.known is not None:
                    high = out.pop()
                    assert isinstance(high, Const)
                    d = Const(high.value * radix + d.value, high.size * d.size)
            out.append(d)
        return tuple(out)

    def flat(self, coords: Iterable[Digits]) -> Digits:
        """All digits of a coordinate in row-major order."""
        return self.resolve(d for axis in coords for d in axis)

    def mark(self) -> int:
        """A point to `undo` to."""
        return len(self._trail)

    def undo(self, mark: int) -> None:
        """Forgets the cuts made since `mark`, after an operand turned out not to be readable further up."""
        while len(self._trail) > mark:
            self._trail.pop().parts = None

    def take(self, digits: Iterable[Digit], size: Size) -> tuple[Digits, Digits] | None:
        """(rest, taken): cuts the least significant digits of total radix `size` off; None where no cut fits."""
        rest, taken = list(self.resolve(digits)), []
        while size != ONE:
            if not rest:
                return None
            d = rest.pop()
            quotient = size.exactly_divided_by(d.size)
            if quotient is not None:
                taken.append(d)
                size = quotient
                continue
            cut = self._cut(d, size)
            if cut is None:
                return None
            rest.append(cut[0])
            taken.append(cut[1])
            break
        return tuple(rest), tuple(taken[::-1])

    def regroup(self, digits: Iterable[Digit], sizes: Sequence[Size]) -> Coords | None:
        """Row-major digits as one tuple per axis of the given sizes: what view does. None where no cut fits."""
        rest: Digits = tuple(digits)
        out: list[Digits] = []
        for size in reversed(sizes):
            r = self.take(rest, size)
            if r is None:
                return None
            rest, taken = r
            out.append(taken)
        return None if self.resolve(rest) else tuple(out[::-1])

    def block(self, digits: Iterable[Digit], size: Size, what: str) -> tuple[int, Digits]:
        """(index of the block of that size, digits inside it). Raises NeedCase where the index is not fixed."""
        r = self.take(digits, size)
        if r is None:
            raise Refuse(f"{what} cuts an axis inside one of its factors ({self.resolve(digits)} by {size})")
        index = 0
        for d in self.resolve(r[0]):
            if isinstance(d, Atom):
                if d.size.known is None or d.size.known > MAX_CASES:
                    raise Refuse(f"{what} reads {d.size} different pieces, a rotation has two halves")
                raise NeedCase(d)
            if d.size.known is None and index:
                raise Refuse(f"{what} counts blocks of a symbolic size")
            index = index * (d.size.known or 1) + d.value
        return index, r[1]

    def _cut(self, d: Digit, low: Size) -> tuple[Digit, Digit] | None:
        high = d.size.exactly_divided_by(low)
        if high is None:
            return None
        if isinstance(d, Const):
            if low.known is None:
                return (Const(0, high), Const(0, low)) if d.value == 0 else None
            return Const(d.value // low.known, high), Const(d.value % low.known, low)
        d.parts = (Atom(high, d.name + "h"), Atom(low, d.name + "l"))
        self._trail.append(d)
        return d.parts


def radix(digits: Iterable[Digit]) -> Size:
    """The product of the sizes of the digits."""
    return product(d.size for d in digits)
