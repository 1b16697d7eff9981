"""One partition: its rows, its key index, its schema, its bytes. Pure.

Checks change nothing; `apply_put` and `apply_clear` cannot fail after their checks passed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import msgpack

from dataplane.codec.tags import MAX_TAG_BYTES
from dataplane.fields import LOST, LOST_ROWS, PLANE_TAGS
from dataplane.tags.accounts import Account, Producer
from dataplane.tags.claims.claims import Claims
from dataplane.tags.groups import Group
from dataplane.tags.layers import (
    Layers,
    cover,
    live_fields,
    moved,
    release,
    release_whole,
    without,
)
from dataplane.tags.lost import LossTags
from dataplane.tags.placement import Placement
from dataplane.tags.puts import Found, PutRows, check_put
from dataplane.tags.rows import CHUNK_ROWS, SHARDS, Chunk, KeyIndex, Row, Slots, Tombstone
from dataplane.tags.views.views import Views
from dataplane.types import FieldSchema, Quota, Retention, Tags, TagValue

_NO_TAGS: Tags = {}

MOST_PRODUCERS = 1024
"""Producers of a partition from which on those that hold nothing are looked for and dropped."""


class Partition:
    def __init__(self, partition_id: str, born: int = 0) -> None:
        self.partition_id = partition_id
        self.born = born
        """Revision that made it: one of this name before was another partition."""
        self.revision = born
        """Last change of this partition."""
        self.sealed = False
        """Whether no new row may come."""
        self.open_schema = False
        """Whether a field may change its dtype and rank."""
        self.quota: Quota | None = None
        self.retention: Retention | None = None
        self.index = KeyIndex()
        self.slots = Slots()
        self.schema: dict[str, FieldSchema] = {}
        self.payload_bytes = 0
        """Bytes of all live cells."""
        self.account = Account()
        """All that counts against its quota."""
        self.prompts = Account()
        """The rows that were made for prompts when their groups began; no quota counts them."""
        self.producers: dict[str, Producer] = {}
        self.prompters: dict[str, Producer] = {}
        """Whose rows for prompts are, by client."""
        self._most_producers = MOST_PRODUCERS
        self.groups: dict[str, Group] = {}
        """By uid: those that are open, and those that have rows."""
        self.touched: dict[Group, None] = {}
        """Groups whose rows or bytes changed since the store looked last."""
        self.views = Views(self)
        self.claims = Claims(self)
        self.agreed: set[bytes] = set()
        """Templates whose columns agree with the schema."""

    def __len__(self) -> int:
        return self.slots.live

    @property
    def tag_bytes(self) -> int:
        """Packed size of the tags of all rows."""
        return self.account.tag_bytes + self.prompts.tag_bytes

    def producer(self, client_id: str) -> Producer:
        """The account of a client; made if it has none."""
        producer = self.producers.get(client_id)
        if producer is None:
            self._drop_idle()
            producer = self.producers[client_id] = Producer(client_id, self.account)
        return producer

    def prompter(self, client_id: str) -> Producer:
        """The account of a client for the rows that its groups have for their prompts."""
        prompter = self.prompters.get(client_id)
        if prompter is None:
            self._drop_idle()
            prompter = self.prompters[client_id] = Producer(client_id, self.prompts)
        return prompter

    def _drop_idle(self) -> None:
        """Forget producers that have nothing here any more, when there are many."""
        if len(self.producers) + len(self.prompters) < self._most_producers:
            return
        needed = {group.producer for group in self.groups.values()}
        self.producers = {
            client_id: producer
            for client_id, producer in self.producers.items()
            if not producer.is_empty or producer in needed
        }
        self.prompters = {c: p for c, p in self.prompters.items() if not p.is_empty}
        left = len(self.producers) + len(self.prompters)
        self._most_producers = max(MOST_PRODUCERS, 2 * left)

    def row(self, key: str) -> Row | None:
        position = self.index.get(key)
        if position is None:
            return None
        slot = self.slots.at(position)
        return slot if type(slot) is Row else None

    # -- put ---------------------------------------------------------------------------------

    def find(self, keys: Sequence[str]) -> list[int | None]:
        """The position of each key's row or tombstone; None where the key is not known."""
        shards = self.index.shards
        return [shards[hash(key) & (SHARDS - 1)].get(key) for key in keys]

    def check_put(self, put: PutRows, floor: int) -> Found:
        """Raise what is wrong with the put; nothing is changed. What it found goes to apply."""
        return check_put(self, put, floor)

    def apply_put(self, put: PutRows, found: Found, revision: int) -> list[Placement]:
        """Make the rows as the checked put says; returns the placements that died of it."""
        placement = put.placement
        count = len(put.keys)
        tags: Iterable[Tags] = repeat(_NO_TAGS, count) if put.tags is None else put.tags
        sizes: Iterable[int] = repeat(1, count) if put.tag_sizes is None else put.tag_sizes
        dead: list[Placement] = []
        group = put.group
        account: Account
        if group is not None:
            account = group
        elif put.is_prompt:
            account = self.prompter(put.client_id)
        else:
            account = self.producer(put.client_id)
        before = found.slots
        if before is None:
            positions = self._append(
                put.keys, tags, sizes, placement, revision, found.cleared, account
            )
        else:
            positions = self._merge(
                put.keys, tags, sizes, placement, found, revision, dead, account
            )
        self.revision = revision
        if placement is not None:
            placement.partition_id = self.partition_id
            placement.positions = positions
            self.payload_bytes += placement.payload_bytes
            rows_of = self._answerable(positions, account, write_back=put.must_exist)
            placement.charge(rows_of)
            for answers in rows_of:
                if type(answers) is Group:
                    self.touched[answers] = None
            self._learn(placement)
        if group is not None:
            self._enlist(group, put.keys, positions)
        if self.views.active:
            at = self.slots.at
            for i, position in enumerate(positions):
                old = None if before is None else before[i]
                new = at(position)
                assert type(new) is Row
                self.views.changed(position, old if type(old) is Row else None, new, revision)
        if group is not None:
            self.views.group_changed(group)
        return dead

    def _answerable(
        self, positions: Sequence[int], account: Account, *, write_back: bool
    ) -> dict[Account, int]:
        """Rows of a block by account: whoever puts it answers for it, but a write-back is charged
        to those whose rows it adds to. What is under a prompt is its writer's in any case."""
        if not write_back or type(account) is Group:
            return {account: len(positions)}
        rows_of: dict[Account, int] = {}
        for position in positions:
            row = self.slots.at(position)
            assert type(row) is Row
            owner = account if row.account.parent is self.prompts else row.account
            rows_of[owner] = rows_of.get(owner, 0) + 1
        return rows_of

    def _enlist(self, group: Group, keys: Sequence[str], positions: Sequence[int]) -> None:
        """Make rows that were put for a group its trajectories; its prompt's row is none."""
        self.touched[group] = None
        group.positions.update(positions)
        if group.uid in keys:
            position = positions[keys.index(group.uid)]
            group.positions.discard(position)
            row = self.slots.at(position)
            assert type(row) is Row
            if row.account is group:  # it was cleared after the group began, and comes anew
                group.add_rows(-1, -row.tag_bytes)
                group.producer.add_rows(1, row.tag_bytes)
                chunk = self.slots.writable(position)
                chunk.rows[position & (CHUNK_ROWS - 1)] = Row(
                    row.key, row.tags, row.tag_bytes, row.layers, row.revision, row.cleared_at,
                    group.producer,
                )  # fmt: skip

    def _append(
        self,
        keys: Sequence[str],
        tags: Iterable[Tags],
        sizes: Iterable[int],
        placement: Placement | None,
        revision: int,
        cleared: Iterable[int],
        account: Account,
    ) -> range:
        """New rows for keys of which none has one."""
        layers: Iterable[Layers] = (
            repeat((), len(keys)) if placement is None else zip(repeat(placement), range(len(keys)))
        )
        rows = list(map(Row, keys, tags, sizes, layers, repeat(revision), cleared, repeat(account)))
        first = self.slots.extend(rows)
        shards = self.index.shards
        for position, key in enumerate(keys, first):
            shards[hash(key) & (SHARDS - 1)][key] = position
        account.add_rows(len(rows), sum([row.tag_bytes for row in rows]))
        return range(first, first + len(rows))

    def _merge(
        self,
        keys: Sequence[str],
        tags: Iterable[Tags],
        sizes: Iterable[int],
        placement: Placement | None,
        found: Found,
        revision: int,
        dead: list[Placement],
        account: Account,
    ) -> Sequence[int]:
        """Rows for keys of which some exist, or did."""
        assert found.slots is not None
        positions: list[int] = []
        fresh: list[Row] = []
        whole: dict[Placement, list[int]] = {}
        names = frozenset[str]() if placement is None else placement.template.name_set
        for i, (key, tag, size, position, slot) in enumerate(
            zip(keys, tags, sizes, found.positions, found.slots, strict=True)
        ):
            if type(slot) is Row:
                assert position is not None
                layers = slot.layers
                if placement is not None:
                    if len(layers) == 2 and layers[0].template.name_set <= names:
                        whole.setdefault(layers[0], []).append(layers[1])
                        layers = (placement, i)
                    else:
                        layers, nbytes = cover(layers, placement, i, dead)
                        self.payload_bytes -= nbytes
                self._replace(slot, position, tag, size, layers, revision, account)
                positions.append(position)
            else:
                layers = () if placement is None else (placement, i)
                cleared_at = slot.revision if type(slot) is Tombstone else 0
                fresh.append(Row(key, tag, size, layers, revision, cleared_at, account))
                positions.append(-len(fresh))  # not known yet
        self.payload_bytes -= release_whole(whole, dead)
        if fresh:
            first = self.slots.extend(fresh)
            positions = [p if p >= 0 else first - p - 1 for p in positions]
            shards = self.index.shards
            for position, row in enumerate(fresh, first):
                shards[hash(row.key) & (SHARDS - 1)][row.key] = position
            account.add_rows(len(fresh), sum([row.tag_bytes for row in fresh]))
        return _compact(positions)

    def _replace(
        self,
        row: Row,
        position: int,
        tags: Tags,
        size: int,
        layers: Layers,
        revision: int,
        writer: Account,
    ) -> None:
        chunk = self.slots.writable(position)
        columns = chunk.columns
        if tags:
            old = row.tags
            merged = {**old, **tags}
            total = row.tag_bytes + size
            if total > MAX_TAG_BYTES:
                total = len(msgpack.packb(merged))
            if columns:
                for name, value in tags.items():
                    # Writers send all tags of a row when one of them changed.
                    if not _same(old.get(name), value):
                        columns.pop(name, None)
            if chunk.names is not None:
                chunk.names.update(tags)
        else:
            merged, total = row.tags, row.tag_bytes
        account = row.account
        if account is not writer and type(writer) is Group and row.key != writer.uid:
            # A put for a group makes the row the group's.
            account.add_rows(-1, -row.tag_bytes)
            if type(account) is Group:
                account.positions.discard(position)
                self.touched[account] = None
                self.views.group_changed(account)
            account = writer
            account.add_rows(1, total)
        elif total != row.tag_bytes:
            account.add_rows(0, total - row.tag_bytes)
            if type(account) is Group:
                self.touched[account] = None
        if columns and layers is not row.layers:
            for name in [name for name in columns if name[:1] == "\0"]:
                del columns[name]
        chunk.rows[position & (CHUNK_ROWS - 1)] = Row(
            row.key, merged, total, layers, revision, row.cleared_at, account
        )

    def declare(self, schema: Mapping[str, FieldSchema], *, opened: bool) -> None:
        """Fix the schema of fields, or let all of them change."""
        self.schema.update(schema)
        self.open_schema = opened
        self.agreed.clear()  # what agreed with the schema before need not any more

    def _learn(self, placement: Placement) -> None:
        template = placement.template
        if template.blob in self.agreed:
            return
        for column in template.columns:
            if column.name not in self.schema:
                self.schema[column.name] = FieldSchema(
                    column.dtype, len(column.dims), column.ragged_dim
                )
        if len(self.agreed) > 4096:
            self.agreed.clear()  # only a cache: sizes of dense fields make ever new ones
        self.agreed.add(template.blob)

    # -- clear -------------------------------------------------------------------------------

    def present(self, keys: Iterable[str]) -> tuple[list[str], list[int]]:
        """Those of the keys that exist, each once, and their positions."""
        found: dict[str, int] = {}
        for key in keys:
            position = self.index.get(key)
            if position is not None and type(self.slots.at(position)) is Row:
                found[key] = position
        return list(found), list(found.values())

    def apply_clear(self, positions: Sequence[int], revision: int) -> list[Placement]:
        """Empty these slots, all of which hold rows; returns the placements that died of it."""
        tombstone = Tombstone(revision)
        slots = self.slots
        rows: list[Row] = []
        for position in positions:
            row = slots.at(position)
            assert type(row) is Row
            rows.append(row)
            slots.bury(position, tombstone)
        self.revision = revision
        self._departed(rows, positions, revision)
        return self.release(rows)

    def _departed(self, rows: Sequence[Row], positions: Sequence[int], revision: int) -> None:
        """Rows are gone: their groups, views and claims lose them."""
        groups: dict[Group, None] = {}
        for row, position in zip(rows, positions, strict=True):
            group = row.account
            if type(group) is Group:
                group.positions.discard(position)
                groups[group] = None
        if self.views.active:
            self.views.cleared(rows, positions, revision)
        if self.claims.active:
            for row, position in zip(rows, positions, strict=True):
                self.claims.cleared(position, row)
        for group in groups:
            self.touched[group] = None
            self.views.group_changed(group)

    def swap_clear(
        self,
        number: int,
        chunk: Chunk,
        rows: Sequence[Row],
        positions: Sequence[int],
        groups: Mapping[Group, Sequence[int]],
        revision: int,
    ) -> None:
        """Put a chunk with rows already buried in the place of the one it was made from."""
        self.slots.chunks[number] = chunk
        self.slots.live -= len(rows)
        self.revision = revision
        if self.views.active or self.claims.active:
            self._departed(rows, positions, revision)
            return
        for group, gone in groups.items():
            group.positions.difference_update(gone)
            self.touched[group] = None
            self.views.group_changed(group)

    def release(self, rows: Iterable[Row]) -> list[Placement]:
        """Let go of the cells of rows that are cleared; returns the placements that died."""
        taken: dict[Placement, list[int]] = {}
        dead: list[Placement] = []
        account: Account | None = None
        count = tag_bytes = 0
        for row in rows:
            if row.account is not account:
                # Rows of one account mostly follow each other.
                if account is not None:
                    account.add_rows(-count, -tag_bytes)
                    if type(account) is Group:
                        self.touched[account] = None
                account = row.account
                count = tag_bytes = 0
            count += 1
            tag_bytes += row.tag_bytes
            layers = row.layers
            if len(layers) == 2:
                # A row's only layer has no dead cell: whatever covered one would be a layer too.
                taken.setdefault(layers[0], []).append(layers[1])
            elif layers:
                self.payload_bytes -= release(layers, dead)
        if account is not None:
            account.add_rows(-count, -tag_bytes)
            if type(account) is Group:
                self.touched[account] = None
        self.payload_bytes -= release_whole(taken, dead)
        return dead

    # -- loss --------------------------------------------------------------------------------

    def apply_lost(
        self,
        positions: Sequence[int],
        gone: Container[Placement],
        loss: LossTags,
        revision: int,
    ) -> list[str]:
        """Let the rows of these slots lose what lies in blocks that are gone; the keys that
        changed, those of prompts whose groups lost trajectories included."""
        keys: dict[str, None] = {}
        groups: dict[Group, None] = {}
        for position in positions:
            row = self.slots.at(position)
            assert type(row) is Row
            layers, fields, nbytes = without(row.layers, gone)
            self.payload_bytes -= nbytes
            self._retag(row, position, *loss.of(row, fields), layers, revision)
            keys[row.key] = None
            if type(row.account) is Group:
                groups[row.account] = None
        for group in groups:
            self.touched[group] = None
            prompt = self.index.get(group.uid)
            row = None if prompt is None else self.slots.at(prompt)
            if prompt is not None and type(row) is Row:
                tags: Tags = {**row.tags, LOST_ROWS: self._lost_of(group)}
                self._retag(row, prompt, tags, len(msgpack.packb(tags)), row.layers, revision)
                keys[row.key] = None
        self.revision = revision
        return list(keys)

    def _lost_of(self, group: Group) -> int:
        """How many trajectories of a group are lost."""
        rows = map(self.slots.at, group.positions)
        return sum(type(row) is Row and LOST in row.tags for row in rows)

    def forget_lost(self, uid: str) -> None:
        """A group begins anew: what its older attempt had lost is none of its business."""
        position = self.index.get(uid)
        row = None if position is None else self.slots.at(position)
        if position is not None and type(row) is Row and LOST_ROWS in row.tags:
            tags = {name: value for name, value in row.tags.items() if name != LOST_ROWS}
            size = len(msgpack.packb(tags))
            self._retag(row, position, tags, size, row.layers, row.revision)

    def _retag(
        self, row: Row, position: int, tags: Tags, size: int, layers: Layers, revision: int
    ) -> None:
        """Give a row other tags of the plane's own, and other layers."""
        row.account.add_rows(0, size - row.tag_bytes)
        chunk = self.slots.writable(position)
        columns = chunk.columns
        if columns:
            for name in [name for name in columns if name[:1] == "\0" or name in PLANE_TAGS]:
                del columns[name]
        if chunk.names is not None:
            chunk.names.update(tags)
        new = Row(row.key, tags, size, layers, revision, row.cleared_at, row.account)
        chunk.rows[position & (CHUNK_ROWS - 1)] = new
        if self.views.active:
            self.views.changed(position, row, new, revision)

    # -- repack ------------------------------------------------------------------------------

    def live_rows_of(self, placement: Placement) -> list[tuple[int, int, frozenset[str]]]:
        """Rows of a placement with live cells: (row in it, position, live field names)."""
        found: list[tuple[int, int, frozenset[str]]] = []
        for row, position in enumerate(placement.positions):
            slot = self.slots.at(position)
            if type(slot) is not Row:
                continue
            live = live_fields(slot.layers, placement, row)
            if live:
                found.append((row, position, live))
        return found

    def dismantle(self) -> Iterator[Sequence[Row]]:
        """All rows of a partition that is gone, piece by piece, of which nothing is left then: to
        let go of a million rows at once would hold the loop for a while."""
        chunks = self.slots.chunks
        for number in range(len(chunks)):
            # A clear that is under way looks for them still.
            chunk, chunks[number] = chunks[number], None
            if chunk is not None and chunk.live:
                yield chunk.live_rows()
        for shard in self.index.shards:
            shard.clear()
            yield ()

    def apply_repack(
        self, old: Placement, new: Placement, moves: Sequence[tuple[int, int]]
    ) -> list[Placement]:
        """Point cells from an old block to their copies; returns the placements that died of it.

        `moves[i]` is (row in old, position) of new's row i. Compare and set per cell: one that
        was cleared or overwritten meanwhile stays so. Changes no revision.
        """
        new.live = 0
        rows_of: dict[Account, int] = {}
        names = set(new.template.names)
        for at, (row, position) in enumerate(moves):
            slot = self.slots.at(position)
            if type(slot) is not Row:
                continue
            live = live_fields(slot.layers, old, row)
            if not live or not live <= names:
                continue
            layers = moved(slot.layers, old, row, new, at)
            chunk = self.slots.writable(position)
            chunk.rows[position & (CHUNK_ROWS - 1)] = Row(
                slot.key, slot.tags, slot.tag_bytes, layers, slot.revision, slot.cleared_at,
                slot.account,
            )  # fmt: skip
            old.live -= len(live)
            new.live += len(live)
            owner = slot.account
            if type(owner) is Group:
                self.touched[owner] = None
            elif owner.parent is self.prompts and type(owner) is Producer:
                owner = self.producer(owner.client_id)
            rows_of[owner] = rows_of.get(owner, 0) + 1
        new.partition_id = self.partition_id
        new.positions = [position for _, position in moves]
        if rows_of:
            new.charge(rows_of)
        return [placement for placement in (old, new) if not placement.live]


def _same(old: TagValue, new: TagValue) -> bool:
    """Whether two tags are surely the same scalar; lists and maps are not looked into."""
    kind = type(old)
    return kind is type(new) and kind in _SCALARS and old == new


_SCALARS = frozenset((bool, int, float, str))


def _compact(positions: list[int]) -> Sequence[int]:
    """A range where the positions are one: a put of new rows nearly always is."""
    first = positions[0]
    if positions[-1] - first == len(positions) - 1 and all(
        position == first + i for i, position in enumerate(positions)
    ):
        return range(first, first + len(positions))
    return positions
