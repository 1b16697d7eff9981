"""The calls by which an operator looks at keys, partitions and the plane: GetStatus, Inspect,
Tally, GetStats and FindRevision. They change nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.inspecting import KEYS_AT_ONCE
from dataplane.client.retry import ask_again
from dataplane.errors import InvalidRequest
from dataplane.gateway.access.sight import Sight
from dataplane.gateway.call import Call
from dataplane.gateway.calls.arguments import keys_of, revision_to, until_of, where_of
from dataplane.gateway.calls.listed import FRAME_BYTES, SPARE_BYTES
from dataplane.gateway.calls.listing import PAGE_BYTES
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.producers import check_client_id, plane_client_id
from dataplane.gateway.service import Handler
from dataplane.inspection import ClientReport, KeyReport, PartitionStats
from dataplane.protocol.reports import key_to, stats_to, tally_to
from dataplane.protocol.values import to_value
from dataplane.v1 import dataplane_pb2 as pb

STEP: Final = 64
"""Keys that are told of before others may run."""
COMMON: Final = (
    "version", "revision", "started_s", "uptime_s", "time_s", "history_floor", "history_changes",
)  # fmt: skip
"""What everybody is told of the plane as a whole; see `Describe`."""


def sight_of(call: Call, client_id: str) -> Sight:
    """What the caller is told of clients, its own of which may have said how it calls itself."""
    if not client_id:
        return Sight(call.principal)
    check_client_id(client_id)
    return Sight(call.principal, client_id, plane_client_id(call.principal.name, client_id))


class Inspecting:
    """GetStatus, Inspect, Tally, GetStats and FindRevision."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self._page_bytes = min(PAGE_BYTES, config.max_message_bytes - SPARE_BYTES)
        self.handlers: dict[str, Handler] = {
            "GetStatus": self.status,
            "Inspect": self.inspect,
            "Tally": self.tally,
            "GetStats": self.stats,
            "FindRevision": self.revision,
        }

    async def status(self, request: pb.GetStatusRequest, call: Call) -> pb.GetStatusResponse:
        """What the plane says of itself; of some of it to who may not operate it."""
        call.principal.require_any("list")
        timeout = call.timeout(self._longest_s)
        if call.principal.everywhere("operate"):
            told = await call.reader.status(timeout=timeout)
        else:
            told = _of_seen(await call.reader.run(_tag_status, timeout), call)
        return pb.GetStatusResponse(status=to_value(told, "status").map_value)

    async def inspect(self, request: pb.InspectRequest, call: Call) -> pb.InspectResponse:
        """What is known of keys: of as many of them as one answer has room for."""
        partition_id = request.partition_id
        call.require("list", partition_id)
        keys = keys_of(request.keys, unique=False)
        if len(keys) > KEYS_AT_ONCE:
            raise InvalidRequest(
                f"at most {KEYS_AT_ONCE} keys are told of at once, not {len(keys)}"
            )
        sight = sight_of(call, request.client_id)
        found = await call.reader.inspect(keys, partition_id, timeout=call.timeout(self._longest_s))
        response = pb.InspectResponse()
        room = self._page_bytes
        for at, report in enumerate(found, 1):
            if report is not None:
                message = key_to(_seen(report, partition_id, sight))
                room -= message.ByteSize() + FRAME_BYTES
                if response.rows and room < 0:
                    break
                response.rows.append(message)
            response.looked_at = at
            if not at % STEP:
                await asyncio.sleep(0)
        return response

    async def tally(self, request: pb.TallyRequest, call: Call) -> pb.TallyResponse:
        """How many rows match, and how large they are."""
        call.require("list", request.partition_id)
        tally = await call.reader.tally(
            request.partition_id,
            where=where_of(request),
            until=until_of(request),
            timeout=call.timeout(self._longest_s),
        )
        return tally_to(tally)

    async def stats(self, request: pb.GetStatsRequest, call: Call) -> pb.GetStatsResponse:
        """What a partition is made of."""
        call.require("explain", request.partition_id)
        sight = sight_of(call, request.client_id)
        stats = await call.reader.stats(request.partition_id, timeout=call.timeout(self._longest_s))
        return stats_to(replace(stats, producers=_producers(stats, sight)))

    async def revision(
        self, request: pb.FindRevisionRequest, call: Call
    ) -> pb.FindRevisionResponse:
        """The last revision of a certain age."""
        call.principal.require_any("list")
        found = await call.reader.revision_before(
            request.age_s, timeout=call.timeout(self._longest_s)
        )
        return pb.FindRevisionResponse(revision=revision_to(found))


def _tag_status(core: Core, deadline: float) -> Verb[dict[str, Any]]:
    return (yield from ask_again(core, "status", [], deadline)).body


def _of_seen(status: dict[str, Any], call: Call) -> dict[str, Any]:
    """The status less what concerns others."""
    seen = {name: status[name] for name in COMMON if name in status}
    partitions = {
        name: about for name, about in status["partitions"].items() if call.principal.sees(name)
    }
    nbytes = sum(about["payload_bytes"] for about in partitions.values())
    return {**seen, "partitions": partitions, "bytes_in_use": nbytes}


def _seen(report: KeyReport, partition_id: str, sight: Sight) -> KeyReport:
    fields = report.fields
    if not sight.of_plane:
        fields = [replace(each, store="", block=0, segment=0, offset=0) for each in fields]
    return replace(report, fields=fields, producer=sight.client(report.producer, partition_id))


def _producers(stats: PartitionStats, sight: Sight) -> list[dict[str, Any]]:
    """The producers as they are told of; those without a name are counted together."""
    told: list[dict[str, Any]] = []
    others: dict[str, Any] | None = None
    for of in stats.producers:
        client = sight.client(
            ClientReport(of["client_id"], of["label"], of["alive"]), stats.partition_id
        )
        about = {
            "client_id": client.client_id, "label": client.label, "alive": client.alive,
            "rows": of["rows"], "bytes": of["bytes"],
        }  # fmt: skip
        if of["client_id"] and not client.client_id:
            if others is not None:
                others["alive"] |= client.alive
                others["rows"] += of["rows"]
                others["bytes"] += of["bytes"]
                continue
            others = about
        told.append(about)
    return sorted(told, key=lambda each: -each["bytes"])
