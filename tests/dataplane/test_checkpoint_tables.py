"""Tags through a Parquet file and back: every value bit for bit, absent and None apart."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.checkpoint.manifest import Malformed
from dataplane.checkpoint.tables import (
    JSON_MARK,
    MAX_TAG_COLUMNS,
    TagKinds,
    TagRows,
    check_schema,
    decode,
    encode,
    from_json,
    to_json,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)
    | text
    | st.sampled_from(["$", "$float", "$$", '"$', "null", ""])
)
map_names = text | st.sampled_from(["$", "$float", "$$float", "$map", ""])
tag_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(map_names, inner, max_size=3),
    max_leaves=8,
)
TYPED = {
    "i": st.integers(-(1 << 63), (1 << 63) - 1),
    "f": st.floats(),
    "b": st.booleans(),
    "s": text,
}
"""Tags that hold one type wherever they occur."""
a_tag_map = st.fixed_dictionaries(
    {}, optional={**TYPED, "any": tag_values, "none": st.none(), "key": scalars, "revision": text}
)


def table(tags: Sequence[dict[str, Any]], tasks: dict[str, list[int]] | None = None) -> Any:
    count = len(tags)
    return TagRows(
        [f"k{i}" for i in range(count)],
        list(tags),
        np.arange(count, dtype=np.int64) + 1,
        np.zeros(count, np.int64),
        np.arange(count, dtype=np.int64) % 2 * 7,
        [f"c{i % 3}" for i in range(count)],
        {task: np.array(counts, np.int32) for task, counts in (tasks or {}).items()},
    )


def written(rows: TagRows, batches: int = 1) -> tuple[bytes, TagKinds]:
    """The content of a tags file."""
    kinds = TagKinds()
    kinds.note(rows.tags)
    schema = kinds.schema(list(rows.tasks))
    file = io.BytesIO()
    writer = pq.ParquetWriter(
        file, schema, compression="none", use_dictionary=False, write_statistics=False
    )
    for _ in range(batches):
        writer.write_batch(encode(rows, schema))
    writer.close()
    return file.getvalue(), kinds


def read(content: bytes) -> list[TagRows]:
    file = pq.ParquetFile(io.BytesIO(content))
    check_schema(file.schema_arrow)
    return [decode(batch) for batch in file.iter_batches(batch_size=1024)]


def bits(tags: dict[str, Any]) -> bytes:
    """The tags as bytes that tell any two different values apart; the order of tags is none."""
    return msgpack.packb([[name, tags[name]] for name in sorted(tags)])


# -- tables ----------------------------------------------------------------------------------

NAN = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]

VALUES = [
    None, True, False, 0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1,
    0.0, -0.0, 1.0, 1e-323, math.inf, -math.inf, math.nan, NAN, 0.1, 1e308,
    "", "null", "\0", "é☃\U0001f600", "$float", '{"$float": 1}',
    [], [None], [1, 1.0, True, "1", None], [[[]]], {}, {"": None}, {"a": {"b": [1, {"c": -0.0}]}},
    {"$float": "7ff8000000000000"}, {"$float": 1}, {"$": {"$$": NAN}}, [math.inf, {"$x": math.nan}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:30])
def test_json_text_keeps_a_tag_bit_for_bit(value: Any) -> None:
    text = to_json(value)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert msgpack.packb(from_json(text)) == msgpack.packb(value)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, -5, (1 << 63) - 1], pa.int64()),
        ([1.0, math.nan, -0.0], pa.float64()),
        ([True, False], pa.bool_()),
        (["a", ""], pa.string()),
    ],
    ids=str,
)
def test_a_tag_of_one_type_has_a_typed_column_in_which_null_is_absent(
    values: list[Any], kind: Any
) -> None:
    rows = table([{"x": value} for value in values] + [{}])
    content, _ = written(rows)
    column = pq.read_table(io.BytesIO(content))["tag.x"]
    assert column.type == kind
    assert column.null_count == 1
    assert [bits(tags) for tags in read(content)[0].tags] == [bits(tags) for tags in rows.tags]


@pytest.mark.parametrize(
    "values", [[1, 1.0], [1, True], [1, "1"], [None], [1, None], [1 << 63], [[1]], [{}]], ids=str
)
def test_any_other_tag_is_json_and_marked_so(values: list[Any]) -> None:
    rows = table([{"x": value} for value in values] + [{}])
    content, _ = written(rows)
    file = pq.read_table(io.BytesIO(content))
    assert file.schema.field("tag.x").metadata == JSON_MARK
    assert file["tag.x"].to_pylist() == [json.dumps(value) for value in values] + [None]
    assert [bits(tags) for tags in read(content)[0].tags] == [bits(tags) for tags in rows.tags]


def test_absent_and_none_are_told_apart() -> None:
    rows = table([{"x": None}, {}, {"x": 1}])
    assert read(written(rows)[0])[0].tags == [{"x": None}, {}, {"x": 1}]


def test_the_stores_own_columns_are_read_back_and_meet_no_tag_of_that_name() -> None:
    tags = {"key": 1, "revision": "r", "cleared_at": 2.0, "attempt": 9, "producer": True}
    rows = table([tags, {**tags, "more_tags": "m"}], {"train": [-1, 0], "key": [0, 7]})
    (back,) = read(written(rows)[0])
    assert back.keys == ["k0", "k1"]
    assert back.revisions.tolist() == [1, 2]
    assert back.cleared_at.tolist() == [0, 0]
    assert back.attempts.tolist() == [0, 7]
    assert back.producers == ["c0", "c1"]
    tasks = {task: counts.tolist() for task, counts in back.tasks.items()}
    assert tasks == {"train": [-1, 0], "key": [0, 7]}
    assert back.tags == rows.tags


def test_names_beyond_the_columns_share_one() -> None:
    many = {f"n{i:05d}": i for i in range(MAX_TAG_COLUMNS)}
    rows = table([many, {"late": 1, "n00000": 5}, {"later": None}])
    content, kinds = written(rows)
    assert kinds.more
    assert len(kinds.types) == MAX_TAG_COLUMNS
    assert [bits(tags) for tags in read(content)[0].tags] == [bits(tags) for tags in rows.tags]


# -- properties ------------------------------------------------------------------------------


@given(st.lists(a_tag_map, min_size=1, max_size=12))
def test_any_tags_come_back_bit_for_bit(tags: list[dict[str, Any]]) -> None:
    rows = table(tags)
    content, _ = written(rows, batches=2)
    back = read(content)
    assert [bits(t) for part in back for t in part.tags] == [bits(t) for t in tags] * 2


@given(tag_values)
def test_any_tag_survives_json(value: Any) -> None:
    text = to_json(value)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert msgpack.packb(from_json(text)) == msgpack.packb(value)


@given(st.text())
def test_any_text_is_a_tag_or_refused(text: str) -> None:
    try:
        value = from_json(text)
    except Malformed:
        return
    to_json(value)


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "NaN", "Infinity", '{"$float": 1}', '{"$float": "00"}', '{"$x": 1}',
        '{"$float": "7ff8000000000000", "a": 1}', "[" * 100_000, "9" * 10_000,
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_is_no_json_of_a_tag_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        from_json(text)


def own_fields() -> list[Any]:
    return list(TagKinds().schema())


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields[1:],
        lambda fields: [*fields, fields[0]],
        lambda fields: [*fields, pa.field("tag.x", pa.int32())],
        lambda fields: [*fields, pa.field("tag.x", pa.int64(), metadata=JSON_MARK)],
        lambda fields: [*fields, pa.field("x", pa.int64())],
        lambda fields: [*fields, pa.field("task.t", pa.int64(), nullable=False)],
        lambda fields: [*fields, pa.field("task.t", pa.int32())],
        lambda fields: [*fields, pa.field("more_tags", pa.string())],
        lambda fields: [pa.field("key", pa.binary(), nullable=False), *fields[1:]],
        lambda fields: [pa.field("key", pa.string()), *fields[1:]],
        lambda fields: [*fields, pa.field("tag.x", pa.dictionary(pa.int8(), pa.string()))],
    ],
)
def test_a_file_of_other_columns_is_refused(change: Any) -> None:
    check_schema(pa.schema(own_fields()))
    with pytest.raises(Malformed):
        check_schema(pa.schema(change(own_fields())))


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("key", ""),
        ("key", "a\nb"),
        ("revision", -1),
        ("attempt", -2),
        ("more_tags", "[1]"),
        ("task.t", -2),
    ],
)
def test_a_row_that_no_store_has_is_refused(name: str, cell: Any) -> None:
    kinds = TagKinds()
    kinds.more = True
    schema = kinds.schema(["t"])
    good = {
        "key": "k", "revision": 1, "cleared_at": 0, "attempt": None, "producer": "c", "task.t": -1,
    }  # fmt: skip
    for cells, is_right in ((good, True), ({**good, name: cell}, False)):
        arrays = [pa.array([cells.get(field.name)], field.type) for field in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if is_right:
            assert decode(batch).keys == ["k"]
        else:
            with pytest.raises(Malformed):
                decode(batch)
