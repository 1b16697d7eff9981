"""Every cell of any rows is found where it lies, each field in the rows that have it."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest

from dataplane.client.reading import plan_read
from dataplane.codec.shapes import Column
from dataplane.tags.resolve import locate
from dataplane.tags.rows import Row
from dataplane.tags.store import TagStore
from tests.dataplane.audit import Blocks, cell_size, live_cells, put, rows_of

P = "p"


def located(rows: list[Row], schema: Any) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    """Block, offset and bytes of each cell, by key, field and dtype, as a client reads them."""
    fields, *places = msgpack.unpackb(msgpack.packb(locate(rows, schema)))
    names, schemas = [field[0] for field in fields], [field[1:4] for field in fields]
    plan = plan_read([row.key for row in rows], [(1, 1), None, names, schemas, *places])
    found: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    for field, of in zip(fields, plan.fields, strict=True):
        having = range(len(rows)) if field[4] is None else np.frombuffer(field[4], np.int32)
        assert list(having) == sorted(set(having))
        for number, block, offset, nbytes, shape in zip(
            having, of.block, of.offset, of.nbytes, of.shape, strict=True
        ):
            assert len(shape) == field[2]
            cell = int(plan.block_ids[block]), int(offset), int(nbytes)
            assert found.setdefault((rows[number].key, field[0], field[1]), cell) == cell
    return found


def expected(rows: list[Row]) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    cells: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    for row in rows:
        for name, (placement, at) in live_cells(row).items():
            c = placement.template.index[name]
            sizes = np.frombuffer(placement.lengths, np.int32)
            sizes = sizes.reshape(placement.template.num_free, 1, placement.rows)
            offset = int(placement.template.layout(sizes, placement.rows).offsets[c, 0, at])
            dtype = placement.template.columns[c].dtype
            cells[row.key, name, dtype] = placement.block, offset, cell_size(placement, name, at)
    return cells


@pytest.mark.parametrize("seed", range(40))
def test_cells_of_rows_of_any_layers_are_found(seed: int) -> None:
    rng = random.Random(seed)
    store, blocks = TagStore(1), Blocks()
    for _ in range(25):
        keys = [f"k{i}" for i in rng.sample(range(10), rng.randrange(1, 6))]
        names = rng.sample("xosm", rng.randrange(4))
        lengths = {n: [] if n == "s" else [rng.randrange(5) for _ in keys] for n in names}
        block = blocks.block(len(keys), lengths) if names else None
        put(store, P, keys, block, [{} for _ in keys])
    partition = store.partition(P)
    rows = list(rows_of(store, P).values())
    for some in (rows, rng.sample(rows, len(rows) // 2), rows[:1], []):
        assert located(some, partition.schema) == expected(some)


def test_a_field_of_two_dtypes_is_there_once_for_each() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["first"], tags=[{}])
    store.partition(P).open_schema = True
    put(store, P, ["a"], blocks.of([Column("x", "int64", 0, (-1,))], 1, b"\2\0\0\0"))
    put(store, P, ["b"], blocks.of([Column("x", "int8", 1, (-1, 3))], 1, b"\5\0\0\0"))
    rows = list(rows_of(store, P).values())
    found = located(rows, store.partition(P).schema)
    assert {name: cell[2] for name, cell in found.items()} == {
        ("a", "x", "int64"): 16, ("b", "x", "int8"): 15,
    }  # fmt: skip
