"""Listings: kept columns are never stale, answers are whole, and changes are all that changed."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from dataplane import Client, FieldNotFound
from dataplane.client.results import Listing, unpack_listing
from dataplane.server.listings import SMALL_SINCE, pack_pieces
from dataplane.tags.history import History
from dataplane.tags.listing import FIELDS, KEYS, Piece, piece_of_chunk, piece_of_rows
from dataplane.tags.partition import Partition
from dataplane.tags.rows import CHUNK_ROWS, Row
from dataplane.tags.store import TagStore
from tests.dataplane.audit import COLUMNS, Blocks, live_cells, put, rows_of
from tests.dataplane.interleaving import Interleaving

P = "train"


def received(pieces: list[Piece]) -> Listing:
    """The listing as a client gets it."""
    head, buffers, nbytes = pack_pieces(pieces)
    payload = b"".join(bytes(buffer) for buffer in buffers)
    assert len(payload) == nbytes
    body = msgpack.unpackb(msgpack.packb([(1, 9), True, [], *head]))
    return unpack_listing(P, body, memoryview(payload))


def shown(listing: Listing) -> list[Any]:
    """Everything a listing says of each row."""
    lengths = {name: listing.lengths(name).tolist() for name in COLUMNS}
    return [
        (key, tags, fields, {name: column[i] for name, column in lengths.items()})
        for i, (key, tags, fields) in enumerate(
            zip(listing.keys, listing.tags, listing.fields, strict=True)
        )
    ]


def expected(rows: list[Row], partition: Partition, wanted: Any = None) -> list[Any]:
    """The same from the rows themselves, one by one."""
    out: list[Any] = []
    for row in rows:
        cells = live_cells(row)
        lengths: dict[str, int] = dict.fromkeys(COLUMNS, -1)
        for name, (placement, at) in cells.items():
            ragged = partition.schema[name].ragged_dim
            if ragged is None:
                continue
            template = placement.template
            column = template.columns[template.index[name]]
            sizes = memoryview(placement.lengths).cast("i")
            free = template.first_free[template.index[name]]
            for dim, size in enumerate(column.dims):
                if size < 0:
                    size = sizes[free * placement.rows + at]
                    free += 1
                if dim == ragged:
                    lengths[name] = size
        tags = {k: v for k, v in row.tags.items() if wanted is None or k in wanted}
        out.append((row.key, tags, tuple(sorted(cells)), lengths))
    return out


def walk(partition: Partition, wanted: Any = None) -> list[Piece]:
    """The pieces of a full listing; columns are kept with the chunks."""
    return [piece_of_chunk(chunk, wanted, partition.schema) for chunk in partition.slots.cut()]


@pytest.mark.parametrize("seed", range(10))
def test_kept_columns_are_those_of_the_rows_after_any_changes(seed: int) -> None:
    run = Interleaving(seed, keys=80, history=History(max_changes=300, max_age_s=30.0))
    r = random.Random(seed)
    for _ in range(120):
        run.step()
        if r.random() < 0.4:  # otherwise several changes pile up on what was kept
            continue
        wanted = r.choice([None, None, frozenset("a"), frozenset("bc"), frozenset()])
        for name in run.rows:
            partition = run.store.partition(name)
            for chunk in partition.slots.cut():
                rows = chunk.live_rows()
                listing = received([piece_of_chunk(chunk, wanted, partition.schema)])
                names = {name for row in rows for name in row.tags}
                assert listing.tag_names == sorted(names if wanted is None else names & wanted)
                kept = shown(listing)
                fresh = shown(received([piece_of_rows(rows, wanted, partition.schema)]))
                assert kept == fresh == expected(rows, partition, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_a_listing_of_many_chunks_shows_all_rows_of_its_cut_whatever_happens_after(
    seed: int,
) -> None:
    run = Interleaving(seed, keys=2500, history=History(max_changes=2000, max_age_s=30.0))
    partition = run.store.partition("p")
    for _ in range(8):
        for _ in range(4):
            run.put(400)
        run.clear(200)
        cut = partition.slots.cut()
        then = expected([row for chunk in cut for row in chunk.live_rows()], partition)
        pieces = [piece_of_chunk(cut[0], None, partition.schema)]
        run.step()
        run.put(300)
        run.clear_where()
        pieces += [piece_of_chunk(chunk, None, partition.schema) for chunk in cut[1:]]
        assert shown(received(pieces)) == then
        assert shown(received(walk(partition))) == expected(
            list(rows_of(run.store, "p").values()), partition
        )
    assert len(partition.slots.cut()) > 2


def test_only_the_columns_of_what_changed_are_made_again() -> None:
    store, blocks = TagStore(1), Blocks()
    keys = [f"k{i}" for i in range(100)]
    put(store, P, keys, blocks.block(100, {"x": [1] * 100}), [{"a": 1, "b": "t"}] * 100)
    partition = store.partition(P)

    def columns() -> dict[str, Any]:
        (piece,) = walk(partition)
        return piece.columns

    def changed(before: dict[str, Any]) -> set[str]:
        after = columns()
        return {name for name in after if after[name] is not before.get(name)}

    first = columns()
    assert changed(first) == set()
    put(store, P, ["k7"], tags=[{"a": 2}])
    assert changed(first) == {"a"}
    second = columns()
    put(store, P, ["k7"], tags=[{"new": None}])
    assert changed(second) == {"new"}
    third = columns()
    put(store, P, ["k7"], blocks.block(1, {"x": [5]}))
    assert changed(third) == {FIELDS, "\0len:x"}
    fourth = columns()
    store.apply_clear(P, ["k7"], 0.0)
    assert changed(fourth) == set(fourth) - {"new"}
    assert KEYS in fourth


def test_tag_names_stay_known_when_other_names_were_asked_for_first() -> None:
    store = TagStore(1)
    put(store, P, ["k1", "k2"], tags=[{"a": 1}, {"b": 2}])
    partition = store.partition(P)
    assert received(walk(partition, frozenset())).tag_names == []
    assert received(walk(partition, frozenset("b"))).tags == [{}, {"b": 2}]
    assert received(walk(partition)).tags == [{"a": 1}, {"b": 2}]
    put(store, P, ["k1"], tags=[{"c": 3}])
    assert received(walk(partition, frozenset("c"))).tags == [{"c": 3}, {}]


def test_a_cut_does_not_learn_the_tag_names_of_later_puts() -> None:
    store = TagStore(1)
    put(store, P, ["k1", "k2"], tags=[{"a": 1}, {}])
    partition = store.partition(P)
    walk(partition)
    (chunk,) = partition.slots.cut()
    put(store, P, ["k1"], tags=[{"later": 1}])
    listing = received([piece_of_chunk(chunk, None, partition.schema)])
    assert (listing.tag_names, listing.tags) == (["a"], [{"a": 1}, {}])


def test_lengths_are_along_the_dimension_of_the_schema_whatever_a_later_put_says() -> None:
    store, blocks = TagStore(1), Blocks()
    sizes = array("i", [3, 5]).tobytes()  # 3 along the first dimension, 5 along the second
    put(store, P, ["a"], blocks.of([COLUMNS["w"]], 1, sizes))
    put(store, P, ["b"], blocks.of([COLUMNS["w"]._replace(ragged_dim=0)], 1, sizes))
    narrow = COLUMNS["w"]._replace(ragged_dim=0, dims=(-1, 5))
    put(store, P, ["c"], blocks.of([narrow], 1, sizes[:4]))
    partition = store.partition(P)
    assert received(walk(partition)).lengths("w").tolist() == [5, 5, 5]
    rows = list(rows_of(store, P).values())
    assert received([piece_of_rows(rows, None, partition.schema)]).lengths("w").tolist() == [5] * 3


def test_a_length_is_that_of_the_newest_write_and_minus_one_where_there_is_none() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a", "b", "c"], blocks.block(3, {"x": [1, 2, 3], "s": []}))
    put(store, P, ["b"], blocks.block(1, {"x": [9]}))
    put(store, P, ["d"], tags=[{}])
    listing = received(walk(store.partition(P)))
    assert listing.lengths("x").dtype == np.int32
    assert listing.lengths("x").tolist() == [1, 9, 3, -1]
    assert listing.lengths("s").tolist() == [-1] * 4  # rank 0 has no length
    assert listing.lengths("never").tolist() == [-1] * 4
    assert listing.fields == [("s", "x")] * 3 + [()]


COLUMN_CASES: list[tuple[str, list[Any], Any, list[Any]]] = [
    # tags of the rows of two chunks and of a third, later ones; None: the row has no such tag
    ("integers everywhere", [1, 2, 3], np.int64, [1, 2, 3]),
    ("floats everywhere", [1.5, 2.5, 3.5], np.float64, [1.5, 2.5, 3.5]),
    ("bools everywhere", [True, False, True], np.bool_, [True, False, True]),
    ("strings everywhere", ["x", "y", "z"], object, ["x", "y", "z"]),
    ("integers in one chunk, floats in the next", [1, 2.5, 3], object, [1, 2.5, 3]),
    ("no such tag in one chunk", [1, ..., 3], object, [1, None, 3]),
    ("no such tag but in the last", [..., ..., 2.5], np.float64, [np.nan, np.nan, 2.5]),
    ("lists", [[1], [2, 3], []], object, [[1], [2, 3], []]),
    ("nothing and something", [None, 0, False], object, [None, 0, False]),
]


@pytest.mark.parametrize(
    ("values", "dtype", "out"), [c[1:] for c in COLUMN_CASES], ids=[c[0] for c in COLUMN_CASES]
)
def test_a_column_is_one_array_however_its_chunks_keep_it(
    values: list[Any], dtype: Any, out: list[Any]
) -> None:
    store = TagStore(1)
    for number, value in enumerate(values):
        tags = {"other": 1} if value is ... else {"v": value}
        keys = [f"k{number}.{i}" for i in range(CHUNK_ROWS)]
        put(store, P, keys, tags=[tags] * CHUNK_ROWS)
    listing = received(walk(store.partition(P)))
    assert len(listing) == 3 * CHUNK_ROWS
    column = listing.column("v")
    assert column.dtype == dtype
    every = [column[i * CHUNK_ROWS :][:CHUNK_ROWS] for i in range(3)]
    for part, value in zip(every, out, strict=True):
        cells = part.tolist()
        assert all(type(cell) is type(value) for cell in cells)
        assert all(cell == value or cell != cell for cell in cells)
    tags = [tag.get("v", ...) for tag in listing.tags]
    assert tags == [value for value in values for _ in range(CHUNK_ROWS)]


@pytest.mark.parametrize("name", ["missing", "", "\1key", "\0fields", "\0len:x"])
def test_a_column_that_no_row_has_is_named(name: str) -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["k"], blocks.block(1, {"x": [1]}), [{"a": 1}])
    with pytest.raises(FieldNotFound, match=r"it has \['a'\]") as error:
        received(walk(store.partition(P))).column(name)
    assert (error.value.partition_id, error.value.fields) == (P, [name])


def test_a_listing_of_no_rows_is_empty_in_every_part() -> None:
    listing = received([])
    assert (len(listing), listing.keys, listing.tags, listing.fields) == (0, [], [], [])
    assert listing.tag_names == []
    assert listing.lengths("x").tolist() == []
    assert listing.lengths("x").dtype == np.int32
    assert listing.to_meta().keys == []


def test_a_listing_as_a_batch_has_the_fields_that_every_key_has() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 2], "s": []}), [{"n": 1}, {}])
    put(store, P, ["c"], blocks.block(1, {"x": [1], "m": [1]}))
    meta = received(walk(store.partition(P))).to_meta()
    assert (meta.keys, meta.fields, meta.tags) == (["a", "b", "c"], ["x"], [{"n": 1}, {}, {}])


# -- through a client


class Diff:
    """The rows of one partition as a plain dict, and what changed since a listing."""

    def __init__(self, client: Client, partition_id: str, seed: int) -> None:
        self.client = client
        self.partition_id = partition_id
        self.random = random.Random(seed)
        self.rows: dict[str, dict[str, Any]] = {}
        self.put(["first"])
        self.since = client.kv_list(partition_id).revision
        self.touched: set[str] = set()

    def put(self, keys: list[str]) -> None:
        tags = [{"v": self.random.randint(0, 9)} for _ in keys]
        self.client.kv_batch_put(keys, self.partition_id, None, tags)
        for key, tag in zip(keys, tags, strict=True):
            self.rows[key] = {**self.rows.get(key, {}), **tag}
        self.touched = getattr(self, "touched", set()) | set(keys)

    def clear(self, keys: list[str]) -> None:
        gone = {key for key in keys if self.rows.pop(key, None) is not None}
        assert self.client.kv_clear(keys, self.partition_id) == len(gone)
        self.touched |= gone

    def clear_where(self, value: int) -> None:
        gone = [key for key, tags in self.rows.items() if tags["v"] == value]
        assert self.client.kv_clear(None, self.partition_id, where={"v": value}) == len(gone)
        for key in gone:
            del self.rows[key]
        self.touched |= set(gone)

    def check(self, where: dict[str, Any] | None = None, limit: int | None = None) -> None:
        listing = self.client.kv_list(self.partition_id, since=self.since, where=where, limit=limit)
        assert not listing.full
        changed = {key: self.rows[key] for key in self.touched if key in self.rows}
        if where is not None:
            changed = {key: tags for key, tags in changed.items() if tags["v"] >= where["v"][">="]}
        listed = dict(zip(listing.keys, listing.tags, strict=True))
        if limit is None:
            assert listed == changed
        else:
            assert len(listed) == min(limit, len(changed))
            assert listed.items() <= changed.items()
        assert len(listing.keys) == len(listed)
        assert sorted(listing.cleared) == sorted(self.touched - self.rows.keys())

    def move_on(self) -> None:
        self.since = self.client.kv_list(self.partition_id, since=self.since).revision
        self.touched = set()
        self.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_listing_since_a_revision_is_the_difference_of_two_dicts(
    embedded: Client, seed: int
) -> None:
    diff = Diff(embedded, f"since-{seed}", seed)
    r = diff.random
    keys = [f"k{i}" for i in range(60)]
    for _ in range(60):
        for _ in range(r.randint(0, 3)):
            act = r.choice(["put", "put", "clear", "where"])
            if act == "put":
                diff.put(r.sample(keys, r.randint(1, 10)))
            elif act == "clear":
                diff.clear(r.sample(keys, r.randint(1, 10)))
            else:
                diff.clear_where(r.randint(0, 9))
        diff.check()
        diff.check(where={"v": {">=": 5}})
        diff.check(limit=3)
        if r.random() < 0.3:
            diff.move_on()


def test_more_changes_than_are_answered_at_once_give_the_same_difference(embedded: Client) -> None:
    diff = Diff(embedded, "since-large", 7)
    keys = [f"k{i}" for i in range(3 * SMALL_SINCE // 2)]
    diff.put(keys)
    diff.move_on()
    diff.clear(keys[: SMALL_SINCE // 2])
    diff.put(keys[: SMALL_SINCE // 4])  # cleared and put again: not among the cleared
    diff.clear_where(3)
    diff.put(keys[-SMALL_SINCE // 2 :])
    diff.put([f"new{i}" for i in range(10)])
    diff.clear(["new1", "new2"])  # came and went: among the cleared
    assert len(diff.touched) > SMALL_SINCE // 2
    diff.put(keys[-SMALL_SINCE // 2 :])
    diff.put(keys[-SMALL_SINCE // 2 :])
    for where in (None, {"v": {">=": 5}}):
        diff.check(where)
        for limit in (0, 1, 1500):
            diff.check(where, limit)
    diff.move_on()


def test_a_listing_since_a_revision_that_history_does_not_cover_is_full(embedded: Client) -> None:
    name = "since-full"
    embedded.kv_batch_put(["a", "b"], name, None, [{"v": 1}] * 2)
    revision = embedded.kv_list(name).revision
    assert not embedded.kv_list(name, since=revision).full
    before = type(revision)(revision.epoch - 1, revision.n)
    listing = embedded.kv_list(name, since=before)  # of an earlier life of the tag store
    assert (listing.full, listing.keys, listing.cleared) == (True, ["a", "b"], [])


def test_a_listing_of_chosen_columns_carries_no_other(embedded: Client) -> None:
    name = "columns"
    fields = {"x": torch.arange(6).view(2, 3)}
    embedded.kv_batch_put(["a", "b"], name, fields, [{"v": 1, "w": 2}] * 2)
    for columns, names in (([], []), (["w"], ["w"]), (["w", "nope"], ["w"]), (None, ["v", "w"])):
        listing = embedded.kv_list(name, columns=columns)
        assert listing.tag_names == names
        assert listing.keys == ["a", "b"]
        assert listing.fields == [("x",), ("x",)]
        assert listing.lengths("x").tolist() == [3, 3]


@pytest.mark.parametrize("limit", [0, 1, 1023, 1024, 1025, 2999, 3000, 4000])
def test_a_limit_takes_the_first_rows_in_order_of_their_first_put(
    embedded: Client, limit: int
) -> None:
    name = "limits"
    keys = [f"k{i}" for i in range(3000)]
    embedded.kv_batch_put(keys, name, None, [{"v": i % 7} for i in range(3000)])
    listing = embedded.kv_list(name, limit=limit)
    assert listing.keys == keys[:limit]
    assert listing.full
    chosen = embedded.kv_list(name, where={"v": 3}, limit=limit)
    assert chosen.keys == [key for i, key in enumerate(keys) if i % 7 == 3][:limit]
