"""Runs of bytes: merged ones are the same bytes in the same order as row by row."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.get import places_of, vanished
from dataplane.client.reading import FieldRows, merge
from dataplane.tags.placement import Placement
from dataplane.tags.rows import Row
from dataplane.tags.store import TagStore
from dataplane.types import FieldSchema
from tests.dataplane.audit import Blocks, put
from tests.dataplane.test_resolve import planned

SCHEMA = FieldSchema("int64", 1, 0)


def field(rows: list[tuple[int, int, int]]) -> FieldRows:
    """A field whose rows are (block, offset, bytes)."""
    block, offset, nbytes = np.array(rows, np.int64).reshape(-1, 3).T
    shape = (nbytes // 8).reshape(-1, 1).astype(np.int32)
    return FieldRows("x", SCHEMA, block.astype(np.int32), offset, nbytes, shape)


def runs_of(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    runs = merge(field(rows))
    return list(zip(runs.block.tolist(), runs.offset.tolist(), runs.nbytes.tolist(), strict=True))


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        ([], []),
        ([(0, 64, 8)], [(0, 64, 8)]),
        ([(0, 64, 8), (0, 72, 16), (0, 88, 8)], [(0, 64, 32)]),
        ([(0, 64, 8), (0, 72, 16), (0, 96, 8)], [(0, 64, 24), (0, 96, 8)]),
        ([(0, 72, 8), (0, 64, 8)], [(0, 72, 8), (0, 64, 8)]),
        ([(0, 64, 8), (0, 64, 8)], [(0, 64, 8), (0, 64, 8)]),  # the same row twice
        ([(0, 64, 8), (1, 72, 8)], [(0, 64, 8), (1, 72, 8)]),  # next to it, of another block
        ([(0, 64, 0), (0, 64, 0), (0, 64, 8)], [(0, 64, 8)]),
        ([(0, 64, 8), (0, 72, 0), (0, 72, 8)], [(0, 64, 16)]),
        ([(0, 64, 0), (1, 64, 0)], [(0, 64, 0), (1, 64, 0)]),
        ([(0, 0, 8), (0, 8, 8), (1, 16, 8), (1, 24, 8), (0, 16, 8)],
         [(0, 0, 16), (1, 16, 16), (0, 16, 8)]),
    ],
)  # fmt: skip
def test_neighbouring_rows_are_one_run(
    rows: list[tuple[int, int, int]], runs: list[tuple[int, int, int]]
) -> None:
    assert runs_of(rows) == runs


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 3)), max_size=30))
def test_runs_are_the_same_bytes_in_the_same_order_and_as_few_as_can_be(
    rows: list[tuple[int, int, int]],
) -> None:
    def every_byte(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(block, at) for block, start, n in pieces for at in range(start, start + n)]

    runs = runs_of(rows)
    assert every_byte(runs) == every_byte(rows)
    for (block, start, n), after in pairwise(runs):
        assert after[:2] != (block, start + n)


def test_a_batch_read_in_its_own_order_is_one_run_a_field_and_shuffled_one_a_row() -> None:
    store, blocks = TagStore(1), Blocks()
    keys = [f"k{i}" for i in range(200)]
    put(store, "p", keys, blocks.block(200, {"x": list(range(1, 201)), "m": [3] * 200, "s": []}))
    plan = planned(store, keys, partition_id="p")
    assert [len(merge(rows).block) for rows in plan.fields] == [1, 1, 1]
    assert [int(merge(rows).nbytes[0]) for rows in plan.fields] == [200 * 24, 200 * 8, 8 * 20100]
    half = planned(store, keys[50:150], partition_id="p")
    assert [len(merge(rows).block) for rows in half.fields] == [1, 1, 1]
    shuffled = keys[::2] + keys[1::2]
    random.Random(3).shuffle(shuffled)
    plan = planned(store, shuffled, ["x"], partition_id="p")
    runs = merge(plan.fields[0])
    assert len(runs.block) > 150
    assert int(runs.nbytes.sum()) == 8 * 20100


def test_blocks_of_one_template_and_other_row_counts_are_laid_out_each_for_itself() -> None:
    store, blocks = TagStore(1), Blocks()
    r = random.Random(5)
    keys: list[str] = []
    for rows in (1, 3, 1, 2, 3, 5):
        names = [f"k{len(keys) + i}" for i in range(rows)]
        keys += names
        lengths = {"x": [r.randint(0, 5) for _ in names], "f": [r.randint(0, 5) for _ in names]}
        put(store, "p", names, blocks.block(rows, lengths))
    r.shuffle(keys)
    plan = planned(store, keys, ["f", "x"], partition_id="p")
    assert len(plan.block_ids) == 6
    row_of = {key: (p, i) for p in blocks.made for i, key in enumerate(_keys_of(store, p))}
    for rows in plan.fields:
        for i, key in enumerate(keys):
            placement, at = row_of[key]
            layout = placement.template.layout(
                np.frombuffer(placement.lengths, np.int32).reshape(2, 1, placement.rows),
                placement.rows,
            )
            column = placement.template.index[rows.name]
            assert rows.offset[i] == layout.offsets[column, 0, at]
            assert rows.nbytes[i] == layout.nbytes[column, 0, at]


def _keys_of(store: TagStore, placement: Placement) -> list[str]:
    slots = store.partition("p").slots
    rows = [slots.at(position) for position in placement.positions]
    return [row.key for row in rows if isinstance(row, Row)]


def test_blocks_that_are_gone_are_those_of_their_store_though_another_has_the_same_ids() -> None:
    store, near, far = TagStore(1), Blocks("near"), Blocks("far")
    put(store, "p", ["a"], near.block(1, {"x": [1]}))
    put(store, "p", ["b", "c"], far.block(2, {"x": [1, 2]}))
    plan = planned(store, ["b", "a", "c"], partition_id="p")
    for name, keys in (("near", ["a"]), ("far", ["b", "c"])):
        gone = places_of(plan, plan.stores.index(name), [1])
        error = vanished("p", plan, gone)
        assert (error.partition_id, error.keys) == ("p", keys)
        assert places_of(plan, plan.stores.index(name), [2]) == []
