"""Rows of a listing as an Arrow or Parquet file, with the values of their fields.

Owns how many rows are in memory at once: as many as have about BATCH_BYTES of values, one at least.
The types of the tags' columns are those of a checkpoint's (dataplane/checkpoint/tables.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc

from dataplane.checkpoint.tables import TAG, TagKinds, to_json
from dataplane.cli.values.field_columns import MARK, cells_of, columns_of, string_columns
from dataplane.cli.values.row_files import kind_of, whole_file
from dataplane.client.results import Listing
from dataplane.codec.shapes import OBJECT
from dataplane.errors import InvalidRequest
from dataplane.types import FieldSchema, Tags

if TYPE_CHECKING:
    from dataplane.client.sync import Client

BATCH_BYTES: Final = 32 << 20
FIRST_ROWS: Final = 64
MAX_ROWS: Final = 16_384


class Exporting:
    """The rows of a listing on their way into a file."""

    def __init__(self, client: Client, listing: Listing, fields: Mapping[str, FieldSchema]) -> None:
        self._client = client
        self._partition = listing.partition_id
        self._listing = listing
        self._fields = fields
        kinds = TagKinds()
        for part in listing.parts():
            kinds.note(part.tags)
        if kinds.more:
            raise InvalidRequest(
                f"the rows have over {len(kinds.types)} tags, more than a file has columns for: "
                "choose some with --columns"
            )
        tags = [
            field if field.metadata is None else pa.field(field.name, field.type, metadata=_JSON)
            for field in kinds.schema()
            if field.name.startswith(TAG)
        ]
        self._schema = pa.schema(
            [pa.field("key", pa.string(), nullable=False), *tags, *columns_of(fields)]
        )
        self._tags = tags
        self.rows = 0
        """Rows that were written."""

    @property
    def names(self) -> list[str]:
        """The columns of the file."""
        return list(self._schema.names)

    def write(self, path: Path) -> None:
        """Write the file; it appears whole or not at all."""
        with whole_file(path) as aside:
            writer = self._writer(path.suffix, aside)
            try:
                for batch in self._batches():
                    writer.write_batch(batch)
                    self.rows += batch.num_rows
            finally:
                writer.close()

    def _writer(self, suffix: str, path: Path) -> pq.ParquetWriter | ipc.RecordBatchFileWriter:
        if suffix == ".arrow":
            return ipc.RecordBatchFileWriter(str(path), self._schema)
        return pq.ParquetWriter(
            path, self._schema, compression="zstd", use_dictionary=string_columns(self._schema)
        )

    def _batches(self) -> Iterator[pa.RecordBatch]:
        rows = FIRST_ROWS if self._fields else MAX_ROWS
        for part in self._listing.parts():
            tags = part.tags
            fields = part.fields
            at = 0
            while at < len(part):
                end = min(at + rows, len(part))
                batch, size = self._batch(part.keys[at:end], tags[at:end], fields[at:end])
                at = end
                if self._fields and size:
                    rows = min(max(rows * BATCH_BYTES // size, rows // 8, 1), 2 * rows, MAX_ROWS)
                if batch.num_rows:
                    yield batch

    def _batch(
        self, keys: list[str], tags: list[Tags], fields: list[tuple[str, ...]]
    ) -> tuple[pa.RecordBatch, int]:
        """The rows that are still there, and the bytes of their values."""
        values, gone, size = self._values(keys, fields)
        left = [i for i in range(len(keys)) if i not in gone]
        keys = [keys[i] for i in left]
        arrays = [pa.array(keys, pa.string())]
        for of in self._tags:
            name = of.name.removeprefix(TAG)
            cells = [tags[i].get(name, _ABSENT) for i in left]
            if of.metadata is None:
                plain = [None if cell is _ABSENT else cell for cell in cells]
            else:
                plain = [None if cell is _ABSENT else to_json(cell) for cell in cells]  # pyright: ignore[reportArgumentType] (a tag)
            arrays.append(pa.array(plain, of.type))
        for name, of in self._fields.items():
            arrays += cells_of(name, of, [values[name][i] for i in left], keys)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema), size

    def _values(
        self, keys: list[str], fields: list[tuple[str, ...]]
    ) -> tuple[dict[str, list[Any]], set[int], int]:
        """The values of each field, which rows are gone, and how many bytes there are."""
        values: dict[str, list[Any]] = {name: [None] * len(keys) for name in self._fields}
        gone: set[int] = set()
        alike: dict[tuple[str, ...], list[int]] = {}
        for i, has in enumerate(fields):
            wanted = tuple(name for name in has if name in self._fields)
            alike.setdefault(wanted, []).append(i)
        size = 0
        for names, places in alike.items():
            if not names:
                continue
            place = {keys[i]: i for i in places}
            rows = self._client.kv_batch_get(
                list(place), self._partition, list(names), layout="list", on_missing="drop"
            )
            gone.update(place[key] for key in place.keys() - set(rows.keys))
            for name in names:
                is_object = self._fields[name].dtype == OBJECT
                for key, value in zip(rows.keys, rows.fields.get(name, ()), strict=True):
                    values[name][place[key]] = (value,) if is_object else value
                    size += 256 if is_object else value.nbytes
        return values, gone, size


def as_they_are(
    client: Client, listing: Listing, fields: Mapping[str, FieldSchema]
) -> dict[str, FieldSchema]:
    """Fields of a partition where they may change: as the first row that has each holds it."""
    found: dict[str, FieldSchema] = {}
    for key, has in zip(listing.keys, listing.fields, strict=True):
        new = [name for name in has if name in fields and name not in found]
        if new:
            rows = client.kv_batch_get([key], listing.partition_id, new, layout="list")
            found |= {name: kind_of(values[0]) for name, values in rows.fields.items()}
    return {name: found.get(name, of) for name, of in fields.items()}


_ABSENT: Final = object()
_JSON: Final = {MARK: b"json"}
