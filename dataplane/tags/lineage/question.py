"""What is looked for in a lineage, and which rows that turned out to be. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from dataplane.errors import InvalidRequest

MAX_LIMIT: Final = 100_000

Place = tuple[str, str]
"""A partition and a key."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is looked for."""

    partition_id: str | None = None
    """None: in all partitions."""
    uid: str | None = None
    key: str | None = None
    since: int = 0
    """The number of the first entry to look at."""
    limit: int = MAX_LIMIT
    """Rows of all entries together, at most."""
    among: frozenset[str] | None = None
    """The only partitions that are spoken of."""

    @classmethod
    def checked(
        cls, partition_id: Any, uid: Any, key: Any, since: Any, limit: Any, among: Any = None
    ) -> Question:
        """The question that travelled. InvalidRequest if it is none."""
        for name, value in (("partition_id", partition_id), ("uid", uid), ("key", key)):
            if value is not None and type(value) is not str:
                raise InvalidRequest(f"trace: {name} is a string or nothing, not {value!r:.80}")
        if uid is not None and key is not None:
            raise InvalidRequest("trace follows a uid or a key, not both")
        if type(since) is not int or not 0 <= since < 1 << 63:
            raise InvalidRequest(f"trace: since is the number of an entry, not {since!r:.80}")
        if type(limit) is not int or not 0 < limit <= MAX_LIMIT:
            raise InvalidRequest(f"trace: limit is 1 to {MAX_LIMIT}, not {limit!r:.80}")
        if among is not None and not _are_strings(among):
            raise InvalidRequest("trace: among is a list of partition names, or nothing")
        return cls(
            partition_id, uid, key, since, limit, None if among is None else frozenset(among)
        )

    @property
    def is_open(self) -> bool:
        """Whether nothing is left out by its partition."""
        return self.partition_id is None and self.among is None

    def speaks_of(self, partition_id: str) -> bool:
        """Whether what concerns this partition is told."""
        return (self.partition_id is None or partition_id == self.partition_id) and (
            self.among is None or partition_id in self.among
        )


def _are_strings(names: Any) -> bool:
    return type(names) is list and all(type(name) is str for name in cast("list[Any]", names))


@dataclass(slots=True)
class Wanted:
    """The rows that are looked for; None for all."""

    places: set[Place] | None = None
    attempts: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """Begins of groups that were met, or are known: their partition and uid."""
    uid: str | None = None

    def of(self, partition_id: str, keys: Iterable[str]) -> list[int]:
        """Which of the keys are wanted, by their places in the list."""
        places = self.places
        if places is None:
            return list(range(len(cast("Any", keys))))
        return [i for i, key in enumerate(keys) if (partition_id, key) in places]
