"""What the controller answers: as it travels, and as callers get it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .registry import PartitionRows, keyless

if TYPE_CHECKING:
    import torch

Status = tuple["torch.Tensor | None", "torch.Tensor | None"]
"""Indexes, and what is true of each row; nothing where there is no such partition."""


class Answer(NamedTuple):
    """Rows of a partition, column by column. Letters: N rows, S sets of fields."""

    indexes: list[int]  # [N]
    keys: list[str]  # [N], as the plane has them
    tags: list[dict[str, Any]]  # [N]
    names: list[str]
    """The fields that the batch is about."""
    sets: list[list[str]]  # [S]
    codes: list[int]  # [N], which of the sets a row has


def no_rows() -> Answer:
    """The answer where there is nothing."""
    return Answer([], [], [], [], [], [])


def answer_of(rows: PartitionRows, indexes: Sequence[int], names: list[str]) -> Answer:
    """These rows of a partition; indexes that were given out ahead of rows have no fields."""
    sets: dict[tuple[str, ...], int] = {}
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    codes: list[int] = []
    for index in indexes:
        row = rows.row(index)
        keys.append(keyless(index) if row is None else row.key)
        tags.append({} if row is None else row.tags)
        codes.append(sets.setdefault(() if row is None else row.fields, len(sets)))
    return Answer(list(indexes), keys, tags, names, [list(fields) for fields in sets], codes)


def as_status(told: Any) -> Status:
    """A status as tensors: [N] int64, and [N] or [N, F] int8."""
    import torch

    if told is None:
        return None, None
    indexes, flags = told
    return torch.tensor(indexes, dtype=torch.long), torch.tensor(flags, dtype=torch.int8)


def all_set(indexes: Any, flags: Any, *, of_none: bool = False) -> bool:
    """Whether all flags are set; `of_none` says what is true of none at all."""
    if indexes is None:
        return False
    return bool((flags == 1).all()) if len(indexes) else of_none
