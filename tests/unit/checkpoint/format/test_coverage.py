"""Exactly-once coverage, held against counting element by element."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.box import Box
from raymega.checkpoint.format.coverage import uncovered_cells


def _box(*spans):
    return Box(offset=tuple(a for a, _ in spans), shape=tuple(b - a for a, b in spans))


def _spans(limit):
    return st.tuples(st.integers(0, limit - 1), st.integers(1, limit)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(_spans(6), _spans(5)), max_size=6), st.tuples(_spans(6), _spans(5)))
def test_cells_say_how_often_each_element_is_covered(boxes, outer):
    counts = np.zeros((12, 10), dtype=int)
    for rows, columns in boxes:
        counts[slice(*rows), slice(*columns)] += 1
    wanted = counts[slice(*outer[0]), slice(*outer[1])]
    got = np.ones((12, 10), dtype=int)
    for cell, count in uncovered_cells(_box(*outer), [_box(*spans) for spans in boxes]):
        assert count != 1
        got[tuple(slice(o, o + n) for o, n in zip(cell.offset, cell.shape, strict=True))] = count
    assert (got[slice(*outer[0]), slice(*outer[1])] == wanted).all()


def test_nothing_is_uneven_in_an_exact_tiling():
    parts = [_box((0, 2), (0, 4)), _box((2, 4), (0, 1)), _box((2, 4), (1, 4))]
    assert list(uncovered_cells(_box((0, 4), (0, 4)), parts)) == []
    assert list(uncovered_cells(_box((1, 3), (1, 3)), parts)) == []


def test_hole_and_overlap_are_named_with_their_counts():
    parts = [_box((0, 3)), _box((2, 4)), _box((6, 8))]
    assert list(uncovered_cells(_box((0, 8)), parts)) == [(_box((2, 3)), 2), (_box((4, 6)), 0)]
