"""Sizes and digits: the arithmetic under the matcher."""

import pytest
import sympy

from ltx_inductor.rewrite.digits import Const, NeedCase, Refuse, Space
from ltx_inductor.rewrite.size import ONE, Size

S = sympy.Symbol("s0", integer=True, positive=True)


def test_division_is_exact_or_unknown():
    assert Size(12).exactly_divided_by(Size(4)) == Size(3)
    assert Size(12).exactly_divided_by(Size(5)) is None
    assert Size(12, (S,)).exactly_divided_by(Size(4, (S,))) == Size(3)
    assert Size(12, (S,)).exactly_divided_by(Size(5)) is None
    assert Size(12).exactly_divided_by(Size(4, (S,))) is None
    assert Size(2, (S,)) * Size(3) == Size(6, (S,)) == Size(3) * Size(2, (S,))


def test_an_axis_of_size_one_has_no_digits():
    assert Space().axis(ONE) == ()


def test_view_splits_an_axis_for_everybody():
    space = Space()
    (row,) = space.axis(Size(24))
    heads = space.regroup((row,), [Size(3), Size(8)])
    assert heads is not None
    (h,), (d,) = heads
    assert (h.size, d.size) == (Size(3), Size(8))
    assert space.resolve((row,)) == (h, d)


def test_a_view_across_a_factor_is_refused():
    space = Space()
    assert space.regroup(space.axis(Size(6)) + space.axis(Size(5)), [Size(10), Size(3)]) is None


def test_block_asks_for_a_case_and_takes_it():
    space = Space()
    digits = space.axis(Size(8))
    with pytest.raises(NeedCase) as need:
        space.block(digits, Size(4), "cat")
    assert need.value.atom.size == Size(2)
    space.case = {need.value.atom: 1}
    index, low = space.block(digits, Size(4), "cat")
    assert (index, [d.size for d in low]) == (1, [Size(4)])


def test_too_many_cases_are_refused_by_name():
    space = Space()
    with pytest.raises(Refuse, match="cat reads 64 different pieces"):
        space.block(space.axis(Size(64)), ONE, "cat")


def test_adjacent_constants_merge():
    space = Space()
    assert space.resolve((Const(1, Size(2)), Const(2, Size(4)))) == (Const(6, Size(8)),)
    assert space.take((Const(6, Size(8)),), Size(4)) == ((Const(1, Size(2)),), (Const(2, Size(4)),))


def test_undo_forgets_cuts():
    space = Space()
    (a,) = space.axis(Size(8))
    mark = space.mark()
    space.take((a,), Size(2))
    assert len(space.resolve((a,))) == 2
    space.undo(mark)
    assert space.resolve((a,)) == (a,)
