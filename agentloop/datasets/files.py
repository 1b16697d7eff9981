"""Dataset files as rows: parquet by pyarrow, json and jsonl by the standard library.

Not by pyarrow's reader of JSON: it gives one type to a column, so it turns text that looks like a
date into a date, and refuses messages whose content is text here and a list there.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from agentloop.datasets.prompt import DatasetError

_BATCH_ROWS: Final = 1024


class FileRows:
    """The rows of files, one file after the other. They are read whole, and kept in memory."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """
        Raises:
            DatasetError: a file is not there, has no known suffix, or cannot be read.
        """
        if not paths:
            raise DatasetError("a dataset of files needs at least one path")
        self._tables = [_read(Path(path)) for path in paths]
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> Mapping[str, Any]:
        table, inside = self._find(index)
        return table.row(inside)

    def scan(self, without: Collection[str]) -> Iterator[Mapping[str, Any]]:
        for table in self._tables:
            yield from table.scan(without)

    def where(self, index: int) -> str:
        table, inside = self._find(index)
        return table.where(inside)

    def _find(self, index: int) -> tuple[_Table, int]:
        which = bisect_right(self._ends, index)
        return self._tables[which], index - (self._ends[which - 1] if which else 0)


class _Table(Protocol):
    """The rows of one file."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> Mapping[str, Any]: ...
    def scan(self, without: Collection[str]) -> Iterator[Mapping[str, Any]]: ...
    def where(self, index: int) -> str: ...


class _Parquet:
    """Columns stay in Arrow's memory; a row becomes Python objects when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            file = pq.ParquetFile(str(path))
            try:
                self._batches = list(file.iter_batches(_BATCH_ROWS))
            finally:
                file.close()
        except pa.ArrowException as error:
            raise DatasetError(f"{path} is no parquet file: {error}") from error
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Mapping[str, Any]:
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        return self._batches[which].slice(index - start, 1).to_pylist()[0]

    def scan(self, without: Collection[str]) -> Iterator[Mapping[str, Any]]:
        for batch in self._batches:
            names = [name for name in batch.schema.names if name not in without]
            yield from batch.select(names).to_pylist()

    def where(self, index: int) -> str:
        return f"{self._path}, row {index}"


class _Json:
    """Rows of a JSON file, with the line that each stands in where there are lines."""

    def __init__(self, path: Path, rows: list[dict[str, Any]], lines: list[int] | None) -> None:
        self._path = path
        self._rows = rows
        self._lines = lines

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def scan(self, without: Collection[str]) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def where(self, index: int) -> str:
        if self._lines is None:
            return f"{self._path}, entry {index}"
        return f"{self._path}, line {self._lines[index]}"


def _read(path: Path) -> _Table:
    if not path.is_file():
        raise DatasetError(f"there is no file {path}")
    try:
        match path.suffix.lower():
            case ".parquet":
                return _Parquet(path)
            case ".json" | ".jsonl" | ".ndjson":
                return _read_json(path)
            case suffix:
                raise DatasetError(
                    f"{path}: {suffix!r} is none of .parquet, .json, .jsonl, .ndjson"
                )
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> _Json:
    """One list of objects, or one object in each line; a file of either suffix may be either."""
    with path.open(encoding="utf-8-sig") as file:
        if _first_sign(file.read(4096)) == "[":
            file.seek(0)
            rows = _parsed(file.read(), str(path))
            if not isinstance(rows, list):
                raise DatasetError(f"{path} holds a {type(rows).__name__}, not a list of rows")
            listed = cast(list[Any], rows)
            return _Json(
                path, [_object(r, f"{path}, entry {i}") for i, r in enumerate(listed)], None
            )
        file.seek(0)
        found: list[dict[str, Any]] = []
        lines: list[int] = []
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                found.append(_object(_parsed(line, where), where))
                lines.append(number)
        return _Json(path, found, lines)


def _first_sign(text: str) -> str:
    return text.lstrip()[:1]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where} is no JSON: {error}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DatasetError(f"{where} is a {type(value).__name__}, not an object")
    return cast(dict[str, Any], value)
