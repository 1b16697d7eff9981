"""Groups and their attempts: begun, ended, retired; late puts refused; one effect in any case."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from dataplane.client.connection import Connection
from dataplane.client.effects import Ask
from dataplane.client.groups import begin_group, end_group
from dataplane.client.put import flags_of, put_batch
from dataplane.client.tags import clear_rows
from dataplane.errors import (
    InvalidRequest,
    KeyNotFound,
    OutcomeUnknown,
    PartitionNotFound,
    StaleWrite,
)
from dataplane.wire.channel import Broken, Channel
from tests.contract.planes import MAPPED, STEPS, Plane
from tests.contract.test_promises import LARGE, SIZES, listed
from tests.contract.test_scenarios import asks
from tests.deadline import eventually


def tags_of(client: Any, partition: str, key: str) -> dict[str, Any]:
    return listed(client, partition)[key][0]


def groups_of(client: Any, partition: str) -> int:
    """How many groups are open."""
    return client.kv_list_partitions()[partition]["groups"]


# -- begun -----------------------------------------------------------------------------------


def test_a_group_begins_with_its_prompts_row(client: Any, partition: str) -> None:
    client.kv_put("u", partition, tags={"task_name": "sums", "status": "pending"})
    attempt = client.begin_group("u", partition, n=4)
    listing = client.kv_list(partition)
    assert listing.revision.n == attempt
    assert listing.tags == [
        {
            "task_name": "sums", "status": "running", "is_prompt": True, "uid": "u", "n": 4,
            "attempt": attempt,
        }
    ]  # fmt: skip
    assert groups_of(client, partition) == 1


def test_the_first_group_creates_its_partition(client: Any, partition: str) -> None:
    with pytest.raises(PartitionNotFound):
        client.kv_list(partition)
    client.begin_group("u", partition, n=1)
    assert client.kv_list(partition).keys == ["u"]


@SIZES
def test_a_group_takes_puts_that_name_its_attempt(client: Any, partition: str, size: int) -> None:
    attempt = client.begin_group("u", partition, n=2, declared_bytes=2 << 20)
    client.kv_put("u_0_0", partition, {"x": torch.arange(size)}, {"uid": "u"}, attempt=attempt)
    client.kv_batch_put(
        ["u_1_0", "u_1_1"], partition, {"x": torch.ones(2, size)[:, :size].long()}, attempt=attempt
    )
    assert len(client.kv_list(partition)) == 4
    got = client.kv_batch_get(["u_0_0"], partition, layout="list")["x"][0]
    assert torch.equal(got, torch.arange(size))


def test_a_group_that_begins_anew_drops_its_rows_at_the_same_revision(
    client: Any, partition: str
) -> None:
    first = client.begin_group("u", partition, n=2)
    client.kv_batch_put(
        ["u_0", "u_1"], partition, {"x": torch.arange(2)}, [{"s": 0}, {"s": 1}], attempt=first
    )
    client.kv_put("v_0", partition, tags={})
    before = client.kv_list(partition).revision
    second = client.begin_group("u", partition, n=3)
    after = client.kv_list(partition, since=before)
    assert second == before.n + 1 == after.revision.n
    assert (after.keys, set(after.cleared)) == (["u"], {"u_0", "u_1"})
    assert after.tags[0]["attempt"] == second
    assert after.tags[0]["n"] == 3
    assert set(listed(client, partition)) == {"u", "v_0"}
    assert client.status()["bytes_in_use"] == 0
    assert groups_of(client, partition) == 1
    # What is put for the new attempt stays, under the same keys.
    client.kv_put("u_0", partition, {"x": torch.tensor(7)}, attempt=second)
    assert client.kv_batch_get(["u_0"], partition)["x"].tolist() == [7]


# -- closed ----------------------------------------------------------------------------------

CLOSED: dict[str, Callable[[Any, str, int], object]] = {
    "ended": lambda client, partition, attempt: client.end_group(attempt, "finished"),
    "begun anew": lambda client, partition, attempt: client.begin_group("u", partition, n=1),
    "retired by its prompt": lambda client, partition, attempt: client.kv_clear(
        ["u"], partition, retire=True
    ),
    "retired by a row": lambda client, partition, attempt: client.kv_clear(
        ["u_0"], partition, retire=True
    ),
    "retired by a predicate": lambda client, partition, attempt: client.kv_clear(
        None, partition, where={"uid": "u"}, retire=True
    ),
    "dropped": lambda client, partition, attempt: client.kv_drop_partition(partition),
}


@SIZES
@pytest.mark.parametrize("how", CLOSED)
def test_a_put_for_a_closed_attempt_is_refused_however_late(
    client: Any, partition: str, how: str, size: int
) -> None:
    attempt = client.begin_group("u", partition, n=2)
    client.kv_put("u_0", partition, tags={"uid": "u"}, attempt=attempt)
    CLOSED[how](client, partition, attempt)
    # Long after: a hundred changes, and the same name anew.
    for i in range(100):
        client.kv_put(f"other-{i}", partition, tags={})
    before = listed(client, partition)
    for fields, tags in (({"x": torch.zeros(size)}, None), (None, {"late": True})):
        for options in ({}, {"must_exist": True}, {"if_absent": True}):
            with pytest.raises(StaleWrite, match=f"attempt {attempt} is not open") as late:
                client.kv_put("u_1", partition, fields, tags, attempt=attempt, **options)
            assert (late.value.attempt, late.value.keys) == (attempt, ["u_1"])
            assert late.value.partition_id == partition
    assert listed(client, partition) == before
    assert client.status()["bytes_in_use"] == 0


def test_clearing_without_retire_leaves_an_attempt_open(client: Any, partition: str) -> None:
    attempt = client.begin_group("u", partition, n=1)
    client.kv_put("u_0", partition, tags={}, attempt=attempt)
    assert client.kv_clear(["u", "u_0"], partition) == 2
    assert client.kv_clear(None, partition, where={}) == 0
    client.kv_put("u_0", partition, tags={"again": True}, attempt=attempt)
    assert listed(client, partition) == {"u_0": ({"again": True}, ())}
    client.end_group(attempt, "finished")
    assert set(listed(client, partition)) == {"u_0"}, "an end brings no prompt back"


def test_a_group_of_which_nothing_is_left_can_be_retired(client: Any, partition: str) -> None:
    attempt = client.begin_group("u", partition, n=1, declared_bytes=1 << 20)
    assert client.kv_clear(["u"], partition) == 1
    assert client.status()["held_bytes"] == {partition: 1 << 20}
    assert client.kv_clear(["u"], partition, retire=True) == 0
    assert client.status()["held_bytes"] == {}
    with pytest.raises(StaleWrite):
        client.end_group(attempt, "finished")


@MAPPED
def test_a_put_that_was_copied_while_its_attempt_closed_is_refused(
    plane: Plane, client: Any, partition: str
) -> None:
    attempt = client.begin_group("u", partition, n=1)

    def before(effect: Any) -> None:
        if asks(effect, "commit"):
            plane.witness.begin_group("u", partition, n=1)

    put = put_batch(
        plane.core, ["u_0"], partition, {"x": torch.zeros(1, LARGE)}, None, 0, plane.deadline(),
        attempt,
    )  # fmt: skip
    with pytest.raises(StaleWrite) as late:
        plane.step(put, before=before)
    assert late.value.attempt == attempt
    assert set(listed(client, partition)) == {"u"}
    plane.settle()
    assert plane.used_bytes() == 0


# -- ended -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["finished", "failure"])
def test_a_group_ends_once(client: Any, partition: str, status: str) -> None:
    attempt = client.begin_group("u", partition, n=1)
    client.kv_put("u_0", partition, tags={"v": 1}, attempt=attempt)
    revision = client.end_group(attempt, status)
    assert client.kv_list(partition).revision == revision
    assert tags_of(client, partition, "u")["status"] == status
    assert tags_of(client, partition, "u_0") == {"v": 1}
    for again in (status, "aborted"):
        with pytest.raises(StaleWrite, match=f"attempt {attempt} is not open") as late:
            client.end_group(attempt, again)
        assert late.value.attempt == attempt
    assert tags_of(client, partition, "u")["status"] == status
    assert client.kv_list(partition).revision == revision
    assert groups_of(client, partition) == 0


@pytest.mark.parametrize("status", ["", "running", "x" * 257, 7, None, b"finished"])
def test_a_status_at_which_a_group_ends_is_a_word(client: Any, partition: str, status: Any) -> None:
    attempt = client.begin_group("u", partition, n=1)
    with pytest.raises(InvalidRequest, match="status at which a group ends"):
        client.end_group(attempt, status)
    assert groups_of(client, partition) == 1


@pytest.mark.parametrize("attempt", [0, -1, True, 1.0, "1", 1 << 63, None, [1]])
def test_what_is_no_attempt_is_refused(client: Any, partition: str, attempt: Any) -> None:
    client.kv_put("k", partition, tags={})
    with pytest.raises(InvalidRequest, match="attempt is what begin_group answered"):
        client.end_group(attempt, "finished")
    if attempt is not None:  # for a put that is no attempt at all
        with pytest.raises(InvalidRequest, match="attempt is what begin_group answered"):
            client.kv_put("k", partition, tags={}, attempt=attempt)


def test_an_attempt_that_never_was_is_not_open(client: Any, partition: str) -> None:
    never = client.kv_put("k", partition, tags={}).revision.n
    with pytest.raises(StaleWrite) as late:
        client.kv_put("k", partition, tags={"n": 1}, attempt=never)
    assert late.value.attempt == never
    with pytest.raises(StaleWrite):
        client.end_group(never + 10**9, "finished")
    assert listed(client, partition) == {"k": ({}, ())}


def test_an_attempt_is_for_its_own_partition(client: Any, partition: str) -> None:
    attempt = client.begin_group("u", partition, n=1)
    with pytest.raises(InvalidRequest, match=f"belongs to partition '{partition}'"):
        client.kv_put("u_0", f"{partition}-other", tags={}, attempt=attempt)


@pytest.mark.parametrize(
    "wrong",
    [
        {"uid": ""}, {"uid": 7}, {"uid": "u\n"}, {"uid": "k" * 2000}, {"partition_id": ""},
        {"partition_id": None}, {"n": 0}, {"n": True}, {"n": 1 << 40}, {"n": "4"},
        {"declared_bytes": -1}, {"declared_bytes": 0.5}, {"declared_bytes": 1 << 63},
    ],
    ids=repr,
)  # fmt: skip
def test_bad_arguments_of_a_group_are_refused_before_anything_happens(
    client: Any, partition: str, wrong: dict[str, Any]
) -> None:
    client.kv_put("k", partition, tags={})
    before = client.status()["revision"]
    arguments: dict[str, Any] = {"uid": "u", "partition_id": partition, "n": 1, **wrong}
    with pytest.raises(InvalidRequest):
        client.begin_group(arguments.pop("uid"), arguments.pop("partition_id"), **arguments)
    assert client.status()["revision"] == before


# -- many at once ----------------------------------------------------------------------------


def test_of_many_who_begin_the_same_group_one_attempt_is_left_open(
    plane: Plane, client: Any, partition: str
) -> None:
    clients = [client, plane.another(), plane.another()]
    attempts: list[int] = []
    lost: list[int] = []

    def begin(one: Any) -> None:
        for i in range(20):
            attempt = one.begin_group("u", partition, n=1)
            attempts.append(attempt)
            try:
                one.kv_put(f"u_{attempt}_{i}", partition, tags={"of": attempt}, attempt=attempt)
            except StaleWrite as late:
                assert late.attempt == attempt  # noqa: PT017
                lost.append(attempt)

    threads = [threading.Thread(target=begin, args=(one,)) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(set(attempts)) == len(attempts) == 60
    last = max(attempts)
    rows = listed(client, partition)
    assert rows.pop("u")[0]["attempt"] == last
    assert {tags["of"] for tags, _ in rows.values()} <= {last}
    assert (last in lost) == (not rows)
    assert groups_of(client, partition) == 1


def test_groups_that_are_over_leave_nothing_behind(client: Any, partition: str) -> None:
    for i in range(60):
        attempt = client.begin_group(f"u{i}", partition, n=1, declared_bytes=8192)
        client.kv_put(f"u{i}_0", partition, {"x": torch.arange(3)}, attempt=attempt)
        client.end_group(attempt, "finished")
        assert client.kv_clear([f"u{i}", f"u{i}_0"], partition) == 2
    about = client.kv_list_partitions()[partition]
    assert (about["groups"], about["keys"], about["used_bytes"], about["held_bytes"]) == (0,) * 4
    for attempt in range(1, client.status()["revision"][1] + 2, 7):
        with pytest.raises(StaleWrite):
            client.end_group(attempt, "finished")


# -- one effect, whatever breaks -------------------------------------------------------------


@STEPS
@pytest.mark.parametrize("losses", [1, 3])
def test_a_begin_whose_answer_was_lost_has_one_effect(
    plane: Plane, client: Any, partition: str, losses: int
) -> None:
    answers: list[Any] = []

    def after(effect: Any, value: Any) -> None:
        if asks(effect, "begin_group"):
            answers.append(value.body)
            if len(answers) <= losses:
                # What came in between a second effect would drop.
                plane.witness.kv_put(f"u_{len(answers)}", partition, tags={}, attempt=answers[0])
                raise Broken("the answer was lost")

    verb = begin_group(plane.core, "u", partition, 4, 1 << 16, plane.deadline())
    attempt = plane.step(verb, after=after)
    assert answers == [attempt] * (losses + 1)
    assert set(listed(client, partition)) == {"u", *(f"u_{i + 1}" for i in range(losses))}
    about = client.kv_list_partitions()[partition]
    assert about["groups"] == 1
    assert about["held_bytes"] <= 1 << 16


@STEPS
@pytest.mark.parametrize("losses", [1, 3])
def test_an_end_whose_answer_was_lost_is_not_told_that_it_came_too_late(
    plane: Plane, client: Any, partition: str, losses: int
) -> None:
    attempt = client.begin_group("u", partition, n=1)
    answers: list[Any] = []

    def after(effect: Any, value: Any) -> None:
        if asks(effect, "end_group"):
            answers.append(tuple(value.body))
            if len(answers) <= losses:
                plane.witness.kv_put("u", partition, tags={"status": "trained"})
                raise Broken("the answer was lost")

    revision = plane.step(end_group(plane.core, attempt, "finished", plane.deadline()), after=after)
    assert answers == [tuple(revision)] * (losses + 1)
    assert tags_of(client, partition, "u")["status"] == "trained"


@STEPS
def test_a_retiring_clear_whose_answer_was_lost_closes_no_later_attempt(
    plane: Plane, client: Any, partition: str
) -> None:
    first = client.begin_group("u", partition, n=1)
    later: list[int] = []

    def after(effect: Any, value: Any) -> None:
        if asks(effect, "clear") and not later:
            later.append(plane.witness.begin_group("u", partition, n=1))
            raise Broken("the answer was lost")

    clear = clear_rows(plane.core, ["u"], partition, None, True, plane.deadline())
    assert plane.step(clear, after=after) == 1
    client.kv_put("u_0", partition, tags={}, attempt=later[0])
    with pytest.raises(StaleWrite):
        client.kv_put("u_0", partition, tags={}, attempt=first)


def life_of_a_group(plane: Plane, partition: str, size: int) -> Any:
    """Begin a group, put to it, write back, end it, begin it anew, put, clear all of it."""
    core, deadline = plane.core, plane.deadline()
    write_back = flags_of(must_exist=True, if_absent=False, return_tags=False)
    first = yield from begin_group(core, "u", partition, 2, 4 << 20, deadline)
    rows = {"x": torch.full((2, size), 1)}
    yield from put_batch(core, ["u_0", "u_1"], partition, rows, [{"of": 1}] * 2, 0, deadline, first)
    yield from put_batch(
        core, ["u_0"], partition, {"y": torch.ones(1, size)}, None, write_back, deadline
    )
    ended = yield from end_group(core, first, "failure", deadline)
    second = yield from begin_group(core, "u", partition, 1, 4 << 20, deadline)
    yield from put_batch(
        core, ["u_0"], partition, {"x": torch.full((1, size), 2)}, [{"of": 2}], 0, deadline, second
    )
    return first, ended, second


def end(lane: Any) -> None:
    """End the connection on which something was to be asked, or was, if the verb has one."""
    if isinstance(lane, Connection):
        lane.close()
    elif isinstance(lane, Channel):
        lane.abort()


@STEPS
@SIZES
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_group_lives_once_wherever_its_connections_are_cut(
    plane: Plane, client: Any, partition: str, size: int, when: str
) -> None:
    plane.settle()
    used = plane.used_bytes()
    asked = cut_at = 0
    while cut_at <= asked:
        name = f"{partition}-{cut_at}"
        revision = client.status()["revision"][1]
        seen: list[str] = []

        def cut(effect: Any, _: Any = None, *, seen: list[str] = seen, at: int = cut_at) -> None:
            if type(effect) is Ask:
                seen.append(effect.verb)
                if len(seen) == at:
                    end(effect.at)
                    raise Broken("the connection was cut")

        hooks: dict[str, Any] = {when: cut}
        first, ended, second = plane.step(life_of_a_group(plane, name, size), **hooks)
        # Every step has made one revision, and no other came in between.
        assert (first, ended.n, second) == (revision + 1, revision + 4, revision + 5)
        assert client.status()["revision"][1] == revision + 6
        rows = listed(client, name)
        assert {key: tags.get("of") for key, (tags, _) in rows.items()} == {"u": None, "u_0": 2}
        assert rows["u_0"][1] == ("x",)
        assert client.kv_batch_get(["u_0"], name, layout="list")["x"][0].unique().tolist() == [2]
        about = client.kv_list_partitions()[name]
        assert about["groups"] == 1
        assert about["used_bytes"] + about["held_bytes"] < (4 << 20) + 4096
        client.kv_drop_partition(name)
        if not cut_at:
            asked = len(seen)
        cut_at += 1
    assert asked >= 6
    eventually(lambda: plane.used_bytes() == used, "no more extent is in use than before")


# -- what became of a request ----------------------------------------------------------------


def lost(plane: Plane, verb: Any, *, when: str, asked: str) -> str:
    """The id of a request whose connection breaks each time, before it is sent or after."""

    def cut(effect: Any, _: Any = None) -> None:
        if asks(effect, asked):
            raise Broken("the connection was cut")

    hooks: dict[str, Any] = {when: cut}
    with pytest.raises(OutcomeUnknown, match="request_outcome") as unknown:
        plane.step(verb, **hooks)
    assert unknown.value.request_id.startswith(plane.core.client_id)
    return unknown.value.request_id


SHORT_S = 0.15


@STEPS
def test_a_put_whose_outcome_is_unknown_can_be_asked_for(
    plane: Plane, client: Any, partition: str
) -> None:
    deadline = time.monotonic() + SHORT_S
    put = put_batch(plane.core, ["k"], partition, None, [{"n": 1}], 0, deadline)
    request = lost(plane, put, when="after", asked="put_tags")
    for i in range(5):  # what is asked meanwhile does not make it forgotten
        client.kv_put(f"other-{i}", partition, tags={})
    outcome = client.request_outcome(request)
    assert outcome["applied"]
    assert outcome["verb"] == "put"
    assert set(listed(client, partition)) == {"k", *(f"other-{i}" for i in range(5))}
    assert outcome["answer"][0][1] == client.kv_list(partition).revision.n - 5


@STEPS
def test_a_request_that_had_no_effect_never_has_one(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("k", partition, tags={})
    sent: list[Any] = []

    def keep(effect: Any) -> None:
        if asks(effect, "begin_group"):
            sent.append(effect)
            raise Broken("the connection was cut")

    verb = begin_group(plane.core, "u", partition, 1, None, time.monotonic() + SHORT_S)
    with pytest.raises(OutcomeUnknown) as unknown:
        plane.step(verb, before=keep)
    request = unknown.value.request_id
    for _ in range(2):
        outcome = plane.witness.request_outcome(request)
        assert outcome == {"applied": False, "verb": None, "answer": None}

    def late() -> Generator[Any, Any, Any]:
        return (yield sent[0])

    with pytest.raises(InvalidRequest, match=request):  # it was on its way all the time
        plane.step(late())
    assert set(listed(client, partition)) == {"k"}
    # The client itself goes on as if nothing had happened.
    assert client.begin_group("u", partition, n=1) > 0


@STEPS
@pytest.mark.parametrize("verb", ["begin_group", "end_group", "clear"])
def test_the_outcome_of_every_numbered_verb_can_be_asked_for(
    plane: Plane, client: Any, partition: str, verb: str
) -> None:
    core = plane.core
    attempt = client.begin_group("u", partition, n=1)
    deadline = time.monotonic() + SHORT_S
    verbs = {
        "begin_group": begin_group(core, "v", partition, 1, None, deadline),
        "end_group": end_group(core, attempt, "finished", deadline),
        "clear": clear_rows(core, ["u"], partition, None, False, deadline),
    }
    request = lost(plane, verbs[verb], when="after", asked=verb)
    outcome = client.request_outcome(request)
    assert (outcome["applied"], outcome["verb"]) == (True, verb)
    n = client.kv_list(partition).revision.n
    expected = {"begin_group": n, "end_group": [1, n], "clear": [1, [1, n]]}[verb]
    assert outcome["answer"] == expected
    for other in verbs.values():
        other.close()


@STEPS
def test_a_request_that_was_answered_long_ago_is_not_remembered(
    client: Any, partition: str, plane: Plane
) -> None:
    for i in range(3):
        client.kv_put(f"k{i}", partition, tags={})
    with pytest.raises(OutcomeUnknown) as unknown:
        client.request_outcome(f"{plane.core.client_id}/1")
    assert unknown.value.request_id == f"{plane.core.client_id}/1"
    with pytest.raises(OutcomeUnknown, match="nobody/7"):
        client.request_outcome("nobody/7")


@pytest.mark.parametrize("request_id", ["", "x", "x/", "/7", "x/-1", "x/1.5", "x/" + "9" * 20, 7])
def test_what_is_no_request_id_is_refused(client: Any, request_id: Any) -> None:
    with pytest.raises(InvalidRequest):
        client.request_outcome(request_id)


def test_a_write_back_of_absent_rows_is_refused_unless_its_attempt_is_closed(
    client: Any, partition: str
) -> None:
    attempt = client.begin_group("u", partition, n=1)
    with pytest.raises(KeyNotFound):
        client.kv_put("u_0", partition, tags={}, attempt=attempt, must_exist=True)
    client.end_group(attempt, "failure")
    with pytest.raises(StaleWrite):
        client.kv_put("u_0", partition, tags={}, attempt=attempt, must_exist=True)
