"""The store and a real client against a plain dict, over thousands of steps that nobody thought of.

Two state machines: `StoreSteps` drives the bare tag store with blocks that no value store made;
`ClientSteps` drives a client of an embedded plane and compares every value bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

import dataplane
from dataplane import (
    AlreadyWritten,
    Client,
    FieldNotFound,
    KeyNotFound,
    KVBatchMeta,
    PartitionNotFound,
    Revision,
    Rows,
    SchemaMismatch,
    StaleWrite,
)
from dataplane.codec import objects
from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.listing import piece_of_rows
from dataplane.tags.query import compile_where
from dataplane.tags.store import TagStore
from tests.dataplane.audit import (
    FREE,
    Blocks,
    audit,
    cell_bytes,
    dead_blocks,
    live_cells,
    put,
    rows_of,
)
from tests.dataplane.changes import begin_group, drop_partition, end_group
from tests.dataplane.interleaving import clear_where
from tests.dataplane.test_listing import expected, received, shown, walk

STEPS = 10_000
"""Steps that each machine takes at least."""

EXAMPLE_STEPS = 100
EXAMPLES = 130
"""Some examples end early."""


def run(machine: type[RuleBasedStateMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=EXAMPLE_STEPS,
            deadline=None,
            derandomize="CI" in os.environ,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


KEYS = [f"k{i}" for i in range(7)]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
seeds = st.integers(0, 65_535)
values = st.integers(0, 3)
some_tags = st.dictionaries(st.sampled_from(["v", "w"]), values, max_size=2)

Tags = dict[str, Any]


class Model:
    """One partition as a plain dict: key -> (tags, fields), in the order of the first puts."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Tags, dict[str, Any]]] = {}
        self.since: dict[Revision, set[str]] = {}
        """Keys changed since the revisions of earlier listings."""

    def touch(self, keys: Sequence[str]) -> None:
        for touched in self.since.values():
            touched.update(keys)

    def put(
        self, keys: Sequence[str], fields: dict[str, list[Any]], tags: list[Tags] | None
    ) -> None:
        for i, key in enumerate(keys):
            old_tags, old_fields = self.rows.get(key, ({}, {}))
            new = {name: column[i] for name, column in fields.items()}
            self.rows[key] = ({**old_tags, **(tags[i] if tags else {})}, {**old_fields, **new})
        self.touch(keys)

    def clear(self, keys: Sequence[str]) -> int:
        gone = [key for key in dict.fromkeys(keys) if key in self.rows]
        for key in gone:
            del self.rows[key]
        self.touch(gone)
        return len(gone)

    def matching(self, least: int) -> list[str]:
        return [key for key, (tags, _) in self.rows.items() if tags.get("v", -1) >= least]

    def present(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key in self.rows]

    def absent(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.rows]


# -- the bare store

COLUMN_NAMES = ["f", "m", "o", "s", "w", "x"]
UIDS = ["g0", "g1"]
store_keys = st.lists(st.sampled_from([*KEYS, *UIDS]), min_size=1, max_size=4, unique=True)


class StoreSteps(RuleBasedStateMachine):
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.store = TagStore(1, History(max_changes=40, max_age_s=50.0))
        self.blocks = Blocks()
        self.model = Model()
        self.cleared: dict[str, int] = {}
        self.dead: list[int] = []
        self.now = 0.0
        self.cuts: list[tuple[list[Any], list[Any]]] = []
        self.attempts: dict[int, str] = {}
        """Every attempt that ever was, and the group's uid."""
        self.open: set[int] = set()
        self.member: dict[str, int] = {}
        """The attempt whose group a row belongs to, by key."""
        self._begin_partition()

    def _begin_partition(self) -> None:
        put(self.store, "p", ["first"], tags=[{}])
        self.store.apply_clear("p", ["first"], self.now)

    def _gone(self, keys: Sequence[str]) -> None:
        """These rows were cleared by the last change."""
        self.cleared.update(dict.fromkeys(keys, self.store.n))
        for key in keys:
            self.member.pop(key, None)

    def _block(
        self, names: list[str], keys: list[str], seed: int
    ) -> tuple[Any, dict[str, list[Any]]]:
        if not names:
            return None, {}
        random = np.random.default_rng(seed)
        sizes = {n: random.integers(0, 4, (len(keys), FREE[n])).tolist() for n in names}
        given = {
            n: [] if not FREE[n] else [s[0] if FREE[n] == 1 else s for s in of]
            for n, of in sizes.items()
        }
        return self.blocks.block(len(keys), given), sizes

    @rule(
        keys=store_keys,
        names=st.lists(st.sampled_from(COLUMN_NAMES), max_size=3, unique=True),
        tags=st.none() | some_tags,
        seed=seeds,
        how=st.sampled_from(["plain", "plain", "must_exist", "if_absent"]),
        age=st.none() | st.integers(0, 12),
        attempt=st.none() | seeds,
        client=st.sampled_from("ab"),
    )
    def put_rows(
        self,
        keys: list[str],
        names: list[str],
        tags: Tags | None,
        seed: int,
        how: str,
        age: int | None,
        attempt: int | None = None,
        client: str = "a",
    ) -> None:
        store, model = self.store, self.model
        block, sizes = self._block(names, keys, seed)
        all_tags = None if tags is None and names else [tags or {} for _ in keys]
        options: dict[str, Any] = {} if how == "plain" else {how: True}
        options["client_id"] = client
        number = None
        if attempt is not None and self.attempts:
            number = list(self.attempts)[attempt % len(self.attempts)]
            if number not in self.open:  # refused before anything else is looked at
                with pytest.raises(StaleWrite, match=str(number)) as late:
                    store.attempt(number, "p", keys)
                assert (late.value.attempt, late.value.keys) == (number, keys)
                if block is not None:
                    self.dead.append(block.block)
                return
            options["group"] = store.attempt(number, "p", keys)
        stamp = None
        if age is not None:
            stamp = options["stamp"] = max(0, store.n - age)
        before = store.counts()
        stale = [] if stamp is None else [k for k in keys if self.cleared.get(k, 0) > stamp]
        refused: type[Exception] | None = None
        named: list[str] = keys
        floor = max(store.history.floor, store.partition("p").born)
        if stamp is not None and (stamp < floor or stale):
            refused = StaleWrite
            named = keys if stamp < floor else stale
        elif how == "must_exist" and model.absent(keys):
            refused, named = KeyNotFound, model.absent(keys)
        elif how == "if_absent" and model.present(keys):
            refused, named = AlreadyWritten, model.present(keys)
        if refused is None:
            n = put(store, "p", keys, block, all_tags, now=self.now, **options)
            assert n == before["revision"][1] + 1
            model.put(keys, sizes, all_tags)
            if number is not None:
                self.member.update({k: number for k in keys if k != self.attempts[number]})
            return
        with pytest.raises(refused) as error:
            put(store, "p", keys, block, all_tags, now=self.now, **options)
        assert error.value.keys == named
        assert store.counts() == before
        if block is not None:
            self.dead.append(block.block)  # its value store drops it

    @rule(keys=store_keys, retire=st.booleans())
    def clear_keys(self, keys: list[str], retire: bool) -> None:
        gone = self.model.present(keys)
        self._retire(keys, gone, retire)
        cleared = self.store.apply_clear("p", keys, self.now, retire=retire)
        assert cleared == self.model.clear(keys)
        self._gone(gone)

    @rule(least=values, retire=st.booleans())
    def clear_matching(self, least: int, retire: bool) -> None:
        gone = self.model.matching(least)
        self._retire(gone, gone, retire)
        where = {"v": {">=": least}}
        cleared = clear_where(self.store, "p", where, now=self.now, retire=retire)
        assert cleared == len(gone)
        self.model.clear(gone)
        self._gone(gone)

    def _retire(self, keys: Sequence[str], gone: Sequence[str], retire: bool) -> None:
        if retire:
            self.open -= {self.member[key] for key in gone if key in self.member}
            self.open -= {number for number in self.open if self.attempts[number] in keys}

    @rule(
        uid=st.sampled_from(UIDS),
        n=st.integers(1, 3),
        declared=st.sampled_from([0, 1, 5000, 100_000]),
        client=st.sampled_from("ab"),
    )
    def begin(self, uid: str, n: int, declared: int, client: str) -> None:
        store = self.store
        older = {number for number in self.open if self.attempts[number] == uid}
        gone = [k for k, number in self.member.items() if self.attempts[number] == uid]
        before = store.n
        group = begin_group(store, "p", uid, n, declared, client, now=self.now)
        assert (group.attempt, store.n) == (before + 1, before + 1)
        assert group.attempt not in self.attempts
        self.model.clear(gone)
        self._gone(gone)
        self.open -= older
        self.open.add(group.attempt)
        self.attempts[group.attempt] = uid
        tags: Tags = {"status": "running", "uid": uid, "n": n, "attempt": group.attempt}
        self.model.put([uid], {}, [{"is_prompt": True, **tags}])

    @rule(pick=seeds, status=st.sampled_from(["finished", "failure"]))
    def end(self, pick: int, status: str) -> None:
        if not self.open:
            return
        number = sorted(self.open)[pick % len(self.open)]
        end_group(self.store, number, status, now=self.now)
        self.open.remove(number)
        uid = self.attempts[number]
        if uid in self.model.rows:
            self.model.put([uid], {}, [{"status": status}])

    @rule()
    def drop(self) -> None:
        drop_partition(self.store, "p", now=self.now)
        self._gone(list(self.model.rows))
        self.model.clear(list(self.model.rows))
        self.open.clear()
        self._begin_partition()

    @rule(pick=st.integers(0, 50), late=some_keys, overwrite=st.booleans())
    def repack(self, pick: int, late: list[str], overwrite: bool) -> None:
        placements = list(self.store.placements.values())
        if not placements:
            return
        old = placements[pick % len(placements)]
        live = self.store.partition("p").live_rows_of(old)
        keep = sorted({name for _, _, names in live for name in names})
        slots = self.store.partition("p").slots
        rows = [self.model.rows[slots.at(p).key][1] for _, p, _ in live]
        sizes = {n: [row[n] if n in row else [0] * FREE[n] for row in rows] for n in keep}
        given = {
            n: [] if not FREE[n] else [s[0] if FREE[n] == 1 else s for s in of]
            for n, of in sizes.items()
        }
        # A row of which this field is dead in the old block brings that dead cell along, with the
        # size of the old one; nothing counts it.
        new = self.blocks.block(len(live), given)
        if overwrite:
            self.put_rows(late, ["x"], None, pick, "plain", None)
        if (old.store, old.block) not in self.store.placements:
            self.dead.append(new.block)
            return
        before = self.store.n, self.store.partition("p").payload_bytes
        self.store.apply_repack(old, new, [(row, position) for row, position, _ in live])
        assert (self.store.n, self.store.partition("p").payload_bytes) == before

    @rule(seconds=st.sampled_from([1.0, 20.0, 60.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.store.upkeep(self.now)

    @rule()
    def cut(self) -> None:
        partition = self.store.partition("p")
        cut = partition.slots.cut()
        rows = [row for chunk in cut for row in chunk.live_rows()]
        assert [row.key for row in rows] == list(self.model.rows)
        self.cuts.append((cut, [(row, row.tags.copy()) for row in rows]))
        assert shown(received(walk(partition))) == expected(rows, partition)

    @rule(least=values)
    def list_matching(self, least: int) -> None:
        partition = self.store.partition("p")
        predicate = compile_where({"v": {">=": least}})
        rows = [row for row in partition.slots if predicate(row.tags)]
        assert [row.key for row in rows] == self.model.matching(least)
        if rows:
            piece = piece_of_rows(rows, None, partition.schema)
            assert shown(received([piece])) == expected(rows, partition)

    @invariant()
    def sums_and_rows_are_right(self) -> None:
        type(self).steps += 1
        self.dead += dead_blocks(self.store)
        audit(self.store, [self.blocks], self.dead)
        rows = rows_of(self.store, "p")
        assert {key: row.tags for key, row in rows.items()} == {
            key: tags for key, (tags, _) in self.model.rows.items()
        }
        assert {key: set(live_cells(row)) for key, row in rows.items()} == {
            key: set(fields) for key, (_, fields) in self.model.rows.items()
        }
        assert {
            key: row.account.attempt for key, row in rows.items() if type(row.account) is Group
        } == self.member
        assert set(self.store.attempts) == self.open
        assert self.store.partition("p").payload_bytes == sum(
            cell_bytes(name, sizes)
            for _, fields in self.model.rows.values()
            for name, sizes in fields.items()
        )

    def teardown(self) -> None:
        for cut, seen in self.cuts:
            rows = [row for chunk in cut for row in chunk.live_rows()]
            assert [(row, row.tags) for row in rows] == seen
        self.store.apply_clear("p", [*KEYS, *UIDS], self.now, retire=True)
        self.dead += dead_blocks(self.store)
        audit(self.store, [self.blocks], self.dead)
        partition = self.store.partition("p")
        assert (len(partition), partition.payload_bytes, partition.tag_bytes) == (0, 0, 0)
        assert partition.account.is_empty
        assert partition.prompts.is_empty
        assert not partition.groups
        assert not self.store.attempts


def test_the_store_is_a_dict_whatever_happens_to_it() -> None:
    StoreSteps.steps = 0
    run(StoreSteps, EXAMPLES)
    print(f"{StoreSteps.steps} steps of the bare store")
    assert StoreSteps.steps >= STEPS


# -- a real client

DTYPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "tokens": (torch.int64, (-1,)),
    "heads": (torch.bfloat16, (2, -1)),
    "reward": (torch.float32, ()),
    "mask": (torch.bool, (-1,)),
    "routed_experts": (torch.uint16, (-1, 3)),  # known to be ragged in the first dimension
    "scales": (torch.float8_e5m2, (-1,)),
}
RAGGED = {name: dims.index(-1) for name, (_, dims) in DTYPES.items() if dims}
OBJECTS: list[Any] = [None, "", "text", b"\0b", 7, 0.5, True, [1, [None, "x"]], {"a": {"b": []}}]
FIELDS = [*DTYPES, "extra"]

some_fields = st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True)


def make_value(name: str, seed: int) -> Any:
    """A value of the field: random bits, so that NaNs of every kind occur; length 0 to 5."""
    random = np.random.default_rng([seed, FIELDS.index(name)])
    if name == "extra":
        return OBJECTS[seed % len(OBJECTS)]
    dtype, dims = DTYPES[name]
    shape = tuple(int(random.integers(0, 6)) if d < 0 else d for d in dims)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    data = torch.from_numpy(random.integers(0, 256, size, np.uint8))
    if dtype is torch.bool:
        return (data & 1).view(torch.bool).view(shape)
    return data.view(dtype).view(shape)


def nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return len(objects.pack(value))


def same(one: Any, two: Any) -> bool:
    """Equal in type, shape, dtype and every bit."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return (one.dtype, one.shape) == (two.dtype, two.shape) and bits(one) == bits(two)
    return type(one) is type(two) and one == two


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_field(name: str, layout: str, rows: Rows, expected: list[Any]) -> None:
    """One container holds exactly these rows, as its layout says."""
    container = rows.fields[name]
    if name == "extra":
        assert type(container) is list
        assert len(container) == len(expected)
        assert all(map(same, container, expected))
        return
    dtype, dims = DTYPES[name]
    if layout == "list":
        assert type(container) is list
        assert len(container) == len(expected)
        assert all(map(same, container, expected))
    elif not dims:
        assert same(container, torch.stack(expected) if expected else torch.empty(0, dtype=dtype))
    if not dims:
        return
    ragged = RAGGED[name]
    lengths = [value.shape[ragged] for value in expected]
    assert rows.lengths[name].tolist() == lengths
    assert rows.lengths[name].dtype == torch.int32
    if layout == "list":
        return
    if not expected:
        # How many heads there would be is not known where no row is.
        values = container.values() if layout == "nested" else container
        assert (values.dtype, values.numel()) == (dtype, 0)
        assert values.ndim == len(dims) + (layout == "padded")
    elif layout == "nested":
        assert container.is_nested
        assert container.layout == torch.jagged
        assert container.offsets().tolist() == [0, *itertools.accumulate(lengths)]
        assert container.dtype == dtype
        assert same(container.values(), joined(name, expected))
    elif layout == "packed":
        starts = rows.cu_seqlens[name]
        assert starts.dtype == torch.int32
        assert starts.tolist() == [0, *itertools.accumulate(lengths)]
        assert same(container, joined(name, expected))
    elif layout == "padded":
        widest = max(lengths, default=0)
        shape = [widest if d < 0 else d for d in dims]
        assert (container.dtype, list(container.shape)) == (dtype, [len(expected), *shape])
        for row, value, length in zip(container, expected, lengths, strict=True):
            assert same(row.narrow(ragged, 0, length).contiguous(), value)
            rest = row.narrow(ragged, length, widest - length).contiguous()
            assert not any(bits(rest))  # these fields are padded with zeros


def joined(name: str, expected: list[Any]) -> torch.Tensor:
    """The rows joined along the ragged dimension, as bytes: torch cannot join every dtype."""
    dtype, _ = DTYPES[name]
    if dtype.itemsize == 1:
        carrier = torch.uint8
    else:
        carrier = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.cat([v.view(carrier) for v in expected], dim=RAGGED[name]).view(dtype)


class ClientSteps(RuleBasedStateMachine):
    steps: ClassVar[int] = 0
    client: ClassVar[Client]
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.partition = f"model-{next(type(self).numbers)}"
        self.model = Model()
        self.last = Revision(0, 0)
        self.exists = False
        self.open: dict[str, int] = {}
        """The open attempt of each group that has one, by uid."""
        self.closed: list[int] = []
        self.member: dict[str, str] = {}
        """Whose trajectory a row is: the group's uid, by key."""
        note(self.partition)

    # -- puts

    def _values(self, keys: list[str], names: list[str], seed: int) -> dict[str, list[Any]]:
        return {name: [make_value(name, seed + 7 * i) for i in range(len(keys))] for name in names}

    def _done(self, meta: KVBatchMeta, keys: list[str], fields: dict[str, list[Any]]) -> None:
        """A put went through: it is the next revision, and says what it wrote."""
        assert meta.revision is not None
        assert meta.revision > self.last
        self.last = meta.revision
        self.exists = True
        assert meta.partition_id == self.partition
        assert meta.keys == keys
        assert meta.fields == sorted(fields)

    @rule(key=st.sampled_from(KEYS), names=some_fields, tags=st.none() | some_tags, seed=seeds)
    def put_one(self, key: str, names: list[str], tags: Tags | None, seed: int) -> None:
        fields = self._values([key], names, seed)
        row = {name: column[0] for name, column in fields.items()}
        meta = self.client.kv_put(key, self.partition, row, tags)
        self._done(meta, [key], fields)
        assert meta.tags == [tags or {}]
        self.model.put([key], fields, None if tags is None else [tags])

    @rule(
        keys=some_keys,
        names=some_fields,
        tags=st.none() | some_tags,
        seed=seeds,
        form=st.sampled_from(["columns", "rows"]),
    )
    def put_batch(
        self, keys: list[str], names: list[str], tags: Tags | None, seed: int, form: str
    ) -> None:
        fields = self._values(keys, names, seed)
        all_tags = None if tags is None else [{**tags, "i": i} for i in range(len(keys))]
        given: Any = fields
        if form == "rows":
            given = [{name: column[i] for name, column in fields.items()} for i in range(len(keys))]
        meta = self.client.kv_batch_put(keys, self.partition, given, all_tags)
        self._done(meta, keys, fields)
        self.model.put(keys, fields, all_tags)

    @rule(keys=some_keys, tags=some_tags)
    def put_tags(self, keys: list[str], tags: Tags) -> None:
        meta = self.client.kv_batch_put(keys, self.partition, None, [tags for _ in keys])
        self._done(meta, keys, {})
        self.model.put(keys, {}, [tags for _ in keys])

    @rule(keys=some_keys, names=some_fields, seed=seeds, tags=some_tags)
    def put_and_see_the_whole_tags(
        self, keys: list[str], names: list[str], seed: int, tags: Tags
    ) -> None:
        fields = self._values(keys, names, seed)
        meta = self.client.kv_batch_put(
            keys, self.partition, fields, [tags for _ in keys], return_tags=True
        )
        self.model.put(keys, fields, [tags for _ in keys])
        rows = [self.model.rows[key] for key in keys]
        assert meta.tags == [row[0] for row in rows]
        assert meta.fields == sorted(set.intersection(*(set(row[1]) for row in rows)))
        assert meta.revision is not None
        assert meta.revision > self.last
        self.last, self.exists = meta.revision, True

    @rule(
        keys=some_keys,
        names=some_fields,
        seed=seeds,
        how=st.sampled_from(["must_exist", "if_absent"]),
    )
    def put_if(self, keys: list[str], names: list[str], seed: int, how: str) -> None:
        fields = self._values(keys, names, seed)
        wrong = self.model.absent(keys) if how == "must_exist" else self.model.present(keys)
        options: dict[str, Any] = {how: True}
        if wrong:
            error = KeyNotFound if how == "must_exist" else AlreadyWritten
            with pytest.raises(error) as caught:
                self.client.kv_batch_put(keys, self.partition, fields, **options)
            assert caught.value.keys == wrong
        else:
            meta = self.client.kv_batch_put(keys, self.partition, fields, **options)
            self._done(meta, keys, fields)
            self.model.put(keys, fields, None)

    @rule(keys=some_keys, seed=seeds)
    def put_another_dtype(self, keys: list[str], seed: int) -> None:
        if not any("tokens" in fields for _, fields in self.model.rows.values()):
            return
        fields = {"reward": [torch.tensor(1.0)] * len(keys), "tokens": [torch.ones(2)] * len(keys)}
        with pytest.raises(SchemaMismatch) as error:
            self.client.kv_batch_put(keys, self.partition, fields, [{"v": 99}] * len(keys))
        assert error.value.fields == ["tokens"]

    # -- gets

    @rule(
        keys=st.lists(st.sampled_from(KEYS), max_size=6),
        names=some_fields,
        layout=st.sampled_from(["nested", "padded", "list", "packed"]),
        drop=st.booleans(),
    )
    def get(self, keys: list[str], names: list[str], layout: Any, drop: bool) -> None:
        self._get(keys, names, layout, drop)

    @rule(
        data=st.data(),
        name=st.sampled_from(FIELDS),
        layout=st.sampled_from(["nested", "padded", "list", "packed"]),
    )
    def get_what_is_there(self, data: st.DataObject, name: str, layout: Any) -> None:
        having = [key for key, (_, fields) in self.model.rows.items() if name in fields]
        if having:
            keys = data.draw(st.lists(st.sampled_from(having), min_size=1, max_size=6))
            common = set.intersection(*(set(self.model.rows[key][1]) for key in keys))
            self._get(keys, sorted(common, key=lambda field: field[::-1]), layout, False)

    def _get(self, keys: list[str], names: list[str], layout: Any, drop: bool) -> None:
        rows = self.model.rows
        on_missing: Any = "drop" if drop else "raise"
        if not self.exists:
            if not keys:
                assert self.client.kv_batch_get(keys, self.partition, names).keys == []
                return
            with pytest.raises(PartitionNotFound):
                self.client.kv_batch_get(keys, self.partition, names, layout=layout)
            return
        absent = list(dict.fromkeys(self.model.absent(keys)))
        lacking = [key for key in keys if key in rows and not set(names) <= set(rows[key][1])]
        if not drop and (absent or lacking):
            with pytest.raises(KeyNotFound if absent else FieldNotFound) as error:
                self.client.kv_batch_get(
                    keys, self.partition, names, layout=layout, on_missing=on_missing
                )
            assert error.value.keys == (absent or list(dict.fromkeys(lacking)))
            if not absent:
                assert error.value.fields == [
                    name for name in names if any(name not in rows[key][1] for key in lacking)
                ]
            return
        got = self.client.kv_batch_get(
            keys, self.partition, names, layout=layout, on_missing=on_missing
        )
        kept = [key for key in keys if key in rows and key not in lacking]
        assert got.keys == kept
        assert list(got.fields) == names
        assert got.revision == self.last
        for name in names:
            known = any(name in fields for _, fields in rows.values())
            if kept or known:
                check_field(name, layout, got, [rows[key][1][name] for key in kept])
        for name in names:  # what was got is the caller's: the store never sees this
            container = got.fields[name]
            if isinstance(container, torch.Tensor) and container.numel():
                values = container.values() if container.is_nested else container
                values.view(torch.uint8).fill_(1)

    @rule(keys=some_keys, names=some_fields)
    def look(self, keys: list[str], names: list[str]) -> None:
        rows = self.model.rows
        if not all(key in rows and set(names) <= set(rows[key][1]) for key in keys):
            return
        with self.client.kv_view(keys, self.partition, names, layout="list") as got:
            assert got.keys == keys
            for name in names:
                check_field(name, "list", got, [rows[key][1][name] for key in keys])

    @rule(key=st.sampled_from(KEYS), seed=seeds)
    def look_at_what_is_cleared_and_overwritten_meanwhile(self, key: str, seed: int) -> None:
        fields = self.model.rows.get(key, ({}, {}))[1]
        if "tokens" not in fields:
            return
        with self.client.kv_view([key], self.partition, ["tokens"], layout="list") as got:
            assert self.client.kv_clear([key], self.partition) == self.model.clear([key]) == 1
            self._left([key])  # what is put now is nobody's trajectory
            self.put_one(key, ["tokens", "heads"], None, seed)
            check_field("tokens", "list", got, [fields["tokens"]])

    # -- groups

    @rule(uid=st.sampled_from(UIDS), declared=st.sampled_from([None, 0, 100_000]))
    def begin(self, uid: str, declared: int | None) -> None:
        attempt = self.client.begin_group(uid, self.partition, n=2, declared_bytes=declared)
        assert attempt > self.last.n
        self.exists = True
        gone = [key for key, of in self.member.items() if of == uid]
        self.model.clear(gone)
        self._left(gone)
        self._close(uid)
        self.open[uid] = attempt
        tags: Tags = {"is_prompt": True, "status": "running", "uid": uid, "n": 2}
        self.model.put([uid], {}, [{**tags, "attempt": attempt}])
        self._note_revision()
        assert self.last.n == attempt  # all of it was one change

    @rule(keys=some_keys, names=some_fields, seed=seeds, pick=seeds)
    def put_for_a_group(self, keys: list[str], names: list[str], seed: int, pick: int) -> None:
        attempts = [*self.open.values(), *self.closed]
        if not attempts:
            return
        attempt = attempts[pick % len(attempts)]
        fields = self._values(keys, names, seed)
        if attempt in self.closed:
            with pytest.raises(StaleWrite) as late:
                self.client.kv_batch_put(keys, self.partition, fields, attempt=attempt)
            assert late.value.attempt == attempt
            return
        meta = self.client.kv_batch_put(keys, self.partition, fields, attempt=attempt)
        self._done(meta, keys, fields)
        self.model.put(keys, fields, None)
        uid = next(uid for uid, of in self.open.items() if of == attempt)
        self.member.update(dict.fromkeys(keys, uid))

    @rule(uid=st.sampled_from(UIDS), status=st.sampled_from(["finished", "failure"]))
    def end(self, uid: str, status: str) -> None:
        attempt = self.open.get(uid)
        if attempt is None:
            return
        revision = self.client.end_group(attempt, status)
        assert revision > self.last
        self.last = revision
        if uid in self.model.rows:
            self.model.put([uid], {}, [{"status": status}])
        self._close(uid)
        with pytest.raises(StaleWrite):
            self.client.end_group(attempt, status)

    def _close(self, uid: str) -> None:
        if uid in self.open:
            self.closed.append(self.open.pop(uid))

    def _left(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.member.pop(key, None)

    # -- listings and clears

    def _check_listing(self, listing: Any, keys: list[str]) -> None:
        assert listing.keys == keys
        rows = [self.model.rows[key] for key in keys]
        assert listing.tags == [tags for tags, _ in rows]
        assert listing.fields == [tuple(sorted(fields)) for _, fields in rows]
        for name, ragged in RAGGED.items():
            assert listing.lengths(name).tolist() == [
                fields[name].shape[ragged] if name in fields else -1 for _, fields in rows
            ]

    @rule(least=st.none() | values, limit=st.none() | st.integers(0, 4))
    def list_rows(self, least: int | None, limit: int | None) -> None:
        where = None if least is None else {"v": {">=": least}}
        if not self.exists:
            with pytest.raises(PartitionNotFound):
                self.client.kv_list(self.partition, where=where, limit=limit)
            return
        listing = self.client.kv_list(self.partition, where=where, limit=limit)
        keys = list(self.model.rows) if least is None else self.model.matching(least)
        self._check_listing(listing, keys[:limit])
        assert listing.full
        assert listing.cleared == []
        assert listing.revision == self.last
        if where is None and limit is None:
            self.model.since[listing.revision] = set()

    @rule(pick=st.integers(0, 20), least=st.none() | values)
    def list_changes(self, pick: int, least: int | None) -> None:
        if not self.model.since:
            return
        revision = list(self.model.since)[pick % len(self.model.since)]
        touched = self.model.since[revision]
        where = None if least is None else {"v": {">=": least}}
        listing = self.client.kv_list(self.partition, where=where, since=revision)
        assert not listing.full
        changed = touched & set(self.model.rows if least is None else self.model.matching(least))
        assert set(listing.keys) == changed
        self._check_listing(listing, listing.keys)
        assert set(listing.cleared) == touched - set(self.model.rows)
        assert len(listing.cleared) == len(set(listing.cleared))
        assert listing.revision == self.last

    @rule(
        keys=st.lists(st.sampled_from([*KEYS, *UIDS]), max_size=3, unique=True),
        retire=st.booleans(),
    )
    def clear_keys(self, keys: list[str], retire: bool) -> None:
        if keys and not self.exists:
            with pytest.raises(PartitionNotFound):
                self.client.kv_clear(keys, self.partition)
            return
        self._retire(keys, retire)
        cleared = self.client.kv_clear(keys, self.partition, retire=retire)
        assert cleared == self.model.clear(keys)
        self._left(keys)
        if not self.exists:
            return
        self._note_revision()

    @rule(least=values, retire=st.booleans())
    def clear_matching(self, least: int, retire: bool) -> None:
        if not self.exists:
            return
        gone = self.model.matching(least)
        self._retire(gone, retire)
        where = {"v": {">=": least}}
        cleared = self.client.kv_clear(None, self.partition, where=where, retire=retire)
        assert cleared == len(gone)
        self.model.clear(gone)
        self._left(gone)
        self._note_revision()

    def _retire(self, keys: Sequence[str], retire: bool) -> None:
        """What a clear of these does to attempts."""
        if retire:
            for uid in {*keys, *(self.member.get(key) for key in keys)} & set(self.open):
                self._close(uid)

    @rule()
    def drop_the_partition(self) -> None:
        if not self.exists:
            return
        assert self.client.kv_drop_partition(self.partition) == [self.partition]
        self.exists = False
        self.model = Model()
        for uid in list(self.open):
            self._close(uid)
        self.member.clear()

    def _note_revision(self) -> None:
        revision = self.client.kv_list(self.partition, limit=0).revision
        assert revision >= self.last
        self.last = revision

    @rule()
    def count_bytes(self) -> None:
        status = self.client.status()
        if self.exists:
            counts = status["partitions"][self.partition]
            assert counts["keys"] == len(self.model.rows)
            assert counts["payload_bytes"] == self._bytes()
        assert status["bytes_in_use"] == self._bytes()  # earlier partitions are empty

    def _bytes(self) -> int:
        return sum(nbytes(v) for _, fields in self.model.rows.values() for v in fields.values())

    @invariant()
    def count_steps(self) -> None:
        type(self).steps += 1

    def teardown(self) -> None:
        if not self.exists:
            return
        try:
            self.list_rows(None, None)
            for key, (_, fields) in self.model.rows.items():
                self._get([key], sorted(fields), "list", False)
            self.count_bytes()
        finally:
            removed = self.client.kv_clear(None, self.partition, where={}, retire=True)
        assert removed == len(self.model.rows)
        status = self.client.status()
        assert status["bytes_in_use"] == 0
        assert status["partitions"][self.partition]["tag_bytes"] == 0
        left = {uid: attempt for uid, attempt in self.open.items() if uid not in self.model.rows}
        for attempt in left.values():  # neither a row nor a prompt of them was left to clear
            with contextlib.suppress(StaleWrite):
                self.client.end_group(attempt, "failure")
        assert self.client.status()["held_bytes"] == {}
        self.client.kv_drop_partition(self.partition)


def test_a_client_is_a_dict_whatever_it_is_asked(plane_settings: dict[str, Any]) -> None:
    # Half of the puts go through the socket, the others are copied in place.
    config = {**plane_settings, "host": "embedded", "small_put_bytes": 400}
    client = dataplane.init(config, name=f"model-{os.getpid()}")
    try:
        ClientSteps.client = client
        ClientSteps.steps = 0
        run(ClientSteps, EXAMPLES)
        status = client.status()
    finally:
        client.close(destroy=True)
    print(f"{ClientSteps.steps} steps of a client, {status['revision'][1]} changes")
    assert ClientSteps.steps >= STEPS
    values = status["values"].values()
    assert {(v["used_bytes"], v["segments"], v["pins"]) for v in values} == {(0, 1, 0)}
