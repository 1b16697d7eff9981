"""The calls that tell how things are: Explain, GetOutcome and Describe. They change nothing but
this: an effect whose outcome was asked for, and that had none, never will have one.
"""

from __future__ import annotations

from typing import Any

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.partitions import explain
from dataplane.client.tags import present
from dataplane.codec.shapes import MAX_ROWS
from dataplane.errors import InvalidRequest, OutcomeUnknown
from dataplane.gateway.call import Call
from dataplane.gateway.calls.arguments import names_of, revision_to, where_of
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.producers import check_client_id, plane_client_id
from dataplane.gateway.service import Handler
from dataplane.protocol.values import tags_to, to_value
from dataplane.release import release
from dataplane.types import Explanation
from dataplane.v1 import dataplane_pb2 as pb


class Explaining:
    """Explain, GetOutcome and Describe."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self._version = release()
        self._limits = pb.Limits(
            max_message_bytes=config.max_message_bytes,
            max_put_bytes=config.max_put_bytes,
            max_get_bytes=config.max_get_bytes,
            chunk_bytes=config.chunk_bytes,
            max_rows=MAX_ROWS,
            max_page_size=config.max_page_size,
            resume_s=config.resume_s,
            absence_s=config.absence_s,
        )
        self.handlers: dict[str, Handler] = {
            "Explain": self.explain,
            "GetOutcome": self.outcome,
            "Describe": self.describe,
        }

    async def explain(self, request: pb.ExplainRequest, call: Call) -> pb.ExplainResponse:
        """Why something waits. Nothing is said of partitions that the caller may not see."""
        partition_id = request.partition_id or None
        if partition_id is None:
            call.principal.require_any("explain")
        else:
            call.require("explain", partition_id)
        where, fields = where_of(request), names_of(request.fields, "fields")
        timeout = call.timeout(self._longest_s)
        found = await call.reader.kv_list_partitions(timeout=timeout)
        may = call.principal.may
        among = [name for name in found if may("explain", name)]

        def verb(core: Core, deadline: float) -> Verb[Explanation]:
            return explain(
                core, partition_id, where, fields, request.task or None, request.group_by or None,
                request.count or None, deadline, among,
            )  # fmt: skip

        told = await call.reader.run(verb, timeout)
        return pb.ExplainResponse(
            text=told.text,
            matching=told.matching,
            total=told.total,
            failing=told.failing,
            stuck=map(tags_to, told.stuck),
            holders=map(tags_to, told.holders),
        )

    async def outcome(self, request: pb.GetOutcomeRequest, call: Call) -> pb.GetOutcomeResponse:
        """What became of an effect of the caller's. OutcomeUnknown if nothing is remembered."""
        call.check_plane(request.plane_id)
        check_client_id(request.client_id)
        if request.number < 1:
            raise InvalidRequest(f"a request's number is from 1 on, not {request.number}")
        inside = f"{plane_client_id(call.principal.name, request.client_id)}/{request.number}"
        outside = f"{request.client_id}/{request.number}"
        try:
            found: dict[str, Any] = await call.reader.request_outcome(
                inside, timeout=call.timeout(self._longest_s)
            )
        except OutcomeUnknown as error:
            message = error.message.replace(inside, outside)
            raise OutcomeUnknown(message, request_id=outside) from None
        return pb.GetOutcomeResponse(outcome=to_value(found).map_value)

    async def describe(self, request: pb.DescribeRequest, call: Call) -> pb.DescribeResponse:
        """What this gateway serves, to whom, and how much it takes."""
        now = await call.reader.run(present, call.timeout(self._longest_s))
        return pb.DescribeResponse(
            plane_id=call.plane_id,
            revision=revision_to(now),
            version=self._version,
            principal=call.principal.name,
            limits=self._limits,
        )
