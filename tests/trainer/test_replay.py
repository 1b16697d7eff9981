"""Eviction and refill as pure decisions over snapshots: tables, worked polls, then simulations."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.fields import LOST_ROWS
from tests.trainer.rows import failed, lost, prompt, row
from trainer.errors import PlanError
from trainer.select import (
    Decision,
    Group,
    ReplayPolicy,
    ReplayState,
    Row,
    decide,
    filtered_values,
    group_rows,
    replay_metrics,
    sampleable_count,
)

ASYNC = ReplayPolicy(mode="async", max_span=8, drop_identical=True)
SYNC = ReplayPolicy(train_batch_size=4, drop_identical=True)


def group(uid: str, *scores: float, status: str = "finished", step: int | None = 5) -> Group:
    """A group of one session a score."""
    rows = [prompt(uid, status, step, n=len(scores) or 2)]
    rows += [row(uid, i, score=score) for i, score in enumerate(scores)]
    (made,) = group_rows(rows)
    return made


def good(uid: str, step: int | None = 5) -> Group:
    return group(uid, 1.0, 0.0, step=step)


def flat(uid: str, score: float = 1.0, step: int | None = 5) -> Group:
    return group(uid, score, score, step=step)


def broken(uid: str, *scores: float, step: int = 5) -> Group:
    return group(uid, *scores, status="failure", step=step)


def torn(uid: str, step: int | None = 5) -> Group:
    """A group of two sessions of which one was lost."""
    rows = [prompt(uid, "finished", step, **{LOST_ROWS: 1}), row(uid, 0), lost(uid, 1, score=1.0)]
    (made,) = group_rows(rows)
    return made


def running(uid: str, step: int | None = 5, status: str = "running") -> Group:
    return group(uid, status=status, step=step)


def uids(groups: Any) -> list[str]:
    return [g.uid for g in groups]


def gone(decision: Decision) -> list[str]:
    return [eviction.group.uid for eviction in decision.evicted]


# -- the matrix --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind", "evicted", "refill"),
    [
        (ReplayPolicy(), "stale", False, 0),
        (ReplayPolicy(), "identical", False, 0),
        (ReplayPolicy(), "failure", False, 0),
        (SYNC, "identical", True, 2),
        (ReplayPolicy(failed="refill_empty"), "failure", False, 0),
        (ReplayPolicy(failed="refill_empty"), "empty failure", True, 1),
        (ReplayPolicy(failed="refill_empty"), "empty", True, 1),
        (ReplayPolicy(failed="refill"), "failure", True, 1),
        (ReplayPolicy(failed="refill"), "empty", True, 1),
        (ASYNC, "stale", True, 1),
        (ASYNC, "identical", True, 1),
        (ASYNC, "failure", True, 1),
        (ASYNC, "empty failure", True, 1),
        (ASYNC, "empty", True, 1),
        (replace(ASYNC, max_span=None), "stale", False, 0),
        (replace(ASYNC, on_stale="wait"), "stale", False, 0),
        (replace(ASYNC, drop_identical=False), "identical", False, 0),
        (ReplayPolicy(mode="val", drop_identical=True, failed="refill"), "identical", False, 0),
        (ReplayPolicy(mode="val", failed="refill"), "failure", False, 0),
    ],
)
def test_the_matrix_of_eviction_and_refill(
    policy: ReplayPolicy, kind: str, evicted: bool, refill: int
) -> None:
    odd = {
        "stale": good("odd", step=1),
        "identical": flat("odd"),
        "failure": broken("odd", 1.0),
        "empty failure": broken("odd"),
        "empty": group("odd"),
    }[kind]
    others = [good(f"g{i}", step=10) for i in range(2)]
    decision = decide([odd, *others], policy, step=10, batch_size=4)
    assert gone(decision) == ["odd"] * evicted
    assert decision.refill == refill
    assert decision.selected == ()
    assert decision.clear_keys == (odd.all_keys if evicted else [])
    assert sampleable_count([odd, *others], policy, step=10) == 3 - evicted


LOSING = [
    ReplayPolicy(),
    SYNC,
    ASYNC,
    ReplayPolicy(failed="keep"),
    ReplayPolicy(failed="refill_empty"),
    ReplayPolicy(incomplete="strict"),
    ReplayPolicy(incomplete="drop"),
]


@pytest.mark.parametrize("policy", LOSING, ids=str)
def test_a_group_that_lost_trajectories_is_cleared_whole_and_replaced(policy: ReplayPolicy) -> None:
    odd = torn("odd", step=10)
    others = [good(f"g{i}", step=10) for i in range(2)]
    decision = decide([odd, *others], policy, step=10, batch_size=4)
    assert gone(decision) == ["odd"]
    assert decision.clear_keys == ["odd", "odd_0_0", "odd_1_0"]
    assert (decision.refill, decision.state.dropped) == (1, 0)
    assert sampleable_count([odd, *others], policy, step=10) == 2
    counts = replay_metrics([decision])
    assert counts["training/rollout_failure/evicted_samples"] == 1
    assert counts["training/rollout_lost/evicted_samples"] == 1


def test_a_group_whose_lost_rows_were_cleared_since_is_lost_still() -> None:
    (made,) = group_rows([prompt("u", n=2, **{LOST_ROWS: 1}), row("u", 0)])
    assert gone(decide([made], ReplayPolicy(), step=1, batch_size=1)) == ["u"]


def test_a_group_that_is_lost_while_it_runs_is_judged_when_it_has_ended() -> None:
    (made,) = group_rows([prompt("u", "running", **{LOST_ROWS: 1}), lost("u", 0)])
    decision = decide([made], ReplayPolicy(), step=1, batch_size=1)
    assert (gone(decision), decision.starved) == ([], False)


@pytest.mark.parametrize(
    ("policy", "selected", "evicted", "dropped"),
    [
        (ReplayPolicy(), ["a", "odd"], [], 0),
        (ReplayPolicy(mode="val"), ["a", "odd"], [], 0),
        (ReplayPolicy(incomplete="drop"), ["a"], ["odd"], 1),
    ],
)
def test_where_nothing_can_be_submitted_a_lost_session_is_one_that_is_missing(
    policy: ReplayPolicy, selected: list[str], evicted: list[str], dropped: int
) -> None:
    groups = [good("a"), torn("odd")]
    decision = decide(groups, policy, step=5, batch_size=2, replaces_lost=False)
    assert gone(decision) == evicted
    assert (uids(decision.selected), decision.refill) == (selected, 0)
    assert sampleable_count(groups, policy, step=5, replaces_lost=False) == 2 - dropped
    with pytest.raises(PlanError, match="odd 1 of 2"):
        strict = ReplayPolicy(incomplete="strict")
        decide(groups, strict, step=5, batch_size=2, replaces_lost=False)


def test_omni_358_an_evicted_group_takes_its_leftovers_along() -> None:
    leftover = broken("b", 1.0)
    decision = decide([good("a"), leftover], ReplayPolicy(failed="refill"), step=6, batch_size=2)
    assert decision.clear_keys == ["b", "b_0_0"]
    assert (decision.refill, decision.poll_again) == (1, True)


def test_a_failed_group_that_is_old_too_counts_as_failed() -> None:
    decision = decide([broken("u", 1.0, step=1)], ASYNC, step=10, batch_size=1)
    (eviction,) = decision.evicted
    assert (eviction.reasons, eviction.span, decision.refill) == ({"failure"}, None, 1)


@pytest.mark.parametrize("step", [10, 11])
def test_v6_the_span_that_is_dropped_is_beyond_the_threshold(step: int) -> None:
    decision = decide([good("u", step=3)], ASYNC, step=step, batch_size=1)
    assert gone(decision) == (["u"] if step == 11 else [])
    assert uids(decision.selected) == ([] if step == 11 else ["u"])


@pytest.mark.parametrize(("step", "blocks"), [(9, False), (10, True)])
def test_v6_waiting_for_what_is_in_flight_begins_at_the_threshold(step: int, blocks: bool) -> None:
    policy = ReplayPolicy(mode="async", max_span=8, on_stale="wait")
    groups = [good("a", step=9), running("old", step=3), running("unknown", step=None)]
    decision = decide(groups, policy, step=step, batch_size=1)
    assert uids(decision.selected) == ([] if blocks else ["a"])
    assert not decision.evicted
    assert decision.reason == ("1 prompts in flight are as old as allowed: old" if blocks else "")


def test_a_group_of_unknown_age_is_fresh_and_goes_last() -> None:
    groups = [good("x", step=None), good("b", step=7), good("a", step=6), good("c", step=7)]
    decision = decide(groups, replace(ASYNC, max_span=2), step=8, batch_size=2)
    assert gone(decision) == ["a"]
    decision = decide(groups[:2] + groups[3:], replace(ASYNC, max_span=2), step=8, batch_size=3)
    assert uids(decision.selected) == ["b", "c", "x"]


def test_trajectories_of_groups_that_are_not_terminal_are_ignored() -> None:
    early = group("r", 1.0, 1.0, status="running")
    waiting = group("p", 1.0, 1.0, status="pending")
    decision = decide([early, waiting], ASYNC, step=5, batch_size=1)
    assert (decision.selected, decision.evicted, decision.starved) == ((), (), False)


def test_groups_without_a_prompt_were_selected_before() -> None:
    (orphan,) = group_rows([row("u", score=1.0), row("u", 1, score=1.0)])
    decision = decide([orphan], ASYNC, step=5, batch_size=1)
    assert (decision.selected, decision.evicted, decision.starved) == ((), (), True)


def test_slime_2381_outcomes_are_counted_in_sessions_and_not_in_rows() -> None:
    """One session that left three rows is one outcome, which says nothing about the others."""
    rows = [prompt("u", n=1), *(row("u", 0, i, score=1.0) for i in range(3))]
    (alone,) = group_rows(rows)
    assert uids(decide([alone], ASYNC, step=5, batch_size=1).selected) == ["u"]
    fan = [
        prompt("u"),
        row("u", 0, 0, score=9.0),
        row("u", 0, 1, score=1.0),
        row("u", 1, score=1.0),
    ]
    (same,) = group_rows(fan)
    decision = decide([same], ASYNC, step=5, batch_size=1)
    assert gone(decision) == ["u"]
    assert filtered_values([decision]) == {1.0: 1}


def test_outcomes_that_are_missing_are_named() -> None:
    (blind,) = group_rows([prompt("u"), row("u", score=None), row("u", 1, score=1.0)])
    with pytest.raises(ValueError, match="'u_0_0' has no number as tag 'score'"):
        decide([blind], ASYNC, step=5, batch_size=1)
    other = replace(ASYNC, outcome_tag="acc")
    (found,) = group_rows([prompt("u"), *(row("u", i, acc=0.5, score=float(i)) for i in (0, 1))])
    assert filtered_values([decide([found], other, step=5, batch_size=1)]) == {0.5: 1}


def test_a_selected_group_without_a_trajectory_points_to_the_option() -> None:
    with pytest.raises(PlanError, match="u1; set failed='refill_empty'"):
        decide([broken("u1")], ReplayPolicy(), step=5, batch_size=1)


def test_val_takes_every_terminal_group_and_clears_none() -> None:
    groups = [flat("a"), broken("b"), running("c")]
    policy = ReplayPolicy(mode="val")
    decision = decide(groups, policy, step=5, batch_size=2)
    assert (uids(decision.selected), decision.clear_keys) == (["a", "b"], [])


# -- scenario 7: a group that is short of a session ------------------------------------------


def short_batch() -> list[Group]:
    rows = [prompt("A", n=4), *(row("A", i, score=float(i == 0)) for i in range(4))]
    rows += [prompt("B", n=4), *(row("B", i) for i in range(3)), failed("B", 3)]
    return group_rows(rows)


def test_scenario_7_strict_names_the_group_and_its_counts() -> None:
    with pytest.raises(PlanError, match="B 3 of 4"):
        decide(short_batch(), ReplayPolicy(incomplete="strict"), step=5, batch_size=2)


def test_scenario_7_drop_trains_the_rest() -> None:
    policy = ReplayPolicy(incomplete="drop")
    decision = decide(short_batch(), policy, step=5, batch_size=2)
    assert (gone(decision), decision.refill) == (["B"], 0)
    assert decision.clear_keys == ["B", "B_0_0", "B_1_0", "B_2_0", "B_3_0"]
    assert [key for g in decision.selected for key in g.keys] == [f"A_{i}_0" for i in range(4)]


def test_scenario_7_drop_of_everything_is_an_error() -> None:
    with pytest.raises(PlanError, match="all 1 groups of the batch were incomplete"):
        decide(short_batch()[1:], ReplayPolicy(incomplete="drop"), step=5, batch_size=1)


@pytest.mark.parametrize(
    "policy", [ReplayPolicy(incomplete="refill"), replace(ASYNC, incomplete="refill")]
)
def test_scenario_7_refill_asks_for_exactly_one(policy: ReplayPolicy) -> None:
    decision = decide(short_batch(), policy, step=5, batch_size=2)
    assert (gone(decision), decision.refill, decision.selected) == (["B"], 1, ())
    whole = [*short_batch()[:1], group("C", 1.0, 0.0, 0.0, 1.0)]
    again = decide(whole, policy, step=5, batch_size=2, state=decision.state)
    assert (uids(again.selected), again.refill) == (["A", "C"], 0)


def test_sync_that_has_enough_replaces_nothing() -> None:
    groups = [good("a"), good("b"), broken("c")]
    decision = decide(groups, ReplayPolicy(failed="refill"), step=5, batch_size=2)
    assert (uids(decision.selected), gone(decision), decision.refill) == (["a", "b"], ["c"], 0)


# -- worked polls -------------------------------------------------------------------------------


def test_v7_sync_refill() -> None:
    first = decide([good("a"), good("b"), good("c"), flat("d")], SYNC, step=5, batch_size=4)
    assert (gone(first), first.refill, first.poll_again) == (["d"], 2, True)
    assert first.state.credit == 0

    kept = [good("a"), good("b"), good("c")]
    polled = [*kept, good("e", step=6), running("f", step=6)]
    second = decide(polled, SYNC, step=5, batch_size=4, state=first.state)
    assert (second.selected, second.refill, second.state.credit) == ((), 0, 0)
    assert second.reason == "1 prompts in flight are to end first"
    assert not second.poll_again

    polled = [*kept, good("e", step=6), good("f", step=6)]
    third = decide(polled, SYNC, step=5, batch_size=4, state=second.state)
    assert uids(third.selected) == ["a", "b", "c", "e"]
    assert uids(third.surplus) == ["f"]
    assert third.clear_keys == ["f", "f_0_0", "f_1_0"]
    assert len([key for g in third.selected for key in g.keys]) == 8
    assert third.state == ReplayState()

    decisions = [first, second, third]
    assert filtered_values(decisions) == {1.0: 1}
    assert replay_metrics(decisions) == {
        "training/off_policy/evicted_samples": 0,
        "training/filter_groups/evicted_samples": 1,
        "training/filter_groups/discarded_surplus_samples": 1,
        "training/rollout_failure/evicted_samples": 0,
    }


def test_v8_async_refill() -> None:
    groups = [good("s1", step=1), flat("s2", step=1), flat("f1"), flat("f2", 0.0), broken("x", 1.0)]
    groups += [good(f"g{i}", step=5 + i) for i in range(5)]
    first = decide(groups, ASYNC, step=10, batch_size=4)
    assert sorted(gone(first)) == ["f1", "f2", "s1", "s2", "x"]
    assert (first.refill, first.selected, first.poll_again) == (5, (), True)
    assert replay_metrics([first]) == {
        "training/off_policy/evicted_samples": 2,
        "training/off_policy/evicted_samples_staleness/mean": 10.0,
        "training/off_policy/evicted_samples_staleness/max": 10,
        "training/off_policy/evicted_samples_staleness/min": 10,
        "training/filter_groups/evicted_samples": 3,
        "training/filter_groups/discarded_surplus_samples": 0,
        "training/rollout_failure/evicted_samples": 1,
    }
    second = decide(groups[5:], ASYNC, step=10, batch_size=4, state=first.state)
    assert [len(g.keys) for g in second.selected] == [2, 2, 2, 2]
    assert uids(second.selected) == ["g0", "g1", "g2", "g3"]
    left = [g for g in groups[5:] if g not in second.selected]
    assert sampleable_count(left, ASYNC, step=10) == 1


def test_a_batch_that_is_full_asks_for_no_more() -> None:
    groups = [good("a"), good("b"), flat("c"), running("d")]
    decision = decide(groups, SYNC, step=5, batch_size=2, state=ReplayState(credit=3))
    assert (gone(decision), decision.refill, decision.state.credit) == (["c"], 0, 0)


def test_refills_are_whole_generation_batches_within_the_room() -> None:
    policy = replace(SYNC, gen_batch_size=2)
    groups = [flat("a"), flat("b"), flat("c"), running("d")]
    first = decide(groups, policy, step=5, batch_size=4)
    assert (first.refill, first.state.credit) == (2, 4)  # 6 owed, 3 slots, twos
    second = decide([running(u) for u in "def"], policy, step=5, batch_size=4, state=first.state)
    assert (second.refill, second.state.credit) == (0, 4)


def test_with_nothing_in_flight_a_refill_is_rounded_up() -> None:
    """Rounded down, a credit of 2 and batches of 4 would wait for ever."""
    policy = replace(SYNC, gen_batch_size=4)
    decision = decide([good("a"), flat("b")], policy, step=5, batch_size=4)
    assert (decision.refill, decision.state.credit) == (4, 0)


def test_waiting_in_vain_is_said() -> None:
    decision = decide([good("a")], SYNC, step=5, batch_size=2)
    assert decision.starved
    assert decision.reason == "1 of 2 groups are there, 0 in flight"
    assert not decide([good("a"), running("b")], SYNC, step=5, batch_size=2).starved


def test_areal_450_refill_is_bounded_and_counts_are_in_the_message() -> None:
    policy = replace(SYNC, max_refill_rounds=2)
    state = None
    for _ in range(2):
        decision = decide([flat(u) for u in "abcd"], policy, step=5, batch_size=4, state=state)
        assert decision.refill == 4
        state = decision.state
    with pytest.raises(PlanError, match="replaced 2 times and 0 of 4 groups are there; 12 groups"):
        decide([flat(u) for u in "abcd"], policy, step=5, batch_size=4, state=state)


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "fast"}, "mode is one of"),
        ({"mode": "async", "on_stale": "ask"}, "on_stale is one of"),
        ({"failed": "retry"}, "failed is one of"),
        ({"incomplete": "pad"}, "incomplete is one of"),
        ({"max_span": 8}, "max_span has no meaning in mode 'sync'"),
        ({"mode": "async", "max_span": 0}, "max_span is a number from 1 on"),
        ({"mode": "async", "failed": "keep"}, "async replaces every failed group"),
        ({"mode": "async", "gen_batch_size": 2}, "gen_batch_size is 1"),
        ({"failed": "refill", "gen_batch_size": 2}, "gen_batch_size is 1"),
        ({"max_inflight_gen_batches": 0}, "max_inflight_gen_batches is a number from 1 on"),
        ({"train_batch_size": True}, "train_batch_size is a number from 1 on"),
        ({"train_batch_size": 4, "gen_batch_size": 5}, "never fits the 4 that may be in flight"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ReplayPolicy(**settings)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="1 group or more"):
        decide([], SYNC, step=5, batch_size=0)


# -- simulations --------------------------------------------------------------------------------


@dataclass
class World:
    """Producers that carry out what is decided, with outcomes drawn at random."""

    rng: random.Random
    policy: ReplayPolicy
    batch_size: int
    step: int = 1
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    submitted: int = 0
    decisions: list[Decision] = field(default_factory=list[Decision])

    def submit(self, count: int) -> None:
        for _ in range(count):
            uid = f"p{self.submitted}"
            self.submitted += 1
            self.groups[uid] = running(uid, self.step, "pending")

    def produce(self) -> None:
        flying = [uid for uid, g in self.groups.items() if g.status in ("pending", "running")]
        for uid in self.rng.sample(flying, self.rng.randint(min(1, len(flying)), len(flying))):
            step = self.groups[uid].global_steps
            kind = self.rng.randrange(6)
            self.groups[uid] = (
                flat(uid, float(kind % 2), step)
                if kind < 2
                else broken(uid, step=step or 1)
                if kind == 2
                else good(uid, step)
            )

    def poll(self, state: ReplayState | None) -> Decision:
        decision = decide(
            list(self.groups.values()), self.policy, step=self.step, batch_size=self.batch_size,
            state=state,
        )  # fmt: skip
        self.decisions.append(decision)
        for key in decision.clear_keys:
            self.groups.pop(key, None)
        self.submit(decision.refill)
        for chosen in decision.selected:
            del self.groups[chosen.uid]
        return decision

    def batch(self) -> tuple[Group, ...]:
        state: ReplayState | None = None
        for _ in range(500):
            decision = self.poll(state)
            state = decision.state
            self.check()
            if decision.selected:
                return decision.selected
            assert not decision.starved
            if not decision.poll_again:
                self.produce()
        raise AssertionError("no batch in 500 polls")

    def check(self) -> None:
        flying = sum(g.status in ("pending", "running") for g in self.groups.values())
        if self.policy.mode == "sync" and self.policy.drop_identical:
            assert flying <= self.policy.max_inflight_gen_batches * self.batch_size


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([1, 2]), st.integers(1, 3))
def test_sync_never_has_too_much_in_flight_and_keeps_no_backlog(
    seed: int, batch_size: int, gen_batch: int, inflight: int
) -> None:
    batch_size *= gen_batch
    policy = ReplayPolicy(
        drop_identical=True,
        train_batch_size=batch_size,
        gen_batch_size=gen_batch,
        max_inflight_gen_batches=inflight,
    )
    # Groups that failed without a trajectory stay and would be an error: let none fail.
    world = World(random.Random(seed), policy, batch_size)
    world.produce = lambda: produce_without_failures(world)  # type: ignore[method-assign]
    for step in range(1, 4):
        world.step = step
        world.submit(batch_size)
        before = world.submitted
        world.decisions.clear()
        assert len(world.batch()) == batch_size
        assert world.groups == {}
        evicted = sum(len(d.evicted) for d in world.decisions)
        assert world.submitted - before <= 2 * evicted + gen_batch * evicted


def produce_without_failures(world: World) -> None:
    World.produce(world)
    for uid, made in world.groups.items():
        if made.status == "failure":
            world.groups[uid] = good(uid, made.global_steps)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 4))
def test_async_replaces_exactly_what_it_evicts_and_trains_nothing_stale(
    seed: int, batch_size: int, max_span: int
) -> None:
    policy = ReplayPolicy(mode="async", max_span=max_span, drop_identical=True)
    world = World(random.Random(seed), policy, batch_size)
    world.submit(2 * batch_size)
    for step in range(1, 5):
        world.step = step
        world.decisions.clear()
        for chosen in world.batch():
            assert step - (chosen.global_steps or 0) + 1 <= max_span
            assert len({float(r.tags["score"]) for r in chosen.rows}) > 1  # type: ignore[arg-type]
        evicted = sum(len(d.evicted) for d in world.decisions)
        assert sum(d.refill for d in world.decisions) == evicted
        world.submit(batch_size)


@given(st.integers(0, 10_000))
def test_a_decision_is_a_function_of_the_snapshot(seed: int) -> None:
    rng = random.Random(seed)
    makers = [good, flat, broken, running]
    groups = [rng.choice(makers)(f"u{i}", step=rng.randint(1, 9)) for i in range(8)]
    first = decide(groups, ASYNC, step=9, batch_size=3)
    assert first == decide(list(groups), ASYNC, step=9, batch_size=3)
    shuffled = rng.sample(groups, len(groups))
    again = decide(shuffled, ASYNC, step=9, batch_size=3)
    assert set(gone(again)) == set(gone(first))
    assert (again.refill, len(again.selected)) == (first.refill, len(first.selected))


def test_rows_that_are_not_trajectories_never_count() -> None:
    rows: list[Row] = [prompt("u"), failed("u", 0), failed("u", 1)]
    (empty,) = group_rows(rows)
    assert gone(decide([empty], ASYNC, step=5, batch_size=1)) == ["u"]
