"""Loading a checkpoint: checked from end to end, then put into an empty plane, all or nothing.

Owns the order of the steps and which value store takes what. The tag store hides what has come
until all of it is there (server/restoring.py); files are for dataplane/checkpoint.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.checkpoint import tables, values
from dataplane.checkpoint.files import OpenedFile
from dataplane.checkpoint.load import Checkpoint
from dataplane.checkpoint.manifest import PartitionEntry
from dataplane.checkpoint.verify import check
from dataplane.client.core import Core, StoreView
from dataplane.client.effects import Ask, Done, Open, Run, Tell, Verb
from dataplane.client.memory import Bytes
from dataplane.client.put import refresh_stores
from dataplane.client.retry import FIRST_PAUSE_S, ask_again, before_next_try
from dataplane.client.steps import FILE_WORK, quietly, time_left
from dataplane.codec.tags import pack_tags_many
from dataplane.errors import DataplaneError, OutcomeUnknown, QuotaExceeded, Unreachable
from dataplane.types import Revision
from dataplane.wire.channel import Broken
from dataplane.wire.messages import LONGEST_WAIT_S, RESTORE, PutMeta

Result = TypeVar("Result")
Ints = npt.NDArray[np.int64]

BLOCK_BYTES: Final = 1 << 20
"""Size of the blocks that a load makes, about: a block is freed when all of its rows are gone."""
SENT_ROWS: Final = 256
"""Rows of tags that a load sends at once: at 64 KiB each they still fit in one request."""
SENT_GROUPS: Final = 1024
STEP_S: Final = 0.25
"""How long files are checked without a look at the deadline."""


def load(
    core: Core,
    path: str | os.PathLike[str],
    deadline: float,
    stay: Sequence[str] | None = None,
) -> Verb[dict[str, Any]]:
    """Put a checkpoint into an empty plane; a summary.

    With `stay` the plane need not be empty: partitions of these names are neither loaded nor
    touched, all others give way at the revision at which the checkpoint appears. Until then there
    is to be room for both.
    """
    started = time.monotonic()
    checkpoint: Checkpoint = yield Run(partial(Checkpoint, path), FILE_WORK)
    try:
        steps = check(checkpoint)
        while (yield Run(partial(_goes_on, steps), FILE_WORK)):
            time_left(deadline, "check the checkpoint")
        revision = yield from _restore(core, checkpoint, deadline, stay)
    finally:
        checkpoint.close()
    return {
        **checkpoint.summary(),
        "saved_revision": Revision(checkpoint.manifest.epoch, checkpoint.manifest.n),
        "revision": revision,
        "seconds": time.monotonic() - started,
    }


def _goes_on(steps: Iterator[None]) -> bool:
    """Whether there is more to do after some steps."""
    until = time.monotonic() + STEP_S
    return any(time.monotonic() > until for _ in steps)


def _restore(
    core: Core, checkpoint: Checkpoint, deadline: float, stay: Sequence[str] | None
) -> Verb[Revision]:
    manifest = checkpoint.manifest
    restore_id = secrets.token_hex(8)
    left = time_left(deadline, "load the checkpoint")
    names = None if stay is None else list(stay)
    begin = [restore_id, left, manifest.epoch, manifest.n, names]
    yield from ask_again(core, "restore_begin", begin, deadline)
    ending = False
    try:
        stores = yield from _room(core, deadline)
        for partition in manifest.partitions:
            if partition.partition_id in (names or ()):
                continue
            loading = _Loading(core, restore_id, partition, stores, deadline)
            yield from loading.run(checkpoint)
        ending = True
        answer = yield from ask_again(core, "restore_end", [restore_id], deadline)
        return core.see(answer.body)
    except BaseException as error:
        abort = ask_again(core, "restore_abort", [restore_id], deadline)
        answer = yield from quietly(abort)
        if answer is not None and answer.body is not None:
            return core.see(answer.body)  # it had ended well, and only its answer was lost
        if answer is None and ending and isinstance(error, DataplaneError):
            raise OutcomeUnknown(
                f"the plane did not say whether the checkpoint was loaded ({error}): it has its "
                "partitions, or those that it had",
                request_id=f"{core.client_id}/{restore_id}",
            ) from error
        if isinstance(error, DataplaneError):
            error.message += "; nothing was loaded, the plane is as it was"
        raise


class _Loading:
    """One partition on its way into the plane."""

    def __init__(
        self,
        core: Core,
        restore_id: str,
        partition: PartitionEntry,
        stores: _Stores,
        deadline: float,
    ) -> None:
        self._core = core
        self._restore_id = restore_id
        self._partition = partition
        self._stores = stores
        self._deadline = deadline

    def run(self, checkpoint: Checkpoint) -> Verb[None]:
        partition = self._partition
        groups = [tuple(group.model_dump().values()) for group in partition.groups]
        schema = {name: tuple(of.schema_of) for name, of in partition.fields.items()}
        for at in range(0, max(len(groups), 1), SENT_GROUPS):
            part = groups[at : at + SENT_GROUPS]
            yield from self._ask("restore_partition", schema, partition.open_schema, part)
        yield from self._send_rows(checkpoint.file(partition.tags))
        first = 0
        for entry in partition.values:
            first += yield from self._send_values(checkpoint.file(entry), first)
        yield from self._ask(
            "restore_state",
            partition.sealed,
            partition.quota,
            partition.retention,
            partition.tasks,
        )

    def _ask(self, verb: str, *more: Any) -> Verb[Any]:
        time_left(self._deadline, "load the checkpoint")
        body = [self._restore_id, self._partition.partition_id, *more]
        return (yield from ask_again(self._core, verb, body, self._deadline))

    def _send_rows(self, file: OpenedFile) -> Verb[None]:
        first = 0
        pieces = file.tags()
        while (rows := (yield from _next(pieces))) is not None:
            for at in range(0, len(rows.keys), SENT_ROWS):
                body = yield Run(partial(_part_of, file, rows, at, at + SENT_ROWS), FILE_WORK)
                yield from self._ask("restore_rows", first + at, *body)
            first += len(rows.keys)

    def _send_values(self, file: OpenedFile, first: int) -> Verb[int]:
        """How many rows the file has; `first` is the number of the first of them."""
        rows = 0
        batches = file.batches()
        while (batch := (yield from _next(batches))) is not None:
            cells, count = batch
            blocks = values.blocks(cells, count, BLOCK_BYTES)
            while (block := (yield from _next(blocks))) is not None:
                yield from self._put(block, block.rows + (first + rows))
            rows += count
        return rows

    def _put(self, block: values.Block, positions: Ints) -> Verb[None]:
        """Put a block into the value store that has most room for it."""
        core, deadline = self._core, self._deadline
        number, settled = core.numbers.begin()
        partition_id = self._partition.partition_id
        meta = PutMeta(partition_id, [], RESTORE, number, settled, None, None).pack()
        put = (meta, positions.tobytes(), block.template.blob, len(positions), block.lengths)
        pause_s, wait_s = FIRST_PAUSE_S, 0.0
        try:
            while True:
                left = time_left(deadline, "load the checkpoint")
                store = self._stores.roomiest()
                try:
                    yield from _put_block(store, put, block, wait_s)
                    self._stores.takes(store, block.nbytes)
                    return
                except Broken as error:
                    # It may have happened: the same number makes the repetition harmless.
                    pause_s = yield from before_next_try(error, pause_s, deadline)
                except QuotaExceeded:
                    if wait_s:
                        raise
                    if not self._stores.is_full(store):
                        wait_s = min(left - min(0.5, 0.1 * left), LONGEST_WAIT_S)
        finally:
            core.numbers.end(number)


class _Stores:
    """The value stores of the plane, and the room that each has left, about."""

    def __init__(self, room: dict[StoreView, int]) -> None:
        self._room = room
        self._full: set[StoreView] = set()

    def roomiest(self) -> StoreView:
        return max(self._room, key=lambda store: (store not in self._full, self._room[store]))

    def takes(self, store: StoreView, nbytes: int) -> None:
        self._room[store] -= nbytes

    def is_full(self, store: StoreView) -> bool:
        """It has no room after all; whether another one may have."""
        self._full.add(store)
        return len(self._full) < len(self._room)


def _room(core: Core, deadline: float) -> Verb[_Stores]:
    yield from refresh_stores(core)
    if not core.stores:
        raise Unreachable("the plane has no value store yet; try again in a moment")
    room: dict[StoreView, int] = {}
    for store in core.stores.values():
        status = (yield from ask_again(core, "value_status", [], deadline, store)).body
        room[store] = status["capacity_bytes"] - status["used_bytes"]
    return _Stores(room)


def _put_block(
    store: StoreView, put: Sequence[Any], block: values.Block, wait_s: float
) -> Verb[None]:
    lane = yield Open(store)
    try:
        mappings = store.mappings
        if mappings is None:
            yield Ask(lane, "put_block", [*put, wait_s, None], block.pieces, block.nbytes)
            return
        answer = yield Ask(lane, "reserve", [block.nbytes, wait_s, None])
        number, segment, offset, _ = answer.body
        try:
            memory = mappings.writable(segment)[offset : offset + block.nbytes]
            yield Run(partial(_copy, block, memory), block.nbytes)
            del memory
        except Unreachable:
            yield Tell(lane, "abort", [number])
            store.mappings = None
            raise Broken("the store's segments cannot be mapped from here") from None
        except BaseException:
            yield Tell(lane, "abort", [number])
            raise
        yield Ask(lane, "commit", [number, *put])
    finally:
        yield Done(lane)


def _copy(block: values.Block, target: Bytes) -> None:
    at = 0
    for piece in block.pieces:
        target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)


def _part_of(file: OpenedFile, rows: tables.TagRows, begin: int, end: int) -> list[Any]:
    """Some rows as `restore_rows` takes them."""
    producers = dict.fromkeys(rows.producers[begin:end])
    codes = {producer: code for code, producer in enumerate(producers)}
    with file.reading("tags"):
        packed = pack_tags_many(rows.tags[begin:end])
    return [
        rows.keys[begin:end],
        packed,
        rows.revisions[begin:end].tobytes(),
        rows.cleared_at[begin:end].tobytes(),
        rows.attempts[begin:end].tobytes(),
        list(producers),
        np.array([codes[p] for p in rows.producers[begin:end]], np.int32).tobytes(),
        {task: counts[begin:end].tobytes() for task, counts in rows.tasks.items()},
    ]


def _next(items: Iterator[Result]) -> Verb[Result | None]:
    """The next item of what reads files; None at the end."""
    step: Callable[[], Result | None] = partial(next, items, None)
    return (yield Run(step, FILE_WORK))
