"""Columns of tags: every cell comes back as it was, with its type, however the column is kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest
from dataplane.wire.columns import ABSENT, Column, decode, encode, to_cells, to_numpy

MAX_INT64, MIN_INT64, MAX_UINT64 = (1 << 63) - 1, -(1 << 63), (1 << 64) - 1

TABLE: list[tuple[list[Any], str]] = [
    ([1, 2, 3], "i"),
    ([MIN_INT64, 0, MAX_INT64], "i"),
    ([1, ABSENT, 3], "i"),
    ([MAX_UINT64, 1], "p"),
    ([MAX_INT64 + 1, ABSENT], "p"),
    ([1.5, -0.0, math.inf, -math.inf], "f"),
    ([0.1, ABSENT], "f"),
    ([True, False, True, True, False, False, True, False, True], "b"),
    ([True, ABSENT, False], "b"),
    (["", "a", "ключ 🔑", "nul\0"], "s"),
    ([ABSENT, "a", ABSENT], "s"),
    ([ABSENT], "s"),
    ([ABSENT, ABSENT], "s"),
    ([None], "p"),
    ([None, ABSENT, None], "p"),
    ([1, None], "p"),
    ([1, 1.0], "p"),
    ([1, True], "p"),
    ([0, False, 0.0, "", [], {}, None, ABSENT], "p"),
    ([[1, [2, [3]]], {"a": {"b": [None, True]}}], "p"),
    (["a", 1], "p"),
]


def through_the_wire(column: Column) -> Any:
    """The column's Arrow array as a receiver builds it, from copies of its buffers."""
    buffers = [None if b is None else memoryview(bytes(b)) for b in column.buffers]
    assert column.sizes() == [-1 if b is None else len(b) for b in buffers]
    return decode(column.kind, column.rows, buffers)


def same(one: Any, two: Any) -> bool:
    """Equal in value and type, all the way down; NaN is itself and 0.0 is not -0.0."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, two) and (
            one == two or (math.isnan(one) and math.isnan(two))
        )
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[k], two[k]) for k in one)
    return one is two if one is ABSENT else one == two


@pytest.mark.parametrize(("cells", "kind"), TABLE, ids=[str(cells) for cells, _ in TABLE])
def test_cells_come_back_as_they_were(cells: list[Any], kind: str) -> None:
    column = encode(cells)
    assert (column.kind, column.rows) == (kind, len(cells))
    assert same(to_cells(kind, through_the_wire(column)), cells)


CELLS = st.recursive(
    st.sampled_from([ABSENT])
    | st.none()
    | st.booleans()
    | st.integers(MIN_INT64, MAX_UINT64)
    | st.floats()
    | st.text(),
    lambda inner: (
        st.lists(inner.filter(lambda cell: cell is not ABSENT), max_size=3)
        | st.dictionaries(st.text(), inner.filter(lambda cell: cell is not ABSENT), max_size=3)
    ),
    max_leaves=4,
)
COLUMNS = st.one_of(
    st.lists(CELLS, max_size=20),
    *(
        st.lists(st.sampled_from([ABSENT]) | cells, max_size=20)
        for cells in (
            st.integers(MIN_INT64, MAX_INT64), st.floats(), st.booleans(), st.text(),
            st.integers(MIN_INT64, MAX_UINT64),
        )
    ),
)  # fmt: skip


@given(COLUMNS)
def test_any_cells_come_back_as_they_were(cells: list[Any]) -> None:
    column = encode(cells)
    assert same(to_cells(column.kind, through_the_wire(column)), cells)


@given(st.lists(st.one_of(st.integers(MIN_INT64, MAX_INT64)), max_size=20), st.integers(1, 4))
def test_pieces_of_one_kind_are_joined_in_order(cells: list[int], size: int) -> None:
    parts = [cells[i : i + size] for i in range(0, len(cells), size)] or [[]]
    array = to_numpy("i", [decode("i", len(p), _integers(p).buffers) for p in parts])
    assert array.dtype == (np.int64 if cells else array.dtype)
    assert array.tolist() == cells


def _integers(cells: list[int]) -> Column:
    column = encode(cells)
    return column if cells else Column("i", 0, column.buffers[:2])


NUMPY: list[tuple[list[Any], Any, list[Any]]] = [
    ([1, 2], np.int64, [1, 2]),
    ([1, ABSENT], object, [1, None]),
    ([MAX_INT64, ABSENT], object, [MAX_INT64, None]),  # would be another number as a float
    ([0.5, 2.0], np.float64, [0.5, 2.0]),
    ([0.5, ABSENT], np.float64, [0.5, math.nan]),
    ([True, False], np.bool_, [True, False]),
    ([True, ABSENT], object, [True, None]),
    (["a", ABSENT], object, ["a", None]),
    ([None, 1, [2], ABSENT], object, [None, 1, [2], None]),
    ([[1, 2], [3, 4]], object, [[1, 2], [3, 4]]),  # two objects, not a matrix
    ([ABSENT, ABSENT], object, [None, None]),
    ([MAX_UINT64], object, [MAX_UINT64]),
]


@pytest.mark.parametrize(("cells", "dtype", "expected"), NUMPY, ids=[str(n[0]) for n in NUMPY])
def test_a_column_is_an_array_that_invents_no_value(
    cells: list[Any], dtype: Any, expected: list[Any]
) -> None:
    column = encode(cells)
    array = to_numpy(column.kind, [through_the_wire(column)])
    assert array.dtype == dtype
    assert array.shape == (len(cells),)
    assert same(array.tolist(), expected)


@pytest.mark.parametrize(
    ("kind", "buffers"),
    [("x", 2), ("", 2), ("n", 2), ("i", 3), ("i", 1), ("s", 2), ("p", 2), ("b", 0)],
)
def test_a_column_of_another_kind_is_refused(kind: str, buffers: int) -> None:
    with pytest.raises(InvalidRequest, match="unknown kind"):
        decode(kind, 1, [None] * buffers)


def test_absent_shows_its_name() -> None:
    assert repr(ABSENT) == "ABSENT"
