"""Which groups train, from tags, produced fields and row lengths alone."""

from __future__ import annotations

import re

import pytest

from tests.trainer.rows import failed, lost, prompt, row, tags
from trainer.advantage import AdvantageConfig, advantages, batch_statistics
from trainer.select import (
    Group,
    Row,
    Selection,
    Skipped,
    group_rows,
    in_stable_order,
    select_valid,
)

FULL = {"input_ids": 6, "labels": 6, "logprobs": 6}


def group(*rows: Row, uid: str = "u") -> Group:
    return Group(uid, "finished", rows)


def only_skipped(bad: Group) -> Skipped:
    """What is said of a group that a good one stands beside."""
    good = group(row("good"), uid="good")
    selection = select_valid([bad, good])
    assert selection.keys == ["good_0_0"]
    (skipped,) = selection.skipped
    return skipped


def test_ex_3_a_whole_group_is_kept() -> None:
    selection = select_valid([group(row(session=0), row(session=1))])
    assert (selection.keys, selection.skipped) == (["u_0_0", "u_1_0"], [])
    assert [len(members) for members in selection.groups] == [2]


@pytest.mark.parametrize("status", ["failed", "aborted", "filtered", "expired"])
def test_ex_3_one_bad_member_removes_the_group(status: str) -> None:
    skipped = only_skipped(group(row(session=0), failed(session=1, status=status)))
    assert skipped == Skipped("u", f"u_1_0 is {status}")


def test_one_lost_member_removes_the_group() -> None:
    skipped = only_skipped(group(row(session=0), lost(session=1)))
    assert skipped == Skipped("u", "u_1_0 has lost ['input_ids', 'labels']")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"labels": 5}, "labels has 5 entries for 6 tokens"),
        ({"logprobs": 5}, "logprobs has 5 entries for 6 tokens"),
        ({"routed_experts": 6}, "routed_experts has 6 entries for 6 tokens, not 5"),
        ({"labels": -1}, "it has no labels"),
        ({"input_ids": -1}, "it has no input_ids"),
        ({"input_ids": 7, "labels": 7, "logprobs": 7}, "its tag seq_len is 6, and it has 7 tokens"),
    ],
)
def test_ex_3_lengths_that_do_not_fit_remove_the_group(sizes: dict[str, int], words: str) -> None:
    assert words in only_skipped(group(row(session=0), row(session=1, sizes=sizes))).reason


@pytest.mark.parametrize("sizes", [{"logprobs": -1}, {"routed_experts": 5}])
def test_ex_3_absent_logprobs_and_experts_of_one_less_are_fine(sizes: dict[str, int]) -> None:
    assert select_valid([group(row(sizes=sizes))]).keys == ["u_0_0"]


def test_ex_3_a_single_token_cannot_be_trained() -> None:
    assert "1 tokens" in only_skipped(group(row(prompt=0, response=1))).reason
    blind = Row("u_0_0", tags(prompt=0, response=1))
    assert "1 tokens" in only_skipped(group(blind)).reason


def test_ex_3_a_bad_group_counts_nowhere() -> None:
    good = group(row("a", response=2, score=2.0, policy_len=2), uid="a")
    bad = group(Row("b_0_0", {**failed("b").tags, "score": 4.0}), uid="b")
    selection = select_valid([good, bad])
    result = advantages(selection.groups, AdvantageConfig())
    metrics = batch_statistics(selection.trajectories, result)
    assert (metrics["training_samples"], metrics["rewards/mean"]) == (1, 2.0)


def test_nothing_left_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match=r"step 7 has no valid training samples \(u: u_0_0 is fa"):
        select_valid([group(failed())], step=7)
    with pytest.raises(ValueError, match="the batch has no valid training samples"):
        select_valid([])


def test_a_response_that_supervises_nothing_is_no_fault() -> None:
    assert select_valid([group(row(policy_len=0))]).trajectories[0].policy_len == 0


def test_a_group_without_a_trajectory_is_skipped() -> None:
    assert only_skipped(group()).reason == "it has no trajectory"


def test_missing_train_meta_is_an_error_and_no_skip() -> None:
    its = {name: value for name, value in tags().items() if name != "policy_len"}
    broken = group(Row("u_0_0", its, tuple(FULL), FULL))
    with pytest.raises(ValueError, match=r"'u_0_0' has no tag 'policy_len'.*write_train_meta"):
        select_valid([group(row("good"), uid="good"), broken])


def test_where_only_tags_are_known_they_decide() -> None:
    assert select_valid([group(Row("u_0_0", tags()))]).keys == ["u_0_0"]


def test_skyrl_1908_a_required_field_that_is_absent_is_refused() -> None:
    with pytest.raises(ValueError, match="'u_0_0' has no field 'routed_experts'"):
        select_valid([group(row())], required=("routed_experts",))
    selection = select_valid(
        [group(row(sizes={"routed_experts": 5}))], required=("routed_experts", "logprobs")
    )
    assert selection.trajectories[0].has_routed_experts
    flagged = Row("k", tags(has_routed_experts=True))
    assert len(select_valid([group(flagged)], required=("routed_experts",)).keys) == 1
    with pytest.raises(ValueError, match="no field 'values'"):
        select_valid([group(flagged)], required=("values",))


def test_verl_6675_a_row_without_a_response_is_kept() -> None:
    """An aborted request gives no tokens: it has length, and nothing to train."""
    selection = select_valid([group(row(response=0), row(session=1, response=0))])
    assert [t.train_len for t in selection.trajectories] == [2, 2]
    result = advantages(selection.groups, AdvantageConfig())
    metrics = batch_statistics(selection.trajectories, result)
    assert result.values == [0.0, 0.0]
    assert metrics["response_len/mean"] == metrics["advantages/mean"] == 0.0


# -- groups ------------------------------------------------------------------------------------


def test_rows_are_grouped_by_their_uid_and_never_by_their_key() -> None:
    groups = group_rows([row("a"), prompt("b", "running", 4, n=8), row("a", 1), prompt("a")])
    assert [(g.uid, g.status, g.keys) for g in groups] == [
        ("a", "finished", ["a_0_0", "a_1_0"]),
        ("b", "running", []),
    ]
    assert (groups[0].prompt_key, groups[0].global_steps, groups[0].n) == ("a", 1, 2)
    assert groups[0].all_keys == ["a", "a_0_0", "a_1_0"]
    odd = Row("no/underscore", tags("x_y_z"))
    assert group_rows([odd])[0] == Group("x_y_z", None, (odd,))


def test_filler_rows_are_in_no_group() -> None:
    assert group_rows([row("pad", is_padding=True)]) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Row("k", {"status": "completed"}), "key 'k' has no tag 'uid'"),
        (Row("p", {"is_prompt": True, "status": "done", "uid": "p"}), "'p' has the status 'done'"),
        (Row("p", {"is_prompt": True, "uid": "p"}), "'p' has the status None"),
        (prompt(step="1"), "'global_steps' of prompt 'u' is '1'"),  # type: ignore[arg-type]
    ],
)
def test_rows_that_no_group_can_hold_are_named(bad: Row, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        group_rows([bad])


def test_a_prompt_row_without_a_uid_is_named_by_its_key() -> None:
    (found,) = group_rows([Row("p1", {"is_prompt": True, "status": "pending"})])
    assert found.uid == found.prompt_key == "p1"


def test_the_last_trajectory_of_a_session_stands_for_it() -> None:
    rows = (row(session=0, index=1), row(session=0, index=0), row(session=1), failed(session=2))
    assert {s: r.key for s, r in group(*rows).sessions().items()} == {0: "u_0_1", 1: "u_1_0"}


def test_deterministic_runs_see_one_order_however_rows_arrive() -> None:
    members = [row("b", 10), row("b", 9, 1), row("b", 9, 0), row("a", 3)]
    for rows in (members, members[::-1]):
        grouped = [[r.trajectory() for r in g.rows] for g in group_rows(rows)]
        keys = Selection(in_stable_order(grouped), []).keys
        assert keys == ["a_3_0", "b_9_0", "b_9_1", "b_10_0"]
