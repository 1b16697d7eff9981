"""Verbs that list, and that wait for rows and for changes, through a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Final, cast

from dataplane.client.put import list_of
from dataplane.client.results import Listing
from dataplane.client.tags import Where
from dataplane.client.wait import GROUP_BY
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    PlaneLost,
    TooOld,
    Unreachable,
)
from dataplane.outside.listing import listing_of, meta_of
from dataplane.outside.reach import Reach, Steps, with_margin
from dataplane.outside.rows import check_partition, check_text, revision_to, where_of
from dataplane.producer.transport import Transport
from dataplane.tags.claims.queues import Order
from dataplane.telemetry.verbs import spanned
from dataplane.types import Change, KVBatchMeta, Revision
from dataplane.v1 import dataplane_pb2 as pb

PAUSE_S: Final = 0.2
"""Before a watch that broke off goes on."""
LEAST_PATIENCE_S: Final = 0.5
"""A watch that is to wait for less would leave the gateway no time to tell what is there."""
REASON_S: Final = 2.0
"""How long may be asked why a wait was in vain."""


@spanned("kv_list")
def kv_list(
    reach: Reach,
    partition_id: str,
    *,
    where: Where | None = None,
    since: Revision | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    order_by: str | None = None,
    timeout: float | None = None,
) -> Steps[Listing]:
    """The keys of a partition with tags, fields and lengths, at one revision."""
    seconds = reach.seconds(timeout)
    if isinstance(columns, str):
        raise InvalidRequest(f"columns is a list of tag names; give [{columns!r:.80}] for one")
    check_partition(partition_id)
    message = pb.ListRequest(partition_id=partition_id)
    if since is not None:
        message.since.CopyFrom(revision_to(since, "since"))
    if columns is not None:
        names = list_of(columns, "columns")
        if not all(type(name) is str for name in names):
            raise InvalidRequest("columns is a list of tag names")
        for name in names:
            check_text(name, "the tag name")
        message.columns.extend(names)
        message.only_columns = True
    if limit is not None:
        if type(limit) is not int or limit < 0:
            raise InvalidRequest(f"limit is a number of rows, not {limit!r:.80}")
        message.limit = min(max(limit, 1), (1 << 31) - 1)  # there 0 is no limit
    if order_by is not None:
        Order.parse(order_by)
        message.order_by = check_text(order_by, "order_by")
    if where is not None:
        message.where.CopyFrom(where_of(where))
    revision, full, rows, cleared = yield lambda transport: _pages(transport, message, seconds)
    if limit == 0 and rows:
        # Nothing is wanted, and following the revision is to lose nothing.
        rows = list[pb.Row]()
        revision = revision if full or since is None else since
    return listing_of(partition_id, revision, rows, full=full, cleared=cleared)


async def _pages(
    transport: Transport, message: pb.ListRequest, seconds: float
) -> tuple[Revision, bool, list[pb.Row], list[str]]:
    deadline = time.monotonic() + seconds
    while True:
        rows: list[pb.Row] = []
        message.page_token = ""
        try:
            first = answer = await transport.ask("List", message, seconds)
            rows.extend(answer.rows)
            while answer.next_page_token:
                message.page_token = answer.next_page_token
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"{len(rows)} rows were listed when the deadline came", waited_s=seconds
                    )
                answer = await transport.ask("List", message, left)
                rows.extend(answer.rows)
        except TooOld:
            if not message.page_token or time.monotonic() > deadline:
                raise
            continue  # the gateway has dropped the pages of that revision
        return transport.see(first.revision), first.full, rows, list(first.cleared)


@spanned("kv_wait")
def kv_wait(
    reach: Reach,
    partition_id: str,
    where: Where | None = None,
    *,
    count: int = 1,
    group_by: str | None = None,
    timeout: float | None = None,
) -> Steps[KVBatchMeta]:
    """All rows that match, as soon as there are so many."""
    seconds = with_margin(reach.wait_s(timeout))
    check_partition(partition_id)
    if type(count) is not int or count < 1:
        raise InvalidRequest(f"count is a number of rows or groups, 1 or more, not {count!r:.80}")
    if group_by not in (None, GROUP_BY):
        raise InvalidRequest(f"group_by is None or {GROUP_BY!r}, not {group_by!r:.80}")
    message = pb.WaitRequest(
        partition_id=partition_id, count=_int32(count, "count"), group_by=group_by or ""
    )
    if where is not None:
        message.where.CopyFrom(where_of(where))
    try:
        answer = yield lambda transport: transport.ask("Wait", message, seconds)
    except DeadlineExceeded as late:
        what = "matching rows" if group_by is None else "whole groups"
        raise (
            yield from explained(
                f"partition {partition_id!r} did not come to {count} {what} in time",
                late,
                seconds,
                pb.ExplainRequest(
                    partition_id=partition_id, where=message.where if where is not None else None,
                    group_by=group_by, count=count,
                ),
            )
        ) from None  # fmt: skip
    return meta_of(partition_id, reach.see(answer.revision), answer.rows)


def explained(
    what: str, late: DeadlineExceeded, waited_s: float, question: pb.ExplainRequest
) -> Steps[DeadlineExceeded]:
    """The error of a wait in vain. Where the deadline came before the gateway's reason did, the
    plane is asked for it."""
    if late.explanation is not None:
        return late
    try:
        why = (yield lambda transport: transport.ask("Explain", question, REASON_S)).text
    except DataplaneError:
        return late  # it may not be allowed to ask, or nobody is there
    return DeadlineExceeded(f"{what}: {why}", waited_s=waited_s, explanation=why)


class Watch:
    """A watch under way. Its coroutines are of the calling loop."""

    def __init__(
        self,
        partition_id: str,
        since: Revision | None,
        where: Where | None,
        patience_s: float,
    ) -> None:
        check_partition(partition_id)
        self._message = pb.WatchRequest(partition_id=partition_id)
        if since is not None:
            self._message.since.CopyFrom(revision_to(since, "since"))
        if where is not None:
            self._message.where.CopyFrom(where_of(where))
        self._patience_s = max(patience_s, LEAST_PATIENCE_S)
        self._changes: AsyncGenerator[Change | None] | None = None

    async def begin(self, transport: Transport) -> None:
        """Returns when the watch stands: what changes from now on is told."""
        self._changes = self._told(transport)
        await anext(self._changes)

    async def following(self, transport: Transport) -> Change:
        """The next change. DeadlineExceeded when there was none for so long."""
        if self._changes is None:
            self._changes = self._told(transport)
        while True:
            change = await anext(self._changes)
            if change is not None:
                return change

    async def close(self, _: Transport) -> None:
        """End it."""
        if self._changes is not None:
            await self._changes.aclose()

    async def _told(self, transport: Transport) -> AsyncGenerator[Change | None]:
        """The changes, and None when the watch stands."""
        message = self._message
        since: Revision | None = None
        quiet_since = time.monotonic()
        begun = False
        while True:
            left = quiet_since + self._patience_s - time.monotonic()
            if left <= 0:
                raise await self._quiet(transport)
            answers = cast(
                "AsyncGenerator[pb.WatchResponse]",
                transport.stream("Watch", message, with_margin(left)),
            )
            try:
                # One change may come in several answers; all but the last say the revision before.
                rows: list[pb.Row] = []
                cleared: list[str] = []
                async for answer in answers:
                    revision = transport.see(answer.revision)
                    if answer.begun:
                        since = revision
                        message.since.CopyFrom(answer.revision)
                        if not begun:
                            begun = True
                            yield None
                        continue
                    rows += answer.rows
                    cleared += answer.cleared
                    if revision == since:
                        continue
                    yield _change(message.partition_id, revision, rows, cleared, answer.full)
                    since = revision
                    message.since.CopyFrom(answer.revision)
                    rows, cleared = [], []
                    quiet_since = time.monotonic()
            except DeadlineExceeded:
                pass
            except TooOld:
                # What there is has no room in one answer: it is read in pages, and told as a whole.
                everything = pb.ListRequest(partition_id=message.partition_id)
                if message.HasField("where"):
                    everything.where.CopyFrom(message.where)
                now, _, rows, _ = await _pages(transport, everything, max(left, PAUSE_S))
                yield _change(message.partition_id, now, rows, [], True)
                message.since.epoch, message.since.n = now
                quiet_since = time.monotonic()
            except Unreachable:
                if time.monotonic() - quiet_since >= self._patience_s:
                    raise
                await asyncio.sleep(PAUSE_S)
            finally:
                await answers.aclose()

    async def _quiet(self, transport: Transport) -> DeadlineExceeded:
        """The error of a watch that nothing was told to, with what the plane says to that."""
        message = self._message
        text = (
            f"nothing that this watch tells of has changed in partition {message.partition_id!r} "
            f"within {self._patience_s:.3g} s"
        )
        asked = pb.ExplainRequest(partition_id=message.partition_id)
        if message.HasField("where"):
            asked.where.CopyFrom(message.where)
        try:
            why: str | None = (await transport.ask("Explain", asked, REASON_S)).text
        except DataplaneError:
            why = None  # it may not be allowed to ask
        return DeadlineExceeded(
            text if why is None else f"{text}: {why}", waited_s=self._patience_s, explanation=why
        )


def leave(watch: Watch, reach: Reach) -> None:
    """End a watch that nobody follows any more, without waiting for it."""
    try:
        reach.start(watch.close)
    except (InvalidRequest, PlaneLost):
        pass  # it ended with its client, or is that of the process this one was forked from


def _change(
    partition_id: str, revision: Revision, rows: list[pb.Row], cleared: list[str], full: bool
) -> Change:
    return Change(revision, meta_of(partition_id, revision, rows), cleared, full)


def _int32(number: int, what: str) -> int:
    if number >= 1 << 31:
        raise InvalidRequest(f"{what} is under {1 << 31}, not {number}")
    return number
