"""Batches by rank over random interleavings: replicas agree, nothing is in two shares at once."""

from __future__ import annotations

import os
from typing import ClassVar

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

from dataplane.errors import ClaimLost
from dataplane.tags.claims.leases import Granted
from dataplane.tags.rows import Row
from tests.dataplane.claimers import Asked, Desk

EXAMPLES = 80
EXAMPLE_STEPS = 60

COUNT, RANKS = 4, 2
LEASE_S = 5.0
REPLICAS = {"0a": 0, "0b": 0, "1a": 1, "1b": 1}
"""Clients and their ranks."""

replicas = st.sampled_from(sorted(REPLICAS))
picks = st.integers(0, 1000)


class RankSteps(RuleBasedStateMachine):
    answers: ClassVar[int] = 0
    redrawn: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.made = 0
        self.waiting: dict[str, tuple[int, Asked]] = {}
        self.next_index = dict.fromkeys(REPLICAS, 0)
        self.shares: dict[tuple[int, int], Granted] = {}
        """The latest answer for each batch and rank."""
        self.given: list[Asked] = []
        self.committed: set[int] = set()
        self.drawn: set[int] = set()

    # -- what was answered -------------------------------------------------------------------

    def changed(self) -> None:
        for client, (index, asked) in list(self.waiting.items()):
            if asked.answer is not None:
                del self.waiting[client]
                self.answered(client, index, asked)
        self.look_at_draws()

    def answered(self, client: str, index: int, asked: Asked) -> None:
        type(self).answers += 1
        rank = REPLICAS[client]
        before, now = self.shares.get((index, rank)), asked.granted
        if before is not None and now.claim_id == before.claim_id:
            assert now == before
        elif before is not None:
            type(self).redrawn += 1
            # The share had been lost, and only what was in it can be in it.
            with pytest.raises(ClaimLost):
                self.desk.commit(asked_of(before))
            assert set(now.positions) <= set(before.positions)
            assert self.committed.isdisjoint(now.positions)
        self.shares[index, rank] = now
        self.given.append(asked)
        if self.next_index[client] == index:
            self.next_index[client] += 1

    def look_at_draws(self) -> None:
        task = self.desk.partition.claims.tasks.get("t")
        for index, batch in ({} if task is None else task.batches).items():
            if batch.shares is None or index in self.drawn:
                continue
            self.drawn.add(index)
            rows = [of.granted.rows for of in batch.shares]
            assert [len(share) for share in rows] == [COUNT // RANKS] * RANKS
            tokens = [sum(int(str(row.tags["seq_len"])) for row in share) for share in rows]
            largest = max(int(str(row.tags["seq_len"])) for share in rows for row in share)
            assert abs(tokens[0] - tokens[1]) <= largest
            positions = [p for of in batch.shares for p in of.granted.positions]
            assert len(set(positions)) == COUNT
            assert self.committed.isdisjoint(positions)

    # -- steps -------------------------------------------------------------------------------

    @rule(each=st.lists(st.integers(0, 9), min_size=3, max_size=8))
    def put(self, each: list[int]) -> None:
        keys = [f"k{self.made + i}" for i in range(len(each))]
        self.made += len(each)
        self.desk.put(keys, [{"seq_len": tokens} for tokens in each])
        self.changed()

    @precondition(lambda self: len(self.waiting) < len(REPLICAS))
    @rule(pick=picks, back=st.sampled_from([0, 0, 0, 1, 2]))
    def ask(self, pick: int, back: int) -> None:
        idle = sorted(REPLICAS.keys() - self.waiting.keys())
        client = idle[pick % len(idle)]
        index = max(0, self.next_index[client] - back)
        replica = (REPLICAS[client], RANKS, index)
        gone = self.cleared(self.shares.get((index, REPLICAS[client])))
        try:
            asked = self.desk.claim(COUNT, client=client, replica=replica, lease_s=LEASE_S)
        except ClaimLost as error:
            named = error.keys
        else:
            named = []
            self.waiting[client] = index, asked
        assert named in ([], gone)
        self.changed()

    def cleared(self, granted: Granted | None) -> list[str]:
        if granted is None:
            return []
        at = self.desk.partition.slots.at
        rows = zip(granted.rows, granted.positions, strict=True)
        return [row.key for row, position in rows if type(at(position)) is not Row]

    @precondition(lambda self: len(self.waiting) == len(REPLICAS))
    @rule(pick=picks)
    def give_up_waiting(self, pick: int) -> None:
        client = sorted(self.waiting)[pick % len(self.waiting)]
        _, asked = self.waiting.pop(client)
        self.desk.leave(asked)
        self.changed()

    @precondition(lambda self: self.given)
    @rule(pick=picks, commit=st.sampled_from([True, True, False]))
    def finish(self, pick: int, commit: bool) -> None:
        asked = self.given.pop(pick % len(self.given))
        end = self.desk.commit if commit else self.desk.release
        keys = [row.key for row in asked.granted.rows]
        held = set(self.desk.partition.claims.tasks["t"].held)
        try:
            end(asked, keys)
        except ClaimLost:
            self.changed()
            return
        positions = set(asked.granted.positions)
        if commit and positions & held:
            assert positions <= held
            assert self.committed.isdisjoint(positions)
            self.committed |= positions
        elif commit:
            # Another holder had done it, and some may have been cleared since.
            gone = self.cleared(asked.granted)
            left = [row.key not in gone for row in asked.granted.rows]
            there = {
                p for p, is_there in zip(asked.granted.positions, left, strict=True) if is_there
            }
            assert there <= self.committed
        self.changed()

    @precondition(lambda self: self.given)
    @rule(pick=picks)
    def leaves(self, pick: int) -> None:
        self.desk.leaves(self.given[pick % len(self.given)].client_id)

    @precondition(lambda self: self.desk.ledger.away)
    @rule(client=replicas)
    def returns(self, client: str) -> None:
        self.desk.returns(client)

    @precondition(lambda self: self.desk.ledger.away)
    @rule(seconds=st.sampled_from([2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.desk.passes(seconds)
        self.changed()

    @precondition(lambda self: self.made)
    @rule(pick=picks)
    def clear(self, pick: int) -> None:
        key = f"k{pick % self.made}"
        position = self.desk.partition.index.get(key)
        self.desk.clear(key)
        if position is not None:
            self.committed.discard(position)
        self.changed()

    @rule(really=st.sampled_from([False, False, False, True]))
    def somebody_else_takes_a_row(self, really: bool) -> None:
        if not really:
            return
        asked = self.desk.claim(1, client="x")
        if asked.answer is None:
            self.desk.leave(asked)
        else:
            self.desk.commit(asked)
            self.committed |= set(asked.granted.positions)
        self.changed()

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        self.desk.check()
        task = self.desk.partition.claims.tasks.get("t")
        if task is not None:
            assert set(task.committed) == self.committed
            for batch in task.batches.values():
                for of in batch.shares or ():
                    lease = task.leases.get(of.granted.claim_id)
                    assert lease is None or lease.holders

    def teardown(self) -> None:
        for client in REPLICAS:
            self.desk.returns(client)
            self.desk.leaves(client)
        for _, asked in self.waiting.values():
            if asked.answer is None:
                self.desk.leave(asked)
        self.desk.passes(LEASE_S)
        task = self.desk.partition.claims.tasks.get("t")
        if task is not None:
            assert not task.held
            assert not self.desk.partition.claims.holders.away


def asked_of(granted: Granted) -> Asked:
    asked = Asked("?")
    asked.answer = granted
    return asked


def test_replicas_agree_and_rows_are_in_one_share() -> None:
    RankSteps.answers = RankSteps.redrawn = 0
    run_state_machine_as_test(
        RankSteps,
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
    print(RankSteps.answers, "answers,", RankSteps.redrawn, "drawn again")
