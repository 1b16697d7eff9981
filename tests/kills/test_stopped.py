"""Clients that are killed, stopped or forked midway, and planes that are stopped, while stores die.

What a client holds ends when the rules say: a reservation or a pin with its connection, a lease
when its client has had none for the lease's term. Time in which a store was stopped counts for
nobody.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import DeadlineExceeded, OutcomeUnknown, Unreachable
from dataplane.tags import journal as j
from tests.dataplane.journal_file import read
from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.processes import Process, Speaker, is_gone, state_of
from tests.faults.test_claimers import hold
from tests.faults.test_reclaim import (
    OTHERS,
    put_forking_in_the_copy,
    put_stopping_in_the_copy,
    view_and_fork,
)
from tests.faults.test_silence import LARGE, VERBS
from tests.kills.planes import Killed
from tests.kills.rows import Others, check, content, put
from tests.kills.test_memory import files, put_pausing_in_the_copy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

SILENT = (DeadlineExceeded, Unreachable, OutcomeUnknown)
"""What a call says whose deadline passed: it was not heard, or its answer was not."""
STANDING = [f"s{i}" for i in range(10)]
VIEWED = [f"v{i}" for i in range(4)]


def view_pausing(
    speaker: Speaker, joined: Joined, config: Config, partition: str, nbytes: int
) -> None:
    """View rows; when told to, see whether every byte is still theirs, and let go of them."""
    with Client(joined, config).kv_view(VIEWED, partition, ["x"], layout="list") as rows:
        speaker.say("viewing")
        speaker.hear()
        pairs = zip(VIEWED, rows.fields["x"], strict=True)
        speaker.say(all(torch.equal(row, content(key, nbytes)) for key, row in pairs))


def claim_and_fork(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    """Hold a claim, with a forked child that stays until it is killed."""
    claim = Client(joined, config).kv_claim(partition, "train", count=1, lease_s=1.0)
    child = os.fork()
    if not child:
        signal.pause()
    speaker.say((claim.keys, child))
    speaker.hear()


def for_a_while(seconds: float) -> None:
    """Time passes, which is what a test is about."""
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > seconds, "time passes", within_s=seconds + 10)


# -- stopped -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "stopped_s"),
    [("one_process", 20.0), pytest.param("two_processes", 4.0, marks=pytest.mark.ray)],
)
def test_a_writer_and_a_reader_that_are_stopped_while_their_store_dies_harm_nobody(
    request: pytest.FixtureRequest, kind: str, stopped_s: float, seed: int
) -> None:
    killed: Killed = request.getfixturevalue(kind)
    client, partition, nbytes = killed.client, f"stopped-{kind}", 300_000
    config = killed.config.model_copy(update={"timeout_s": 60.0})
    put(client, partition, STANDING)
    put(client, f"{partition}-viewed", VIEWED, nbytes)
    joined = killed.elsewhere()
    with (
        Process(put_pausing_in_the_copy, joined, config, partition, 2 * nbytes) as writer,
        Process(view_pausing, joined, config, f"{partition}-viewed", nbytes) as reader,
        killed.another() as other,
        Others(other, f"{partition}-others", seed) as others,
    ):
        assert writer.says() == "copying"
        assert reader.says() == "viewing"
        for process in (writer, reader):
            process.stop()
            process.hears("go on")
        client.kv_clear(None, f"{partition}-viewed", where={})
        for_a_while(stopped_s / 2)
        # They have their connections, so they have what they hold.
        counts = killed.values()
        assert counts["blocks_reserved"] >= 1
        assert counts["blocks_dead"] >= len(VIEWED)
        before = files(killed)
        killed.kill("values")
        for_a_while(stopped_s / 2)
        others.go_on()
        check(client, partition, STANDING)
        writer.resume()
        reader.resume()
        assert reader.says() is True
        writer.says()
        others.go_on()
        writer.hears("once more")
        assert writer.says() == "written over"
        others.go_on()
        check(client, partition, [*STANDING, "late"])
        writer.hears("end")
    client.kv_drop_partition(partition)
    client.kv_drop_partition(f"{partition}-viewed")
    killed.is_empty()
    eventually(lambda: not files(killed) & before, "segments of the dead store are gone")


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["clients", "store", "clients only"])
def test_a_writer_and_a_reader_that_are_killed_midway_leave_nothing(
    killed: Killed, first: str
) -> None:
    client, partition, nbytes = killed.client, f"killed {first}", 200_000
    put(client, partition, STANDING)
    put(client, f"{partition} viewed", VIEWED, nbytes)
    joined, config = killed.elsewhere(), killed.config
    with (
        Process(put_stopping_in_the_copy, joined, config, partition) as writer,
        Process(view_pausing, joined, config, f"{partition} viewed", nbytes) as reader,
    ):
        writer.stopped()
        assert reader.says() == "viewing"
        client.kv_clear(None, f"{partition} viewed", where={})
        eventually(lambda: killed.values()["blocks_dead"] >= len(VIEWED), "they are pinned")
        assert killed.values()["blocks_reserved"] == 1
        if first == "store":
            killed.kill("values")
        for process in (writer, reader):
            process.kill()
        if first == "clients":
            killed.kill("values")
        eventually(
            lambda: not any(killed.values()[name] for name in ("blocks_reserved", "pins")),
            "what they held is free",
        )
        check(client, partition, STANDING)


# -- forked --------------------------------------------------------------------------------------


@contextmanager
def staying(child: int) -> Generator[None]:
    """A forked child that is there all the time, and is killed at the end."""
    try:
        assert not is_gone(child)
        yield
        assert not is_gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("parent", ["goes on", "is killed"])
def test_a_child_forked_in_a_copy_holds_nothing_when_the_store_dies(
    killed: Killed, parent: str
) -> None:
    client, partition = killed.client, f"forked writer {parent}"
    put(client, partition, STANDING)
    joined, config = killed.elsewhere(), killed.config
    with (
        Process(put_forking_in_the_copy, joined, config, f"{partition} A", True) as writer,
        staying(writer.says()),
    ):
        before = files(killed)
        killed.kill("values")
        if parent == "goes on":
            writer.hears("go on")
            # The second copy is made with a fork of its own, where the first one's was lost.
            with staying(writer.says()):
                writer.hears("go on")
                assert writer.says() == "done"
            got = client.kv_batch_get(["A"], f"{partition} A", layout="list")
            assert got.fields["x"][0].unique().tolist() == [7]
            client.kv_drop_partition(f"{partition} A")
        else:
            writer.kill()
        eventually(lambda: not killed.values()["blocks_reserved"], "nothing is reserved")
        check(client, partition, STANDING)
        client.kv_drop_partition(partition)
        killed.is_empty()
        eventually(lambda: not files(killed) & before, "segments of the dead are gone")


@pytest.mark.parametrize("parent", ["goes on", "is killed"])
def test_a_child_forked_with_a_view_holds_nothing_when_the_store_dies(
    killed: Killed, parent: str
) -> None:
    client, partition = killed.client, f"forked reader {parent}"
    client.kv_put("A", partition, {"x": OTHERS})
    joined, config = killed.elsewhere(), killed.config
    with Process(view_and_fork, joined, config, partition, True) as reader:
        child, _ = reader.says()
        with staying(child):
            before = files(killed)
            killed.kill("values")
            if parent == "is killed":
                reader.kill()
            client.kv_drop_partition(partition)
            killed.is_empty()
            eventually(lambda: not files(killed) & before, "segments of the dead are gone")
            if parent == "goes on":
                reader.hears("go on")
                assert reader.says() == int(OTHERS.sum())


def test_a_child_forked_with_a_claim_does_not_keep_its_dead_parents_lease(killed: Killed) -> None:
    client = killed.client
    client.kv_put("A", "forked claimer", tags={"n": 1})
    joined, config = killed.elsewhere(), killed.config
    with Process(claim_and_fork, joined, config, "forked claimer") as claimer:
        keys, child = claimer.says()
        with staying(child):
            died = time.monotonic()
            claimer.kill()
            claim = client.kv_claim("forked claimer", "train", count=1, timeout=15)
            assert time.monotonic() - died > 0.95
            assert (claim.keys, claim.deliveries) == (keys, [2])
            client.kv_commit(claim)


# -- a plane that is stopped ---------------------------------------------------------------------

HOLDERS = 6
LEASE_S = 1.0
STOPPED_S = 30.0


@contextmanager
def stopped(pid: int | None) -> Generator[None]:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: state_of(pid) == "T", "it is stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def in_time(call: Callable[[], Any], timeout_s: float) -> Exception:
    """What a call says at its deadline; it says something, and then."""
    began = time.monotonic()
    with pytest.raises(SILENT) as silent:
        call()
    assert time.monotonic() - began < timeout_s + 1.5
    return silent.value


def endings(plane: Plane) -> Counter[tuple[int, int]]:
    """How often each claim was committed, or ended otherwise, by the journal."""
    found = Counter[tuple[int, int]]()
    for path in sorted((plane.folders.runtime / "journal").glob("journal-*")):
        for kind, _, _, body in read(path)[1]:
            if kind in (j.COMMIT, j.RELEASE):
                found[kind, body[2]] += 1
    return found


def test_a_plane_that_was_stopped_for_30_s_goes_on_where_it_was(
    own_plane: Callable[..., Plane],
) -> None:
    """Deadlines are kept, no lease ends of those who are there, and nothing is committed twice."""
    plane = own_plane()
    client = plane.client
    keys = [f"k{i}" for i in range(2 * HOLDERS + 2)]
    client.kv_batch_put(keys, "rows", tags=[{"n": i} for i in range(len(keys))])
    client.kv_put("A", "p", LARGE)
    with ExitStack() as stack:
        holders = [
            stack.enter_context(Process(hold, plane.joined, plane.config, "rows", LEASE_S))
            for _ in range(HOLDERS)
        ]
        held = [holder.says() for holder in holders]
        impatient = stack.enter_context(plane.another(timeout_s=0.3))
        claim = impatient.kv_claim("rows", "train", count=2, lease_s=LEASE_S, timeout=10)
        began = time.monotonic()
        with stopped(plane.pid):
            # Sent, and not answered: what is asked again below has had its effect by then, or not.
            in_time(lambda: impatient.kv_commit(claim), 0.3)
            for _ in range(2):
                for verb in VERBS.values():
                    in_time(lambda verb=verb: verb(client, 0.3), 0.3)
                in_time(lambda: client.kv_claim("rows", "train", count=1, timeout=0.5), 0.5)
            unknown = in_time(lambda: client.kv_put("once", "p", None, {"n": 1}, timeout=0.3), 0.3)
            for_a_while(STOPPED_S - (time.monotonic() - began))
        # Nobody's term has run: there is nothing to be had.
        with plane.another() as other, pytest.raises(DeadlineExceeded):
            other.kv_claim("rows", "train", count=1, timeout=2 * LEASE_S)
        for holder in holders:
            holder.hears("commit")
        assert [holder.says() for holder in holders] == ["committed"] * HOLDERS
        impatient.kv_commit(claim, timeout=10)
        there = "once" in client.kv_list("p").keys
        if isinstance(unknown, OutcomeUnknown):
            assert client.request_outcome(unknown.request_id)["applied"] == there
        client.kv_seal_partition("rows")
        last = client.kv_claim("rows", "train", count=1, timeout=10)
        assert (last.keys, last.end) == ([], True)
    assert sorted([*claim.keys, *(key for keys in held for key in keys)]) == sorted(keys)
    found = endings(plane)
    assert {kind for kind, _ in found} == {j.COMMIT}
    assert set(found.values()) == {1}
    assert len(found) == HOLDERS + 1
    client.kv_clear(None, "p", where={})
    plane.comes_to(used_bytes=0, blocks_reserved=0, pins=0, waiting=0)


@pytest.mark.ray
def test_a_tag_store_that_is_stopped_while_its_value_store_is_not_goes_on_where_it_was(
    two_processes: Killed,
) -> None:
    client = two_processes.client
    keys = [f"k{i}" for i in range(4)]
    put(client, "rows", keys)
    pid = eventually(lambda: two_processes.pid("tags"), "it is there")
    joined, config = two_processes.elsewhere(), two_processes.config
    with Process(hold, joined, config, "rows", LEASE_S) as holder:
        held = holder.says()
        with stopped(pid):
            began = time.monotonic()
            for name in ("put tags", "put small", "put large", "get", "list"):
                in_time(lambda name=name: VERBS[name](client, 0.3), 0.3)
            for_a_while(5 * LEASE_S - (time.monotonic() - began))
        rest = client.kv_claim("rows", "train", count=2, timeout=20)
        assert sorted([*held, *rest.keys]) == keys
        assert rest.deliveries == [1, 1]
        with pytest.raises(DeadlineExceeded):
            client.kv_claim("rows", "train", count=1, timeout=2 * LEASE_S)
        holder.hears("commit")
        assert holder.says() == "committed"
        client.kv_commit(rest)
    check(client, "rows", keys)
    client.kv_drop_partition("rows")
    for name in client.kv_list_partitions():
        client.kv_drop_partition(name)
    two_processes.is_empty()
