"""The calls that say who holds what and who waits: ListClaims, ListWaiters and ListHoldings.

They change nothing, and answer in as many messages as it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, TypeVar

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.inspecting import claims_and_tasks
from dataplane.errors import InvalidRequest, PartitionNotFound
from dataplane.gateway.call import Call
from dataplane.gateway.calls.inspecting import sight_of
from dataplane.gateway.calls.listed import FRAME_BYTES, SPARE_BYTES
from dataplane.gateway.calls.listing import PAGE_BYTES
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.service import Handler
from dataplane.inspection import ClaimReport, StoreReport, TaskReport
from dataplane.protocol.reports import claim_to, store_to, task_to, waiter_to
from dataplane.v1 import dataplane_pb2 as pb

Message = TypeVar("Message", bound=Any)

MAX_CLAIMS: Final = 10_000
"""Claims of one answer: as many as the plane tells of at once."""


class Holding:
    """ListClaims, ListWaiters and ListHoldings."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self._page_bytes = min(PAGE_BYTES, config.max_message_bytes - SPARE_BYTES)
        self.handlers: dict[str, Handler] = {
            "ListClaims": self.claims,
            "ListWaiters": self.waiters,
            "ListHoldings": self.holdings,
        }

    async def claims(
        self, request: pb.ListClaimsRequest, call: Call
    ) -> AsyncIterator[pb.ListClaimsResponse]:
        """What is claimed, and how far each task has come."""
        if request.partition_id:
            call.require("explain", request.partition_id)
        else:
            call.principal.require_any("explain")
        sight = sight_of(call, request.client_id)
        claims, tasks = await self._found(request.partition_id, call)
        for batch in grouped(map(task_to, tasks), self._page_bytes):
            yield pb.ListClaimsResponse(tasks=batch)
        seen = (
            replace(
                claim,
                holders=[sight.client(holder, claim.partition_id) for holder in claim.holders],
            )
            for claim in claims
        )
        messages = (message for claim in seen for message in claim_to(claim))
        for part in grouped(messages, self._page_bytes):
            yield pb.ListClaimsResponse(claims=part)
            await asyncio.sleep(0)

    async def _found(
        self, partition_id: str, call: Call
    ) -> tuple[list[ClaimReport], list[TaskReport]]:
        timeout = call.timeout(self._longest_s)
        if partition_id or call.principal.everywhere("explain"):
            return await _claims_of(partition_id or None, call, timeout)
        claims: list[ClaimReport] = []
        tasks: list[TaskReport] = []
        partitions = await call.reader.kv_list_partitions(timeout=timeout)
        for name in filter(lambda name: call.principal.may("explain", name), partitions):
            try:
                found = await _claims_of(name, call, call.timeout(self._longest_s))
            except PartitionNotFound:
                continue  # it was dropped meanwhile
            claims += found[0]
            tasks += found[1]
            if len(claims) > MAX_CLAIMS:
                raise InvalidRequest(
                    f"there are more than {MAX_CLAIMS} claims: ask for one partition"
                )
        return claims, tasks

    async def waiters(
        self, request: pb.ListWaitersRequest, call: Call
    ) -> AsyncIterator[pb.ListWaitersResponse]:
        """Every request that waits in a partition that the caller may ask about."""
        call.principal.require_any("explain")
        sight = sight_of(call, request.client_id)
        may = call.principal.may
        found = await call.reader.waiters(timeout=call.timeout(self._longest_s))
        seen = (
            waiter_to(replace(each, client=sight.client(each.client, each.partition_id)))
            for each in found
            if may("explain", each.partition_id)
        )
        for part in grouped(seen, self._page_bytes):
            yield pb.ListWaitersResponse(waiters=part)
            await asyncio.sleep(0)

    async def holdings(
        self, request: pb.ListHoldingsRequest, call: Call
    ) -> AsyncIterator[pb.ListHoldingsResponse]:
        """What every value store has in use, and who holds it."""
        call.principal.require_everywhere("operate")
        sight = sight_of(call, request.client_id)

        def seen(held: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**each, "client": sight.client(each["client"], None)} for each in held]

        found: list[StoreReport] = await call.reader.holdings(timeout=call.timeout(self._longest_s))
        for store in found:
            told = replace(store, pins=seen(store.pins), reservations=seen(store.reservations))
            for message in store_to(told):
                yield pb.ListHoldingsResponse(store=message)
                await asyncio.sleep(0)


async def _claims_of(
    partition_id: str | None, call: Call, timeout: float
) -> tuple[list[ClaimReport], list[TaskReport]]:
    def verb(core: Core, deadline: float) -> Verb[tuple[list[ClaimReport], list[TaskReport]]]:
        return claims_and_tasks(core, partition_id, deadline)

    return await call.reader.run(verb, timeout)


def grouped(messages: Iterable[Message], max_bytes: int) -> Iterator[list[Message]]:
    """The messages in groups that have about so many bytes, at least one message each."""
    group: list[Message] = []
    room = max_bytes
    for message in messages:
        size: int = message.ByteSize() + FRAME_BYTES
        if group and size > room:
            yield group
            group, room = [], max_bytes
        group.append(message)
        room -= size
    if group:
        yield group
