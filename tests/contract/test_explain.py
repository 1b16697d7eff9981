"""`explain`, and the explanation of deadlines that passed: what is missing, whom it waits for."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from dataplane.errors import DeadlineExceeded, InvalidRequest
from dataplane.tags.query import compile_where
from dataplane.types import Explanation
from tests.contract.planes import Plane, thread_plane
from tests.contract.waits import in_vain
from tests.deadline import eventually

LATE_S = 0.4
"""The deadline of waits that are in vain."""


@pytest.fixture
def two_prompts(client: Any, partition: str) -> str:
    """Prompts A and B with four sessions each, of which B's last yields nothing."""
    attempts = {uid: client.begin_group(uid, partition, n=4) for uid in "AB"}
    for uid, sessions in (("A", 4), ("B", 3)):
        for number in range(sessions):
            client.kv_put(
                f"{uid}_{number}_0", partition, {"x": torch.arange(3)},
                {"uid": uid, "session_id": number, "status": "completed"},
                attempt=attempts[uid],
            )  # fmt: skip
    client.end_group(attempts["A"], "finished")
    return partition


def late(plane: Plane, *args: Any, **named: Any) -> DeadlineExceeded:
    """The error of a wait that is in vain."""
    error = in_vain(lambda: plane.client.kv_wait(*args, timeout=LATE_S, **named))
    assert LATE_S <= error.waited_s < LATE_S + 1.0
    return error


# -- groups ----------------------------------------------------------------------------------


def test_a_group_that_cannot_complete_is_named_with_its_sessions(
    client: Any, two_prompts: str
) -> None:
    told = client.explain(two_prompts, {"status": "completed"}, group_by="uid", count=2)
    assert type(told) is Explanation
    assert (told.matching, told.total) == (1, 2)
    [b] = told.stuck
    assert (b["key"], b["status"], b["sessions"], b["n"]) == ("B", "running", 3, 4)
    assert b["alive"] is True
    assert b["client_id"] == client.client_id
    first, _, line = told.text.splitlines()[:3]
    assert first == f"partition {two_prompts!r}: 1 of 2 groups are whole and match; 2 wanted"
    assert line.startswith("  'B': running for ")
    assert ", 3 of 4 sessions, producer pid " in line
    assert line.endswith(f"(client {client.client_id}): alive")


def test_a_strict_wait_for_two_whole_groups_says_b_3_of_4(plane: Plane, two_prompts: str) -> None:
    error = late(plane, two_prompts, {"status": "completed"}, count=2, group_by="uid")
    assert "'B'" in (error.explanation or "")
    assert "3 of 4" in (error.explanation or "")


def test_a_claim_that_got_nothing_says_b_3_of_4(client: Any, two_prompts: str) -> None:
    error = in_vain(
        lambda: client.kv_claim(two_prompts, "train", count=2, groups=True, timeout=LATE_S)
    )
    why = error.explanation or ""
    assert "1 of 2 groups are whole and match, 1 of them ready for task 'train'; 2 wanted" in why
    assert "'B': running for " in why
    assert "3 of 4 sessions" in why


def test_a_finished_group_is_told_with_the_condition_that_fails(
    client: Any, partition: str
) -> None:
    attempt = client.begin_group("A", partition, n=2)
    client.kv_put("A_0", partition, None, {"session_id": 0, "status": "completed"}, attempt=attempt)
    client.kv_put("A_1", partition, None, {"session_id": 1, "status": "failed"}, attempt=attempt)
    client.end_group(attempt, "finished")
    where = {"status": "completed"}
    told = client.explain(partition, where, fields=["rewards"], group_by="uid", count=1)
    assert told.failing == {"field 'rewards'": 1, "status = 'completed'": 1}
    assert "'A' finished " in told.text
    assert (
        "with 2 of 2 sessions, but 2 of 2 rows fail: 'A_0' first (without 'rewards')" in told.text
    )


# -- rows ------------------------------------------------------------------------------------


def test_conditions_are_told_with_how_often_they_fail(client: Any, partition: str) -> None:
    client.kv_batch_put(
        [f"k{i}" for i in range(40)], partition, {"x": torch.ones(40, 2)},
        [{"status": "finished" if i < 3 else "pending", "step": i % 2} for i in range(40)],
    )  # fmt: skip
    where = {"status": "finished", "step": {">=": 1}}
    told = client.explain(partition, where, fields=["x", "rm_scores"], count=8)
    assert told.text.startswith(f"partition {partition!r}: 0 of 40 rows match; 8 wanted\n")
    assert "\n  status = 'finished': 37 of 40 rows fail\n" in told.text
    assert "\n  step >= 1: 20 of 40 rows fail\n" in told.text
    assert "\n  field 'rm_scores' is missing on 1 row that match otherwise\n" in told.text
    assert told.failing == {
        "status = 'finished'": 37, "step >= 1": 20, "field 'rm_scores'": 1,
    }  # fmt: skip
    assert [(s["key"], s["status"], s["count"]) for s in told.stuck] == [
        ("k1", "without 'rm_scores'", 1), ("k3", "pending", 37),
    ]  # fmt: skip


def test_a_prompt_is_told_with_its_age_and_with_who_wrote_it_last(
    plane: Plane, partition: str
) -> None:
    # verl#7155
    plane.client.kv_put("p7", partition, None, {"is_prompt": True, "status": "running"})
    other = plane.another()
    other.kv_put("p7", partition, None, {"attempts": 1})
    where = {"is_prompt": True, "status": "finished"}
    [stuck] = plane.client.explain(partition, where, count=1).stuck
    assert (stuck["key"], stuck["client_id"], stuck["alive"]) == ("p7", other.client_id, True)
    assert 0.0 <= stuck["age_s"] < 30.0
    other.close()

    def is_dead() -> bool:
        return plane.client.explain(partition, where).stuck[0]["alive"] is False

    eventually(is_dead, "the writer is known to be gone")
    error = late(plane, partition, where)
    assert "'p7': running, unchanged for " in (error.explanation or "")
    assert f"(client {other.client_id}): dead" in (error.explanation or "")


def test_who_matches_and_who_is_ready_for_a_task_are_two_numbers(
    client: Any, partition: str
) -> None:
    client.kv_batch_put([f"k{i}" for i in range(6)], partition, None, [{"n": i} for i in range(6)])
    done = client.kv_claim(partition, "train", count=2)
    client.kv_commit(done)
    client.kv_claim(partition, "train", count=3)
    told = client.explain(partition, task="train", count=4)
    assert "6 of 6 rows match, 1 of them ready for task 'train'; 4 wanted" in told.text
    assert "task 'train': 2 rows committed, 3 claimed" in told.text
    assert "  3 rows in 1 claim since " in told.text
    assert f"(client {client.client_id}): alive" in told.text


# -- memory, the plane, partitions that are not there ----------------------------------------


def test_it_says_what_holds_the_memory_and_who_waits_for_room(plane: Plane, partition: str) -> None:
    client, late = plane.client, plane.another()
    client.kv_create_partition(partition, quota={"rows": 4})
    client.kv_batch_put(["a", "b"], partition, {"x": torch.zeros(2, 1000)})
    attempt = client.begin_group("G", partition, n=1)
    putting = threading.Thread(
        target=late.kv_batch_put, args=(["c", "d"], partition, None, [{}, {}])
    )
    putting.start()
    eventually(lambda: client.explain(partition).holders[0]["waiting"] == 1, "a put waits")
    told = client.explain(partition)
    of_partition, of_producer = told.holders
    assert of_partition["partition_id"] == partition
    assert (of_partition["rows"], of_partition["held_rows"]) == (3, 1)
    assert of_partition["extent_bytes"] >= 8000
    assert of_partition["quota"] == {"rows": 4}
    assert (of_producer["client_id"], of_producer["alive"]) == (client.client_id, True)
    assert f"partition {partition!r} holds " in told.text
    assert "; quota rows 4; 1 waits for room\n" in told.text
    client.end_group(attempt, "failure")
    putting.join(20.0)
    assert not putting.is_alive()
    assert client.explain(partition).holders[0]["waiting"] == 0


def test_without_a_partition_it_tells_of_the_plane(client: Any, two_prompts: str) -> None:
    told = client.explain()
    assert told.text.startswith("the plane has ")
    assert f"in {two_prompts!r}: 'B': running for " in told.text
    assert {"partition_id": two_prompts, "key": "B"}.items() <= told.stuck[-1].items()


def test_of_a_partition_that_is_not_there_it_names_one_that_is(
    plane: Plane, two_prompts: str
) -> None:
    missing = two_prompts[:-1] + "x"
    told = plane.client.explain(missing, count=2)
    assert told.text.startswith(f"there is no partition {missing!r}; 2 rows wanted; there are ")
    assert repr(two_prompts) in told.text
    assert (told.matching, told.total) == (0, 0)
    assert late(plane, missing, count=2).explanation.startswith(
        f"there is no partition {missing!r}"
    )


# -- many deadlines at once ------------------------------------------------------------------


@pytest.mark.parametrize("alike", [True, False])
def test_hundreds_of_deadlines_at_once_cost_little_more_than_one(
    plane_settings: dict[str, Any], alike: bool
) -> None:
    rows, waiters = 3000, 300
    with thread_plane(plane_settings) as served, served.connect() as client:
        tags = [{"n": i} for i in range(rows)]
        client.kv_batch_put([f"k{i}" for i in range(rows)], "p", None, tags)
        assert served.server.tags is not None
        explaining = served.server.tags.explaining
        walks: list[Any] = []
        tell = explaining._tell

        def counted(*asked: Any) -> Any:
            walks.append(asked)
            return tell(*asked)

        explaining._tell = counted

        async def explain(wheres: list[Any]) -> tuple[list[str], float]:
            """The texts, and the CPU time of all of them in seconds."""
            started = time.thread_time()
            texts = [
                explaining.explain_text("p", compile_where(where), (), False, None, 1)
                for where in wheres
            ]
            return await asyncio.gather(*texts), time.thread_time() - started

        wheres = [{"n": {">": rows if alike else rows + i}} for i in range(waiters)]
        explained = asyncio.run_coroutine_threadsafe(explain(wheres), served.loop)
        texts, cpu_s = explained.result(30.0)
    whole = [f"n > {w['n']['>']}: {rows} of {rows} rows fail" in t
             for w, t in zip(wheres, texts, strict=True)]  # fmt: skip
    cut = ["could be looked at in time" in text for text in texts]
    assert all(a != b for a, b in zip(whole, cut, strict=True))
    assert len(walks) == len(set(texts)) == 1 if alike else len(walks) == waiters
    # To look at all rows for each takes over a second.
    assert cpu_s < 0.5


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"partition_id": ""}, "partition name"),
        ({"partition_id": "p", "where": {"a": {"~": 1}}}, "'~'"),
        ({"partition_id": "p", "where": 5}, "where"),
        ({"partition_id": "p", "fields": "x"}, "fields"),
        ({"partition_id": "p", "fields": [5]}, "fields"),
        ({"partition_id": "p", "task": 5}, "task"),
        ({"partition_id": "p", "group_by": "session"}, "group_by"),
        ({"partition_id": "p", "count": 0}, "count"),
        ({"partition_id": "p", "count": "many"}, "count"),
        ({"where": {"a": 1}}, "name it"),
        ({"count": 1}, "name it"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    client: Any, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        client.explain(**arguments)
