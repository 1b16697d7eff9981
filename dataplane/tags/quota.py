"""Whether a partition has room: what a put or a group would take, against its quota. Pure.

A quota counts bytes of extents and tags, what is reserved for groups, and rows; of the whole
partition and of each producer. What draws on a reservation (puts of an open group, write-backs) is
not asked: its room was counted when its group began. But what a group declared is a limit of its
own to its puts, up to a margin.
"""

from __future__ import annotations

from typing import NamedTuple

from dataplane.errors import InvalidRequest, QuotaExceeded
from dataplane.tags.accounts import Account
from dataplane.tags.groups import Group
from dataplane.tags.partition import Partition
from dataplane.tags.puts import Found, PutRows
from dataplane.tags.rows import CHUNK_BITS, Row
from dataplane.types import Quota


class Shortage(NamedTuple):
    """What there is no room for."""

    what: str
    """`bytes` or `rows`."""
    needed: int
    """How many more of them are asked for."""
    used: int
    limit: int
    used_bytes: int
    """What whoever is at its limit holds in bytes, whichever of the two is short."""
    limit_bytes: int | None
    producer: str = ""
    """The client whose own limit it is; empty where it is the partition's."""
    group: Group | None = None
    """The group whose declaration it is."""

    @property
    def is_lasting(self) -> bool:
        """Whether waiting is in vain: it would not fit into an empty partition, or is more than
        its group may take."""
        return self.group is not None or self.needed > self.limit

    def error(
        self,
        partition_id: str,
        waited_s: float = 0.0,
        oldest_keys: list[str] | None = None,
        lagging_task: str | None = None,
    ) -> QuotaExceeded:
        """The error that says so."""
        return QuotaExceeded(
            self._text(partition_id, waited_s, lagging_task),
            used_bytes=self.used_bytes,
            limit_bytes=self.limit_bytes,
            oldest_keys=oldest_keys or [],
            lagging_task=lagging_task,
        )

    def _text(self, partition_id: str, waited_s: float, lagging_task: str | None) -> str:
        group = self.group
        if group is not None:
            return (
                f"group {group.uid!r:.80} (attempt {group.attempt}) of partition {partition_id!r} "
                f"declared {group.declared_bytes} bytes and may take {self.limit} in all: "
                f"{self.used} are used, and {self.needed} more are too many; declare what a group "
                "really takes"
            )
        whose = f"producer {self.producer}" if self.producer else "all producers together"
        text = (
            f"partition {partition_id!r} has no room for {self.needed} more {self.what}: "
            f"{self.used} of {self.limit} {self.what} are taken or reserved by {whose}"
        )
        if self.is_lasting:
            return text + "; it is larger than the whole quota: split it, or raise the quota"
        text += f", and not enough came free within {waited_s:.3g} s; clear rows that were consumed"
        if lagging_task is not None:
            text += f" (task {lagging_task!r} lags most)"
        return text


def shortage_of_put(put: PutRows, found: Found, partition: Partition | None) -> Shortage | None:
    """What a checked put has no room for; None if it may be applied."""
    if partition is None:
        return None
    if put.must_exist:
        return None  # a trainer cannot do without writing back
    if put.group is not None:
        return _beyond_declared(put, put.group)
    if partition.quota is None:
        return None
    return shortage(partition, put.client_id, _bytes_of(put), _rows_of(put, found))


def takes_room(put: PutRows, found: Found, quota: Quota) -> bool:
    """Whether a put takes anything at all of what a quota limits."""
    limits_bytes = quota.bytes is not None or quota.producer_bytes is not None
    limits_rows = quota.rows is not None or quota.producer_rows is not None
    return (limits_bytes and _bytes_of(put) > 0) or (limits_rows and _rows_of(put, found) > 0)


def _rows_of(put: PutRows, found: Found) -> int:
    """Rows that a put makes."""
    rows = len(put.keys)
    if found.slots is not None:
        rows -= sum(type(slot) is Row for slot in found.slots)
    return rows


def _bytes_of(put: PutRows) -> int:
    """What a put takes at most: of tags that are there already it changes only some."""
    extent = 0 if put.placement is None else put.placement.extent_bytes
    return extent + (0 if put.tag_sizes is None else sum(put.tag_sizes) - len(put.keys))


def _beyond_declared(put: PutRows, group: Group) -> Shortage | None:
    """What is more than a group may take of what it declared, margin and all."""
    if not group.declared_bytes:
        return None
    needed, used, limit = _bytes_of(put), group.used_bytes, group.limit_bytes
    if used + needed <= limit:
        return None
    producer = group.producer.client_id
    return Shortage("bytes", needed, used, limit, used, limit, producer, group)


def shortage_of_group(
    partition: Partition, client_id: str, uid: str, declared_bytes: int, n: int
) -> Shortage | None:
    """What a group that begins has no room for. What its older attempt has makes room for it."""
    older = partition.groups.get(uid)
    return shortage(partition, client_id, declared_bytes, n, makes_room=older)


def shortage(
    partition: Partition,
    client_id: str,
    nbytes: int,
    rows: int,
    makes_room: Group | None = None,
) -> Shortage | None:
    """What this many bytes and rows of a client more would have no room for, if this group went."""
    quota = partition.quota
    if quota is None:
        return None
    for account, of, bytes_limit, rows_limit in (
        (partition.account, "", quota.bytes, quota.rows),
        (partition.producers.get(client_id) or Account(), client_id, quota.producer_bytes,
         quota.producer_rows),
    ):  # fmt: skip
        free_bytes = free_rows = 0
        if makes_room is not None and of in ("", makes_room.producer.client_id):
            free_bytes, free_rows = makes_room.total_bytes, makes_room.total_rows
        used_bytes, used_rows = account.total_bytes, account.total_rows
        # What takes no more than it gives back never has to wait.
        if bytes_limit is not None and free_bytes < nbytes > bytes_limit - used_bytes + free_bytes:
            return Shortage("bytes", nbytes, used_bytes, bytes_limit, used_bytes, bytes_limit, of)
        if rows_limit is not None and free_rows < rows > rows_limit - used_rows + free_rows:
            return Shortage("rows", rows, used_rows, rows_limit, used_bytes, bytes_limit, of)
    return None


def check_fits(quota: Quota, partition: Partition) -> None:
    """Raise if a quota could block for ever: if it is less than what a group that is open there was
    given, so that none like it could begin again, or less than what a claim waits for."""
    wanted = partition.claims.wanted()
    if quota.rows is not None and quota.rows < wanted:
        raise InvalidRequest(
            f"quota.rows ({quota.rows}) is less than the {wanted} that a claim waits for in "
            f"partition {partition.partition_id!r}: there could never be as many"
        )
    for group in partition.groups.values():
        if not group.open:
            continue
        for name, limit, needed in (
            ("bytes", quota.bytes, group.declared_bytes),
            ("producer_bytes", quota.producer_bytes, group.declared_bytes),
            ("rows", quota.rows, group.n),
            ("producer_rows", quota.producer_rows, group.n),
        ):
            if limit is not None and limit < needed:
                raise InvalidRequest(
                    f"quota.{name} ({limit}) is less than one group of partition "
                    f"{partition.partition_id!r}: {group.uid!r:.80} has {needed} reserved, and "
                    "none like it could begin again"
                )


OLDEST = 5
"""Keys that an error names."""
MAX_ROWS_SEEN = 2048
"""Rows that are looked through for them: an error must not hold the store."""


def oldest_unconsumed(partition: Partition, limit: int = OLDEST) -> list[str]:
    """Keys that have been in the partition longest and that some task has not committed."""
    found: list[str] = []
    claims = partition.claims
    seen = 0
    for number, chunk in enumerate(partition.slots.chunks):
        if chunk is None or not chunk.live:
            continue
        base = number << CHUNK_BITS
        for i, row in enumerate(chunk.rows):
            if type(row) is not Row:
                continue
            seen += 1
            if row.tags.get("is_prompt") is True or claims.is_committed_by_all(base + i):
                continue
            found.append(row.key)
            if len(found) == limit:
                return found
        if seen >= MAX_ROWS_SEEN:
            break
    return found
