"""What differs between two groups, or between the same group in two runs. Pure.

Rows are matched by session, index, stage, operation and field, and among equals by their order;
keys, revisions and times differ in any case and say nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from dataplane.lineage.rows import TraceRow

COMPARED: Final = (
    "status", "dtype", "layout", "shape", "len", "valid_len", "mask_sum", "is_padding", "gen",
)  # fmt: skip
MISSING: Final = "row"
"""The column of a difference that is a whole row which the other has not."""

_Place = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One column of one row that is not the same."""

    session_id: int | None
    index: int | None
    stage: str
    op: str
    field: str
    column: str
    left: Any
    right: Any


def differences(left: Iterable[TraceRow], right: Iterable[TraceRow]) -> list[Difference]:
    """Everything that differs, in the order of the left one; what only the right has comes last."""
    ours, theirs = _placed(left), _placed(right)
    found: list[Difference] = []
    for place, one in ours.items():
        other = theirs.get(place)
        if other is None:
            found.append(_difference(one, MISSING, "there", "missing"))
            continue
        columns = [*COMPARED]
        if one.hash and other.hash:
            columns.append("hash")
        for column in columns:
            left_cell, right_cell = getattr(one, column), getattr(other, column)
            if left_cell != right_cell:
                found.append(_difference(one, column, left_cell, right_cell))
    for place, other in theirs.items():
        if place not in ours:
            found.append(_difference(other, MISSING, "missing", "there"))
    return found


def _difference(row: TraceRow, column: str, left: Any, right: Any) -> Difference:
    return Difference(row.session_id, row.index, row.stage, row.op, row.field, column, left, right)


def _placed(rows: Iterable[TraceRow]) -> dict[_Place, TraceRow]:
    placed: dict[_Place, TraceRow] = {}
    met: Counter[_Place] = Counter()
    for row in rows:
        place = (row.session_id, row.index, row.stage, row.op, row.field)
        placed[*place, met[place]] = row
        met[place] += 1
    return placed
