"""What a report is made of, as plain values that can be written down and read again. Pure.

Owns the form of `plane.json`: what a plane knew of itself when a run was over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError

from dataplane.errors import InvalidRequest

FORMAT: Final = "dataplane-report"
VERSION: Final = 1
_NONE: Final = "that is no record of a plane for a report"
_INT64: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Waited:
    """For how long somebody was seen waiting for the same thing, all requests together."""

    kind: str
    """`rows`, `changes`, `claim` or `room`."""
    label: str
    """The client's label, or its id."""
    partition_id: str
    what: str
    """The task of a claim; the predicate of a wait."""
    waited_s: float


@dataclass(frozen=True, slots=True)
class PlaneSamples:
    """A plane's sizes over time. Each point tells of the seconds before it: the most of what goes
    up and down, the last of what only grows."""

    interval_s: float = 1.0
    """Between two points: it doubles whenever there are too many of them."""
    times_s: list[float] = field(default_factory=list[float])
    """Since 1970."""
    columns: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """keys, used_bytes, tag_bytes, held_bytes, waiting_rows, waiting_claims, waiting_room,
    open_groups, and what only grows: puts, rows_put, bytes_put, gets, rows_got, rows_committed,
    rows_cleared."""
    lags: list[tuple[str, str, list[float | None]]] = field(default_factory=list[Any])
    """Partition, task and, for each point, the rows that the task has not committed; None while
    there was no such task."""
    waits: list[Waited] = field(default_factory=list[Waited])
    """Who waited the longest, those first."""


@dataclass(frozen=True, slots=True)
class GroupLife:
    """When what happened to a group; None: it did not, or is not remembered. Seconds since 1970."""

    uid: str
    partition_id: str
    attempt: int
    status: str
    sessions: int
    rows: int
    begun_s: float
    first_row_s: float | None = None
    ended_s: float | None = None
    claimed_s: float | None = None
    committed_s: float | None = None
    cleared_s: float | None = None

    @property
    def last_s(self) -> float:
        """The last that is known of it."""
        known = (self.ended_s, self.claimed_s, self.committed_s, self.cleared_s, self.first_row_s)
        return max([self.begun_s, *(at for at in known if at is not None)])

    @property
    def is_open(self) -> bool:
        """Whether it has neither ended nor gone."""
        return self.ended_s is None and self.cleared_s is None


@dataclass(frozen=True, slots=True)
class PlaneRecord:
    """What a plane knew of itself at one moment."""

    name: str
    plane_id: str
    version: str
    at_s: float
    """When that was, in seconds since 1970."""
    uptime_s: float
    capacity_bytes: int
    status: dict[str, Any] = field(default_factory=dict[str, Any])
    """keys, clients, stores, open_groups, groups (by status), bytes_in_use, refused."""
    samples: PlaneSamples = field(default_factory=PlaneSamples)
    groups: list[GroupLife] = field(default_factory=list[GroupLife])
    """By begin, those that are remembered."""
    groups_left_out: int = 0
    gone: int = 0
    """Requests of which the plane remembers nothing any more: groups may be missing for that."""
    lengths: dict[str, dict[str, list[int]]] = field(
        default_factory=dict[str, dict[str, list[int]]]
    )
    """Partition, tag (prompt_len, response_len, seq_len), and the lengths of its last rows."""


def as_json(record: PlaneRecord) -> str:
    """The record as a JSON document."""
    document = {"format": FORMAT, "format_version": VERSION, **asdict(record)}
    return json.dumps(_finite(document), allow_nan=False, separators=(",", ":"))


def from_json(text: str | bytes) -> PlaneRecord:
    """The record that `as_json` wrote. InvalidRequest if it is none, or of another version: every
    value is looked at, since a file or an answer may come from anywhere."""
    try:
        document = json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_float)
        if not isinstance(document, dict):
            raise ValueError("it is no object")
        said = cast("dict[str, Any]", document)
        if said.get("format") != FORMAT:
            raise ValueError(f"its format is {said.get('format')!r:.80}, not {FORMAT!r}")
        if said.get("format_version") != VERSION:
            raise ValueError(
                f"it is of version {said.get('format_version')!r:.80}, and this reads {VERSION}"
            )
        record = _reader().validate_python(said)
        _check(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{_NONE}: {where:.200}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{_NONE}: {error!s:.200}") from error
    return record


@cache
def _reader() -> TypeAdapter[PlaneRecord]:
    return TypeAdapter(PlaneRecord)


def _int(text: str) -> int:
    value = int(text)
    if not -_INT64 <= value < _INT64:
        raise ValueError(f"{text:.40} is too large")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is not finite")
    return value


def _check(record: PlaneRecord) -> None:
    """ValueError where values do not go together."""
    samples = record.samples
    points = len(samples.times_s)
    named = [*samples.columns.items(), *((f"lag of {task}", of) for _, task, of in samples.lags)]
    for name, values in named:
        if len(values) != points:
            raise ValueError(f"{name:.80}: {len(values)} points, and there are {points} times")
    for name, value in record.status.items():
        if isinstance(value, dict) != (name == "groups"):
            raise ValueError(f"status {name:.80} is no count")
        counts = cast("dict[str, Any]", value) if isinstance(value, dict) else {name: value}
        if not all(type(count) is int for count in counts.values()):
            raise ValueError(f"status {name:.80} is no count")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {name: _finite(each) for name, each in entries.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in cast("Sequence[Any]", value)]
    return value
