"""Claims against a naive model, over thousands of steps that nobody thought of.

The model goes through all rows for every question. What a row is (tags, fields, group) it reads
from the store; who has taken it, and who waits, it keeps itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dataplane.errors import ClaimLost, InvalidRequest
from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.query import compile_where
from dataplane.tags.rows import Row
from tests.dataplane.claimers import Asked, Desk

EXAMPLE_STEPS = 60
EXAMPLES = 120
"""Some examples end early."""

TASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "where": {"where": {"n": {">=": 2}}},
    "fields": {"fields": ["x"]},
    "up": {"order_by": "n"},
    "down": {"order_by": "-n"},
    "groups": {"groups": True, "where": {"n": {"exists": True}}},
    "groups down": {"groups": True, "order_by": "-n"},
}
"""Each task asks in one way only, so that it is certain who is served first."""

WAYS = [{}, {"where": {"n": 1}}, {"order_by": "-n"}, {"groups": True}, {"fields": ["x"]}]
"""How the task `mixed` asks: there only what must never happen is checked."""

CLIENTS = ["a", "b", "c"]
KEYS = [f"k{i}" for i in range(9)]
UIDS = ["u", "v"]

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)
some_tags = st.one_of(st.just({}), *[st.fixed_dictionaries({"n": st.integers(0, 3)})] * 3)
tasks = st.sampled_from(sorted(TASKS))
clients = st.sampled_from(CLIENTS)
picks = st.integers(0, 1000)


class ModelLease:
    def __init__(self, asked: Asked, positions: list[int], lease_s: float) -> None:
        self.asked = asked
        keys = [row.key for row in asked.granted.rows]
        self.rows = dict(zip(keys, positions, strict=True))
        self.lost: set[str] = set()
        self.done: set[str] = set()
        self.lease_s = lease_s


class ModelTask:
    def __init__(self, name: str) -> None:
        self.name = name
        self.how = TASKS[name]
        self.match = compile_where(self.how.get("where")).match
        self.committed: set[int] = set()
        self.offered: dict[int, int] = {}
        self.leases: list[ModelLease] = []
        self.asks: list[tuple[Asked, int, float]] = []

    def held(self) -> set[int]:
        return {position for lease in self.leases for position in lease.rows.values()}

    def place(self, row: Row) -> tuple[Any, ...]:
        order_by = self.how.get("order_by")
        n: Any = None if order_by is None else row.tags.get("n")
        if order_by is not None and n is None:
            n = math.inf
        elif order_by == "-n":
            n = -n
        return (n or 0, row.revision)

    def matches(self, row: Row) -> bool:
        have = {name for placement in row.layers[::2] for name in placement.template.names}
        return self.match(row.tags) and have.issuperset(self.how.get("fields", ()))

    def candidates(self, rows: dict[int, Row], groups: Sequence[Group]) -> list[list[int]]:
        """Rows or whole groups that match, taken or not, in order."""
        if not self.how.get("groups"):
            found = [[p] for p, row in rows.items() if self.matches(row)]
        else:
            found = [
                sorted(group.positions, key=lambda p: (rows[p].tags.get("session_id", 9), p))
                for group in groups
                if group.status == "finished"
                and group.positions
                and all(self.matches(rows[p]) for p in group.positions)
            ]

        def place(item: list[int]) -> tuple[Any, ...]:
            return (*min(self.place(rows[p]) for p in item), self.number(rows, item))

        return sorted(found, key=place)

    def number(self, rows: dict[int, Row], item: list[int]) -> int:
        account = rows[item[0]].account
        return account.attempt if isinstance(account, Group) and self.how.get("groups") else item[0]

    def may_return(self, client: str, rows: dict[int, Row], groups: Sequence[Group]) -> bool:
        matching = {p for item in self.candidates(rows, groups) for p in item}
        return any(
            lease.asked.client_id != client and matching.intersection(lease.rows.values())
            for lease in self.leases
        )


class ClaimSteps(RuleBasedStateMachine):
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(History(max_changes=30, max_age_s=50.0))
        self.tasks = {name: ModelTask(name) for name in TASKS}
        self.away: dict[str, float] = {}
        self.open: dict[str, Group] = {}
        self.ended: list[tuple[str, Asked, str, list[str], int]] = []
        self.mixed_waiting: list[Asked] = []
        self.mixed_held: list[Asked] = []
        # A prompt's row, so that the partition is never without any.
        self.desk.put("p", {"is_prompt": True})

    # -- the model ---------------------------------------------------------------------------

    def rows(self) -> dict[int, Row]:
        index = self.desk.partition.index
        found = ((index.get(row.key), row) for row in self.desk.partition.slots)
        return {position: row for position, row in found if position is not None}

    def changed(self) -> None:
        """Something was done to the store: bring the model up to date and compare."""
        type(self).steps += 1
        rows = self.rows()
        groups = list(self.desk.partition.groups.values())
        for task in self.tasks.values():
            task.committed &= rows.keys()
            task.offered = {p: count for p, count in task.offered.items() if p in rows}
            for lease in task.leases:
                for key, position in list(lease.rows.items()):
                    if position not in rows:
                        del lease.rows[key]
                        lease.lost.add(key)
            answered = list(self.serve(task, rows, groups))
            for asked, positions, deliveries, end in answered:
                granted = asked.granted
                assert granted.positions == positions
                assert granted.deliveries == deliveries
                assert granted.end == end
                assert (granted.claim_id == 0) == end
                assert [row.key for row in granted.rows] == [rows[p].key for p in positions]
            for asked, _, _ in task.asks:
                assert asked.answer is None
        for asked in [asked for asked in self.mixed_waiting if asked.answer is not None]:
            self.mixed_waiting.remove(asked)
            if asked.claim_id:
                self.mixed_held.append(asked)
                self.note_away(asked.client_id)

    def note_away(self, client: str) -> None:
        """A client got something."""
        if client in self.desk.ledger.away:
            self.away.setdefault(client, self.desk.ledger.lease_now)

    def serve(
        self, task: ModelTask, rows: dict[int, Row], groups: Sequence[Group]
    ) -> Iterator[tuple[Asked, list[int], list[int], bool]]:
        last = self.desk.partition.sealed and not self.open
        in_order = True
        for asked, count, lease_s in list(task.asks):
            taken = task.committed | task.held()
            ready = [i for i in task.candidates(rows, groups) if not taken.intersection(i)]
            final = last and not task.may_return(asked.client_id, rows, groups)
            if not final and not (in_order and len(ready) >= count):
                in_order = False
                continue
            task.asks.remove((asked, count, lease_s))
            positions = [p for item in ready[:count] for p in item]
            for position in positions:
                task.offered[position] = task.offered.get(position, 0) + 1
            if positions:
                task.leases.append(ModelLease(asked, positions, lease_s))
                self.note_away(asked.client_id)
            yield asked, positions, [task.offered[p] for p in positions], not positions

    def give_back(self, task: ModelTask, lease: ModelLease, keys: Sequence[str]) -> None:
        for key in keys:
            del lease.rows[key]
            lease.lost.add(key)
        self.drop_if_over(task, lease)

    def drop_if_over(self, task: ModelTask, lease: ModelLease) -> None:
        if not lease.rows:
            task.leases.remove(lease)
            self.holds_nothing(lease.asked.client_id)

    def holds_nothing(self, client: str) -> None:
        if client not in self.holding():
            self.away.pop(client, None)

    def holding(self) -> set[str]:
        """Clients that hold something."""
        holding = {lease.asked.client_id for _, lease in self.leases()}
        return holding | {asked.client_id for asked in self.mixed_held}

    def leases(self) -> list[tuple[ModelTask, ModelLease]]:
        return [(task, lease) for task in self.tasks.values() for lease in task.leases]

    # -- producers ---------------------------------------------------------------------------

    @rule(keys=some_keys, tags=some_tags, field=st.booleans())
    def put(self, keys: list[str], tags: dict[str, Any], field: bool) -> None:
        if self.desk.partition.sealed:
            keys = [key for key in keys if self.desk.partition.row(key)]
        if keys:
            self.desk.put(keys, tags, {"x": [1] * len(keys)} if field else None)
            self.changed()

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True))
    def clear(self, keys: list[str]) -> None:
        self.desk.clear(keys)
        self.changed()

    @rule(uid=st.sampled_from(UIDS))
    def begin(self, uid: str) -> None:
        if not self.desk.partition.sealed or self.desk.partition.row(uid):
            self.open[uid] = self.desk.begin(uid)
            self.changed()

    @rule(uid=st.sampled_from(UIDS), each=st.lists(some_tags, min_size=1, max_size=3))
    def whole_group(self, uid: str, each: list[dict[str, Any]]) -> None:
        if not self.desk.partition.sealed:
            self.open.pop(uid, None)
            group = self.desk.begin(uid, len(each))
            self.changed()
            keys = [f"{uid}_{i}" for i in range(len(each))]
            self.desk.put(keys, [{"session_id": -i, **t} for i, t in enumerate(each)], group=group)
            self.changed()
            self.desk.end(group)
            self.changed()

    @precondition(lambda self: self.open)
    @rule(uid=st.sampled_from(UIDS), tags=some_tags, session=st.integers(0, 2))
    def put_trajectory(self, uid: str, tags: dict[str, Any], session: int) -> None:
        key = f"{uid}_{session}"
        if uid in self.open and (not self.desk.partition.sealed or self.desk.partition.row(key)):
            self.desk.put(key, {"session_id": -session, **tags}, group=self.open[uid])
            self.changed()

    @precondition(lambda self: self.desk.partition.groups)
    @rule(uid=st.sampled_from(UIDS), session=st.integers(0, 2), tags=some_tags)
    def write_back(self, uid: str, session: int, tags: dict[str, Any]) -> None:
        if self.desk.partition.row(f"{uid}_{session}"):
            self.desk.put(f"{uid}_{session}", tags, {"x": [1]})
            self.changed()

    @precondition(lambda self: self.desk.partition.groups)
    @rule(uid=st.sampled_from(UIDS), session=st.integers(0, 2))
    def clear_trajectory(self, uid: str, session: int) -> None:
        self.desk.clear(f"{uid}_{session}")
        self.changed()

    @precondition(lambda self: self.open)
    @rule(uid=st.sampled_from(UIDS), finished=st.sampled_from([True, True, False]))
    def end(self, uid: str, finished: bool) -> None:
        if uid in self.open:
            self.desk.end(self.open.pop(uid), "finished" if finished else "failure")
            self.changed()

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def seal(self, really: bool) -> None:
        if really:
            self.desk.seal()
            self.changed()

    # -- consumers ---------------------------------------------------------------------------

    @rule(client=clients, count=st.integers(1, 2), task=st.sampled_from(["groups", "groups down"]))
    def claim_groups(self, client: str, count: int, task: str) -> None:
        self.claim_by(task, client, count, 5.0)

    @rule(task=tasks, client=clients, count=st.integers(1, 4), lease_s=st.sampled_from([5.0, 9.0]))
    def claim(self, task: str, client: str, count: int, lease_s: float) -> None:
        self.claim_by(task, client, count, lease_s)

    def claim_by(self, task: str, client: str, count: int, lease_s: float) -> None:
        how = TASKS[task]
        asked = self.desk.claim(count, task=task, client=client, lease_s=lease_s, **how)
        self.tasks[task].asks.append((asked, count, lease_s))
        self.changed()

    @precondition(lambda self: any(task.asks for task in self.tasks.values()))
    @rule(pick=picks)
    def give_up_waiting(self, pick: int) -> None:
        waiting = [(task, entry) for task in self.tasks.values() for entry in task.asks]
        task, entry = waiting[pick % len(waiting)]
        task.asks.remove(entry)
        self.desk.leave(entry[0])
        self.changed()

    @precondition(lambda self: self.leases())
    @rule(pick=picks)
    def ask_once_more(self, pick: int) -> None:
        leases = self.leases()
        _, lease = leases[pick % len(leases)]
        assert lease.asked.ask is not None
        again = self.desk.claim(1, client=lease.asked.client_id, number=lease.asked.ask.number)
        assert again.granted is lease.asked.granted

    @precondition(lambda self: self.leases())
    @rule(pick=picks, part=st.integers(0, 3), commit=st.sampled_from([True, True, False]))
    def finish(self, pick: int, part: int, commit: bool) -> None:
        leases = self.leases()
        task, lease = leases[pick % len(leases)]
        keys = [row.key for row in lease.asked.granted.rows]
        keys = keys[:part] if part else keys
        end = self.desk.commit if commit else self.desk.release
        gone = [k for k in keys if k in lease.lost or (k in lease.done and not commit)]
        if gone:
            with pytest.raises(ClaimLost) as error:
                end(lease.asked, keys, task.name)
            assert error.value.keys == gone
            keys = [key for key in keys if key not in gone]
        if self.tears(task, lease, keys):
            with pytest.raises(InvalidRequest, match="would be left"):
                end(lease.asked, keys, task.name)
            return
        n = end(lease.asked, keys, task.name)
        fresh = [key for key in keys if key in lease.rows]
        if commit:
            lease.done.update(fresh)
            for key in fresh:
                position = lease.rows.pop(key)
                task.committed.add(position)
                del task.offered[position]
            self.drop_if_over(task, lease)
        else:
            self.give_back(task, lease, fresh)
        if lease not in task.leases and keys:
            self.ended.append((task.name, lease.asked, "commit" if commit else "release", keys, n))
        self.changed()

    def tears(self, task: ModelTask, lease: ModelLease, keys: Sequence[str]) -> bool:
        if not task.how.get("groups"):
            return False
        rows = self.rows()
        left = {rows[p].account for key, p in lease.rows.items() if key not in keys}
        return any(rows[lease.rows[key]].account in left for key in keys if key in lease.rows)

    @precondition(lambda self: self.ended)
    @rule(pick=picks)
    def finish_once_more(self, pick: int) -> None:
        task, asked, how, keys, n = self.ended[pick % len(self.ended)]
        again, other = self.desk.commit, self.desk.release
        if how == "release":
            again, other = other, again
        assert again(asked, keys, task) == n
        with pytest.raises(ClaimLost) as error:
            other(asked, keys, task)
        assert error.value.keys == keys

    @rule(client=clients)
    def leaves(self, client: str) -> None:
        self.desk.leaves(client)
        if client in self.holding():
            self.note_away(client)

    @precondition(lambda self: self.desk.ledger.away)
    @rule(client=clients)
    def returns(self, client: str) -> None:
        self.desk.returns(client)
        self.away.pop(client, None)

    @precondition(lambda self: self.away)
    @rule(seconds=st.sampled_from([1.0, 4.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        now = self.desk.ledger.lease_now + seconds
        away = dict(self.away)
        self.desk.passes(seconds)
        for task, lease in self.leases():
            since = away.get(lease.asked.client_id)
            if since is not None and now - since >= lease.lease_s:
                lost = list(lease.rows)
                for key in lost:
                    del lease.rows[key]
                self.drop_if_over(task, lease)
                with pytest.raises(ClaimLost, match="has no claim"):
                    self.desk.commit(lease.asked, lost, task.name)
        for asked in list(self.mixed_held):
            since = away.get(asked.client_id)
            if since is not None and now - since >= 5.0:
                self.mixed_held.remove(asked)
        for client in CLIENTS:
            self.holds_nothing(client)
        self.changed()

    @precondition(lambda self: self.leases())
    @rule(pick=picks)
    def abandon(self, pick: int) -> None:
        leases = self.leases()
        task, lease = leases[pick % len(leases)]
        assert lease.asked.ask is not None
        self.desk.abandon(lease.asked.client_id, lease.asked.ask.number)
        for position in lease.rows.values():
            task.offered[position] -= 1
        lease.rows.clear()
        self.drop_if_over(task, lease)
        self.changed()

    # -- one task that asks in many ways -----------------------------------------------------

    @rule(way=st.sampled_from(WAYS), client=clients, count=st.integers(1, 3))
    def claim_mixed(self, way: dict[str, Any], client: str, count: int) -> None:
        asked = self.desk.claim(count, task="mixed", client=client, lease_s=5.0, **way)
        self.mixed_waiting.append(asked)
        self.changed()

    @precondition(lambda self: self.mixed_held)
    @rule(pick=picks, commit=st.booleans())
    def finish_mixed(self, pick: int, commit: bool) -> None:
        asked = self.mixed_held.pop(pick % len(self.mixed_held))
        end = self.desk.commit if commit else self.desk.release
        keys = [row.key for row in asked.granted.rows]
        try:
            end(asked, keys, "mixed")
        except ClaimLost as error:
            keys = [key for key in keys if key not in error.keys]
            end(asked, keys, "mixed")
        self.holds_nothing(asked.client_id)
        self.changed()

    @invariant()
    def nothing_is_held_twice_and_queues_are_exact(self) -> None:
        self.desk.check()
        held = [p for asked in self.mixed_held for p in asked.granted.positions]
        assert len(held) == len(set(held))
        claims = self.desk.partition.claims
        for task in self.tasks.values():
            real = claims.tasks.get(task.name)
            if real is None:
                assert [task.committed, task.leases, task.offered] == [set(), [], {}]
                continue
            assert set(real.committed) == task.committed
            assert set(real.held) == task.held()
            assert real.offered == {p: count for p, count in task.offered.items() if count}
        for client in CLIENTS:
            mine = [lease for _, lease in self.leases() if lease.asked.client_id == client]
            mixed = [asked for asked in self.mixed_held if asked.client_id == client]
            assert len(claims.holders.of(client)) == len(mine) + len(mixed)
        assert claims.holders.away == self.away

    def teardown(self) -> None:
        """With everybody gone and everything cleared nothing is left."""
        for client in CLIENTS:
            self.desk.returns(client)
            self.desk.leaves(client)
        self.desk.passes(10.0)
        claims = self.desk.partition.claims
        for task in claims.tasks.values():
            for queue in task.queues.values():
                for ask in list(queue.asks.values()):
                    claims.withdraw(ask)
        self.desk.passes(10.0)
        assert not any(claims.holders.of(client) for client in CLIENTS)
        self.desk.clear([row.key for row in self.desk.partition.slots])
        for task in claims.tasks.values():
            assert not task.held
            assert not task.offered
            assert len(task.committed) == 0
            assert all(len(queue.ready) == 0 for queue in task.queues.values())


def test_claims_equal_the_model() -> None:
    ClaimSteps.steps = 0
    run_state_machine_as_test(
        ClaimSteps,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=EXAMPLE_STEPS,
            deadline=None,
            derandomize="CI" in os.environ,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(ClaimSteps.steps, "steps")
