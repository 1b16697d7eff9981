"""The verbs that travel, and the parts of the one message that every put shares. Pure.

Asked of a tag store:
    put_tags   [meta, tags]                                  -> PutAnswer
    publish    [client_id, meta, tags, placement, token]     -> PutAnswer     (by value stores)
    begun      [token]   a put has begun, not yet whole      no answer        (by value stores)
    forget     [token]   and need not be published any more  no answer        (by value stores)
    begin      []                                            -> revision      (by value stores)
    register   [address]                                     -> nil           (by value stores)
    repack     [old, new placement, moves]                   -> nil           (by value stores)
    resolve    [partition_id, keys, fields | nil, drop]      -> tags.resolve.Answer
               (with the name of a tag at its end: and that of each row that is answered)
    list       [partition_id, where, since, columns, limit]  -> list answer, columns as payload
    clear      [partition_id, keys | nil, where, retire, number, settled]  -> [removed, revision]
    stores     []                                            -> {store_id: address}
    trace, stage, note                                 see server/tracing.py
    fullest    []                        -> [partition_id, oldest keys, lagging task] | nil
    status     []                                            -> map
    destroy    []                                            -> nil, then the plane ends
  They wait, up to wait_s seconds:
    wait         [partition_id, where, fields, count, grouped, wait_s, number]
                 -> [revision, listing], columns as payload
    watch        [partition_id, where, since, wait_s, number]  -> [changes, listing], columns
    claim        [partition_id, task, count, fields, where, order_by, grouped, lease_s, replica,
                 abandoned, wait_s, number]
                 -> [claim_id, deliveries, end, revision, listing], columns as payload
    begin_group  [uid, partition_id, n, declared_bytes, home, wait_s, number, settled] -> attempt
  They do not:
    wait_abandon   [number]    nobody waits for this any longer  -> nil
    claim_abandon  [numbers]   nobody waits for these claims  no answer
    claim_commit, claim_release  [partition_id, task, claim_id, keys, number, settled] -> revision
    end_group  [attempt, status, (the partition_id it is of), number, settled] -> revision
    explain    [partition_id, where, fields, task, grouped, count, (names of the partitions that
               whoever asks is to hear of)]                  -> map
    outcome    [client_id, number]                           -> [verb | nil, answer]
    create_partition  [partition_id, schema, quota, retention, number, settled] -> revision
    partitions []                                            -> {partition_id: map}
    seal_partition  [partition_id, number, settled]          -> [revision, dropped versions]
    drop_partition  [partition_id, older_than, number, settled]  -> [partition ids, revision]
    checkpoint_open, _state, _rows, _close             see server/checkpointing.py
    restore_begin, _partition, _rows, _state, _end, _abort  see server/restoring.py
Asked of a value store:
    put_block  [meta, tags, template, rows, lengths, wait_s, draw], the block as payload
                                                             -> PutAnswer
    reserve    [nbytes, wait_s, draw]                -> [block, segment, offset, stamp]
               wait_s: nil waits for nothing, 0 for a segment that is being made, seconds for others
               draw: nil, an attempt, or true for any room that is kept
    commit     [block, meta, tags, template, rows, lengths]                    -> PutAnswer
    abort      [block]                                                         no answer
    pin        [block ids]                                                     -> [handle, gone]
    unpin      [handle]                                                        no answer
    read       [block ids, block of each run, starts, sizes]   -> [gone], the bytes as payload
    free       [block ids]                                     -> nil         (by the tag store)
    hold       [attempt, nbytes, timeout_s]                    -> nil         (by the tag store)
    bind       [token, attempt]                                -> nil         (by the tag store)
    held       [[attempt, nbytes], ...]                        -> nil         (by the tag store)

A revision is [epoch, n]. A placement is [block, segment, offset, nbytes, template, rows, lengths].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import methodcaller
from typing import Any, NamedTuple

import msgpack

from dataplane.errors import InvalidRequest, QuotaExceeded
from dataplane.wire.frames import pack

MUST_EXIST = 1
IF_ABSENT = 2
RETURN_TAGS = 4
RETRY = 8
RESTORE = 16
"""A block of a checkpoint that is loaded: rows are named by number, in the place of tags."""

COMMON = "common"
"""What a `resolve` that leaves out fields rather than keys sends as its `drop`."""

LONGEST_WAIT_S = 86_400.0
"""What a store waits for room or for a reader at most, whatever the caller's deadline."""

WireRevision = tuple[int, int] | list[int]


class PutMeta(NamedTuple):
    """What a put says besides tags and values; value stores pass it on unread."""

    partition_id: str
    keys: list[str]
    flags: int
    number: int
    """The request number of this client; repeats carry the same one."""
    settled: int
    """Every request number up to this one is answered and seen."""
    seen: WireRevision | None
    """The latest revision that the client had seen when the call began."""
    stamp: WireRevision | None
    """Where the put began, if it knows."""
    attempt: int | None = None
    """The open attempt of a group that it is for."""
    wait_s: float = 0.0
    """How long it may wait for room under the partition's quota."""

    def pack(self) -> bytes:
        return pack(tuple(self))

    @classmethod
    def unpack(cls, packed: object) -> PutMeta:
        """The parts, their outer types checked. InvalidRequest if it is no such message."""
        if type(packed) is not bytes:
            raise InvalidRequest("a put's meta is packed bytes")
        try:
            parts: Any = msgpack.unpackb(packed)
            meta = cls(*parts)
        except (ValueError, TypeError):
            raise InvalidRequest("a put's meta is not the expected list") from None
        partition_id, _, flags, number, settled, seen, stamp, attempt, wait_s = meta
        if type(partition_id) is not str:
            raise InvalidRequest(f"a partition_id is a string, not {partition_id!r:.80}")
        if not (type(flags) is type(number) is type(settled) is int) or not (
            0 <= flags < 256 and 0 <= settled < number < 1 << 63
        ):
            raise InvalidRequest(
                "a put's flags, number and settled number are integers, in ascending order"
            )
        if (seen is not None and not is_revision(seen)) or (
            stamp is not None and not is_revision(stamp)
        ):
            raise InvalidRequest("a revision is [epoch, n]")
        if attempt is not None and not is_attempt(attempt):
            raise InvalidRequest(f"an attempt is what begin_group answered, not {attempt!r:.80}")
        check_wait(wait_s)
        return meta


class PutAnswer(NamedTuple):
    revision: WireRevision
    tags: list[Any] | None
    """Merged tags of each key as `tags_to_wire` has them, where asked for."""
    fields: list[str] | None
    """Fields that all the keys have now, where tags were asked for."""


def tags_to_wire(tags: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Tags of many keys as they travel: [names, columns] where all have the same names, which packs
    in a fifth of the time, else [nil, one map per key]."""
    names = set(map(tuple, tags))
    if len(tags) < 2 or len(names) > 1 or names == {()}:
        return [None, tags]
    return [names.pop(), list(zip(*map(_VALUES, tags), strict=True))]


def tags_from_wire(wire: list[Any]) -> list[dict[str, Any]]:
    """The tags that travelled; maps that belong to the caller."""
    names, columns = wire
    if names is None:
        return columns
    return list(map(dict, map(zip, repeat(names), zip(*columns, strict=True))))


_VALUES = methodcaller("values")


def with_fullest(full: QuotaExceeded, answer: Any) -> QuotaExceeded:
    """The error of a value store, which knows no keys, with what the tag store knows of who fills
    it: the answer to `fullest`."""
    if answer is not None:
        partition_id, full.oldest_keys, full.lagging_task = answer
        full.message += f"; partition {partition_id!r} holds the most"
        if full.lagging_task is not None:
            full.message += f" (task {full.lagging_task!r} lags most)"
    return full


def is_attempt(value: Any) -> bool:
    """Whether it could be an attempt: the number of a revision."""
    return type(value) is int and 0 < value < 1 << 63


def check_wait(value: Any) -> float:
    """How long a request may wait, in seconds. InvalidRequest if it is no such number."""
    if type(value) not in (int, float) or not 0 <= value <= LONGEST_WAIT_S:
        raise InvalidRequest(f"a wait is seconds up to a day, not {value!r:.80}")
    return float(value)


def is_revision(value: Any) -> bool:
    return (
        type(value) in (list, tuple)
        and len(value) == 2
        and all(type(part) is int and 0 <= part < 1 << 63 for part in value)
    )
