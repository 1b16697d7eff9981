"""A put that began before a clear must not bring its keys back: real clients, stopped half-way.

The same put is stopped before it begins, after it began, and just before it is published. What
others did meanwhile stands, and the accounts are right. Each guard is taken out once, to show
that these proofs would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.client.connection import Connection
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import StaleWrite
from dataplane.server.ports import LocalTags
from dataplane.tags import puts
from dataplane.tags.partition import Partition
from dataplane.tags.puts import PutRows
from dataplane.tags.rows import Row
from dataplane.wire.frames import frame
from tests.deadline import eventually
from tests.faults import planes
from tests.faults.planes import SMALL_STORE, Plane
from tests.faults.processes import Process, Speaker
from tests.faults.raw import Raw, block, meta

pytestmark = pytest.mark.faults

LARGE = 100_000
"""int64 entries of a put that is copied in place: over `small_put_bytes`."""
SMALL = 3


def put_and_stop(
    speaker: Speaker,
    joined: Joined,
    config: Config,
    partition: str,
    verb: str,
    after: bool,
    entries: int,
) -> None:
    """Put key A; stop before the request `verb` leaves or, with `after`, when it was answered."""
    client = Client(joined, config)
    call = Connection.call

    def stopping(self: Connection, name: str, *arguments: Any) -> Any:
        if name == verb and not after:
            speaker.stop_myself()
        answer = call(self, name, *arguments)
        if name == verb and after:
            speaker.stop_myself()
        return answer

    client.status()  # connected and greeted, so that only the put itself is left to do
    Connection.call = stopping
    client.kv_put("A", partition, {"x": torch.full((entries,), 7)})
    speaker.say("done")


def writer(plane: Plane, partition: str, verb: str, after: bool, entries: int) -> Process:
    return Process(put_and_stop, plane.joined, plane.config, partition, verb, after, entries)


# -- proofs ----------------------------------------------------------------------------------


def clear_while_stopped(
    plane: Plane, partition: str, verb: str, after: bool, entries: int, wins: bool
) -> None:
    """Key A is cleared while a put of it is stopped; exactly a put that began later wins."""
    client = plane.client
    client.kv_put("A", partition, {"x": torch.tensor([1, 2, 3])})
    with writer(plane, partition, verb, after, entries) as late:
        late.stopped()
        assert client.kv_clear(["A"], partition) == 1
        cleared = client.revision.n
        client.kv_put("B", partition, {"x": torch.tensor([9])})
        late.resume()
        if wins:
            assert late.says() == "done"
        else:
            with pytest.raises(StaleWrite) as refused:
                late.says()
            assert refused.value.keys == ["A"]
            assert refused.value.cleared_at == cleared
            assert refused.value.partition_id == partition
    assert sorted(client.kv_list(partition).keys) == (["A", "B"] if wins else ["B"])
    assert plane.reads("B", partition) == [9]
    assert plane.payload_bytes(partition) == 8 + (8 * entries if wins else 0)
    client.kv_clear(None, partition, where={})
    plane.comes_to(used_bytes=0, blocks=0)


def put_again_while_stopped(plane: Plane, partition: str, verb: str, after: bool) -> None:
    """Key A is cleared and put again by another client; the late put does not overwrite that."""
    client = plane.client
    client.kv_put("A", partition, {"x": torch.tensor([1, 2, 3])})
    with writer(plane, partition, verb, after, LARGE) as late, plane.another() as other:
        late.stopped()
        client.kv_clear(["A"], partition)
        cleared = client.revision.n
        other.kv_put("A", partition, {"x": torch.tensor([4, 5])}, {"by": "other"})
        late.resume()
        with pytest.raises(StaleWrite) as refused:
            late.says()
    assert (refused.value.keys, refused.value.cleared_at) == (["A"], cleared)
    assert plane.reads("A", partition) == [4, 5]
    assert client.kv_list(partition).tags == [{"by": "other"}]
    assert plane.payload_bytes(partition) == 16
    client.kv_clear(["A"], partition)
    plane.comes_to(used_bytes=0)


def clear_before_the_payload(plane: Plane, partition: str) -> None:
    """The head of a small put has arrived when its key is cleared, and its payload has not."""
    client = plane.client
    head, payload = block({"x": torch.tensor([1, 2, 3])})
    client.kv_put("A", partition, None, {"n": 1})
    with Raw.greeted(plane.joined) as raw:
        put = raw.request(
            "put_block", [meta(partition, ["A"]), None, *head, 5.0, None], len(payload)
        )
        eventually(lambda: plane.counts()["used_bytes"], "the head has arrived")
        assert client.kv_clear(["A"], partition) == 1
        raw.send(payload)
        with pytest.raises(StaleWrite) as refused:
            raw.answer(put)
    assert (refused.value.keys, refused.value.cleared_at) == (["A"], client.revision.n)
    assert len(client.kv_list(partition)) == 0
    plane.comes_to(used_bytes=0)


def clear_while_it_waits_for_room(plane: Plane, partition: str) -> None:
    """A small put has arrived and waits for room when its key is cleared."""
    client = plane.client
    client.kv_put("A", partition, None, {"n": 1})
    plane.fill()
    head, payload = block({"x": torch.zeros(16_000, dtype=torch.uint8)})
    with Raw.greeted(plane.joined) as raw:
        put = raw.request(
            "put_block", [meta(partition, ["A"]), None, *head, 20.0, None], len(payload)
        )
        raw.send(payload)
        plane.comes_to(waiting=1)
        client.kv_clear(["A"], partition)
        cleared = client.revision.n
        plane.make_room()
        with pytest.raises(StaleWrite) as refused:
            raw.answer(put)
    assert (refused.value.keys, refused.value.cleared_at) == (["A"], cleared)
    assert len(client.kv_list(partition)) == 0
    plane.comes_to(used_bytes=0)


def put_from_before_history(plane: Plane, partition: str) -> None:
    """So much changed while a put was stopped that its clear is forgotten (history of 4)."""
    client = plane.client
    client.kv_put("A", partition, {"x": torch.tensor([1, 2, 3])})
    with writer(plane, partition, "commit", False, LARGE) as late:
        late.stopped()
        client.kv_clear(["A"], partition)
        for i in range(10):
            client.kv_put("B", partition, None, {"n": i})
        assert client.status()["history_floor"] > 2
        late.resume()
        with pytest.raises(StaleWrite, match="before what history still covers") as refused:
            late.says()
    assert (refused.value.keys, refused.value.cleared_at) == (["A"], None)
    assert client.kv_list(partition).keys == ["B"]
    plane.comes_to(used_bytes=0)


# -- on a plane as it is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "after", "entries", "wins"),
    [
        pytest.param("reserve", False, LARGE, True, id="large-before-it-begins"),
        pytest.param("reserve", True, LARGE, False, id="large-after-it-began-before-the-copy"),
        pytest.param("commit", False, LARGE, False, id="large-before-it-is-published"),
        pytest.param("put_block", False, SMALL, True, id="small-before-it-begins"),
    ],
)
def test_a_put_loses_against_a_clear_exactly_if_it_began_before_it(
    plane: Plane, partition: str, verb: str, after: bool, entries: int, wins: bool
) -> None:
    clear_while_stopped(plane, partition, verb, after, entries, wins)


@pytest.mark.parametrize(
    ("verb", "after"),
    [
        pytest.param("reserve", True, id="before-the-copy"),
        pytest.param("commit", False, id="before-it-is-published"),
    ],
)
def test_a_late_put_does_not_overwrite_what_another_client_put_after_the_clear(
    plane: Plane, partition: str, verb: str, after: bool
) -> None:
    put_again_while_stopped(plane, partition, verb, after)


def test_a_small_put_whose_payload_comes_after_the_clear_is_stale(
    plane: Plane, partition: str
) -> None:
    clear_before_the_payload(plane, partition)


def test_a_small_put_that_waits_for_room_is_stale_if_its_key_is_cleared_meanwhile(
    own_plane: Callable[..., Plane], partition: str
) -> None:
    clear_while_it_waits_for_room(own_plane(**SMALL_STORE), partition)


def test_a_put_that_began_before_what_history_covers_is_stale(
    own_plane: Callable[..., Plane], partition: str
) -> None:
    put_from_before_history(own_plane(history_changes=4), partition)


def test_a_put_in_one_piece_begins_when_it_arrives_and_wins_over_every_earlier_clear(
    plane: Plane, partition: str
) -> None:
    client = plane.client
    head, payload = block({"x": torch.tensor([1, 2, 3])})
    with Raw.greeted(plane.joined) as raw:
        for number in range(1, 51):
            client.kv_put("A", partition, None, {"n": number})
            client.kv_clear(["A"], partition)
            packed = meta(partition, ["A"], number)
            raw.send(
                frame("put_block", number, [packed, None, *head, 5.0, None], len(payload)) + payload
            )
            raw.answer(number)
            assert client.kv_clear(["A"], partition) == 1


# -- one mutant per guard --------------------------------------------------------------------


def judge_nothing(self: Partition, keys: Sequence[str], slots: Sequence[Any], stamp: int) -> None:
    pass


_check_stale = puts._check_stale
_check_put = Partition.check_put


def judge_absent_keys_only(
    self: Partition, keys: Sequence[str], slots: Sequence[Any], stamp: int
) -> None:
    _check_stale(self, keys, [None if type(slot) is Row else slot for slot in slots], stamp)


def cover_everything(self: Partition, put: PutRows, floor: int) -> Any:
    return _check_put(self, put, 0)


def no_stamp(self: LocalTags, done: Callable[..., None]) -> None:
    done(None, None)


def tell_nothing(self: LocalTags, token: int) -> None:
    pass


LATE = ("commit", False, LARGE, False)


@pytest.mark.parametrize(
    ("owner", "guard", "mutant", "proof", "arguments", "settings"),
    [
        (puts, "_check_stale", judge_nothing, clear_while_stopped, LATE, {}),
        (puts, "_check_stale", judge_absent_keys_only, put_again_while_stopped, LATE[:2], {}),
        (Partition, "check_put", cover_everything, put_from_before_history, (),
         {"history_changes": 4}),
        (LocalTags, "begin", no_stamp, clear_while_stopped, LATE, {}),
        (LocalTags, "begun", tell_nothing, clear_before_the_payload, (), {}),
        (LocalTags, "begun", tell_nothing, clear_while_it_waits_for_room, (), SMALL_STORE),
    ],
    ids=[
        "late-puts-are-not-judged", "rows-put-again-are-not-judged", "history-has-no-floor",
        "reservations-have-no-stamp", "heads-have-no-stamp", "waiting-heads-have-no-stamp",
    ],
)  # fmt: skip
def test_without_the_guard_a_late_put_gets_through_and_the_proof_says_so(
    monkeypatch: pytest.MonkeyPatch,
    roots: dict[str, Path],
    owner: type,
    guard: str,
    mutant: Callable[..., Any],
    proof: Callable[..., None],
    arguments: Sequence[Any],
    settings: dict[str, Any],
) -> None:
    with planes.in_thread("whole", **roots, **settings) as plane:
        proof(plane, "p", *arguments)
    monkeypatch.setattr(owner, guard, mutant)
    with planes.in_thread("mutant", **roots, **settings) as plane:
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            proof(plane, "p", *arguments)
        assert "A" in plane.client.kv_list("p").keys
