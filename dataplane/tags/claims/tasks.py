"""A task: which rows of a partition one kind of consumer has committed, and which it holds.

Pure. Every row is for each task, once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dataplane.tags.claims.leases import CLEARED, RELEASED, Closed, Holders, Lease, claim_lost
from dataplane.tags.claims.marks import Marks
from dataplane.tags.claims.queues import Queue
from dataplane.tags.claims.shares import Batch
from dataplane.tags.groups import Group
from dataplane.tags.rows import Row

if TYPE_CHECKING:
    from dataplane.tags.partition import Partition

MAX_CLOSED = 256
"""Ended claims that are remembered, for those who end them once more ..."""
MAX_LOST = 1024
"""... unless they lost more rows than that."""
MAX_BATCHES = 64
"""Batches that are remembered after all of their shares have ended."""


class Task:
    """One kind of consumer, by name."""

    def __init__(self, name: str, holders: Holders) -> None:
        self.name = name
        self.committed = Marks()
        self.offered: dict[int, int] = {}
        """How often each row was offered that is held, or came back."""
        self.held: dict[int, Lease] = {}
        self.leases: dict[int, Lease] = {}
        self.closed: dict[int, Closed] = {}
        self.last_id = 0
        """The highest number that a claim of it has had."""
        self.queues: dict[Any, Queue] = {}
        self.batches: dict[int, Batch] = {}
        self.settled: OrderedDict[int, None] = OrderedDict()
        """Batches of which no share is held."""
        self.forgotten = -1
        """The last batch that is not remembered any more."""
        self._holders = holders
        self.single: deque[int] = deque()
        """Ended claims that are remembered and were no shares, oldest first."""

    @property
    def is_blank(self) -> bool:
        """Whether nothing would be lost with it."""
        return not (self.queues or self.held or self.committed or self.offered or self.batches)

    def has(self, position: int) -> bool:
        """Whether it has committed a row, or holds it."""
        return position in self.held or position in self.committed

    # -- leases ------------------------------------------------------------------------------

    def hold(self, lease: Lease, client_id: str, number: int, away_since: float | None) -> None:
        """Hand out the rows of a lease to a client's request."""
        granted = lease.granted
        self.leases[lease.claim_id] = lease
        for row, position, count in zip(
            granted.rows, granted.positions, granted.deliveries, strict=True
        ):
            self.held[position] = lease
            self.offered[position] = count
            for queue in self.queues.values():
                queue.withhold(position, row)
        self._holders.join(lease, client_id, number, away_since)

    def find(
        self, partition: Partition, claim_id: int, keys: Sequence[str], *, commit: bool
    ) -> tuple[Lease, list[str]] | Closed:
        """The lease that is to end, and which of its rows are meant; how it ended, if it ended
        just so before. ClaimLost names the keys that it does not hold."""
        partition_id = partition.partition_id
        lease, closed = self.leases.get(claim_id), self.closed.get(claim_id)
        if lease is not None:
            chosen = lease.chosen(keys, partition_id, self.name, partition.slots, commit=commit)
            return lease, chosen
        if closed is None:
            raise claim_lost(partition_id, self.name, claim_id, None)
        lost = closed.check(keys, commit=commit)
        if lost:
            raise claim_lost(partition_id, self.name, claim_id, lost)
        return closed

    def commit(self, lease: Lease, keys: Iterable[str]) -> None:
        """Finish rows of a lease for good."""
        for key in keys:
            position = lease.rows.pop(key)
            lease.done.add(key)
            del self.held[position]
            del self.offered[position]
            self.committed.add(position)

    def give_back(self, lease: Lease, keys: Iterable[str], *, delivered: bool = True) -> None:
        """Offer rows of a lease again."""
        positions: list[int] = []
        for key in keys:
            position = lease.rows.pop(key)
            lease.lost[key] = RELEASED
            del self.held[position]
            if not delivered:
                self._uncount(position)
            positions.append(position)
        for queue in self.queues.values():
            for position in positions:
                queue.offer(position)

    def _uncount(self, position: int) -> None:
        self.offered[position] -= 1
        if not self.offered[position]:
            del self.offered[position]

    def settle(self, lease: Lease, n: int) -> None:
        """A commit or release is done: a lease without rows is over."""
        if not lease.rows:
            self.end(lease, Closed(n, lease.lost, bool(lease.done)))

    def end(self, lease: Lease, closed: Closed | None) -> None:
        """Let go of a lease, and remember for a while how it ended."""
        del self.leases[lease.claim_id]
        self._holders.end(lease)
        if closed is not None:
            self.remember(lease, closed)
        if lease.share is not None:
            self.settle_batch(lease.share[0])

    def remember(self, lease: Lease, closed: Closed) -> None:
        """Keep for a while how a lease ended."""
        if len(closed.lost) > MAX_LOST:
            return
        self.closed[lease.claim_id] = closed
        if lease.share is None:
            self.single.append(lease.claim_id)
            if len(self.single) > MAX_CLOSED:
                self.closed.pop(self.single.popleft(), None)

    def settle_batch(self, index: int) -> None:
        """A batch of which nothing is held any more is forgotten in its time."""
        shares = self.batches[index].shares
        if shares is None or any(share.granted.claim_id in self.leases for share in shares):
            self.settled.pop(index, None)
            return
        self.settled[index] = None
        self.settled.move_to_end(index)
        if len(self.settled) > MAX_BATCHES:
            oldest, _ = self.settled.popitem(last=False)
            for share in self.batches.pop(oldest).shares or ():
                self.closed.pop(share.granted.claim_id, None)
            self.forgotten = max(self.forgotten, oldest)

    # -- rows that go ------------------------------------------------------------------------

    def cleared(self, position: int, row: Row) -> None:
        """A row is gone."""
        self.offered.pop(position, None)
        lease = self.held.pop(position, None)
        if lease is not None:
            del lease.rows[row.key]
            lease.lost[row.key] = CLEARED
        elif position in self.committed:
            self.committed.discard(position)
        else:
            return
        group = row.account
        if type(group) is Group:
            # What is left of the group may be free, and so all of it.
            for queue in self.queues.values():
                if queue.grouped:
                    queue.offer_group(group)
