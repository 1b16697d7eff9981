"""For each guard of the plane a mutant without it, which the checker finds.

The clients are those of test_interleavings.py; only what they do most is chosen so that few
interleavings are enough. Rules are those of checker.py.

    mutant                                      guard                   rules
    late_puts_are_not_judged                    puts._check_stale       late
    rows_put_again_are_not_judged               Row.cleared_at          late
    clears_leave_no_trace                       Tombstone.revision      late
    history_has_no_floor                        History.floor           late
    reservations_have_no_stamp                  LocalTags.begin         late
    heads_have_no_stamp                         LocalTags.begun         late
    repeats_are_judged_from_now                 PutMeta.seen            late
    must_exist_is_not_checked                   puts._check_exist       condition
    if_absent_is_not_checked                    puts._check_absent      condition
    puts_are_made_row_by_row                    Putting._apply          order,read
    refused_puts_leave_their_first_row          TagStore.check_put      order,read
    clears_are_made_row_by_row                  TagStore.apply_clear    order,read
    answers_of_put_are_not_remembered           Repeats.remember        order,read
    answers_of_clear_are_not_remembered         Repeats.remember        order,effect,read
    answers_of_begin_group_are_not_remembered   Repeats.remember        order,read
    answers_of_end_group_are_not_remembered     Repeats.remember        order,read,refusal
    answers_of_claim_release_are_not_remembered Repeats.remember        loss,holding
    pins_of_what_is_gone_are_granted            Pinned.gone             read
    pinned_blocks_are_freed                     BlockTable.pin          read
    gets_start_again_with_some_rows             get_batch               read
    ended_attempts_stay_open                    TagStore.apply_end      attempt,effect
    older_attempts_stay_open                    TagStore.apply_begin    attempt,effect
    retired_attempts_stay_open                  TagStore._groups_of     attempt,effect
    rows_of_older_attempts_stay                 Group.positions         read,effect,condition,order
    rows_are_offered_without_their_fields       Condition.fields        offer
    groups_are_whole_while_they_run             Group.status            offer
    rows_are_offered_youngest_first             Order.key               offer
    claims_hold_nothing_in_other_queues         Queue.withhold          holding,commit,offer
    held_rows_that_change_are_offered           Task.has                holding,commit,offer
    committed_rows_that_change_are_offered      Task.has                commit
    commits_only_let_go                         Task.commit             commit
    clears_do_not_tell_claims                   Claims.cleared          commit
    lost_rows_are_committed                     Lease.chosen            commit
    lost_claims_are_committed                   Task.find               commit
    repeated_claims_get_other_rows              Claims.granted          offer,starving
    claims_given_up_are_kept                    Claiming.give_up        starving
    leases_begin_before_their_clients_leave     LeaseClock.at           holding,commit,loss
    leases_of_the_dead_do_not_end               Claiming.detached       starving
    leases_end_with_the_connection              Lease.expires_at        holding,commit,loss
    leases_end_though_the_client_is_back        Holders.attached        holding,commit,loss
    rows_of_ended_leases_are_forgotten          Task.give_back          starving
    the_end_is_told_while_rows_may_return       Claims._may_return      starving
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dataplane.client.get import get_batch
from dataplane.client.results import Rows
from dataplane.errors import ClaimLost, RequestError
from dataplane.server import putting
from dataplane.server.claiming import Claiming
from dataplane.server.ports import LocalTags
from dataplane.server.putting import Putting
from dataplane.server.repeats import Repeats
from dataplane.tags import puts
from dataplane.tags.claims import wants
from dataplane.tags.claims.claims import Claims
from dataplane.tags.claims.leases import Holders, Lease, LeaseClock
from dataplane.tags.claims.queues import Order, Queue
from dataplane.tags.claims.tasks import Task
from dataplane.tags.groups import RUNNING
from dataplane.tags.partition import Partition
from dataplane.tags.rows import Row, Tombstone
from dataplane.tags.store import TagStore
from dataplane.tags.views import view
from dataplane.values.blocks import BlockTable, Pinned
from tests.faults import planes
from tests.history import calls
from tests.history.calls import Mix
from tests.history.checker import check
from tests.history.words import Illegal
from tests.history.workload import SETTINGS, interleave

Patch = pytest.MonkeyPatch


# -- puts and clears -------------------------------------------------------------------------


def late_puts_are_not_judged(patch: Patch) -> None:
    patch.setattr(puts, "_check_stale", _nothing)


def rows_put_again_are_not_judged(patch: Patch) -> None:
    whole = puts._check_stale  # pyright: ignore[reportPrivateUsage]

    def judge(self: Partition, keys: Sequence[str], slots: Sequence[Any], stamp: int) -> None:
        whole(self, keys, [None if type(slot) is Row else slot for slot in slots], stamp)

    patch.setattr(puts, "_check_stale", judge)


def clears_leave_no_trace(patch: Patch) -> None:
    def forget(self: Tombstone, revision: int) -> None:
        self.revision = 0

    patch.setattr(Tombstone, "__init__", forget)


def history_has_no_floor(patch: Patch) -> None:
    whole = Partition.check_put

    def check_put(self: Partition, put: Any, floor: int) -> Any:
        return whole(self, put, 0)

    patch.setattr(Partition, "check_put", check_put)


def reservations_have_no_stamp(patch: Patch) -> None:
    def begin(self: LocalTags, done: Callable[..., None]) -> None:
        done(None, None)

    patch.setattr(LocalTags, "begin", begin)


def heads_have_no_stamp(patch: Patch) -> None:
    patch.setattr(LocalTags, "begun", _nothing)


def repeats_are_judged_from_now(patch: Patch) -> None:
    patch.setattr(putting, "RETRY", 0)


def must_exist_is_not_checked(patch: Patch) -> None:
    patch.setattr(puts, "_check_exist", _nothing)


def if_absent_is_not_checked(patch: Patch) -> None:
    patch.setattr(puts, "_check_absent", _nothing)


def puts_are_made_row_by_row(patch: Patch) -> None:
    """Of tags alone: their rows can be told apart."""
    whole = Putting._apply  # pyright: ignore[reportPrivateUsage]

    def apply(self: Putting, meta: Any, put: Any, *more: Any) -> Any:
        if put.placement is None and len(put.keys) > 1:
            first = put._replace(keys=put.keys[:1], tags=put.tags[:1], tag_sizes=put.tag_sizes[:1])
            whole(self, meta, first, *more)
        return whole(self, meta, put, *more)

    patch.setattr(Putting, "_apply", apply)


def refused_puts_leave_their_first_row(patch: Patch) -> None:
    whole = Putting._apply  # pyright: ignore[reportPrivateUsage]

    def apply(self: Putting, meta: Any, put: Any, *more: Any) -> Any:
        try:
            return whole(self, meta, put, *more)
        except RequestError:
            if put.placement is None and put.must_exist:
                half = put._replace(
                    keys=put.keys[:1], tags=put.tags[:1], tag_sizes=put.tag_sizes[:1],
                    must_exist=False,
                )  # fmt: skip
                whole(self, meta, half, *more)
            raise

    patch.setattr(Putting, "_apply", apply)


def clears_are_made_row_by_row(patch: Patch) -> None:
    whole = TagStore.apply_clear

    def clear(
        self: TagStore, partition_id: str, keys: Sequence[str], now: float, **how: Any
    ) -> int:
        return sum(whole(self, partition_id, [key], now, **how) for key in keys)

    patch.setattr(TagStore, "apply_clear", clear)


def answers_are_not_remembered(verb: str) -> Callable[[Patch], None]:
    def without(patch: Patch) -> None:
        whole = Repeats.remember

        def remember(self: Repeats, client: str, number: int, of: str, *more: Any) -> None:
            if of != verb:
                whole(self, client, number, of, *more)

        patch.setattr(Repeats, "remember", remember)

    return without


# -- gets ------------------------------------------------------------------------------------


def pins_of_what_is_gone_are_granted(patch: Patch) -> None:
    whole = BlockTable.pin

    def pin(self: BlockTable, blocks: Any, owner: Any) -> Pinned:
        wanted = list(blocks)
        gone = whole(self, wanted, owner).gone
        return whole(self, [block for block in wanted if block not in gone], owner)

    patch.setattr(BlockTable, "pin", pin)


def pinned_blocks_are_freed(patch: Patch) -> None:
    def pin(self: BlockTable, blocks: Any, owner: Any) -> Pinned:
        return Pinned(0, [block for block in blocks if block not in self._blocks])  # pyright: ignore[reportPrivateUsage]

    patch.setattr(BlockTable, "pin", pin)


def gets_start_again_with_some_rows(patch: Patch) -> None:
    """What a get found is kept, and only one of its rows looked for again."""

    def get(core: Any, keys: list[str], *more: Any) -> Generator[Any, Any, Rows]:
        rows = yield from get_batch(core, keys, *more)
        if len(rows) > 1 and rows.fields:
            again = yield from get_batch(core, rows.keys[:1], more[0], list(rows.fields), *more[2:])
            for name, column in again.fields.items():
                rows.fields[name][: len(again)] = column
        return rows

    patch.setattr(calls, "get_batch", get)


# -- groups ----------------------------------------------------------------------------------


def ended_attempts_stay_open(patch: Patch) -> None:
    whole = TagStore.apply_end

    def end(self: TagStore, group: Any, *more: Any) -> int:
        n = whole(self, group, *more)
        _reopen(self, group)
        return n

    patch.setattr(TagStore, "apply_end", end)


def older_attempts_stay_open(patch: Patch) -> None:
    whole = TagStore.apply_begin

    def begin(self: TagStore, prompt: Any, found: Any, group: Any, now: float) -> int:
        partition = self.partitions.get(group.partition_id)
        older = partition.groups.get(group.uid) if partition else None
        n = whole(self, prompt, found, group, now)
        if older is not None:
            _reopen(self, older)
        return n

    patch.setattr(TagStore, "apply_begin", begin)


def _reopen(store: TagStore, group: Any) -> None:
    group.open = True
    store.attempts[group.attempt] = group


def retired_attempts_stay_open(patch: Patch) -> None:
    def groups_of(self: TagStore, *_: Any) -> list[Any]:
        return []

    patch.setattr(TagStore, "_groups_of", groups_of)


def rows_of_older_attempts_stay(patch: Patch) -> None:
    whole = TagStore.apply_begin

    def begin(self: TagStore, prompt: Any, found: Any, group: Any, now: float) -> int:
        partition = self.partitions.get(group.partition_id)
        older = partition.groups.get(group.uid) if partition else None
        if older is not None:
            older.positions.clear()
        return whole(self, prompt, found, group, now)

    patch.setattr(TagStore, "apply_begin", begin)


# -- claims ----------------------------------------------------------------------------------


def rows_are_offered_without_their_fields(patch: Patch) -> None:
    whole = wants.condition_of

    def condition_of(predicate: Any, fields: Any, *, grouped: bool) -> Any:
        return whole(predicate, frozenset(), grouped=grouped)

    patch.setattr(wants, "condition_of", condition_of)


def groups_are_whole_while_they_run(patch: Patch) -> None:
    patch.setattr(view, "FINISHED", RUNNING)


def rows_are_offered_youngest_first(patch: Patch) -> None:
    def key(self: Order, row: Row) -> Any:
        return (-row.revision,)

    patch.setattr(Order, "key", key)


def claims_hold_nothing_in_other_queues(patch: Patch) -> None:
    patch.setattr(Queue, "withhold", _nothing)


def held_rows_that_change_are_offered(patch: Patch) -> None:
    def has(self: Task, position: int) -> bool:
        return position in self.committed

    patch.setattr(Task, "has", has)


def committed_rows_that_change_are_offered(patch: Patch) -> None:
    def has(self: Task, position: int) -> bool:
        return position in self.held

    patch.setattr(Task, "has", has)


def commits_only_let_go(patch: Patch) -> None:
    whole = Task.give_back

    def commit(self: Task, lease: Lease, keys: Any) -> None:
        whole(self, lease, list(keys))

    patch.setattr(Task, "commit", commit)


def clears_do_not_tell_claims(patch: Patch) -> None:
    patch.setattr(Claims, "cleared", _nothing)


def lost_rows_are_committed(patch: Patch) -> None:
    whole = Lease.chosen

    def chosen(self: Lease, keys: Any, *more: Any, **how: Any) -> list[str]:
        return whole(self, [key for key in keys if key not in self.lost], *more, **how)

    patch.setattr(Lease, "chosen", chosen)


def lost_claims_are_committed(patch: Patch) -> None:
    whole = Claims.commit

    def commit(self: Claims, partition: Partition, *more: Any) -> int:
        try:
            return whole(self, partition, *more)
        except ClaimLost as error:
            if error.keys:
                raise
            return partition.revision

    patch.setattr(Claims, "commit", commit)


def repeated_claims_get_other_rows(patch: Patch) -> None:
    patch.setattr(Claims, "granted", _nothing)


def claims_given_up_are_kept(patch: Patch) -> None:
    patch.setattr(Claiming, "give_up", _nothing)


def leases_begin_before_their_clients_leave(patch: Patch) -> None:
    """At the last tick of the clock."""

    def at(self: LeaseClock, time_s: float) -> float:
        return self.now

    patch.setattr(LeaseClock, "at", at)


def leases_of_the_dead_do_not_end(patch: Patch) -> None:
    patch.setattr(Claiming, "detached", _nothing)


def leases_end_with_the_connection(patch: Patch) -> None:
    def expires_at(self: Lease, away: Any) -> float:
        return 0.0

    patch.setattr(Lease, "expires_at", expires_at)


def leases_end_though_the_client_is_back(patch: Patch) -> None:
    patch.setattr(Holders, "attached", _nothing)


def rows_of_ended_leases_are_forgotten(patch: Patch) -> None:
    def give_back(self: Task, lease: Lease, keys: Any, **_: Any) -> None:
        for key in keys:
            del self.held[lease.rows.pop(key)]
            lease.lost[key] = "released"

    patch.setattr(Task, "give_back", give_back)


def the_end_is_told_while_rows_may_return(patch: Patch) -> None:
    patch.setattr(Claims, "_may_return", _no)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no(*_: Any, **__: Any) -> bool:
    return False


# -- the table -------------------------------------------------------------------------------

PUTS = Mix(claim=0, settle=0, begin=0, end=0, attempt=0.0)
LATE = PUTS._replace(large=0.8, clear=6)
CUTS = PUTS._replace(cut=0.2)
READS = Mix(claim=0, settle=0, put=6, clear=3, get=8, large=0.6, remote=0.0)
GROUPS = Mix(claim=0, settle=0, begin=4, end=3, attempt=0.7)
CLAIMS = Mix(claim=6, settle=6, put=5, clear=1, get=1, list=0, cut=0.02, drain_s=2.0)
LOSSES = CLAIMS._replace(clear=4)
DEATHS = CLAIMS._replace(die=0.04, lease_s=0.1)
WAITS = CLAIMS._replace(lease_s=0.1, wait_s=0.2, patient=0.0)
RETURNS = WAITS._replace(leave=0.6, claim=10, clear=0, cut=0.0, several=0.2, release=0.0)


MOST = 300
"""Interleavings within which each mutant is to be found."""


class Mutant(NamedTuple):
    """A plane without one of its guards."""

    guard: Callable[[Patch], None]
    rules: str
    """By which it may be found."""
    mix: Mix
    clients: int = 3
    calls: int = 16
    name: str = ""
    history: int = 1_000_000
    """Changes that the plane remembers."""


def unremembered(verb: str, rules: str, mix: Mix) -> Mutant:
    guard = answers_are_not_remembered(verb)
    return Mutant(guard, rules, mix, name=f"answers_of_{verb}_are_not_remembered")


MUTANTS = [
    Mutant(late_puts_are_not_judged, "late", LATE),
    Mutant(rows_put_again_are_not_judged, "late", LATE._replace(put=12), clients=5, calls=60),
    Mutant(clears_leave_no_trace, "late", LATE),
    Mutant(history_has_no_floor, "late", LATE._replace(put=10), calls=40, history=4),
    Mutant(reservations_have_no_stamp, "late", LATE),
    Mutant(heads_have_no_stamp, "late", LATE._replace(large=0.0, split=0.6)),
    Mutant(repeats_are_judged_from_now, "late", CUTS),
    Mutant(must_exist_is_not_checked, "condition", PUTS._replace(exact=0.6)),
    Mutant(if_absent_is_not_checked, "condition", PUTS._replace(exact=0.6)),
    Mutant(puts_are_made_row_by_row, "order read", PUTS),
    Mutant(refused_puts_leave_their_first_row, "order read", PUTS._replace(exact=0.6)),
    Mutant(clears_are_made_row_by_row, "order read", PUTS),
    unremembered("put", "order read", CUTS),
    unremembered("clear", "order effect read", CUTS),
    unremembered("begin_group", "order read", GROUPS._replace(cut=0.2)),
    unremembered("end_group", "order read refusal", GROUPS._replace(cut=0.2)),
    unremembered(
        "claim_release", "loss holding", CLAIMS._replace(several=1, partly=1, release=1, cut=0.2)
    ),
    Mutant(pins_of_what_is_gone_are_granted, "read", READS, clients=6, calls=60),
    Mutant(pinned_blocks_are_freed, "read", READS, clients=8, calls=100),
    Mutant(gets_start_again_with_some_rows, "read", READS),
    Mutant(ended_attempts_stay_open, "attempt effect", GROUPS),
    Mutant(older_attempts_stay_open, "attempt effect", GROUPS),
    Mutant(retired_attempts_stay_open, "attempt effect", GROUPS._replace(clear=8)),
    Mutant(rows_of_older_attempts_stay, "read effect condition order", GROUPS),
    Mutant(rows_are_offered_without_their_fields, "offer", CLAIMS),
    Mutant(groups_are_whole_while_they_run, "offer", GROUPS._replace(claim=8, grouped=1.0)),
    Mutant(rows_are_offered_youngest_first, "offer", CLAIMS),
    Mutant(claims_hold_nothing_in_other_queues, "holding commit offer", CLAIMS),
    Mutant(held_rows_that_change_are_offered, "holding commit offer", CLAIMS),
    Mutant(committed_rows_that_change_are_offered, "commit", CLAIMS),
    Mutant(commits_only_let_go, "commit", CLAIMS),
    Mutant(clears_do_not_tell_claims, "commit", LOSSES),
    Mutant(lost_rows_are_committed, "commit", LOSSES),
    Mutant(lost_claims_are_committed, "commit", RETURNS),
    Mutant(repeated_claims_get_other_rows, "offer starving", CLAIMS._replace(cut=0.2)),
    Mutant(claims_given_up_are_kept, "starving", CLAIMS._replace(cut=0.3)),
    Mutant(leases_begin_before_their_clients_leave, "holding commit loss", DEATHS),
    Mutant(leases_of_the_dead_do_not_end, "starving", DEATHS),
    Mutant(leases_end_with_the_connection, "holding commit loss", CLAIMS._replace(leave=0.2)),
    Mutant(leases_end_though_the_client_is_back, "holding commit loss", WAITS._replace(cut=0.25)),
    Mutant(rows_of_ended_leases_are_forgotten, "starving", DEATHS),
    Mutant(the_end_is_told_while_rows_may_return, "starving", DEATHS),
]


def name_of(mutant: Mutant) -> str:
    return mutant.name or mutant.guard.__name__


def run(
    mutant: Mutant, roots: dict[str, Path], pool: ThreadPoolExecutor, most: int
) -> tuple[int, Illegal | None]:
    """How many interleavings were made, and what was found; at most so many."""
    settings = {**SETTINGS, **roots, "history_changes": mutant.history}
    with planes.in_thread("mutant", **settings) as plane:
        for seed in range(most):
            history = interleave(
                plane, pool, seed, mutant.mix, clients=mutant.clients, calls=mutant.calls
            )
            found = check(history)
            if found is not None:
                return seed + 1, found
    return most, None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_without_a_guard_some_history_is_not_legal(
    mutant: Mutant,
    monkeypatch: pytest.MonkeyPatch,
    roots: dict[str, Path],
    pool: ThreadPoolExecutor,
) -> None:
    mutant.guard(monkeypatch)
    tried, found = run(mutant, roots, pool, MOST)
    print(f"{tried} interleavings: {found}")
    assert found is not None
    assert found.rule in mutant.rules.split(), found


def settings_of(mutant: Mutant) -> tuple[Any, ...]:
    return mutant.mix, mutant.clients, mutant.calls, mutant.history


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", {settings_of(m): m for m in MUTANTS}.values(), ids=name_of)
def test_with_all_guards_the_same_clients_are_told_what_is_legal(
    mutant: Mutant, roots: dict[str, Path], pool: ThreadPoolExecutor
) -> None:
    # Nothing has to be waited for in vain here, so there is time for a machine that is busy.
    whole = mutant._replace(mix=mutant.mix._replace(drain_s=10.0))
    assert run(whole, roots, pool, 10) == (10, None)


def test_the_table_names_every_mutant() -> None:
    assert __doc__ is not None
    rows = [line.split() for line in __doc__.splitlines() if line.startswith("    ")][1:]
    assert {row[0]: row[2] for row in rows} == {
        name_of(mutant): mutant.rules.replace(" ", ",") for mutant in MUTANTS
    }
