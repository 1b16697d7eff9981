"""Finding in a lineage what concerns one group, one key, or everything since a moment. Pure.

A search is a generator that stops after each small step, for whoever gives way to others between
two; its result are plain values. Of a request with many keys only those are told that are asked
for. Nobody is known by the form of a key: rows belong to a uid because their tags say so, because
a group of that uid has them, or because their key is the uid itself, which is a prompt's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, cast

from dataplane.tags import records as r
from dataplane.tags.lineage.lineage import GOT, Lineage
from dataplane.tags.lineage.packed import (
    STEP_ROWS,
    Steps,
    body_of,
    drops_of,
    entries_of,
    shapes_of,
    unpacked,
)
from dataplane.tags.lineage.question import Place, Question, Wanted
from dataplane.tags.lineage.ring import Entry
from dataplane.tags.lineage.told import told_of
from dataplane.tags.placement import Placement
from dataplane.tags.rows import Row
from dataplane.tags.store import TagStore
from dataplane.wire.messages import PutMeta

MAX_FOUND_BYTES: Final = 16 << 20
"""Of one answer, about; what is left comes with the next."""
MAX_FILLERS: Final = 64
"""Padding rows that are told with a group that they were read or cleared with."""


def search(lineage: Lineage, store: TagStore, question: Question) -> Steps:
    """What concerns the question: `entries` in order, the rows that are there now (`present`), and
    how complete that is: `gone` entries have fallen out, `next` is where to go on, if there is
    more."""
    wanted = Wanted(uid=question.uid)
    everything = question.uid is None and question.key is None
    if not everything:
        wanted.places = set()
        if question.uid is not None:
            yield from _group(lineage, store, question, wanted)
            fillers: set[Place] = yield from _fillers(lineage, question, wanted)
            wanted.places |= fillers
        else:
            key = cast("str", question.key)
            wanted.places |= {(name, key) for name in _partitions(lineage, store, question)}
            _attempts_of(store, wanted)
    found: list[dict[str, Any]] = []
    rows = nbytes = 0
    more: int | None = None
    for number, entry in entries_of(lineage, question.since):
        yield
        if rows >= question.limit or nbytes >= MAX_FOUND_BYTES:
            more = number
            break
        told: dict[str, Any] | None = yield from told_of(entry, question, wanted)
        if told is None:
            continue
        told["number"] = number
        found.append(told)
        rows += max(1, len(told.get("rows", ())), len(told.get("keys", ())))
        nbytes += 200 + told.pop("nbytes", 0)
    present: list[Any] = []
    for partition_id, key in sorted(wanted.places or ()):
        partition = store.partitions.get(partition_id)
        row = None if partition is None else partition.row(key)
        if row is not None:
            present.append([partition_id, key, row.revision, row.tags, cells_of(row)])
        yield
    return {
        "entries": found,
        "present": present,
        "first": lineage.ring.first,
        "gone": lineage.ring.first,
        "partial": lineage.partial,
        "next": lineage.ring.next if more is None else more,
        "more": more is not None,
        "detail": lineage.detail,
        "revision": list(store.revision()),
    }


# -- which rows ------------------------------------------------------------------------------


def _partitions(lineage: Lineage, store: TagStore, question: Question) -> set[str]:
    """Partitions that may have the key."""
    if question.partition_id is not None:
        return {question.partition_id} if question.speaks_of(question.partition_id) else set()
    return {
        name
        for name in {*store.partitions, *store.dropped, *_dropped(lineage)}
        if question.speaks_of(name)
    }


def _dropped(lineage: Lineage) -> set[str]:
    """Partitions that were dropped lately, and have no row any more."""
    names: set[str] = set()
    for _, entry in entries_of(lineage, 0):
        if entry[0] == r.PARTITION:
            what, *body = body_of(entry)
            names.update(drops_of(what, body))
    return names


def _group(lineage: Lineage, store: TagStore, question: Question, wanted: Wanted) -> Steps:
    """The rows of a uid: now in a group of it, or put with it in their tags."""
    assert question.uid is not None
    assert wanted.places is not None
    uid, needle = question.uid, question.uid.encode()
    for name, partition in store.partitions.items():
        if not question.speaks_of(name):
            continue
        if partition.row(uid) is not None:
            wanted.places.add((name, uid))
        group = partition.groups.get(uid)
        if group is not None:
            wanted.attempts[group.attempt] = (name, uid)
            for position in list(group.positions):
                row = partition.slots.at(position)
                if type(row) is Row:
                    wanted.places.add((name, row.key))
    for _, entry in entries_of(lineage, 0):
        yield
        if entry[0] == r.PUT and needle in entry[5]:
            _, packed, tags, *_ = body_of(entry)
            meta = PutMeta.unpack(packed)
            if not question.speaks_of(meta.partition_id):
                continue
            if uid in meta.keys:
                wanted.places.add((meta.partition_id, uid))
            if tags is None or needle not in tags:
                continue
            for i, row_tags in enumerate(unpacked(tags)):
                if row_tags.get("uid") == uid:
                    wanted.places.add((meta.partition_id, meta.keys[i]))
                if i % STEP_ROWS == STEP_ROWS - 1:
                    yield
        elif entry[0] == r.BEGIN and needle in entry[5]:
            _, partition_id, begun, *_ = body_of(entry)
            if begun == uid and question.speaks_of(partition_id):
                wanted.attempts[entry[1]] = (partition_id, uid)
                wanted.places.add((partition_id, uid))
    if lineage.ring.first or lineage.partial or not wanted.places:
        # Rows may be here whose puts are not known any more.
        yield from _scan(store, question, wanted)
    _attempts_of(store, wanted)


def _scan(store: TagStore, question: Question, wanted: Wanted) -> Steps:
    """Rows that are there whose tags say the uid."""
    assert wanted.places is not None
    for name, partition in list(store.partitions.items()):
        if not question.speaks_of(name):
            continue
        for chunk in partition.slots.cut():
            for i, row in enumerate(chunk.rows):
                if type(row) is Row and row.tags.get("uid") == question.uid:
                    wanted.places.add((name, row.key))
                if i % STEP_ROWS == STEP_ROWS - 1:
                    yield


def _attempts_of(store: TagStore, wanted: Wanted) -> None:
    """Attempts of prompts among the rows that are there."""
    for partition_id, key in wanted.places or ():
        partition = store.partitions.get(partition_id)
        group = None if partition is None else partition.groups.get(key)
        if group is not None:
            wanted.attempts[group.attempt] = (partition_id, key)


def _fillers(lineage: Lineage, question: Question, wanted: Wanted) -> Steps:
    """Padding rows that were read, claimed or cleared in one request with any of the rows."""
    padding: dict[str, set[str]] = {}
    for _, entry in entries_of(lineage, 0):
        yield
        if entry[0] == r.PUT and b"is_padding" in entry[5]:
            _, packed, tags, *_ = body_of(entry)
            if tags is None:
                continue
            meta = PutMeta.unpack(packed)
            if not question.speaks_of(meta.partition_id):
                continue
            for i, row_tags in enumerate(unpacked(tags)):
                if row_tags.get("is_padding") is True:
                    padding.setdefault(meta.partition_id, set()).add(meta.keys[i])
                if i % STEP_ROWS == STEP_ROWS - 1:
                    yield
    found: set[Place] = set()
    if not padding:
        return found
    for _, entry in entries_of(lineage, 0):
        yield
        partition_id, keys = _keys_of(entry)
        mine = padding.get(partition_id)
        if mine and keys and not mine.isdisjoint(keys) and wanted.of(partition_id, keys):
            found.update((partition_id, key) for key in sorted(mine.intersection(keys)))
            if len(found) >= MAX_FILLERS:
                return set(sorted(found)[:MAX_FILLERS])
    return found


def _keys_of(entry: Entry) -> tuple[str, Collection[str]]:
    """The keys that a request named, of what partition; none where it named them otherwise."""
    kind, carried = entry[0], entry[5]
    if kind == GOT:
        return carried[0], carried[1]
    if kind == r.CLEAR:
        _, partition_id, keys, *_ = body_of(entry)
        return partition_id, keys or ()
    if kind == r.COMMIT:
        partition_id, _, _, keys, *_ = body_of(entry)
        return partition_id, keys
    return "", ()


def cells_of(row: Row) -> list[list[Any]]:
    """Name, dtype and shape of each field that a row has."""
    cells: dict[str, list[Any]] = {}
    for k in range(0, len(row.layers), 2):
        placement: Placement = row.layers[k]
        template = placement.template
        (shapes,) = shapes_of(template, placement.rows, placement.lengths, [row.layers[k + 1]])
        for column, shape in zip(template.columns, shapes, strict=True):
            cells.setdefault(column.name, [column.name, column.dtype, shape])
    return list(cells.values())
