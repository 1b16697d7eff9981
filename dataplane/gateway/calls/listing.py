"""The calls that look at keys and tags: List in pages, Wait and Watch. They change nothing.

They ask by the gateway's own client. What waits is woken by the tag store, which hears of it when
the caller has gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.groups import GRACE_S
from dataplane.client.results import Listing
from dataplane.client.tags import present
from dataplane.client.wait import Told, wait_listing, watch_listing
from dataplane.errors import InvalidRequest, TooOld
from dataplane.gateway.call import Call
from dataplane.gateway.calls.arguments import names_of, revision_to, since_of, where_of
from dataplane.gateway.calls.listed import FRAME_BYTES, SPARE_BYTES, Listed
from dataplane.gateway.calls.pages import Pages
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.service import Handler
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb

PAGE_BYTES: Final = 2 << 20
"""Rows of one answer, unless a single one has more: gRPC's clients take 4 MiB if nobody tells them
otherwise."""
KEPT_BYTES: Final = 512 << 20
"""What all listings of which not all pages were read may hold."""
KEPT_PER_PRINCIPAL: Final = 16
MAX_LISTED: Final = 2_000_000
"""Rows of all pages of a listing: the gateway holds them while they are read."""
WATCH_S: Final = 3600.0
"""How long a watch asks once, where its caller names no deadline."""


class Looking:
    """List, Wait and Watch."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.pages = Pages(
            max_bytes=KEPT_BYTES,
            max_per_principal=KEPT_PER_PRINCIPAL,
            ttl_s=config.page_ttl_s,
            clock=clock,
        )
        self._longest_s = config.max_call_s
        self._max_page_size = config.max_page_size
        self._max_answer_bytes = config.max_message_bytes - SPARE_BYTES
        """Of an answer that is not cut in pages."""
        self._page_bytes = min(PAGE_BYTES, self._max_answer_bytes)
        """At which pages, and the answers of a watch, are cut."""
        self.handlers: dict[str, Handler] = {
            "List": self.list,
            "Wait": self.wait,
            "Watch": self.watch,
        }

    # -- pages -------------------------------------------------------------------------------

    async def list(self, request: pb.ListRequest, call: Call) -> pb.ListResponse:
        """One page of a listing, of the same revision as the page before."""
        call.require("list", request.partition_id)
        if request.page_size < 0 or request.limit < 0:
            raise InvalidRequest("page_size and limit are numbers of rows, 0 or more")
        size = min(request.page_size or self._max_page_size, self._max_page_size)
        question = _question(request)
        principal = call.principal.name
        if request.page_token:
            kept, start = self.pages.find(request.page_token, principal, question)
            listed, revision, full = kept.listed, kept.revision, kept.full
            nbytes = kept.nbytes
            response = pb.ListResponse(revision=revision_to(revision), full=full)
        else:
            listing = await self._listing(request, call)
            kept, start, nbytes = None, 0, listing.nbytes
            listed, revision, full = Listed(listing), listing.revision, listing.full
            response = pb.ListResponse(
                revision=revision_to(revision), full=full, cleared=listing.cleared
            )
            del listing
        stop = min(start + size, len(listed))
        room = max(0, self._page_bytes - response.ByteSize())
        rows, end = await listed.group(start, stop, room)
        response.rows.extend(rows)
        if end < len(listed):
            if kept is None:
                kept = self.pages.keep(principal, question, listed, nbytes, revision, full=full)
            response.next_page_token = kept.token(end)
        return response

    async def _listing(self, request: pb.ListRequest, call: Call) -> Listing:
        where, since = where_of(request), since_of(request)
        columns = names_of(request.columns, "columns")
        limit: int | None = min(request.limit or MAX_LISTED + 1, MAX_LISTED + 1)
        if request.order_by:
            limit = request.limit or None  # the plane says how many it puts in order
        while True:
            listing = await call.reader.kv_list(
                request.partition_id,
                where=where,
                since=since,
                columns=columns if columns or request.only_columns else None,
                limit=limit,
                order_by=request.order_by or None,
                timeout=call.timeout(self._longest_s),
            )
            if len(listing) > MAX_LISTED:
                raise InvalidRequest(
                    f"more than {MAX_LISTED} rows match, which is more than is listed in pages: "
                    "list fewer, by `where`, `since` or `limit`"
                )
            if sum(map(_size, listing.cleared)) <= self._page_bytes // 2:
                return listing
            # More than the first page has room for: everything is told instead.
            since = None

    # -- waiting -----------------------------------------------------------------------------

    async def wait(self, request: pb.WaitRequest, call: Call) -> pb.WaitResponse:
        """All rows that match, once there are enough. DeadlineExceeded says what is missing."""
        partition_id, count = request.partition_id, request.count
        call.require("wait", partition_id)
        where, group_by = where_of(request), request.group_by or None

        def verb(core: Core, deadline: float) -> Verb[Listing]:
            return wait_listing(core, partition_id, where, count, group_by, deadline - GRACE_S)

        listing = await call.reader.run(verb, call.timeout(self._longest_s) + GRACE_S)
        rows = await Listed(listing).all(
            self._max_answer_bytes, "what was waited for has come: List it, in pages"
        )
        return pb.WaitResponse(revision=revision_to(listing.revision), rows=rows)

    # -- changes -----------------------------------------------------------------------------

    async def watch(self, request: pb.WatchRequest, call: Call) -> AsyncIterator[pb.WatchResponse]:
        """What changes, until the caller's deadline, or until it has gone."""
        call.require("wait", request.partition_id)
        where, since = where_of(request), since_of(request)
        left: float | None = call.context.time_remaining()
        until = None if left is None else time.monotonic() + call.timeout(left)
        now = await call.reader.run(present, call.timeout(self._longest_s))
        if since is None:
            since = now
        elif since > now:
            raise InvalidRequest(
                f"since is a revision that has been, and {since.epoch}:{since.n} is ahead of the "
                f"plane, which is at {now.epoch}:{now.n}"
            )
        yield pb.WatchResponse(revision=revision_to(since), begun=True)
        while True:
            wait_s = WATCH_S if until is None else until - time.monotonic()
            if wait_s <= 0:
                return
            try:
                # The store would explain why nothing has come, which nobody asks here.
                async with asyncio.timeout(wait_s):
                    told, listing = await self._changes(
                        request.partition_id, since, where, wait_s + GRACE_S, call
                    )
            except TimeoutError:
                continue
            listed, at = Listed(listing), 0
            del listing
            for one in told:
                async with aclosing(self._answers(one, listed, at, since)) as answers:
                    async for answer in answers:
                        yield answer
                at += one.rows
                since = one.revision

    async def _changes(
        self, partition_id: str, since: Revision, where: Any, wait_s: float, call: Call
    ) -> tuple[list[Told], Listing]:
        def verb(core: Core, deadline: float) -> Verb[tuple[list[Told], Listing]]:
            return watch_listing(core, partition_id, since, where, deadline - GRACE_S)

        return await call.reader.run(verb, wait_s + GRACE_S)

    async def _answers(
        self, told: Told, listed: Listed, start: int, since: Revision
    ) -> AsyncGenerator[pb.WatchResponse]:
        """One change in as many answers as it needs. All but the last say the revision before it:
        who goes on from there is told of it again, whole."""
        stop = start + told.rows
        before = revision_to(since)
        rows, at = await listed.group(start, stop, self._page_bytes)
        while at < stop:
            if told.full:
                raise TooOld(
                    f"history does not reach back to {since.epoch}:{since.n}, and what there is "
                    "has no room in one answer: List it, in pages, and watch since its revision"
                )
            yield pb.WatchResponse(revision=before, rows=rows)
            rows, at = await listed.group(at, stop, self._page_bytes)
        *first, last = _groups(told.cleared, self._page_bytes)
        nbytes = sum(row.ByteSize() for row in rows) + sum(map(_size, last))
        if rows and not told.full and (first or nbytes > self._page_bytes):
            yield pb.WatchResponse(revision=before, rows=rows)
            rows = []
        for group in first:
            yield pb.WatchResponse(revision=before, cleared=group)
        yield pb.WatchResponse(
            revision=revision_to(told.revision), rows=rows, cleared=last, full=told.full
        )


def _question(request: pb.ListRequest) -> bytes:
    """What is asked, whichever page of it."""
    asked = pb.ListRequest()
    asked.CopyFrom(request)
    asked.page_token = ""
    asked.page_size = 0
    return asked.SerializeToString(deterministic=True)


def _size(key: str) -> int:
    return len(key.encode()) + FRAME_BYTES


def _groups(keys: list[str], max_bytes: int) -> list[list[str]]:
    """The keys in groups that have at most so many bytes; one empty group where there are none."""
    groups: list[list[str]] = [[]]
    room = max_bytes
    for key in keys:
        size = _size(key)
        if groups[-1] and size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(key)
        room -= size
    return groups
