"""Partitions that somebody waits for before they are made. Owns who is told when they are."""

from __future__ import annotations

import asyncio

from dataplane.tags.partition import Partition
from dataplane.tags.store import TagStore


class Births:
    def __init__(self, store: TagStore) -> None:
        self._store = store
        self._awaited: dict[str, set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._awaited.values()))

    def is_awaited(self, partition_id: str) -> bool:
        """Whether anybody waits for a partition of this name."""
        return partition_id in self._awaited

    async def of(self, partition_id: str) -> Partition:
        """The partition, once it is there."""
        while (partition := self._store.partitions.get(partition_id)) is None:
            born: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            awaiting = self._awaited.setdefault(partition_id, set())
            awaiting.add(born)
            try:
                await born
            finally:
                awaiting.discard(born)
                if not awaiting and self._awaited.get(partition_id) is awaiting:
                    del self._awaited[partition_id]
        return partition

    def tell(self, partition_id: str) -> None:
        """The partition is there."""
        for born in self._awaited.get(partition_id, ()):
            if not born.done():
                born.set_result(None)
