"""Parquet files, as far as this repository uses them."""

from collections.abc import Iterator, Sequence
from typing import Any

from pyarrow import OSFile, RecordBatch, Schema

class ColumnChunkMetaData:
    compression: str
    encodings: tuple[str, ...]
    num_values: int
    path_in_schema: str
    has_dictionary_page: bool
    data_page_offset: int
    total_compressed_size: int
    total_uncompressed_size: int

class RowGroupMetaData:
    num_rows: int
    num_columns: int
    def column(self, i: int) -> ColumnChunkMetaData: ...

class FileMetaData:
    num_rows: int
    num_columns: int
    num_row_groups: int
    def row_group(self, i: int) -> RowGroupMetaData: ...

class ParquetFile:
    metadata: FileMetaData
    schema_arrow: Schema
    def __init__(self, source: OSFile | Any, *, pre_buffer: bool = False) -> None: ...
    def iter_batches(
        self,
        batch_size: int = 65536,
        row_groups: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        use_threads: bool = True,
    ) -> Iterator[RecordBatch]: ...
    def close(self) -> None: ...

class ParquetWriter:
    def __init__(
        self,
        where: Any,
        schema: Schema,
        *,
        compression: str = "snappy",
        use_dictionary: bool | Sequence[str] = True,
        write_statistics: bool = True,
    ) -> None: ...
    def write_batch(self, batch: RecordBatch, row_group_size: int | None = None) -> None: ...
    def close(self) -> None: ...
