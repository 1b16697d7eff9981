"""The call that writes tags only: PutTags."""

from __future__ import annotations

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.put import put_block
from dataplane.codec.tags import pack_tags_many
from dataplane.errors import InvalidRequest
from dataplane.gateway.call import Call
from dataplane.gateway.calls.arguments import flags_of, keys_of, revision_to
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.service import Handler
from dataplane.protocol.values import tags_from, tags_to
from dataplane.types import KVBatchMeta
from dataplane.v1 import dataplane_pb2 as pb


class Tagging:
    """PutTags."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self.handlers: dict[str, Handler] = {"PutTags": self.put_tags}

    async def put_tags(self, request: pb.PutTagsRequest, call: Call) -> pb.PutTagsResponse:
        """Merge tags into those of the rows, at one revision."""
        call.require("put_tags", request.partition_id)
        keys = keys_of(request.keys)
        if len(request.tags) != len(keys):
            raise InvalidRequest(
                f"{len(keys)} keys and {len(request.tags)} tags: give the tags of each key, in "
                "order; empty ones for none"
            )
        flags = flags_of(request.mode, return_tags=request.return_tags, request=request.request)
        tags = [tags_from(message) for message in request.tags]
        packed = pack_tags_many(tags)

        def verb(core: Core, deadline: float) -> Verb[KVBatchMeta]:
            return put_block(
                core, keys, request.partition_id, None, packed, tags, flags, deadline,
                request.attempt or None,
            )  # fmt: skip

        async with call.asking(request.request) as client:
            put = await client.run(verb, call.timeout(self._longest_s))
        return pb.PutTagsResponse(
            revision=revision_to(put.revision),
            tags=map(tags_to, put.tags) if request.return_tags else (),
            fields=put.fields,
        )
