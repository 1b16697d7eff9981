"""The asyncio face of an outside client: the verbs of `dataplane.AsyncClient`.

May be used from several event loops: its calls run on a loop of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from dataplane.client.aio import AsyncClient
from dataplane.client.get import Layout
from dataplane.client.results import Rows
from dataplane.client.tags import Where
from dataplane.config import Config
from dataplane.errors import DataplaneError, InvalidRequest, PlaneLost
from dataplane.outside import (
    claims,
    groups,
    inspecting,
    partitions,
    recording,
    rows,
    tracing,
    watching,
)
from dataplane.outside.reach import Reach, Step, Steps, describe
from dataplane.outside.sync import CLOSE_S, refuse_destroy
from dataplane.tags.lineage.lineage import check_stage
from dataplane.telemetry.verbs import span_of
from dataplane.types import Change, Revision

Args = ParamSpec("Args")
Result = TypeVar("Result")


def _awaited(
    verb: Callable[Concatenate[Reach, Args], Steps[Result]],
) -> Callable[Concatenate[AsyncOutsideClient, Args], Coroutine[Any, Any, Result]]:
    """A verb as a coroutine."""

    @wraps(verb)
    async def call(client: AsyncOutsideClient, *args: Args.args, **named: Args.kwargs) -> Result:
        return await client.finish(verb(client.reach, *args, **named))

    call.__doc__ = f"See `Client.{verb.__name__}`."
    return call


class AsyncOutsideClient:
    """A client of a plane that is reached through a gateway, for coroutines. Every verb of
    `AsyncClient`, with the same arguments, results and errors."""

    def __init__(self, address: str, config: Config | None = None) -> None:
        self.reach: Final = Reach(address, config or Config())

    kv_put = _awaited(rows.kv_put)
    kv_batch_put = _awaited(rows.kv_batch_put)
    kv_batch_get = _awaited(rows.kv_batch_get)
    kv_clear = _awaited(rows.kv_clear)
    kv_list = _awaited(watching.kv_list)
    kv_wait = _awaited(watching.kv_wait)
    kv_claim = _awaited(claims.kv_claim)
    kv_commit = _awaited(claims.kv_commit)
    kv_release = _awaited(claims.kv_release)
    begin_group = _awaited(groups.begin_group)
    end_group = _awaited(groups.end_group)
    request_outcome = _awaited(groups.request_outcome)
    kv_create_partition = _awaited(partitions.kv_create_partition)
    kv_list_partitions = _awaited(partitions.kv_list_partitions)
    kv_seal_partition = _awaited(partitions.kv_seal_partition)
    kv_drop_partition = _awaited(partitions.kv_drop_partition)
    explain = _awaited(partitions.explain)
    status = _awaited(partitions.status)
    inspect = _awaited(inspecting.inspect)
    tally = _awaited(inspecting.tally)
    stats = _awaited(inspecting.stats)
    claims = _awaited(inspecting.claims)
    tasks = _awaited(inspecting.tasks)
    waiters = _awaited(inspecting.waiters)
    holdings = _awaited(inspecting.holdings)
    revision_before = _awaited(inspecting.revision_before)
    trace = _awaited(tracing.trace)
    samples = _awaited(recording.samples)
    record = _awaited(recording.record)
    save_checkpoint = _awaited(partitions.save_checkpoint)
    load_checkpoint = _awaited(partitions.load_checkpoint)

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncGenerator[None]:
        """See `Client.stage`."""
        before = self.reach.stage
        await self._enter(check_stage(name))
        try:
            with span_of(self.reach, f"stage {name}"):
                yield
        finally:
            await self._enter(before)

    def span(
        self, name: str, partition_id: str, *, uids: Iterable[str]
    ) -> AbstractContextManager[None]:
        """See `Client.span`."""
        return span_of(self.reach, name, partition_id, uids)

    async def _enter(self, stage: str) -> None:
        with suppress(DataplaneError):
            await self.finish(tracing.enter_stage(self.reach, stage))

    @asynccontextmanager
    async def kv_view(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "nested",
        timeout: float | None = None,
    ) -> AsyncGenerator[Rows]:
        """See `Client.kv_view`; what is looked at is a copy, and may be written to."""
        seen = await self.finish(
            rows.kv_view(
                self.reach, keys, partition_id, select_fields, layout=layout, timeout=timeout
            )
        )
        try:
            yield seen
        finally:
            seen.fields = {}

    async def kv_watch(
        self,
        partition_id: str,
        *,
        since: Revision | None = None,
        where: Where | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Change]:
        """See `Client.kv_watch`."""
        watch = watching.Watch(partition_id, since, where, self.reach.wait_s(timeout))
        try:
            while True:
                yield await self.ask(watch.following)
        finally:
            watching.leave(watch, self.reach)

    # -- the plane ---------------------------------------------------------------------------

    @property
    def plane_id(self) -> str:
        """The random id of the plane that this client joined; it accepts no other."""
        return self.reach.plane_id

    @property
    def client_id(self) -> str:
        """The random id of this client, as the gateway knows it."""
        return self.reach.client_id

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.reach.closed

    async def attach(self, *, timeout: float | None = None) -> None:
        """See `OutsideClient.attach`."""
        await self.finish(describe(self.reach, self.reach.seconds(timeout)))

    async def run(self, verb: Any, timeout: float | None = None) -> Any:
        """InvalidRequest: faces that are made of a client's own steps need one inside."""
        del verb, timeout
        raise InvalidRequest(
            "this client reaches its plane through a gateway, and has no steps that another face "
            "could be made of: join the plane by its name or its unix socket"
        )

    async def close(self, destroy: bool = False) -> None:
        """See `OutsideClient.close`."""
        refuse_destroy(self.reach, destroy=destroy)
        closing = self.reach.close()
        if closing is not None:
            await asyncio.wait([asyncio.wrap_future(closing)], timeout=CLOSE_S)
            if self.reach.spans is not None:
                await asyncio.to_thread(self.reach.spans.close)

    async def __aenter__(self) -> AsyncOutsideClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncOutsideClient(plane {self.reach.plane_id}, {self.reach.address})"

    def __reduce__(self) -> Any:
        raise TypeError("a client does not travel; connect in the other process instead")

    # -- driving verbs -----------------------------------------------------------------------

    async def finish(self, verb: Steps[Result]) -> Result:
        """The result of a verb."""
        if self.reach.closed:
            raise PlaneLost("this client was closed; connect again")
        try:
            step = verb.send(None)
            while True:
                try:
                    answer = await self.ask(step)
                except BaseException as error:
                    step = verb.throw(error)
                else:
                    step = verb.send(answer)
        except StopIteration as end:
            return end.value

    async def ask(self, step: Step) -> Any:
        """The answer to one call."""
        answer = self.reach.start(step)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if answer.cancelled() and not (task is not None and task.cancelling()):
                raise PlaneLost("this client was closed while it waited") from None
            raise


# To whoever asks it is one: it has every verb, though none of the code.
AsyncClient.register(AsyncOutsideClient)


async def async_connect(address: str, config: Config) -> AsyncOutsideClient:
    """An asyncio client of the plane behind a gateway; see `dataplane.outside.sync.connect`."""
    client = AsyncOutsideClient(address, config)
    try:
        await client.attach()
    except BaseException:
        await client.close()
        raise
    return client
