"""Granting: rows of a task's queue are drawn, written down, and held by who asked for them. Pure.

Owns what one claim is answered with: rows, or a rank's share of a batch that is drawn as a whole.
When a claim may be answered is for claims.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Protocol

from dataplane.tags.claims.leases import (
    CLEARED,
    IMPLICIT,
    Closed,
    Granted,
    Holders,
    Lease,
    claim_lost,
)
from dataplane.tags.claims.queues import Ask
from dataplane.tags.claims.shares import Batch, Rank, Share, split, tokens_of
from dataplane.tags.claims.tasks import Task
from dataplane.tags.rows import Row

if TYPE_CHECKING:
    from dataplane.tags.partition import Partition


class Registrar(Protocol):
    """What claims need to know, and who writes down what they are about to do.

    An error while something is written down keeps it from happening.
    """

    @property
    def now(self) -> float:
        """Seconds of the store's clock."""
        ...

    @property
    def lease_now(self) -> float:
        """Seconds of the clock of leases."""
        ...

    def claim_id(self) -> int:
        """A number that no claim of the plane has had."""
        ...

    def is_away(self, client_id: str) -> bool:
        """Whether a client has no connection."""
        ...

    def claimed(self, body: Any) -> None:
        """Journal a grant."""
        ...

    def committed(self, body: Any) -> None:
        """Journal a commit."""
        ...

    def released(self, body: Any) -> None:
        """Journal that rows go back."""
        ...

    def left(self, body: Any) -> None:
        """Journal that a request does not hold a claim any more that others hold still."""
        ...


class Granting:
    """Hands out rows of one task."""

    def __init__(
        self, partition: Partition, task: Task, holders: Holders, registrar: Registrar
    ) -> None:
        self._partition = partition
        self._task = task
        self._holders = holders
        self._registrar = registrar

    def nothing(self) -> Granted:
        """The answer where all is done."""
        return Granted(0, [], [], [], self._partition.revision, end=True)

    def rows(self, ask: Ask, count: int) -> Granted:
        """The first so many rows, or groups, of a queue."""
        if not count:
            return self.nothing()
        positions = [position for item in ask.queue.draw(count) for position in item]
        granted = self._granted(positions)
        self._write_down(ask, [(granted, ask.number, None)])
        self._hold(granted, ask, ask.number, None)
        return granted

    # -- by rank -----------------------------------------------------------------------------

    def batch(self, ask: Ask, rank: Rank, count: int) -> None:
        """Draw a whole batch: each rank's share of it waits for whoever asks."""
        partition, task = self._partition, self._task
        batch = task.batches[rank.batch_index]
        items = ask.queue.draw(count)
        field = ask.fields[0] if ask.fields else None
        schema = None if field is None else partition.schema.get(field)
        tokens = [sum(tokens_of(self._row(p), field, schema) for p in item) for item in items]
        shares = split(tokens, rank.dp_size) if items else []
        grants = [self._granted([p for i in share for p in items[i]]) for share in shares]
        # Until a rank asks for its share, it is held for it by who drew the batch.
        parts = [(granted, IMPLICIT, number) for number, granted in enumerate(grants)]
        self._write_down(ask, parts, batch)
        batch.shares = [Share(granted) for granted in grants]
        for granted, number, of_rank in parts:
            self._hold(granted, ask, number, (rank.batch_index, of_rank))
        task.settle_batch(rank.batch_index)

    def share(self, ask: Ask, rank: Rank) -> Granted:
        """A rank's share of a batch that was drawn."""
        task = self._task
        shares = task.batches[rank.batch_index].shares
        assert shares is not None
        if not shares:
            return self.nothing()
        share = shares[rank.dp_rank]
        claim_id = share.granted.claim_id
        lease, closed = task.leases.get(claim_id), task.closed.get(claim_id)
        if lease is None and (closed is None or not closed.committed):
            return self._draw_again(share, ask, rank)
        granted = self._still_there(share)
        if lease is not None:
            partition_id = self._partition.partition_id
            body = (partition_id, task.name, claim_id, ask.client_id, ask.number, ask.lease_s)
            self._registrar.claimed(body)
            lease.granted = granted
            away_since = self._away_since(ask.client_id)
            self._holders.join_share(lease, ask.client_id, ask.number, away_since, ask.lease_s)
        share.granted = granted
        share.asked = True
        return granted

    def _still_there(self, share: Share) -> Granted:
        """All replicas of a rank get the same rows: ClaimLost if the first of them got some that
        were cleared since."""
        granted = share.granted
        left = granted.left(self._partition.slots)
        if left is not granted and share.asked:
            kept = set(left.positions)
            gone = [
                row.key
                for row, position in zip(granted.rows, granted.positions, strict=True)
                if position not in kept
            ]
            raise claim_lost(
                self._partition.partition_id, self._task.name, granted.claim_id,
                dict.fromkeys(gone, CLEARED),
            )  # fmt: skip
        return left

    def _draw_again(self, share: Share, ask: Ask, rank: Rank) -> Granted:
        """The lease of a share was lost: take of its rows what nobody else has."""
        granted = self._granted(ask.queue.take(share.granted.positions))
        self._write_down(ask, [(granted, ask.number, rank.dp_rank)])
        self._task.closed.pop(share.granted.claim_id, None)
        share.granted = granted
        share.asked = True
        self._hold(granted, ask, ask.number, (rank.batch_index, rank.dp_rank))
        self._task.settle_batch(rank.batch_index)
        return granted

    # -- steps -------------------------------------------------------------------------------

    def _granted(self, positions: list[int]) -> Granted:
        task = self._task
        task.last_id = claim_id = self._registrar.claim_id()
        rows = [self._row(position) for position in positions]
        deliveries = [task.offered.get(position, 0) + 1 for position in positions]
        return Granted(claim_id, rows, positions, deliveries, self._partition.revision)

    def _write_down(
        self, ask: Ask, parts: Sequence[tuple[Granted, int, int | None]], batch: Batch | None = None
    ) -> None:
        """Journal what is about to be held; what was drawn goes back if that fails."""
        grants = [
            (granted.claim_id, number, rank, [row.key for row in granted.rows])
            for granted, number, rank in parts
        ]
        body = (
            self._partition.partition_id, self._task.name, ask.client_id, ask.lease_s,
            ask.queue.grouped, grants, None if ask.rank is None else ask.rank.batch_index,
            None if batch is None else astuple(batch.terms),
        )  # fmt: skip
        try:
            self._registrar.claimed(body)
        except BaseException:
            for granted, _, _ in parts:
                for position in granted.positions:
                    ask.queue.offer(position)
            raise

    def _hold(self, granted: Granted, ask: Ask, number: int, share: tuple[int, int] | None) -> None:
        now = self._registrar.now
        lease = Lease(granted, ask.lease_s, grouped=ask.queue.grouped, at=now)
        lease.share = share
        if granted.rows:
            self._task.hold(lease, ask.client_id, number, self._away_since(ask.client_id))
        else:
            # The share of a rank for which there was nothing: there is nothing to end either.
            self._task.remember(lease, Closed(granted.revision, {}, committed=True))

    def _away_since(self, client_id: str) -> float | None:
        return self._registrar.lease_now if self._registrar.is_away(client_id) else None

    def _row(self, position: int) -> Row:
        row = self._partition.slots.at(position)
        assert type(row) is Row
        return row
