"""The values that callers hold: revisions, batches of keys and tags. No I/O, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dataplane.errors import InvalidRequest, KeyNotFound, quote

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
