"""A value store that is gone for good: everybody who asks for its rows is told, by both clients.

What counts as evidence is not tested here: the tag store is told that the store is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import (
    AsyncClient,
    DeadlineExceeded,
    InvalidRequest,
    ValueLost,
    verify_checkpoint,
)
from dataplane.fields import LOST, LOST_AT, LOST_ROWS, LOST_STORES
from dataplane.tags.records import LOST as LOST_RECORD
from tests.deadline import eventually
from tests.faults import stores
from tests.faults.planes import SMALL_STORE, in_thread
from tests.faults.stores import Stores

P = "train"
IS_LOST = {LOST: {"exists": True}}


class Caller:
    """A client of either kind, behind one blocking face."""

    def __init__(self, plane: Stores, home: int, *, is_async: bool) -> None:
        self._stack = ExitStack()
        self._runner: asyncio.Runner | None = None
        if not is_async:
            self._client: Any = self._stack.enter_context(plane.client(home))
            return
        joined = replace(plane.joined, home=f"s{home}")
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._client = AsyncClient(joined, plane.config)
        self._runner.run(self._client.attach())
        self._stack.callback(lambda: self.call("close"))

    def call(self, verb: str, *args: Any, **named: Any) -> Any:
        """The answer of a verb; of a watch the first change; of a view nothing."""
        made = getattr(self._client, verb)(*args, **named)
        if self._runner is not None:
            return self._runner.run(_awaited(verb, made))
        if verb == "kv_view":
            with made:
                return None
        return next(made) if verb == "kv_watch" else made

    def close(self) -> None:
        self._stack.close()


async def _awaited(verb: str, made: Any) -> Any:
    if verb == "kv_view":
        async with made:
            return None
    if verb == "kv_watch":
        async with contextlib.aclosing(made):
            return await anext(made)
    return await made


@pytest.fixture
def plane(roots: dict[str, Path]) -> Iterator[Stores]:
    with stores.running("lost", [SMALL_STORE, SMALL_STORE], timeout_s=20, **roots) as plane:
        yield plane


Make = Callable[[int], Caller]


@pytest.fixture(params=["sync", "async"])
def make(plane: Stores, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes clients, each with a home."""
    made: list[Caller] = []

    def make(home: int = 0) -> Caller:
        made.append(Caller(plane, home, is_async=request.param == "async"))
        return made[-1]

    yield make
    for caller in made:
        caller.close()


def row(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(n)}


def loses(plane: Stores, store: int = 1, blocks: list[int] | None = None) -> int:
    """A store dies, and there is evidence that it does not come back."""
    service = plane.tags.tags
    assert service is not None
    plane.stop(store)
    return plane.call(lambda: service.losing.lose(f"s{store}", blocks))


class Waiting:
    """A call that waits in a thread of its own."""

    def __init__(self, make: Make, verb: str, *args: Any, **named: Any) -> None:
        self.answer: Any = None

        def run() -> None:
            try:
                self.answer = make(0).call(verb, *args, timeout=20, **named)
            except Exception as error:
                self.answer = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def waiting(plane: Stores) -> int:
    service = plane.tags.tags
    assert service is not None
    return plane.call(lambda: len(service.waiting))


@pytest.fixture
def near(make: Make) -> Caller:
    return make(0)


@pytest.fixture
def mixed(plane: Stores, make: Make, near: Caller) -> Caller:
    """a and b lie in the store that is going to be lost, c in the other; d has a field in each."""
    far = make(1)
    far.call("kv_batch_put", ["a", "b"], P, {"x": [torch.arange(3), torch.arange(5)]},
             tags=[{"n": 1}, {"n": 1}])  # fmt: skip
    near.call("kv_put", "c", P, row(4), {"n": 1})
    far.call("kv_put", "d", P, row(2), {"n": 2})
    near.call("kv_put", "d", P, {"s": torch.tensor(7.0)}, must_exist=True)
    return near


def test_a_get_or_view_of_lost_fields_names_all_keys_and_their_store(
    plane: Stores, mixed: Caller
) -> None:
    assert loses(plane) == 3
    for verb in ("kv_batch_get", "kv_view"):
        with pytest.raises(ValueLost) as error:
            mixed.call(verb, ["c", "d", "b", "a"], P, ["x"])
        assert (error.value.partition_id, error.value.keys) == (P, ["d", "b", "a"])
        assert (error.value.fields, error.value.stores) == (["x"], ["s1"])
        assert "value store 's1'" in str(error.value)
    with pytest.raises(ValueLost):
        mixed.call("kv_batch_get", ["d"], P)
    got = mixed.call("kv_batch_get", ["a", "c", "d"], P, ["x"], on_missing="drop", layout="list")
    assert list(got.keys) == ["c"]
    assert got.fields["x"][0].tolist() == [0, 1, 2, 3]
    # What lies elsewhere is still there to be read.
    assert mixed.call("kv_batch_get", ["d"], P, ["s"]).fields["s"].tolist() == [7.0]


def test_listings_and_watches_tell_of_it_and_lost_rows_are_cleared_like_others(
    plane: Stores, mixed: Caller
) -> None:
    before = mixed.call("kv_list", P)
    assert loses(plane) == 3
    changed = mixed.call("kv_list", P, since=before.revision)
    assert sorted(changed.keys) == ["a", "b", "d"]
    now = mixed.call("kv_list", P)
    for key, tags, fields in zip(now.keys, now.tags, now.fields, strict=True):
        if key == "c":
            assert (tags, list(fields)) == ({"n": 1}, ["x"])
        else:
            assert (tags[LOST], tags[LOST_STORES], list(fields)) == (
                ["x"], ["s1"], ["s"] if key == "d" else [],
            )  # fmt: skip
            assert tags[LOST_AT] > 0
    told = mixed.call("kv_watch", P, since=before.revision, where={"n": 1}, timeout=20)
    assert sorted(told.rows.keys) == ["a", "b"]
    assert mixed.call("kv_clear", ["a", "b", "c", "d"], P) == 4
    mixed.call("kv_put", "a", P, row(6))
    assert mixed.call("kv_batch_get", ["a"], P, layout="list").fields["x"][0].tolist() == [
        *range(6)
    ]  # fmt: skip
    mixed.call("kv_clear", ["a"], P)
    plane.comes_to(0, used_bytes=0)
    assert mixed.call("status")["partitions"][P]["payload_bytes"] == 0


def test_whoever_waits_for_it_is_woken_and_who_waits_for_rows_is_not(
    plane: Stores, make: Make, mixed: Caller
) -> None:
    lost = Waiting(make, "kv_wait", P, IS_LOST, count=3)
    rows = Waiting(make, "kv_wait", P, {"n": {"exists": True}}, count=5)
    eventually(lambda: waiting(plane) == 2, "both wait")
    assert loses(plane) == 3
    assert sorted(lost.result().keys) == ["a", "b", "d"]
    # c is there, and four more make five; those that are lost make none.
    for i in range(4):
        assert rows.answer is None
        mixed.call("kv_put", f"new{i}", P, row(1), {"n": 1})
    assert sorted(rows.result().keys) == ["c", *(f"new{i}" for i in range(4))]


def test_a_wait_that_cannot_end_says_what_is_lost(plane: Stores, mixed: Caller) -> None:
    loses(plane)
    with pytest.raises(DeadlineExceeded) as late:
        mixed.call("kv_wait", P, {"n": 1}, count=3, timeout=0.2)
    assert "2 rows that match are lost with value store 's1', since" in str(late.value)
    assert ": 'a', 'b'; clear them, and produce them anew" in str(late.value)
    with pytest.raises(DeadlineExceeded, match="2 rows that match are lost"):
        mixed.call("kv_claim", P, "t", count=3, where={"n": 1}, timeout=0.2)
    told = mixed.call("explain", P, {"n": 1}, fields=["x"])
    assert (told.matching, told.total) == (1, 4)
    assert told.failing["'dataplane.lost' is absent"] == 2


def test_claims_offer_no_lost_row_and_one_that_is_held_can_be_committed(
    plane: Stores, mixed: Caller
) -> None:
    held = mixed.call("kv_claim", P, "t", count=1, where={"n": 2})
    assert held.keys == ["d"]
    loses(plane)
    mixed.call("kv_commit", held)
    assert mixed.call("kv_claim", P, "t", count=1).keys == ["c"]
    with pytest.raises(DeadlineExceeded):
        mixed.call("kv_claim", P, "t", count=1, timeout=0.1)
    assert sorted(mixed.call("kv_claim", P, "t", count=2, where=IS_LOST).keys) == ["a", "b"]


def test_a_lost_row_takes_tags_and_no_fields(plane: Stores, mixed: Caller) -> None:
    loses(plane)
    with pytest.raises(ValueLost, match="nothing was put; clear them") as error:
        mixed.call("kv_batch_put", ["c", "a"], P, {"y": [torch.zeros(1), torch.zeros(1)]})
    assert error.value.keys == ["a"]
    mixed.call("kv_put", "a", P, tags={"n": 3}, must_exist=True)
    assert mixed.call("kv_list", P, where={"n": 3}).keys == ["a"]
    for name in (LOST, LOST_ROWS, "dataplane.mine"):
        with pytest.raises(InvalidRequest, match="the plane's own"):
            mixed.call("kv_put", "c", P, tags={name: ["x"]})
    mixed.call("kv_clear", ["a", "b", "c", "d"], P)
    plane.comes_to(0, used_bytes=0)  # the block of the put that was refused went too


def test_a_group_that_lost_a_trajectory_says_so_and_begins_anew_whole(
    plane: Stores, make: Make, near: Caller
) -> None:
    far = make(1)
    attempt = near.call("begin_group", "u", P, n=2)
    near.call("kv_put", "u_0", P, row(3), {"uid": "u"}, attempt=attempt)
    far.call("kv_put", "u_1", P, row(3), {"uid": "u"}, attempt=attempt)
    near.call("end_group", attempt, "finished")
    assert len(near.call("kv_wait", P, {}, count=1, group_by="uid", timeout=20).keys) == 2
    assert loses(plane) == 1
    (tags,) = near.call("kv_wait", P, {LOST_ROWS: {">": 0}}, timeout=20).tags
    assert (tags["uid"], tags[LOST_ROWS]) == ("u", 1)
    with pytest.raises(DeadlineExceeded, match=r"'u' finished .* but 1 of 2 rows fails"):
        near.call("kv_wait", P, {}, count=1, group_by="uid", timeout=0.1)
    with pytest.raises(DeadlineExceeded):
        near.call("kv_claim", P, "t", count=1, groups=True, timeout=0.1)
    attempt = near.call("begin_group", "u", P, n=1)
    near.call("kv_put", "u_1", P, row(3), {"uid": "u"}, attempt=attempt)
    near.call("end_group", attempt, "finished")
    assert near.call("kv_claim", P, "t", count=1, groups=True, timeout=20).keys == ["u_1"]
    listing = near.call("kv_list", P)
    assert not any(LOST_ROWS in tags or LOST in tags for tags in listing.tags)


def test_it_is_written_down_once_whatever_is_lost(plane: Stores, mixed: Caller) -> None:
    service = plane.tags.tags
    assert service is not None
    written: list[tuple[int, int, Any]] = []
    append = service.journal.append

    def noted(kind: int, n: int, at: float, body: Any) -> None:
        written.append((kind, n, body))
        append(kind, n, at, body)

    service.journal.append = noted  # type: ignore[method-assign]
    n = service.store.n
    blocks = sorted(block for store, block in service.store.placements if store == "s1")
    assert loses(plane, blocks=blocks[:1]) == 2
    assert plane.call(lambda: service.losing.lose("s1", blocks[:1])) == 0
    assert plane.call(lambda: service.losing.lose("s1", None)) == 1
    assert plane.call(lambda: service.losing.lose("s1", None)) == 0
    assert written == [
        (LOST_RECORD, n + 1, ("s1", blocks[:1])), (LOST_RECORD, n + 2, ("s1", None)),
    ]  # fmt: skip
    assert mixed.call("kv_list", P, where=IS_LOST).keys == ["a", "b", "d"]


def test_a_checkpoint_keeps_lost_rows_with_what_is_left_of_them(
    plane: Stores, mixed: Caller, roots: dict[str, Path], tmp_path: Path
) -> None:
    attempt = mixed.call("begin_group", "u", P, n=1)
    mixed.call("kv_put", "u_0", P, row(1), attempt=attempt)
    assert loses(plane) == 3
    before = mixed.call("kv_list", P)
    mixed.call("save_checkpoint", tmp_path / "saved")
    verify_checkpoint(tmp_path / "saved")
    with in_thread("loaded", timeout_s=20, **SMALL_STORE, **roots) as other:
        client = other.client
        client.load_checkpoint(tmp_path / "saved")
        after = client.kv_list(P)
        assert dict(zip(after.keys, after.tags, strict=True)) == dict(
            zip(before.keys, before.tags, strict=True)
        )
        assert list(map(sorted, after.fields)) == list(map(sorted, before.fields))
        with pytest.raises(ValueLost) as error:
            client.kv_batch_get(["a", "d"], P, ["x"])
        assert (error.value.keys, error.value.stores) == (["a", "d"], ["s1"])
        assert client.kv_batch_get(["d"], P, ["s"]).fields["s"].tolist() == [7.0]
        assert sorted(client.kv_wait(P, IS_LOST, count=3).keys) == ["a", "b", "d"]
        assert client.kv_wait(P, {"uid": {"exists": False}}).keys == ["c", "u_0"]
        client.kv_clear(list(after.keys), P)
        other.comes_to(used_bytes=0)
