"""Columns of a `BatchMeta`: one entry per row, and what is refused where that is not so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def as_many(name: str, column: Any, size: int) -> None:
    """Raises ValueError unless a column has one entry per row."""
    if len(column) != size:
        raise ValueError(f"Length mismatch: {name} has {len(column)} entries for {size} rows")


def dictionaries(
    name: str, given: Sequence[dict[str, Any]] | None, size: int
) -> list[dict[str, Any]]:
    """One dictionary per row, of the batch's own; empty ones where nothing is given."""
    if not given:
        return [{} for _ in range(size)]
    as_many(name, given, size)
    return [dict(row) for row in given]


def must_equal(name: str, mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Raises ValueError unless two batches have the same column."""
    if len(mine) != len(theirs):
        raise ValueError(f"{name} do not match: {len(mine)} rows and {len(theirs)}")
    for row, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one != other:
            raise ValueError(f"{name} do not match: at row {row}, {one!r} and {other!r}")


def keys_by_index(pairs: Iterable[tuple[int, str | None]]) -> dict[int, str]:
    """Keys by index, of those that are known. Raises ValueError for an index with two."""
    keys: dict[int, str] = {}
    for index, key in pairs:
        if key is not None and keys.setdefault(index, key) != key:
            raise ValueError(
                f"the row of index {index} has the keys {keys[index]!r} and {key!r}: these batches "
                "are of two instances"
            )
    return keys
