"""Rows of a listing, put together to the groups of their prompts.

Owns what belongs to a group; what is wrong with one is for validity.py, whose turn it is for
replay.py. Keys are never parsed: `uid`, `session_id` and `index` are tags.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from dataplane.fields import LOST, LOST_ROWS
from trainer.trajectory import COMPLETED, Tags, Trajectory

RAGGED: Final = ("input_ids", "labels", "logprobs", "routed_experts")
"""Fields whose row lengths tell whether a trajectory fits together."""

FINISHED: Final = "finished"
FAILURE: Final = "failure"
IN_FLIGHT: Final = ("pending", "running")
STATUSES: Final = (*IN_FLIGHT, FINISHED, FAILURE)
"""Of prompts; the last two are final."""


@dataclass(frozen=True, slots=True)
class Row:
    """One key of a listing."""

    key: str
    tags: Tags
    fields: Collection[str] | None = None
    """Fields that it has; None if that is not known."""
    lengths: Mapping[str, int] | None = None
    """Length of each field's row, -1 where it has none; None if that is not known."""

    @property
    def is_prompt(self) -> bool:
        """Whether it stands for a prompt and not for a trajectory."""
        return self.tags.get("is_prompt") is True

    @property
    def is_padding(self) -> bool:
        """Whether it is a filler row, which is in no group and in no metric."""
        return self.tags.get("is_padding") is True

    @property
    def is_completed(self) -> bool:
        """Whether it is a trajectory that may be trained."""
        return self.tags.get("status") == COMPLETED and not self.is_padding

    @property
    def is_lost(self) -> bool:
        """Whether a value store that is gone has taken fields of it along."""
        return LOST in self.tags

    def has(self, name: str) -> bool | None:
        """Whether it has a field; None if that is not known."""
        if self.lengths is not None and self.lengths.get(name, -1) >= 0:
            return True
        if self.fields is not None:
            return name in self.fields
        return None if self.lengths is None or name not in RAGGED else False

    def trajectory(self) -> Trajectory:
        """The trajectory that it is; ValueError names the key and the tag that is missing."""
        return Trajectory.of(self.key, self.tags, self.fields, self.lengths)


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and what was generated for it."""

    uid: str
    status: str | None
    """One of STATUSES; None if the listing has no row of the prompt itself."""
    rows: tuple[Row, ...] = ()
    """Its trajectories, failed ones too, in the order of the listing."""
    prompt_key: str | None = None
    global_steps: int | None = None
    """Trainer step at which the prompt was submitted."""
    n: int | None = None
    """How many sessions it is to have."""
    lost_rows: int = 0
    """How many of its trajectories were lost, those included that were cleared since."""

    @property
    def completed(self) -> tuple[Row, ...]:
        """Its trajectories that may be trained."""
        return tuple(row for row in self.rows if row.is_completed)

    @property
    def is_lost(self) -> bool:
        """Whether trajectories of it were lost. It will never be as it was."""
        return self.lost_rows > 0 or any(row.is_lost for row in self.rows)

    @property
    def keys(self) -> list[str]:
        """The keys of its trajectories."""
        return [row.key for row in self.rows]

    @property
    def all_keys(self) -> list[str]:
        """The same and the prompt's: what is cleared together."""
        return [*([] if self.prompt_key is None else [self.prompt_key]), *self.keys]

    def sessions(self) -> dict[object, Row]:
        """The last completed trajectory of each session: sessions are what a group counts in."""
        last: dict[object, Row] = {}
        for row in self.completed:
            session = _tag(row, "session_id")
            if session not in last or _tag(last[session], "index") <= _tag(row, "index"):
                last[session] = row
        return last


class RowSource(Protocol):
    """What a listing offers of its rows."""

    @property
    def keys(self) -> Sequence[str]: ...
    @property
    def tags(self) -> Sequence[Tags]: ...
    @property
    def fields(self) -> Sequence[Collection[str]]: ...
    def lengths(self, name: str, /) -> Any:  # [B] int32
        ...


def rows_of(listing: RowSource) -> list[Row]:
    """The rows of a listing, with what their field lengths say."""
    columns = [listing.lengths(name).tolist() for name in RAGGED]
    return [
        Row(key, tags, fields, dict(zip(RAGGED, sizes, strict=True)))
        for key, tags, fields, *sizes in zip(
            listing.keys, listing.tags, listing.fields, *columns, strict=True
        )
    ]


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """The groups of these rows, in the order in which each first appears; filler rows in none.

    ValueError: a row has no uid, or a prompt's status is unknown.
    """
    prompts: dict[str, Row] = {}
    members: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_padding:
            continue
        uid = row.tags.get("uid")
        if not isinstance(uid, str):
            if not row.is_prompt:
                raise ValueError(f"key {row.key!r} has no tag 'uid' that says whose group it is in")
            uid = row.key
        found = members.setdefault(uid, [])
        if row.is_prompt:
            prompts[uid] = row
        else:
            found.append(row)
    return [_group(uid, prompts.get(uid), rows) for uid, rows in members.items()]


def in_stable_order(groups: Iterable[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """Members by session and index, groups by uid: the order of deterministic runs, in which rows
    must not follow the order of their arrival."""
    ordered = [
        sorted(g, key=lambda t: (isinstance(t.session_id, str), t.session_id, t.index))
        for g in groups
    ]
    return sorted(ordered, key=lambda g: min((t.uid for t in g), default=""))


def _group(uid: str, prompt: Row | None, rows: list[Row]) -> Group:
    if prompt is None:
        return Group(uid, None, tuple(rows))
    status = prompt.tags.get("status")
    if status not in STATUSES:
        raise ValueError(
            f"prompt {prompt.key!r} has the status {status!r}; one of {', '.join(STATUSES)}"
        )
    step, n, lost = (_number(prompt, tag) for tag in ("global_steps", "n", LOST_ROWS))
    return Group(uid, cast("str", status), tuple(rows), prompt.key, step, n, lost or 0)


def _number(prompt: Row, tag: str) -> int | None:
    value = prompt.tags.get(tag)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"tag {tag!r} of prompt {prompt.key!r} is {value!r:.80}, not a number")
    return value


def _tag(row: Row, tag: str) -> Any:
    value = row.tags.get(tag)
    if value is None:
        raise ValueError(
            f"key {row.key!r} has no tag {tag!r}: its producer did not call write_train_meta"
        )
    return value
