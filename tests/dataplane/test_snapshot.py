"""A snapshot is all that a replay has made: what is loaded from it cannot be told from that."""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any

import msgpack
import pytest

from dataplane.errors import InternalError, InvalidRequest, JournalDamaged
from dataplane.tags import records as r
from dataplane.tags.history import History
from dataplane.tags.records import Record, framed
from dataplane.tags.replay.replay import Replay
from dataplane.tags.rows import CHUNK_ROWS
from dataplane.tags.snapshot import format as form
from dataplane.tags.snapshot.format import Parts, SnapshotHead, written
from dataplane.tags.snapshot.state import head_of, loaded, parts_of
from dataplane.wire.messages import PutMeta
from tests.dataplane.audit import Blocks, audit
from tests.dataplane.histories import Histories, claim_body, wire
from tests.dataplane.replaying import Live, described, differences, requests_of

SEEDS = int(os.environ.get("REPLAY_SEEDS", "12"))
STEPS = 120
BOUNDS = [(10_000, 600.0), (60, 600.0), (10_000, 20.0)]


def snapshot_of(made: Replay) -> bytes:
    return b"".join(written(head_of(made, "plane", 2), parts_of(made)))


def back(made: Replay) -> Replay:
    """What is loaded from a snapshot of it."""
    history = made.store.history
    parts = Parts(BytesIO(snapshot_of(made)), "memory")
    return loaded(parts, History(history.max_changes, history.max_age_s))


def everything(made: Replay) -> dict[str, Any]:
    """What a replay knows, and in which order, beyond what `described` compares."""
    store = made.store
    return {
        "store": described(store),
        "requests": requests_of(store),
        "clients": list(store.requests),
        "epochs": (store.epoch, store.starts, store.open_schemas),
        "made": (made.stores, made.last_claim_id, made.at, made.loads.ended),
        "attempts": list(store.attempts),
        "covers": dict(store.history.forgotten),
        "dropped": store.dropped,
        "kept": {
            (g.partition_id, g.uid): g.kept_bytes
            for p in store.partitions.values()
            for g in p.groups.values()
        },
        "partitions": {
            name: {
                "groups": list(p.groups),
                "producers": list(p.producers),
                "prompters": {c: (q.rows, q.tag_bytes) for c, q in p.prompters.items()},
                "slots": (p.slots.end, p.slots.live),
                "holders": {
                    client_id: [lease.claim_id for lease in leases]
                    for client_id, leases in p.claims.holders.leases.items()
                },
                "away": p.claims.holders.away,
                "active": p.claims.active,
                "tasks": {
                    task.name: (list(task.single), list(task.closed), list(task.leases),
                                list(task.batches), len(task.committed))
                    for task in p.claims.tasks.values()
                },
                "granted": {
                    lease.claim_id: [
                        (row.tag_bytes, row.revision, row.cleared_at, row.account.parent is
                         p.prompts, [(at.store, at.block, at.lengths) for at in row.layers[::2]])
                        for row in lease.granted.rows
                    ]
                    for task in p.claims.tasks.values() for lease in task.leases.values()
                },
            }
            for name, p in store.partitions.items()
        },
    }  # fmt: skip


def assert_same(found: Replay, expected: Replay) -> None:
    assert differences(everything(found), everything(expected)) == []


@pytest.mark.parametrize("seed", range(3000, 3000 + SEEDS))
async def test_what_is_loaded_is_what_was_saved_and_goes_on_as_it_would(seed: int) -> None:
    bounds = BOUNDS[seed % 3]
    live = Live(history=bounds)
    histories = Histories(seed, live)
    made = Replay(1, History(*bounds))
    fresh = 0
    for step in range(STEPS):
        await histories.step()
        await live.rest()
        live.follow()
        for record in live.records[fresh:]:
            made.apply(record)
        fresh = len(live.records)
        if step % 4 == seed % 4 and made.loads.restoring is None:
            assert_same(made, live.replay)
            made = back(made)  # and from here on what was loaded goes on
            assert_same(made, live.replay)
            audit(made.store)
    assert_same(made, live.replay)


async def test_shares_old_rows_and_ended_claims_are_kept() -> None:
    live = Live()
    histories = Histories(0, live, waits=False)
    numbers = iter(range(1, 10_000))

    async def put(keys: str, **tags: Any) -> None:
        number = next(numbers)
        names = keys.split()
        meta = PutMeta("p", names, 0, number, number - 1, None, None)
        packed = msgpack.packb(tags) * len(names)
        block = wire(histories.blocks.block(len(names), {"x": [3] * len(names)}))
        await histories.values.call("publish", "c0", meta.pack(), packed, block, 0)

    async def claim(count: int, replica: Any = None, client: str = "c0") -> tuple[int, list[str]]:
        number = next(numbers)
        body = claim_body("p", "train", count, {"fields": ["x"]}, replica)
        await histories.callers[client].call("claim", *body, 1.0, number)
        granted = live.store.partition("p").claims.granted(client, number)
        assert granted is not None
        return granted.claim_id, [row.key for row in granted.rows]

    async def end(verb: str, claimed: tuple[int, list[str]]) -> None:
        number = next(numbers)
        body = ("p", "train", *claimed, number, number - 1)
        await histories.callers["c0"].call(verb, *body)

    await put("a b c d", v=1)
    first = await claim(2)
    shares = [await claim(2, [rank, 2, 0], "c1") for rank in (0, 1)]
    await put("a b c", v=2)  # they are granted as they were
    await end("claim_commit", first)
    await put("e f g h", v=1)
    await end("claim_release", await claim(1))
    held = await claim(3)
    number = next(numbers)
    await histories.callers["c0"].call("clear", "p", [held[1][0]], None, False, number, 0)
    await end("claim_release", shares[1])
    await live.rest()
    made = back(live.follow())
    assert_same(made, live.replay)
    task = made.store.partition("p").claims.tasks["train"]
    assert (len(task.closed), len(task.single), len(task.batches)) == (3, 2, 1)
    assert [row.tags["v"] for row in task.leases[held[0]].granted.rows] == [1, 1, 1]
    assert task.leases[held[0]].lost == {held[1][0]: "cleared"}
    audit(made.store)


def put_record(n: int, keys: list[str], tags: bytes | None = None, at: float = 0.0) -> Record:
    meta = PutMeta("p", keys, 0, n, n - 1, None, None)
    body = ["c", meta.pack(), tags or b"\x80" * len(keys), "", None]
    return Record(r.PUT, n, at, body, 0)


def clear_record(n: int, keys: list[str] | None, where: Any = None, at: float = 0.0) -> Record:
    return Record(r.CLEAR, n, at, ["c", "p", keys, where, False, n, n - 1], 0)


@pytest.mark.parametrize("bounds", [(10_000, 600.0), (500, 600.0), (1, 600.0)])
def test_slots_tombstones_and_chunks_that_are_gone_are_as_they_were(
    bounds: tuple[int, float],
) -> None:
    made = Replay(1, History(*bounds))
    keys = [f"k{i}" for i in range(3 * CHUNK_ROWS + 100)]
    for n, at in enumerate(range(0, len(keys), 100), 1):
        part = keys[at : at + 100]
        tags = b"".join(msgpack.packb({"i": at + i}) for i in range(len(part)))
        made.apply(put_record(n, part, tags))
    n = made.store.n
    made.apply(clear_record(n + 1, keys[:CHUNK_ROWS]))
    made.apply(clear_record(n + 2, keys[CHUNK_ROWS + 5 : CHUNK_ROWS + 200 : 3]))
    made.apply(put_record(n + 3, [*keys[:7], *keys[CHUNK_ROWS + 5 : CHUNK_ROWS + 50]]))
    made.apply(clear_record(n + 4, None, {"i": {">": 3 * CHUNK_ROWS}}))
    made.apply(clear_record(n + 5, keys[:3]))
    for more in range(n + 6, n + 12):  # what history forgets is forgotten little by little
        found = back(made)
        assert_same(found, made)
        audit(found.store)
        for replay in (found, made):
            replay.apply(put_record(more, [f"k{more}", "k2"]))
        assert_same(found, made)
    assert (made.store.partition("p").slots.chunks[0] is None) == (bounds[0] < 1000)


def test_what_was_cleared_from_an_earlier_partition_of_the_name_is_none_of_the_new_ones() -> None:
    made = Replay(1)
    made.apply(put_record(1, ["a", "b"]))
    made.apply(clear_record(2, ["a"]))
    made.apply(Record(r.PARTITION, 3, 0.0, ["drop", ["p"], "c", 3, 2], 0))
    found = back(made)
    assert_same(found, made)
    for replay in (found, made):
        replay.apply(put_record(4, ["c", "d"]))
        replay.apply(clear_record(5, ["d"]))
    found = back(found)
    assert_same(found, made)
    slots = found.store.partition("p").slots
    assert [type(slots.at(position)).__name__ for position in (0, 1)] == ["Row", "Tombstone"]


def test_a_change_of_very_many_keys_goes_on_in_the_next_part() -> None:
    made = Replay(1, History())
    keys = [f"k{i}" for i in range(60_000)]
    made.apply(put_record(1, keys))
    made.apply(put_record(2, [f"m{i}" for i in range(40_000)]))
    made.apply(clear_record(3, None, {}))
    entries = [entry for part in parts_of(made) if part[0] == form.HISTORY for entry in part[1]]
    assert max(len(entry[3]) for entry in entries) < 40_000
    assert len(entries) > 4
    found = back(made)
    assert_same(found, made)
    assert [len(change.keys) for change in found.store.history] == [60_000, 40_000, 100_000]


def test_epochs_and_what_each_began_with_are_kept() -> None:
    made = Replay(3, History(), open_schemas=True)
    made.apply(put_record(1, ["a"]))
    made.apply(Record(r.START, 1, 2.0, [5], 0))
    made.apply(put_record(2, ["b"]))
    found = back(made)
    assert_same(found, made)
    assert found.store.starts == {3: 0, 5: 1}
    assert found.store.open_schemas
    assert found.store.client("c").answers[2].answer.revision == (5, 2)


def test_groups_that_value_stores_keep_room_for_are_to_be_told_of() -> None:
    made = Replay(1)
    made.apply(Record(r.BEGIN, 1, 0.0, ["c", "p", "u", 2, 9000, "v0", 1, 0], 0))
    made.apply(Record(r.BEGIN, 2, 0.0, ["c", "p", "w", 2, 9000, "", 2, 0], 0))
    found = back(made)
    assert [group.uid for group in found.store.settled] == ["u"]
    assert_same(found, made)


def test_a_block_charged_to_a_group_that_has_ended_stays_so() -> None:
    """Rows of one group that became another's: the first one's block lives on in them."""
    made = Replay(1)
    blocks = Blocks("v0")
    made.apply(Record(r.BEGIN, 1, 0.0, ["c", "p", "u", 1, 0, "", 1, 0], 0))
    meta = PutMeta("p", ["k"], 0, 2, 0, None, None, 1)
    block = wire(blocks.block(1, {"x": [5]}))
    made.apply(Record(r.PUT, 2, 0.0, ["c", meta.pack(), b"\x80", "v0", block], 0))
    made.apply(Record(r.BEGIN, 3, 0.0, ["d", "p", "w", 1, 0, "", 1, 0], 0))
    meta = PutMeta("p", ["k"], 0, 2, 0, None, None, 3)
    block = wire(blocks.block(1, {"m": [(2)]}))
    made.apply(Record(r.PUT, 4, 0.0, ["d", meta.pack(), b"\x80", "v0", block], 0))
    made.apply(Record(r.END, 5, 0.0, ["c", 1, "finished", 3, 0], 0))
    assert list(made.store.partition("p").groups) == ["w"]
    found = back(made)
    assert_same(found, made)
    for replay in (found, made):
        replay.apply(clear_record(6, ["k"]))
        assert replay.store.partition("p").account.extent_bytes == 0
    assert_same(found, made)


def test_there_is_no_snapshot_in_the_middle_of_a_load() -> None:
    made = Replay(1)
    made.apply(Record(r.RESTORE, 0, 0.0, ["begin", "load", "c", 1, 5], 0))
    with pytest.raises(InternalError, match="load of a checkpoint is under way"):
        list(parts_of(made))


# -- damage ------------------------------------------------------------------------------------


def small() -> Replay:
    made = Replay(1)
    made.apply(put_record(1, ["a", "b"], msgpack.packb({"v": 1}) * 2))
    made.apply(clear_record(2, ["b"]))
    made.apply(Record(r.BEGIN, 3, 0.0, ["c", "p", "u", 1, 0, "", 3, 0], 0))
    claim = ["p", "t", "c", 30.0, False, [[1, 4, None, ["a"]]], None, None]
    made.apply(Record(r.CLAIM, 3, 0.0, claim, 0))
    return made


def load(data: bytes) -> Replay:
    return loaded(Parts(BytesIO(data), "here/snapshot"), History())


def test_any_flipped_bit_is_found_and_named() -> None:
    data = snapshot_of(small())
    assert_same(load(data), small())
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises((JournalDamaged, InvalidRequest), match="here/snapshot") as error:
            load(bytes(damaged))
        if at != len(form.MAGIC):
            assert isinstance(error.value, JournalDamaged)
            assert error.value.offset <= at


def test_a_tail_that_is_cut_off_or_added_is_found() -> None:
    data = snapshot_of(small())
    for end in range(len(data)):
        with pytest.raises(JournalDamaged):
            load(data[:end])
    for tail in (b"\0", data[-30:]):
        with pytest.raises(JournalDamaged, match="goes on after its end") as error:
            load(data + tail)
        assert error.value.offset == len(data)


def test_parts_that_are_missing_twice_there_or_in_another_order_are_refused() -> None:
    made = small()
    parts = list(parts_of(made))
    head = head_of(made, "plane", 2)
    for at in range(len(parts)):
        for wrong in (parts[:at] + parts[at + 1 :], [*parts[: at + 1], *parts[at:]]):
            end = len(framed(msgpack.packb([form.END, len(wrong)])))
            data = b"".join(written(head, wrong))[:-end]
            with pytest.raises(JournalDamaged):
                load(data + framed(msgpack.packb([form.END, len(parts)])))
    with pytest.raises(JournalDamaged, match="do not fit together"):
        load(b"".join(written(head, [*parts[:-1], [77, "what"]])))
    with pytest.raises(JournalDamaged, match="about the plane is missing"):
        load(b"".join(written(head, parts[:-1])))
    with pytest.raises(JournalDamaged, match="do not fit together"):
        load(b"".join(written(head, [parts[1], *parts])))


def test_the_head_says_whose_snapshot_it_is_of_which_moment() -> None:
    made = small()
    made.apply(Record(r.START, 3, 2.0, [2], 0))
    parts = Parts(BytesIO(snapshot_of(made)), "file")
    assert parts.head == SnapshotHead("plane", 2, 2, 3, open_schemas=False)


def test_a_part_too_large_to_be_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MAX_RECORD_BYTES", 100)
    with pytest.raises(InternalError, match=r"part of the snapshot \(kind \d+\) has \d+ bytes"):
        snapshot_of(small())
