"""What the controller does when it is asked: batches by index, claims, statuses. A thin shell over
the registry.

Owns the order in which a request's parts happen: look, choose, write to the plane, answer. Requests
wait for the plane or for rows without holding up any other; of one partition they take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from dataplane.errors import DeadlineExceeded, InvalidRequest, PartitionNotFound
from dataplane.server.connection import Connection, Verb
from dataplane.wire.frames import Body
from dataplane.wire.messages import check_wait

from ..metrics import MetricsExporter, Progress, Snapshot
from . import sampler_state
from .answers import Answer, answer_of, no_rows
from .asking import PREFIX
from .mirrors import Mirrors
from .registry import PartitionRows, Place
from .snapshot import PartitionSnapshot, PartitionView

if TYPE_CHECKING:
    from ..sampler import BaseSampler


class ControllerService:
    """The verbs of the controller. For one event loop."""

    def __init__(self, mirrors: Mirrors, sampler: BaseSampler, *, polling_mode: bool) -> None:
        self.mirrors = mirrors
        self.sampler = sampler
        self.polling_mode = polling_mode
        self.metrics: MetricsExporter | None = None
        work: dict[str, Callable[..., Awaitable[Any]]] = {
            "fetch": self.fetch,
            "force_fetch": self.all_rows,
            "reserve": mirrors.reserve,
            "meta_of_keys": self.of_keys,
            "keys_of": self.keys_of,
            "consumption": self.consumption,
            "production": self.production,
            "reset_consumption": self.reset_consumption,
            "clear_partition": self.clear_partition,
            "sampler_state": self.sampler_state,
            "reload": self.reload,
        }
        self.verbs: dict[str, Verb] = {
            PREFIX + name: self._verb(name, does) for name, does in work.items()
        }

    def _verb(self, name: str, does: Callable[..., Awaitable[Any]]) -> Verb:
        op_type = name.upper()

        async def answer(connection: Connection, number: int, body: Body) -> None:
            if self.metrics is None:
                connection.reply(number, await does(*body))
                return
            with self.metrics.measure(op_type):
                told = await does(*body)
            if name in ("fetch", "reserve"):
                count = len(told.indexes) if name == "fetch" else len(told)
                self.metrics.record_samples(op_type, count)
            connection.reply(number, told)

        return answer

    # -- batches -----------------------------------------------------------------------------

    async def fetch(
        self,
        partition_id: str,
        fields: list[str],
        count: int,
        task: str,
        sampling: dict[str, Any],
        wait_s: float,
        request: str,
        again: bool,
    ) -> Answer:
        """Rows that the sampler chooses, consumed by the task from here on.

        In polling mode the batch is empty where there are not enough; else this waits until there
        are. `again` says that the request may have been answered before, and the answer lost.
        """
        if type(count) is not int or count < 1:
            raise InvalidRequest(f"batch_size is a number of rows, 1 or more, not {count!r:.80}")
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + check_wait(wait_s)
        while True:
            async with self.mirrors.fresh(partition_id) as rows:
                if rows is not None:
                    batch = await self._claim(rows, fields, count, task, sampling, request, again)
                    if batch is not None:
                        return batch
                if self.polling_mode:
                    return no_rows()
                since = None if rows is None else rows.revision
                waited_s = loop.time() - began
                if loop.time() >= deadline:
                    why = f"there is no partition {partition_id!r} yet"
                    if rows is not None:
                        why = rows.why_not(fields, task, count)
                    raise DeadlineExceeded(
                        f"get_meta of {count} rows of partition {partition_id!r} for task {task!r} "
                        f"waited {waited_s:.1f} s: {why}",
                        waited_s=waited_s,
                        explanation=why,
                    )
            if since is None:
                since = await self.mirrors.now()
                if partition_id in await self.mirrors.names():
                    continue
            await self.mirrors.changed(partition_id, since, deadline)

    async def all_rows(self, partition_id: str) -> Answer:
        """All rows of a partition by index, and those that were given out ahead."""
        async with self.mirrors.fresh(partition_id) as rows:
            if rows is None:
                raise PartitionNotFound(
                    f"Partition {partition_id} not found: nothing was put there, or it was cleared",
                    partition_id=partition_id,
                )
            return answer_of(rows, rows.indexes, list(rows.fields))

    async def of_keys(self, keys: list[str], partition_id: str, create: bool) -> Answer:
        """The rows of these keys that exist, in their order; with `create` all of them do."""
        if create:
            await self.mirrors.make(partition_id, keys)
        async with self.mirrors.fresh(partition_id) as rows:
            if rows is None:
                return no_rows()
            found = [row for key in keys if (row := rows.keyed(key)) is not None]
            return answer_of(rows, [row.index for row in found], rows.common(found))

    async def keys_of(self, indexes: list[int], partition_id: str, shown: bool) -> list[str | None]:
        """The keys of rows: as callers know them, or as the plane does."""
        async with self.mirrors.fresh(partition_id) as rows:
            if rows is None:
                raise PartitionNotFound(
                    f"Partition {partition_id} not found: nothing was put there, or it was cleared",
                    partition_id=partition_id,
                )
            found = [rows.row(index) for index in indexes]
            return [row and (row.shown_key if shown else row.key) for row in found]

    # -- statuses ----------------------------------------------------------------------------

    async def consumption(self, task: str, partition_id: str) -> list[list[int]] | None:
        """Indexes, and which of the rows the task consumed; None without such a partition."""
        async with self.mirrors.fresh(partition_id) as rows:
            return None if rows is None else list(rows.consumption(task))

    async def production(self, fields: list[str], partition_id: str) -> list[Any] | None:
        """Indexes, and which of the fields each row has; None without such a partition or field."""
        async with self.mirrors.fresh(partition_id) as rows:
            found = None if rows is None else rows.production(fields)
            return None if found is None else list(found)

    async def reset_consumption(self, partition_id: str, task: str | None) -> bool:
        """Forget what a task, or every one, consumed; whether there is such a partition."""
        async with self.mirrors.fresh(partition_id) as rows:
            if rows is not None:
                await self.mirrors.unconsume(rows, task)
            return rows is not None

    # -- the whole ---------------------------------------------------------------------------

    async def clear_partition(self, partition_id: str) -> bool:
        """Take a partition away with all rows and what the sampler knows; whether it was there."""
        there = await self.mirrors.drop(partition_id)
        self.sampler.clear_cache(partition_id)
        return there

    async def snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """A copy of all that is known of a partition."""
        async with self.mirrors.fresh(partition_id) as rows:
            return None if rows is None else PartitionSnapshot.of(rows)

    async def sampler_state(self) -> dict[str, Any]:
        """What a checkpoint has beside the rows; see checkpoint.py."""
        return {"next": self.mirrors.indexes.reserved, "sampler": sampler_state.saved(self.sampler)}

    async def reload(self, state: dict[str, Any] | None) -> None:
        """The plane was loaded with other rows: go by those, and by what was saved with them."""
        saved = state or {}
        await self.mirrors.forget()
        await self.mirrors.indexes.skip_to(saved.get("next", 0))
        if "sampler" in saved:
            sampler_state.restore(self.sampler, saved["sampler"])

    async def progress(self) -> Snapshot:
        """How far the partitions are, for metrics."""
        found: dict[str, Progress] = {}
        for name in await self.mirrors.names():
            async with self.mirrors.fresh(name) as rows:
                if rows is not None:
                    found[name] = _progress(rows)
        return Snapshot(found, sum(of.rows for of in found.values()))

    # -- claims ------------------------------------------------------------------------------

    async def _claim(
        self,
        rows: PartitionRows,
        fields: list[str],
        count: int,
        task: str,
        sampling: dict[str, Any],
        request: str,
        again: bool,
    ) -> Answer | None:
        """The batch that was chosen and is now consumed; None as long as there is none."""
        if again and (told := rows.claimed(task, request=request)):
            return answer_of(rows, told, fields)
        pid = rows.partition_id
        while True:
            remembered = self.sampler.has_cached_result(pid, task, sampling)
            rank, batch_index = sampling.get("dp_rank"), sampling.get("batch_index")
            draw = f"{rank}/{batch_index}"
            if not remembered and None not in (rank, batch_index):
                # Drawn before this controller was started again.
                drawn = rows.claimed(task, draw=draw)
                if drawn:
                    return answer_of(rows, drawn, fields)
            ready = rows.ready(fields, task)
            if len(ready) < count and not remembered:
                return None
            chosen, consumed = self._sample(rows, ready, count, task, sampling)
            if not chosen:
                return None
            if not all(map(rows.has, chosen)):
                if not remembered:
                    raise InvalidRequest(
                        f"the sampler {type(self.sampler).__name__} chose rows that are not ready: "
                        f"{[index for index in chosen if not rows.has(index)][:5]}"
                    )
                # It remembers rows that were cleared since: nobody can have them.
                self.sampler.clear_cache(pid)
                continue
            kept = self.sampler.has_cached_result(pid, task, sampling)
            number = {index: at for at, index in enumerate(chosen)}
            places = {
                index: Place(
                    request, number.get(index, -1), len(chosen), draw if kept else None
                )
                for index in consumed
                if rows.has(index)
            }  # fmt: skip
            if not await self.mirrors.consume(rows, task, places):
                return answer_of(rows, chosen, fields)
            # Some were cleared while this was written, so nothing was: draw again, without them.
            self.sampler.clear_cache(pid)
            fresh = await self.mirrors.again(pid)
            if fresh is None:
                return None
            rows = fresh

    def _sample(
        self,
        rows: PartitionRows,
        ready: list[int],
        count: int,
        task: str,
        sampling: Mapping[str, Any],
    ) -> tuple[list[int], list[int]]:
        arguments = {"task_name": task, "partition_id": rows.partition_id, **sampling}
        try:
            chosen, consumed = self.sampler(
                ready, count, partition=PartitionView(rows), **arguments
            )
            return list(chosen), list(consumed)
        except Exception as error:
            name = type(self.sampler).__name__
            raise InvalidRequest(
                f"the sampler {name} failed: {type(error).__name__}: {error}"
            ) from error


def _progress(rows: PartitionRows) -> Progress:
    count = len(rows.rows)
    cells = sum(len(row.fields) for row in rows.rows)
    consumed: dict[str, float] = {}
    for task in rows.tasks():
        flags = rows.consumption(task)[1]
        consumed[task] = sum(flags) / len(flags)
    return Progress(count, cells / (count * len(rows.fields)) if cells else 0.0, consumed)
