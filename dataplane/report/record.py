"""What a report is made of, as plain values that can be written down and read again. Pure.

Owns the form of `plane.json`: what a plane knew of itself when a run was over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, TypeVar, cast

from dataplane.errors import InvalidRequest

FORMAT: Final = "dataplane-report"
VERSION: Final = 1

Plain = TypeVar("Plain")


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


def from_json(text: str) -> PlaneRecord:
    """The record that `as_json` wrote. InvalidRequest if it is none, or of another version."""
    try:
        document = cast("dict[str, Any]", json.loads(text))
        if document.get("format") != FORMAT:
            raise ValueError(f"its format is {document.get('format')!r:.80}, not {FORMAT!r}")
        if document.get("format_version") != VERSION:
            raise ValueError(
                f"it is of version {document.get('format_version')!r:.80}, and this reads {VERSION}"
            )
        samples = cast("dict[str, Any]", document["samples"])
        waits = [_read(Waited, each) for each in samples["waits"]]
        lags = [(str(p), str(t), list(values)) for p, t, values in samples["lags"]]
        samples = {**samples, "waits": waits, "lags": lags}
        groups = [_read(GroupLife, each) for each in document["groups"]]
        return _read(
            PlaneRecord,
            {**document, "samples": _read(PlaneSamples, samples), "groups": groups},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"that is no record of a plane for a report: {error}") from error


def _read(kind: type[Plain], values: Mapping[str, Any]) -> Plain:
    names = {each.name for each in fields(cast("Any", kind))}
    return kind(**{name: value for name, value in values.items() if name in names})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {name: _finite(each) for name, each in entries.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in cast("Sequence[Any]", value)]
    return value
