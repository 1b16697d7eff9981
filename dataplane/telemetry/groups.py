"""Which groups a call is about: by tags and by what this client has seen of keys. Pure.

A uid comes from tags, of the call or of an earlier answer; a key is never parsed. A row of which no
uid is known is followed by its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

MAX_KEYS: Final = 65_536
"""Keys whose uids are remembered."""
MAX_GROUPS: Final = 32
"""Groups of one call that have spans of it."""


class Group(NamedTuple):
    """A group as a call is about it."""

    identity: str
    """Its uid, or the key of a row without one."""
    begins: bool = False
    """Whether the call is what begins it."""


class Known:
    """The uids of keys and attempts that a client has met. Not for several threads at once."""

    def __init__(self) -> None:
        self._uids: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._attempts: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._begun: OrderedDict[tuple[str, str], None] = OrderedDict()

    def learn(self, partition_id: str, keys: Iterable[str], uids: Iterable[object]) -> None:
        """These keys are of these groups."""
        for key, uid in zip(keys, uids, strict=False):
            if type(uid) is str:
                _put(self._uids, (partition_id, key), uid)

    def learn_rows(self, partition_id: str, rows: Any) -> None:
        """What a listing or a batch says of its keys."""
        if len(rows) > MAX_KEYS:
            return
        names = getattr(rows, "tag_names", None)
        if names is None:
            self.learn(partition_id, rows.keys, (tags.get("uid") for tags in rows.tags))
        elif "uid" in names:
            self.learn(partition_id, rows.keys, rows.column("uid").tolist())

    def began(self, attempt: int, partition_id: str, uid: str) -> None:
        """An attempt is at this group."""
        _put(self._attempts, attempt, (partition_id, uid))

    def of_attempt(self, attempt: int | None) -> tuple[str, str] | None:
        """The partition and the group of an attempt, if it was begun here."""
        return None if attempt is None else self._attempts.get(attempt)

    def of_keys(self, partition_id: str, keys: Sequence[str]) -> list[Group]:
        """The groups of these keys, each once."""
        uids = self._uids
        found = dict.fromkeys(uids.get((partition_id, key), key) for key in keys)
        return [Group(identity) for identity in found]

    def of_put(
        self,
        partition_id: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, object]],
        attempt: int | None,
        *,
        must_exist: bool,
    ) -> list[Group]:
        """The groups of rows that are put. A prompt's row begins its group, and a row of no group
        itself, the first time that it is put."""
        begun = self.of_attempt(attempt)
        of_attempt = None if begun is None else begun[1]
        found: dict[str, bool] = {}
        for at, key in enumerate(keys):
            mine: Mapping[str, object] = tags[at] if at < len(tags) else {}
            uid = mine.get("uid")
            if type(uid) is str:
                _put(self._uids, (partition_id, key), uid)
            else:
                uid = self._uids.get((partition_id, key), of_attempt)
            identity = key if uid is None else uid
            begins = not must_exist and (uid is None or mine.get("is_prompt") is True)
            if begins:
                begins = (partition_id, identity) not in self._begun
                _put(self._begun, (partition_id, identity), None)
            found[identity] = found.get(identity, False) or begins
        return [Group(identity, begins) for identity, begins in found.items()]


def uids_in(where: Any) -> list[str]:
    """The uids that a predicate is about, where it is about some by name."""
    if not isinstance(where, Mapping):
        return []
    predicate = cast("Mapping[str, Any]", where)
    named: Any = predicate.get("uid")
    if isinstance(named, Mapping):
        terms = cast("Mapping[str, Any]", named)
        named = terms.get("in", terms.get("="))
    if isinstance(named, str):
        return [named]
    listed = cast("Sequence[Any]", named) if isinstance(named, (list, tuple)) else ()
    return [uid for uid in listed if type(uid) is str]


def _put(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    if len(table) > MAX_KEYS:
        table.popitem(last=False)
