"""Checkpoints at the tag store: a cut of the whole plane that a client reads in pieces.

Owns which cuts are open. A cut is of one revision: chunks are frozen, and what changes afterwards
copies them. Blocks that it refers to are not freed while it is open. It ends when its client closes
it, at the deadline of the save, or a while after its client has gone.

    checkpoint_open   [id, wait_s]                       -> [revision, floor, partitions]
    checkpoint_state  [id, number, at]                   -> [groups, next, tasks]
    checkpoint_rows   [id, number, chunk, row]           -> [rows, next], tags as payload
    checkpoint_close  [id]                               -> nil

Ids are the client's own, so that every request may be repeated. Restoring is server/restoring.py.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from dataplane.errors import InvalidRequest
from dataplane.server.connection import Connection, Verb
from dataplane.server.restoring import Restorer
from dataplane.server.slices import Slices
from dataplane.tags.accounts import Account
from dataplane.tags.groups import Group
from dataplane.tags.partition import Partition
from dataplane.tags.resolve import locate
from dataplane.tags.restoring import PROMPT, SavedGroup
from dataplane.tags.rows import Chunk, Row
from dataplane.tags.saved_tasks import SavedTask
from dataplane.types import FieldSchema
from dataplane.wire.frames import Body
from dataplane.wire.messages import check_wait

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

MAX_OPEN = 8
"""Checkpoints that may be open at once: each keeps rows and blocks that are gone otherwise."""
GONE_S = 5.0
"""How long a client may be without a connection before what it had open ends."""
PIECE_TAG_BYTES = 4 << 20
"""Packed tags that one answer carries, about."""
STEP_ROWS = 64
"""Rows whose tags are packed in one step."""
PART_ROWS = 512
"""Rows whose blocks are looked up in one step."""
PART_LENGTH_BYTES = 4 << 20
"""Row lengths of blocks that one part names, about: those of a whole block come with each row."""
STEP_GROUPS = 1024


class _Cut(NamedTuple):
    """One partition at that moment."""

    about: dict[str, Any]
    schema: dict[str, FieldSchema]
    chunks: list[tuple[int, Chunk]]
    """Chunks that have rows, with their numbers."""
    groups: list[tuple[Group, str, int, float, bool]]
    """Groups, and what of each may change: status, since when, and whether it is open."""
    tasks: list[SavedTask]
    prompts: Account
    """Whose rows were made for prompts."""


class _Checkpoint:
    def __init__(self, client_id: str, answer: Any, cuts: list[_Cut]) -> None:
        self.client_id = client_id
        self.answer = answer
        self.cuts = cuts
        self.timer: asyncio.TimerHandle | None = None


class Checkpointing:
    """The verbs of saving; those of loading are the restorer's."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._open: dict[str, _Checkpoint] = {}
        self.restorer = Restorer(service)
        self.verbs: dict[str, Verb] = {
            "checkpoint_open": self._begin,
            "checkpoint_state": self._state,
            "checkpoint_rows": self._rows,
            "checkpoint_close": self._close,
            **self.restorer.verbs,
        }

    def detached(self, client_id: str) -> None:
        """A client has lost its last connection; it may come back."""
        saving = any(checkpoint.client_id == client_id for checkpoint in self._open.values())
        if saving or self.restorer.client_id == client_id:
            asyncio.get_running_loop().call_later(GONE_S, self._look_after, client_id)

    def _look_after(self, client_id: str) -> None:
        """End what a client had open, if it has not come back."""
        if client_id in self._service.attached:
            return
        for checkpoint_id, checkpoint in list(self._open.items()):
            if checkpoint.client_id == client_id:
                self._end(checkpoint_id)
        if self.restorer.client_id == client_id:
            self.restorer.abandon()

    # -- the cut -----------------------------------------------------------------------------

    def _begin(self, connection: Connection, number: int, body: Body) -> None:
        checkpoint_id, wait_s = body
        known = self._open.get(_check_id(checkpoint_id))
        if known is not None:
            if known.client_id != connection.client_id:
                raise InvalidRequest(f"checkpoint {checkpoint_id!r} is another client's")
            connection.reply(number, known.answer)
            return
        wait_s = check_wait(wait_s)
        if len(self._open) >= MAX_OPEN:
            raise InvalidRequest(f"{MAX_OPEN} checkpoints are being saved already: wait for one")
        store = self._service.store
        cuts = [_cut_of(partition) for partition in store.partitions.values()]
        abouts = [cut.about for cut in cuts]
        answer = [store.revision(), store.history.floor, abouts]
        checkpoint = _Checkpoint(connection.client_id, answer, cuts)
        self._open[checkpoint_id] = checkpoint
        self._service.freeing.pause()
        loop = asyncio.get_running_loop()
        checkpoint.timer = loop.call_later(wait_s, self._end, checkpoint_id)
        connection.reply(number, answer)

    def _close(self, connection: Connection, number: int, body: Body) -> None:
        (checkpoint_id,) = body
        if _check_id(checkpoint_id) in self._open:
            self._find(connection, checkpoint_id)
            self._end(checkpoint_id)
        connection.reply(number, None)

    def _end(self, checkpoint_id: str) -> None:
        checkpoint = self._open.pop(checkpoint_id, None)
        if checkpoint is None:
            return
        if checkpoint.timer is not None:
            checkpoint.timer.cancel()
        self._service.freeing.resume()

    def _find(self, connection: Connection, checkpoint_id: object) -> _Checkpoint:
        checkpoint = self._open.get(_check_id(checkpoint_id))
        if checkpoint is None or checkpoint.client_id != connection.client_id:
            raise InvalidRequest(
                f"checkpoint {checkpoint_id!r} is not open (any more): it ended at its deadline, "
                "or its client was gone too long; save again with a longer timeout"
            )
        return checkpoint

    def _cut(self, connection: Connection, checkpoint_id: object, number: object) -> _Cut:
        cuts = self._find(connection, checkpoint_id).cuts
        if type(number) is not int or not 0 <= number < len(cuts):
            raise InvalidRequest(f"the checkpoint has {len(cuts)} partitions, not {number!r:.80}")
        return cuts[number]

    # -- reading it --------------------------------------------------------------------------

    def _state(self, connection: Connection, number: int, body: Body) -> None:
        checkpoint_id, partition, at = body
        cut = self._cut(connection, checkpoint_id, partition)
        if type(at) is not int or at < 0:
            raise InvalidRequest(f"at is the number of a group, not {at!r:.80}")
        groups = [SavedGroup.of(*then) for then in cut.groups[at : at + STEP_GROUPS]]
        following = at + len(groups) if at + len(groups) < len(cut.groups) else None
        tasks = [] if at else [task.about for task in cut.tasks]
        connection.reply(number, [groups, following, tasks])

    async def _rows(self, connection: Connection, number: int, body: Body) -> None:
        checkpoint_id, partition, at, first = body
        cut = self._cut(connection, checkpoint_id, partition)
        if type(at) is not int or type(first) is not int or at < 0 or first < 0:
            raise InvalidRequest("a piece is named by the number of its chunk and of its first row")
        if at >= len(cut.chunks):
            connection.reply(number, [None, None])
            return
        chunk_number, chunk = cut.chunks[at]
        offsets = [i for i, slot in enumerate(chunk.rows) if type(slot) is Row]
        slices = Slices(self._service.worst)
        rows: list[Row] = []
        tags: list[bytes] = []
        room = PIECE_TAG_BYTES
        live = chunk.live_rows()
        pack = msgpack.packb
        while first + len(rows) < len(live) and room > 0:
            step = live[first + len(rows) : first + len(rows) + STEP_ROWS]
            packed = [pack(row.tags) for row in step]
            rows += step
            tags += packed
            room -= sum(map(len, packed))
            await slices.breathe()
        parts: list[Any] = []
        for begin, end in _parts(rows):
            parts.append([begin, end, locate(rows[begin:end], cut.schema)])
            await slices.breathe()
        head = _head(rows, cut.prompts)
        await slices.breathe()
        tasks: dict[str, bytes] = {}
        for task in cut.tasks:
            tasks[task.name] = task.of_rows(chunk_number, offsets[first : first + len(rows)])
            await slices.breathe()
        following = [at, first + len(rows)] if first + len(rows) < len(live) else [at + 1, 0]
        answer = [[*head, tasks, parts], following]
        await connection.reply_with(number, answer, tags, sum(map(len, tags)))


def _check_id(checkpoint_id: object) -> str:
    if type(checkpoint_id) is not str or not 0 < len(checkpoint_id) <= 64:
        raise InvalidRequest(f"a checkpoint is named by its client, not {checkpoint_id!r:.80}")
    return checkpoint_id


def _cut_of(partition: Partition) -> _Cut:
    """A partition as it is now, for good."""
    chunks: list[tuple[int, Chunk]] = []
    for number, chunk in enumerate(partition.slots.chunks):
        if chunk is not None and chunk.live:
            chunk.frozen = True
            chunks.append((number, chunk))
    quota, retention = partition.quota, partition.retention
    about = {
        "partition_id": partition.partition_id,
        "rows": len(partition),
        "revision": partition.revision,
        "sealed": partition.sealed,
        "open_schema": partition.open_schema,
        "fields": {name: list(field) for name, field in partition.schema.items()},
        "quota": None if quota is None else quota.limits(),
        "retention": None if retention is None else {"versions": retention.versions},
    }
    groups = [(g, g.status, g.since, g.at, g.open) for g in partition.groups.values()]
    tasks = [SavedTask(task) for task in partition.claims.tasks.values()]
    return _Cut(about, dict(partition.schema), chunks, groups, tasks, partition.prompts)


def _parts(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Where the rows are cut, so that no part names too many blocks or too large ones."""
    parts: list[tuple[int, int]] = []
    begin = nbytes = 0
    last: Any = None
    for i, row in enumerate(rows):
        for placement in row.layers[::2]:
            if placement is not last:
                nbytes += len(placement.lengths)
                last = placement
        if i > begin and (i - begin == PART_ROWS or nbytes > PART_LENGTH_BYTES):
            parts.append((begin, i))
            begin, nbytes = i, 0
    return [*parts, (begin, len(rows))]


def _head(rows: Sequence[Row], prompts: Account) -> list[Any]:
    """What is known of rows besides tags and fields, as [keys, revisions, clears, attempts,
    producers, which of those each row has]."""
    producers: dict[str, int] = {}
    attempts = array("q")
    codes = array("i")
    for row in rows:
        account: Any = row.account
        if type(account) is Group:
            attempts.append(account.attempt)
            account = account.producer
        else:
            attempts.append(PROMPT if account.parent is prompts else 0)
        codes.append(producers.setdefault(account.client_id, len(producers)))
    return [
        [row.key for row in rows],
        array("q", [row.revision for row in rows]).tobytes(),
        array("q", [row.cleared_at for row in rows]).tobytes(),
        attempts.tobytes(),
        list(producers),
        codes.tobytes(),
    ]
