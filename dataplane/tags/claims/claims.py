"""Claims: what the tasks of a partition may claim, who waits for it, and how claims end. Pure.

A row is delivered to one consumer of a task at a time, and committed once. What is about to change
is told to a Registrar first, which journals it. Claims change no revision and wake nobody but
claimers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.tags.claims.granting import Granting, Registrar
from dataplane.tags.claims.leases import (
    ABANDONED,
    RELEASED,
    Closed,
    Granted,
    Holders,
    Lease,
    claim_lost,
)
from dataplane.tags.claims.queues import Ask, Order, Queue
from dataplane.tags.claims.shares import Batch, Rank, Terms
from dataplane.tags.claims.tasks import MAX_BATCHES, Task
from dataplane.tags.rows import Row, Slots

if TYPE_CHECKING:
    from dataplane.tags.partition import Partition
    from dataplane.tags.query import Predicate
    from dataplane.tags.views.views import Condition

MAX_TASKS = 256
"""Tasks of one partition."""
MAX_IDLE = 16
"""Queues for which nobody waits that are kept up to date for the next claim."""


class Claims:
    """The claims of one partition. What needs more of it than its slots is given it each time, so
    that a dropped partition is not kept alive by what it holds."""

    def __init__(self, partition: Partition) -> None:
        self.active = False
        """Whether there is any task."""
        self.tasks: dict[str, Task] = {}
        self.holders = Holders()
        self._slots: Slots = partition.slots
        self._awake: dict[Queue, None] = {}
        """Queues that have to be looked at."""
        self._idle: OrderedDict[Queue, None] = OrderedDict()

    # -- asking ------------------------------------------------------------------------------

    def open(
        self,
        partition: Partition,
        name: str,
        condition: Condition,
        predicate: Predicate,
        order: Order,
    ) -> Queue:
        """The queue to ask in, until it is closed. It is filled before anybody enters it."""
        task = self.tasks.get(name)
        if task is None:
            if len(self.tasks) >= MAX_TASKS:
                raise InvalidRequest(
                    f"partition {partition.partition_id!r} has {MAX_TASKS} tasks; a task is a kind "
                    f"of consumer, such as 'train', and {name!r:.80} would be one more"
                )
            task = self.task(name)
        queue = task.queues.get((condition, order))
        if queue is None:
            view = partition.views.open(condition, predicate)
            queue = Queue(task, view, order, self._slots, self._awake)
            task.queues[queue.key] = queue
        self._idle.pop(queue, None)
        queue.users += 1
        return queue

    def task(self, name: str) -> Task:
        """The task of this name; born if there is none."""
        task = self.tasks.get(name)
        if task is None:
            task = self.tasks[name] = Task(name, self.holders)
            self.active = True
        return task

    def close(self, partition: Partition, queue: Queue) -> None:
        """Who opened the queue is done with it."""
        queue.users -= 1
        task = self.tasks.get(queue.task.name)
        if queue.users or task is None or task.queues.get(queue.key) is not queue:
            return
        self._idle[queue] = None
        while len(self._idle) > MAX_IDLE:
            self._drop(partition, self._idle.popitem(last=False)[0])

    def _drop(self, partition: Partition, queue: Queue) -> None:
        queue.view.subscribers.remove(queue)
        partition.views.close(queue.view)
        self._awake.pop(queue, None)
        task = self.tasks[queue.task.name]
        del task.queues[queue.key]
        if task.is_blank:  # born of a claim that was answered with nothing
            del self.tasks[task.name]
            self.active = bool(self.tasks)

    def granted(self, client_id: str, number: int) -> Granted | None:
        """What a request was answered with before, while its rows are held."""
        for lease in self.holders.of(client_id):
            if number in lease.holders[client_id]:
                return lease.granted
        return None

    def check_count(self, partition: Partition, count: int) -> None:
        """InvalidRequest if there can never be as many as that."""
        rows = None if partition.quota is None else partition.quota.rows
        if rows is not None and count > rows:
            raise InvalidRequest(
                f"count is {count}, and the quota of partition {partition.partition_id!r} is "
                f"{rows} rows, so there can never be as many: claim fewer, or raise the quota"
            )

    def enter(self, partition: Partition, ask: Ask, registrar: Registrar) -> None:
        """Let somebody wait, whom `serve` answers. A share of a batch that was drawn is answered
        at once."""
        if ask.rank is not None:
            task = self.tasks[ask.queue.task.name]
            batch = self._batch(task, ask, ask.rank)
            if batch.shares is not None:
                ask.reply(Granting(partition, task, self.holders, registrar).share(ask, ask.rank))
                return
            batch.waiting += 1
        ask.queue.enter(ask)

    def _batch(self, task: Task, ask: Ask, rank: Rank) -> Batch:
        condition = ask.queue.view.condition
        terms = Terms(
            rank.dp_size, ask.count, tuple(sorted(condition.fields)), condition.canonical,
            ask.queue.order.text, condition.grouped,
        )  # fmt: skip
        batch = task.batches.get(rank.batch_index)
        if batch is not None:
            batch.terms.check(task.name, rank.batch_index, terms)
        elif rank.batch_index <= task.forgotten:
            raise InvalidRequest(
                f"batch {rank.batch_index} of task {task.name!r} ended long ago, and only the last "
                f"{MAX_BATCHES} are remembered: batch_index goes up from step to step"
            )
        else:
            batch = task.batches[rank.batch_index] = Batch(terms)
        return batch

    def withdraw(self, ask: Ask) -> None:
        """Somebody waits no longer."""
        if ask.queue.asks.get(ask.name) is not ask:
            return
        ask.queue.leave(ask)
        if ask.rank is not None:
            batches = self.tasks[ask.queue.task.name].batches
            batch = batches[ask.rank.batch_index]
            batch.waiting -= 1
            if not batch.waiting and batch.shares is None:
                del batches[ask.rank.batch_index]

    def wanted(self) -> int:
        """The largest number of rows or groups that anybody waits for."""
        asks = (a for t in self.tasks.values() for q in t.queues.values() for a in q.asks.values())
        return max((ask.count for ask in asks), default=0)

    # -- answering ---------------------------------------------------------------------------

    def serve(self, partition: Partition, registrar: Registrar, *, growing: bool) -> None:
        """Answer everybody who can be answered. `growing` says whether groups of the partition
        are open: their rows may come though it is sealed."""
        last = partition.sealed and not growing
        if last:
            for task in self.tasks.values():
                for queue in task.queues.values():
                    queue.look()
        while self._awake:
            queue = next(iter(self._awake))
            del self._awake[queue]
            task = self.tasks[queue.task.name]
            self._serve(Granting(partition, task, self.holders, registrar), task, queue, last=last)

    def _serve(self, granting: Granting, task: Task, queue: Queue, *, last: bool) -> None:
        queue.settle()
        while (ask := queue.first()) is not None:
            enough = len(queue.ready) >= ask.count
            if not enough and not (last and not self._may_return(task, ask)):
                break
            self._answer(granting, ask)
        if last:
            # Whose rows the first one waits for must not wait behind it.
            for ask in list(queue.asks.values())[1:]:
                if ask.name in queue.asks and not self._may_return(task, ask):
                    self._answer(granting, ask)

    def _may_return(self, task: Task, ask: Ask) -> bool:
        """Whether others hold rows that would be ready if they came back."""
        return any(
            lease.holders.keys() != {ask.client_id}
            and any(map(ask.queue.matches, lease.rows.values()))
            for lease in task.leases.values()
        )

    def _answer(self, granting: Granting, ask: Ask) -> None:
        count = min(ask.count, len(ask.queue.ready))
        if ask.rank is None:
            self._reply(ask, granting.rows, ask, count)
            return
        rank = ask.rank
        try:
            granting.batch(ask, rank, count)
        except DataplaneError as error:
            self.withdraw(ask)
            ask.reply(error)
            return
        for other in list(ask.queue.asks.values()):
            if other.rank is not None and other.rank.batch_index == rank.batch_index:
                self._reply(other, granting.share, other, other.rank)

    def _reply(self, ask: Ask, grant: Callable[..., Granted], *given: object) -> None:
        try:
            answer: Granted | DataplaneError = grant(*given)
        except DataplaneError as error:
            answer = error
        self.withdraw(ask)
        ask.reply(answer)

    # -- ending ------------------------------------------------------------------------------

    def commit(
        self,
        partition: Partition,
        name: str,
        claim_id: int,
        keys: Sequence[str],
        registrar: Registrar,
    ) -> int:
        """Finish rows of a claim for good, all of them or none; the revision of that moment.

        ClaimLost names what it holds no more. Who ends a claim once more, as it was ended, is
        answered as before.
        """
        task = self._task(partition, name, claim_id)
        found = task.find(partition, claim_id, keys, commit=True)
        if isinstance(found, Closed):
            return found.n
        lease, chosen = found
        registrar.committed((partition.partition_id, name, claim_id, chosen))
        task.commit(lease, chosen)
        task.settle(lease, partition.revision)
        return partition.revision

    def release(
        self,
        partition: Partition,
        name: str,
        claim_id: int,
        keys: Sequence[str],
        registrar: Registrar,
    ) -> int:
        """Give rows of a claim back, all of them or none; otherwise as `commit`."""
        task = self._task(partition, name, claim_id)
        found = task.find(partition, claim_id, keys, commit=False)
        if isinstance(found, Closed):
            return found.n
        lease, chosen = found
        registrar.released((partition.partition_id, name, claim_id, chosen, RELEASED))
        task.give_back(lease, chosen)
        task.settle(lease, partition.revision)
        return partition.revision

    def _task(self, partition: Partition, name: str, claim_id: int) -> Task:
        task = self.tasks.get(name)
        if task is None:
            raise claim_lost(partition.partition_id, name, claim_id, None)
        return task

    def expire(self, partition: Partition, registrar: Registrar) -> None:
        """Offer the rows again of all whose term is over."""
        for lease in self.holders.expired(registrar.lease_now):
            self._revoke(partition, lease, "expired", registrar)

    def abandon(
        self, partition: Partition, client_id: str, numbers: Iterable[int], registrar: Registrar
    ) -> None:
        """Take back what was granted to requests whose callers had given up: it never reached
        anybody."""
        given_up = set(numbers)
        for lease in self.holders.of(client_id):
            for number in lease.holders[client_id] & given_up:
                shared = len(lease.holders) > 1 or len(lease.holders[client_id]) > 1
                if shared or lease.share is not None:
                    task = self._task_of(lease).name
                    body = (partition.partition_id, task, lease.claim_id, client_id, number)
                    registrar.left(body)
                    self.holders.leave_to_others(lease, client_id, number)
                else:
                    self._revoke(partition, lease, ABANDONED, registrar)
                if client_id not in lease.holders:
                    break

    def _revoke(self, partition: Partition, lease: Lease, why: str, registrar: Registrar) -> None:
        task = self._task_of(lease)
        keys = list(lease.rows)
        registrar.released((partition.partition_id, task.name, lease.claim_id, keys, why))
        task.give_back(lease, keys, delivered=why != ABANDONED)
        task.end(lease, None)

    def _task_of(self, lease: Lease) -> Task:
        return next(t for t in self.tasks.values() if t.leases.get(lease.claim_id) is lease)

    def cleared(self, position: int, row: Row) -> None:
        """A row is gone, for every task."""
        for task in self.tasks.values():
            task.cleared(position, row)

    def end(self) -> list[Ask]:
        """The partition is gone, and everything about it; who was still waiting."""
        asks: list[Ask] = []
        for task in self.tasks.values():
            for queue in task.queues.values():
                asks += queue.asks.values()
                queue.asks.clear()
                queue.view.subscribers.clear()
            # A queue leads to its task and to all rows: a circle would keep them for ever.
            task.queues.clear()
        self.tasks = {}
        self.holders = Holders()
        self._awake.clear()
        self._idle.clear()
        self.active = False
        return asks

    # -- what there is -----------------------------------------------------------------------

    def is_committed_by_all(self, position: int) -> bool:
        """Whether every task that there is has committed this row (False if there is no task)."""
        tasks = self.tasks.values()
        return bool(tasks) and all(position in task.committed for task in tasks)

    def lagging_task(self) -> str | None:
        """The task with the most rows that it has not committed; None if there is no task."""
        lagging = min(self.tasks.values(), key=lambda task: len(task.committed), default=None)
        return None if lagging is None else lagging.name
