"""Templates: what a peer may send, and that no two rows of a block ever share a byte."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.codec.shapes import (
    ITEM_BYTES,
    MAX_COLUMNS,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_ROWS,
    OBJECT,
    Column,
)
from dataplane.codec.template import (
    ALIGN,
    FRONT,
    FRONT_MAGIC,
    FRONT_VERSION,
    MAX_BLOB_BYTES,
    MAX_BLOCK_BYTES,
    Template,
    align,
)
from dataplane.errors import InvalidRequest

BIG = (1 << 31) - 1
TENSOR_DTYPES = sorted(set(ITEM_BYTES) - {OBJECT})


@st.composite
def columns(draw: st.DrawFn, name: str) -> Column:
    dtype = draw(st.sampled_from([OBJECT, *TENSOR_DTYPES]))
    if dtype == OBJECT:
        return Column(name, OBJECT, 0, (-1,))
    dims = tuple(draw(st.lists(st.sampled_from([-1, -1, 0, 1, 2, 5]), max_size=4)))
    ragged = draw(st.integers(0, len(dims) - 1)) if dims else None
    return Column(name, dtype, ragged, dims)


@st.composite
def templates(draw: st.DrawFn) -> Template:
    count = draw(st.integers(0, 5))
    return Template(tuple(draw(columns(f"f{i}")) for i in range(count)))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Template, np.ndarray]:
    """A template and the lengths [F, B, R] of B blocks of R rows."""
    template = draw(templates())
    shape = (template.num_free, draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    size = shape[0] * shape[1] * shape[2]
    lengths = draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))
    return template, np.array(lengths, np.int32).reshape(shape)


def row_shape(template: Template, c: int, lengths: list[int]) -> list[int]:
    """Dimensions of a row of column c, with the free ones taken from its [F] lengths."""
    free = iter(lengths[template.first_free[c] :])
    return [next(free) if dim < 0 else dim for dim in template.columns[c].dims]


@given(templates())
def test_a_template_is_the_same_after_the_wire(template: Template) -> None:
    arrived = Template.parse(template.blob)
    assert arrived.columns == template.columns
    assert arrived.blob == template.blob
    assert arrived.num_free == sum(len(column.free) for column in template.columns)
    assert [arrived.index[name] for name in arrived.names] == list(range(len(arrived.names)))


@given(blocks())
def test_rows_are_large_enough_and_never_overlap(case: tuple[Template, np.ndarray]) -> None:
    template, lengths = case
    _, num_blocks, rows = lengths.shape
    layout = template.layout(lengths, rows)
    for b in range(num_blocks):
        end = FRONT.size + 4 * template.num_free * rows
        for c, column in enumerate(template.columns):
            assert layout.offsets[c, b, 0] % ALIGN == 0
            for r in range(rows):
                elements = 1
                for size in row_shape(template, c, lengths[:, b, r].tolist()):
                    elements *= size
                assert layout.nbytes[c, b, r] == elements * ITEM_BYTES[column.dtype]
                # Rows of a column are back to back: a whole column is one copy.
                start = layout.offsets[c, b, r]
                assert start >= end if r == 0 else start == end
                end = start + layout.nbytes[c, b, r]
        assert layout.total[b] >= end
        assert layout.total[b] % ALIGN == 0
        assert layout.total[b] < end + 2 * ALIGN, "no more than the padding is wasted"


@given(blocks())
def test_many_blocks_at_once_lie_as_each_by_itself(case: tuple[Template, np.ndarray]) -> None:
    template, lengths = case
    _, num_blocks, rows = lengths.shape
    together = template.layout(lengths, rows)
    for b in range(num_blocks):
        alone = template.layout(lengths[:, b : b + 1], rows)
        assert (alone.offsets == together.offsets[:, b : b + 1]).all()
        assert (alone.nbytes == together.nbytes[:, b : b + 1]).all()
        block = np.ascontiguousarray(lengths[:, b]).astype("<i4").tobytes()
        assert template.block_bytes(block, rows) == alone.total[0] == together.total[b]
        assert len(template.front(block, rows)) == template.front_bytes(rows)


@given(blocks())
def test_one_row_is_the_layout_of_one_row(case: tuple[Template, np.ndarray]) -> None:
    template, lengths = case
    one = np.ascontiguousarray(lengths[:, :1, :1])
    layout = template.layout(one, 1)
    starts = template.one_row(one.tobytes())
    assert starts == [*layout.offsets[:, 0, 0].tolist(), int(layout.total[0])]
    assert template.block_bytes(one.tobytes(), 1) == starts[-1]


def test_a_block_by_hand() -> None:
    template = Template(
        (
            Column("ids", "int64", 0, (-1,)),
            Column("reward", "float32", None, ()),
            Column("experts", "uint16", 0, (-1, 3)),
        )
    )
    lengths = np.array([[3, 0], [2, 9]], np.int32)  # ids, experts
    front = template.front(lengths.tobytes(), 2)
    assert front[:32] == struct.pack("<IIII4i", FRONT_MAGIC, FRONT_VERSION, 2, 2, 3, 0, 2, 9)
    assert front[32:] == bytes(32)
    layout = template.layout(lengths.reshape(2, 1, 2), 2)
    assert layout.offsets[:, 0].tolist() == [[64, 88], [128, 132], [192, 204]]
    assert layout.nbytes[:, 0].tolist() == [[24, 0], [4, 4], [12, 54]]
    assert layout.total.tolist() == [320] == [template.block_bytes(lengths.tobytes(), 2)]


def test_a_block_without_columns_is_its_front() -> None:
    template = Template(())
    assert template.block_bytes(b"", 5) == 64
    assert template.one_row(b"") == [64]
    assert template.layout(np.empty((0, 2, 5), np.int32), 5).total.tolist() == [64, 64]


def test_align_is_the_next_multiple_of_64() -> None:
    assert [align(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


GOOD = ("ids", "int64", 0, (-1,))


def blob(*items: Any) -> bytes:
    return msgpack.packb([list(item) if isinstance(item, tuple) else item for item in items])


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "not valid msgpack"),
        (b"\xc1", "not valid msgpack"),
        (blob(GOOD) + b"x", "not valid msgpack"),
        (blob(GOOD)[:-1], "not valid msgpack"),
        (b"\x91" * 5_000, "not valid msgpack"),
        (b"\x80\x04\x95\x10\x00\x00\x00", "not valid msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not valid msgpack"),
        (b"\x91\x94\xa1\xff\xa5int64\x00\x91\xff", "not valid msgpack"),
        (msgpack.packb("x" * MAX_BLOB_BYTES), "not valid msgpack"),
        (msgpack.packb({"ids": 1}), "a block template is a list of at most"),
        (msgpack.packb(7), "a block template is a list of at most"),
        (blob(*[(f"f{i}", *GOOD[1:]) for i in range(MAX_COLUMNS + 1)]), "at most 1024 columns"),
        (blob(GOOD, GOOD), "the field 'ids' occurs twice in one put"),
        (blob("ids"), "a column of a template is [name"),
        (blob(GOOD[:3]), "a column of a template is [name"),
        (blob((*GOOD, 1)), "a column of a template is [name"),
        (blob({"name": "ids"}), "a column of a template is [name"),
        (blob((7, *GOOD[1:])), "a field name is a string"),
        (blob((b"ids", *GOOD[1:])), "a field name is a string"),
        (blob(("", *GOOD[1:])), "a field name is a string"),
        (blob(("x" * (MAX_NAME_BYTES + 1), *GOOD[1:])), "a field name is a string"),
        (blob(("\xe9" * (MAX_NAME_BYTES // 2 + 1), *GOOD[1:])), "a field name is a string"),
        (blob(("ids", "int65", 0, (-1,))), "field 'ids': unknown dtype 'int65'"),
        (blob(("ids", 8, 0, (-1,))), "field 'ids': unknown dtype 8"),
        (blob(("ids", "x" * 100_000, 0, (-1,))), "field 'ids': unknown dtype 'xxx"),
        (blob(("ids", "int64", 0, None)), "field 'ids': at most 8 dimensions"),
        (blob(("ids", "int64", 0, "ab")), "field 'ids': at most 8 dimensions"),
        (blob(("ids", "int64", 0, (1,) * (MAX_RANK + 1))), "field 'ids': at most 8 dimensions"),
        (blob(("ids", "int64", 0, (-2,))), "field 'ids': dimension -2 is not a size"),
        (blob(("ids", "int64", 0, (1 << 31,))), "dimension 2147483648 is not a size"),
        (blob(("ids", "int64", 0, (True,))), "dimension True is not a size"),
        (blob(("ids", "int64", 0, (1.0,))), "dimension 1.0 is not a size"),
        (blob(("ids", "int64", 0, ("x" * 100_000,))), "dimension 'xxx"),
        (blob(("ids", OBJECT, 0, (4,))), "field 'ids': an object column has dims (-1,)"),
        (blob(("ids", OBJECT, None, ())), "field 'ids': an object column has dims (-1,)"),
        (blob(("ids", "int64", 1, (-1,))), "field 'ids': ragged_dim 1 of 1 dimensions"),
        (blob(("ids", "int64", -1, (-1,))), "field 'ids': ragged_dim -1 of 1 dimensions"),
        (blob(("ids", "int64", False, (-1,))), "field 'ids': ragged_dim False of 1 dimensions"),
        (blob(("ids", "int64", 0, ())), "field 'ids': ragged_dim 0 of 0 dimensions"),
        (blob(("ids", "int64", "x" * 100_000, ())), "field 'ids': ragged_dim 'xxx"),
        (blob(("ids", "int64", None, (-1,))), "a field of rank 1 names its ragged_dim"),
        (blob(("ids", "int8", 0, (-1, *(BIG,) * 7))), "a row is larger than a block can be"),
    ],
)
def test_a_malformed_template_is_refused(sent: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Template.parse(sent)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500, "a message does not repeat what a hostile peer sent"


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-3, 1 << 33) | st.sampled_from(["ids", "int64"]),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=12,
    ).map(msgpack.packb)
)
def test_anything_at_all_parses_or_is_refused(sent: bytes) -> None:
    try:
        template = Template.parse(sent)
    except InvalidRequest:
        return
    assert Template(template.columns).columns == template.columns


@pytest.mark.parametrize(
    ("lengths", "rows", "message"),
    [
        (b"", 0, "a block has 1 to 65536 rows, not 0"),
        (b"", -1, "a block has 1 to 65536 rows, not -1"),
        (b"", MAX_ROWS + 1, "a block has 1 to 65536 rows, not 65537"),
        (b"", 1 << 63, "a block has 1 to 65536 rows"),
        (b"", 1, "0 bytes of row lengths where 1 free dimensions x 1 rows x 4 bytes are due"),
        (bytes(7), 2, "7 bytes of row lengths"),
        (bytes(12), 2, "12 bytes of row lengths"),
        (struct.pack("<i", -1), 1, "a row length is negative"),
        (struct.pack("<ii", 3, -1), 2, "a row length is negative"),
    ],
)
def test_lengths_that_do_not_fit_the_template_are_refused(
    lengths: bytes, rows: int, message: str
) -> None:
    template = Template((Column(*GOOD),))
    with pytest.raises(InvalidRequest) as caught:
        template.block_bytes(lengths, rows)
    assert message in str(caught.value)


@pytest.mark.parametrize("rows", [1, 2, 1000])
@pytest.mark.parametrize(
    "dims", [(-1, -1), (-1, -1, -1), (-1,) * MAX_RANK, (-1, BIG), (-1, 1 << 20, 1 << 10)]
)
def test_huge_lengths_are_refused_and_do_not_wrap(dims: tuple[int, ...], rows: int) -> None:
    template = Template((Column("small", "int8", 0, (-1,)), Column("x", "complex128", 0, dims)))
    lengths = np.zeros((template.num_free, rows), np.int32)
    lengths[1:, -1] = BIG
    with pytest.raises(InvalidRequest, match=r"'x': a row is larger|a block has at most"):
        template.block_bytes(lengths.tobytes(), rows)
    with pytest.raises(InvalidRequest):
        template.layout(lengths.reshape(-1, 1, rows), rows)


def test_rows_that_are_too_much_together_are_refused() -> None:
    # Each row is 2^35 bytes, so that no row is too large by itself.
    deep = Template((Column("x", "complex128", 0, (-1,)),))
    wide = Template(tuple(Column(f"f{i}", "complex128", 0, (-1,)) for i in range(MAX_COLUMNS)))
    for template, rows in ((deep, MAX_ROWS), (wide, 64)):
        lengths = np.full((template.num_free, rows), BIG, np.int32).tobytes()
        assert template.num_free * rows * BIG * 16 > MAX_BLOCK_BYTES
        with pytest.raises(InvalidRequest, match="a block has at most"):
            template.block_bytes(lengths, rows)
    one = np.full(MAX_COLUMNS, BIG, np.int32).tobytes()
    assert wide.block_bytes(one, 1) == align(16 + 4 * MAX_COLUMNS) + MAX_COLUMNS * align(BIG * 16)


def test_a_fixed_row_larger_than_a_block_is_no_template() -> None:
    with pytest.raises(InvalidRequest, match="field 'x': a row is larger than a block can be"):
        Template((Column("x", "int64", 2, (BIG, BIG, -1)),))
    # A zero among the fixed dimensions makes every row empty, however large the others are.
    empty = Template((Column("x", "int64", 3, (BIG, BIG, 0, -1)),))
    for rows in (1, 3):
        assert empty.block_bytes(struct.pack("<i", BIG) * rows, rows) == empty.front_bytes(rows)


def test_large_lengths_of_different_rows_are_not_multiplied_with_each_other() -> None:
    template = Template((Column("x", "int8", 0, (-1, -1)),))
    for first, second in (((1, BIG), (BIG, 1)), ((BIG, 0), (0, BIG))):
        lengths = np.array([first, second], np.int32)
        assert template.block_bytes(lengths.tobytes(), 2) == template.front_bytes(2) + align(
            int(lengths.astype(np.int64).prod(axis=0).sum())
        )


def test_a_block_of_too_many_cells_is_refused_before_they_are_added_up() -> None:
    """65,536 rows of 1,024 fields would take gigabytes to add up, and travel in kilobytes."""
    columns = tuple(Column(f"c{i}", "uint8", None, ()) for i in range(1024))
    assert Template(columns).block_bytes(b"", 4096)
    with pytest.raises(InvalidRequest, match="at most 4194304 cells"):
        Template(columns).block_bytes(b"", 4097)
