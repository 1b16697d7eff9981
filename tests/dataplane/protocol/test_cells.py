"""Rows as columns and bytes: back as they were, and nothing believed that does not add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest, SchemaMismatch
from dataplane.protocol.cells import Cells, arrays_of, cells_of, shape_from
from dataplane.v1 import dataplane_pb2 as pb

DTYPES = "bool int8 int64 uint16 float16 float32 float64 complex64".split()


def travelled(cells: Cells, chunk: int = 7) -> dict[str, Any]:
    """What arrives of cells that are sent in chunks."""
    columns = [pb.Column.FromString(c.SerializeToString()) for c in cells.shape.to_columns()]
    shape = shape_from(columns, cells.shape.rows)
    data = b"".join(part for _, part in cells.chunks(chunk))
    assert len(data) == shape.nbytes == cells.shape.nbytes
    return arrays_of(shape, data)


@given(
    rows=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    rank=st.integers(0, 3),
    chunk=st.integers(1, 40),
    data=st.data(),
)
def test_ragged_rows_of_every_rank_come_back(
    rows: int, dtype: str, rank: int, chunk: int, data: st.DataObject
) -> None:
    shapes = [tuple(data.draw(st.integers(0, 4)) for _ in range(rank)) for _ in range(rows)]
    columns = [
        np.random.default_rng(i).integers(0, 2, shape).astype(dtype)
        for i, shape in enumerate(shapes)
    ]
    back = travelled(cells_of([f"k{i}" for i in range(rows)], {"x": columns}), chunk)["x"]
    assert len(back) == rows
    for one, other in zip(columns, back, strict=True):
        assert other.dtype == one.dtype
        assert other.shape == one.shape
        assert other.tobytes() == one.tobytes()


def test_every_form_of_a_column() -> None:
    keys = ["a", "b"]
    fields: dict[str, Any] = {
        "dense": np.arange(6).reshape(2, 3),
        "scalar": np.array([1.5, 2.5]),
        "big_endian": np.array([1, 2], ">i4"),
        "strided": np.arange(12).reshape(2, 6)[:, ::2],
        "objects": ["text", {"n": [1, None]}],
        "mixed": [np.arange(2), "text"],
        "empty": [np.zeros(0), np.zeros(3)],
    }
    back = travelled(cells_of(keys, fields))
    assert [row.tolist() for row in back["dense"]] == [[0, 1, 2], [3, 4, 5]]
    assert back["scalar"].tolist() == [1.5, 2.5]
    assert back["big_endian"].tolist() == [1, 2]
    assert [row.tolist() for row in back["strided"]] == [[0, 2, 4], [6, 8, 10]]
    assert back["objects"] == fields["objects"]
    assert back["mixed"][0].tolist() == [0, 1]
    assert back["mixed"][1] == "text"
    assert [len(row) for row in back["empty"]] == [0, 3]


@given(st.binary(max_size=50), st.integers(1, 60), st.integers(0, 60))
def test_chunks_from_an_offset_on_are_the_rest(data: bytes, size: int, offset: int) -> None:
    cells = Cells(cells_of(["k"], {}).shape, [data[:3], data[3:20], data[20:]])
    at = offset
    for begin, part in cells.chunks(size, offset):
        assert begin == at
        assert 0 < len(part) <= size
        assert part == data[at : at + len(part)]
        at += len(part)
    assert at == max(offset, len(data))


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"x": [np.arange(2)]}, InvalidRequest, "1 rows for 2 keys"),
        ({"x": np.arange(3)}, InvalidRequest, "3 rows for 2 keys"),
        ({"x": "ab"}, InvalidRequest, "an array of 2 rows or a list"),
        ({"x": 1}, InvalidRequest, "an array of 2 rows or a list"),
        ({"x": [np.arange(2), np.arange(2.0)]}, SchemaMismatch, "'b' float64 of rank 1"),
        ({"x": [np.arange(2), np.zeros((1, 2), int)]}, SchemaMismatch, "rank 2"),
        ({"": np.arange(2)}, InvalidRequest, "1 to 256 bytes"),
        ({"x": [object(), 1]}, InvalidRequest, "field 'x' of key 'a'"),
    ],
)
def test_what_is_no_column_is_refused(fields: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        cells_of(["a", "b"], fields)


def column(**changes: Any) -> pb.Column:
    settings: dict[str, Any] = {"name": "x", "dtype": "int64", "dims": [-1], "lengths": [1, 2]}
    return pb.Column(**(settings | changes))


@pytest.mark.parametrize(
    ("columns", "rows", "said"),
    [
        ([column(lengths=[1])], 2, "1 lengths"),
        ([column(lengths=[1, -2])], 2, "negative"),
        ([column(dtype="evil")], 2, "unknown dtype"),
        ([column(dims=[-2])], 2, "not a size"),
        ([column(dims=[-1] * 9, lengths=[1] * 18)], 2, "at most 8 dimensions"),
        ([column(ragged_dim=3)], 2, "ragged_dim"),
        ([column(name="n" * 300)], 2, "256 bytes"),
        ([column(), column()], 2, "repeated: 'x'"),
        ([column()], 0, "1 to 65536 rows"),
        ([column()], 1 << 20, "1 to 65536 rows"),
        ([column(dtype="object", dims=[2], lengths=[])], 2, "object column"),
        ([column(dims=[(1 << 31) - 1] * 3, lengths=[])], 2, "more bytes than"),
        ([column(dims=[-1, -1, -1], lengths=[(1 << 31) - 1] * 6)], 2, "more bytes than"),
        ([column(name=f"c{i}") for i in range(1025)], 2, "at most 1024"),
        ([column(name=f"c{i}", dims=[], lengths=[]) for i in range(65)], 65_536, "4194304 cells"),
    ],
)
def test_columns_that_do_not_add_up_are_refused(
    columns: list[pb.Column], rows: int, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        shape_from(columns, rows)


def test_the_ragged_dimension_is_the_known_one_where_none_is_named() -> None:
    shape = shape_from([column(name="routed_experts", dims=[-1, 4], dtype="uint16")], 2)
    assert shape.columns[0].ragged_dim == 0
    assert shape.nbytes == 2 * 4 * 3
