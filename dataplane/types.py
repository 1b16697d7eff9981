"""The values that callers hold: revisions, batches of keys and tags. No I/O, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

from dataplane.errors import InvalidRequest, KeyNotFound, quote

Setting = TypeVar("Setting")

Scalar = None | bool | int | float | str
TagValue = Scalar | list["TagValue"] | dict[str, "TagValue"]
Tags = dict[str, TagValue]
"""The tags of one key: small JSON-like values, up to 64 KiB packed."""


class Revision(NamedTuple):
    """A position in a plane's history. Later positions compare greater."""

    epoch: int
    """Which start of the tag store; a new start begins a new epoch."""
    n: int
    """Number of changes before and including this one."""


class FieldSchema(NamedTuple):
    """What a partition fixed for a field at its first write."""

    dtype: str
    rank: int
    ragged_dim: int | None


@dataclass(frozen=True, slots=True)
class KVBatchMeta:
    """A batch by name: its keys, their tags, and which fields they have. It holds no value.

    Methods return new batches and leave this one as it is.
    """

    partition_id: str
    keys: list[str]
    tags: list[Tags]
    fields: list[str] = field(default_factory=list[str])
    """Fields that the call wrote or selected; sorted."""
    revision: Revision | None = None
    """The revision that the call made or read."""

    def __post_init__(self) -> None:
        if len(self.tags) != len(self.keys):
            raise InvalidRequest(f"{len(self.tags)} tags for {len(self.keys)} keys")
        if len(set(self.keys)) != len(self.keys):
            seen: set[str] = set()
            twice = [key for key in self.keys if key in seen or seen.add(key)]
            raise InvalidRequest(f"a batch names each key once; repeated: {quote(twice)}")

    @classmethod
    def checked(
        cls,
        partition_id: str,
        keys: list[str],
        tags: list[Tags],
        fields: list[str],
        revision: Revision | None,
    ) -> KVBatchMeta:
        """The batch of parts that are known to fit together: a put checked them already."""
        meta = object.__new__(cls)
        put = object.__setattr__
        put(meta, "partition_id", partition_id)
        put(meta, "keys", keys)
        put(meta, "tags", tags)
        put(meta, "fields", fields)
        put(meta, "revision", revision)
        return meta

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, keys: Iterable[str]) -> KVBatchMeta:
        """The batch of these keys, in this order. KeyNotFound names keys it does not have."""
        wanted = list(keys)
        place = {key: i for i, key in enumerate(self.keys)}
        missing = [key for key in wanted if key not in place]
        if missing:
            raise KeyNotFound(
                f"the batch has no key {quote(missing)}",
                partition_id=self.partition_id,
                keys=missing,
            )
        return self._take([place[key] for key in wanted])

    def reorder(self, order: Sequence[int]) -> KVBatchMeta:
        """The same batch with row `order[i]` at place i; `order` is a permutation."""
        if sorted(order) != list(range(len(self.keys))):
            raise InvalidRequest(f"the order is not a permutation of {len(self.keys)} rows")
        return self._take(order)

    def chunk(self, n: int) -> list[KVBatchMeta]:
        """Exactly n parts in order, sizes differing by at most one; trailing ones may be empty.

        Example: 9 keys in 4 parts are 3, 2, 2, 2.
        """
        if n < 1:
            raise InvalidRequest(f"a batch is cut in 1 part or more, not {n}")
        size, extra = divmod(len(self.keys), n)
        parts: list[KVBatchMeta] = []
        start = 0
        for i in range(n):
            stop = start + size + (i < extra)
            parts.append(self._take(range(start, stop)))
            start = stop
        return parts

    @staticmethod
    def concat(batches: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """One batch of all rows in order. They share a partition and no key.

        `fields` are those that every part has; `revision` is the latest of them.
        """
        if not batches:
            raise InvalidRequest("nothing to concatenate")
        partitions = {batch.partition_id for batch in batches}
        if len(partitions) > 1:
            raise InvalidRequest(f"batches of different partitions: {quote(sorted(partitions))}")
        fields = set(batches[0].fields)
        for batch in batches[1:]:
            fields &= set(batch.fields)
        revisions = [batch.revision for batch in batches if batch.revision is not None]
        return KVBatchMeta(
            batches[0].partition_id,
            [key for batch in batches for key in batch.keys],
            [tags for batch in batches for tags in batch.tags],
            sorted(fields),
            max(revisions, default=None),
        )

    def _take(self, order: Iterable[int]) -> KVBatchMeta:
        order = list(order)
        return KVBatchMeta(
            self.partition_id,
            [self.keys[i] for i in order],
            [self.tags[i] for i in order],
            list(self.fields),
            self.revision,
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows that a consumer holds under a lease, until it commits or releases them."""

    task: str
    claim_id: int
    meta: KVBatchMeta
    """The claimed rows: keys and tags as they were when they were claimed."""
    deliveries: list[int]
    """How often each row has been offered to the task, this time included. # [B]"""
    end: bool = False
    """The partition is sealed and the task has committed every row: there is nothing to come."""

    @property
    def partition_id(self) -> str:
        """The partition of the claimed rows."""
        return self.meta.partition_id

    @property
    def keys(self) -> list[str]:
        """The claimed keys, in the order in which they are offered."""
        return self.meta.keys

    @property
    def tags(self) -> list[Tags]:
        """The tags of each claimed key."""
        return self.meta.tags

    def __len__(self) -> int:
        return len(self.meta)

    def without(self, keys: Iterable[str]) -> Claim:
        """The claim less these keys: what is left of it after a ClaimLost that named them."""
        gone = set(keys)
        left = [i for i, key in enumerate(self.meta.keys) if key not in gone]
        meta = self.meta.select([self.meta.keys[i] for i in left])
        return replace(self, meta=meta, deliveries=[self.deliveries[i] for i in left])


@dataclass(frozen=True, slots=True)
class Change:
    """What whole revisions of a partition changed, as a watch tells it."""

    revision: Revision
    """The last revision that is told; a watch resumed from it goes on with the next."""
    rows: KVBatchMeta
    """Rows that were written and are there: each once, with its tags as of `revision` or later."""
    cleared: list[str]
    """Keys that were cleared and are still gone."""
    full: bool = False
    """History does not reach back to where the watch was to begin: `rows` is everything there is,
    and any key that is not among them is gone."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a partition may hold; None is no limit. Bytes are of extents, tags included."""

    bytes: int | None = None
    rows: int | None = None
    producer_bytes: int | None = None
    producer_rows: int | None = None
    """What one producer (a client) may have in it."""
    group_bytes: int | None = None
    """What `begin_group` reserves for a group that declares nothing."""

    def __post_init__(self) -> None:
        for name in ("bytes", "rows", "producer_bytes", "producer_rows", "group_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 < value < 1 << 63):
                raise InvalidRequest(f"quota.{name} is a positive number, not {value!r:.80}")
        for limit in ("bytes", "producer_bytes"):
            room = getattr(self, limit)
            if room is not None and self.group_bytes is not None and room < self.group_bytes:
                raise InvalidRequest(
                    f"quota.{limit} ({room}) is less than one group (group_bytes "
                    f"{self.group_bytes}): no group could ever begin"
                )

    def limits(self) -> dict[str, int]:
        """The limits that are set, by name."""
        names = ("bytes", "rows", "producer_bytes", "producer_rows", "group_bytes")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @classmethod
    def of(cls, quota: Quota | Mapping[str, int | None] | None) -> Quota | None:
        """The quota that a caller gave, checked."""
        return _given(cls, "quota", quota)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long versions of a partition family are kept (`weights@16`, `weights@17`)."""

    versions: int
    """How many sealed versions are kept: sealing one drops those before the last so many."""

    def __post_init__(self) -> None:
        if type(self.versions) is not int or self.versions < 1:
            raise InvalidRequest(
                f"retention.versions is a number from 1 on, not {self.versions!r:.80}"
            )

    @classmethod
    def of(cls, retention: Retention | Mapping[str, int] | None) -> Retention | None:
        """The retention that a caller gave, checked."""
        return _given(cls, "retention", retention)


def _given(
    kind: type[Setting], name: str, given: Setting | Mapping[str, Any] | None
) -> Setting | None:
    """A setting of a partition as a caller gave it: made already, or by the names of its parts."""
    if given is None or isinstance(given, kind):
        return given
    try:
        return kind(**cast("Mapping[str, Any]", given))
    except TypeError as error:
        raise InvalidRequest(f"{name}: {error}") from None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why something waits: what matches, what does not and why, and who is waited for."""

    text: str
    """All of it in words, as deadline errors carry it."""
    matching: int = 0
    """Rows (or whole groups) that match."""
    total: int = 0
    """Rows (or groups) that were looked at."""
    failing: dict[str, int] = field(default_factory=dict[str, int])
    """Each condition that rows fail, and how many of them."""
    stuck: list[dict[str, TagValue]] = field(default_factory=list[Any])
    """What holds things up, oldest first: groups or prompts with `key`, `status`, `age_s`,
    `producer`, `alive`, and of groups `sessions` and `n`."""
    holders: list[dict[str, TagValue]] = field(default_factory=list[Any])
    """What holds the memory: partitions, producers and tasks with their bytes and rows."""

    def __str__(self) -> str:
        return self.text
