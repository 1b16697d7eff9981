"""Lives of groups, put together from what a plane remembers of its last requests. Pure.

Entries come in order. A row belongs to the group whose attempt its put named; what was claimed,
committed and cleared afterwards is told by keys.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from dataplane.report.record import GroupLife

KEPT: Final = 1500
"""Of the newest groups ..."""
KEPT_LONGEST: Final = 500
"""... and of the others that took longest."""
LENGTHS: Final = ("prompt_len", "response_len", "seq_len")
MAX_LENGTHS: Final = 20_000
"""Rows of a partition whose lengths are kept: the last ones."""


class _Life:
    """A group as it is put together."""

    __slots__ = ("at", "attempt", "left", "partition_id", "rows", "sessions", "status", "uid")

    def __init__(self, partition_id: str, uid: str, attempt: int, sessions: int, at: float) -> None:
        self.partition_id = partition_id
        self.uid = uid
        self.attempt = attempt
        self.sessions = sessions
        self.status = "running"
        self.rows = 0
        self.left = {uid}
        """Its keys that are there."""
        self.at: dict[str, float] = {"begun_s": at}

    def told(self) -> GroupLife:
        """What is known of it."""
        return GroupLife(
            uid=self.uid, partition_id=self.partition_id, attempt=self.attempt, status=self.status,
            sessions=self.sessions, rows=self.rows, **self.at,
        )  # fmt: skip


class Lives:
    """The groups that entries of a trace speak of, and the lengths of rows."""

    def __init__(self) -> None:
        self._by_attempt: dict[int, _Life] = {}
        self._by_key: dict[tuple[str, str], _Life] = {}
        self._lengths: dict[str, dict[str, deque[int]]] = {}

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """The next entries."""
        for entry in entries:
            take = getattr(self, f"_{entry.get('op')}", None)
            if take is not None:
                take(entry, float(entry["at"]))

    def groups(self) -> tuple[list[GroupLife], int]:
        """Groups by begin, the newest and the longest, and how many were left out."""
        lives = sorted((life.told() for life in self._by_attempt.values()), key=lambda g: g.begun_s)
        if len(lives) <= KEPT + KEPT_LONGEST:
            return lives, 0
        older, newest = lives[:-KEPT], lives[-KEPT:]
        longest = sorted(older, key=lambda g: g.last_s - g.begun_s)[-KEPT_LONGEST:]
        chosen = sorted([*longest, *newest], key=lambda g: g.begun_s)
        return chosen, len(lives) - len(chosen)

    def outcomes(self) -> dict[str, int]:
        """How many groups have which status, those that are left out included."""
        return dict(Counter(life.status for life in self._by_attempt.values()))

    def lengths(self) -> dict[str, dict[str, list[int]]]:
        """Lengths of the last rows, by partition and tag."""
        return {
            partition_id: {name: list(values) for name, values in by_name.items()}
            for partition_id, by_name in self._lengths.items()
        }

    # -- by what happened ---------------------------------------------------------------------

    def _begin(self, entry: Mapping[str, Any], at: float) -> None:
        partition_id, uid = str(entry["partition"]), str(entry["uid"])
        older = self._by_key.get((partition_id, uid))
        if older is not None and "cleared_s" not in older.at:
            older.at["cleared_s"] = at  # it begins anew
        life = _Life(partition_id, uid, int(entry["attempt"]), int(entry["sessions"]), at)
        self._by_attempt[life.attempt] = life
        self._by_key[partition_id, uid] = life

    def _put(self, entry: Mapping[str, Any], at: float) -> None:
        life = self._by_attempt.get(entry.get("attempt") or -1)
        partition_id = str(entry["partition"])
        for key, tags, *_ in entry["rows"]:
            if tags and not entry.get("must_exist"):
                self._measure(partition_id, tags)
            if life is not None and key not in life.left:
                life.rows += 1
                life.left.add(key)
                self._by_key[partition_id, key] = life
                life.at.setdefault("first_row_s", at)

    _tag = _put

    def _end(self, entry: Mapping[str, Any], at: float) -> None:
        life = self._by_attempt.get(int(entry["attempt"]))
        if life is not None:
            life.status = str(entry["status"])
            life.at["ended_s"] = at

    def _claim(self, entry: Mapping[str, Any], at: float) -> None:
        for key, *_ in entry["rows"]:
            life = self._by_key.get((str(entry["partition"]), key))
            if life is not None:
                life.at.setdefault("claimed_s", at)

    def _commit(self, entry: Mapping[str, Any], at: float) -> None:
        for life in self._of(entry):
            life.at["committed_s"] = at

    def _clear(self, entry: Mapping[str, Any], at: float) -> None:
        partition_id = str(entry["partition"])
        keys = entry.get("keys")
        if keys is None:
            if not entry.get("where"):  # all of it; which rows a predicate meant is not known
                for life in self._by_attempt.values():
                    if life.partition_id == partition_id:
                        life.at.setdefault("cleared_s", at)
            return
        for key in keys:
            life = self._by_key.pop((partition_id, key), None)
            if life is not None:
                life.left.discard(key)
                if not life.left or entry.get("retire"):
                    life.at.setdefault("cleared_s", at)

    def _drop(self, entry: Mapping[str, Any], at: float) -> None:
        gone = set(cast("Iterable[str]", entry["partitions"]))
        for life in self._by_attempt.values():
            if life.partition_id in gone:
                life.at.setdefault("cleared_s", at)

    def _of(self, entry: Mapping[str, Any]) -> set[_Life]:
        """Groups that its keys belong to."""
        partition_id = str(entry["partition"])
        found = (self._by_key.get((partition_id, key)) for key in entry["keys"])
        return {life for life in found if life is not None}

    def _measure(self, partition_id: str, tags: Mapping[str, Any]) -> None:
        by_name = self._lengths.setdefault(partition_id, {})
        for name in LENGTHS:
            length = tags.get(name)
            if type(length) is int and length >= 0 and not tags.get("is_padding"):
                by_name.setdefault(name, deque(maxlen=MAX_LENGTHS)).append(length)
