"""Fields through an Arrow file and on into blocks: every dtype and ragged shape keeps its bits."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.checkpoint.manifest import Malformed
from dataplane.checkpoint.values import (
    META,
    Cells,
    ValueColumn,
    blocks,
    columns_of,
    decode,
    encode,
    schema_of,
)
from dataplane.codec.shapes import ITEM_BYTES, OBJECT
from dataplane.codec.template import ALIGN, FRONT, Template
from dataplane.fields import ragged_dim

DTYPES = sorted(ITEM_BYTES)


def column(name: str, dtype: str, rank: int) -> ValueColumn:
    if dtype == OBJECT:
        return ValueColumn(name, dtype, 1, 0)
    return ValueColumn(name, dtype, rank, ragged_dim(name, rank))


Rows = list[tuple[tuple[int, ...], bytes] | None]
"""A field of all rows of a batch: shape and bytes of each; None where a row has it not."""


def cells_of(of: ValueColumn, rows: Rows) -> Cells:
    there = [i for i, row in enumerate(rows) if row is not None]
    shapes = np.array([rows[i][0] for i in there], np.int32).reshape(len(there), of.rank)  # type: ignore[index]
    data = b"".join(rows[i][1] for i in there)  # type: ignore[index]
    return Cells(of, np.array(there, np.int64), shapes, np.frombuffer(data, np.uint8))


def rows_of(cells: Cells, count: int) -> Rows:
    rows: Rows = [None] * count
    at = 0
    for row, shape, size in zip(
        cells.rows.tolist(), cells.shapes.tolist(), cells.nbytes.tolist(), strict=True
    ):
        rows[row] = (tuple(shape), cells.data[at : at + size].tobytes())
        at += size
    assert at == len(cells.data)
    return rows


def written(columns: Sequence[ValueColumn], batches: Sequence[tuple[list[Cells], int]]) -> bytes:
    schema = schema_of(columns)
    file = io.BytesIO()
    writer = pa.ipc.new_file(file, schema)
    for cells, count in batches:
        writer.write_batch(encode(schema, columns, cells, count))
    writer.close()
    return file.getvalue()


def read(content: bytes) -> list[tuple[list[Cells], int]]:
    reader = pa.ipc.open_file(pa.py_buffer(content))
    columns = columns_of(reader.schema)
    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    return [(decode(batch, columns), batch.num_rows) for batch in batches]


@st.composite
def fields(draw: st.DrawFn) -> tuple[dict[ValueColumn, Rows], int]:
    """Some fields of some rows, of any dtype, rank and shape."""
    count = draw(st.integers(1, 9))
    found: dict[ValueColumn, Rows] = {}
    names = draw(
        st.lists(
            st.sampled_from(["a", "b", "a.shape", "routed_experts", "key"]),
            min_size=1,
            unique=True,
        )
    )
    for name in names:
        of = column(name, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 3)))
        rows: Rows = []
        for _ in range(count):
            if draw(st.booleans()):
                rows.append(None)
                continue
            shape = tuple(draw(st.lists(st.integers(0, 3), min_size=of.rank, max_size=of.rank)))
            size = math.prod(shape) * of.item_bytes
            rows.append((shape, draw(st.binary(min_size=size, max_size=size))))
        found[of] = rows
    return found, count


# -- there and back --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_dtype_keeps_its_bits(dtype: str, rank: int) -> None:
    of = column("x", dtype, rank)
    shapes = [(3, 0, 2)[: of.rank], (0, 0, 0)[: of.rank], (1, 2, 3)[: of.rank]]
    rows: Rows = [
        (shape, bytes(range(250, 250 - math.prod(shape) * of.item_bytes, -1))) for shape in shapes
    ]
    rows.insert(1, None)
    content = written([of], [([cells_of(of, rows)], len(rows))])
    ((cells,), count) = read(content)[0]
    assert cells.column == of
    assert rows_of(cells, count) == rows


@given(fields(), st.integers(1, 3))
@settings(max_examples=200)
def test_any_fields_come_back_bit_for_bit(
    given: tuple[dict[ValueColumn, Rows], int], batches: int
) -> None:
    found, count = given
    cells = [cells_of(of, rows) for of, rows in found.items()]
    for back, same in read(written(list(found), [(cells, count)] * batches)):
        assert same == count
        assert {of.column: rows_of(of, count) for of in back} == found


def in_block(template: Template, lengths: bytes, rows: int, block: bytes) -> dict[str, list[Any]]:
    """Shape and bytes of every cell, as every reader of blocks finds them."""
    assert template.block_bytes(lengths, rows) == len(block)
    sizes = np.frombuffer(lengths, np.int32).reshape(template.num_free, 1, rows)
    layout = template.layout(sizes, rows)
    found: dict[str, list[Any]] = {}
    for c, of in enumerate(template.columns):
        for r in range(rows):
            free = iter(sizes[template.first_free[c] :, 0, r].tolist())
            shape = tuple(size if size >= 0 else next(free) for size in of.dims)
            at, size = int(layout.offsets[c, 0, r]), int(layout.nbytes[c, 0, r])
            found.setdefault(of.name, []).append((shape, block[at : at + size]))
    return found


@given(fields(), st.sampled_from([0, 1, 10, 1 << 20]))
@settings(max_examples=200)
def test_blocks_hold_each_row_once_with_all_of_its_fields(
    given: tuple[dict[ValueColumn, Rows], int], limit: int
) -> None:
    found, count = given
    cells = [cells_of(of, rows) for of, rows in found.items()]
    back: dict[str, Rows] = {of.name: [None] * count for of in found}
    seen: list[int] = []
    for block in blocks(cells, count, limit):
        joined = b"".join(block.pieces)
        assert len(joined) == block.nbytes
        assert len(joined) % ALIGN == 0
        assert FRONT.unpack_from(joined)[2] == len(block.rows)
        seen += block.rows.tolist()
        for name, values in in_block(
            Template.parse(block.template.blob), block.lengths, len(block.rows), joined
        ).items():
            for row, value in zip(block.rows.tolist(), values, strict=True):
                back[name][row] = value
        for column_ in block.template.columns:
            assert column_.ragged_dim == next(o for o in found if o.name == column_.name).ragged_dim
    assert len(set(seen)) == len(seen)
    assert back == {of.name: rows for of, rows in found.items()}


def test_blocks_are_cut_at_the_limit_and_never_within_a_row() -> None:
    of = column("x", "uint8", 1)
    rows: Rows = [((n,), bytes(n)) for n in (10, 10, 10, 100, 1, 1)]
    found = [block.rows.tolist() for block in blocks([cells_of(of, rows)], 6, 25)]
    assert found == [[0, 1, 2], [3], [4, 5]]


def test_rows_of_an_open_schema_have_a_column_for_each_dtype_of_a_field() -> None:
    narrow, wide = column("x", "int8", 1), column("x", "int64", 2)
    rows: dict[ValueColumn, Rows] = {
        narrow: [((2,), b"ab"), None],
        wide: [None, ((1, 1), b"12345678")],
    }
    cells = [cells_of(of, of_rows) for of, of_rows in rows.items()]
    content = written(list(rows), [(cells, 2)])
    back, count = read(content)[0]
    assert {of.column: rows_of(of, count) for of in back} == rows
    assert pa.ipc.open_file(pa.py_buffer(content)).schema.names == [
        "x", "x.shape", "x.int64.2", "x.int64.2.shape",
    ]  # fmt: skip
    assert sorted(b.template.columns[0].dtype for b in blocks(back, 2, 100)) == ["int64", "int8"]


def test_plain_pyarrow_reads_the_numbers() -> None:
    ids, bf16, value = column("ids", "int64", 1), column("w", "bfloat16", 2), column("m", OBJECT, 1)
    numbers = np.arange(3, dtype=np.int64)
    rows: list[tuple[ValueColumn, Rows]] = [
        (ids, [((3,), numbers.tobytes()), None]),
        (bf16, [None, ((1, 2), b"\x80\x3f\x00\x40")]),
        (value, [((1,), b"\x07"), None]),
    ]
    content = written([ids, bf16, value], [([cells_of(of, r) for of, r in rows], 2)])
    table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
    assert table["ids"].to_pylist() == [[0, 1, 2], None]
    assert table["ids"].type == pa.large_list(pa.field("item", pa.int64(), nullable=False))
    assert table["ids.shape"].to_pylist() == [[3], None]
    assert table["w"].to_pylist() == [None, [0x3F80, 0x4000]]
    assert table["w.shape"].to_pylist() == [None, [1, 2]]
    assert json.loads(table.schema.field("w").metadata[META])["dtype"] == "bfloat16"
    assert table["m"].to_pylist() == [b"\x07", None]


# -- what is refused -------------------------------------------------------------------------

X = column("x", "int32", 2)
GOOD: Rows = [((2, 1), bytes(8)), None, ((1, 1), bytes(4))]


RIGHT: dict[str, tuple[list[int], Any]] = {
    "ends": ([0, 2, 2, 3], np.int64),
    "shape_ends": ([0, 2, 2, 4], np.int32),
    "dims": ([2, 1, 1, 1], np.int32),
}


def batch_of(*, validity: int = 0b101, shape_validity: int = 0b101, **parts: Any) -> Any:
    """The batch of GOOD with some of its parts replaced, as a file with other bytes has it."""
    schema = schema_of([X])
    items = pa.array(parts.pop("items", [0, 0, 0]), pa.int32())
    dims = parts.pop("dims", RIGHT["dims"][0])
    arrays: list[Any] = []
    for field, child, name, bits in (
        (schema.field(0), items, "ends", validity),
        (schema.field(1), pa.array(dims, pa.int32()), "shape_ends", shape_validity),
    ):
        ends = pa.py_buffer(np.array(RIGHT[name][0], RIGHT[name][1]))
        present = pa.py_buffer(bytes([bits]))
        arrays.append(pa.Array.from_buffers(field.type, 3, [present, ends], children=[child]))
    file = io.BytesIO()
    with pa.ipc.new_stream(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    content = file.getvalue()
    for name, changed in parts.items():
        numbers, kind = RIGHT[name]
        before = np.array(numbers, kind).tobytes()
        assert content.count(before) == 1
        content = content.replace(before, np.array(changed, kind).tobytes())
    return pa.ipc.open_stream(content).read_next_batch()


def test_the_batch_that_the_refused_ones_differ_from_is_right() -> None:
    (cells,) = decode(batch_of(), [X])
    assert rows_of(cells, 3) == GOOD


@pytest.mark.parametrize(
    "parts",
    [
        {"dims": [3, 1, 1, 1]},
        {"dims": [-2, -1, 1, 1]},
        {"dims": [1 << 30, 1 << 30, 1, 1]},
        {"dims": [(1 << 31) - 1, (1 << 31) - 1, 1, 1]},
        {"ends": [0, 2, 3, 3]},
        {"ends": [0, 2, 1, 3]},
        {"ends": [0, 2, 2, 4]},
        {"ends": [1, 2, 2, 3]},
        {"ends": [0, 2, 2, 1 << 40]},
        {"ends": [0, -1, 2, 3]},
        {"shape_ends": [0, 2, 2, 1 << 30]},
        {"shape_validity": 0b111},
        {"validity": 0b111},
        {"validity": 0b001},
        {"shape_ends": [0, 2, 2, 3]},
        {"shape_ends": [0, 1, 1, 4]},
        {"items": [0, None, 0]},
    ],
    ids=str,
)
def test_a_batch_whose_parts_do_not_agree_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        decode(batch_of(**parts), [X])


@pytest.mark.parametrize("more", [{"items": [0] * 4}, {"dims": [1] * 5}], ids=str)
def test_numbers_behind_the_last_row_are_refused(more: dict[str, list[int]]) -> None:
    """Arrow does not write such a file; another writer may."""
    schema = schema_of([X])
    numbers = pa.array(more.get("items", [0] * 3), pa.int32())
    dims = pa.array(more.get("dims", [2, 1, 1, 1]), pa.int32())
    present = pa.py_buffer(bytes([0b101]))
    arrays = [
        pa.Array.from_buffers(field.type, 3, [present, pa.py_buffer(ends)], children=[child])
        for field, ends, child in (
            (schema.field(0), np.array([0, 2, 2, 3], np.int64), numbers),
            (schema.field(1), np.array([0, 2, 2, 4], np.int32), dims),
        )
    ]
    with pytest.raises(Malformed, match="no row"):
        decode(pa.RecordBatch.from_arrays(arrays, schema=schema), [X])


def test_a_shape_whose_product_wraps_is_refused() -> None:
    """2^32 * 2^32 is 0 in 64 bits; sizes of 2^31 - 1 are the largest that fit the column."""
    of = column("x", "int8", 3)
    dims = (1 << 22, 1 << 21, 1 << 21)
    assert math.prod(dims) % (1 << 64) == 0
    schema = schema_of([of])
    empty = pa.array([[]], schema.field(0).type)
    shape = pa.array([list(dims)], schema.field(1).type)
    batch = pa.RecordBatch.from_arrays([empty, shape], schema=schema)
    with pytest.raises(Malformed, match="shapes"):
        decode(batch, [of])


def meta(**changes: Any) -> dict[bytes, bytes]:
    right = {"field": "x", "dtype": "int32", "rank": 1, "ragged_dim": 0}
    return {META: json.dumps({**right, **changes}).encode()}


NUMBERS = pa.large_list(pa.field("item", pa.int32(), nullable=False))
SHAPE = pa.list_(pa.field("item", pa.int32(), nullable=False))
SHAPE_OF = {META: b'{"shape_of": "x"}'}


@pytest.mark.parametrize(
    "field",
    [
        pa.field("x", NUMBERS),
        pa.field("x", NUMBERS, metadata={META: b"[]"}),
        pa.field("x", NUMBERS, metadata={META: b"{"}),
        pa.field("x", NUMBERS, metadata=meta(dtype="int33")),
        pa.field("x", NUMBERS, metadata=meta(dtype=["int32"])),
        pa.field("x", NUMBERS, metadata=meta(dtype="int64")),
        pa.field("x", NUMBERS, metadata=meta(rank=10**9)),
        pa.field("x", NUMBERS, metadata=meta(rank=-1)),
        pa.field("x", NUMBERS, metadata=meta(rank=True)),
        pa.field("x", NUMBERS, metadata=meta(ragged_dim=1)),
        pa.field("x", NUMBERS, metadata=meta(ragged_dim=None)),
        pa.field("x", NUMBERS, metadata=meta(field="")),
        pa.field("x", NUMBERS, metadata=meta(field="y" * 300)),
        pa.field("x", NUMBERS, metadata=meta(field=7)),
        pa.field("x", pa.list_(pa.int32()), metadata=meta()),
        pa.field("x", pa.dictionary(pa.int8(), pa.int32()), metadata=meta()),
        pa.field("x", NUMBERS, metadata=meta(dtype="object")),
        pa.field("x", pa.large_binary(), metadata=meta(dtype="object", rank=2)),
    ],
    ids=str,
)
def test_a_file_of_other_columns_is_refused(field: Any) -> None:
    shape = pa.field("x.shape", SHAPE, metadata=SHAPE_OF)
    right = pa.field("x", NUMBERS, metadata=meta())
    assert columns_of(pa.schema([right, shape])) == [column("x", "int32", 1)]
    with pytest.raises(Malformed):
        columns_of(pa.schema([field, shape]))


@pytest.mark.parametrize(
    "fields_",
    [[0], [1], [0, 0, 1], [0, 1, 0, 1], [1, 0]],
    ids=str,
)
def test_a_file_with_columns_missing_or_twice_is_refused(fields_: list[int]) -> None:
    both = [pa.field("x", NUMBERS, metadata=meta()), pa.field("x.shape", SHAPE, metadata=SHAPE_OF)]
    with pytest.raises(Malformed):
        columns_of(pa.schema([both[i] for i in fields_]))


def test_a_row_that_has_a_field_twice_is_refused() -> None:
    one, two = column("x", "int8", 1), column("x", "int64", 1)
    cells = [cells_of(one, [((1,), b"a")]), cells_of(two, [((1,), bytes(8))])]
    with pytest.raises(Malformed, match="twice"):
        list(blocks(cells, 1, 100))


@given(st.data())
@settings(max_examples=300)
def test_no_change_of_a_batch_is_read_as_more_than_it_holds(data: st.DataObject) -> None:
    """Whatever a file's offsets, shapes and validity say: refused, or within its own bytes."""
    small = st.integers(-2, 5) | st.sampled_from([1 << 30, -(1 << 31)])
    parts = {
        "ends": data.draw(st.lists(small, min_size=4, max_size=4)),
        "shape_ends": data.draw(st.lists(small, min_size=4, max_size=4)),
        "dims": data.draw(st.lists(small, min_size=4, max_size=6)),
        "items": data.draw(st.lists(st.just(7), min_size=3, max_size=6)),
        "validity": data.draw(st.integers(0, 7)),
        "shape_validity": data.draw(st.integers(0, 7)),
    }
    try:
        (cells,) = decode(batch_of(**parts), [X])
    except Malformed:
        return
    assert cells.nbytes.sum() == len(cells.data) == 4 * len(parts["items"])
    assert [row for row in rows_of(cells, 3) if row is not None] != [] or not parts["items"]
    assert list(itertools.chain(blocks([cells], 3, 10))) or not len(cells.rows)
