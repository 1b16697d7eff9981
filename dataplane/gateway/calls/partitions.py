"""The calls about whole partitions: ListPartitions, their settings, their end, and Clear."""

from __future__ import annotations

from typing import Any

from dataplane.errors import InvalidRequest, PermissionDenied
from dataplane.gateway.call import Call
from dataplane.gateway.calls.arguments import keys_of, revision_to, until_of, where_of
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.service import Handler
from dataplane.protocol.values import to_value
from dataplane.types import FieldSchema, Quota, Retention
from dataplane.v1 import dataplane_pb2 as pb


class Partitions:
    """ListPartitions, CreatePartition, SealPartition, DropPartition and Clear."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self.handlers: dict[str, Handler] = {
            "ListPartitions": self.list,
            "CreatePartition": self.create,
            "SealPartition": self.seal,
            "DropPartition": self.drop,
            "Clear": self.clear,
        }

    async def list(
        self, request: pb.ListPartitionsRequest, call: Call
    ) -> pb.ListPartitionsResponse:
        """What is known of every partition that the caller may see."""
        call.principal.require_any("list")
        found = await call.reader.kv_list_partitions(timeout=call.timeout(self._longest_s))
        response = pb.ListPartitionsResponse()
        for partition_id, about in found.items():
            if call.principal.sees(partition_id):
                schema = {name: tuple(parts) for name, parts in about["schema"].items()}
                value = to_value({**about, "schema": schema}, partition_id)
                response.partitions[partition_id].CopyFrom(value.map_value)
        return response

    async def create(
        self, request: pb.CreatePartitionRequest, call: Call
    ) -> pb.CreatePartitionResponse:
        """Make a partition, or change the settings that the request names."""
        call.require("partition", request.partition_id)
        if request.open_schema and request.schema:
            raise InvalidRequest("a schema is open, or it declares fields; not both")
        schema: Any = "open" if request.open_schema else _schema(request) or None
        quota = _quota(request.quota) if request.HasField("quota") else None
        keep = request.retention_versions
        async with call.asking(request.request) as client:
            made = await client.kv_create_partition(
                request.partition_id,
                schema=schema,
                quota=quota,
                retention=Retention(keep) if keep else None,
                timeout=call.timeout(self._longest_s),
            )
        return pb.CreatePartitionResponse(revision=revision_to(made))

    async def seal(self, request: pb.SealPartitionRequest, call: Call) -> pb.SealPartitionResponse:
        """Let no new row in; the older versions that went for it, those that the caller sees."""
        call.require("partition", request.partition_id)
        async with call.asking(request.request) as client:
            dropped = await client.kv_seal_partition(
                request.partition_id, timeout=call.timeout(self._longest_s)
            )
        return pb.SealPartitionResponse(dropped=filter(call.principal.sees, dropped))

    async def drop(self, request: pb.DropPartitionRequest, call: Call) -> pb.DropPartitionResponse:
        """Take a partition away, or its older versions; their names."""
        call.require("partition", request.partition_id)
        older_than = request.older_than if request.HasField("older_than") else None
        if older_than is not None:
            await self._check_versions(request.partition_id, call)
        async with call.asking(request.request) as client:
            dropped = await client.kv_drop_partition(
                request.partition_id,
                older_than=older_than,
                timeout=call.timeout(self._longest_s),
            )
        return pb.DropPartitionResponse(dropped=dropped)

    async def _check_versions(self, family: str, call: Call) -> None:
        """PermissionDenied unless the caller may drop every version that there is."""
        found = await call.reader.kv_list_partitions(timeout=call.timeout(self._longest_s))
        start = f"{family}@"
        versions = [name for name in found if name.startswith(start)]
        if not all(call.principal.may("partition", name) for name in versions):
            raise PermissionDenied(
                f"{call.principal.name!r:.80} may not partition in all versions of {family!r:.80}; "
                "it needs a grant for that"
            )

    async def clear(self, request: pb.ClearRequest, call: Call) -> pb.ClearResponse:
        """Remove rows by key or by predicate, at one revision; how many there were."""
        call.require("clear", request.partition_id)
        where = where_of(request)
        keys = None
        if where is None or request.keys:
            keys = keys_of(request.keys, unique=False)
        async with call.asking(request.request) as client:
            removed = await client.kv_clear(
                keys,
                request.partition_id,
                where=where,
                retire=request.retire,
                until=until_of(request),
                timeout=call.timeout(self._longest_s),
            )
        return pb.ClearResponse(removed=removed)


def _schema(request: pb.CreatePartitionRequest) -> dict[str, FieldSchema]:
    return {
        name: FieldSchema(
            field.dtype, field.rank, field.ragged_dim if field.HasField("ragged_dim") else None
        )
        for name, field in request.schema.items()
    }


def _quota(message: pb.Quota) -> Quota:
    """The limits that are not 0; with none of them a quota that there was goes."""
    return Quota(
        bytes=message.bytes or None,
        rows=message.rows or None,
        producer_bytes=message.producer_bytes or None,
        producer_rows=message.producer_rows or None,
        group_bytes=message.group_bytes or None,
    )
