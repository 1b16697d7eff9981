"""What holds the memory: partitions, the producers that have most in them, tasks that lag. Pure.

The tag store's own accounts are all that it asks: bytes of extents and tags, and what is reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from dataplane.tags.accounts import Producer
from dataplane.tags.explain.clients import Clients
from dataplane.tags.explain.foremost import Foremost
from dataplane.tags.explain.wording import many, quoted, size
from dataplane.tags.partition import Partition
from dataplane.types import TagValue

PARTITIONS = 10
"""Partitions that are told, those that hold most."""
PRODUCERS = 3
"""Producers that are told of each."""
STEP = 256

Entry = dict[str, TagValue]
Held = tuple[list[Entry], list[str]]
"""As a program and as a person reads it."""


class Holders:
    """Tells what partitions hold."""

    def __init__(self, clients: Clients, waiting: Callable[[str], int]) -> None:
        self._clients = clients
        self._waiting = waiting
        """How many wait for room in a partition."""

    def of_all(self, partitions: Iterable[Partition]) -> Generator[None, None, Held]:
        """Of the partitions that hold most, step by step."""
        largest: Foremost[Partition] = Foremost(PARTITIONS)
        for step, partition in enumerate(partitions, 1):
            largest.offer(partition.account.total_bytes, partition)
            if not step % STEP:
                yield
        entries: list[Entry] = []
        lines: list[str] = []
        for partition in largest.in_order():
            more_entries, more_lines = yield from self.of(partition)
            entries += more_entries
            lines += more_lines
        if largest.left_out:
            lines.append(f"and {largest.left_out} partitions more, which hold less each")
        return entries, lines

    def of(self, partition: Partition) -> Generator[None, None, Held]:
        """Of one partition."""
        account, quota, name = partition.account, partition.quota, partition.partition_id
        waiting = self._waiting(name)
        prompts = partition.prompts
        extents = account.extent_bytes + prompts.extent_bytes
        count = account.rows + prompts.rows
        entry: Entry = {
            "partition_id": name, "rows": count, "prompt_rows": prompts.rows,
            "extent_bytes": extents, "tag_bytes": partition.tag_bytes,
            "held_bytes": account.held_bytes, "held_rows": account.held_rows, "waiting": waiting,
        }  # fmt: skip
        text = (
            f"partition {quoted(name)} holds {size(extents)} of extents and "
            f"{size(partition.tag_bytes)} of tags in {many(count, 'row')}"
        )
        if prompts.rows and quota is not None:
            text += f" (no quota counts the {prompts.rows} of prompts of groups)"
        if account.held_bytes or account.held_rows:
            text += f", keeps {size(account.held_bytes)} and {many(account.held_rows, 'row')} "
            text += "for groups"
        if quota is not None:
            limits = quota.limits()
            entry["quota"] = dict(limits)
            text += f"; quota {', '.join(f'{limit} {value}' for limit, value in limits.items())}"
        if waiting:
            text += f"; {waiting} {'waits' if waiting == 1 else 'wait'} for room"
        entries, lines = [entry], [text]
        for producer in (yield from self._producers(partition)):
            entries.append(self._entry(name, producer))
            client_id = producer.client_id
            lines.append(
                f"  {size(producer.total_bytes)} and {many(producer.total_rows, 'row')} by "
                f"{self._clients.called(client_id)}: {self._clients.state(client_id)}"
            )
        lagging = partition.claims.lagging_task()
        if lagging is not None:
            committed = len(partition.claims.tasks[lagging].committed)
            entries.append({"partition_id": name, "task": lagging, "committed": committed})
            lines.append(
                f"  task {quoted(lagging)} lags most: it has committed {many(committed, 'row')}"
            )
        return entries, lines

    def _entry(self, partition_id: str, producer: Producer) -> Entry:
        client_id = producer.client_id
        return {
            "partition_id": partition_id, "producer": self._clients.label(client_id),
            "client_id": client_id, "alive": self._clients.is_alive(client_id),
            "bytes": producer.total_bytes, "rows": producer.total_rows,
        }  # fmt: skip

    def _producers(self, partition: Partition) -> Generator[None, None, list[Producer]]:
        most: Foremost[Producer] = Foremost(PRODUCERS)
        for step, producer in enumerate(list(partition.producers.values()), 1):
            if not producer.is_empty:
                most.offer((producer.total_bytes, producer.total_rows), producer)
            if not step % STEP:
                yield
        return most.in_order()
