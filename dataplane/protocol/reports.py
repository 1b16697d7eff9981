"""What an operator is told, as messages, and back: the dataclasses of `dataplane.inspection`.

Where a message and a dataclass have fields of one name, they mean the same: only what differs is
written out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from dataplane.inspection import (
    ClaimReport,
    ClientReport,
    FieldReport,
    KeyReport,
    LengthReport,
    PartitionStats,
    StoreReport,
    Tally,
    TaskReport,
    Waiter,
)
from dataplane.protocol.values import from_value, tags_from, tags_to, to_value
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb

PART_BYTES: Final = 1 << 20
"""About what the keys of one part of a claim take."""
PART_ORPHANS: Final = 50_000


def plain(message: Any) -> dict[str, Any]:
    """The fields of a message that are no messages, by name: repeated ones as lists, None for what
    is optional and not set."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            continue
        value: Any = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            value = None
        found[field.name] = list(value) if field.is_repeated else value
    return found


def revision_from(message: pb.Revision) -> Revision:
    """The revision of a message."""
    return Revision(message.epoch, message.n)


def _revision_to(revision: Revision) -> pb.Revision:
    return pb.Revision(epoch=revision.epoch, n=revision.n)


def client_to(client: ClientReport) -> pb.ClientReport:
    """The message of a client."""
    return pb.ClientReport(client_id=client.client_id, label=client.label, alive=client.alive)


def client_from(message: pb.ClientReport) -> ClientReport:
    """The client of a message."""
    return ClientReport(message.client_id, message.label, message.alive)


# -- keys ----------------------------------------------------------------------------------------


def key_to(report: KeyReport) -> pb.KeyReport:
    """The message of what is known of a key."""
    return pb.KeyReport(
        key=report.key,
        revision=_revision_to(report.revision),
        age_s=report.age_s,
        tags=tags_to(report.tags),
        tag_bytes=report.tag_bytes,
        fields=[
            pb.FieldReport(
                name=field.name, dtype=field.dtype, shape=field.shape, nbytes=field.nbytes,
                store=field.store, block=field.block, segment=field.segment, offset=field.offset,
            )
            for field in report.fields
        ],
        producer=client_to(report.producer),
        group=None if report.group is None else to_value(report.group).map_value,
        tasks=report.tasks,
        lost=report.lost,
    )  # fmt: skip


def key_from(message: pb.KeyReport) -> KeyReport:
    """What is known of a key."""
    group: dict[str, Any] | None = None
    if message.HasField("group"):
        group = {name: from_value(value) for name, value in message.group.entries.items()}
    return KeyReport(
        **plain(message),
        revision=revision_from(message.revision),
        tags=tags_from(message.tags),
        fields=[FieldReport(**plain(field)) for field in message.fields],
        producer=client_from(message.producer),
        group=group,
        tasks=dict(sorted(message.tasks.items())),
    )


# -- partitions ----------------------------------------------------------------------------------


def tally_to(tally: Tally) -> pb.TallyResponse:
    """The message of a tally."""
    return pb.TallyResponse(
        revision=_revision_to(tally.revision),
        rows=tally.rows,
        payload_bytes=tally.payload_bytes,
        tag_bytes=tally.tag_bytes,
        statuses=[
            pb.StatusReport(status=status, rows=rows, bytes=nbytes)
            for status, (rows, nbytes) in tally.statuses.items()
        ],
        groups_open=tally.groups_open,
        sample=tally.sample,
    )


def tally_from(partition_id: str, message: pb.TallyResponse) -> Tally:
    """The tally of a message."""
    return Tally(
        partition_id=partition_id,
        **plain(message),
        revision=revision_from(message.revision),
        statuses={each.status: [each.rows, each.bytes] for each in message.statuses},
    )


def stats_to(stats: PartitionStats) -> pb.GetStatsResponse:
    """The message of what a partition is made of."""
    return pb.GetStatsResponse(
        revision=_revision_to(stats.revision),
        keys=stats.keys,
        payload_bytes=stats.payload_bytes,
        extent_bytes=stats.extent_bytes,
        tag_bytes=stats.tag_bytes,
        held_bytes=stats.held_bytes,
        fields=[pb.FieldStats(name=name, **of) for name, of in stats.fields.items()],
        statuses=[
            pb.StatusReport(status=status, rows=rows) for status, rows in stats.statuses.items()
        ],
        producers=[
            pb.ProducerStats(
                client=pb.ClientReport(
                    client_id=of["client_id"], label=of["label"], alive=of["alive"]
                ),
                rows=of["rows"],
                bytes=of["bytes"],
            )
            for of in stats.producers
        ],
        ages=[pb.AgeStats(**age) for age in stats.ages],
        lengths={name: _length_to(length) for name, length in stats.lengths.items()},
    )


def stats_from(partition_id: str, message: pb.GetStatsResponse) -> PartitionStats:
    """What a partition is made of."""
    return PartitionStats(
        partition_id=partition_id,
        **plain(message),
        revision=revision_from(message.revision),
        fields={of.name: {"rows": of.rows, "bytes": of.bytes} for of in message.fields},
        statuses={of.status: of.rows for of in message.statuses},
        producers=[{**plain(of.client), **plain(of)} for of in message.producers],
        ages=[plain(age) for age in message.ages],
        lengths={name: _length_from(message.lengths[name]) for name in sorted(message.lengths)},
    )


def _length_to(length: LengthReport) -> pb.LengthReport:
    return pb.LengthReport(
        rows=length.rows, min=length.min, max=length.max, mean=length.mean,
        p50=length.p50, p90=length.p90, p99=length.p99,
        histogram=[
            pb.LengthBin(low=low, high=high, rows=rows) for low, high, rows in length.histogram
        ],
    )  # fmt: skip


def _length_from(message: pb.LengthReport) -> LengthReport:
    histogram = [(each.low, each.high, each.rows) for each in message.histogram]
    return LengthReport(**plain(message), histogram=histogram)


# -- claims --------------------------------------------------------------------------------------


def task_to(task: TaskReport) -> pb.TaskReport:
    """The message of how far a task has come."""
    return pb.TaskReport(
        partition_id=task.partition_id, task=task.task, committed=task.committed, held=task.held,
        lag=task.lag, waiting=task.waiting,
    )  # fmt: skip


def task_from(message: pb.TaskReport) -> TaskReport:
    """How far a task has come."""
    return TaskReport(**plain(message))


def claim_to(claim: ClaimReport) -> Iterator[pb.ClaimReport]:
    """A claim in as many messages as its keys need."""
    parts = list(_parts(claim.keys))
    for keys in parts or [[]]:
        yield pb.ClaimReport(
            partition_id=claim.partition_id, task=claim.task, claim_id=claim.claim_id, keys=keys,
            holders=map(client_to, claim.holders), age_s=claim.age_s, lease_s=claim.lease_s,
            left_s=claim.left_s,
        )  # fmt: skip


def _parts(keys: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    room = PART_BYTES
    for key in keys:
        part.append(key)
        room -= len(key) + 4
        if room <= 0:
            yield part
            part, room = [], PART_BYTES
    if part:
        yield part


def claims_from(messages: Iterable[pb.ClaimReport]) -> list[ClaimReport]:
    """The claims of messages, parts joined."""
    claims: list[ClaimReport] = []
    for message in messages:
        holders = [client_from(holder) for holder in message.holders]
        claim = ClaimReport(**plain(message), holders=holders)
        last = claims[-1] if claims else None
        if last is not None and _name(last) == _name(claim):
            last.keys.extend(claim.keys)
        else:
            claims.append(claim)
    return claims


def _name(claim: ClaimReport) -> tuple[str, str, int]:
    return claim.partition_id, claim.task, claim.claim_id


def waiter_to(waiter: Waiter) -> pb.WaiterReport:
    """The message of a request that waits."""
    return pb.WaiterReport(
        kind=waiter.kind, client=client_to(waiter.client), partition_id=waiter.partition_id,
        waited_s=waiter.waited_s, left_s=waiter.left_s, count=waiter.count, where=waiter.where,
        task=waiter.task, fields=waiter.fields, grouped=waiter.grouped,
    )  # fmt: skip


def waiter_from(message: pb.WaiterReport) -> Waiter:
    """A request that waits."""
    return Waiter(**plain(message), client=client_from(message.client))


# -- stores --------------------------------------------------------------------------------------


def store_to(store: StoreReport) -> Iterator[pb.StoreReport]:
    """What a value store holds, in as many messages as its orphans need."""
    for at in range(0, max(1, len(store.orphans)), PART_ORPHANS):
        message = pb.StoreReport(
            store_id=store.store_id,
            orphans=[pb.OrphanReport(**each) for each in store.orphans[at : at + PART_ORPHANS]],
        )
        if not at:
            for name in _COUNTS:
                setattr(message, name, getattr(store, name))
            message.pins.extend(map(_holding_to, store.pins))
            message.reservations.extend(map(_holding_to, store.reservations))
        yield message


_COUNTS: Final = (
    "reachable", "error", "pid", "capacity_bytes", "segment_bytes", "used_bytes", "held_bytes",
    "live_blocks", "dead_blocks",
)  # fmt: skip


def stores_from(messages: Iterable[pb.StoreReport]) -> list[StoreReport]:
    """What value stores hold, parts joined."""
    stores: list[StoreReport] = []
    for message in messages:
        orphans = [_set(each) for each in message.orphans]
        if stores and stores[-1].store_id == message.store_id:
            stores[-1].orphans.extend(orphans)
            continue
        stores.append(
            StoreReport(
                **plain(message),
                orphans=orphans,
                pins=[_holding_from(each) for each in message.pins],
                reservations=[_holding_from(each) for each in message.reservations],
            )
        )
    return stores


def _holding_to(holding: Mapping[str, Any]) -> pb.HoldingReport:
    counts = {name: value for name, value in holding.items() if name != "client"}
    return pb.HoldingReport(client=client_to(holding["client"]), **counts)


def _holding_from(message: pb.HoldingReport) -> dict[str, Any]:
    return {"client": client_from(message.client), **_set(message)}


def _set(message: Any) -> dict[str, Any]:
    """What a message says; what it does not say is left out."""
    return {name: value for name, value in plain(message).items() if value is not None}
