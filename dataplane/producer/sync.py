"""The blocking producer: the verbs of `AsyncProducer`, for threads.

An event loop on a thread of its own does the work. A forked child is a new producer: it touches
nothing of what it inherited, and has no spool, which stays its parent's. Where the parent had made
calls before the fork, those of the child are refused, since gRPC does not work there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, TypeVar, Unpack

from dataplane.producer.access import Access
from dataplane.producer.aio import AsyncProducer, Path
from dataplane.producer.batching import BatchPolicy
from dataplane.producer.life import Life
from dataplane.producer.reading import LEASE_S, Where, closed
from dataplane.producer.results import Arrays, Listing
from dataplane.producer.retry import RetryPolicy
from dataplane.producer.sending import Rejected
from dataplane.producer.trajectory import TrajectoriesPut, Trajectory, TrajectoryResult
from dataplane.types import Change, Claim, Explanation, KVBatchMeta, Revision
from dataplane.v1 import dataplane_pb2 as pb

Result = TypeVar("Result")


class Options(TypedDict, total=False):
    """What an `AsyncProducer` takes besides the address, which says what each means."""

    token: str | None
    token_file: Path | None
    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None
    access: Access | None
    spool: Path | None
    spool_bytes: int
    spool_after_s: float
    spool_sync_s: float
    on_rejected: Callable[[Rejected], None] | None
    batch: BatchPolicy | None
    retry: RetryPolicy | None
    timeout: float
    wait_timeout: float


class Producer:
    """A producer outside a cluster, for threads. `AsyncProducer` has the same verbs as coroutines,
    and says what each does.

    Every verb takes `timeout` in seconds; None means the configured default. `close` it, or use it
    as a context manager; what is not closed is closed at exit.
    """

    def __init__(self, address: str, **options: Unpack[Options]) -> None:
        """A producer of the gateway at this address. Arguments are those of `AsyncProducer`."""
        self._address = address
        self._options = options
        self._closed = False
        self._lived = Life(AsyncProducer(address, **options))
        self._end = weakref.finalize(self, self._lived.end)
        _producers.add(self)

    @property
    def client_id(self) -> str:
        """Who this producer is to its gateway; a forked child is another."""
        return self._life().producer.client_id

    @property
    def plane_id(self) -> str:
        """The plane that it belongs to; empty before the gateway was there once."""
        return self._life().producer.plane_id

    @property
    def spooled(self) -> int:
        """Puts that wait on disk for the gateway."""
        return self._life().producer.spooled

    @property
    def rejected(self) -> int:
        """Puts that waited on disk and were refused."""
        return self._life().producer.rejected

    def put_trajectory(
        self,
        trajectory: Trajectory | pb.Trajectory,
        partition_id: str,
        *,
        attempt: int | None = None,
        if_absent: bool = False,
        timeout: float | None = None,
    ) -> TrajectoryResult:
        """See `AsyncProducer.put_trajectory`."""
        it = self._life().producer
        return self._run(
            it.put_trajectory(
                trajectory, partition_id, attempt=attempt, if_absent=if_absent, timeout=timeout
            )
        )

    def put_trajectories(
        self,
        trajectories: Sequence[Trajectory | pb.Trajectory],
        partition_id: str,
        *,
        attempt: int | None = None,
        if_absent: bool = False,
        all_or_nothing: bool = False,
        timeout: float | None = None,
    ) -> TrajectoriesPut:
        """See `AsyncProducer.put_trajectories`."""
        it = self._life().producer
        return self._run(
            it.put_trajectories(
                trajectories,
                partition_id,
                attempt=attempt,
                if_absent=if_absent,
                all_or_nothing=all_or_nothing,
                timeout=timeout,
            )
        )

    def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Mapping[str, object] | None = None,
        tags: Mapping[str, object] | None = None,
        *,
        attempt: int | None = None,
        must_exist: bool = False,
        if_absent: bool = False,
        return_tags: bool = False,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """See `AsyncProducer.kv_put`."""
        it = self._life().producer
        return self._run(
            it.kv_put(
                key,
                partition_id,
                fields,
                tags,
                attempt=attempt,
                must_exist=must_exist,
                if_absent=if_absent,
                return_tags=return_tags,
                timeout=timeout,
            )
        )

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        tags: Sequence[Mapping[str, object]] | None = None,
        *,
        attempt: int | None = None,
        must_exist: bool = False,
        if_absent: bool = False,
        return_tags: bool = False,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """See `AsyncProducer.kv_batch_put`."""
        it = self._life().producer
        return self._run(
            it.kv_batch_put(
                keys,
                partition_id,
                fields,
                tags,
                attempt=attempt,
                must_exist=must_exist,
                if_absent=if_absent,
                return_tags=return_tags,
                timeout=timeout,
            )
        )

    def kv_clear(
        self,
        keys: Sequence[str] | None,
        partition_id: str,
        *,
        where: Where | None = None,
        retire: bool = False,
        timeout: float | None = None,
    ) -> int:
        """See `AsyncProducer.kv_clear`."""
        it = self._life().producer
        return self._run(
            it.kv_clear(keys, partition_id, where=where, retire=retire, timeout=timeout)
        )

    def begin_group(
        self,
        uid: str,
        partition_id: str,
        *,
        n: int,
        declared_bytes: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """See `AsyncProducer.begin_group`."""
        it = self._life().producer
        return self._run(
            it.begin_group(uid, partition_id, n=n, declared_bytes=declared_bytes, timeout=timeout)
        )

    def end_group(
        self,
        attempt: int,
        status: str,
        *,
        partition_id: str | None = None,
        timeout: float | None = None,
    ) -> Revision:
        """See `AsyncProducer.end_group`."""
        it = self._life().producer
        return self._run(it.end_group(attempt, status, partition_id=partition_id, timeout=timeout))

    def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        on_missing: str = "raise",
        timeout: float | None = None,
    ) -> Arrays:
        """See `AsyncProducer.kv_batch_get`."""
        it = self._life().producer
        return self._run(
            it.kv_batch_get(
                keys, partition_id, select_fields, on_missing=on_missing, timeout=timeout
            )
        )

    def kv_list(
        self,
        partition_id: str,
        *,
        where: Where | None = None,
        since: Revision | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Listing:
        """See `AsyncProducer.kv_list`."""
        it = self._life().producer
        return self._run(
            it.kv_list(
                partition_id,
                where=where,
                since=since,
                columns=columns,
                limit=limit,
                timeout=timeout,
            )
        )

    def kv_wait(
        self,
        partition_id: str,
        where: Where | None = None,
        *,
        count: int = 1,
        group_by: str | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """See `AsyncProducer.kv_wait`."""
        it = self._life().producer
        return self._run(
            it.kv_wait(partition_id, where, count=count, group_by=group_by, timeout=timeout)
        )

    def kv_claim(
        self,
        partition_id: str,
        task: str,
        *,
        count: int,
        fields: Sequence[str] = (),
        where: Where | None = None,
        order_by: str | None = None,
        groups: bool = False,
        lease_s: float = LEASE_S,
        timeout: float | None = None,
    ) -> Claim:
        """See `AsyncProducer.kv_claim`."""
        it = self._life().producer
        return self._run(
            it.kv_claim(
                partition_id,
                task,
                count=count,
                fields=fields,
                where=where,
                order_by=order_by,
                groups=groups,
                lease_s=lease_s,
                timeout=timeout,
            )
        )

    def kv_commit(
        self,
        claim: Claim,
        *,
        timeout: float | None = None,
    ) -> Revision:
        """See `AsyncProducer.kv_commit`."""
        it = self._life().producer
        return self._run(it.kv_commit(claim, timeout=timeout))

    def kv_release(
        self,
        claim: Claim,
        *,
        timeout: float | None = None,
    ) -> Revision:
        """See `AsyncProducer.kv_release`."""
        it = self._life().producer
        return self._run(it.kv_release(claim, timeout=timeout))

    def explain(
        self,
        partition_id: str | None = None,
        where: Where | None = None,
        *,
        fields: Sequence[str] = (),
        task: str | None = None,
        group_by: str | None = None,
        count: int | None = None,
        timeout: float | None = None,
    ) -> Explanation:
        """See `AsyncProducer.explain`."""
        it = self._life().producer
        return self._run(
            it.explain(
                partition_id,
                where,
                fields=fields,
                task=task,
                group_by=group_by,
                count=count,
                timeout=timeout,
            )
        )

    def request_outcome(
        self,
        request_id: str,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """See `AsyncProducer.request_outcome`."""
        it = self._life().producer
        return self._run(it.request_outcome(request_id, timeout=timeout))

    def flush(
        self,
        *,
        timeout: float | None = None,
    ) -> None:
        """See `AsyncProducer.flush`."""
        it = self._life().producer
        return self._run(it.flush(timeout=timeout))

    def submit(
        self,
        trajectory: Trajectory | pb.Trajectory,
        partition_id: str,
        *,
        attempt: int | None = None,
        if_absent: bool = False,
    ) -> concurrent.futures.Future[TrajectoryResult]:
        """See `AsyncProducer.submit`: a future of what becomes of the trajectory."""
        it = self._life().producer
        answer = concurrent.futures.Future[TrajectoryResult]()

        async def submit() -> None:
            told = await it.submit(trajectory, partition_id, attempt=attempt, if_absent=if_absent)
            told.add_done_callback(lambda told: _pass_on(told, answer))

        self._run(submit())
        return answer

    def kv_watch(
        self,
        partition_id: str,
        *,
        since: Revision | None = None,
        where: Where | None = None,
        timeout: float | None = None,
    ) -> Iterator[Change]:
        """See `AsyncProducer.kv_watch`."""
        it = self._life().producer
        changes = it.kv_watch(partition_id, since=since, where=where, timeout=timeout)
        try:
            while True:
                yield self._run(anext(changes))
        finally:
            if not self._closed:
                self._run(changes.aclose())

    @contextmanager
    def group(
        self,
        uid: str,
        partition_id: str,
        *,
        n: int,
        declared_bytes: int | None = None,
        timeout: float | None = None,
    ) -> Generator[int]:
        """See `AsyncProducer.group`."""
        attempt = self.begin_group(
            uid, partition_id, n=n, declared_bytes=declared_bytes, timeout=timeout
        )
        try:
            yield attempt
        except BaseException:
            self.end_group(attempt, "failure", timeout=timeout)
            raise
        self.end_group(attempt, "finished", timeout=timeout)

    def close(self) -> None:
        """See `AsyncProducer.close`."""
        self._closed = True
        self._end()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Producer({self._lived.producer!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a producer does not travel; make one in the other process instead")

    def _life(self) -> Life:
        if self._closed:
            raise closed()
        return self._lived

    def _run(self, verb: Coroutine[Any, Any, Result]) -> Result:
        return self._lived.run(verb)

    def begin_in_child(self) -> None:
        """Become a new producer in a forked child; what was inherited stays the parent's."""
        self._end.detach()
        inherited = self._lived.producer
        inherited.close_in_child()
        _inherited.append(self._lived)
        if self._closed:
            return
        options = self._options.copy()
        options.pop("spool", None)
        self._lived = Life(AsyncProducer(self._address, **options))
        self._end = weakref.finalize(self, self._lived.end)


def _pass_on(
    told: asyncio.Future[TrajectoryResult], answer: concurrent.futures.Future[TrajectoryResult]
) -> None:
    if told.cancelled():
        answer.cancel()
        answer.set_running_or_notify_cancel()
    elif (error := told.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(told.result())


_producers: weakref.WeakSet[Producer] = weakref.WeakSet()
_inherited: list[Life] = []
"""What a forked child has of its parent's: nobody may end it here, not even by collecting it."""


def _after_fork() -> None:
    for producer in list(_producers):
        producer.begin_in_child()


os.register_at_fork(after_in_child=_after_fork)
