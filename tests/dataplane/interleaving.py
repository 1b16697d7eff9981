"""Random changes of a tag store, with what each row must be kept beside it."""

from __future__ import annotations

import random
from typing import Any

from dataplane.tags.history import History
from dataplane.tags.query import compile_where
from dataplane.tags.store import TagStore
from tests.dataplane.audit import (
    COLUMNS,
    FREE,
    Blocks,
    audit,
    cell_bytes,
    dead_blocks,
    live_cells,
    put,
    rows_of,
)


def clear_where(
    store: TagStore, partition_id: str, where: Any, *, now: float = 0.0, retire: bool = False
) -> int:
    """A clear by predicate, in one go; how many rows it removed."""
    partition = store.partition(partition_id)
    predicate = compile_where(where)
    scans = [
        store.scan_clear(partition, number, predicate)
        for number in range(len(partition.slots.chunks))
    ]
    doomed = [scan for scan in scans if scan is not None]
    if not doomed:
        return 0
    rows = store.apply_scanned_clear(partition, doomed, now, retire=retire)
    for part in rows.parts:
        store.release_rows(partition, part)
    return len(rows)


class Interleaving:
    """Random changes of two partitions, with the cells each row must have beside them."""

    def __init__(self, seed: int, keys: int, history: History) -> None:
        self.random = random.Random(seed)
        self.store = TagStore(1, history)
        self.blocks = Blocks()
        self.dead: list[int] = []
        self.now = 0.0
        self.releasing = False
        """Whether cells of rows that are gone may still be counted, as in the middle of a clear."""
        self.keys = [f"k{i}" for i in range(keys)]
        self.rows: dict[str, dict[str, tuple[dict[str, Any], dict[str, int]]]] = {"p": {}, "q": {}}
        """partition -> key -> (tags, bytes of each field)"""
        for name in self.rows:
            put(self.store, name, ["first"], tags=[{}])
            self.store.apply_clear(name, ["first"], 0.0)

    def put(self, count: int) -> None:
        r = self.random
        name = r.choice(["p", "q"])
        keys = r.sample(self.keys, min(count, len(self.keys)))
        fields = r.sample(sorted(COLUMNS), r.randint(0, 3))
        lengths = {
            field: [[r.randint(0, 4) for _ in range(FREE[field])] for _ in keys] for field in fields
        }
        given = {
            field: [] if not FREE[field] else [s[0] if FREE[field] == 1 else s for s in sizes]
            for field, sizes in lengths.items()
        }
        tags = None
        if not fields or r.random() < 0.7:
            tags = [{t: r.randint(0, 3) for t in r.sample("abc", r.randint(0, 2))} for _ in keys]
        block = self.blocks.block(len(keys), given) if fields else None
        put(self.store, name, keys, block, tags, now=self.now)
        for i, key in enumerate(keys):
            old_tags, old_cells = self.rows[name].get(key, ({}, {}))
            cells = {field: cell_bytes(field, sizes[i]) for field, sizes in lengths.items()}
            self.rows[name][key] = ({**old_tags, **(tags[i] if tags else {})}, old_cells | cells)

    def clear(self, count: int) -> None:
        name = self.random.choice(["p", "q"])
        keys = self.random.sample(self.keys, min(count, len(self.keys)))
        gone = [key for key in keys if key in self.rows[name]]
        assert self.store.apply_clear(name, keys, self.now) == len(gone)
        for key in gone:
            del self.rows[name][key]

    def clear_where(self) -> None:
        name = self.random.choice(["p", "q"])
        tag, value = self.random.choice("abc"), self.random.randint(0, 3)
        gone = [key for key, (tags, _) in self.rows[name].items() if tags.get(tag) == value]
        assert clear_where(self.store, name, {tag: value}, now=self.now) == len(gone)
        for key in gone:
            del self.rows[name][key]

    def repack(self) -> None:
        """Copy what is live of a block into a new one; changes may come in between."""
        if not self.store.placements:
            return
        old = self.random.choice(list(self.store.placements.values()))
        partition = self.store.partition(old.partition_id)
        live = partition.live_rows_of(old)
        count = sum(len(names) for _, _, names in live)
        assert count <= old.live if self.releasing else count == old.live
        if not live:
            return
        keep = sorted({name for _, _, names in live for name in names})
        sizes = memoryview(old.lengths).cast("i")
        columns = [old.template.columns[old.template.index[name]] for name in keep]
        flat: list[int] = []
        for column in columns:
            first = old.template.first_free[old.template.index[column.name]]
            for dim in range(first, first + len(column.free)):
                flat += [sizes[dim * old.rows + row] for row, _, _ in live]
        lengths = memoryview(bytearray(4 * len(flat))).cast("i")
        for i, size in enumerate(flat):
            lengths[i] = size
        new = self.blocks.of(columns, len(live), lengths.tobytes())
        if self.random.random() < 0.5:
            self.put(5)
        if self.random.random() < 0.3:
            self.clear(3)
        if (old.store, old.block) not in self.store.placements:
            # The server drops the copy of a block that died meanwhile.
            self.dead.append(new.block)
            return
        revision = self.store.n
        self.store.apply_repack(old, new, [(row, position) for row, position, _ in live])
        assert self.store.n == revision

    def step(self) -> None:
        self.now += self.random.choice([0.0, 0.1, 5.0])
        act = self.random.choices(
            [lambda: self.put(1), lambda: self.put(40), lambda: self.clear(1),
             lambda: self.clear(30), self.clear_where, self.repack],
            [6, 4, 3, 2, 1, 3],
        )[0]  # fmt: skip
        act()

    def check(self) -> None:
        self.dead += dead_blocks(self.store)
        audit(self.store, [self.blocks], self.dead)
        for name, expected in self.rows.items():
            rows = rows_of(self.store, name)
            assert {key: row.tags for key, row in rows.items()} == {
                key: tags for key, (tags, _) in expected.items()
            }
            assert {key: set(live_cells(row)) for key, row in rows.items()} == {
                key: set(cells) for key, (_, cells) in expected.items()
            }
            assert self.store.partition(name).payload_bytes == sum(
                sum(cells.values()) for _, cells in expected.values()
            )
