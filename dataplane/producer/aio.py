"""The asyncio producer: rows, trajectories, groups, claims and reads, through a gateway.

Of one event loop and of one process: a forked child makes another.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from dataplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutcomeUnknown,
    PlaneLost,
    QuotaExceeded,
    Unreachable,
)
from dataplane.producer.access import Access
from dataplane.producer.batching import Batcher, BatchPolicy
from dataplane.producer.puts import (
    Put,
    attempt_of,
    keys_of,
    message_of,
    mode_of,
    put_of_rows,
    put_of_trajectories,
    sent_tags,
)
from dataplane.producer.reading import Reading, Where, closed, seconds_of
from dataplane.producer.results import revision_of
from dataplane.producer.retry import RetryPolicy
from dataplane.producer.sending import Rejected, Sending, keys_written, send
from dataplane.producer.spool import Spool
from dataplane.producer.trajectory import (
    TrajectoriesPut,
    Trajectory,
    TrajectoryResult,
    results_of,
)
from dataplane.producer.transport import Transport
from dataplane.protocol.values import tags_from, to_value
from dataplane.types import KVBatchMeta, Revision
from dataplane.v1 import dataplane_pb2 as pb

Path = str | os.PathLike[str]

TIMEOUT_S: Final = 30.0
WAIT_TIMEOUT_S: Final = 600.0
SPOOL_BYTES: Final = 1 << 30
SPOOL_AFTER_S: Final = 2.0
SPOOL_SYNC_S: Final = 1.0


class AsyncProducer(Reading):
    """A producer outside a cluster, for coroutines. `Producer` has the same verbs for threads.

    Every verb takes `timeout` in seconds; None means the configured default. A put has one effect
    however often its request travels; what nobody knows of it at the deadline is OutcomeUnknown.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
        access: Access | None = None,
        spool: Path | None = None,
        spool_bytes: int = SPOOL_BYTES,
        spool_after_s: float = SPOOL_AFTER_S,
        spool_sync_s: float = SPOOL_SYNC_S,
        on_rejected: Callable[[Rejected], None] | None = None,
        batch: BatchPolicy | None = None,
        retry: RetryPolicy | None = None,
        timeout: float = TIMEOUT_S,
        wait_timeout: float = WAIT_TIMEOUT_S,
    ) -> None:
        """A producer of the gateway at `grpcs://host:port` (TLS), `grpc://host:port` (plain text)
        or `grpc+unix:///path`. It connects with its first call.

        Args:
            token, token_file: who it is; a file is read again when it changes.
            ca_file: who may have signed the gateway's certificate; None: the system's authorities.
            cert_file, key_file: its own certificate, where the gateway asks for one.
            access: all of these in one, and what is rarely needed, in their place.
            spool: a folder for puts while the gateway is away. Those that name an attempt or
                `if_absent` wait there, `spool_bytes` at most, and are sent on in order when it is
                back, also by a later process with the same folder; the others raise. None: all do.
            spool_after_s: how long the gateway may be away before a put goes there.
            spool_sync_s: how often the folder is synced. A process that dies loses nothing of it, a
                machine that dies what came in so many seconds; 0 syncs each put.
            on_rejected: called, on the event loop, with what the plane refuses of it; the folder
                keeps that, too.
            batch: when what is submitted one by one is sent.
            timeout, wait_timeout: of calls, and of those that wait for something to happen.

        Raises:
            InvalidRequest: an argument is wrong, or another process has the spool.
        """
        if access is None:
            access = Access(token, token_file, ca_file, cert_file, key_file)
        elif any(part is not None for part in (token, token_file, ca_file, cert_file, key_file)):
            raise InvalidRequest("give access, or its parts, not both")
        times = seconds_of(timeout), seconds_of(wait_timeout)
        self._reach_s = seconds_of(spool_after_s)
        self._spool = None if spool is None else Spool(spool, max_bytes=spool_bytes)
        try:
            transport = _transport_of(address, access, retry, self._spool)
        except BaseException:
            if self._spool is not None:
                self._spool.close()
            raise
        super().__init__(transport, *times)
        self._sending = (
            None
            if self._spool is None
            else Sending(self._spool, transport, on_rejected=on_rejected, sync_s=spool_sync_s)
        )
        self._batcher = Batcher(self._put_gathered, batch or BatchPolicy())
        self._attempts: dict[int, str] = {}
        """The partition of each attempt that was begun here and not ended yet."""
        self._pid = os.getpid()
        self._started = self._closed = False

    @property
    def client_id(self) -> str:
        """Who this producer is to its gateway; with a spool, the same in the next process."""
        return self._transport.client_id

    @property
    def plane_id(self) -> str:
        """The plane that it belongs to; empty before the gateway was there once."""
        return self._transport.plane_id

    @property
    def spooled(self) -> int:
        """Puts that wait on disk for the gateway."""
        return 0 if self._spool is None else len(self._spool)

    @property
    def rejected(self) -> int:
        """Puts that waited on disk and were refused; they are in the folder, with the reasons."""
        return 0 if self._spool is None else self._spool.rejected

    # -- trajectories ------------------------------------------------------------------------

    async def put_trajectory(
        self,
        trajectory: Trajectory | pb.Trajectory,
        partition_id: str,
        *,
        attempt: int | None = None,
        if_absent: bool = False,
        timeout: float | None = None,
    ) -> TrajectoryResult:
        """Write one trajectory; see `put_trajectories`."""
        put = await self.put_trajectories(
            [trajectory], partition_id, attempt=attempt, if_absent=if_absent, timeout=timeout
        )
        return put.results[0]

    async def put_trajectories(
        self,
        trajectories: Sequence[Trajectory | pb.Trajectory],
        partition_id: str,
        *,
        attempt: int | None = None,
        if_absent: bool = False,
        all_or_nothing: bool = False,
        timeout: float | None = None,
    ) -> TrajectoriesPut:
        """Write trajectories, which the gateway checks and lays out.

        Those that are right become visible at one revision. Each of the others goes to the
        partition's quarantine, and its result says why; with `all_or_nothing` InvalidRequest says
        so of the first, and nothing is written. All of one call have the same fields. With a spool,
        `spooled` results wait on disk for the gateway.

        Raises:
            AlreadyWritten: `if_absent` and a key exists.
            StaleWrite: `attempt` is not open any more.
            InvalidRequest: an argument cannot travel.
            QuotaExceeded: no room came free in time, in the plane or, while the gateway is away, in
                the spool. After any error but OutcomeUnknown nothing was written.
        """
        seconds = self._seconds(timeout)
        if not trajectories:
            return TrajectoriesPut(None)
        put = put_of_trajectories(
            trajectories,
            partition_id,
            attempt=attempt,
            if_absent=if_absent,
            all_or_nothing=all_or_nothing,
        )
        return await self._put_trajectories(put, seconds)

    async def submit(
        self,
        trajectory: Trajectory | pb.Trajectory,
        partition_id: str,
        *,
        attempt: int | None = None,
        if_absent: bool = False,
    ) -> asyncio.Future[TrajectoryResult]:
        """Hand over one trajectory, to be sent with others; a future of what becomes of it.

        It is sent within `batch.max_delay_s`, or by `flush`. Waits while too much is under way.
        """
        self._seconds(None)
        mode = mode_of(must_exist=False, if_absent=if_absent)
        message = message_of(trajectory)
        return await self._batcher.submit(message, partition_id, attempt_of(attempt), mode)

    # -- rows --------------------------------------------------------------------------------

    async def kv_put(
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
        """Write one row's fields and tags at one revision; all of it or nothing.

        Tags merge into those the key has; fields replace those of the same name. A value is a numpy
        array of any rank, or a Python value. With a spool, `revision` None says that the put waits
        on disk for the gateway.

        Raises:
            SchemaMismatch: a field has another dtype or rank than its first write fixed.
            KeyNotFound: `must_exist` and the key does not exist.
            AlreadyWritten: `if_absent` and it does.
            StaleWrite: the key was cleared after this put began, or `attempt` is not open.
            QuotaExceeded: no room came free in time. After any error but OutcomeUnknown nothing was
                written.
        """
        if type(key) is not str:
            raise InvalidRequest(f"a key is a string, not {type(key).__name__}")
        return await self.kv_batch_put(
            [key],
            partition_id,
            None if fields is None else {name: [value] for name, value in fields.items()},
            None if tags is None else [tags],
            attempt=attempt,
            must_exist=must_exist,
            if_absent=if_absent,
            return_tags=return_tags,
            timeout=timeout,
        )

    async def kv_batch_put(
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
        """Write many rows at one revision; all of them or none.

        `fields` is a mapping of columns (an array whose first dimension counts the keys, or a list
        with one value per key), or a list with one mapping per key. `tags` is one mapping per key.
        See `kv_put` for errors.
        """
        seconds = self._seconds(timeout)
        put = put_of_rows(
            keys,
            partition_id,
            fields,
            tags,
            attempt=attempt,
            must_exist=must_exist,
            if_absent=if_absent,
            return_tags=return_tags,
        )
        names = list(keys)
        if not names:
            return KVBatchMeta(partition_id, [], [], [], None)
        message: Any = put.message
        written = [column.name for column in getattr(message, "columns", ())]
        response = await self._put(put, seconds)
        if response is None:
            return KVBatchMeta(partition_id, names, sent_tags(names, tags), sorted(written), None)
        now, produced = sent_tags(names, tags), sorted(written)
        if return_tags:
            now, produced = [tags_from(one) for one in response.tags], list(response.fields)
        return KVBatchMeta(partition_id, names, now, produced, revision_of(response.revision))

    async def kv_clear(
        self,
        keys: Sequence[str] | None,
        partition_id: str,
        *,
        where: Where | None = None,
        retire: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Remove rows, tags and values, at one revision; how many there were.

        With `keys` None, all rows that match `where`. With `retire` the open attempts of the groups
        that are cleared are closed.
        """
        seconds = self._seconds(timeout)
        if (keys is None) == (where is None):
            raise InvalidRequest("clear names keys, or where= for all rows that match; not both")
        message = pb.ClearRequest(partition_id=partition_id, retire=retire)
        if keys is not None:
            message.keys.extend(dict.fromkeys(keys_of(keys)))
            if not message.keys:
                return 0
        else:
            message.where.CopyFrom(to_value(where, "where"))
        return (await self._transport.effect("Clear", message, seconds)).removed

    # -- groups ------------------------------------------------------------------------------

    async def begin_group(
        self,
        uid: str,
        partition_id: str,
        *,
        n: int,
        declared_bytes: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Begin the sessions of one prompt; the attempt, which their puts name.

        An older attempt of the same uid is closed, and its rows go, at the same revision. Room for
        `declared_bytes` is kept for it. QuotaExceeded if none came free in time.
        """
        seconds = self._seconds(timeout)
        message = pb.BeginGroupRequest(
            uid=uid, partition_id=partition_id, n=n, declared_bytes=declared_bytes or 0
        )
        attempt: int = (await self._transport.effect("BeginGroup", message, seconds)).attempt
        seen = self._transport.seen
        self._transport.seen = max(seen, Revision(seen.epoch, attempt))
        self._attempts[attempt] = partition_id
        return attempt

    async def end_group(
        self,
        attempt: int,
        status: str,
        *,
        partition_id: str | None = None,
        timeout: float | None = None,
    ) -> Revision:
        """End a group with a status: `finished` makes it whole.

        From here on puts that name the attempt are StaleWrite, so what was submitted and what waits
        on disk is sent first; DeadlineExceeded if the gateway does not come back in time.
        `partition_id` is wanted where another producer began the group.
        """
        seconds = self._seconds(timeout)
        of = self._attempts.get(attempt_of(attempt)) if partition_id is None else partition_id
        if of is None:
            raise InvalidRequest(
                f"attempt {attempt} was not begun by this producer: say partition_id"
            )
        await self.flush(timeout=seconds)
        message = pb.EndGroupRequest(partition_id=of, attempt=attempt_of(attempt), status=status)
        answer = await self._transport.effect("EndGroup", message, seconds)
        self._attempts.pop(attempt, None)
        return revision_of(answer.revision)

    @asynccontextmanager
    async def group(
        self,
        uid: str,
        partition_id: str,
        *,
        n: int,
        declared_bytes: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[int]:
        """A group for the length of a block, which is given its attempt: ended as `finished`, or as
        `failure` where the block raises."""
        attempt = await self.begin_group(
            uid, partition_id, n=n, declared_bytes=declared_bytes, timeout=timeout
        )
        try:
            yield attempt
        except BaseException:
            await self.end_group(attempt, "failure", timeout=timeout)
            raise
        await self.end_group(attempt, "finished", timeout=timeout)

    # -- end ---------------------------------------------------------------------------------

    async def flush(self, *, timeout: float | None = None) -> None:
        """Returns when all that was submitted is answered and nothing waits on disk.

        DeadlineExceeded says how much does, and why.
        """
        seconds = self._seconds(timeout)
        deadline = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                await self._batcher.flush()
        except TimeoutError:
            raise DeadlineExceeded(
                "what was submitted is not answered yet", waited_s=seconds
            ) from None
        if self._sending is not None:
            await self._sending.drained(max(0.001, deadline - time.monotonic()))

    async def close(self) -> None:
        """Send what was submitted, and end. What waits on disk is there for the next process that
        opens its folder. Repeatable."""
        if self._closed:
            return
        await self._batcher.close()
        self._closed = True
        await self._attending.close()
        if self._sending is not None:
            await self._sending.close()
        await self._transport.close()
        if self._spool is not None:
            self._spool.close()

    def close_unused(self) -> None:
        """End a producer of which no verb was called."""
        self._closed = True
        if self._spool is not None:
            self._spool.close()

    def close_in_child(self) -> None:
        """Let go of the spool in a forked child: it is the parent's."""
        if self._spool is not None:
            self._spool.close_in_child()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.gateway}, client {self.client_id})"

    def __reduce__(self) -> Any:
        raise TypeError("a producer does not travel; make one in the other process instead")

    # -- puts on their way -------------------------------------------------------------------

    def _begin(self) -> None:
        if self._closed:
            raise closed()
        if self._pid != os.getpid():
            raise PlaneLost("this producer is of the process before the fork; make another here")
        if not self._started:
            self._started = True
            if self._sending is not None:
                self._sending.start()

    async def _put_gathered(self, put: Put) -> TrajectoriesPut:
        return await self._put_trajectories(put, self._timeout_s)

    async def _put_trajectories(self, put: Put, seconds: float) -> TrajectoriesPut:
        response = await self._put(put, seconds)
        if response is None:
            waiting = [TrajectoryResult(key, spooled=True) for key in keys_written(put)]
            return TrajectoriesPut(None, waiting)
        revision = revision_of(response.revision) if response.HasField("revision") else None
        return TrajectoriesPut(revision, results_of(response))

    async def _put(self, put: Put, seconds: float) -> Any:
        """The answer of a put, or None if it waits on disk."""
        sending, spool, transport = self._sending, self._spool, self._transport
        if sending is None or spool is None or not put.may_wait:
            return await send(transport, put, seconds)
        asked = transport.begin()
        kept = False
        try:
            if sending.stopped and sending.error is not None:
                raise sending.error
            if not len(spool):
                try:
                    return await send(transport, put, seconds, asked=asked, reach_s=self._reach_s)
                except (Unreachable, OutcomeUnknown) as error:
                    away = error
            else:
                away = None  # behind those that came before
            try:
                await sending.keep(put, asked)
            except QuotaExceeded as full:
                if isinstance(away, OutcomeUnknown):
                    raise away from full
                raise
            kept = True
            return None
        finally:
            if not kept:
                transport.numbers.end(asked.number)


def _transport_of(
    address: str, access: Access, retry: RetryPolicy | None, spool: Spool | None
) -> Transport:
    if spool is None:
        return Transport(address, access, retry=retry)
    return Transport(
        address,
        access,
        retry=retry,
        client_id=spool.client_id,
        numbers=spool.numbers,
        plane_id=spool.plane_id,
    )
