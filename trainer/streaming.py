"""An endless data set of claimed rows for a training loop: prefetched, cut by tokens, resumable.

Owns when rows are claimed, fetched, committed and given back. Every row that is yielded is
committed once, and not before the loop has gone on from it: a trainer that dies leaves its rows to
be offered again.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from dataplane import AsyncClient, Claim, InvalidRequest, Rows, async_connect

Result = TypeVar("Result")

Layout = Literal["nested", "padded", "list", "packed"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one forward and backward pass."""

    claim: Claim
    """The claim that the rows are of; several batches can share one."""
    keys: list[str]
    tags: list[dict[str, Any]]
    rows: Rows
    """The values of `keys`, in the layout asked for."""
    is_last: bool
    """Whether it is the last batch of its claim."""


def cut_batches(
    lengths: Sequence[int], max_tokens: int | None, max_rows: int | None = None
) -> list[list[int]]:
    """Rows cut into batches of at most `max_tokens` padded tokens, rows of like length together.

    A batch counts as its longest row times its rows, what a padded forward pass costs. Rows longer
    than the limit are ValueError. Rows of a batch keep their order, and batches come in the order
    of their first rows; each row is in exactly one.

    Example: lengths [9, 2, 8, 1, 2], max_tokens 18 -> [[0, 2], [1, 3, 4]].
    """
    if max_tokens is not None:
        for row, length in enumerate(lengths):
            if length > max_tokens:
                raise ValueError(f"row {row} has {length} tokens, and a batch takes {max_tokens}")
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        full = batch and (
            (max_tokens is not None and longest * (len(batch) + 1) > max_tokens)
            or (max_rows is not None and len(batch) == max_rows)
        )
        if full:
            batches.append(sorted(batch))
            batch = []
        if not batch:
            longest = lengths[row]
        batch.append(row)
    if batch:
        batches.append(sorted(batch))
    return sorted(batches)


class StreamingDataset(IterableDataset[Batch]):
    """Batches of one task's rows, claimed as they become ready; it ends when the partition is
    sealed and all of its rows are committed.

    A claim of `count` rows (whole groups with `groups`) is fetched while the one before it is
    trained on, cut into batches by `max_tokens` and `max_rows`, and committed when the loop asks
    for a batch of the next one. With `auto_commit=False` claims are kept until `commit()`, which
    belongs beside the trainer's own checkpoint: what was not committed then is trained again after
    a restart, and nothing else.

    With `replica=(dp_rank, dp_size)` all ranks share each batch of `count`, near-equal in tokens.
    `state_dict()` then says which batch comes after the last committed one; a rank that goes on
    with it within `lease_s` gets its own shares again.

    It prefetches by itself: use it in the training process (`DataLoader(…, num_workers=0,
    batch_size=None)`). One iteration at a time.
    """

    def __init__(
        self,
        partition_id: str,
        task: str,
        fields: Sequence[str],
        *,
        count: int,
        where: Mapping[str, object] | None = None,
        groups: bool = False,
        order_by: str | None = None,
        replica: tuple[int, int] | None = None,
        layout: Layout = "nested",
        max_tokens: int | None = None,
        max_rows: int | None = None,
        length_tag: str = "seq_len",
        prefetch: int = 1,
        auto_commit: bool = True,
        lease_s: float = 30.0,
        timeout: float | None = None,
        plane: str = "default",
        address: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("count", count), ("prefetch", prefetch)):
            if type(value) is not int or value < 1:
                raise InvalidRequest(f"{name} is a number from 1 on, not {value!r:.80}")
        for name, limit in (("max_tokens", max_tokens), ("max_rows", max_rows)):
            if limit is not None and (type(limit) is not int or limit < 1):
                raise InvalidRequest(f"{name} is a number from 1 on or None, not {limit!r:.80}")
        if isinstance(fields, str) or not fields:
            raise InvalidRequest(f"fields is a list of field names, not {fields!r:.80}")
        self.partition_id = partition_id
        self.task = task
        self.fields = list(fields)
        self.batch_index = 0
        """The next batch of a replica that is not committed yet."""
        self._claim_options: dict[str, Any] = {
            "count": count,
            "fields": self.fields,
            "where": where,
            "groups": groups,
            "order_by": order_by,
            "lease_s": lease_s,
            "timeout": timeout,
        }
        self._replica = replica
        self._layout: Layout = layout
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._length_tag = length_tag
        self._prefetch = prefetch
        self._auto_commit = auto_commit
        self._plane = (plane, address, config)
        self._feed: _Feed | None = None
        self._trained: deque[Claim] = deque()
        """Claims whose rows were all yielded, oldest first, to be committed."""

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise InvalidRequest(
                "StreamingDataset prefetches by itself, and its claims are of the process that "
                "trains: use DataLoader(..., num_workers=0)"
            )
        if self._feed is not None:
            raise InvalidRequest("this dataset is being iterated already; close that iterator")
        return self._batches()

    def _batches(self) -> Generator[Batch, None, None]:
        feed = self._feed = _Feed(self)
        try:
            while True:
                fetched = feed.next()
                if fetched is None:
                    return
                claim, parts = fetched
                for number, (members, rows) in enumerate(parts, 1):
                    keys = [claim.keys[i] for i in members]
                    tags: list[dict[str, Any]] = [claim.tags[i] for i in members]
                    yield Batch(claim, keys, tags, rows, is_last=number == len(parts))
                # The loop has come back for more: it is through with the claim.
                self._trained.append(claim)
                if self._auto_commit:
                    self.commit()
        finally:
            self._feed = None
            self._trained.clear()
            feed.close()

    def commit(self) -> int:
        """Commit the claims whose batches were all yielded and gone on from; how many rows.

        ClaimLost names rows that were cleared, or whose lease ended; claims before that one are
        committed.
        """
        rows = 0
        while self._trained:
            claim = self._trained[0]
            if self._feed is None:
                raise InvalidRequest("commit belongs inside the iteration that yielded the rows")
            self._feed.commit(claim)
            self._trained.popleft()
            self.batch_index += 1
            rows += len(claim)
        return rows

    def state_dict(self) -> dict[str, int]:
        """Where to go on after a restart. Of the rows the plane knows; of a replica's batches it
        has to be told."""
        return {"batch_index": self.batch_index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self.batch_index = int(state["batch_index"])

    # -- for the feed ------------------------------------------------------------------------

    async def connect(self) -> AsyncClient:
        """The client that claims, fetches and commits."""
        name, address, config = self._plane
        return await async_connect(name, address=address, config=config)

    async def claim(self, client: AsyncClient, batch_index: int) -> Claim:
        """The next claim; of a replica the one with this index."""
        replica = None
        if self._replica is not None:
            dp_rank, dp_size = self._replica
            replica = (dp_rank, dp_size, batch_index)
        return await client.kv_claim(
            self.partition_id, self.task, replica=replica, **self._claim_options
        )

    async def fetch(self, client: AsyncClient, claim: Claim) -> list[tuple[list[int], Rows]]:
        """The batches of a claim: which of its rows each has, and their values."""
        lengths = [self._length(tags) for tags in claim.tags]
        batches = cut_batches(lengths, self._max_tokens, self._max_rows)
        if self._max_tokens is None and self._max_rows is None:
            batches = [list(range(len(claim)))] if len(claim) else []
        parts: list[tuple[list[int], Rows]] = []
        for members in batches:
            keys = [claim.keys[i] for i in members]
            rows = await client.kv_batch_get(
                keys, self.partition_id, self.fields, layout=self._layout
            )
            parts.append((members, rows))
        return parts

    @property
    def is_replica(self) -> bool:
        """Whether its claims are shares of batches that all ranks draw together."""
        return self._replica is not None

    @property
    def prefetch(self) -> int:
        """Claims that are fetched ahead of the one in use."""
        return self._prefetch

    def _length(self, tags: Mapping[str, object]) -> int:
        length = tags.get(self._length_tag)
        if type(length) is int and length >= 0:
            return length
        if self._max_tokens is not None:
            raise InvalidRequest(
                f"max_tokens needs the tag {self._length_tag!r} as a number on every row; one of "
                f"{self.partition_id!r} has {length!r:.80}"
            )
        return 0


Fetched = tuple[Claim, list[tuple[list[int], Rows]]]


class _Feed:
    """Claims and fetches ahead, in an event loop of its own, so that both can be given up."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self._dataset = dataset
        self._ready: queue.Queue[Fetched | BaseException | None] = queue.Queue()
        self._held: dict[int, Claim] = {}
        """Claims that are neither committed nor given back."""
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(dataset.prefetch)
        self._next_index = dataset.batch_index
        self._client: AsyncClient | None = None
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="streaming", daemon=True
        )
        self._thread.start()
        self._producing = self._submit(self._produce())

    def next(self) -> Fetched | None:
        """The next claim with its values; None at the end of a sealed partition."""
        fetched = self._ready.get()
        if isinstance(fetched, BaseException):
            raise fetched
        self._loop.call_soon_threadsafe(self._room.release)
        return fetched

    def commit(self, claim: Claim) -> None:
        """Commit a claim of this feed."""
        assert self._client is not None
        self._submit(self._client.kv_commit(claim)).result()
        self._held.pop(claim.claim_id, None)

    def close(self) -> None:
        """Give back what is held, and end."""
        self._producing.cancel()
        try:
            self._submit(self._end()).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _produce(self) -> None:
        try:
            self._client = await self._dataset.connect()
            while True:
                await self._room.acquire()
                claim = await self._dataset.claim(self._client, self._next_index)
                self._next_index += 1
                if claim.end:
                    self._ready.put(None)
                    return
                self._held[claim.claim_id] = claim
                self._ready.put((claim, await self._dataset.fetch(self._client, claim)))
        except Exception as error:
            self._ready.put(error)

    async def _end(self) -> None:
        try:
            await asyncio.wrap_future(self._producing)
        except (asyncio.CancelledError, CancelledError):
            pass
        if self._client is None:
            return
        try:
            # Of a replica's share other ranks would take the rows: it is kept for the one that
            # goes on with this rank, for as long as the lease lasts.
            given_back = () if self._dataset.is_replica else tuple(self._held.values())
            for claim in given_back:
                try:
                    await self._client.kv_release(claim)
                except Exception:  # its lease ends with this client
                    break
        finally:
            await self._client.close()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
