"""Files that rows of a get are written to: .npz, .safetensors, .parquet.

Owns what is in each. In .npz and .safetensors every cell is an entry of its own, named
`<key>/<field>`, with its own shape, so that ragged rows need no offsets: a field's rows joined are
its entries in the order of `keys`. In .npz the entry `keys` lists the keys and a Python value is
the entry `<key>/<field>.json`, a text; in .safetensors both are in the metadata, `keys` as a JSON
list and values under their own names. .parquet has a row for each key, with the column `key` and
those of field_columns.py. A file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from dataplane.cli.values.plain_values import to_text
from dataplane.client.results import Rows
from dataplane.codec.shapes import OBJECT
from dataplane.errors import DataplaneError, InvalidRequest, quote
from dataplane.types import FieldSchema

KINDS: Final = (".npz", ".safetensors", ".parquet")

SAFETENSORS: Final = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
)
"""The dtypes that the safetensors library writes and reads back."""


def check_path(path: Path, kinds: tuple[str, ...]) -> None:
    """InvalidRequest unless a file of one of these kinds can be written there."""
    if path.suffix not in kinds:
        raise InvalidRequest(f"{str(path)!r} names no format: end it in {', '.join(kinds)}")
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidRequest(f"{str(path)!r} cannot be written: there is no such folder")


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A path to write to; what is there takes the place of the file when the block ends well."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield aside
        os.replace(aside, path)
    except DataplaneError:
        raise  # the plane's: some of them are OSErrors too
    except OSError as error:
        raise InvalidRequest(f"{str(path)!r} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)


def write_rows(path: Path, rows: Rows) -> int:
    """Write the rows, which are in the layout `list`; the bytes of the file.

    InvalidRequest where the format has no such dtype: it says which has.
    """
    write = {".npz": _write_npz, ".safetensors": _write_safetensors, ".parquet": _write_parquet}
    schema = {name: kind_of(values[0]) for name, values in rows.fields.items()}
    with whole_file(path) as aside:
        write[path.suffix](aside, rows, schema)
        return aside.stat().st_size


def kind_of(value: Any) -> FieldSchema:
    """What a field is one of whose rows is this tensor or Python value."""
    import torch

    if not isinstance(value, torch.Tensor):
        return FieldSchema(OBJECT, 1, 0)
    dtype = str(value.dtype).removeprefix("torch.")
    return FieldSchema(dtype, value.dim(), value.dim() - 1 if value.dim() else None)


def _entries(rows: Rows) -> Iterator[tuple[str, str, Any]]:
    """The name of each cell's entry, its field and its value, row by row."""
    for i, key in enumerate(rows.keys):
        for name, values in rows.fields.items():
            yield f"{key}/{name}", name, values[i]


def _add(entries: dict[str, Any], entry: str, value: Any) -> None:
    """InvalidRequest if there is such an entry: a key and a field may have any letters."""
    if entry in entries:
        raise InvalidRequest(
            f"two cells would both be the entry {quote([entry])}: write them to .parquet, or one "
            "key at a time"
        )
    entries[entry] = value


def _write_npz(path: Path, rows: Rows, schema: Mapping[str, FieldSchema]) -> None:
    import numpy as np

    from dataplane.codec.dtypes import NUMPY_DTYPE

    arrays: dict[str, Any] = {"keys": np.array(rows.keys, dtype=np.str_)}
    for entry, name, value in _entries(rows):
        dtype = schema[name].dtype
        if dtype == OBJECT:
            _add(arrays, entry + ".json", np.array(to_text(value)))
        elif dtype in NUMPY_DTYPE:
            _add(arrays, entry, value.numpy())
        else:
            other = ".safetensors or .parquet" if dtype in SAFETENSORS else ".parquet"
            raise InvalidRequest(
                f"field {name!r} is {dtype}, which .npz has no type for: write {other}, where its "
                "bits are kept"
            )
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _write_safetensors(path: Path, rows: Rows, schema: Mapping[str, FieldSchema]) -> None:
    from safetensors import torch as safetensors

    tensors: dict[str, Any] = {}
    metadata: dict[str, str] = {"keys": json.dumps(rows.keys)}
    for entry, name, value in _entries(rows):
        dtype = schema[name].dtype
        if dtype == OBJECT:
            _add(metadata, entry, to_text(value))
            continue
        if dtype not in SAFETENSORS:
            raise InvalidRequest(
                f"field {name!r} is {dtype}, which .safetensors has no type for: write .parquet, "
                "where its bits are kept"
            )
        # Rows of a get lie side by side in one buffer; the format wants each on its own.
        _add(tensors, entry, value.clone())
    cast("Any", safetensors).save_file(tensors, path, metadata)


def _write_parquet(path: Path, rows: Rows, schema: Mapping[str, FieldSchema]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dataplane.cli.values.field_columns import cells_of, columns_of, string_columns

    arrays: list[Any] = [pa.array(rows.keys, pa.string())]
    for name, of in schema.items():
        values: Any = rows.fields[name]
        if of.dtype == OBJECT:
            values = [(value,) for value in values]
        arrays += cells_of(name, of, values, rows.keys)
    columns = pa.schema([pa.field("key", pa.string(), nullable=False), *columns_of(schema)])
    writer = pq.ParquetWriter(
        path, columns, compression="zstd", use_dictionary=string_columns(columns)
    )
    try:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=columns))
    finally:
        writer.close()
