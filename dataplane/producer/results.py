"""What a producer's reads return: plain lists and numpy arrays, made from messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from dataplane.protocol.values import tags_from
from dataplane.types import Claim, Explanation, KVBatchMeta, Revision, Tags
from dataplane.v1 import dataplane_pb2 as pb


@dataclass(slots=True)
class Listing:
    """The keys of a partition with their tags, at one revision."""

    partition_id: str
    revision: Revision
    """Pass it as `since` to get what changes from here on."""
    full: bool
    """Whether all rows are here, rather than those that changed since a revision."""
    keys: list[str] = field(default_factory=list[str])
    tags: list[Tags] = field(default_factory=list[Tags])
    """Of each key."""
    fields: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """Names of the fields that each key has; sorted."""
    lengths: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    """Of each key, by ragged field: the length of its row."""
    cleared: list[str] = field(default_factory=list[str])
    """With `since`: keys that were cleared and are still gone."""

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, rows: Sequence[pb.Row]) -> None:
        """Take over a page."""
        for row in rows:
            self.keys.append(row.key)
            self.tags.append(tags_from(row.tags))
            self.fields.append(tuple(sorted(row.fields)))
            self.lengths.append(dict(row.lengths))

    def to_meta(self) -> KVBatchMeta:
        """The listing as a batch; `fields` are those that every key has."""
        return KVBatchMeta(
            self.partition_id, self.keys, self.tags, _common(self.fields), self.revision
        )


@dataclass(slots=True)
class Arrays:
    """Rows of one revision, in the order asked for."""

    keys: list[str]
    """The keys that came back."""
    fields: dict[str, list[Any] | npt.NDArray[Any]]
    """Of each field: one array if it has rank 0, else a list with an array or value per row."""
    revision: Revision

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, name: str) -> list[Any] | npt.NDArray[Any]:
        return self.fields[name]


def revision_of(message: pb.Revision) -> Revision:
    """The revision that a message names."""
    return Revision(message.epoch, message.n)


def meta_of(partition_id: str, rows: Sequence[pb.Row], revision: Revision) -> KVBatchMeta:
    """Rows as a batch; `fields` are those that every row has."""
    return KVBatchMeta(
        partition_id,
        [row.key for row in rows],
        [tags_from(row.tags) for row in rows],
        _common([tuple(row.fields) for row in rows]),
        revision,
    )


def claim_of(partition_id: str, task: str, message: pb.ClaimResponse) -> Claim:
    """The claim that was granted."""
    meta = meta_of(partition_id, message.rows, revision_of(message.revision))
    return Claim(task, message.claim_id, meta, list(message.deliveries), message.end)


def explanation_of(message: pb.ExplainResponse) -> Explanation:
    """Why something waits."""
    return Explanation(
        message.text,
        message.matching,
        message.total,
        dict(message.failing),
        [tags_from(one) for one in message.stuck],
        [tags_from(one) for one in message.holders],
    )


def _common(fields: Sequence[tuple[str, ...]]) -> list[str]:
    sets = [set(names) for names in set(fields)]
    return sorted(sets[0].intersection(*sets)) if sets else []
