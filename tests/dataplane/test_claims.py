"""Claims bare: who gets which rows, in which order, and how claims end."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.errors import ClaimLost, InternalError, InvalidRequest
from dataplane.tags.claims.claims import MAX_IDLE, MAX_TASKS
from dataplane.tags.claims.tasks import MAX_BATCHES, MAX_CLOSED
from tests.dataplane.claimers import Asked, Desk, P


@pytest.fixture
def desk() -> Desk:
    return Desk()


def lost_by(error: pytest.ExceptionInfo[ClaimLost], *keys: str, task: str = "t") -> None:
    assert error.value.partition_id == P
    assert error.value.task == task
    assert error.value.keys == list(keys)


# -- what is offered -------------------------------------------------------------------------


def test_a_claim_takes_the_oldest_rows_and_no_other_claim_gets_them(desk: Desk) -> None:
    desk.put("a b")
    desk.put("c d e")
    first = desk.claim(3)
    assert first.keys == ["a", "b", "c"]
    assert first.deliveries == [1, 1, 1]
    assert desk.claim(2, client="other").keys == ["d", "e"]
    assert desk.claim(1).keys is None


def test_too_few_rows_make_a_claim_wait_for_all_of_them(desk: Desk) -> None:
    desk.put("a b")
    waiting = desk.claim(3)
    assert waiting.keys is None
    desk.put("c d")
    assert waiting.keys == ["a", "b", "c"]


def test_a_row_that_was_written_again_is_as_old_as_its_last_change(desk: Desk) -> None:
    desk.put("a b c")
    desk.put("a", {"n": 1})
    assert desk.claim(3).keys == ["b", "c", "a"]


def test_a_row_is_offered_when_all_fields_are_produced_and_where_holds(desk: Desk) -> None:
    desk.put("a b c", {"status": "running"}, {"x": [1, 1, 1]})
    both = desk.claim(2, fields=["x", "m"], where={"status": "done"})
    desk.put("b", {"status": "done"})
    desk.put("b", None, {"m": [4]})
    assert both.keys is None
    desk.put("a", {"status": "done"}, {"m": [4]})
    assert both.keys == ["b", "a"]


def test_a_row_that_stops_matching_before_it_is_claimed_is_not_offered(desk: Desk) -> None:
    desk.put("a b", {"status": "done"})
    waiting = desk.claim(3, where={"status": "done"})
    desk.put("a", {"status": "failed"})
    desk.put("c d", {"status": "done"})
    assert waiting.keys == ["b", "c", "d"]


def test_a_row_that_changes_while_it_is_held_stays_held(desk: Desk) -> None:
    desk.put("a", {"n": 1})
    held = desk.claim(1)
    desk.put("a", {"n": 2})
    assert desk.claim(1).keys is None
    desk.commit(held)
    desk.put("a", {"n": 3})
    assert desk.claim(1).keys is None


ORDERED: list[tuple[str | None, list[str]]] = [
    (None, ["i2", "i1", "f1.5", "sb", "sa", "none", "bool", "list", "nan", "no"]),
    ("n", ["i1", "f1.5", "i2", "sa", "sb", "none", "bool", "list", "nan", "no"]),
    ("-n", ["i2", "f1.5", "i1", "sb", "sa", "none", "bool", "list", "nan", "no"]),
    ("other", ["i2", "i1", "f1.5", "sb", "sa", "none", "bool", "list", "nan", "no"]),
]


@pytest.mark.parametrize(("order_by", "keys"), ORDERED, ids=lambda value: str(value)[:8])
def test_rows_are_ordered_by_a_tag_those_without_it_last(
    desk: Desk, order_by: str | None, keys: list[str]
) -> None:
    values: dict[str, Any] = {
        "i2": 2, "i1": 1, "f1.5": 1.5, "sb": "b", "sa": "a", "none": None, "bool": True,
        "list": [1], "nan": float("nan"),
    }  # fmt: skip
    for key, value in values.items():
        desk.put(key, {"n": value})
    desk.put("no")
    assert desk.claim(10, order_by=order_by).keys == keys


def test_equal_tags_are_ordered_by_revision(desk: Desk) -> None:
    for key, n in [("a", 1), ("b", 2), ("c", 1), ("d", 2)]:
        desk.put(key, {"n": n})
    assert desk.claim(4, order_by="-n").keys == ["b", "d", "a", "c"]


def test_tasks_do_not_see_each_others_claims(desk: Desk) -> None:
    desk.put("a b")
    one = desk.claim(2, task="one")
    two = desk.claim(2, task="two")
    assert one.keys == two.keys == ["a", "b"]
    desk.commit(one, task="one")
    assert desk.claim(1, task="one").keys is None
    desk.release(two, task="two")
    assert desk.claim(2, task="two").deliveries == [2, 2]


def test_queues_of_one_task_share_what_it_has_taken(desk: Desk) -> None:
    desk.put("a b c", {"n": 1})
    by_where = desk.claim(2, where={"n": 1})
    assert by_where.keys == ["a", "b"]
    assert desk.claim(1, where={"n": {">": 0}}).keys == ["c"]
    last = desk.claim(1, order_by="n")
    assert last.keys is None
    desk.release(by_where, ["b"])
    assert last.keys == ["b"]
    desk.commit(by_where, ["a"])


def test_those_who_wait_are_served_in_the_order_in_which_they_came(desk: Desk) -> None:
    large = desk.claim(3, client="a")
    small = desk.claim(1, client="b")
    desk.put("x y")
    assert (large.keys, small.keys) == (None, None)
    desk.put("z")
    assert large.keys == ["x", "y", "z"]
    desk.put("w")
    assert small.keys == ["w"]


def test_who_gives_up_lets_the_next_one_come(desk: Desk) -> None:
    large = desk.claim(3, client="a")
    small = desk.claim(1, client="b")
    desk.put("x y")
    desk.leave(large)
    assert small.keys == ["x"]


def test_a_cleared_row_is_forgotten_and_its_key_put_again_is_another_row(desk: Desk) -> None:
    desk.put("a b")
    desk.commit(desk.claim(1))
    desk.release(desk.claim(1))
    desk.clear("a b")
    desk.put("a b")
    again = desk.claim(2)
    assert again.keys == ["a", "b"]
    assert again.deliveries == [1, 1]


def test_a_claim_holds_the_rows_as_they_were_granted(desk: Desk) -> None:
    desk.put("a", {"n": 1})
    held = desk.claim(1, number=7)
    desk.put("a", {"n": 2})
    assert held.granted.rows[0].tags == {"n": 1}
    assert desk.claim(1, number=7).granted is held.granted


# -- how claims end --------------------------------------------------------------------------


def test_a_commit_happens_once_and_its_repetition_is_answered_alike(desk: Desk) -> None:
    desk.put("a b")
    held = desk.claim(2)
    n = desk.commit(held)
    desk.put("c")
    assert desk.commit(held) == n
    assert [what for what, _ in desk.ledger.written] == ["claim", "commit"]
    with pytest.raises(ClaimLost, match="committed") as error:
        desk.release(held)
    lost_by(error, "a", "b")
    assert desk.claim(1).keys == ["c"]


def test_a_release_offers_the_rows_again_in_their_old_place(desk: Desk) -> None:
    desk.put("a")
    desk.put("b")
    desk.put("c")
    first = desk.claim(2)
    n = desk.release(first)
    assert desk.release(first) == n
    second = desk.claim(3)
    assert second.keys == ["a", "b", "c"]
    assert second.deliveries == [2, 2, 1]
    with pytest.raises(ClaimLost, match="released") as error:
        desk.commit(first)
    lost_by(error, "a", "b")
    desk.commit(second)


def test_clearing_claimed_rows_makes_the_commit_name_exactly_those(desk: Desk) -> None:
    desk.put("a b c d")
    held = desk.claim(4)
    desk.clear("b d")
    desk.put("b")
    for end in (desk.commit, desk.release):
        with pytest.raises(ClaimLost, match="cleared") as error:
            end(held)
        lost_by(error, "b", "d")
    assert desk.claim(1, client="x").keys == ["b"]
    desk.commit(held, ["a", "c"])
    desk.commit(held, ["a", "c"])
    with pytest.raises(ClaimLost) as error:
        desk.commit(held)
    lost_by(error, "b", "d")
    assert desk.claim(1).keys is None


def test_a_claim_can_end_in_parts(desk: Desk) -> None:
    desk.put("a b c")
    held = desk.claim(3)
    desk.commit(held, ["a"])
    desk.commit(held, ["a"])
    desk.release(held, ["b"])
    with pytest.raises(ClaimLost) as error:
        desk.commit(held, ["b", "c"])
    lost_by(error, "b")
    with pytest.raises(ClaimLost) as error:
        desk.release(held, ["c", "a"])
    lost_by(error, "a")
    assert desk.claim(1, client="x").keys == ["b"]
    desk.commit(held, ["c", "a"])
    assert not desk.partition.claims.tasks["t"].leases.get(held.claim_id)


def test_a_claim_of_cleared_rows_only_is_over_when_its_holder_says_so(desk: Desk) -> None:
    desk.put("a")
    held = desk.claim(1)
    desk.clear("a")
    with pytest.raises(ClaimLost):
        desk.commit(held)
    desk.commit(held, [])
    assert not desk.partition.claims.tasks["t"].leases
    assert not desk.partition.claims.holders.of("c")


def test_keys_that_a_claim_never_held_are_refused(desk: Desk) -> None:
    desk.put("a b")
    held = desk.claim(1)
    for end in (desk.commit, desk.release):
        with pytest.raises(InvalidRequest, match="never held 'b'"):
            end(held, ["a", "b"])
    desk.commit(held)


@pytest.mark.parametrize("task", ["t", "nobody"])
def test_a_claim_that_nobody_knows_is_lost(desk: Desk, task: str) -> None:
    desk.put("a")
    held = desk.claim(1)
    claims, ledger = desk.partition.claims, desk.ledger
    for end in (claims.commit, claims.release):
        with pytest.raises(ClaimLost, match="has no claim") as error:
            end(desk.partition, task, held.claim_id + 1, ["a"], ledger)
        assert error.value.task == task
        assert error.value.partition_id == P
        assert error.value.keys == []


def test_only_the_last_claims_that_ended_are_remembered(desk: Desk) -> None:
    held: list[Asked] = []
    for i in range(MAX_CLOSED + 2):
        desk.put(f"k{i}")
        held.append(desk.claim(1))
        desk.commit(held[-1])
    desk.commit(held[2])
    with pytest.raises(ClaimLost):
        desk.commit(held[1])


def test_what_cannot_be_written_down_does_not_happen(desk: Desk) -> None:
    desk.put("a b c")
    held = desk.claim(1)
    desk.ledger.broken = True
    with pytest.raises(InternalError):
        desk.commit(held)
    with pytest.raises(InternalError):
        desk.release(held)
    refused = desk.claim(2)
    with pytest.raises(InternalError):
        _ = refused.granted
    desk.leaves("c")
    with pytest.raises(InternalError):
        desk.passes(60.0)
    desk.check()
    desk.ledger.broken = False
    desk.returns("c")
    again = desk.claim(2)
    assert again.keys == ["b", "c"]
    assert again.deliveries == [1, 1]
    desk.commit(held)


def test_every_change_is_written_down_as_it_happens(desk: Desk) -> None:
    desk.put("a b")
    held = desk.claim(2, client="c1", lease_s=5.0)
    desk.commit(held, ["a"])
    desk.leaves("c1")
    desk.passes(5.0)
    again = desk.claim(1, client="c2", number=9)
    desk.release(again)
    third = desk.claim(1, client="c2", number=10)
    desk.abandon("c2", 10)
    assert desk.ledger.written == [
        ("claim", [P, "t", "c1", 5.0, False, [[held.claim_id, 1, None, ["a", "b"]]], None, None]),
        ("commit", [P, "t", held.claim_id, ["a"]]),
        ("release", [P, "t", held.claim_id, ["b"], "expired"]),
        ("claim", [P, "t", "c2", 30.0, False, [[again.claim_id, 9, None, ["b"]]], None, None]),
        ("release", [P, "t", again.claim_id, ["b"], "released"]),
        ("claim", [P, "t", "c2", 30.0, False, [[third.claim_id, 10, None, ["b"]]], None, None]),
        ("release", [P, "t", third.claim_id, ["b"], "abandoned"]),
    ]


# -- leases ----------------------------------------------------------------------------------


def test_a_lease_runs_only_while_its_client_is_away(desk: Desk) -> None:
    desk.put("a")
    held = desk.claim(1, lease_s=10.0)
    desk.passes(1000.0)
    desk.leaves("c")
    desk.passes(9.9)
    desk.returns("c")
    desk.passes(1000.0)
    desk.leaves("c")
    desk.passes(9.9)
    assert desk.claim(1, client="x").keys is None
    desk.returns("c")
    desk.commit(held)


def test_rows_of_an_expired_lease_are_offered_again_oldest_first(desk: Desk) -> None:
    desk.put("a")
    desk.put("b")
    dead = desk.claim(2, client="dead", lease_s=10.0)
    desk.put("c")
    waiting = desk.claim(3)
    desk.leaves("dead")
    desk.passes(10.0)
    assert waiting.keys == ["a", "b", "c"]
    assert waiting.deliveries == [2, 2, 1]
    desk.returns("dead")
    for end in (desk.commit, desk.release):
        with pytest.raises(ClaimLost, match="has no claim"):
            end(dead)
    desk.commit(waiting)


def test_each_lease_of_a_client_has_its_own_term(desk: Desk) -> None:
    desk.put("a b")
    desk.claim(1, lease_s=20.0)
    desk.claim(1, lease_s=10.0)
    desk.leaves("c")
    desk.passes(10.0)
    assert desk.claim(1, client="x").keys == ["b"]
    desk.passes(10.0)
    assert desk.claim(1, client="x").keys == ["a"]
    assert not desk.partition.claims.holders.away


def test_a_claim_granted_to_who_is_away_already_runs_at_once(desk: Desk) -> None:
    waiting = desk.claim(1, client="gone", lease_s=5.0)
    desk.leaves("gone")
    desk.passes(100.0)
    desk.put("a")
    assert waiting.keys == ["a"]
    desk.passes(4.9)
    assert desk.claim(1, client="x").keys is None
    desk.passes(0.1)
    assert desk.claim(1, client="x").keys is None  # the first x is served first
    assert desk.partition.claims.tasks["t"].held


def test_what_was_granted_to_who_gave_up_goes_back_as_if_never_delivered(desk: Desk) -> None:
    desk.put("a b")
    desk.claim(1, number=5)
    kept = desk.claim(1, number=6)
    desk.abandon("c", 5, 77)
    again = desk.claim(1, client="x")
    assert again.keys == ["a"]
    assert again.deliveries == [1]
    desk.commit(kept)


# -- groups ----------------------------------------------------------------------------------


def test_whole_groups_are_claimed_in_the_order_of_their_sessions(desk: Desk) -> None:
    tags = [
        {"session_id": 1, "index": 1}, {"session_id": 0, "index": 0}, {"session_id": 1, "index": 0}
    ]  # fmt: skip
    desk.finished("u", *tags)
    desk.finished("v", {}, {"session_id": 0}, {})
    claim = desk.claim(2, groups=True)
    assert claim.keys == ["u_1", "u_2", "u_0", "v_1", "v_0", "v_2"]
    assert claim.deliveries == [1] * 6


def test_a_group_is_offered_once_it_ended_as_finished_and_all_its_rows_match(desk: Desk) -> None:
    waiting = desk.claim(1, groups=True, where={"score": {"exists": True}})
    failed = desk.begin("failed")
    desk.put("failed_0", {"score": 1}, group=failed)
    desk.end(failed, "failure")
    group = desk.begin("u")
    desk.put("u_0 u_1", {"score": 1}, group=group)
    desk.put("u_2", {}, group=group)
    assert waiting.keys is None
    desk.end(group)
    assert waiting.keys is None
    desk.put("u_2", {"score": 0})
    assert waiting.keys == ["u_0", "u_1", "u_2"]


def test_rows_of_no_group_are_not_claimed_with_groups(desk: Desk) -> None:
    desk.put("a b c")
    assert desk.claim(1, groups=True).keys is None


def test_a_group_stands_where_the_first_of_its_rows_would(desk: Desk) -> None:
    desk.finished("u", {"n": 5}, {"n": 1})
    desk.finished("v", {"n": 3}, {"n": 2})
    assert desk.claim(1, groups=True, order_by="n", task="up").keys == ["u_0", "u_1"]
    assert desk.claim(1, groups=True, order_by="-n", task="down").keys == ["u_0", "u_1"]
    desk.put("v_1", {"n": 0})
    desk.put("u_0", {"n": 2})
    assert desk.claim(1, groups=True, order_by="n", task="up2").keys == ["v_0", "v_1"]
    assert desk.claim(1, groups=True, order_by="-n", task="down2").keys == ["v_0", "v_1"]
    assert desk.claim(1, groups=True, task="by revision").keys == ["u_1", "u_0"]


def test_a_ready_group_changes_its_place_with_its_rows(desk: Desk) -> None:
    desk.finished("u", {"n": 1})
    desk.finished("v", {"n": 2})
    waiting = desk.claim(3, groups=True, order_by="n")
    desk.put("u_0", {"n": 9})
    desk.finished("w", {"n": 5})
    assert waiting.keys == ["v_0", "w_0", "u_0"]


@pytest.mark.parametrize("moved", [False, True], ids=["cleared", "taken by another group"])
def test_a_group_that_lost_its_foremost_row_and_stays_whole_changes_its_place(
    desk: Desk, moved: bool
) -> None:
    orders = {"by revision": None, "down": "-n"}
    for task, order_by in orders.items():  # their queues are there when the rows change
        desk.leave(desk.claim(1, groups=True, order_by=order_by, task=task))
    other = desk.begin("w")
    group = desk.begin("u", 2)
    desk.put("u_0", {"n": 3}, group=group)
    desk.finished("v", {"n": 2})
    desk.put("u_1", {"n": 1}, group=group)
    desk.end(group)
    if moved:
        desk.put("u_0", group=other)
    else:
        desk.clear("u_0")
    desk.check()
    for task, order_by in orders.items():
        assert desk.claim(1, groups=True, order_by=order_by, task=task).keys == ["v_0"]
        assert desk.claim(1, groups=True, order_by=order_by, task=task).keys == ["u_1"]


def test_a_group_that_is_dropped_while_it_is_claimed_is_lost_to_the_claim(desk: Desk) -> None:
    desk.finished("u", {}, {})
    desk.finished("v", {})
    held = desk.claim(2, groups=True)
    desk.begin("u")
    with pytest.raises(ClaimLost) as error:
        desk.commit(held)
    lost_by(error, "u_0", "u_1")
    desk.commit(held, ["v_0"])


def test_a_group_is_committed_and_released_whole(desk: Desk) -> None:
    desk.finished("u", {}, {})
    desk.finished("v", {}, {})
    held = desk.claim(2, groups=True)
    for end in (desk.commit, desk.release):
        with pytest.raises(InvalidRequest, match="'u_1' would be left"):
            end(held, ["u_0", "v_0", "v_1"])
    desk.commit(held, ["u_0", "u_1"])
    desk.clear("v_0")
    desk.release(held, ["v_1"])
    again = desk.claim(1, groups=True)
    assert again.keys == ["v_1"]
    assert again.deliveries == [2]


def test_a_group_of_which_the_task_took_a_row_is_not_offered_until_it_is_back(desk: Desk) -> None:
    desk.finished("u", {"n": 1}, {"n": 2})
    single = desk.claim(1, where={"n": 2})
    assert single.keys == ["u_1"]
    waiting = desk.claim(1, groups=True)
    assert waiting.keys is None
    desk.commit(single)
    assert waiting.keys is None
    desk.clear("u_1")
    assert waiting.keys == ["u_0"]


# -- the end ---------------------------------------------------------------------------------


def test_the_last_claim_of_a_sealed_partition_is_shorter_and_then_there_is_an_end(
    desk: Desk,
) -> None:
    desk.put("a b c")
    desk.seal()
    assert desk.claim(2).keys == ["a", "b"]
    short = desk.claim(2)
    assert short.keys == ["c"]
    assert not short.granted.end
    for _ in range(2):
        end = desk.claim(2)
        assert end.granted.end
        assert end.keys == []
        assert end.claim_id == 0


def test_sealing_answers_those_who_wait(desk: Desk) -> None:
    desk.put("a")
    short = desk.claim(2, client="a")
    end = desk.claim(2, client="b", where={"n": 1})
    desk.seal()
    assert short.keys == ["a"]
    assert end.granted.end


def test_rows_that_others_hold_may_come_back_so_there_is_no_end_yet(desk: Desk) -> None:
    desk.put("a b")
    other = desk.claim(1, client="other", lease_s=5.0)
    desk.seal()
    waiting = desk.claim(2)
    assert waiting.keys is None
    desk.leaves("other")
    desk.passes(5.0)
    assert waiting.keys == ["a", "b"]
    assert waiting.deliveries == [2, 1]
    last = desk.claim(1, client="third")
    desk.commit(waiting)
    assert last.granted.end
    with pytest.raises(ClaimLost):
        desk.commit(other)


def test_ones_own_rows_are_not_waited_for(desk: Desk) -> None:
    desk.put("a b c")
    desk.seal()
    desk.claim(2)
    assert desk.claim(2).keys == ["c"]
    assert desk.claim(2).granted.end


def test_rows_that_would_not_match_are_not_waited_for(desk: Desk) -> None:
    desk.put("a", {"n": 1})
    desk.put("b", {"n": 2})
    desk.claim(1, client="other", where={"n": 1})
    desk.seal()
    assert desk.claim(2, where={"n": 2}).keys == ["b"]


def test_who_holds_the_rows_does_not_wait_behind_who_waits_for_them(desk: Desk) -> None:
    desk.put("a b c")
    held = desk.claim(2, client="b")
    desk.seal()
    first = desk.claim(2, client="a")
    assert first.keys is None
    assert desk.claim(2, client="b").keys == ["c"]
    desk.commit(held)
    assert first.keys is None
    desk.leaves("b")
    desk.passes(30.0)
    assert first.keys == ["c"]


def test_open_groups_may_bring_rows_to_a_sealed_partition(desk: Desk) -> None:
    group = desk.begin("u")
    desk.put("u_0", {}, group=group)
    desk.seal()
    waiting = desk.claim(2, groups=True)
    assert waiting.keys is None
    desk.end(group)
    assert waiting.keys == ["u_0"]
    assert desk.claim(1, groups=True).granted.end


def test_a_claim_larger_than_the_quota_is_refused_at_once(desk: Desk) -> None:
    desk.put("a b")
    desk.limit_rows(2)
    with pytest.raises(InvalidRequest, match="quota of partition 'train' is 2 rows"):
        desk.claim(3)
    assert desk.claim(2).keys == ["a", "b"]
    desk.claim(2)
    assert desk.partition.claims.wanted() == 2


# -- by rank ---------------------------------------------------------------------------------


def batch_rows(desk: Desk, *tokens: int) -> None:
    for i, count in enumerate(tokens):
        desk.put(f"k{i}", {"seq_len": count})


def test_the_first_asker_of_a_batch_splits_it_for_all_ranks(desk: Desk) -> None:
    batch_rows(desk, 9, 7, 6, 5, 4, 3, 1)
    zero = desk.claim(6, client="r0", replica=(0, 2, 0))
    one = desk.claim(6, client="r1", replica=(1, 2, 0))
    assert zero.keys == ["k0", "k3", "k5"]
    assert one.keys == ["k1", "k2", "k4"]
    assert zero.claim_id != one.claim_id
    twin = desk.claim(6, client="r0b", replica=(0, 2, 0))
    assert twin.granted is zero.granted
    assert desk.claim(1, client="x").keys == ["k6"]


def test_a_batch_weighs_rows_by_their_first_field_where_they_have_no_seq_len(desk: Desk) -> None:
    desk.put("a b c d", None, {"x": [9, 1, 5, 5], "m": [5, 5, 9, 1]})
    x = desk.claim(4, replica=(0, 2, 0), fields=["x", "m"], task="x")
    m = desk.claim(4, replica=(0, 2, 0), fields=["m", "x"], task="m")
    assert x.keys == ["a", "b"]
    assert m.keys == ["c", "d"]


def test_a_batch_is_drawn_when_all_of_it_is_there_and_answers_everybody(desk: Desk) -> None:
    batch_rows(desk, 1, 1, 1)
    zero = desk.claim(4, client="r0", replica=(0, 2, 0))
    one = desk.claim(4, client="r1", replica=(1, 2, 0))
    twin = desk.claim(4, client="r1b", replica=(1, 2, 0))
    next_one = desk.claim(4, client="r0", replica=(0, 2, 1))
    assert zero.keys is None
    desk.put("k3", {"seq_len": 1})
    assert zero.keys == ["k0", "k2"]
    assert one.keys == twin.keys == ["k1", "k3"]
    assert next_one.keys is None
    desk.put("k4 k5 k6 k7")
    assert next_one.keys == ["k4", "k6"]


def test_groups_are_never_split(desk: Desk) -> None:
    desk.finished("u", {"seq_len": 5}, {"seq_len": 5})
    desk.finished("v", {"seq_len": 1}, {"seq_len": 1}, {"seq_len": 1})
    desk.finished("w", {"seq_len": 6})
    shares = [desk.claim(3, client=f"r{i}", replica=(i, 2, 0), groups=True).keys for i in range(2)]
    assert shares == [["u_0", "u_1"], ["v_0", "v_1", "v_2", "w_0"]]


def test_ranks_that_do_not_agree_are_refused(desk: Desk) -> None:
    batch_rows(desk, 1, 1, 1, 1)
    desk.claim(4, client="r0", replica=(0, 2, 0))
    with pytest.raises(InvalidRequest, match="dp_size=2, and now with dp_size=4"):
        desk.claim(4, client="r1", replica=(1, 4, 0))
    with pytest.raises(InvalidRequest, match="count=4, and now with count=2"):
        desk.claim(2, client="r1", replica=(1, 2, 0))
    waiting = desk.claim(4, client="r0", replica=(0, 2, 1))
    with pytest.raises(InvalidRequest, match="order_by=None, and now with order_by='seq_len'"):
        desk.claim(4, client="r1", replica=(1, 2, 1), order_by="seq_len")
    desk.leave(waiting)
    assert desk.claim(2, client="r1", replica=(1, 4, 1)).keys is None  # nobody asked before


def test_any_holder_commits_a_share_once(desk: Desk) -> None:
    batch_rows(desk, 1, 1)
    a = desk.claim(2, client="a", replica=(0, 1, 0))
    b = desk.claim(2, client="b", replica=(0, 1, 0))
    n = desk.commit(a)
    desk.put("later")
    assert desk.commit(b) == n
    assert [what for what, _ in desk.ledger.written].count("commit") == 1
    late = desk.claim(2, client="c", replica=(0, 1, 0))
    assert late.granted == a.granted
    assert desk.commit(late) == n


def test_a_share_is_held_until_all_its_holders_are_gone(desk: Desk) -> None:
    batch_rows(desk, 1, 1)
    a = desk.claim(2, client="a", replica=(0, 1, 0), lease_s=5.0)
    b = desk.claim(2, client="b", replica=(0, 1, 0), lease_s=5.0)
    desk.leaves("a")
    desk.passes(100.0)
    desk.leaves("b")
    desk.passes(4.9)
    desk.returns("a")
    desk.passes(100.0)
    desk.leaves("a")
    desk.passes(5.0)
    assert desk.claim(2, client="x").keys == ["k0", "k1"]
    for holder in (a, b):
        with pytest.raises(ClaimLost):
            desk.commit(holder)


def test_a_share_that_nobody_asked_for_is_kept_by_who_drew_it(desk: Desk) -> None:
    batch_rows(desk, 1, 1, 1, 1)
    zero = desk.claim(4, client="r0", replica=(0, 2, 0), lease_s=5.0)
    desk.commit(zero)
    assert desk.claim(1, client="x").keys is None
    one = desk.claim(4, client="r1", replica=(1, 2, 0), lease_s=5.0)
    assert one.keys == ["k1", "k3"]
    desk.leaves("r0")
    desk.passes(100.0)
    desk.commit(one)


def test_a_lost_share_is_drawn_again_from_what_nobody_took(desk: Desk) -> None:
    batch_rows(desk, 1, 1, 1, 1, 1, 1)
    old = desk.claim(6, client="a", replica=(0, 2, 0), lease_s=5.0)
    assert old.keys == ["k0", "k2", "k4"]
    desk.leaves("a")
    desk.passes(5.0)
    assert desk.claim(1, client="x", where={"seq_len": {">": 0}}).keys == ["k0"]
    new = desk.claim(6, client="b", replica=(0, 2, 0))
    assert new.keys == ["k2", "k4"]
    assert new.deliveries == [2, 2]
    assert new.claim_id != old.claim_id
    assert desk.claim(6, client="b2", replica=(0, 2, 0)).granted is new.granted
    # The other share was the drawer's too, until somebody asked for it.
    other = desk.claim(6, client="c", replica=(1, 2, 0))
    assert other.keys == ["k1", "k3", "k5"]
    assert other.deliveries == [2, 2, 2]
    with pytest.raises(ClaimLost):
        desk.commit(old)
    desk.commit(new)
    assert desk.claim(6, client="d", replica=(0, 2, 0)).granted == new.granted


def test_a_released_share_is_drawn_again_too(desk: Desk) -> None:
    batch_rows(desk, 1, 1)
    old = desk.claim(2, client="a", replica=(0, 1, 0))
    desk.release(old)
    new = desk.claim(2, client="a", replica=(0, 1, 0))
    assert new.keys == old.keys
    assert new.deliveries == [2, 2]
    desk.commit(new)
    with pytest.raises(ClaimLost):
        desk.commit(old)


def test_a_lost_share_of_which_nothing_is_left_is_empty(desk: Desk) -> None:
    batch_rows(desk, 1, 1)
    desk.claim(2, client="a", replica=(0, 1, 0), lease_s=5.0)
    desk.leaves("a")
    desk.passes(5.0)
    desk.commit(desk.claim(2, client="x"))
    empty = desk.claim(2, client="b", replica=(0, 1, 0))
    assert empty.keys == []
    assert not empty.granted.end
    desk.commit(empty)
    assert desk.claim(2, client="c", replica=(0, 1, 0)).claim_id == empty.claim_id


def test_replicas_get_the_same_rows_or_are_told_which_are_gone(desk: Desk) -> None:
    batch_rows(desk, 1, 1, 1, 1)
    desk.claim(4, client="r0", replica=(0, 2, 0))
    desk.clear("k1")
    one = desk.claim(4, client="r1", replica=(1, 2, 0))
    assert one.keys == ["k3"]  # nobody of this rank had seen the row that is gone
    zero = desk.claim(4, client="r0b", replica=(0, 2, 0))
    assert zero.keys == ["k0", "k2"]
    desk.clear("k2")
    with pytest.raises(ClaimLost) as error:
        desk.claim(4, client="r0c", replica=(0, 2, 0))
    lost_by(error, "k2")
    desk.commit(one)


def test_fewer_rows_than_ranks_leave_some_with_an_empty_share(desk: Desk) -> None:
    batch_rows(desk, 1)
    shares = [desk.claim(1, client=f"r{i}", replica=(i, 3, 0)) for i in range(3)]
    assert [share.keys for share in shares] == [["k0"], [], []]
    assert not any(share.granted.end for share in shares)
    for share in shares:
        desk.commit(share)


def test_the_last_batch_is_shorter_and_the_end_is_the_same_for_all_ranks(desk: Desk) -> None:
    batch_rows(desk, 5, 4, 3)
    desk.seal()
    shares = [desk.claim(8, client=f"r{i}", replica=(i, 2, 0)) for i in range(2)]
    assert [share.keys for share in shares] == [["k0"], ["k1", "k2"]]
    end = desk.claim(8, client="r0", replica=(0, 2, 1))
    assert end.keys is None  # r1 might give its rows back
    desk.commit(shares[1])
    assert end.granted.end
    desk.release(shares[0])
    assert desk.claim(8, client="r1", replica=(1, 2, 1)).granted.end
    assert desk.claim(8, client="r1", replica=(1, 2, 2)).keys == []
    assert desk.claim(8, client="r0", replica=(0, 2, 2)).keys == ["k0"]


def test_giving_up_leaves_a_share_to_its_rank(desk: Desk) -> None:
    batch_rows(desk, 1, 1)
    first = desk.claim(2, client="a", replica=(0, 1, 0), number=4)
    desk.abandon("a", 4)
    assert desk.claim(1, client="x").keys is None
    again = desk.claim(2, client="b", replica=(0, 1, 0))
    assert again.granted == first.granted
    assert list(desk.partition.claims.tasks["t"].leases[again.claim_id].holders) == ["b"]


def test_only_the_last_batches_are_remembered(desk: Desk) -> None:
    for index in range(MAX_BATCHES + 1):
        desk.put(f"k{index}")
        desk.commit(desk.claim(1, replica=(0, 1, index)))
    assert desk.claim(1, client="x", replica=(0, 1, 1)).keys == ["k1"]
    with pytest.raises(InvalidRequest, match="batch 0 of task 't' ended long ago"):
        desk.claim(1, client="x", replica=(0, 1, 0))
    task = desk.partition.claims.tasks["t"]
    assert len(task.batches) == len(task.closed) == MAX_BATCHES


# -- upkeep ----------------------------------------------------------------------------------


def test_queues_that_nobody_uses_are_let_go(desk: Desk) -> None:
    desk.put("a", {"n": 1})
    for i in range(MAX_IDLE + 3):
        asked = desk.claim(2, where={"n": i}, task=f"t{i}")
        assert asked.keys is None
        desk.leave(asked)
    claims = desk.partition.claims
    assert sum(len(task.queues) for task in claims.tasks.values()) == MAX_IDLE
    assert len(claims.tasks) == MAX_IDLE  # a task that never took anything goes with its queue
    assert len(desk.partition.views) == MAX_IDLE + 3  # views are kept idle for a while too


def test_a_partition_has_a_bounded_number_of_tasks(desk: Desk) -> None:
    waiting = [desk.claim(1, task=f"t{i}") for i in range(MAX_TASKS)]
    with pytest.raises(InvalidRequest, match="has 256 tasks"):
        desk.claim(1, task="one more")
    desk.put("a")
    assert all(asked.keys == ["a"] for asked in waiting)


def test_the_end_of_a_partition_leaves_nothing_behind(desk: Desk) -> None:
    desk.put("a")
    desk.claim(1, client="a")
    waiting = desk.claim(1, client="b")
    claims = desk.partition.claims
    views = [queue.view for task in claims.tasks.values() for queue in task.queues.values()]
    assert claims.end() == [waiting.ask]
    assert claims.tasks == {}
    assert "a" not in claims.holders
    assert not claims.active
    assert all(not view.subscribers for view in views)
    desk.leave(waiting)


def test_the_task_that_has_committed_least_lags(desk: Desk) -> None:
    claims = desk.partition.claims
    desk.put("a b c d")
    position = desk.partition.index.get("a")
    assert position is not None
    assert claims.lagging_task() is None
    assert not claims.is_committed_by_all(position)
    slow = desk.claim(1, task="slow")
    fast = desk.claim(3, task="fast")
    desk.commit(fast, task="fast")
    assert claims.lagging_task() == "slow"
    assert not claims.is_committed_by_all(position)
    desk.commit(slow, task="slow")
    assert claims.is_committed_by_all(position)
    desk.clear("a b c")
    assert claims.lagging_task() == "slow"  # both have committed nothing that is left


def test_all_terms_begin_anew_for_claims_that_came_from_elsewhere(desk: Desk) -> None:
    desk.put("a")
    desk.claim(1, client="dead", lease_s=5.0)
    desk.leaves("dead")
    desk.ledger.lease_now = 100.0
    desk.partition.claims.holders.begin_anew(100.0)
    desk.passes(4.9)
    assert desk.partition.claims.tasks["t"].held
    desk.passes(0.1)
    assert not desk.partition.claims.tasks["t"].held
