"""Saving a checkpoint: one moment of the plane, read piece by piece and written into files.

Owns the order of the steps, and that no more than a piece is in memory. The tag store keeps the
moment (server/checkpointing.py); files are for dataplane/checkpoint.
"""

from __future__ import annotations

import os
import secrets
import time
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dataplane.checkpoint import values
from dataplane.checkpoint.manifest import FieldEntry, GroupEntry, Manifest, PartitionEntry
from dataplane.checkpoint.save import Piece, Saving, SavingPartition
from dataplane.client.core import Core
from dataplane.client.effects import Run, Verb
from dataplane.client.get import fetch
from dataplane.client.memory import Bytes
from dataplane.client.reading import FieldRows, ReadPlan, plan_read
from dataplane.client.retry import FIRST_PAUSE_S, ask_again, before_next_try
from dataplane.client.steps import FILE_WORK, quietly, time_left
from dataplane.errors import ValueLost, quote
from dataplane.types import Revision
from dataplane.wire.channel import Broken

Ints = npt.NDArray[np.int64]

BATCH_BYTES: Final = 32 << 20
"""Values that are read and written in one go, about: one row may be larger."""


def save(
    core: Core, path: str | os.PathLike[str], overwrite: bool, deadline: float
) -> Verb[dict[str, Any]]:
    """Save the plane as of now; a summary."""
    started = time.monotonic()
    saving: Saving = yield Run(partial(Saving, path, overwrite=overwrite), FILE_WORK)
    checkpoint_id = secrets.token_hex(8)
    entries: list[PartitionEntry] = []
    try:
        try:
            left = time_left(deadline, "save the checkpoint")
            answer = yield from ask_again(core, "checkpoint_open", [checkpoint_id, left], deadline)
            revision, floor, abouts = answer.body
            core.see(revision)
            for number, about in enumerate(abouts):
                reading = _Reading(core, checkpoint_id, number, Revision(*revision), deadline)
                entries.append((yield from _save_partition(reading, saving, about)))
        finally:
            yield from quietly(ask_again(core, "checkpoint_close", [checkpoint_id], deadline))
        manifest = Manifest(
            plane_name=core.joined.name,
            plane_id=core.joined.plane_id,
            epoch=revision[0],
            n=revision[1],
            floor=floor,
            saved_at=time.time(),
            partitions=entries,
        )
        time_left(deadline, "save the checkpoint")
        yield Run(partial(saving.commit, manifest), FILE_WORK)
    finally:
        yield Run(saving.abandon, FILE_WORK)
    return {
        "path": str(saving.path),
        "revision": Revision(*revision),
        "rows": manifest.rows,
        "bytes": manifest.nbytes,
        "partitions": {entry.partition_id: entry.rows for entry in entries},
        "seconds": time.monotonic() - started,
    }


class _Reading:
    """One partition of an open checkpoint."""

    def __init__(
        self, core: Core, checkpoint_id: str, number: int, revision: Revision, deadline: float
    ) -> None:
        self.core = core
        self.number = number
        self.revision = revision
        self.deadline = deadline
        self._name = [checkpoint_id, number]

    def ask(self, verb: str, *more: Any) -> Verb[Any]:
        """Ask for a part of it."""
        time_left(self.deadline, "save the checkpoint")
        return (yield from ask_again(self.core, verb, [*self._name, *more], self.deadline))


def _save_partition(
    reading: _Reading, saving: Saving, about: dict[str, Any]
) -> Verb[PartitionEntry]:
    fields = {
        name: FieldEntry(dtype=dtype, rank=rank, ragged_dim=ragged_dim)
        for name, (dtype, rank, ragged_dim) in about["fields"].items()
    }
    groups: list[GroupEntry] = []
    tasks: list[dict[str, Any]] = []
    at: int | None = 0
    while at is not None:
        more, at, found = (yield from reading.ask("checkpoint_state", at)).body
        groups += [
            GroupEntry(**dict(zip(GroupEntry.model_fields, group, strict=True))) for group in more
        ]
        tasks += found or ()
    columns = [
        values.ValueColumn(name, of.dtype, of.rank, of.ragged_dim) for name, of in fields.items()
    ]
    files = SavingPartition(saving, reading.number, columns)
    try:
        place: list[int] | None = [0, 0]
        while place is not None:
            answer = yield from reading.ask("checkpoint_rows", *place)
            rows, place = answer.body
            if rows is None:
                break
            *about_rows, parts = rows
            keys = about_rows[0]
            piece = Piece(keys, bytes(answer.payload), *about_rows[1:])
            yield Run(partial(files.add, piece), FILE_WORK)
            for begin, end, located in parts:
                yield from _save_values(reading, files, keys[begin:end], located)
        written, of_values = yield Run(files.finish, FILE_WORK)
    finally:
        files.close()
    return PartitionEntry(
        partition_id=about["partition_id"],
        rows=files.rows,
        revision=about["revision"],
        sealed=about["sealed"],
        open_schema=about["open_schema"],
        fields=fields,
        quota=about["quota"],
        retention=about["retention"],
        groups=groups,
        tasks=tasks,
        tags=written,
        values=of_values,
    )


def _save_values(
    reading: _Reading, files: SavingPartition, keys: list[str], located: list[Any]
) -> Verb[None]:
    """Read the fields of some rows, in pieces that are not too large, and write them."""
    fields, *places = located
    names = [field[0] for field in fields]
    schemas = [field[1:4] for field in fields]
    plan = plan_read(keys, [reading.revision, None, names, schemas, *places])
    having = [
        np.arange(len(keys)) if field[4] is None else np.frombuffer(field[4], np.int32)
        for field in fields
    ]
    sizes = np.zeros(len(keys), np.int64)
    for rows, of in zip(having, plan.fields, strict=True):
        sizes[rows] += of.nbytes
    for begin, end in spans(sizes, BATCH_BYTES):
        part: list[FieldRows] = []
        numbers: list[Ints] = []
        for rows, of in zip(having, plan.fields, strict=True):
            low, high = np.searchsorted(rows, [begin, end]).tolist()
            numbers.append(rows[low:high].astype(np.int64) - begin)
            part.append(
                of._replace(
                    block=of.block[low:high],
                    offset=of.offset[low:high],
                    nbytes=of.nbytes[low:high],
                    shape=of.shape[low:high],
                )
            )
        data = yield from _read(reading, plan._replace(fields=part))
        cells = [
            values.Cells(values.ValueColumn(name, *schema), rows, of.shape, bytes_)
            for name, schema, rows, of, bytes_ in zip(
                names, schemas, numbers, part, data, strict=True
            )
        ]
        yield Run(partial(files.add_values, cells, end - begin), FILE_WORK)


def _read(reading: _Reading, plan: ReadPlan) -> Verb[list[Bytes]]:
    """The bytes of each field of a plan, whose blocks are kept while the checkpoint is open."""
    core, deadline = reading.core, reading.deadline
    pause_s = FIRST_PAUSE_S
    while True:
        data = [core.recycler.take(int(rows.nbytes.sum())) for rows in plan.fields]
        try:
            gone = yield from fetch(core, plan, data, deadline)
        except Broken as error:
            pause_s = yield from before_next_try(error, pause_s, deadline)
            continue
        if not gone:
            return data
        # Only an end of the checkpoint lets them go: the next request says so.
        yield from reading.ask("checkpoint_state", 0)
        raise ValueLost(
            f"the values of {quote(plan.keys)} are not where the tag store has them",
            partition_id=None,
            keys=plan.keys,
        )


def spans(sizes: Ints, limit: int) -> list[tuple[int, int]]:
    """Where rows of these sizes are cut, so that a part is not much over the limit.

    Example: sizes [3, 3, 9, 1, 1] at limit 5 are (0, 2), (2, 3), (3, 5).
    """
    starts = np.cumsum(sizes) - sizes
    first = np.flatnonzero(np.diff(starts // limit, prepend=-1)).tolist()
    return list(zip(first, [*first[1:], len(sizes)], strict=True))
