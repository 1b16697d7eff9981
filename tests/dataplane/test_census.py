"""What a partition is made of, and what a clear would remove: counted against every row by itself,
with changes in between."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest

from dataplane.tags.census import Census
from dataplane.tags.explain.clients import Clients
from dataplane.tags.history import History
from dataplane.tags.placement import Placement
from dataplane.tags.query import compile_where
from dataplane.tags.store import TagStore
from dataplane.tags.tally import SAMPLE, Tally, cells_of, row_bytes
from tests.dataplane.audit import Blocks, put, rows_of
from tests.dataplane.interleaving import Interleaving

NOBODY = Clients({}, {})
CLIENT = "0123456789abcdef"


def census_of(run: Interleaving, partition_id: str = "p") -> dict[str, Any]:
    partition = run.store.partition(partition_id)
    census = Census(partition, run.store.moments, run.now)
    for _ in census.take(list(run.store.placements.values())):
        pass
    return census.told(NOBODY)


def mixed(seed: int, steps: int = 300) -> Interleaving:
    run = Interleaving(seed, 400, History(max_changes=10**6, max_age_s=1e9))
    for _ in range(steps):
        run.step()
    return run


@pytest.mark.parametrize("seed", range(4))
def test_fields_and_lengths_are_those_of_the_rows(seed: int) -> None:
    run = mixed(seed)
    told = census_of(run)
    rows = run.rows["p"]
    counted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for _, cells in rows.values():
        for name, nbytes in cells.items():
            counted[name][0] += 1
            counted[name][1] += nbytes
    assert told["fields"] == {n: {"rows": r, "bytes": b} for n, (r, b) in counted.items()}
    assert told["keys"] == len(rows)
    assert told["payload_bytes"] == sum(b for _, b in counted.values())
    assert sum(told["statuses"].values()) == len(rows)
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in rows_of(run.store, "p").values():
        for name, placement, at, _ in cells_of(row):
            ragged = run.store.partition("p").schema[name].ragged_dim
            if ragged is not None:
                lengths[name].append(length_of(placement, name, ragged, at))
    assert {name: (of["rows"], of["min"], of["max"]) for name, of in told["lengths"].items()} == {
        name: (len(of), min(of), max(of)) for name, of in lengths.items()
    }
    for name, of in told["lengths"].items():
        shown = {low: rows for low, high, rows in of["histogram"] if low == high}
        assert shown == {k: v for k, v in Counter(lengths[name]).items() if k in shown}


def length_of(placement: Placement, name: str, dim: int, at: int) -> int:
    column = placement.template.columns[placement.template.index[name]]
    first = placement.template.first_free[placement.template.index[name]]
    if column.dims[dim] >= 0:
        return column.dims[dim]
    free = first + column.free.index(dim)
    return memoryview(placement.lengths).cast("i")[free * placement.rows + at]


@pytest.mark.parametrize("seed", range(3))
def test_bytes_of_a_row_are_those_of_its_cells(seed: int) -> None:
    run = mixed(seed)
    for name, expected in run.rows.items():
        for key, row in rows_of(run.store, name).items():
            assert row_bytes(row) == sum(expected[key][1].values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("where", [None, {"a": 1}, {"b": {">=": 2}}])
def test_a_tally_is_what_a_clear_removes(seed: int, where: Any) -> None:
    run = mixed(seed)
    store, partition = run.store, run.store.partition("p")
    until = store.n - 40
    predicate = compile_where(where)
    tally = Tally(partition, predicate, until)
    matching = [
        row for row in rows_of(store, "p").values() if predicate(row.tags) and row.revision <= until
    ]
    nbytes = sum(sum(run.rows["p"][row.key][1].values()) for row in matching)
    steps = tally.take()
    next(steps, None)
    for _ in range(20):  # it is of the moment in which it began
        run.step()
    for _ in steps:
        pass
    told = tally.told()
    assert told["rows"] == len(matching)
    assert told["payload_bytes"] == nbytes
    assert told["tag_bytes"] == sum(row.tag_bytes for row in matching)
    assert set(told["sample"]) <= {row.key for row in matching}
    assert len(told["sample"]) == min(SAMPLE, len(matching))
    assert sum(rows for rows, _ in told["statuses"].values()) == len(matching)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_changed_after_a_revision_stay(seed: int) -> None:
    run = mixed(seed)
    store, partition = run.store, run.store.partition("p")
    until = store.n - 60
    before = rows_of(store, "p")
    old = {key for key, row in before.items() if row.revision <= until}
    assert old
    assert old != set(before)
    everything = compile_where(None)
    scans = [
        store.scan_clear(partition, number, everything, until)
        for number in range(len(partition.slots.chunks))
    ]
    rows = store.apply_scanned_clear(partition, [s for s in scans if s is not None], run.now)
    for part in rows.parts:
        store.release_rows(partition, part)
    assert set(rows_of(store, "p")) == set(before) - old


def test_ages_are_told_apart_by_the_last_change() -> None:
    store = TagStore(1, History(max_changes=10**6, max_age_s=1e9))
    for number, at in enumerate((0.0, 1000.0, 5000.0, 5050.0)):
        put(store, "p", [f"k{number}"], tags=[{"status": "done" if number else 7}], now=at)
    put(store, "p", ["k1"], tags=[{"more": 1}], now=5055.0)  # young again
    partition = store.partition("p")
    census = Census(partition, store.moments, 5060.0)
    for _ in census.take([]):
        pass
    told = census.told(NOBODY)
    assert [(age["from_s"], age["to_s"], age["rows"]) for age in told["ages"]][:4] == [
        (0, 60, 2), (60, 600, 1), (600, 3600, 0), (3600, 21600, 1),
    ]  # fmt: skip
    assert told["statuses"] == {"done": 3, "": 1}


def test_one_large_text_is_as_large_as_it_is() -> None:
    """Values that are no tensors have a size like any other."""
    store, blocks = TagStore(1), Blocks()
    put(store, "p", ["k"], blocks.block(1, {"o": [1_000_005]}))
    partition = store.partition("p")
    census = Census(partition, store.moments, 0.0)
    for _ in census.take(list(store.placements.values())):
        pass
    assert census.told(NOBODY)["fields"] == {"o": {"rows": 1, "bytes": 1_000_005}}


def test_so_many_statuses_are_not_all_told() -> None:
    store = TagStore(1)
    keys = [f"k{i}" for i in range(500)]
    random.Random(1).shuffle(keys)
    put(store, "p", keys, tags=[{"status": key} for key in keys])
    partition = store.partition("p")
    tally = Tally(partition, compile_where(None))
    census = Census(partition, store.moments, 0.0)
    for _ in (*tally.take(), *census.take([])):
        pass
    statuses = tally.told()["statuses"]
    assert len(statuses) == len(census.told(NOBODY)["statuses"]) == 65
    assert statuses["(others)"][0] == 500 - 64
