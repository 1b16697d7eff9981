"""The whole state of a tag store as parts of a snapshot, and back. Pure.

What a replay of a journal makes is what is written, and nothing else: a replay that goes on from
what was read is as the other one. Left out are blocks that died (value stores are asked what they
have when they register) and all that is only kept to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from dataplane.codec.template import Templates
from dataplane.errors import InternalError
from dataplane.tags.history import History
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.replay.replay import Replay
from dataplane.tags.requests import PUT, RESTORED, Answered
from dataplane.tags.rows import Row
from dataplane.tags.snapshot.format import (
    ACCOUNTS,
    CHUNK,
    HISTORY,
    OLD_ROWS,
    PARTITION,
    PLACEMENTS,
    PLANE,
    REQUESTS,
    Part,
    Parts,
    SnapshotHead,
)
from dataplane.tags.snapshot.history import HistoryReader, bury, history_parts
from dataplane.tags.snapshot.references import References, Referred
from dataplane.tags.snapshot.rows import OldRows, chunk_parts, old_rows, take_chunk
from dataplane.tags.snapshot.tasks import TaskReader, task_parts
from dataplane.types import FieldSchema, Quota, Retention, Revision
from dataplane.wire.messages import PutAnswer

PIECE_ANSWERS = 1024
"""Answers in one part at most."""


def head_of(made: Replay, plane_id: str, number: int) -> SnapshotHead:
    """The head of the snapshot of what a replay has made."""
    store = made.store
    return SnapshotHead(plane_id, number, store.epoch, store.n, store.open_schemas)


def parts_of(made: Replay) -> Iterator[Part]:
    """All that a replay has made. InternalError while the load of a checkpoint is under way."""
    if made.loads.restoring is not None:
        raise InternalError("there is no snapshot while the load of a checkpoint is under way")
    store = made.store
    blocks: dict[str, list[Placement]] = {name: [] for name in store.partitions}
    for placement in store.placements.values():
        blocks[placement.partition_id].append(placement)
    for partition in store.partitions.values():
        references = References(partition)
        for placement in blocks[partition.partition_id]:
            references.placement(placement)
        yield _partition_part(partition, len(blocks[partition.partition_id]))
        yield from references.parts()
        yield from chunk_parts(partition, references)
        yield from task_parts(partition, OldRows(references))
    yield from history_parts(store.history)
    for client_id, requests in store.requests.items():
        answers = list(requests.answers.items())
        for at in range(0, len(answers) or 1, PIECE_ANSWERS):
            piece = [
                [number, answered.verb, answered.answer, answered.block]
                for number, answered in answers[at : at + PIECE_ANSWERS]
            ]
            yield [REQUESTS, client_id, requests.floor, piece]
    for client_id, floor in store.gone.items():
        yield [REQUESTS, client_id, floor, None]
    history = store.history
    yield [
        PLANE,
        {
            "starts": list(store.starts.items()),
            "attempts": [[group.partition_id, group.uid] for group in store.attempts.values()],
            "dropped": list(store.dropped.items()),
            "floor": [history.floor, history.floor_at],
            "forgotten": list(history.forgotten.items()),
            "stores": list(made.stores.items()),
            "last_claim_id": made.last_claim_id,
            "at": made.at,
            "ended": made.loads.ended,
        },
    ]


def _partition_part(partition: Partition, blocks: int) -> Part:
    return [
        PARTITION, partition.partition_id, blocks,
        {
            "born": partition.born, "revision": partition.revision, "sealed": partition.sealed,
            "open_schema": partition.open_schema,
            "quota": None if partition.quota is None else asdict(partition.quota),
            "retention": None if partition.retention is None else asdict(partition.retention),
            "schema": list(partition.schema.items()), "payload_bytes": partition.payload_bytes,
        },
    ]  # fmt: skip


class SnapshotReader:
    """Makes of the parts of a snapshot what they were made of."""

    def __init__(self, head: SnapshotHead, history: History) -> None:
        self.made = Replay(head.epoch, history, open_schemas=head.open_schemas)
        self.made.store.n = head.n
        self._templates = Templates()
        self._whole = False
        self._kinds: dict[int, Callable[..., None]] = {
            PARTITION: self._begin, HISTORY: HistoryReader(history).take,
            REQUESTS: self._requests, PLANE: self._plane,
        }  # fmt: skip

    def take(self, part: Part) -> None:
        """The next part. Any error: it is none that was written."""
        kind, *body = part
        self._kinds[kind](*body)

    def end(self) -> Replay:
        """What was made, when all parts are there."""
        if not self._whole:
            raise ValueError("the part about the plane is missing")
        bury(self.made.store.partitions, self.made.store.history)
        return self.made

    # -- partitions --------------------------------------------------------------------------

    def _begin(self, partition_id: str, blocks: int, about: dict[str, Any]) -> None:
        store = self.made.store
        partition = store.partitions[partition_id] = Partition(partition_id, about["born"])
        partition.revision = about["revision"]
        partition.sealed = about["sealed"]
        partition.open_schema = about["open_schema"]
        partition.quota = Quota.of(about["quota"])
        partition.retention = Retention.of(about["retention"])
        partition.schema = {name: FieldSchema(*field) for name, field in about["schema"]}
        partition.payload_bytes = about["payload_bytes"]
        referred = Referred(partition, self._templates.parse)
        olds: list[Row] = []

        def placements(*body: Any) -> None:
            first = len(referred.placements)
            referred.take_placements(*body)
            for placement in referred.placements[first:blocks]:
                store.placements[placement.store, placement.block] = placement

        self._kinds |= {
            ACCOUNTS: referred.take_accounts, PLACEMENTS: placements,
            CHUNK: partial(take_chunk, partition, referred),
            OLD_ROWS: lambda *columns: olds.extend(old_rows(referred, *columns)),
            **TaskReader(partition, olds).kinds,
        }  # fmt: skip

    # -- the plane ---------------------------------------------------------------------------

    def _requests(self, client_id: str, floor: int, answers: list[Any] | None) -> None:
        if answers is None:
            self.made.store.gone[client_id] = floor
            return
        requests = self.made.store.client(client_id)
        requests.floor = floor
        for number, verb, answer, block in answers:
            if verb in (PUT, RESTORED):
                revision, tags, fields = answer
                answer = PutAnswer(tuple(revision), tags, fields)
            place = None if block is None else tuple(block)
            requests.remember(number, Answered(verb, answer, place))

    def _plane(self, about: dict[str, Any]) -> None:
        made, store = self.made, self.made.store
        store.starts = dict(about["starts"])
        for partition_id, uid in about["attempts"]:
            group = store.partitions[partition_id].groups[uid]
            store.attempts[group.attempt] = group
        store.dropped = dict(about["dropped"])
        floor, floor_at = about["floor"]
        store.history.reach(floor, floor_at, dict(about["forgotten"]))
        # What was told to value stores nobody knows any more.
        groups = (group for p in store.partitions.values() for group in p.groups.values())
        store.settled.update({group: None for group in groups if group.store})
        made.stores = dict(about["stores"])
        made.last_claim_id = about["last_claim_id"]
        made.at = about["at"]
        if about["ended"] is not None:
            restore_id, revision = about["ended"]
            made.loads.ended = restore_id, Revision(*revision)
        self._whole = True


def loaded(parts: Parts, history: History) -> Replay:
    """What a snapshot is of. JournalDamaged names the part that makes no sense.

    `history` is empty and becomes that of the store.
    """
    reader = SnapshotReader(parts.head, history)
    for part in parts:
        try:
            reader.take(part)
        except Exception as error:
            raise parts.damaged(_senseless(part[0], error)) from error
    try:
        return reader.end()
    except Exception as error:
        raise parts.damaged(_senseless("all of them", error)) from error


def _senseless(kind: object, error: Exception) -> str:
    return f"its parts (kind {kind!r:.20}) do not fit together: {type(error).__name__}: {error}"
