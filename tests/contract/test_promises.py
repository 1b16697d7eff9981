"""The promises of the data plane, one section each, under the numbers that the guarantees have.

Not here: recovery after a restart (the rest of 2 and 3), attempts, reservation (9) and claims (11).
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

import pytest
import torch

from dataplane.client.effects import Ask, Run
from dataplane.client.get import GetOptions, get_batch
from dataplane.client.put import flags_of, put_batch
from dataplane.errors import (
    AlreadyWritten,
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    KeyNotFound,
    QuotaExceeded,
    SchemaMismatch,
    StaleWrite,
)
from dataplane.wire.channel import Broken
from tests.contract.planes import MAPPED, Plane, embedded_sync
from tests.contract.test_scenarios import asks
from tests.deadline import eventually

LARGE = 100_000
"""int64 entries of a row that is over the limit of small puts."""

SIZES = pytest.mark.parametrize("size", [4, LARGE], ids=["small", "large"])


def listed(client: Any, partition: str) -> dict[str, tuple[Any, Any]]:
    """Tags and produced fields of every key."""
    listing = client.kv_list(partition)
    return {
        key: (tags, fields)
        for key, tags, fields in zip(listing.keys, listing.tags, listing.fields, strict=True)
    }


# -- 1. a listed key is whole; a put is all or nothing ---------------------------------------


@SIZES
def test_1_every_field_of_a_listed_key_is_readable_while_writers_write(
    plane: Plane, client: Any, partition: str, size: int
) -> None:
    writer = plane.another()
    rounds = 15
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for i in range(rounds):
                writer.kv_batch_put(
                    [f"{i}-{j}" for j in range(4)],
                    partition,
                    {"x": torch.full((4, size), i), "y": torch.full((4,), i)},
                    [{"i": i}] * 4,
                )
        except BaseException as error:
            failed.append(error)

    client.kv_put("first", partition, {"x": torch.zeros(1).long(), "y": torch.tensor(0)}, {"i": 0})
    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while seen < 1 + 4 * rounds and not failed:
        listing = client.kv_list(partition)
        assert (len(listing) - 1) % 4 == 0, "a put is seen whole"
        seen = len(listing)
        rows = client.kv_batch_get(listing.keys, partition, ["x", "y"], layout="list")
        for tags, x, y in zip(listing.tags, rows["x"], rows["y"], strict=True):
            assert y == tags["i"]
            assert (x == tags["i"]).all()
    thread.join(30.0)
    assert not failed


def overfull() -> dict[str, Any]:
    """Tags that fit by themselves and not on top of as many others."""
    return {f"more-{i}": "x" * 900 for i in range(40)}


BAD_LAST_ROW: dict[str, tuple[type[DataplaneError], dict[str, Any], dict[str, Any]]] = {
    "schema": (SchemaMismatch, {"fields": "floats"}, {}),
    "tags too large after the merge": (InvalidRequest, {"tags": overfull()}, {}),
    "absent key": (KeyNotFound, {}, {"must_exist": True}),
    "present key": (AlreadyWritten, {}, {"if_absent": True}),
}


@SIZES
@pytest.mark.parametrize("case", BAD_LAST_ROW)
def test_1_a_refused_put_changes_nothing(client: Any, partition: str, size: int, case: str) -> None:
    error, bad, options = BAD_LAST_ROW[case]
    present = ["a", "b"] if case == "absent key" else ["b"]
    for key in present:
        client.kv_put(
            key, partition, {"x": torch.zeros(size).long()},
            {f"tag-{i}": "x" * 900 for i in range(40)},
        )  # fmt: skip
    before, revision = listed(client, partition), client.kv_list(partition).revision
    status = client.status()["partitions"][partition]

    x = torch.ones(2, size) if "fields" in bad else torch.ones(2, size).long()
    with pytest.raises(error) as refused:
        client.kv_batch_put(
            ["a" if case != "absent key" else "new", "b"], partition, {"x": x},
            [{"n": 1}, bad.get("tags", {"n": 2})], **options,
        )  # fmt: skip
    named = {"absent key": "new", "present key": "b", "tags too large after the merge": "b"}
    assert repr(named.get(case, "a")) in str(refused.value)
    assert listed(client, partition) == before
    assert client.kv_list(partition).revision == revision
    assert client.status()["partitions"][partition] == status
    got = client.kv_batch_get(["b"], partition, layout="list")["x"][0]
    assert torch.equal(got, torch.zeros(size).long())


# -- 2. an acknowledged put outlives its writer ----------------------------------------------

WRITER = """
import os, signal, sys, torch, dataplane
name, runtime, partition = sys.argv[1:]
client = dataplane.connect(name, config={"host": "embedded", "runtime_dir": runtime})
client.kv_put("small", partition, {"x": torch.arange(5)}, {"by": "writer"})
client.kv_put("large", partition, {"x": torch.arange(100_000)})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.kinds("embedded-sync")  # processes of a cluster are killed where faults are tried
def test_2_an_acknowledged_put_survives_the_kill_of_its_writer(
    plane: Plane, client: Any, partition: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WRITER, plane.name, plane.settings["runtime_dir"], partition],
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert listed(client, partition) == {
        "small": ({"by": "writer"}, ("x",)),
        "large": ({}, ("x",)),
    }
    rows = client.kv_batch_get(["small", "large"], partition, layout="list")["x"]
    assert torch.equal(rows[0], torch.arange(5))
    assert torch.equal(rows[1], torch.arange(100_000))


# -- 3. one request, one effect, one answer --------------------------------------------------


@SIZES
@pytest.mark.parametrize("losses", [1, 3])
def test_3_a_put_whose_answer_was_lost_has_one_effect_and_one_answer(
    plane: Plane, client: Any, partition: str, size: int, losses: int
) -> None:
    client.kv_put("k", partition, {"x": torch.zeros(1).long()}, {"n": 0, "old": True})
    answers: list[Any] = []

    def after(effect: Any, value: Any) -> None:
        if asks(effect, "put_block", "commit"):
            answers.append(value.body[0])
            if len(answers) <= losses:
                raise Broken("the answer was lost")

    put = put_batch(
        plane.core, ["k"], partition, {"x": torch.ones(1, size).long()}, [{"n": 1}],
        flags_of(must_exist=False, if_absent=False, return_tags=True), plane.deadline(),
    )  # fmt: skip
    meta = plane.step(put, after=after)
    assert len(answers) == losses + 1
    assert len({tuple(answer) for answer in answers}) == 1
    assert tuple(meta.revision) == tuple(answers[0])
    assert meta.tags == [{"n": 1, "old": True}]
    assert client.kv_list(partition).revision == meta.revision
    assert client.status()["partitions"][partition]["payload_bytes"] == 8 * size
    plane.settle()
    used = plane.used_bytes()
    assert used < 8 * size + 2 * 4096, "the blocks of the repetitions were freed"


def test_3_a_tag_put_whose_answer_was_lost_is_applied_once(
    plane: Plane, client: Any, partition: str
) -> None:
    answers: list[Any] = []

    def after(effect: Any, value: Any) -> None:
        if asks(effect, "put_tags"):
            answers.append(value.body[0])
            if len(answers) == 1:
                # Another client's change between the two: a second effect would undo it.
                plane.witness.kv_put("k", partition, tags={"n": 2})
                raise Broken("the answer was lost")

    put = put_batch(plane.core, ["k"], partition, None, [{"n": 1}], 0, plane.deadline())
    meta = plane.step(put, after=after)
    assert tuple(answers[0]) == tuple(answers[1]) == tuple(meta.revision)
    assert client.kv_list(partition).tags == [{"n": 2}]


def test_3_if_absent_is_not_refused_because_of_its_own_first_try(
    plane: Plane, partition: str
) -> None:
    tries: list[int] = []

    def after(effect: Any, value: Any) -> None:
        if asks(effect, "put_tags"):
            tries.append(1)
            if len(tries) == 1:
                raise Broken("the answer was lost")

    flags = flags_of(must_exist=False, if_absent=True, return_tags=False)
    put = put_batch(plane.core, ["k"], partition, None, [{"n": 1}], flags, plane.deadline())
    assert plane.step(put, after=after).keys == ["k"]
    assert len(tries) == 2
    with pytest.raises(AlreadyWritten):
        plane.client.kv_put("k", partition, tags={"n": 1}, if_absent=True)


# -- 4. a put is judged by where it began ----------------------------------------------------


@MAPPED
def test_4_a_put_reserved_before_a_clear_is_stale_even_where_it_must_exist(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_batch_put(["k", "other"], partition, None, [{}, {}])
    cleared: list[int] = []

    def before(effect: Any) -> None:
        if asks(effect, "commit"):
            cleared.append(plane.witness.kv_clear(["k"], partition))

    flags = flags_of(must_exist=True, if_absent=False, return_tags=False)
    put = put_batch(
        plane.core, ["other", "k"], partition, {"x": torch.zeros(2, LARGE)}, None, flags,
        plane.deadline(),
    )  # fmt: skip
    with pytest.raises(StaleWrite) as stale:  # and not KeyNotFound
        plane.step(put, before=before)
    assert cleared == [1]
    assert stale.value.keys == ["k"]
    assert stale.value.cleared_at == client.kv_list(partition).revision.n
    assert listed(client, partition) == {"other": ({}, ())}


def test_4_a_put_reserved_after_the_clear_makes_the_key_anew(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("k", partition, {"x": torch.zeros(3), "y": torch.zeros(3)}, {"old": 1})
    done: list[int] = []

    def before(effect: Any) -> None:
        if asks(effect, "reserve", "put_block") and not done:
            done.append(plane.witness.kv_clear(["k"], partition))

    put = put_batch(
        plane.core, ["k"], partition, {"x": torch.ones(1, LARGE)}, [{"new": 1}], 0,
        plane.deadline(),
    )  # fmt: skip
    plane.step(put, before=before)
    assert done == [1]
    assert listed(client, partition) == {"k": ({"new": 1}, ("x",))}


@MAPPED
def test_4_a_put_that_began_before_the_clear_does_not_touch_the_key_put_since(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("k", partition, {"x": torch.zeros(3)})

    def before(effect: Any) -> None:
        if asks(effect, "commit"):
            plane.witness.kv_clear(["k"], partition)
            plane.witness.kv_put("k", partition, {"x": torch.tensor([9.0])}, {"by": "other"})

    put = put_batch(
        plane.core, ["k"], partition, {"x": torch.ones(1, LARGE)}, [{"by": "late"}], 0,
        plane.deadline(),
    )  # fmt: skip
    with pytest.raises(StaleWrite):
        plane.step(put, before=before)
    assert listed(client, partition) == {"k": ({"by": "other"}, ("x",))}
    assert client.kv_batch_get(["k"], partition, layout="list")["x"][0].tolist() == [9.0]


def test_4_puts_overwrite_unless_they_say_otherwise(client: Any, partition: str) -> None:
    with pytest.raises(KeyNotFound) as absent:
        client.kv_batch_put(["a", "b"], partition, None, [{}, {}], must_exist=True)
    assert absent.value.keys == ["a", "b"]
    assert absent.value.partition_id == partition
    client.kv_put("a", partition, {"x": torch.tensor([1])}, if_absent=True)
    with pytest.raises(AlreadyWritten) as present:
        client.kv_batch_put(["b", "a"], partition, None, [{}, {}], if_absent=True)
    assert present.value.keys == ["a"]
    client.kv_put("a", partition, {"x": torch.tensor([2, 2])}, must_exist=True)
    client.kv_put("a", partition, {"x": torch.tensor([3, 3, 3])})
    assert client.kv_batch_get(["a"], partition, layout="list")["x"][0].tolist() == [3, 3, 3]
    with pytest.raises(InvalidRequest, match="exclude"):
        client.kv_put("a", partition, tags={}, must_exist=True, if_absent=True)


# -- 5. bytes return; readers keep what they pinned; one moment ------------------------------


def test_5_bytes_in_use_count_live_cells_and_are_zero_when_all_is_cleared(
    plane: Plane, client: Any, partition: str
) -> None:
    def in_use() -> int:
        return client.status()["bytes_in_use"]

    client.kv_batch_put(
        ["a", "b"], partition, {"x": torch.zeros(2, 10).long(), "y": torch.zeros(2).float()}
    )
    assert in_use() == 2 * (80 + 4)
    client.kv_put("a", partition, {"x": torch.zeros(1).long()})  # covers one cell
    assert in_use() == (8 + 4) + (80 + 4)
    client.kv_put("a", partition, {"y": torch.tensor(1.0)})  # and the other
    assert in_use() == (8 + 4) + (80 + 4)
    client.kv_clear(["b"], partition)
    assert in_use() == 12
    plane.settle()
    assert plane.used_bytes() == 2 * 4096, "the first block went with its last cell"
    client.kv_clear(["a"], partition)
    assert in_use() == 0
    plane.settle()
    eventually(lambda: plane.used_bytes() == 0, "no extent is in use")


@MAPPED
def test_5_a_reader_that_pinned_rows_keeps_them(plane: Plane, client: Any, partition: str) -> None:
    client.kv_put("k", partition, {"x": torch.arange(2000)})
    with client.kv_view(["k"], partition, layout="list") as rows:
        client.kv_clear(["k"], partition)
        assert client.status()["bytes_in_use"] == 0
        plane.settle()
        assert plane.used_bytes() == 16384, "the pin holds its pages"
        for i in range(20):
            client.kv_put(f"other-{i}", partition, {"x": torch.full((2000,), -1)})
        assert torch.equal(rows["x"][0], torch.arange(2000))
        del rows
    client.kv_clear(None, partition, where={})
    gc.collect()
    plane.settle()
    eventually(lambda: plane.used_bytes() == 0, "the pin is gone")


def test_5_a_get_that_meets_a_gone_block_starts_again(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b"], partition, {"x": torch.zeros(2, 3)})
    meets: list[int] = []

    def before(effect: Any) -> None:
        if asks(effect, "pin", "read") and len(meets) < 2:
            meets.append(1)
            value = float(len(meets))
            plane.witness.kv_batch_put(["a", "b"], partition, {"x": torch.full((2, 3), value)})
            plane.settle()

    read = get_batch(
        plane.core, ["b", "a"], partition, None, GetOptions("packed"), "raise", plane.deadline()
    )
    assert plane.step(read, before=before)["x"].tolist() == [2.0] * 6
    assert len(meets) == 2


def test_5_a_get_whose_blocks_are_gone_three_times_names_the_keys(
    plane: Plane, client: Any, partition: str
) -> None:
    for key in ("a", "b", "c"):
        client.kv_put(key, partition, {"x": torch.zeros(3)})
    meets: list[int] = []

    def before(effect: Any) -> None:
        if asks(effect, "pin", "read"):
            meets.append(1)
            for key in ("c", "a"):
                plane.witness.kv_put(key, partition, {"x": torch.full((3,), float(len(meets)))})
            plane.settle()

    read = get_batch(
        plane.core, ["c", "b", "a"], partition, None, GetOptions("list"), "raise",
        plane.deadline(),
    )  # fmt: skip
    with pytest.raises(KeyNotFound) as gone:
        plane.step(read, before=before)
    assert len(meets) == 3
    if plane.kind != "ray-remote":  # there each store is asked in turn, and the first says it
        assert gone.value.keys == ["c", "a"]
    assert set(gone.value.keys) <= {"a", "c"}
    assert gone.value.keys


@SIZES
def test_5_rows_of_one_get_are_of_one_moment(
    plane: Plane, client: Any, partition: str, size: int
) -> None:
    writer = plane.witness
    keys = [f"k{i}" for i in range(6)]

    def write(value: int) -> None:
        writer.kv_batch_put(
            keys, partition, {"x": torch.full((6, size), value), "y": torch.full((6,), value)}
        )

    write(0)
    rounds = 60
    failed: list[BaseException] = []

    def overwrite() -> None:
        try:
            for value in range(1, rounds):
                write(value)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=overwrite)
    thread.start()
    seen: list[int] = []
    while thread.is_alive() or seen[-1] != rounds - 1:
        assert not failed, failed
        try:
            rows = client.kv_batch_get(keys, partition, layout="packed")
        except KeyNotFound:
            continue  # three times overwritten in between: said, not mixed
        values = {*rows["x"].tolist(), *rows["y"].tolist()}
        assert len(values) == 1, f"values of {values} in one get"
        seen.append(values.pop())
    thread.join(30.0)
    assert seen == sorted(seen)


# -- 6. what was put is what is got (more in test_dtypes.py) ---------------------------------


def test_6_no_change_of_source_or_result_reaches_the_store(client: Any, partition: str) -> None:
    source = {
        "tensor": torch.zeros(3, 4),
        "list": [[1], [2], [3]],
        "map": [{"t": torch.zeros(2)} for _ in range(3)],
    }
    keys = ["a", "b", "c"]
    client.kv_batch_put(keys, partition, source, [{"deep": {"a": [1]}} for _ in keys])
    source["tensor"].fill_(9)
    source["list"][0].append(9)
    source["map"][0]["t"].fill_(9)

    for _ in range(2):
        rows = client.kv_batch_get(keys, partition)
        assert torch.equal(rows["tensor"].values(), torch.zeros(12))
        assert rows["list"] == [[1], [2], [3]]
        assert all(torch.equal(value["t"], torch.zeros(2)) for value in rows["map"])
        rows["tensor"].values().fill_(7)
        rows["list"][0].append(7)
        rows["map"][0]["t"].fill_(7)
        listing = client.kv_list(partition)
        assert listing.tags == [{"deep": {"a": [1]}}] * 3
        listing.tags[0]["deep"]["a"].append(7)


# -- 7. the container follows from the schema ------------------------------------------------


@pytest.mark.parametrize("layout", ["nested", "padded", "packed", "list"])
def test_7_the_container_of_a_field_never_depends_on_the_rows(
    client: Any, partition: str, layout: str
) -> None:
    client.kv_batch_put(["a", "b"], partition, {"x": torch.zeros(2, 3), "r": torch.zeros(2)})
    client.kv_batch_put(
        ["c", "d"], partition, {"x": [torch.zeros(1), torch.zeros(0)], "r": torch.zeros(2)}
    )
    kinds = set()
    for keys in (["a"], ["a", "b"], ["a", "c"], ["c", "d"], ["d"], ["d", "d"], []):
        rows = client.kv_batch_get(keys, partition, ["x", "r"], layout=layout)
        x, r = rows["x"], rows["r"]
        kinds.add((
            type(x), type(r),
            None if layout == "list" else (x.ndim, x.is_nested, x.dtype, r.ndim, r.dtype),
            tuple(rows.lengths), tuple(rows.cu_seqlens),
        ))  # fmt: skip
    assert len(kinds) == 1, kinds


# -- 8. every wait has a deadline ------------------------------------------------------------


@pytest.mark.parametrize("verb", ["put", "large put", "tags", "get", "view", "list", "clear"])
def test_8_a_call_on_a_stopped_server_ends_at_its_deadline_and_can_be_repeated(
    stopped_plane: tuple[Plane, int], verb: str
) -> None:
    plane, pid = stopped_plane
    client = plane.client

    def view(timeout: float) -> None:
        with client.kv_view(["k"], "p", timeout=timeout):
            pass

    calls = {
        "put": lambda t: client.kv_put("k", "p", {"x": torch.zeros(2)}, timeout=t),
        "large put": lambda t: client.kv_put("k", "p", {"x": torch.zeros(LARGE)}, timeout=t),
        "tags": lambda t: client.kv_put("k", "p", tags={"a": 1}, timeout=t),
        "get": lambda t: client.kv_batch_get(["k"], "p", timeout=t),
        "view": view,
        "list": lambda t: client.kv_list("p", timeout=t),
        "clear": lambda t: client.kv_clear(["absent"], "p", timeout=t),
    }
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded) as late:
            calls[verb](0.2)
        took = time.monotonic() - started
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 0.15 < took < 1.2
    assert 0.15 < late.value.waited_s < 1.2
    assert isinstance(late.value, TimeoutError)
    calls[verb](30.0)


@pytest.fixture(scope="module")
def stopped_plane(plane_settings: dict[str, Any]) -> Any:
    """A plane of its own, to be stopped, and the process id of its server."""
    with embedded_sync("stopped", plane_settings) as plane:
        plane.client.kv_put("k", "p", {"x": torch.zeros(2)})
        yield plane, plane.client.status()["pid"]


def test_8_a_put_into_a_full_store_says_who_fills_it_at_its_deadline(
    plane_settings: dict[str, Any],
) -> None:
    small = {**plane_settings, "capacity_bytes": 4 << 20, "segment_bytes": 4 << 20}
    with embedded_sync("full", small) as plane:
        client = plane.client
        client.kv_put("oldest", "p", {"x": torch.zeros(1_000_000)})
        for size in (500_000, 60_000):  # reserved, and through the socket
            started = time.monotonic()
            with pytest.raises(QuotaExceeded) as full:
                client.kv_put("new", "p", {"x": torch.zeros(size)}, timeout=0.5)
            assert time.monotonic() - started < 1.5
            assert full.value.limit_bytes == 4 << 20
            assert 4_000_000 <= full.value.used_bytes <= 4_010_000
            assert f"{full.value.used_bytes} of {full.value.limit_bytes}" in str(full.value)
            assert full.value.oldest_keys == ["oldest"]
        assert client.kv_list("p").keys == ["oldest"]
        client.kv_clear(["oldest"], "p")
        client.kv_put("new", "p", {"x": torch.zeros(1_000_000)})


def test_8_a_put_that_waits_for_room_is_served_when_another_client_clears(
    plane_settings: dict[str, Any],
) -> None:
    small = {**plane_settings, "capacity_bytes": 4 << 20, "segment_bytes": 4 << 20}
    with embedded_sync("waits", small) as plane:
        client, other = plane.client, plane.another()
        client.kv_put("old", "p", {"x": torch.zeros(700_000)})
        done: list[Any] = []
        writer = threading.Thread(
            target=lambda: done.append(other.kv_put("new", "p", {"x": torch.ones(700_000)}))
        )
        writer.start()
        values = plane.witness
        eventually(
            lambda: values.status()["values"]["local"]["waiting"] == 1, "the put waits for room"
        )
        assert client.kv_list("p").keys == ["old"]
        client.kv_clear(["old"], "p")
        writer.join(30.0)
        assert [meta.keys for meta in done] == [["new"]]
        assert torch.equal(
            client.kv_batch_get(["new"], "p", layout="list")["x"][0], torch.ones(700_000)
        )


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "soon"])
def test_8_a_timeout_is_a_positive_number_of_seconds(client: Any, timeout: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        client.status(timeout=timeout)


def test_8_a_timeout_of_many_days_is_taken(client: Any, partition: str) -> None:
    client.kv_put("k", partition, {"x": torch.zeros(2)}, timeout=1e7)
    client.kv_put("l", partition, {"x": torch.zeros(LARGE)}, timeout=1e7)
    assert client.kv_batch_get(["k"], partition, timeout=1e7).keys == ["k"]


# -- 10. nothing received is unpickled or evaluated ------------------------------------------


class Canary:
    """Says so when somebody unpickles it."""

    sung: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return (self.sung.append, (1,))


def test_10_pickles_are_bytes_like_any_others(client: Any, partition: str) -> None:
    song = pickle.dumps(Canary())
    client.kv_batch_put(
        ["a", "b"], partition, {"o": [song, song.decode("latin-1")]}, [{"t": repr(song)}, {}]
    )
    rows = client.kv_batch_get(["a", "b"], partition)
    assert rows["o"] == [song, song.decode("latin-1")]
    assert client.kv_list(partition).tags[0] == {"t": repr(song)}
    assert Canary.sung == []


def test_10_an_object_that_only_pickle_could_carry_is_refused(plane: Plane, partition: str) -> None:
    for fields, tags in (({"o": Canary()}, None), (None, {"o": Canary()})):
        with pytest.raises(InvalidRequest):
            plane.witness.kv_put("k", partition, fields, tags)
    assert Canary.sung == []


def test_the_steps_of_these_tests_are_the_steps_of_real_calls(plane: Plane, partition: str) -> None:
    """If a verb asked otherwise, the hooks above would never be met and prove nothing."""
    seen: list[str] = []

    def before(effect: Any) -> None:
        seen.append(effect.verb if type(effect) is Ask else type(effect).__name__)

    put = put_batch(
        plane.core, ["k"], partition, {"x": torch.zeros(1, LARGE)}, None, 0, plane.deadline()
    )
    plane.step(put, before=before)
    read = get_batch(
        plane.core, ["k"], partition, None, GetOptions("list"), "raise", plane.deadline()
    )
    plane.step(read, before=before)
    verbs = [name for name in seen if name not in ("Open", "Done", "stores")]
    if plane.maps_segments:
        assert verbs == ["reserve", "Run", "commit", "resolve", "pin", "Run", "Tell", "Run"]
    else:
        assert verbs == ["put_block", "resolve", "read", "Run", "Run"]
    assert Run.__name__ == "Run"
