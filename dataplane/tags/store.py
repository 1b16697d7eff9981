"""The tag store: every key of a plane, its tags, where its values lie, in which order it changed.

Pure: no sockets, no files, no clock. A change is checked first and applied after, so a refused
request leaves nothing behind. The server journals a change between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from dataplane.errors import InvalidRequest, PartitionNotFound, StaleWrite
from dataplane.tags.groups import Group
from dataplane.tags.history import Chain, Change, History
from dataplane.tags.keys import check_name
from dataplane.tags.lost import Losses, LossTags
from dataplane.tags.moments import Moments
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.puts import Found, PutRows
from dataplane.tags.query import Predicate
from dataplane.tags.requests import ClientRequests
from dataplane.tags.rows import CHUNK_BITS, Chunk, Row, Tombstone
from dataplane.types import Revision

REAP_STEP = 512
"""Tombstones forgotten with each change at most: history is trimmed without a pause."""
MAX_GONE = 16_384
"""Clients that are long gone of which it is known that they were here; the design is for 10,000 at
a time."""


class Doomed(NamedTuple):
    """One chunk of a clear by predicate: the chunk as scanned, and what it becomes."""

    number: int
    before: Chunk
    after: Chunk
    rows: list[Row]
    keys: list[str]
    positions: list[int]
    groups: dict[Group, list[int]]
    """Positions of trajectories among them, by group."""
    prompts: list[Group]
    """Groups whose prompts are among them."""


class TagStore:
    def __init__(
        self, epoch: int, history: History | None = None, *, open_schemas: bool = False
    ) -> None:
        self.epoch = epoch
        self.starts: dict[int, int] = {epoch: 0}
        """At which revision each epoch began that this store knows of."""
        self.open_schemas = open_schemas
        """Whether partitions that puts make have open schemas."""
        self.n = 0
        """Number of changes so far: the revision of the last one."""
        self.history = history or History()
        self.partitions: dict[str, Partition] = {}
        self.requests: dict[str, ClientRequests] = {}
        self.gone: dict[str, int] = {}
        """Up to which number the requests of clients that are long gone are settled, those that
        went first being first."""
        self.dead: deque[Placement] = deque()
        """Blocks without a live cell; the server tells their value stores, until they heard."""
        self.placements: dict[tuple[str, int], Placement] = {}
        """Blocks with live cells by (store, block)."""
        self.attempts: dict[int, Group] = {}
        """Groups with an open attempt, by its number."""
        self.settled: dict[Group, None] = {}
        """Groups whose reservation changed; the server tells the value stores that keep it."""
        self.changed: Callable[[Partition], None] | None = None
        """Told of the partition of each revision, once all of it is in place."""
        self.dropped: dict[str, int] = {}
        """Revisions at which partitions were dropped, as far as history reaches."""
        self.moments = Moments()
        """When revisions were made."""
        self._reaping: deque[Iterator[tuple[Partition, str, int]]] = deque()

    def revision(self) -> Revision:
        return Revision(self.epoch, self.n)

    def begin_epoch(self, epoch: int) -> None:
        """What is revised from here on is of a later epoch."""
        self.starts[epoch] = self.n
        self.epoch = epoch

    def stamp_of(self, revision: Sequence[int]) -> int:
        """Where in the history of this store somebody was who had seen a revision of any epoch.

        Of an earlier epoch at most where the next one began: what an earlier start had promised
        beyond that never came to be. 0 for an epoch that is not known here, before everything.
        """
        epoch, n = revision
        if epoch == self.epoch:
            return n
        if epoch not in self.starts:
            return 0
        return min(n, self.starts[min(later for later in self.starts if later > epoch)])

    def partition(self, partition_id: str) -> Partition:
        """The partition. PartitionNotFound if no put has made it."""
        # What is no string, and so no name, may not even be looked up.
        partition = self.partitions.get(partition_id) if type(partition_id) is str else None
        if partition is None:
            check_name(partition_id, "partition name")
            raise PartitionNotFound(
                f"there is no partition {partition_id!r}; the first put to it creates it",
                partition_id=partition_id,
            )
        return partition

    def client(self, client_id: str) -> ClientRequests:
        """What is remembered of a client's requests."""
        requests = self.requests.get(client_id)
        if requests is None:
            requests = self.requests[client_id] = ClientRequests()
            requests.floor = self.gone.pop(client_id, 0)
        return requests

    def forget_client(self, client_id: str) -> None:
        """Let go of the answers of a client that is long gone. For a while more it is known which
        of its numbers were used."""
        requests = self.requests.pop(client_id, None)
        if requests is None:
            return
        requests.forget()
        if requests.floor:
            self.gone[client_id] = requests.floor
            if len(self.gone) > MAX_GONE:
                del self.gone[next(iter(self.gone))]

    # -- put ---------------------------------------------------------------------------------

    def attempt(self, attempt: int, partition_id: str, keys: list[str]) -> Group:
        """The group whose attempt this is. StaleWrite if the attempt is not open (any more)."""
        group = self.attempts.get(attempt)
        if group is None:
            raise StaleWrite(
                f"attempt {attempt} is not open: its group ended, began anew or was retired, so "
                "what still comes for it is dropped; begin the group again if it is wanted",
                partition_id=partition_id,
                keys=keys,
                attempt=attempt,
            )
        if group.partition_id != partition_id:
            raise InvalidRequest(
                f"attempt {attempt} belongs to partition {group.partition_id!r}, and the put is "
                f"for {partition_id!r}"
            )
        return group

    def check_put(self, put: PutRows) -> Found:
        """Raise what is wrong with a put whose keys and tags are well formed already."""
        partition = self.partitions.get(put.partition_id)
        if partition is None:
            check_name(put.partition_id, "partition name")
            dropped = self.dropped.get(put.partition_id)
            if dropped is not None and put.stamp is not None and put.stamp < dropped:
                raise StaleWrite(
                    f"partition {put.partition_id!r} was dropped at revision {dropped}, after "
                    f"this put began at {put.stamp}",
                    partition_id=put.partition_id,
                    keys=put.keys,
                    cleared_at=dropped,
                )
            partition = Partition(put.partition_id)
        elif put.stamp is not None and self.history.floor <= put.stamp < partition.born:
            # Below the floor it is too old in any case, and there may have been no drop at all: a
            # partition that came with a checkpoint is younger than everything before it, too.
            raise StaleWrite(
                f"partition {put.partition_id!r} was dropped at revision {partition.born} and made "
                f"anew, after this put began at {put.stamp}",
                partition_id=put.partition_id,
                keys=put.keys,
                cleared_at=partition.born,
            )
        return partition.check_put(put, self.history.floor)

    def apply_put(self, put: PutRows, found: Found, now: float) -> int:
        """Carry out a checked put; its revision."""
        self.n += 1
        partition = self.partitions.get(put.partition_id)
        if partition is None:
            partition = self.make(put.partition_id)
        self._place(partition, put, found)
        self._record(
            partition, Change(self.n, now, put.partition_id, put.keys, None, put.client_id)
        )
        return self.n

    def make(self, partition_id: str) -> Partition:
        """A new partition of this name."""
        # What is older than the drop of the partition of this name before it is none of its own.
        partition = Partition(partition_id, self.dropped.get(partition_id, 0))
        partition.open_schema = self.open_schemas
        self.partitions[partition_id] = partition
        self.history.begin(partition_id)
        return partition

    def _place(self, partition: Partition, put: PutRows, found: Found) -> None:
        if put.placement is not None:
            self.placements[put.placement.store, put.placement.block] = put.placement
        self._bury(partition.apply_put(put, found, self.n))

    # -- clear -------------------------------------------------------------------------------

    def apply_clear(
        self,
        partition_id: str,
        keys: Sequence[str],
        now: float,
        *,
        by: str = "",
        retire: bool = False,
    ) -> int:
        """Remove these rows at one revision; how many there were. Absent keys are no error.

        With `retire` the attempts of the groups that the rows belong to are closed with it.
        """
        partition = self.partition(partition_id)
        found, positions = partition.present(keys)
        retired = self._groups_of(partition, keys, positions) if retire else ()
        if not found and not retired:
            return 0
        self.n += 1
        for group in retired:
            self._close(group)
        self._bury(partition.apply_clear(positions, self.n))
        self._record(partition, Change(self.n, now, partition_id, found, positions, by))
        return len(found)

    def would_clear(self, partition: Partition, keys: Sequence[str], *, retire: bool) -> bool:
        """Whether a clear would change anything."""
        found, positions = partition.present(keys)
        return bool(found) or (retire and bool(self._groups_of(partition, keys, positions)))

    def _groups_of(
        self, partition: Partition, keys: Sequence[str], positions: Sequence[int]
    ) -> list[Group]:
        """Groups with an open attempt whose prompt or trajectories are among these."""
        groups: dict[Group, None] = {}
        if not partition.groups:
            return []
        for key in keys:
            group = partition.groups.get(key)
            if group is not None and group.open:
                groups[group] = None
        for position in positions:
            row = partition.slots.at(position)
            if type(row) is Row and type(row.account) is Group and row.account.open:
                groups[row.account] = None
        return list(groups)

    def scan_clear(
        self, partition: Partition, number: int, predicate: Predicate, until: int | None = None
    ) -> Doomed | None:
        """What a clear by predicate would make of one chunk; None if it touches no row of it.
        `until`: rows that changed after this revision stay."""
        chunk = partition.slots.chunks[number]
        if chunk is None or not chunk.live:
            return None
        tombstone = Tombstone(0)
        rows: list[Row] = []
        positions: list[int] = []
        groups: dict[Group, list[int]] = {}
        prompts: list[Group] = []
        after: Chunk | None = None
        base = number << CHUNK_BITS
        for i, slot in enumerate(chunk.rows):
            if type(slot) is not Row or not predicate(slot.tags):
                continue
            if until is not None and slot.revision > until:
                continue
            if after is None:
                chunk.frozen = True
                after = chunk.thawed()
                after.columns.clear()
                after.names = None
            after.rows[i] = tombstone
            rows.append(slot)
            positions.append(base + i)
            if type(slot.account) is Group:
                groups.setdefault(slot.account, []).append(base + i)
            group = partition.groups.get(slot.key)
            if group is not None:
                prompts.append(group)
        if after is None:
            return None
        after.live -= len(rows)
        keys = [row.key for row in rows]
        return Doomed(number, chunk, after, rows, keys, positions, groups, prompts)

    def apply_scanned_clear(
        self,
        partition: Partition,
        doomed: Sequence[Doomed],
        now: float,
        *,
        by: str = "",
        retire: bool = False,
    ) -> Chain[Row]:
        """Remove all rows of scanned chunks at one revision: a swap per chunk.

        Chunks must be as they were scanned (`Doomed.before`). The rows are returned; their cells
        are released by `release_rows`, in slices.
        """
        self.n += 1
        if retire:
            for part in doomed:
                for group in (*part.groups, *part.prompts):
                    if group.open:
                        self._close(group)
        for part in doomed:
            assert partition.slots.chunks[part.number] is part.before
            partition.swap_clear(
                part.number, part.after, part.rows, part.positions, part.groups, self.n
            )
            tombstone = partition.slots.at(part.positions[0])
            assert type(tombstone) is Tombstone
            tombstone.revision = self.n  # the scan made it before the revision was known
        keys = Chain([part.keys for part in doomed])
        positions = Chain([part.positions for part in doomed])
        self._record(partition, Change(self.n, now, partition.partition_id, keys, positions, by))
        return Chain([part.rows for part in doomed])

    def release_rows(self, partition: Partition, rows: Sequence[Row]) -> None:
        """Let go of the cells of rows that a scanned clear removed."""
        self._bury(partition.release(rows))
        if partition.touched:
            self._settle(partition)

    # -- groups ------------------------------------------------------------------------------

    def apply_begin(self, prompt: PutRows, found: Found, group: Group, now: float) -> int:
        """Begin a group: its prompt's row is written and the rows of its older attempt go, all at
        one revision, which is the attempt. `prompt` is a checked put of the prompt's row."""
        self.n += 1
        assert group.attempt == self.n
        partition = self.partitions.get(prompt.partition_id)
        if partition is None:
            partition = self.make(prompt.partition_id)
        older = partition.groups.get(group.uid)
        if older is not None:
            self._close(older)
            positions = sorted(older.positions)
            keys = [row.key for p in positions if type(row := partition.slots.at(p)) is Row]
            partition.groups[group.uid] = group
            self._bury(partition.apply_clear(positions, self.n))
            if keys:
                by = prompt.client_id
                dropped = Change(self.n, now, partition.partition_id, keys, positions, by)
                self.history.append(dropped)
        partition.groups[group.uid] = group
        self.attempts[group.attempt] = group
        partition.touched[group] = None
        self._place(partition, prompt, found)
        partition.forget_lost(group.uid)
        by = prompt.client_id
        self._record(partition, Change(self.n, now, partition.partition_id, prompt.keys, None, by))
        return self.n

    def apply_end(
        self, group: Group, status: str, prompt: tuple[PutRows, Found] | None, now: float, by: str
    ) -> int:
        """End a group's attempt with a status, which its prompt's row takes on if it is there."""
        partition = self.partition(group.partition_id)
        self.n += 1
        self._close(group)
        group.status = status
        group.since = self.n
        group.at = now
        keys: Sequence[str] = ()
        if prompt is None:
            partition.revision = self.n
        else:
            keys = prompt[0].keys
            self._place(partition, *prompt)
        partition.views.group_changed(group)
        self._record(partition, Change(self.n, now, partition.partition_id, keys, None, by))
        return self.n

    def _close(self, group: Group) -> None:
        """Nothing more is taken for the group's attempt."""
        group.open = False
        self.attempts.pop(group.attempt, None)
        partition = self.partitions.get(group.partition_id)
        if partition is not None:
            partition.touched[group] = None

    def _settle(self, partition: Partition) -> None:
        """Bring the reservations of groups up to date that changed; let go of those that ended."""
        for group in partition.touched:
            if group.open or group.positions:
                group.settle_hold()
            else:
                group.hold(0, 0)
                if partition.groups.get(group.uid) is group:
                    del partition.groups[group.uid]
            if group.store:
                self.settled[group] = None
        partition.touched.clear()

    # -- partitions --------------------------------------------------------------------------

    def apply_create(self, partition_id: str, now: float) -> Partition:
        """The partition, made if it is not there."""
        partition = self.partitions.get(partition_id)
        if partition is None:
            self.n += 1
            partition = self.make(partition_id)
            partition.revision = self.n
            self._record(partition, Change(self.n, now, partition_id, (), None))
        return partition

    def apply_seal(self, partition: Partition, now: float) -> int:
        """No new row comes from here on."""
        if not partition.sealed:
            self.n += 1
            partition.sealed = True
            partition.revision = self.n
            self._record(partition, Change(self.n, now, partition.partition_id, (), None))
        return partition.revision

    def apply_drop(self, partition: Partition, now: float) -> Iterator[Sequence[Row]]:
        """Take a partition away at one revision. What comes back is released by `release_rows`,
        piece by piece; the partition itself is gone at once."""
        self.n += 1
        del self.partitions[partition.partition_id]
        self.dropped[partition.partition_id] = self.n
        for group in list(partition.groups.values()):
            self._close(group)
            group.positions.clear()
            group.hold(0, 0)
            if group.store:
                self.settled[group] = None
        partition.groups.clear()
        partition.touched.clear()
        self.history.append(Change(self.n, now, partition.partition_id, (), None))
        self.upkeep(now)
        return partition.dismantle()

    # -- loss --------------------------------------------------------------------------------

    def apply_lost(self, losses: Losses, now: float) -> int:
        """Let rows be lost of which blocks are gone, all at one revision; how many. There is no
        new revision where there is no such row.

        The blocks are forgotten, and nobody is told that they are dead: nobody has them.
        """
        n = self.n_after_loss(losses)
        gone = frozenset(losses.placements)
        loss = LossTags(losses.store_id, now)
        changes = [
            (partition, partition.apply_lost(positions, gone, loss, n))
            for partition, positions in losses.positions.items()
        ]
        self.n = n
        for placement in losses.placements:
            del self.placements[placement.store, placement.block]
            self._uncharge(placement)
        kept = [placement for placement in self.dead if not losses.names(placement)]
        if len(kept) < len(self.dead):
            self.dead.clear()  # others hold on to the queue itself
            self.dead.extend(kept)
        for partition, keys in changes:
            self._record(partition, Change(n, now, partition.partition_id, keys, None))
        for partition in self.partitions.values():
            if partition.touched:  # the last of its rows in a block were being released
                self._settle(partition)
        return losses.rows

    def n_after_loss(self, losses: Losses) -> int:
        """The revision at which rows are lost, or that of now where none is."""
        return self.n + bool(losses.positions)

    # -- repack ------------------------------------------------------------------------------

    def apply_repack(
        self, old: Placement, new: Placement, moves: Sequence[tuple[int, int]]
    ) -> None:
        """Point the live cells of a block at their copies in a new one. No revision changes."""
        partition = self.partition(old.partition_id)
        self.placements[new.store, new.block] = new
        self._bury(partition.apply_repack(old, new, moves))
        if partition.touched:
            self._settle(partition)

    # -- upkeep ------------------------------------------------------------------------------

    def _bury(self, placements: Sequence[Placement]) -> None:
        for placement in placements:
            # A placement can be reported twice when several of its rows go in one request.
            if self.placements.pop((placement.store, placement.block), None) is not None:
                self.dead.append(placement)
                self._uncharge(placement)

    def _uncharge(self, placement: Placement) -> None:
        """Nobody answers any more for the extent of a block."""
        placement.positions = ()
        for account in placement.uncharge():
            if type(account) is Group:
                partition = self.partitions.get(account.partition_id)
                if partition is not None:
                    partition.touched[account] = None

    def _record(self, partition: Partition, change: Change) -> None:
        self.history.append(change)
        self.moments.note(change.n, change.at)
        if partition.touched:
            self._settle(partition)
        self.upkeep(change.at)
        if self.changed is not None:
            self.changed(partition)

    def upkeep(self, now: float, step: int = REAP_STEP) -> None:
        """Trim history to its bounds and forget a bounded number of tombstones."""
        for _ in range(64):
            expired = self.history.expired(now)
            if expired is None:
                break
            partition = self.partitions.get(expired.partition_id)
            if (
                expired.positions is not None
                and partition is not None
                and expired.n > partition.born  # one of this name before was another partition
            ):
                reaped = zip(repeat(partition), expired.keys, expired.positions, strict=False)
                self._reaping.append(reaped)
            dropped = self.dropped.get(expired.partition_id)
            if dropped is not None and dropped <= expired.n:
                del self.dropped[expired.partition_id]
                if partition is None:
                    self.history.forget(expired.partition_id)
        while self._reaping and step > 0:
            for partition, key, position in self._reaping[0]:
                partition.index.forget(key, position)
                partition.slots.forget(position)
                step -= 1
                if step == 0:
                    break
            else:
                self._reaping.popleft()

    def counts(self) -> dict[str, Any]:
        """Sizes for `status`: per partition rows, bytes and revision; history and blocks."""
        return {
            "revision": [self.epoch, self.n],
            "history_floor": self.history.floor,
            "history_changes": self.history.size,
            "blocks": len(self.placements),
            "dead_blocks": len(self.dead),
            "partitions": {
                partition.partition_id: {
                    "keys": len(partition),
                    "payload_bytes": partition.payload_bytes,
                    "tag_bytes": partition.tag_bytes,
                    "revision": partition.revision,
                    "fields": sorted(partition.schema),
                }
                for partition in self.partitions.values()
            },
        }
