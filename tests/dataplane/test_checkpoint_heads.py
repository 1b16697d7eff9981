"""What files say of themselves is read right, and whatever they say, only refused."""

from __future__ import annotations

import io
import struct
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.checkpoint.heads import (
    RECORD_BATCH,
    SCHEMA,
    ChunkHead,
    MessageHead,
    _check_pages,
    parquet_rows,
)
from dataplane.checkpoint.manifest import Malformed

ROWS = 3000
TABLE = pa.table({"key": [f"key-{i}" for i in range(ROWS)], "n": list(range(ROWS))})
PLAIN: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}


def written(**options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(TABLE, file, **{**PLAIN, **options})
    return file.getvalue()


def rows_of(content: bytes) -> list[int]:
    def read(at: int, nbytes: int) -> bytes:
        if at < 0 or nbytes < 0 or at + nbytes > len(content):
            raise Malformed("beyond the file")
        return content[at : at + nbytes]

    return parquet_rows(read, len(content))


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [ROWS]),
        ({"row_group_size": 1000}, [1000] * 3),
        ({"data_page_size": 100}, [ROWS]),
        ({"write_statistics": True}, [ROWS]),
        ({"store_schema": False}, [ROWS]),
    ],
    ids=str,
)
def test_the_rows_of_plain_files_are_counted(options: dict[str, Any], rows: list[int]) -> None:
    assert rows_of(written(**options)) == rows


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"},
        {"compression": {"n": "zstd"}},
        {"use_dictionary": True},
        {"use_dictionary": ["n"]},
        {"column_encoding": {"n": "DELTA_BINARY_PACKED"}},
        {"column_encoding": {"n": "BYTE_STREAM_SPLIT"}},
        {"data_page_version": "2.0"},
    ],
    ids=str,
)
def test_files_that_are_not_plain_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        rows_of(written(**options))


def test_a_dictionary_is_found_in_the_pages_where_the_footer_says_nothing_of_it() -> None:
    content = written(use_dictionary=True)
    column = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(0).column(0)
    chunk = ChunkHead(0, ROWS, "key", column.dictionary_page_offset, column.total_compressed_size)
    with pytest.raises(Malformed, match="page at byte 4"):
        _check_pages(chunk, lambda at, nbytes: content[at : at + nbytes])
    plain = written()
    column = pq.ParquetFile(io.BytesIO(plain)).metadata.row_group(0).column(0)
    chunk = chunk._replace(nbytes=column.total_compressed_size)
    _check_pages(chunk, lambda at, nbytes: plain[at : at + nbytes])
    for wrong in (chunk._replace(rows=ROWS - 1), chunk._replace(nbytes=chunk.nbytes - 1)):
        with pytest.raises(Malformed):
            _check_pages(wrong, lambda at, nbytes: plain[at : at + nbytes])


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_as_a_footer_are_refused(footer: bytes) -> None:
    content = b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"
    try:
        rows = rows_of(content)
    except Malformed:
        return
    assert rows == []  # a footer of no row groups


PLAIN_FILE = written(row_group_size=1000)


@given(st.lists(st.tuples(st.integers(0, len(PLAIN_FILE) - 1), st.integers(0, 255)), max_size=3))
@settings(max_examples=200)
def test_a_plain_file_with_bytes_changed_is_refused_or_counted(
    changes: list[tuple[int, int]],
) -> None:
    content = bytearray(PLAIN_FILE)
    for at, byte in changes:
        content[-1 - at // 16 if at % 2 else at] = byte  # half of them at the end
    try:
        rows = rows_of(bytes(content))
    except Malformed:
        return
    assert sum(rows) * 5 <= len(content)


# -- Arrow -----------------------------------------------------------------------------------


def messages(**options: Any) -> list[Any]:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(TABLE)
    return list(pa.ipc.MessageReader.open_stream(sink.getvalue()))


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_kind_size_and_compression_of_messages_are_read(codec: str | None) -> None:
    schema, batch = messages(compression=codec)
    heads = [MessageHead(memoryview(message.metadata).tobytes()) for message in (schema, batch)]
    assert [head.kind for head in heads] == [SCHEMA, RECORD_BATCH]
    assert [head.body_bytes for head in heads] == [0, batch.body.size]
    assert heads[1].is_compressed == (codec is not None)


@given(st.binary(max_size=100))
def test_any_bytes_as_a_head_are_read_within_their_bounds(data: bytes) -> None:
    for what in ("kind", "body_bytes", "is_compressed"):
        try:
            getattr(MessageHead(data), what)
        except Malformed:
            pass
