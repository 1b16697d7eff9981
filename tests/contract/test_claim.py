"""kv_claim, kv_commit and kv_release: which rows come, whose they are, and how claims end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane.errors import (
    ClaimLost,
    DeadlineExceeded,
    InvalidRequest,
    PartitionNotFound,
)
from dataplane.types import Claim, KVBatchMeta
from tests.contract.planes import Plane
from tests.contract.waits import in_vain, under_way

DONE = {"status": "done"}


def group(
    client: Any, partition: str, uid: str, each: list[dict[str, Any]], status: str = "finished"
) -> list[str]:
    """A group with a trajectory of each of these tags; their keys."""
    attempt = client.begin_group(uid, partition, n=len(each))
    keys = [f"{uid}_{i}" for i in range(len(each))]
    client.kv_batch_put(keys, partition, None, each, attempt=attempt)
    client.end_group(attempt, status)
    return keys


def nothing_to_claim(client: Any, partition: str, task: str = "t", **how: Any) -> DeadlineExceeded:
    """The error of a claim for which there are no rows."""
    return in_vain(lambda: client.kv_claim(partition, task, count=1, timeout=0.05, **how))


# -- what comes ------------------------------------------------------------------------------


def test_a_claim_is_the_oldest_rows_with_their_tags_and_fields(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, {"x": torch.arange(2)}, [{"n": 0}, {"n": 1}])
    put = client.kv_batch_put(["c", "d"], partition, {"x": torch.arange(2)}, [{"n": 2}, {"n": 3}])
    claim = client.kv_claim(partition, "t", count=3, timeout=5)
    assert type(claim) is Claim
    assert type(claim.meta) is KVBatchMeta
    assert (claim.partition_id, claim.task, len(claim)) == (partition, "t", 3)
    assert claim.keys == ["a", "b", "c"]
    assert claim.tags == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert claim.meta.fields == ["x"]
    assert claim.meta.revision == put.revision
    assert claim.deliveries == [1, 1, 1]
    assert not claim.end
    rows = client.kv_batch_get(claim.keys, partition, layout="list")
    assert [value.item() for value in rows.fields["x"]] == [0, 1, 0]
    assert client.kv_claim(partition, "t", count=1, timeout=5).keys == ["d"]


def test_a_claim_waits_for_fields_and_where(plane: Plane, client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, {"x": torch.arange(2)}, [{}, DONE])
    how: dict[str, Any] = {"count": 1, "fields": ["x", "y"], "where": DONE, "timeout": 20}
    with under_way(plane, client.kv_claim, partition, "t", **how) as claim:
        plane.witness.kv_put("a", partition, {"y": torch.tensor(1.0)}, must_exist=True)
        plane.witness.kv_put("b", partition, tags={"n": 1})
        assert not claim.done()
        plane.witness.kv_put("b", partition, {"y": torch.tensor(2.0)}, must_exist=True)
        assert claim.result(20).keys == ["b"]


def test_a_claim_waits_for_all_its_rows_and_for_its_partition(
    plane: Plane, client: Any, partition: str
) -> None:
    with under_way(plane, client.kv_claim, partition, "t", count=3, timeout=20) as claim:
        plane.witness.kv_batch_put(["a", "b"], partition, None, [{}, {}])
        assert not claim.done()
        plane.witness.kv_put("c", partition, tags={})
        assert claim.result(20).keys == ["a", "b", "c"]


def test_rows_come_in_the_order_of_a_tag(client: Any, partition: str) -> None:
    lengths = {"a": 30, "b": 10, "c": None, "d": 20, "e": 10}
    for key, length in lengths.items():
        client.kv_put(key, partition, tags={} if length is None else {"seq_len": length})
    up = client.kv_claim(partition, "up", count=5, order_by="seq_len", timeout=5)
    assert up.keys == ["b", "e", "d", "a", "c"]
    down = client.kv_claim(partition, "down", count=5, order_by="-seq_len", timeout=5)
    assert down.keys == ["a", "d", "b", "e", "c"]


def test_a_large_claim_comes_whole(client: Any, partition: str) -> None:
    keys = [f"k{i}" for i in range(3000)]
    tags = [{"n": i, "s": f"s{i}", "l": [i]} for i in range(3000)]
    client.kv_batch_put(keys, partition, None, tags)
    claim = client.kv_claim(partition, "t", count=2500, where={"n": {">=": 400}}, timeout=20)
    assert claim.keys == keys[400:2900]
    assert claim.tags == tags[400:2900]
    client.kv_commit(claim)
    left = client.kv_claim(partition, "t", count=500, timeout=20)
    assert left.keys == keys[:400] + keys[2900:]


def test_two_tasks_are_independent(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    one = client.kv_claim(partition, "one", count=2, timeout=5)
    client.kv_commit(one)
    two = client.kv_claim(partition, "two", count=2, timeout=5)
    assert two.keys == one.keys
    assert two.deliveries == [1, 1]
    nothing_to_claim(client, partition, "one")
    client.kv_release(two)
    assert client.kv_claim(partition, "two", count=1, timeout=5).deliveries == [2]


def test_committed_rows_stay_and_are_not_offered_to_that_task_again(
    client: Any, partition: str
) -> None:
    client.kv_put("a", partition, {"x": torch.arange(3)}, {"n": 1})
    client.kv_commit(client.kv_claim(partition, "t", count=1, timeout=5))
    client.kv_put("a", partition, {"x": torch.arange(5)}, {"n": 2})
    nothing_to_claim(client, partition)
    assert client.kv_list(partition).tags == [{"n": 2}]


def test_those_who_wait_are_served_in_turn(plane: Plane, client: Any, partition: str) -> None:
    client.kv_put("a", partition, tags={})
    with (
        under_way(plane, client.kv_claim, partition, "t", count=3, timeout=20) as first,
        under_way(plane, client.kv_claim, partition, "t", count=1, timeout=20) as second,
    ):
        plane.witness.kv_put("b", partition, tags={})
        assert not second.done()
        plane.witness.kv_batch_put(["c", "d"], partition, None, [{}, {}])
        assert first.result(20).keys == ["a", "b", "c"]
        assert second.result(20).keys == ["d"]


def test_every_row_of_many_claimers_goes_to_one(plane: Plane, partition: str) -> None:
    clients = [plane.another() for _ in range(4)]
    plane.client.kv_batch_put([f"k{i}" for i in range(200)], partition, None, [{}] * 200)
    plane.client.kv_seal_partition(partition)
    got: list[list[str]] = [[] for _ in clients]

    def consume(number: int) -> None:
        while not (claim := clients[number].kv_claim(partition, "t", count=7, timeout=30)).end:
            got[number] += claim.keys
            clients[number].kv_commit(claim)

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(key for keys in got for key in keys) == sorted(f"k{i}" for i in range(200))


# -- how claims end --------------------------------------------------------------------------


def test_a_released_claim_is_offered_again_at_once_in_its_old_place(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("a", partition, tags={})
    client.kv_put("b", partition, tags={})
    claim = client.kv_claim(partition, "t", count=1, timeout=5)
    with under_way(plane, client.kv_claim, partition, "t", count=2, timeout=20) as waiting:
        assert not waiting.done()
        plane.witness.kv_release(claim)
        again = waiting.result(20)
    assert again.keys == ["a", "b"]
    assert again.deliveries == [2, 1]
    with pytest.raises(ClaimLost) as error:
        client.kv_commit(claim)
    assert error.value.keys == ["a"]
    client.kv_commit(again)


def test_a_second_commit_is_answered_as_the_first(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    claim = client.kv_claim(partition, "t", count=2, timeout=5)
    done = client.kv_commit(claim)
    client.kv_clear(["a"], partition)
    assert client.kv_commit(claim) == done
    with pytest.raises(ClaimLost, match="committed") as error:
        client.kv_release(claim)
    assert error.value.keys == ["a", "b"]


def test_clearing_claimed_rows_makes_the_commit_name_exactly_those(
    client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b", "c", "d"], partition, None, [{}] * 4)
    claim = client.kv_claim(partition, "t", count=4, timeout=5)
    assert client.kv_clear(["b", "d", "x"], partition) == 2
    client.kv_put("b", partition, tags={"new": True})
    for end in (client.kv_commit, client.kv_release):
        with pytest.raises(ClaimLost) as error:
            end(claim)
        lost = error.value
        assert (lost.partition_id, lost.task, lost.keys) == (partition, "t", ["b", "d"])
    left = claim.without(lost.keys)
    assert left.keys == ["a", "c"]
    client.kv_commit(left)
    again = client.kv_claim(partition, "t", count=1, timeout=5)
    assert (again.keys, again.tags, again.deliveries) == (["b"], [{"new": True}], [1])
    nothing_to_claim(client, partition)


def test_a_clear_by_predicate_takes_claimed_rows_too(client: Any, partition: str) -> None:
    client.kv_batch_put([f"k{i}" for i in range(6)], partition, None, [{"n": i} for i in range(6)])
    claim = client.kv_claim(partition, "t", count=6, timeout=5)
    client.kv_clear(None, partition, where={"n": {">=": 4}})
    with pytest.raises(ClaimLost) as error:
        client.kv_commit(claim)
    assert error.value.keys == ["k4", "k5"]


def test_a_claim_that_is_not_known_any_more_is_lost_with_all_its_keys(
    client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    claim = client.kv_claim(partition, "t", count=2, timeout=5)
    strange = Claim("t", claim.claim_id + 1000, claim.meta, claim.deliveries)
    other = Claim("other", claim.claim_id, claim.meta, claim.deliveries)
    for wrong in (strange, other):
        for end in (client.kv_commit, client.kv_release):
            with pytest.raises(ClaimLost) as error:
                end(wrong)
            assert error.value.keys == ["a", "b"]
            assert error.value.task == wrong.task
            assert error.value.partition_id == partition
    client.kv_commit(claim)


def test_a_client_that_leaves_loses_its_claims_after_their_term(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    gone = plane.connect()
    lost = gone.kv_claim(partition, "t", count=1, lease_s=0.2, timeout=5)
    assert lost.keys == ["a"]
    with under_way(plane, client.kv_claim, partition, "t", count=2, timeout=20) as waiting:
        assert not waiting.done()
        gone.close()
        claim = waiting.result(20)
    assert claim.keys == ["a", "b"]
    assert claim.deliveries == [2, 1]
    with pytest.raises(ClaimLost) as error:
        client.kv_commit(lost)
    assert error.value.keys == ["a"]
    client.kv_commit(claim)


def test_capacity_for_ten_rows_takes_ten_more_when_ten_were_consumed(
    client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 10})
    first, second = ([f"{name}{i}" for i in range(10)] for name in "ab")
    client.kv_batch_put(first, partition, {"x": torch.arange(10)})
    claim = client.kv_claim(partition, "t", count=10, fields=["x"], timeout=5)
    client.kv_commit(claim)
    client.kv_clear(claim.keys, partition)
    client.kv_batch_put(second, partition, {"x": torch.arange(10)}, timeout=5)
    claim = client.kv_claim(partition, "t", count=10, fields=["x"], timeout=5)
    assert claim.keys == second
    with pytest.raises(InvalidRequest, match="10 rows"):
        client.kv_claim(partition, "t", count=11, timeout=5)


@pytest.mark.kinds("embedded-async")
def test_a_claim_that_is_cancelled_as_soon_as_it_was_sent_holds_nothing(
    plane: Plane, client: Any, partition: str
) -> None:
    """The store gets the claim and that it was given up in one piece."""
    client.kv_put("a", partition, tags={})

    async def cancelled() -> None:
        claiming = asyncio.ensure_future(client.client.kv_claim(partition, "t", count=1))
        await asyncio.sleep(0)  # it runs until it waits for its answer
        claiming.cancel()
        await asyncio.wait([claiming])
        assert claiming.cancelled()

    for _ in range(20):
        client._run(cancelled())
        claim = plane.witness.kv_claim(partition, "t", count=1, timeout=5)
        plane.witness.kv_release(claim)
    assert claim.deliveries == [20]  # of what nobody was told, nothing is counted


# -- groups ----------------------------------------------------------------------------------


def test_whole_groups_are_claimed(plane: Plane, client: Any, partition: str) -> None:
    sessions = [{"session_id": s, "index": i} for s, i in [(1, 0), (0, 1), (0, 0)]]
    group(client, partition, "u", sessions)
    group(client, partition, "failed", [{}], "failure")
    how: dict[str, Any] = {"count": 2, "groups": True, "timeout": 20}
    with under_way(plane, client.kv_claim, partition, "t", **how) as waiting:
        group(plane.witness, partition, "v", [{}, {}])
        claim = waiting.result(20)
    assert claim.keys == ["u_2", "u_1", "u_0", "v_0", "v_1"]
    with pytest.raises(InvalidRequest, match="left of theirs"):
        client.kv_commit(claim.without(["u_0"]))
    client.begin_group("v", partition, n=2)
    with pytest.raises(ClaimLost) as error:
        client.kv_commit(claim)
    assert error.value.keys == ["v_0", "v_1"]
    client.kv_commit(claim.without(error.value.keys))


# -- by rank ---------------------------------------------------------------------------------


def test_ranks_share_a_batch_and_replicas_share_a_rank(plane: Plane, partition: str) -> None:
    tokens = [9, 7, 6, 5, 4, 3]
    keys = [f"k{i}" for i in range(6)]
    plane.client.kv_batch_put(keys, partition, None, [{"seq_len": n} for n in tokens])
    replicas = [plane.another() for _ in range(4)]
    claims = [
        replica.kv_claim(partition, "t", count=6, replica=(i // 2, 2, 0), timeout=5)
        for i, replica in enumerate(replicas)
    ]
    assert [claim.keys for claim in claims] == [["k0", "k3", "k5"]] * 2 + [["k1", "k2", "k4"]] * 2
    assert claims[0].claim_id == claims[1].claim_id != claims[2].claim_id == claims[3].claim_id
    assert claims[0].tags == claims[1].tags
    done = [replica.kv_commit(claim) for replica, claim in zip(replicas, claims, strict=True)]
    assert len(set(done)) == 1
    nothing_to_claim(plane.client, partition)


def test_ranks_that_do_not_agree_are_told_both_sides(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    client.kv_claim(partition, "t", count=2, replica=(0, 2, 0), timeout=5)
    with pytest.raises(InvalidRequest, match="dp_size=2, and now with dp_size=4"):
        client.kv_claim(partition, "t", count=2, replica=(1, 4, 0), timeout=5)
    with pytest.raises(InvalidRequest, match=r"where=\{\}, and now with where=\{'n': \{'=': 1\}\}"):
        client.kv_claim(partition, "t", count=2, replica=(1, 2, 0), where={"n": 1}, timeout=5)
    assert client.kv_claim(partition, "t", count=2, replica=(1, 2, 0), timeout=5).keys == ["b"]


# -- the end ---------------------------------------------------------------------------------


def test_a_sealed_partition_comes_to_an_end(plane: Plane, client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b", "c"], partition, None, [{}] * 3)
    first = client.kv_claim(partition, "t", count=2, timeout=5)
    other = plane.another()
    with under_way(plane, other.kv_claim, partition, "t", count=2, timeout=20) as waiting:
        plane.witness.kv_seal_partition(partition)
        assert not waiting.done()  # what the other claimer holds may come back
        plane.witness.kv_commit(first)
        last = waiting.result(20)
    assert last.keys == ["c"]
    assert not last.end
    end = other.kv_claim(partition, "t", count=2, timeout=5)
    assert (end.keys, end.deliveries, end.end) == ([], [], True)
    other.kv_commit(end)
    other.kv_release(end)
    other.kv_commit(last)
    assert client.kv_claim(partition, "t", count=2, timeout=5).end


def test_a_drop_ends_the_wait(plane: Plane, client: Any, partition: str) -> None:
    client.kv_put("a", partition, tags={})
    held = client.kv_claim(partition, "t", count=1, timeout=5)
    with under_way(plane, client.kv_claim, partition, "t", count=1, timeout=20) as waiting:
        plane.witness.kv_drop_partition(partition)
        with pytest.raises(PartitionNotFound) as error:
            waiting.result(20)
    assert error.value.partition_id == partition
    with pytest.raises(PartitionNotFound):
        client.kv_commit(held)
    client.kv_put("a", partition, tags={})
    with pytest.raises(ClaimLost):
        client.kv_commit(held)
    assert client.kv_claim(partition, "t", count=1, timeout=5).claim_id != held.claim_id


# -- errors ----------------------------------------------------------------------------------


def test_a_claim_that_comes_to_nothing_says_why_and_holds_nothing(
    client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [DONE, {}])
    error = in_vain(lambda: client.kv_claim(partition, "step", count=3, where=DONE, timeout=0.1))
    assert 0.09 <= error.waited_s < 20
    assert error.explanation
    assert "step" in str(error)
    assert partition in str(error)
    client.kv_put("c", partition, tags=DONE)
    assert client.kv_claim(partition, "step", count=2, where=DONE, timeout=5).keys == ["a", "c"]


BAD: list[tuple[str, dict[str, Any]]] = [
    ("count", {"count": 0}),
    ("count", {"count": "3"}),
    ("count", {"count": 65_537}),
    ("fields", {"fields": "x"}),
    ("fields", {"fields": 5}),
    ("fields", {"fields": [1]}),
    ("where", {"where": {"n": {"~": 1}}}),
    ("order_by", {"order_by": 5}),
    ("order_by", {"order_by": "-"}),
    ("groups", {"groups": "yes"}),
    ("lease_s", {"lease_s": 0.01}),
    ("lease_s", {"lease_s": 1e6}),
    ("lease_s", {"lease_s": None}),
    ("replica", {"replica": 3}),
    ("replica", {"replica": (0, 1)}),
    ("dp_rank", {"replica": (1, 1, 0)}),
    ("dp_size", {"replica": (0, 0, 0)}),
    ("batch_index", {"replica": (0, 1, -1)}),
    ("timeout", {"timeout": 0}),
]


@pytest.mark.parametrize(("named", "argument"), BAD, ids=lambda value: str(value)[:30])
def test_an_argument_that_will_not_do_is_named(
    client: Any, partition: str, named: str, argument: dict[str, Any]
) -> None:
    client.kv_put("a", partition, tags={})
    with pytest.raises(InvalidRequest, match=named):
        client.kv_claim(partition, "t", **{"count": 1, "timeout": 5, **argument})
    with pytest.raises(InvalidRequest, match="task name"):
        client.kv_claim(partition, argument, count=1, timeout=5)
    with pytest.raises(InvalidRequest, match="partition"):
        client.kv_claim(7, "t", count=1, timeout=5)


@pytest.mark.parametrize("wrong", [None, 5, "claim", ["a"]], ids=repr)
def test_only_a_claim_can_be_committed_or_released(client: Any, wrong: Any) -> None:
    for end in (client.kv_commit, client.kv_release):
        with pytest.raises(InvalidRequest, match="kv_claim"):
            end(wrong)


def test_keys_that_a_claim_never_held_are_refused(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    claim = client.kv_claim(partition, "t", count=1, timeout=5)
    wider = Claim(claim.task, claim.claim_id, client.kv_list(partition).to_meta(), [1, 1])
    ends: list[Callable[[Claim], Any]] = [client.kv_commit, client.kv_release]
    for end in ends:
        with pytest.raises(InvalidRequest, match="never held 'b'"):
            end(wider)
    client.kv_commit(claim)
