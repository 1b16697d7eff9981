"""What a window of production adds up to, with the specification's values."""

from __future__ import annotations

import dataclasses
import json
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.groups.outcome import GroupOutcome, MemberOutcome
from agentloop.production.accounting import GroupTimes, Window
from agentloop.trajectory.state import Status

C, F, A = Status.COMPLETED, Status.FAILED, Status.ABORTED


def outcome(
    uid: str, status: Status, *members: tuple[Status, int, float | None], task: str = "t",
    took_s: float | None = None,
) -> GroupOutcome:  # fmt: skip
    its = tuple(MemberOutcome(*member) for member in members)
    return GroupOutcome(uid, task, status, its, group_generate_time_s=took_s)


G1 = outcome("g1", C, (C, 3, 1.0), (C, 5, 0.0))
G2 = outcome("g2", Status.FILTERED, (C, 2, 0.25), (C, 2, 0.75))
G3 = outcome("g3", F, (F, 0, None), (C, 4, None))
G4 = outcome("g4", A, (A, 2, None), (C, 3, None))


def test_ex_7_9_a_window_adds_up_what_became_of_its_groups() -> None:
    window = Window()
    for group in (G1, G2, G3, G4):
        window.record(group)
    result = window.close(taken=[G1], leftover=[("t", A)])
    assert result.groups == ("g1",)
    assert (result.leftover_init, result.leftover_completed) == (0, 0)
    assert (result.leftover_aborted, result.leftover_expired) == (1, 0)
    assert (result.failed_samples, result.filtered_samples) == (2, 2)
    assert (result.raw_rewards_sum, result.raw_rewards_count) == (2.0, 4)
    assert result.raw_rewards_mean == 0.5
    assert (result.produced_samples, result.produced_tokens) == (8, 21)
    assert result.status == "normal"
    assert result.task_results is result.task_batch_sizes is None, "there is one task"

    # Next window: the interrupted member goes on to 6 tokens.
    window.record(outcome("g4", C, (C, 4, None), (C, 0, None)))
    result = window.close()
    assert (result.produced_samples, result.produced_tokens) == (2, 4)
    assert (result.failed_samples, result.filtered_samples) == (0, 0)
    assert (result.raw_rewards_sum, result.raw_rewards_count) == (0, 0)


def test_counters_are_told_once() -> None:
    window = Window()
    for group in (G1, G2, G3, G4, GroupOutcome.superseded("g5", "t")):
        window.record(group)
    window.cancel("g6", "t")
    assert window.close() != Window().close()
    assert window.close() == Window().close()


@pytest.mark.parametrize(
    ("times", "n", "mean", "p50", "p99", "ratio"),
    [
        ([0.5, 1.0], 2, 0.75, 1.0, 1.0, 1.0),
        ([10, 1, 2, 3, 4], 5, 4.0, 3, 10, 10 / 3),
        ([0.0], 1, 0.0, 0.0, 0.0, math.inf),
    ],
)
def test_ex_7_10_times_of_the_groups_taken(
    times: list[float], n: int, mean: float, p50: float, p99: float, ratio: float
) -> None:
    assert GroupTimes.of(times) == GroupTimes(n, mean, p50, p99, pytest.approx(ratio))
    taken = [outcome(str(i), C, (C, 1, 1.0), took_s=took) for i, took in enumerate(times)]
    late = outcome("late", C, (C, 1, 1.0), took_s=1e6)
    window = Window()
    for group in (*taken, late):
        window.record(group)
    result = window.close(taken=taken, pause_s=0.0)
    assert (result.group_gen_count, result.group_gen_mean_s) == (n, mean)
    assert (result.group_gen_p50_s, result.group_gen_p99_s) == (p50, p99)
    assert result.group_gen_p99_p50_ratio == pytest.approx(ratio)
    assert result.group_gen_pause_time_s == 0.0


def test_ex_7_10_without_times_only_a_pause_has_one() -> None:
    window = Window()
    window.record(G1)
    result = window.close(taken=[G1], pause_s=2.5)
    assert result.group_gen_pause_time_s == 2.5
    assert (result.group_gen_count, result.group_gen_p50_s) == (None, None)
    assert Window().close().group_gen_pause_time_s is None


def test_several_tasks_have_results_of_their_own_in_the_order_of_their_names() -> None:
    window = Window(["b", "a", "idle"])
    of_b = dataclasses.replace(G1, task="b", group_generate_time_s=2.0)
    of_a = dataclasses.replace(G3, task="a")
    for group in (of_b, of_a):
        window.record(group)
    result = window.close(taken=[of_b], leftover=[("a", A), ("b", A), ("b", Status.EXPIRED)])
    assert result.task_results is not None
    assert list(result.task_results) == ["a", "b", "idle"]
    assert result.task_batch_sizes == {"a": 0, "b": 1, "idle": 0}
    a, b = result.task_results["a"], result.task_results["b"]
    assert (a.failed_samples, a.produced_tokens, a.leftover_aborted, a.groups) == (2, 4, 1, ())
    assert (b.failed_samples, b.produced_tokens, b.leftover_aborted) == (0, 8, 1)
    assert (b.groups, b.leftover_expired, b.raw_rewards_count) == (("g1",), 1, 2)
    assert b.group_gen_count is None, "times are those of all tasks together"
    assert (result.group_gen_count, result.leftover_aborted) == (1, 2)
    assert (result.produced_tokens, result.produced_samples) == (12, 4)
    assert window.close(batch_sizes={"a": 3, "b": 1}).task_batch_sizes == {"a": 3, "b": 1}


def test_failures_are_counted_by_kind_and_only_of_members_that_failed() -> None:
    window = Window()
    members = (
        MemberOutcome(F, 0, None, "engine"),
        MemberOutcome(F, 1, None),
        MemberOutcome(C, 2, 1.0, None),
    )
    window.record(GroupOutcome("g", "t", F, members))
    window.record(GroupOutcome.failed("h", "t", 2, "its worker died"))
    result = window.close()
    assert result.failures == {"engine": 1, "session": 1, "worker": 2}
    assert result.failed_samples == 5
    assert result.raw_rewards_count == 0, "a failed group's rewards say nothing"


def test_groups_that_were_given_up_or_taken_over_are_named_and_make_no_samples() -> None:
    window = Window()
    window.cancel("g1", "t")
    window.record(GroupOutcome.superseded("g2", "t"))
    result = window.close(expired_batch=True)
    assert (result.cancelled_groups, result.superseded_groups) == (("g1",), 1)
    assert (result.produced_samples, result.status) == (0, "expired_batch")


def test_a_group_that_has_not_run_is_no_outcome() -> None:
    with pytest.raises(ValueError, match="has not run"):
        Window().record(outcome("g", Status.INIT))
    window = Window()
    window.record(G1)
    with pytest.raises(ValueError, match="failed are not left"):
        window.close(leftover=[("t", F)])
    assert window.close().produced_tokens == 8, "the refusal cost no count"


def test_what_is_logged_is_finite_and_absent_where_there_is_nothing() -> None:
    window = Window()
    instant = dataclasses.replace(G1, group_generate_time_s=0.0)
    window.record(instant)
    window.record(G3)
    metrics = window.close(taken=[instant], leftover=[("t", A)], produce_time_s=4.0).metrics()
    json.dumps(metrics, allow_nan=False)
    assert metrics["timing/task_n"] == 1
    assert "timing/task_p99_p50_ratio" not in metrics
    assert metrics["async/aborted_samples"] == 1
    assert metrics["async/failed_samples"] == 2
    assert metrics["rollout/raw_rewards/mean"] == 0.5
    assert metrics["rollout/failures/session"] == 1
    assert metrics["timing/produce_s"] == 4.0
    empty = Window().close().metrics()
    assert not {"timing/task_n", "timing/pause_s", "rollout/raw_rewards/mean"} & set(empty)


def test_a_summary_says_what_came_and_what_went_wrong() -> None:
    window = Window()
    for group in (dataclasses.replace(G1, group_generate_time_s=2.0), G2, G3, G4):
        window.record(group)
    said = window.close(
        taken=[dataclasses.replace(G1, group_generate_time_s=2.0)], leftover=[("t", A)],
        produce_time_s=4.0,
    ).summary()  # fmt: skip
    assert said == (
        "1 groups; 8 trajectories and 21 tokens in 4.0 s; mean reward 0.500; group p50 2.00 s, "
        "p99 2.00 s; 2 failed (session 1); 2 filtered; 1 groups interrupted"
    )


_MEMBERS = st.builds(
    MemberOutcome,
    st.sampled_from(list(Status)),
    st.integers(0, 99),
    st.none() | st.floats(-1, 1),
    st.none() | st.sampled_from(["engine", "tool"]),
)


@given(
    st.builds(
        GroupOutcome,
        st.text(),
        st.text(),
        st.sampled_from(list(Status)),
        st.lists(_MEMBERS, max_size=3).map(tuple),
        st.none() | st.integers(0, 9),
        st.none() | st.floats(0, 9),
        st.none() | st.text(),
    )
)
def test_an_outcome_crosses_a_process_boundary_as_it_is(group: GroupOutcome) -> None:
    assert GroupOutcome.of(msgpack.unpackb(msgpack.packb(group.plain()))) == group


@pytest.mark.parametrize(
    ("prompt", "members", "status"),
    [
        ("finished", ["completed", "completed"], "completed"),
        ("failure", ["completed", "failed"], "failed"),
        ("failure", ["filtered", "filtered"], "filtered"),
        ("failure", ["completed", "completed"], "failed"),
        ("failure", ["aborted", "completed"], "failed"),
        ("failure", [], "failed"),
    ],
)
def test_the_outcome_of_a_group_that_ended_is_read_from_its_rows(
    prompt: str, members: list[str], status: str
) -> None:
    tags = [
        {"status": member, "response_len": 2, "score": 1.0, "group_generate_time_s": 3.0}
        for member in members
    ]
    found = GroupOutcome.of_tags("u", "t", {"status": prompt}, tags)
    assert found.status == status
    assert [member.status for member in found.members] == members
    assert sum(member.new_tokens for member in found.members) == 2 * len(members)
    assert found.group_generate_time_s == (3.0 if members else None)
    assert found.attempt is None
