"""`KVBatchMeta`: which rows a batch has, by their keys, with their tags.

It holds no values and needs no plane. Tags belong to one batch only: they are copied when a batch
is made, so that a change in one of two chunks is none in the other.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from . import extra_info as infos

log = logging.getLogger("transfer_queue.metadata")

_UNCHANGEABLE = frozenset({str, int, float, bool, bytes, type(None)})


def own_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """A tag that shares nothing changeable with this one."""
    if type(tag) is dict and all(type(value) in _UNCHANGEABLE for value in tag.values()):
        return tag.copy()  # what nearly all tags are; deepcopy takes 20 times as long
    return copy.deepcopy(tag)


def shares(size: int, parts: int) -> list[slice]:
    """Where `size` rows are cut into `parts`; the first ones have one more where it does not fit.

    Raises ValueError for less than one part.
    """
    if parts < 1:
        raise ValueError(f"a batch is cut into one chunk or more, not into {parts}")
    if size < parts:
        log.warning("%d rows in %d chunks: some of the chunks will be empty", size, parts)
    least, more = divmod(size, parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + least + (part < more))
    return [slice(start, end) for start, end in pairwise(ends)]


@dataclass
class KVBatchMeta:
    """Rows of one partition by key, in order, each with its tag.

    Raises ValueError where keys and tags are not as many, or a key or a field comes twice.
    """

    __module__ = f"{__name__.rpartition('.batch.')[0]}.metadata"

    keys: list[str] = dataclasses.field(default_factory=list[str])
    tags: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    partition_id: str | None = None
    fields: list[str] | None = None
    """The fields that are meant; None means all that there are."""
    extra_info: dict[str, Any] | None = dataclasses.field(default_factory=dict[str, Any])
    """What is said about the batch as a whole."""

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(
                "keys and tags must have same length: there are "
                f"{len(self.keys)} keys and {len(self.tags)} tags"
            )
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"Got duplicated keys: {_repeated(self.keys)}")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise ValueError(f"Got duplicated fields: {_repeated(self.fields)}")
        self.tags = [own_tag(tag) for tag in self.tags]
        self.extra_info = copy.deepcopy(self.extra_info)

    @classmethod
    def of(
        cls,
        keys: list[str],
        tags: list[dict[str, Any]],
        partition_id: str | None,
        fields: list[str] | None,
    ) -> KVBatchMeta:
        """The batch that is made of these very lists: nothing is checked and nothing copied."""
        meta = object.__new__(cls)
        meta.keys = keys
        meta.tags = tags
        meta.partition_id = partition_id
        meta.fields = fields
        meta.extra_info = {}
        return meta

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return (
            f"KVBatchMeta(size={self.size}, field_names={self.fields}, "
            f"extra_info={self.extra_info})"
        )

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """These rows, in this order.

        Raises ValueError for a key that is named twice, RuntimeError for one that is not here.
        """
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError(f"Contain duplicate keys: {_repeated(keys_to_select)}")
        places = {key: place for place, key in enumerate(self.keys)}
        absent = [key for key in keys_to_select if key not in places]
        if absent:
            raise RuntimeError(
                f"Keys {absent[:10]} ({len(absent)} in all) not found in current batch of "
                f"{self.size} rows"
            )
        return self._with_rows(
            list(keys_to_select), [self.tags[places[key]] for key in keys_to_select]
        )

    def reorder(self, indexes: list[int]) -> None:
        """Put the rows in this order, here.

        Raises ValueError unless there is one index for each row and none comes twice, IndexError
        for one beyond the rows. Nothing has moved then.
        """
        if len(indexes) != self.size:
            raise ValueError(
                f"{len(indexes)} indexes: that does not match the batch size {self.size}"
            )
        if len(set(indexes)) != len(indexes):
            raise ValueError(f"Contain duplicate indexes: {_repeated(indexes)}")
        keys = [self.keys[index] for index in indexes]
        tags = [self.tags[index] for index in indexes]
        self.keys, self.tags = keys, tags

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """As many parts, in order; the first have one row more where it does not come out even."""
        return [
            self._with_rows(self.keys[part], self.tags[part]) for part in shares(self.size, chunks)
        ]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """The rows of all of these, in order; empty batches say nothing.

        Raises ValueError where partitions, fields or entries of `extra_info` differ, or a key
        comes twice.
        """
        parts = [part for part in data or [] if part]
        if not parts:
            log.warning("KVBatchMeta.concat: no batch has a row; the result is empty")
            return KVBatchMeta()
        first = parts[0]
        fields = set(first.fields or [])
        for place, part in enumerate(parts):
            # A batch that names none may be joined to one that does, as with TransferQueue.
            if part.fields is not None and set(part.fields) != fields:
                raise ValueError(
                    "Field names do not match for concatenation: "
                    f"batch 0 has {first.fields}, batch {place} has {part.fields}"
                )
            if part.partition_id != first.partition_id:
                raise ValueError(
                    "Partition do not match for concatenation: batch 0 is of "
                    f"{first.partition_id!r}, batch {place} of {part.partition_id!r}"
                )
        merged = infos.merged([part.extra_info for part in parts], of="KVBatchMeta.concat")
        return KVBatchMeta(
            keys=[key for part in parts for key in part.keys],
            tags=[tag for part in parts for tag in part.tags],
            partition_id=first.partition_id,
            fields=None if first.fields is None else list(first.fields),
            extra_info=merged or None,  # None, not {}: callers of TransferQueue look for it
        )

    def _with_rows(self, keys: list[str], tags: list[dict[str, Any]]) -> KVBatchMeta:
        """A batch of these rows with all else that this one says."""
        return KVBatchMeta(
            keys=keys,
            tags=tags,
            partition_id=self.partition_id,
            fields=None if self.fields is None else list(self.fields),
            extra_info=self.extra_info,
        )


def _repeated(names: Iterable[Any]) -> list[Any]:
    """Those that come more than once; ten at most."""
    seen: set[Any] = set()
    again: dict[Any, None] = {}
    for name in names:
        if name in seen:
            again[name] = None
        seen.add(name)
    return list(again)[:10]
