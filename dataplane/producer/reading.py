"""What an asyncio producer reads and waits for, and the claims that it works on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from dataplane.errors import (
    ClaimLost,
    DeadlineExceeded,
    InvalidRequest,
    PlaneLost,
    TooOld,
    Unreachable,
)
from dataplane.producer.attending import Attending
from dataplane.producer.puts import keys_of
from dataplane.producer.results import (
    Arrays,
    Listing,
    claim_of,
    explanation_of,
    meta_of,
    revision_of,
)
from dataplane.producer.transport import Transport
from dataplane.protocol.cells import arrays_of
from dataplane.protocol.values import from_value, to_value
from dataplane.types import Change, Claim, Explanation, KVBatchMeta, Revision
from dataplane.v1 import dataplane_pb2 as pb

Where = Mapping[str, object]

LEASE_S: Final = 30.0


class Reading:
    """Verbs that write no rows. Part of `AsyncProducer`."""

    def __init__(self, transport: Transport, timeout_s: float, wait_timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._attending = Attending(transport)

    def _begin(self) -> None:
        """A verb begins: PlaneLost if this producer is of no use any more."""

    def _seconds(self, timeout: float | None) -> float:
        self._begin()
        return self._timeout_s if timeout is None else seconds_of(timeout)

    def _wait_seconds(self, timeout: float | None) -> float:
        return self._seconds(self._wait_timeout_s if timeout is None else timeout)

    # -- reads -------------------------------------------------------------------------------

    async def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        on_missing: str = "raise",
        timeout: float | None = None,
    ) -> Arrays:
        """Copies of rows as numpy arrays, in the order of the keys and all of one revision.

        `select_fields` None takes every field that all of the keys have. numpy has no bfloat16: it
        comes as float32, exactly; eight-bit floats come as their bits.

        Raises:
            KeyNotFound, FieldNotFound, ValueLost: naming what is missing; with `on_missing="drop"`
                those rows are left out instead.
        """
        if on_missing not in ("raise", "drop"):
            raise InvalidRequest(f"on_missing is 'raise' or 'drop', not {on_missing!r:.80}")
        seconds = self._seconds(timeout)
        names = keys_of(keys)
        if not names:
            return Arrays([], {}, self._transport.seen)
        header, shape, data = await self._transport.get_rows(
            partition_id,
            names,
            [] if select_fields is None else keys_of(select_fields),
            drop_missing=on_missing == "drop",
            timeout=seconds,
        )
        fields = arrays_of(shape, data)
        return Arrays(list(header.keys), fields, revision_of(header.revision))

    async def kv_list(
        self,
        partition_id: str,
        *,
        where: Where | None = None,
        since: Revision | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Listing:
        """The keys of a partition with tags, produced fields and row lengths, at one revision.

        With `since`, the revision of an earlier listing, what has changed after it, and the keys
        that are gone. `columns` limits the tags, `limit` the rows.
        """
        deadline = time.monotonic() + self._seconds(timeout)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidRequest(f"limit is a number of rows from 1 on, not {limit!r:.80}")
        message = pb.ListRequest(partition_id=partition_id, limit=limit or 0)
        _set_where(message, where)
        if since is not None:
            message.since.epoch, message.since.n = since
        if columns is not None:
            message.columns.extend(keys_of(columns))
            message.only_columns = True
        while True:
            message.page_token = ""
            try:
                return await self._pages(partition_id, message, deadline)
            except TooOld:
                # Its pages were dropped, as they are after a while: they are read anew.
                if not message.page_token or time.monotonic() >= deadline:
                    raise

    async def _pages(self, partition_id: str, message: pb.ListRequest, deadline: float) -> Listing:
        listing: Listing | None = None
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded("the deadline came between two pages", waited_s=0.0)
            page = await self._transport.ask("List", message, left)
            if listing is None:
                revision = self._transport.see(page.revision)
                listing = Listing(partition_id, revision, page.full, cleared=list(page.cleared))
            listing.add(page.rows)
            if not page.next_page_token:
                return listing
            message.page_token = page.next_page_token

    async def kv_wait(
        self,
        partition_id: str,
        where: Where | None = None,
        *,
        count: int = 1,
        group_by: str | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """All rows that match, as soon as there are `count` of them, or with `group_by="uid"` so
        many whole groups. DeadlineExceeded says what is missing and whom it waits for."""
        seconds = self._wait_seconds(timeout)
        message = pb.WaitRequest(partition_id=partition_id, count=count, group_by=group_by or "")
        _set_where(message, where)
        answer = await self._transport.ask("Wait", message, seconds)
        return meta_of(partition_id, answer.rows, self._transport.see(answer.revision))

    async def kv_watch(
        self,
        partition_id: str,
        *,
        since: Revision | None = None,
        where: Where | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Change]:
        """Changes of a partition in order, as they happen, without an end.

        `since` is a revision of an earlier answer, to go on from there; None begins now. It goes on
        by itself where a connection breaks. DeadlineExceeded when nothing has changed for
        `timeout`.
        """
        idle_s = self._wait_seconds(timeout)
        tries = 0
        deadline = time.monotonic() + idle_s
        while True:
            message = pb.WatchRequest(partition_id=partition_id)
            _set_where(message, where)
            if since is not None:
                message.since.epoch, message.since.n = since
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"nothing changed in partition {partition_id!r:.200} for {idle_s:g} s",
                    waited_s=idle_s,
                )
            try:
                async for answer in self._transport.stream("Watch", message, left):
                    tries = 0
                    since = self._transport.see(answer.revision)
                    if answer.begun:
                        continue
                    rows = meta_of(partition_id, answer.rows, since)
                    yield Change(since, rows, list(answer.cleared), answer.full)
                    deadline = time.monotonic() + idle_s
            except DeadlineExceeded:
                continue  # the stream's, which began before the last change
            except Unreachable:
                tries += 1
                pause_s = self._transport.policy.pause_s(tries, random.random())
                if time.monotonic() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s)

    # -- claims ------------------------------------------------------------------------------

    async def kv_claim(
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
        """Exactly `count` rows that the task has not committed, held for this producer until then.

        Rows are offered when all `fields` are produced and `where` holds, oldest revision first, or
        by a tag. While claims are held the producer stays present; once it has been away for
        `lease_s` they are offered again. On a sealed partition the last claim may be shorter, and
        the one after it is empty with `end` set. DeadlineExceeded if not enough came ready.
        """
        seconds = self._wait_seconds(timeout)
        transport = self._transport
        message = pb.ClaimRequest(
            partition_id=partition_id,
            task=task,
            count=count,
            fields=keys_of(fields),
            order_by=order_by or "",
            groups=groups,
            lease_s=lease_s,
        )
        _set_where(message, where)
        answer = await transport.claim(message, seconds)
        transport.see(answer.revision)
        claim = claim_of(partition_id, task, answer)
        self._attending.hold(claim)
        return claim

    async def kv_commit(self, claim: Claim, *, timeout: float | None = None) -> Revision:
        """Finish a claim, once: its rows are not offered to the task again.

        ClaimLost names the rows that it does not hold any more; nothing was committed, and
        `claim.without(error.keys)` commits the rest.
        """
        return await self._end("Commit", pb.CommitRequest(), claim, timeout)

    async def kv_release(self, claim: Claim, *, timeout: float | None = None) -> Revision:
        """Give a claim's rows back, to be offered again at once. ClaimLost as for `kv_commit`."""
        return await self._end("Release", pb.ReleaseRequest(), claim, timeout)

    async def _end(self, rpc: str, message: Any, claim: Claim, timeout: float | None) -> Revision:
        seconds = self._seconds(timeout)
        if not claim.claim_id:
            return self._transport.seen  # the last claim of a partition holds nothing
        message.partition_id = claim.partition_id
        message.task = claim.task
        message.claim_id = claim.claim_id
        message.keys.extend(claim.keys)
        try:
            answer = await self._transport.effect(rpc, message, seconds)
        except ClaimLost as error:
            error.keys = error.keys or list(claim.keys)
            if len(error.keys) >= len(claim.keys):
                self._attending.let_go(claim)
            raise
        self._attending.let_go(claim)
        return revision_of(answer.revision)

    # -- questions ---------------------------------------------------------------------------

    async def explain(
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
        """Why something waits: what matches, what does not and why, and who is waited for."""
        message = pb.ExplainRequest(
            partition_id=partition_id or "",
            fields=keys_of(fields),
            task=task or "",
            group_by=group_by or "",
            count=count or 0,
        )
        _set_where(message, where)
        return explanation_of(await self._transport.ask("Explain", message, self._seconds(timeout)))

    async def request_outcome(
        self, request_id: str, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """What became of an effect of this producer whose answer was lost: `applied`, and then
        `verb` and `answer`.

        One that had no effect will not have one later either. OutcomeUnknown if it is not
        remembered any more.
        """
        seconds = self._seconds(timeout)
        client_id, _, number = request_id.rpartition("/")
        if not client_id or not number.isdecimal() or len(number) > 18:
            raise InvalidRequest(
                f"a request id is what OutcomeUnknown names, client/number, not {request_id!r:.80}"
            )
        transport = self._transport
        await transport.join(time.monotonic() + seconds)
        message = pb.GetOutcomeRequest(
            client_id=client_id, plane_id=transport.plane_id, number=int(number)
        )
        answer = await transport.ask("GetOutcome", message, seconds)
        if client_id == transport.client_id:
            transport.numbers.told(int(number))
        return from_value(pb.Value(map_value=answer.outcome))


def seconds_of(timeout: object) -> float:
    """A timeout that a caller gave. InvalidRequest unless it is a positive number of seconds."""
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float)
        or not (0 < timeout < float("inf"))
    ):
        raise InvalidRequest(f"timeout is a positive number of seconds, not {timeout!r:.80}")
    return float(timeout)


def closed() -> PlaneLost:
    """The error of a producer that was closed."""
    return PlaneLost("this producer was closed; make another")


def _set_where(message: Any, where: Where | None) -> None:
    if where is not None:
        message.where.CopyFrom(to_value(where, "where"))
