"""Verbs about whole partitions and the plane, through a gateway."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dataplane.client.partitions import Schema, declared, grouped
from dataplane.client.put import list_of
from dataplane.client.tags import Where
from dataplane.errors import InvalidRequest
from dataplane.outside.reach import Reach, Steps
from dataplane.outside.rows import check_partition, where_of
from dataplane.protocol.values import from_value, tags_from
from dataplane.types import Explanation, FieldSchema, Quota, Retention, Revision
from dataplane.v1 import dataplane_pb2 as pb


def kv_create_partition(
    reach: Reach,
    partition_id: str,
    *,
    schema: Schema = None,
    quota: Quota | Mapping[str, int | None] | None = None,
    retention: Retention | Mapping[str, int] | None = None,
    timeout: float | None = None,
) -> Steps[Revision]:
    """Make a partition, or change the settings of one."""
    seconds = reach.seconds(timeout)
    check_partition(partition_id)
    message = pb.CreatePartitionRequest(partition_id=partition_id)
    if isinstance(schema, Mapping):
        for name, parts in schema.items():
            plain = declared(name, parts)
            try:
                dtype, rank, ragged = plain
                message.schema[name].CopyFrom(
                    pb.FieldSchema(dtype=dtype, rank=rank, ragged_dim=ragged)
                )
            except (TypeError, ValueError) as error:
                raise InvalidRequest(
                    f"field {name!r} of a schema is declared as (dtype, rank, ragged_dim), such "
                    f"as ('int64', 1, 0), not as {parts!r:.80}: {error}"
                ) from None
    elif schema == "open":
        message.open_schema = True
    elif schema is not None:
        raise InvalidRequest(f"a schema is a mapping of fields, or 'open', not {schema!r:.80}")
    limits, keep = Quota.of(quota), Retention.of(retention)
    if limits is not None:
        message.quota.CopyFrom(pb.Quota(**limits.limits()))
    if keep is not None:
        message.retention_versions = keep.versions
    answer = yield lambda transport: transport.effect("CreatePartition", message, seconds)
    return reach.see(answer.revision)


def kv_list_partitions(
    reach: Reach, *, timeout: float | None = None
) -> Steps[dict[str, dict[str, Any]]]:
    """Every partition that the caller may see, by name."""
    seconds = reach.seconds(timeout)
    message = pb.ListPartitionsRequest()
    answer = yield lambda transport: transport.ask("ListPartitions", message, seconds)
    partitions: dict[str, dict[str, Any]] = {}
    for partition_id, told in answer.partitions.items():
        about = {name: from_value(value) for name, value in told.entries.items()}
        schema: Mapping[str, Sequence[Any]] = about.get("schema") or {}
        about["schema"] = {name: FieldSchema(*parts) for name, parts in schema.items()}
        partitions[partition_id] = about
    return partitions


def kv_seal_partition(
    reach: Reach, partition_id: str, *, timeout: float | None = None
) -> Steps[list[str]]:
    """Let no new row in; the older versions that were dropped for it."""
    seconds = reach.seconds(timeout)
    check_partition(partition_id)
    message = pb.SealPartitionRequest(partition_id=partition_id)
    answer = yield lambda transport: transport.effect("SealPartition", message, seconds)
    return list(answer.dropped)


def kv_drop_partition(
    reach: Reach,
    partition_id: str,
    *,
    older_than: int | None = None,
    timeout: float | None = None,
) -> Steps[list[str]]:
    """Take partitions away; their names."""
    seconds = reach.seconds(timeout)
    check_partition(partition_id)
    if older_than is not None and (type(older_than) is not int or abs(older_than) >= 1 << 63):
        raise InvalidRequest(f"older_than is a version number, not {older_than!r:.80}")
    message = pb.DropPartitionRequest(partition_id=partition_id, older_than=older_than)
    answer = yield lambda transport: transport.effect("DropPartition", message, seconds)
    return list(answer.dropped)


def explain(
    reach: Reach,
    partition_id: str | None = None,
    where: Where | None = None,
    *,
    fields: Sequence[str] = (),
    task: str | None = None,
    group_by: str | None = None,
    count: int | None = None,
    timeout: float | None = None,
) -> Steps[Explanation]:
    """Why something waits."""
    seconds = reach.seconds(timeout)
    if isinstance(fields, str):
        raise InvalidRequest(f"fields is a list of field names; give [{fields!r:.80}] for one")
    if partition_id is not None:
        check_partition(partition_id)
    try:
        message = pb.ExplainRequest(
            partition_id=partition_id,
            fields=list_of(fields, "fields"),
            task=task,
            group_by="uid" if grouped(group_by) else "",
            count=count,
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"explain: {error}") from None
    if where is not None:
        message.where.CopyFrom(where_of(where))
    answer = yield lambda transport: transport.ask("Explain", message, seconds)
    return Explanation(
        answer.text,
        answer.matching,
        answer.total,
        dict(answer.failing),
        [tags_from(each) for each in answer.stuck],
        [tags_from(each) for each in answer.holders],
    )


def status(reach: Reach, *, timeout: float | None = None) -> Steps[dict[str, Any]]:
    """What the plane says of itself, as far as the caller may hear it, and what the gateway does:
    `gateway` (address and version), `principal`, `limits`."""
    seconds = reach.seconds(timeout)
    about = yield lambda transport: transport.describe(seconds)
    limits = {
        field.name: getattr(about.limits, field.name) for field in pb.Limits.DESCRIPTOR.fields
    }
    message = pb.GetStatusRequest()
    answer = yield lambda transport: transport.ask("GetStatus", message, seconds)
    told = {name: from_value(value) for name, value in answer.status.entries.items()}
    return {
        "name": reach.address,
        **told,
        "plane_id": about.plane_id,
        "gateway": {"address": reach.address, "version": about.version},
        "principal": about.principal,
        "limits": limits,
    }


def save_checkpoint(
    reach: Reach,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    timeout: float | None = None,
) -> Steps[dict[str, Any]]:
    """InvalidRequest: checkpoints are written beside the plane."""
    del path, overwrite, timeout
    _inside_only(reach, "save_checkpoint")
    yield  # a generator as the others are


def load_checkpoint(
    reach: Reach, path: str | os.PathLike[str], *, timeout: float | None = None
) -> Steps[dict[str, Any]]:
    """InvalidRequest: checkpoints are read beside the plane."""
    del path, timeout
    _inside_only(reach, "load_checkpoint")
    yield


def _inside_only(reach: Reach, verb: str) -> NoReturn:
    raise InvalidRequest(
        f"{verb} is not for clients outside: call it where the plane {reach.plane_id} is, with a "
        "client that joined it by its name or its unix socket"
    )
