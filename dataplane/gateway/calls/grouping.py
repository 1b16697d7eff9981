"""The calls of groups: BeginGroup, which waits for room, and EndGroup."""

from __future__ import annotations

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.groups import end_group
from dataplane.errors import InvalidRequest
from dataplane.gateway.call import Call
from dataplane.gateway.calls.arguments import revision_to
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.service import Handler
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb


class Grouping:
    """BeginGroup and EndGroup."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self.handlers: dict[str, Handler] = {"BeginGroup": self.begin, "EndGroup": self.end}

    async def begin(self, request: pb.BeginGroupRequest, call: Call) -> pb.BeginGroupResponse:
        """Open an attempt at a group, as soon as there is room for it."""
        call.require("group", request.partition_id)
        if request.declared_bytes < 0:
            raise InvalidRequest(
                f"declared_bytes is 0 or more, not {request.declared_bytes}; 0 is the partition's "
                "default"
            )
        async with call.asking(request.request) as client:
            attempt = await client.begin_group(
                request.uid,
                request.partition_id,
                n=request.n,
                declared_bytes=request.declared_bytes or None,
                timeout=call.timeout(self._longest_s),
            )
        return pb.BeginGroupResponse(attempt=attempt)

    async def end(self, request: pb.EndGroupRequest, call: Call) -> pb.EndGroupResponse:
        """Close an attempt. StaleWrite if it is not open, or not of this partition: who may not see
        another partition learns nothing of what is open there."""
        call.require("group", request.partition_id)

        def verb(core: Core, deadline: float) -> Verb[Revision]:
            return end_group(core, request.attempt, request.status, deadline, request.partition_id)

        async with call.asking(request.request) as client:
            ended = await client.run(verb, call.timeout(self._longest_s))
        return pb.EndGroupResponse(revision=revision_to(ended))
