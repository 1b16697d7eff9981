"""From keys to bytes: every cell that a get asks for is found where the newest write put it."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest

from dataplane.client.reading import ReadPlan, plan_read
from dataplane.codec.template import Template, align
from dataplane.errors import FieldNotFound, KeyNotFound
from dataplane.tags.accounts import Account
from dataplane.tags.history import History
from dataplane.tags.placement import Placement
from dataplane.tags.resolve import _BlockTable, resolve
from dataplane.tags.rows import Row
from dataplane.tags.store import TagStore
from tests.dataplane.audit import COLUMNS, Blocks, cell_size, live_cells, put, rows_of
from tests.dataplane.interleaving import Interleaving

P = "train"


def planned(
    store: TagStore,
    keys: list[str],
    fields: list[str] | None = None,
    *,
    partition_id: str = P,
    drop_missing: bool = False,
    common: bool = False,
) -> ReadPlan:
    """What a client makes of the store's answer."""
    partition = store.partition(partition_id)
    answer = resolve(partition, keys, fields, drop_missing=drop_missing, common=common)
    revision = (store.epoch, partition.revision)
    return plan_read(keys, msgpack.unpackb(msgpack.packb([revision, *answer])))


def cell_offset(placement: Placement, name: str, row: int) -> int:
    """Where a cell starts in its block, counted up from the block's front."""
    at = placement.template.front_bytes(placement.rows)
    for column in placement.template.columns:
        for r in range(placement.rows):
            if (column.name, r) == (name, row):
                return at
            at += cell_size(placement, column.name, r)
        at = align(at)
    raise AssertionError(name)


def cell_shape(placement: Placement, name: str, row: int) -> list[int]:
    template = placement.template
    free = template.first_free[template.index[name]]
    sizes = memoryview(placement.lengths).cast("i")
    shape: list[int] = []
    for size in template.columns[template.index[name]].dims:
        shape.append(sizes[free * placement.rows + row] if size < 0 else size)
        free += size < 0
    return shape


def check(plan: ReadPlan, rows: dict[str, Row], fields: list[str]) -> None:
    """The plan names, for every key and field, the cell that the rows say is live."""
    assert [f.name for f in plan.fields] == fields
    for field in plan.fields:
        assert len(field.block) == len(plan.keys)
        for i, key in enumerate(plan.keys):
            placement, at = live_cells(rows[key])[field.name]
            block = int(field.block[i])
            assert plan.stores[plan.block_store[block]] == placement.store
            assert plan.block_ids[block] == placement.block
            assert plan.block_segment[block] == placement.segment
            assert plan.block_offset[block] == placement.offset
            assert field.offset[i] == cell_offset(placement, field.name, at)
            assert field.nbytes[i] == cell_size(placement, field.name, at)
            assert field.shape[i].tolist() == cell_shape(placement, field.name, at)
    blocks = list(zip(plan.block_store.tolist(), plan.block_ids.tolist(), strict=True))
    assert len(set(blocks)) == len(blocks)  # each block is named once


@pytest.mark.parametrize("seed", range(8))
def test_every_cell_is_found_where_the_newest_write_put_it(seed: int) -> None:
    run = Interleaving(seed, keys=40, history=History())
    r = random.Random(seed)
    found = 0
    for _ in range(80):
        run.step()
        rows = rows_of(run.store, "p")
        fields = r.sample(sorted(COLUMNS), r.randint(1, 3))
        having = [key for key, row in rows.items() if live_cells(row).keys() >= set(fields)]
        if not having:
            continue
        keys = r.choices(having, k=r.randint(1, 30))  # any order, repeated
        check(planned(run.store, keys, fields, partition_id="p"), rows, fields)
        found += 1
    assert found > 10


@pytest.mark.parametrize("seed", range(8))
def test_what_is_missing_is_named_whole_or_left_out_in_order(seed: int) -> None:
    run = Interleaving(seed, keys=25, history=History())
    r = random.Random(seed)
    met = set[str]()
    for _ in range(60):
        run.step()
        rows = rows_of(run.store, "q")
        keys = r.choices(run.keys, k=r.randint(1, 8))
        fields = r.sample(sorted(COLUMNS), r.randint(1, 2))
        absent = list(dict.fromkeys(key for key in keys if key not in rows))
        lacking = {
            key: [name for name in fields if name not in live_cells(rows[key])]
            for key in keys
            if key in rows
        }
        bad = list(dict.fromkeys(key for key in lacking if lacking[key]))
        if absent:
            met.add("keys")
            with pytest.raises(KeyNotFound) as missing:
                planned(run.store, keys, fields, partition_id="q")
            assert (missing.value.partition_id, missing.value.keys) == ("q", absent)
        elif bad:
            met.add("fields")
            with pytest.raises(FieldNotFound) as error:
                planned(run.store, keys, fields, partition_id="q")
            assert error.value.keys == bad
            assert error.value.fields == [f for f in fields if any(f in lacking[k] for k in bad)]
        kept = [key for key in keys if key in rows and not lacking[key]]
        plan = planned(run.store, keys, fields, partition_id="q", drop_missing=True)
        assert plan.keys == kept
        met.add("some" if kept else "none")
        check(plan, rows, fields)
    assert met == {"keys", "fields", "some", "none"}


def test_without_a_selection_all_fields_of_the_rows_come_sorted() -> None:
    store, blocks = TagStore(3), Blocks()
    put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 2], "f": [0, 1]}))
    put(store, P, ["a", "b"], blocks.block(2, {"m": [1, 1]}))
    put(store, P, ["c"], blocks.block(1, {"s": []}))
    plan = planned(store, ["b", "a"])
    check(plan, rows_of(store, P), ["f", "m", "x"])
    assert plan.revision == (3, 3)
    with pytest.raises(FieldNotFound) as error:
        planned(store, ["b", "c"])
    assert (error.value.keys, error.value.fields) == (["b", "c"], ["f", "m", "s", "x"])


def test_a_key_of_tags_only_lacks_every_field_that_is_asked_for() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["tags"], tags=[{"v": 1}])
    with pytest.raises(FieldNotFound) as error:
        planned(store, ["tags"], ["x"])
    assert (error.value.keys, error.value.fields) == (["tags"], ["x"])
    plan = planned(store, ["tags", "tags"])
    assert (plan.keys, plan.fields, len(plan.block_ids)) == (["tags", "tags"], [], 0)
    put(store, P, ["both"], blocks.block(1, {"x": [4]}))
    assert planned(store, ["tags", "both"], ["x"], drop_missing=True).keys == ["both"]


def test_fields_in_common_are_those_that_all_existing_keys_have() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a"], blocks.block(1, {"m": [4], "s": []}))
    put(store, P, ["b"], blocks.block(1, {"m": [2]}))
    put(store, P, ["none"], tags=[{"v": 1}])

    def names(keys: list[str], fields: list[str] | None = None) -> tuple[list[str], list[str]]:
        plan = planned(store, keys, fields, common=True)
        return plan.keys, [field.name for field in plan.fields]

    assert names(["b", "gone", "a"]) == (["b", "a"], ["m"])
    assert names(["a"], ["s", "never", "m"]) == (["a"], ["s", "m"])
    assert names(["a", "b"], ["s"]) == (["a", "b"], [])
    assert names(["a", "none"]) == (["a", "none"], [])
    assert names(["gone"], ["m"]) == ([], ["m"])


def test_no_keys_give_no_rows_with_the_dtypes_of_the_schema() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a"], blocks.block(1, {"m": [4], "s": []}))
    plan = planned(store, [], ["m", "s", "never"])
    assert [(f.name, f.schema.dtype, f.shape.shape) for f in plan.fields] == [
        ("m", "float32", (0, 2)), ("s", "float64", (0, 0)), ("never", "object", (0, 1)),
    ]  # fmt: skip
    assert planned(store, []).fields == []
    dropped = planned(store, ["gone"], ["m"], drop_missing=True)
    assert (dropped.keys, len(dropped.fields[0].block)) == ([], 0)


def test_the_schema_travels_with_the_dimension_that_the_first_write_fixed() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a"], blocks.of([COLUMNS["w"]], 1, bytes(8)))
    put(store, P, ["b"], blocks.of([COLUMNS["w"]._replace(ragged_dim=0)], 1, bytes(8)))
    plan = planned(store, ["b"])
    assert plan.fields[0].schema == ("int8", 2, 1)


def test_rows_of_several_stores_are_told_apart() -> None:
    store, near, far = TagStore(1), Blocks("near"), Blocks("far")
    put(store, P, ["a", "b"], near.block(2, {"x": [1, 2]}))
    put(store, P, ["c"], far.block(1, {"x": [3]}))
    put(store, P, ["a", "c"], far.block(2, {"m": [3, 4]}))
    put(store, P, ["b"], near.block(1, {"m": [5]}))
    plan = planned(store, ["c", "b", "a"], ["m", "x"])
    check(plan, rows_of(store, P), ["m", "x"])
    assert sorted(plan.stores) == ["far", "near"]


def test_a_batch_that_was_put_at_once_is_one_block_and_one_group() -> None:
    store, blocks = TagStore(1), Blocks()
    keys = [f"k{i}" for i in range(500)]
    put(store, P, keys, blocks.block(500, {"x": [1] * 500, "m": [2] * 500, "s": []}))
    answer = resolve(store.partition(P), keys, None, drop_missing=False)
    _, _, _, stores, templates, columns, groups = answer
    assert (stores, len(templates), len(columns[2])) == (["v0"], 1, 8)
    assert [group[0] for group in groups] == [[0, 1, 2]]


def test_more_templates_than_sixteen_bits_count_are_told_apart() -> None:
    image = COLUMNS["m"]
    rows: list[Row] = []
    account = Account()
    for number in range((1 << 16) + 10):
        template = Template((image._replace(dims=(number, -1)),))
        block = Placement("v0", number, 1, 0, 128, template, 1, b"\1\0\0\0")
        rows.append(Row("k", {}, 1, (block, 0), 1, 0, account))
    table = _BlockTable()
    table.assign(rows, 0)
    _, templates, columns = table.wire()
    assert len(templates) == len(rows)
    which = np.frombuffer(columns[1], np.uint32)
    sizes = [Template.parse(templates[i]).columns[0].dims[0] for i in which[::997]]
    assert sizes == list(range(0, len(rows), 997))
    assert Template.parse(templates[which[-1]]).columns[0].dims[0] == len(rows) - 1


def test_an_answer_keeps_no_python_object_per_cell() -> None:
    store, blocks = TagStore(1), Blocks()
    for i in range(300):
        put(store, P, [f"k{i}"], blocks.block(1, {"x": [i], "m": [i]}))
    answer: list[Any] = resolve(
        store.partition(P), [f"k{i}" for i in range(300)], None, drop_missing=False
    )
    assert len(msgpack.packb(answer)) < 300 * 64
    assert all(type(part) is bytes for part in answer[5])
