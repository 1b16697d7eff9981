"""One key as a trace follows it: its tags, its fields and whether it is there, request by request.

Pure. What was before the first request that is remembered is not known, and is not made up: but who
a row is (uid, session, index) never changes, so its tags of today tell that too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dataplane.codec.shapes import ITEM_BYTES, OBJECT
from dataplane.lineage.rows import TraceRow

IDENTITY: Final = ("uid", "session_id", "index", "is_prompt", "is_padding")
"""Tags that a row has from its begin to its end."""


@dataclass(slots=True)
class Cell:
    """A field that a row has."""

    row: TraceRow
    """Where it was written."""
    place: tuple[str, int | None]
    """Value store and block."""
    readers: dict[str, str] = field(default_factory=dict[str, str])
    """Clients that have read it, and what they are called."""
    hash: str = ""


@dataclass(slots=True)
class Life:
    """What is known of a key at some moment."""

    partition: str
    key: str
    today: Mapping[str, Any]
    """Tags that it has when the trace is asked for; empty if it is not there any more."""
    exists: bool = False
    gen: int = 0
    tags: dict[str, Any] = field(default_factory=dict[str, Any])
    wrote: dict[str, TraceRow] = field(default_factory=dict[str, TraceRow])
    """The row that wrote each tag last."""
    cells: dict[str, Cell] = field(default_factory=dict[str, Cell])
    attempt: int | None = None
    changed: int = 0
    """The revision of its last change."""
    cleared: TraceRow | None = None
    """The last clear of it."""
    made: TraceRow | None = None
    """The first row of the put that made it."""
    was: dict[str, Any] = field(default_factory=dict[str, Any])
    """Who the row was, of a key that is not there any more."""
    readings: list[tuple[Cell, TraceRow]] = field(default_factory=list[Any])
    """Reads of which no hash came yet, by what was read."""

    @property
    def is_prompt(self) -> bool:
        return self.tag("is_prompt") is True

    @property
    def is_padding(self) -> bool:
        return self.tag("is_padding") is True

    def tag(self, name: str) -> Any:
        """A tag as it is at that moment; of who the row is also as it was, or is today."""
        value = self.tags.get(name)
        if value is None and name in IDENTITY:
            return self.was.get(name, self.today.get(name))
        return value

    def number(self, name: str) -> int | None:
        """A tag that is to be a whole number; None where it is not."""
        value = self.tag(name)
        return value if type(value) is int else None

    def end(self, row: TraceRow | None) -> None:
        """The row is gone."""
        self.exists = False
        self.was = {name: value for name in IDENTITY if (value := self.tag(name)) is not None}
        self.tags = {}
        self.wrote = {}
        self.cells = {}
        self.attempt = None
        if row is not None:
            self.cleared = row
            self.changed = row.n

    def fill(self, row: TraceRow) -> TraceRow:
        """The columns that tags give."""
        uid = self.tag("uid")
        row.key, row.partition = self.key, self.partition
        row.uid = uid if isinstance(uid, str) else None
        row.session_id, row.index = self.number("session_id"), self.number("index")
        row.is_padding = self.is_padding
        row.mask_sum = self.number("policy_len")
        row.global_steps = self.number("global_steps")
        row.min_global_steps = self.number("min_global_steps")
        row.max_global_steps = self.number("max_global_steps")
        row.gen = self.gen
        return row


def shaped(row: TraceRow, dtype: str, ragged: int | None, shape: list[int]) -> TraceRow:
    """The row with what a field's value looks like."""
    row.dtype, row.shape = dtype, shape
    nbytes = ITEM_BYTES.get(dtype, 1)
    for size in shape:
        nbytes *= size
    row.bytes = nbytes
    if dtype == OBJECT:
        row.layout, row.shape = OBJECT, None
    elif ragged is None or ragged >= len(shape):
        row.layout = "dense"
    else:
        row.layout = f"jagged({ragged})"
        row.len = row.valid_len = shape[ragged]
    return row
