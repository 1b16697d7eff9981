"""The calls about lineage: Trace, and EnterStage, by which a client says at which stage it is.

Owns what is left out of a trace for who may not operate: whoever is not named has a number, the
same in all of one trace, so that different clients can still be told apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.tracing import ask_trace, enter_stage
from dataplane.gateway.access.sight import Sight
from dataplane.gateway.access.unseen import text_without_unseen
from dataplane.gateway.call import Call
from dataplane.gateway.calls.holding import grouped
from dataplane.gateway.calls.inspecting import sight_of
from dataplane.gateway.calls.listed import SPARE_BYTES
from dataplane.gateway.calls.listing import PAGE_BYTES
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.service import Handler
from dataplane.lineage.assemble import assemble
from dataplane.protocol.traces import row_to, summary_to
from dataplane.tags.lineage.lineage import check_stage
from dataplane.v1 import dataplane_pb2 as pb


class Tracing:
    """Trace and EnterStage."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self._page_bytes = min(PAGE_BYTES, config.max_message_bytes - SPARE_BYTES)
        self.handlers: dict[str, Handler] = {"Trace": self.trace, "EnterStage": self.stage}

    async def trace(self, request: pb.TraceRequest, call: Call) -> AsyncIterator[pb.TraceResponse]:
        """What happened, in the partitions that the caller may ask about."""
        partition_id, uid, key = [
            getattr(request, name) if request.HasField(name) else None
            for name in ("partition_id", "uid", "key")
        ]
        among = await self._among(partition_id, call)
        limit = request.limit if request.HasField("limit") else None
        sight = sight_of(call, request.client_id)

        def verb(core: Core, deadline: float) -> Verb[dict[str, Any]]:
            return ask_trace(core, partition_id, uid, key, request.since, limit, deadline, among)

        answer = await call.reader.run(verb, call.timeout(self._longest_s))
        hide(answer, sight, all_seen=among is None)
        # A long one takes a while.
        found = await asyncio.to_thread(
            partial(assemble, answer, partition_id, uid, key, since=request.since)
        )
        yield pb.TraceResponse(summary=summary_to(found))
        for part in grouped(map(row_to, found.rows), self._page_bytes):
            yield pb.TraceResponse(rows=part)
            await asyncio.sleep(0)

    async def _among(self, partition_id: str | None, call: Call) -> list[str] | None:
        """The only partitions that are spoken of; None for all, also those that are gone."""
        principal = call.principal
        if partition_id is None:
            principal.require_any("explain")
        else:
            call.require("explain", partition_id)
        if principal.everywhere("explain"):
            return None
        if partition_id is not None:
            return [partition_id]
        found = await call.reader.kv_list_partitions(timeout=call.timeout(self._longest_s))
        return [name for name in found if principal.may("explain", name)]

    async def stage(self, request: pb.EnterStageRequest, call: Call) -> pb.EnterStageResponse:
        """From now on the client's requests are of this stage."""
        stage = check_stage(request.stage) if request.stage else ""
        async with call.client(request.client_id, request.plane_id) as client:
            await client.run(
                lambda core, deadline: enter_stage(core, stage, deadline),
                call.timeout(self._longest_s),
            )
        return pb.EnterStageResponse()


def hide(answer: dict[str, Any], sight: Sight, *, all_seen: bool) -> None:
    """Take out of what the plane knows who is not to be named, and where values lie."""
    numbers: dict[str, str] = {}
    stores: dict[str, str] = {}
    told: dict[str, Any] = {}
    for entry in answer["entries"]:
        client_id: str = entry["client"]
        if client_id:
            partition_id: str | None = entry.get("partition") or None
            name = sight.called(client_id, partition_id)
            label, alive = answer["clients"].get(client_id, ("", False))
            if not name:
                name = numbers.setdefault(client_id, f"#{len(numbers) + 1}")
            told.setdefault(name, [label if sight.names(partition_id) else "", alive])
            entry["client"] = name
        if entry.get("store") and not sight.of_plane:
            entry["store"] = stores.setdefault(entry["store"], f"#{len(stores) + 1}")
        if "message" in entry and not all_seen:
            entry["message"] = text_without_unseen(entry["message"])
    answer["clients"] = told
