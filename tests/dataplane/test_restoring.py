"""What was saved of a tag store becomes one that behaves the same; what is malformed, none."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from dataplane.errors import ClaimLost, InvalidRequest, StaleWrite
from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.placement import Placement
from dataplane.tags.restoring import PROMPT, Restoring, SavedGroup, SavedRows
from dataplane.tags.rows import CHUNK_BITS, Row
from dataplane.tags.saved_tasks import SavedTask
from dataplane.tags.store import TagStore
from tests.dataplane.audit import Blocks, audit, cell_size, live_cells, put, rows_of
from tests.dataplane.claimers import Desk, P

PIECE = 3


def block_of(blocks: Blocks, row: Row) -> Placement | None:
    """A block of this row alone, with cells as large as it has them."""
    columns: list[Any] = []
    lengths = array("i")
    for name, (placement, at) in live_cells(row).items():
        c = placement.template.index[name]
        column = placement.template.columns[c]
        columns.append(column)
        raw = memoryview(placement.lengths).cast("i")
        for k in range(len(column.free)):
            lengths.append(raw[(placement.template.first_free[c] + k) * placement.rows + at])
    return blocks.of(columns, 1, lengths.tobytes()) if columns else None


def saved_rows(partition: Any, rows: Sequence[tuple[int, Row]]) -> SavedRows:
    """Rows as a server sends them, and a client sends them back."""
    accounts = [row.account for _, row in rows]
    attempts = [
        account.attempt
        if type(account) is Group
        else PROMPT * (account.parent is partition.prompts)
        for account in accounts
    ]
    producers = [a.producer.client_id if type(a) is Group else a.client_id for a in accounts]  # type: ignore[attr-defined]
    did: dict[str, list[int]] = {}
    for task in map(SavedTask, partition.claims.tasks.values()):
        packed = [
            task.of_rows(position >> CHUNK_BITS, [position & ((1 << CHUNK_BITS) - 1)])
            for position, _ in rows
        ]
        did[task.name] = array("i", b"".join(packed)).tolist()
    return SavedRows(
        [row.key for _, row in rows],
        [row.tags for _, row in rows],
        [row.tag_bytes for _, row in rows],
        [row.revision for _, row in rows],
        [row.cleared_at for _, row in rows],
        attempts,
        producers,
        did,
    )


def restoring_of(store: TagStore, blocks: Blocks) -> Restoring:
    """Everything of a store on its way into another one, in small pieces."""
    restoring = Restoring(store.epoch, store.n)
    for partition in store.partitions.values():
        name = partition.partition_id
        restoring.begin(name, partition.schema, open_schema=partition.open_schema)
        groups = [
            SavedGroup.of(group, group.status, group.since, group.at, group.open)
            for group in partition.groups.values()
        ]
        restoring.add_groups(name, [SavedGroup.checked(list(group)) for group in groups])
        positions = {row.key: partition.index.get(row.key) for row in partition.slots}
        rows = [(positions[row.key] or 0, row) for row in partition.slots]
        for at in range(0, len(rows), PIECE):
            piece = saved_rows(partition, rows[at : at + PIECE])
            restoring.add_rows(name, at, piece)
            restoring.add_rows(name, at, piece)  # a repetition does nothing
        for number, (_, row) in enumerate(rows):
            block = block_of(blocks, row)
            if block is not None:
                restoring.add_block(name, [number], block)
        tasks = [SavedTask(task).about for task in partition.claims.tasks.values()]
        for _ in range(2):
            restoring.settle(
                name,
                sealed=partition.sealed,
                quota=partition.quota,
                retention=partition.retention,
                tasks=json.loads(json.dumps(tasks)),
            )
    return restoring


def restored(desk: Desk) -> Desk:
    """Another desk, whose store comes from a checkpoint of this one."""
    other = Desk.__new__(Desk)
    other.__dict__.update(desk.__dict__)
    other.store, other.blocks = TagStore(1), Blocks("other")
    other.ledger = type(desk.ledger)()
    other._numbers = {}
    n = restoring_of(desk.store, other.blocks).finish(other.store, History())
    last = max((task.last_id for task in desk.partition.claims.tasks.values()), default=0)
    for _ in range(last):
        other.ledger.claim_id()
    other.ledger.away = set(other.partition.claims.holders.away)
    assert n == desk.store.n + 1
    return other


def shown(store: TagStore) -> dict[str, Any]:
    """Rows as anybody sees them: tags, revision, sizes of their fields."""
    return {
        f"{name}/{key}": (
            row.tags,
            row.revision,
            {f: cell_size(p, f, at) for f, (p, at) in live_cells(row).items()},
        )
        for name in store.partitions
        for key, row in rows_of(store, name).items()
    }


def accounts(store: TagStore) -> dict[str, Any]:
    """What everybody answers for, extents aside: blocks are others."""
    found: dict[str, Any] = {}
    for name, partition in store.partitions.items():
        for who, account in {
            "all": partition.account, "prompts": partition.prompts, **partition.producers,
            **partition.groups,
        }.items():  # fmt: skip
            sums = (account.rows, account.tag_bytes, account.held_rows)
            if any(sums):
                found[f"{name}/{who}"] = sums
    return found


def same(desk: Desk, other: Desk) -> None:
    audit(other.store, [other.blocks])
    other.check()
    assert shown(other.store) == shown(desk.store)
    assert accounts(other.store) == accounts(desk.store)
    assert sorted(other.store.attempts) == sorted(desk.store.attempts)
    for name, partition in desk.store.partitions.items():
        back = other.store.partition(name)
        assert back.payload_bytes == partition.payload_bytes
        assert back.schema == partition.schema
        assert (back.sealed, back.quota) == (partition.sealed, partition.quota)
        assert {
            uid: (g.attempt, g.status, g.n, g.open, g.since) for uid, g in back.groups.items()
        } == {
            uid: (g.attempt, g.status, g.n, g.open, g.since) for uid, g in partition.groups.items()
        }


# -- scenes ----------------------------------------------------------------------------------


def test_rows_keep_order_and_revision_and_history_begins_anew() -> None:
    desk = Desk()
    desk.put("a b c", {"v": 1}, {"x": [1, 2, 3]})
    desk.put("b", {"v": 2}, {"m": [5]})
    desk.clear("a")
    desk.put("a", {"v": 3})
    other = restored(desk)
    same(desk, other)
    floor = other.store.history.floor
    assert floor == other.store.n > desk.store.n
    assert other.store.revision().epoch == 2
    assert other.partition.revision == other.store.n
    with pytest.raises(StaleWrite):
        put(other.store, P, ["a"], tags=[{}], stamp=floor - 1)
    other.put("a", {"v": 4}, stamp=floor)
    assert other.claim(3).keys == ["c", "b", "a"]


def test_a_task_goes_on_where_it_was() -> None:
    desk = Desk()
    desk.put([f"k{i}" for i in range(10)], {"v": 1})
    first = desk.claim(6)
    desk.commit(first)
    given_back = desk.claim(2)
    desk.release(given_back)
    held = desk.claim(1, client="gone", lease_s=5.0)
    other = restored(desk)
    same(desk, other)
    rest = other.claim(3)
    assert rest.keys == ["k7", "k8", "k9"]
    assert rest.deliveries == [2, 1, 1]
    assert rest.claim_id > held.claim_id
    other.commit(rest)
    waiting = other.claim(1)
    assert waiting.keys is None
    other.passes(6.0)
    assert held.keys == waiting.keys == ["k6"]
    assert waiting.deliveries == [3]
    other.check()


def test_a_held_claim_is_committed_or_runs_out() -> None:
    desk = Desk()
    desk.put("a b c d")
    kept, lost = desk.claim(2, client="x", lease_s=60.0), desk.claim(2, client="y", lease_s=5.0)
    desk.commit(kept, ["a"])
    other = restored(desk)
    waiting = other.claim(2, client="z")
    assert waiting.keys is None
    other.passes(6.0)
    assert waiting.keys == ["c", "d"]
    assert waiting.deliveries == [2, 2]
    with pytest.raises(ClaimLost):
        other.commit(lost)
    other.commit(kept)
    assert [position in other.partition.claims.tasks["t"].committed for position in range(4)] == [
        True, True, False, False,
    ]  # fmt: skip


def test_groups_go_on() -> None:
    desk = Desk()
    done = desk.finished("u", {"v": 1}, {"v": 2})
    half = desk.begin("w", 2)
    desk.put("w_0", {"v": 3}, {"x": [4]}, group=half)
    older = desk.begin("z", 1)
    desk.put("z_0", {"v": 4}, group=older)
    desk.end(older, "failure")
    other = restored(desk)
    same(desk, other)
    assert other.claim(1, groups=True).keys == ["u_0", "u_1"]
    waiting = other.claim(1, groups=True, client="d")
    again = other.store.attempt(half.attempt, P, ["w_1"])
    other.put("w_1", {"v": 5}, group=again)
    other.end(again)
    assert waiting.keys == ["w_0", "w_1"]
    for closed in (done, older):
        with pytest.raises(StaleWrite):
            other.store.attempt(closed.attempt, P, ["late"])
    assert other.begin("u").attempt > max(done.attempt, half.attempt, older.attempt)
    audit(other.store, [other.blocks], [])


def test_a_batch_of_ranks_goes_on() -> None:
    desk = Desk()
    desk.put([f"k{i}" for i in range(4)], {"seq_len": 5})
    first = desk.claim(4, client="r0", replica=(0, 2, 0))
    other = restored(desk)
    second = other.claim(4, client="r1", replica=(1, 2, 0))
    assert first.keys is not None
    assert second.keys is not None
    assert sorted(first.keys + second.keys) == [f"k{i}" for i in range(4)]
    assert other.claim(4, client="r2", replica=(0, 2, 0)).keys == first.keys


def test_what_is_given_up_leaves_only_blocks_to_free() -> None:
    desk = Desk()
    desk.put("a b c", {"v": 1}, {"x": [1, 2, 3]})
    blocks = Blocks("other")
    store = TagStore(1)
    restoring = restoring_of(desk.store, blocks)
    restoring.abandon(store)
    assert store.partitions == {}
    assert sorted(p.block for p in store.dead) == [made.block for made in blocks.made]
    assert store.counts()["blocks"] == 0


def test_a_store_with_partitions_takes_nothing() -> None:
    desk = Desk()
    desk.put("a")
    store = TagStore(1)
    put(store, "there", ["k"], tags=[{}])
    restoring = restoring_of(desk.store, Blocks("other"))
    with pytest.raises(InvalidRequest, match="'there'"):
        restoring.check_end(store, None)
    restoring.check_end(store, ["there"])
    with pytest.raises(InvalidRequest, match=f"{P!r} is to stay, and was loaded"):
        restoring.check_end(store, ["there", P])
    assert list(store.partitions) == ["there"]
    assert store.epoch == 1


def test_a_group_that_stays_keeps_its_attempt_s_number_to_itself() -> None:
    saved, other = Desk(), Desk()
    saved.begin("u", 1)
    restoring = restoring_of(saved.store, Blocks("other"))
    other.begin("w", 1)
    assert list(saved.store.attempts) == list(other.store.attempts)
    renamed = other.store.partitions.pop(P)
    renamed.partition_id = "stays"
    other.store.partitions["stays"] = renamed
    with pytest.raises(InvalidRequest, match=r"groups 'w' .* numbers of others that were loaded"):
        restoring.check_end(other.store, ["stays"])
    restoring.check_end(other.store, [])


def test_what_is_remembered_of_an_earlier_partition_touches_no_row_of_the_restored_one() -> None:
    desk = Desk()
    desk.put("a b", {"v": 1})
    store = TagStore(1, History(max_changes=1))
    for _ in range(40):
        put(store, P, ["a", "b"], tags=[{}, {}])
        store.apply_clear(P, ["a", "b"], 0.0)
    for _ in store.apply_drop(store.partition(P), 0.0):
        pass
    restoring_of(desk.store, Blocks("other")).finish(store, History())
    for _ in range(40):
        put(store, "elsewhere", ["x"], tags=[{}])
    assert set(rows_of(store, P)) == {"a", "b"}
    audit(store)


# -- anything --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_any_store_behaves_the_same_when_restored(seed: int) -> None:
    rng = random.Random(seed)
    desk = Desk()
    claims: list[Any] = []
    groups: list[Group] = []
    for step in range(60):
        keys = [f"k{rng.randrange(12)}" for _ in range(rng.randrange(1, 4))]
        keys = list(dict.fromkeys(keys))
        what = rng.randrange(9)
        if what <= 2:
            lengths = {name: [rng.randrange(4)] * len(keys) for name in rng.sample("xmo", 2)}
            desk.put(
                keys, {"v": step}, rng.choice([None, lengths, lengths]), client_id=f"c{step % 3}"
            )
        elif what == 3:
            desk.clear(keys)
        elif what == 4:
            groups.append(desk.begin(f"u{rng.randrange(3)}"))
        elif what == 5 and groups and groups[-1].open:
            desk.put([f"{groups[-1].uid}_{step}"], {"v": step}, group=groups[-1])
        elif what == 6 and groups and groups[-1].open:
            desk.end(groups[-1], rng.choice(["finished", "failure"]))
        elif what == 7:
            asked = desk.claim(rng.randrange(1, 3), client=f"w{step}", task=rng.choice("ts"))
            if asked.keys is None:
                desk.leave(asked)
            elif not asked.granted.end:
                claims.append((asked, asked.ask.queue.task.name if asked.ask else "t"))
        elif claims:
            asked, task = claims.pop(rng.randrange(len(claims)))
            try:
                rng.choice([desk.commit, desk.release])(asked, task=task)
            except ClaimLost:
                pass
    other = restored(desk)
    same(desk, other)
    for task in ("t", "s"):
        taken = [desk.claim(1, client="last", task=task) for _ in range(20)]
        again = [other.claim(1, client="last", task=task) for _ in range(20)]
        assert [asked.keys for asked in again] == [asked.keys for asked in taken]
        assert [a.deliveries for a in again if a.keys] == [a.deliveries for a in taken if a.keys]
    audit(other.store, [other.blocks])


# -- what is refused -------------------------------------------------------------------------


def begun() -> Restoring:
    desk = Desk()
    desk.put("a b", {"v": 1}, {"x": [1, 2]})
    restoring = Restoring(1, 10)
    restoring.begin(P, desk.partition.schema, open_schema=False)
    restoring.add_groups(P, [SavedGroup("u", 3, 2, 0, "running", 3, 0.0, True, "c")])
    restoring.add_rows(P, 0, rows("a", "b"))
    return restoring


def rows(*keys: str, **changes: Any) -> SavedRows:
    count = len(keys)
    plain = SavedRows(
        list(keys), [{}] * count, [1] * count, [1] * count, [0] * count, [0] * count,
        ["c"] * count, {},
    )  # fmt: skip
    return plain._replace(**changes)


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (3, rows("c")),
        (0, rows("c")),
        (2, rows("a")),
        (2, rows("c", revisions=[11])),
        (2, rows("c", cleared_at=[11])),
        (2, rows("c", tasks={"a\nb": [0]})),
    ],
)
def test_rows_that_cannot_follow_are_refused(first: int, more: SavedRows) -> None:
    restoring = begun()
    with pytest.raises(InvalidRequest):
        restoring.add_rows(P, first, more)


def test_rows_and_blocks_of_partitions_that_were_not_begun_are_refused() -> None:
    restoring = begun()
    block = Blocks("v").block(1, {"x": [1]})
    for act in (
        lambda: restoring.add_rows("other", 0, rows("a")),
        lambda: restoring.add_block("other", [0], block),
        lambda: restoring.add_groups("other", []),
    ):
        with pytest.raises(InvalidRequest, match="'other'"):
            act()


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([0], {"x": [1, 2]}),
        ([0, 0], {"x": [1, 2]}),
        ([0, 2], {"x": [1, 2]}),
        ([-1, 0], {"x": [1, 2]}),
        ([0, 1], {"m": [1, 2]}),
    ],
    ids=str,
)
def test_blocks_that_do_not_fit_are_refused(positions: list[int], lengths: dict[str, Any]) -> None:
    restoring = begun()
    rows_in = len(next(iter(lengths.values())))
    with pytest.raises(InvalidRequest):
        restoring.add_block(P, positions, Blocks("v").block(rows_in, lengths))
    assert restoring.placements == {}
    blocks = Blocks("v")
    restoring.add_block(P, [0, 1], blocks.block(2, {"x": [1, 2]}))
    with pytest.raises(InvalidRequest, match="second block"):
        restoring.add_block(P, [1], blocks.block(1, {"x": [1]}))


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 0}, {"attempt": "3"}, {"attempt": 1.0}, {"n": -1}, {"declared_bytes": None},
        {"uid": 7}, {"status": None}, {"open": 1}, {"at": "now"}, {"producer": b"c"},
        {"attempt": 1 << 63}, {"attempt": 11},
    ],
    ids=str,
)  # fmt: skip
def test_groups_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    right = SavedGroup("v", 4, 2, 0, "running", 4, 0.0, True, "c")
    restoring = begun()
    restoring.add_groups(P, [SavedGroup.checked(list(right))])
    with pytest.raises(InvalidRequest):
        restoring.add_groups(
            P, [SavedGroup.checked(list(right._replace(uid="w", attempt=5)._replace(**changes)))]
        )


@pytest.mark.parametrize(
    "about",
    [
        {}, {"task": 7}, {"task": ""},
        {"leases": [{}]}, {"leases": 7}, {"last_id": -1}, {"last_id": "x"}, {"batches": [{}]},
        {"closed": [[1]]}, {"forgotten": None},
        {"leases": [{
            "claim_id": 1, "revision": 1, "rows": [["a", 1]], "held": ["a"], "lost": {},
            "done": [], "holders": {}, "lease_s": -1, "grouped": False, "at": 0, "share": None,
        }]},
    ],
    ids=str,
)  # fmt: skip
def test_tasks_that_cannot_be_are_refused(about: dict[str, Any]) -> None:
    right = {"task": "t", "last_id": 0, "leases": [], "closed": [], "batches": [], "forgotten": -1}
    options: dict[str, Any] = {"sealed": False, "quota": None, "retention": None}
    wrong = {**right, **about} if about else {}
    with pytest.raises(InvalidRequest):
        begun().settle(P, tasks=[wrong], **options)
    begun().settle(P, tasks=[right], **options)
