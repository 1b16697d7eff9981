"""What a journal is replayed to is what the store was, for everybody who asks it anything."""

from __future__ import annotations

import os
import random
from io import BytesIO
from typing import Any, cast

import msgpack
import pytest

from dataplane.errors import InternalError, JournalDamaged
from dataplane.server.connection import Connection
from dataplane.server.freeing import RemoteValues
from dataplane.tags import records as r
from dataplane.tags.history import History
from dataplane.tags.records import Head, Record, Records, framed, head_bytes
from dataplane.tags.replay.replay import Replay, replay
from dataplane.wire.messages import IF_ABSENT, MUST_EXIST, RETURN_TAGS, PutMeta
from tests.dataplane.audit import Blocks, audit, forget_everything
from tests.dataplane.histories import (
    CLIENTS,
    KEYS,
    PARTITIONS,
    STORE,
    TASKS,
    UIDS,
    WANTS,
    Histories,
    claim_body,
    wire,
)
from tests.dataplane.replaying import HEAD, Caller, Live, described, differences, requests_of

SEEDS = int(os.environ.get("REPLAY_SEEDS", "12"))
STEPS = 120


def same_as(live: Live, made: Replay) -> None:
    """Assert that a replay is what the service is."""
    assert differences(described(made.store), described(live.store)) == []
    ahead = requests_of(made.store)
    for client_id, (floor, answers) in requests_of(live.store).items():
        # A request that was refused settles numbers, and leaves no record.
        known_floor, known = ahead.get(client_id, (0, {}))
        assert known_floor <= floor
        above = {n: answer for n, answer in known.items() if n > floor}
        assert differences(above, answers, client_id) == []
    assert made.last_claim_id == live.service.claiming._ledger._last_id
    restorer = live.service.checkpointing.restorer
    assert made.loads.ended == restorer._ended
    assert (made.loads.restore_id, made.loads.client_id) == (restorer._id, restorer.client_id)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_after_every_change_the_replay_is_what_the_service_is(seed: int) -> None:
    live = Live(history=[(10_000, 600.0), (60, 600.0), (10_000, 20.0)][seed % 3])
    histories = Histories(seed, live)
    for _ in range(STEPS):
        await histories.step()
        await live.rest()
        same_as(live, live.follow())
    dead = {placement.block for placement in live.replay.store.dead}
    freed = set(histories.values.freed)
    assert dead <= freed
    assert freed - dead <= histories.strays
    audit(live.replay.store)
    # All at once from the file, without what had been replayed before.
    history = live.store.history
    same_as(live, replay(live.journal.all(), History(history.max_changes, history.max_age_s)))


def restarted(live: Live) -> Live:
    """A service on what the journal of another one is replayed to; the same clients are there."""
    made = replay(live.journal.all())
    other = Live(store=made.store)
    other.now = live.now
    other.service.claiming._ledger.skip_ids(made.last_claim_id)
    for partition in made.store.partitions.values():
        other.service.claiming.restored(partition)
    for client_id in CLIENTS:
        other.service.attach(client_id)
    for store_id, address in made.stores.items():
        there = cast("Connection", Caller(other.service, store_id, "store"))
        other.service.registering.register(RemoteValues(store_id, address, there))
    return other


def firm(answer: Any) -> Any:
    """An answer without what it says of those who wait: a replay knows nothing of them."""
    if isinstance(answer, dict) and answer.get("type") in ("DeadlineExceeded", "QuotaExceeded"):
        loose = ("message", "waited_s", "explanation", "lagging_task", "oldest_keys")
        return {name: value for name, value in answer.items() if name not in loose}
    return answer


@pytest.mark.parametrize("seed", range(2000, 2000 + SEEDS // 3))
async def test_a_history_that_was_trimmed_while_nothing_changed_is_trimmed_again(seed: int) -> None:
    bounds = (80, 30.0)
    live = Live(history=bounds)
    histories = Histories(seed, live)
    for _ in range(STEPS):
        await histories.step()
        if histories.random.random() < 0.3:
            live.now += histories.random.choice([0.0, 20.0])
            live.store.upkeep(live.now)
    await live.rest()
    made = replay(live.journal.all(), History(*bounds))
    assert made.store.history.floor <= live.store.history.floor
    for store in (live.store, made.store):
        forget_everything(store, live.now)
    assert differences(described(made.store), described(live.store)) == []


async def questions(live: Live, histories: Histories, seed: int) -> list[Any]:
    """Ask for everything that anybody can ask for, and do what may come late or once more."""
    rng = random.Random(seed)
    service, store = live.service, live.store
    asking = {name: Caller(service, name) for name in [*CLIENTS, "stranger"]}
    values = Caller(service, STORE, "store")
    told: list[Any] = []

    async def ask(caller: Caller, verb: str, *body: Any) -> None:
        told.append((verb, body, await caller.call(verb, *body)))
        await live.rest()

    names = sorted({*store.partitions, *PARTITIONS})
    since = [None, *([store.epoch, max(0, store.n - back)] for back in (0, 1, 5, 20, 60, 10_000))]
    stranger = asking["stranger"]
    await ask(stranger, "partitions")
    for name in names:
        for revision in since:
            await ask(stranger, "list", name, rng.choice([None, {"a": 1}]), revision, None, None)
            if revision is not None and any(
                change.keys for change in store.history.since(name, revision[1])
            ):
                await ask(stranger, "watch", name, None, revision, 0.2, len(told))
        await ask(stranger, "resolve", name, [*KEYS, *UIDS, "u0_0", "g0_1"], None, True)
        partition = store.partitions.get(name)
        if partition is not None and len(partition):
            await ask(stranger, "wait", name, {}, [], len(partition), False, 1.0, len(told))
    # What was asked before, once more; what has been settled since is refused by who knows that.
    for asked in histories.asked[-60:]:
        client_id = asked.body[0] if asked.client_id == STORE else asked.client_id
        caller = values if asked.client_id == STORE else asking[client_id]
        if asked.number > histories.live.store.client(client_id).floor:
            await ask(caller, asked.verb, *asked.body)
    for client_id in CLIENTS:
        last = histories.numbers[client_id]
        for number in range(max(histories.settled[client_id], last - 12) + 1, last + 3):
            await ask(stranger, "outcome", client_id, number)
    # Late puts: of attempts open and closed, and begun before keys and partitions went.
    numbers = iter(range(1_000_000, 2_000_000))
    for attempt in [None, *histories.attempts[-8:]]:
        for name in names:
            for back in (0, 3, 30):
                stamp = [store.epoch, max(0, store.n - back)] if back else None
                keys = rng.sample(KEYS, 2) if attempt is None else [f"u{rng.randint(0, 2)}_0"]
                flags = rng.choice([0, MUST_EXIST, IF_ABSENT]) | RETURN_TAGS
                meta = PutMeta(name, keys, flags, next(numbers), 0, stamp, stamp, attempt)
                tags = b"".join(msgpack.packb({"late": i}) for i in range(len(keys)))
                await ask(asking["c0"], "put_tags", meta.pack(), tags)
    # Old claims end, and what is left is offered.
    for client_id, name, task, _, claim_id, keys in histories.claims[-10:]:
        verb = rng.choice(["claim_commit", "claim_release"])
        some = keys[: rng.choice([1, 99])]
        await ask(asking[client_id], verb, name, task, claim_id, some, next(numbers), 0)
    for client_id, name, task, number, _, _ in histories.claims[-10:]:
        partition = store.partitions.get(name)
        if partition is not None and partition.claims.granted(client_id, number) is not None:
            body = claim_body(name, task, 1, {})
            await ask(asking[client_id], "claim", *body, 0.0, number)  # as it was answered before
    given_up = [number for c, _, _, number, _, _ in histories.claims[-4:] if c == "c1"]
    await ask(asking["c1"], "claim_abandon", given_up)
    for name in sorted(store.partitions):
        for task in TASKS:
            for want in WANTS:
                # Queues are filled by whoever asks first, and only what is ready is answered now.
                quota = store.partitions[name].quota
                most = (quota and quota.rows) or 5000
                sealed = store.partitions[
                    name
                ].sealed  # whoever asks is answered, with what is left
                if most > len(store.partitions[name]) and not sealed:
                    body = claim_body(name, task, most, want)
                    await asking["c1"].call("claim", *body, 0.0, next(numbers))
                    await live.rest()
                for replica in (None,) if sealed else (None, None, (0, 2, 1), (1, 2, 3)):
                    body = claim_body(name, task, 1, want, replica)
                    await ask(asking["c1"], "claim", *body, 0.02 * sealed, next(numbers))
    for name in names:
        for uid in UIDS:
            body = (uid, name, 2, rng.choice([None, 0, 20_000]), None, 0.0, next(numbers), 0)
            await ask(asking["c2"], "begin_group", *body)
    await ask(stranger, "partitions")
    return told


@pytest.mark.parametrize("seed", range(1000, 1000 + SEEDS // 2))
async def test_whoever_asks_cannot_tell_the_replay_from_the_service(seed: int) -> None:
    live = Live()
    histories = Histories(seed, live, waits=False)
    for _ in range(STEPS):
        await histories.step()
    await live.rest()
    other = restarted(live)
    here, there = await questions(live, histories, seed), await questions(other, histories, seed)
    for mine, its in zip(here, there, strict=True):
        assert mine[:2] == its[:2]
        assert differences(firm(its[2]), firm(mine[2]), str(mine[:2])) == []
    assert differences(described(other.store), described(live.store)) == []


def test_what_does_not_follow_from_what_came_before_is_refused_where_it_stands() -> None:
    tags = msgpack.packb({"a": 1})

    def put(number: int, *, flags: int = 0, attempt: int | None = None) -> tuple[Any, ...]:
        meta = PutMeta("p", ["k"], flags, number, 0, None, None, attempt)
        return ("c", meta.pack(), tags, "", None)

    good = (r.PUT, 1, 0.0, put(1))
    for bad in [
        (r.PUT, 2, 0.0, put(2, flags=IF_ABSENT)),
        (r.PUT, 3, 0.0, put(2)),  # one is missing between them
        (r.PUT, 1, 0.0, put(2)),
        (r.PUT, 2, 0.0, put(2, attempt=7)),
        (r.PUT, 2, 0.0, put(2)[:-1]),
        (r.PUT, 2, 0.0, None),
        (99, 1, 0.0, ()),
        (r.CLEAR, 2, 0.0, ("c", "q", ["k"], None, False, 2, 0)),
        (r.CLEAR, 2, 0.0, ("c", "p", ["other"], None, False, 2, 0)),
        (r.CLEAR, 2, 0.0, ("c", "p", None, {"a": 2}, False, 2, 0)),
        (r.END, 2, 0.0, ("c", 1, "finished", 2, 0)),
        (r.CLAIM, 1, 0.0, ("p", "t", "c", 30.0, False, [[1, 2, None, ["other"]]], None, None)),
        (r.CLAIM, 1, 0.0, ("p", "t", 1, "c", 2, 30.0)),
        (r.COMMIT, 1, 0.0, ("p", "t", 1, ["k"], "c", 2, 0)),
        (r.PARTITION, 2, 0.0, ("drop", ["q"], "c", 2, 0)),
        (r.PARTITION, 2, 0.0, ("eat", "p", "c", 2, 0)),
        (r.RESTORE, 1, 0.0, ("end", "id", [])),
        (r.RESTORE, 1, 0.0, ("rows", "id", "p")),
        (r.START, 1, 0.0, (1,)),
    ]:
        start = head_bytes(HEAD) + framed(msgpack.packb(good))
        data = start + framed(msgpack.packb(bad))
        with pytest.raises(JournalDamaged) as error:
            replay(Records(BytesIO(data), "here/journal"))
        assert (error.value.path, error.value.offset) == ("here/journal", len(start)), bad


def test_epochs_follow_each_other_and_answers_keep_theirs() -> None:
    made = Replay(1)
    meta = PutMeta("p", ["k"], 0, 1, 0, None, None)
    body = ["c", meta.pack(), msgpack.packb({}), "", None]
    made.apply(Record(r.PUT, 1, 5.0, body, 0))
    made.apply(Record(r.START, 1, 6.0, [2], 0))
    later = meta._replace(number=2).pack()
    made.apply(Record(r.PUT, 2, 7.0, ["c", later, msgpack.packb({}), "", None], 0))
    answers = made.store.client("c").answers
    assert [answers[n].answer.revision for n in (1, 2)] == [(1, 1), (2, 2)]
    assert (made.store.revision(), made.at) == ((2, 2), 7.0)
    with pytest.raises(InternalError, match="cannot follow epoch 2"):
        made.apply(Record(r.START, 2, 8.0, [2], 0))


def test_a_plane_of_open_schemas_is_one_again() -> None:
    start = head_bytes(Head("plane", 4, open_schemas=True))
    meta = PutMeta("p", ["k"], 0, 1, 0, None, None)
    body = ("c", meta.pack(), msgpack.packb({}), "", None)
    data = start + framed(msgpack.packb((r.PUT, 1, 0.0, body)))
    made = replay(Records(BytesIO(data), "file"))
    assert made.store.partition("p").open_schema
    assert made.store.epoch == 4


# -- what random histories seldom come to ------------------------------------------------------


class Town:
    """One service, one client, and a replay that is compared after every request."""

    def __init__(self) -> None:
        self.live = Live()
        self.histories = Histories(0, self.live, waits=False)
        self.number = 0

    async def ask(self, verb: str, *body: Any, client: str = "c0", numbered: bool = True) -> Any:
        self.number += numbered
        numbers = (self.number, self.number - 1) if numbered else ()
        answer = await self.histories.callers[client].call(verb, *body, *numbers)
        assert not isinstance(answer, dict), answer
        await self.live.rest()
        same_as(self.live, self.live.follow())
        return answer

    async def put(self, keys: str, partition_id: str = "p", **options: Any) -> None:
        self.number += 1
        names = keys.split()
        meta = PutMeta(
            partition_id, names, 0, self.number, self.number - 1, None, None,
            options.get("attempt"),
        )  # fmt: skip
        await self.ask("put_tags", meta.pack(), b"\x80" * len(names), numbered=False)

    async def claim(
        self, count: int, *, task: str = "train", groups: bool = False, replica: Any = None
    ) -> tuple[int, list[str]]:
        body = claim_body("p", task, count, {"groups": groups}, replica)
        self.number += 1
        await self.ask("claim", *body, 1.0, self.number, numbered=False)
        granted = self.live.store.partition("p").claims.granted("c0", self.number)
        assert granted is not None
        return granted.claim_id, [row.key for row in granted.rows]

    async def end(self, verb: str, claim: tuple[int, list[str]]) -> None:
        await self.ask(f"claim_{verb}", "p", "train", *claim)


async def test_floors_are_those_that_requests_told() -> None:
    town = Town()
    for key in "abc":
        await town.put(key)
    requests = town.live.replay.store.client("c0")
    assert (requests.floor, list(requests.answers)) == (2, [3])
    await town.ask("clear", "p", ["nothing"], None, False)
    await town.ask("seal_partition", "p")
    await town.ask("create_partition", "q", None, None, None)
    attempt = await town.ask("begin_group", "u", "q", 1, None, None, 0.0)
    await town.ask("end_group", attempt, "finished")
    for verb, body in [("drop_partition", ("q", None)), ("drop_partition", ("w", 1))]:
        if body[0] == "w":
            await town.put("k", "w@1")
        await town.ask(verb, *body)
        requests = town.live.replay.store.client("c0")
        assert (requests.floor, list(requests.answers)) == (town.number - 1, [town.number])


async def test_sealing_a_version_drops_others_in_the_same_breath() -> None:
    town = Town()
    await town.ask("create_partition", "w", None, None, {"versions": 1})
    for version in (1, 2, 3):
        await town.put("k", f"w@{version}")
    for version, dropped in ((2, []), (1, ["w@1"]), (3, ["w@2"]), (3, [])):
        written = len(town.live.records)
        answer = await town.ask("seal_partition", f"w@{version}")
        assert answer[1] == dropped
        assert len(town.live.records) == written + 1
    assert sorted(town.live.replay.store.partitions) == ["w", "w@3"]


async def test_shares_of_ranks_are_joined_left_lost_and_drawn_again() -> None:
    town = Town()
    await town.put("a b c d e f g h")
    first = await town.claim(4, replica=(0, 2, 0))
    _, theirs = town.live.store.partition("p").claims.tasks["train"].batches[0].shares or []
    gone = theirs.granted.rows[0].key
    await town.ask("clear", "p", [gone], None, False)
    second = await town.claim(4, replica=(1, 2, 0))
    assert gone not in second[1]
    assert await town.claim(4, replica=(1, 2, 0)) == second
    await town.ask("claim_abandon", [town.number], numbered=False)
    await town.ask("claim_abandon", [town.number - 1], numbered=False)
    assert await town.claim(4, replica=(1, 2, 0)) == second
    await town.claim(1, task="judge")
    assert await town.claim(4, replica=(0, 2, 0)) == first  # of a task whose last claim is older
    await town.end("release", first)
    again = await town.claim(4, replica=(0, 2, 0))
    assert again[0] > first[0]
    await town.end("commit", again)
    await town.end("commit", second)
    await town.end("commit", second)  # once more under another number
    more = await town.claim(2, replica=(0, 1, 1))
    await town.end("release", more)
    tasks = town.live.replay.store.partition("p").claims.tasks
    assert 1 in tasks["train"].settled
    await town.end("commit", await town.claim(2, replica=(0, 1, 1)))
    for index in range(2, 70):  # the oldest batches are forgotten
        await town.put(f"k{index}_0 k{index}_1")
        claim = await town.claim(2, replica=(0, 1, index))
        await town.end("commit", claim)
    assert tasks["train"].forgotten >= 0
    await town.end("commit", await town.claim(1))
    await town.end("commit", await town.claim(1))
    await town.ask("seal_partition", "p")
    town.number += 1
    body = claim_body("p", "train", 2, {}, (0, 2, 99))
    nothing = await town.ask("claim", *body, 1.0, town.number, numbered=False)
    assert nothing[2] is True
    assert 99 in tasks["train"].settled


async def test_claims_of_groups_stay_whole() -> None:
    town = Town()
    attempt = await town.ask("begin_group", "u", "p", 2, None, None, 0.0)
    await town.put("u_0 u_1", attempt=attempt)
    await town.ask("end_group", attempt, "finished")
    claim = await town.claim(1, groups=True)
    (lease,) = town.live.replay.store.partition("p").claims.tasks["train"].leases.values()
    assert (lease.grouped, list(lease.rows)) == (True, ["u_0", "u_1"])
    await town.end("commit", claim)


def test_a_copy_of_a_block_that_waits_to_be_let_go_of_is_dead_at_once() -> None:
    """A clear by predicate lets go of its rows bit by bit, and a block may be copied meanwhile."""
    made = Replay(1)
    blocks = Blocks("v0")
    old, new = (wire(blocks.block(2, {"x": [1, 2]})) for _ in range(2))
    meta = PutMeta("p", ["a", "b"], 0, 1, 0, None, None)
    made.apply(Record(r.PUT, 1, 0.0, ["c", meta.pack(), b"\x80\x80", "v0", old], 0))
    made.apply(Record(r.CLEAR, 2, 0.0, ["c", "p", None, None, False, 2, 0], 0))
    made.apply(Record(r.REPACK, 2, 0.0, ["v0", old[0], new, [[0, 0], [1, 1]]], 0))
    assert [placement.block for placement in made.store.dead] == [old[0], new[0]]
    assert made.store.placements == {}
