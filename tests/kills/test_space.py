"""Memory and disks that are full or cannot be written: said in words, and nothing is lost by it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import dataplane
from dataplane.checkpoint.verify import verify_checkpoint
from dataplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PermissionDenied,
    QuotaExceeded,
    Unreachable,
)
from dataplane.tags.journal_folder import list_files
from dataplane.tags.journal_verify import verify_journal
from tests.deadline import eventually
from tests.faults import planes
from tests.faults.planes import MiB, Plane
from tests.faults.processes import is_gone, state_of
from tests.kills import mounts
from tests.kills.mounts import Filler
from tests.kills.restarts import Restarts
from tests.kills.rows import check, content, put

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

TRIALS = (0, 1, 2)
SHORT = (QuotaExceeded, DeadlineExceeded)
"""There is no room; or it was still looked for when the time was up."""


@pytest.fixture
def mount() -> Iterator[ExitStack]:
    """File systems of one test, which outlive its planes."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(mount: ExitStack, own_plane: Callable[..., Plane]) -> Callable[..., Plane]:
    """Makes planes that end before the file systems that they are on."""
    return own_plane


def put_until_full(plane: Plane, partition: str, nbytes: int) -> list[str]:
    """Put rows until there is no room; those that were acknowledged."""
    keys: list[str] = []
    while True:
        key = f"k{len(keys)}"
        try:
            fields, tags = {"x": content(key, nbytes)}, {"nbytes": nbytes}
            plane.client.kv_put(key, partition, fields, tags, timeout=0.5)
        except SHORT:
            return keys
        keys.append(key)


def killed_and_back(plane: Plane) -> None:
    """Kill the process that serves, and wait for the next one."""
    pid = plane.pid
    plane.kill()
    eventually(lambda: is_gone(pid) and plane.pid != pid, "another one serves")
    eventually(lambda: "blocks" in plane.counts(), "it answers")


# -- shared memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [4 * MiB, 16 * MiB], ids=["small", "large"])
@pytest.mark.parametrize("nbytes", [50_000, MiB, 5 * MiB], ids=["sent", "mapped", "huge"])
def test_a_shared_memory_of_64_mb_that_is_filled_keeps_all_that_was_put(
    mount: ExitStack, start: Callable[..., Plane], nbytes: int, segment: int
) -> None:
    """Also in large segments, of which few are there, each with something that lives."""
    shm = mount.enter_context(mounts.small(64 * MiB))
    plane = start(shm_dir=shm, segment_bytes=segment)
    pid = plane.pid
    keys = put_until_full(plane, "p", nbytes)
    assert len(keys) * nbytes > 36 * MiB
    check(plane.client, "p", keys)
    # What the others leave is less than nothing.
    filler = Filler(shm)
    filler.leave(0)
    with pytest.raises(SHORT):
        plane.client.kv_put("more", "p", {"x": content("more", nbytes)}, timeout=0.5)
    check(plane.client, "p", keys)
    assert (plane.pid, state_of(pid)) == (pid, "S")  # no signal ended it
    killed_and_back(plane)
    check(plane.client, "p", keys)
    with pytest.raises(SHORT):
        plane.client.kv_put("more", "p", {"x": content("more", nbytes)}, timeout=0.5)
    filler.go()
    plane.client.kv_clear(keys[::2], "p")
    eventually(lambda: not plane.client.status()["dead_blocks"], "what was cleared is freed")
    put(plane.client, "p", ["again"], nbytes)
    check(plane.client, "p", [*keys[1::2], "again"])
    plane.client.kv_clear(None, "p", where={})
    plane.comes_to(used_bytes=0, blocks=0, blocks_reserved=0)


@pytest.mark.parametrize("trial", TRIALS)
def test_others_that_come_and_go_on_the_same_memory_cost_errors_and_no_row(
    mount: ExitStack, start: Callable[..., Plane], trial: int, seed: int
) -> None:
    chance = random.Random(seed + trial)
    shm = mount.enter_context(mounts.small(64 * MiB))
    plane = start(shm_dir=shm, segment_bytes=4 * MiB)
    pid, over = plane.pid, threading.Event()
    filler = Filler(shm)

    def come_and_go() -> None:
        while not over.wait(0.01):
            filler.leave(chance.randrange(0, 16 * MiB))
            over.wait(0.05)
            filler.go()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    there: list[str] = []
    refused = 0
    try:
        until = time.monotonic() + 4.0
        for number in range(10_000):
            if time.monotonic() > until:
                break
            key, nbytes = f"k{number}", chance.choice([10_000, MiB, 3 * MiB])
            try:
                fields, tags = {"x": content(key, nbytes)}, {"nbytes": nbytes}
                plane.client.kv_put(key, "p", fields, tags, timeout=0.2)
                there.append(key)
            except SHORT:
                refused += 1
                chance.shuffle(there)
                plane.client.kv_clear(there[:4], "p")
                del there[:4]
            if not number % 10:
                check(plane.client, "p", there)
    finally:
        over.set()
        thread.join()
    assert plane.pid == pid
    assert refused
    check(plane.client, "p", there)
    plane.client.kv_clear(None, "p", where={})
    plane.comes_to(used_bytes=0, blocks=0, blocks_reserved=0)
    # Three in each segment of 4 MiB, of which there are twelve.
    put(plane.client, "p", [f"again{i}" for i in range(36)], MiB)


# -- the journal's disk --------------------------------------------------------------------------


def tags_until_full(plane: Plane) -> list[str]:
    """Put rows of tags until the journal cannot take one; those that were acknowledged."""
    keys: list[str] = []
    for number in range(10_000):
        key = f"t{number}"
        try:
            plane.client.kv_put(key, "t", None, {"text": "x" * 20_000, "number": number})
        except QuotaExceeded as error:
            full = error
            break
        keys.append(key)
    else:
        raise AssertionError("the disk was never full")
    assert f"the file system under the journal {plane.folders.runtime}" in str(full)
    assert full.limit_bytes == 8 * MiB
    return keys


@pytest.mark.parametrize("dies", ["never", "when there is room", "when it is full"])
def test_a_full_disk_under_the_journal_takes_no_change_and_loses_none(
    mount: ExitStack, start: Callable[..., Plane], restarts: Restarts, dies: str
) -> None:
    disk = mount.enter_context(mounts.small(8 * MiB))
    filler = Filler(disk)
    plane = start(runtime_dir=disk)
    client = plane.client
    filler.leave(3 * MiB)
    put(client, "p", ["a", "b"])
    keys = tags_until_full(plane)
    assert len(keys) > 100
    filler.leave(0)
    # What is not in the journal has not happened, in part or whole.
    changes: list[Callable[[], Any]] = [
        lambda: client.kv_put("late", "t", None, {"text": "x" * 20_000}),
        lambda: client.kv_batch_put(keys[:50], "t", tags=[{"text": "y" * 5000}] * 50),
        lambda: put(client, "p", [f"c{i}" for i in range(100)], 100),
        lambda: put(client, "p", [f"d{i}" for i in range(100)]),
        lambda: [client.kv_clear([key], "t") for key in keys],
    ]
    for change in changes:
        with pytest.raises(QuotaExceeded, match="the file system under the journal"):
            change()
    # What still found a place in the last page has happened: a put, a clear, or some.
    left = client.kv_list("t").keys
    assert left == keys[len(keys) - len(left) :]
    there = client.kv_list("p").keys
    check(client, "p", there)
    assert len(left) > len(keys) - 100
    assert plane.counts()["blocks_reserved"] == 0
    plane.comes_to(blocks=len(there))
    if dies == "when it is full":
        plane.kill()
        eventually(lambda: restarts.failed >= 2, "nobody can start it again", within_s=20)
    filler.go()
    if dies == "when there is room":
        killed_and_back(plane)
    for number in range(5):
        client.kv_put(f"again{number}", "t", None, {"number": number}, timeout=15)
    put(client, "p", ["d"])
    if dies == "never":
        killed_and_back(plane)
    assert sorted(client.kv_list("t").keys) == sorted([*left, *(f"again{i}" for i in range(5))])
    check(client, "p", [*there, "d"])
    assert all(finding.is_whole for finding in verify_journal(plane.folders.runtime / "journal"))


@pytest.mark.ray
def test_a_tag_store_of_ray_that_finds_its_disk_full_comes_back_when_there_is_room(
    mount: ExitStack, roots: dict[str, Path], ray_cluster: list[str]
) -> None:
    disk = mount.enter_context(mounts.small(8 * MiB))
    filler = Filler(disk)
    settings: dict[str, Any] = {"runtime_dir": str(disk), "shm_dir": str(roots["shm_dir"])}
    settings |= {"host": "ray", "timeout_s": 20.0, "start_timeout_s": 30.0, "linger_s": 60.0}
    client = dataplane.init(settings, name="full")
    try:
        put(client, "p", ["a", "b"])
        filler.leave(0)
        # The next one has to write down that it began, for which there is no room.
        with pytest.raises(QuotaExceeded):
            for number in range(200):
                client.kv_put("t", "t", None, {"text": "x" * 50, "number": number})
        pid = client.status()["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: is_gone(pid), "it is dead")
        with pytest.raises((Unreachable, DeadlineExceeded)):
            client.kv_list("p", timeout=6)
        filler.go()
        check(client, "p", ["a", "b"])
        put(client, "p", ["c"])
        check(client, "p", ["a", "b", "c"])
    finally:
        client.close(destroy=True)
        dataplane.close()
        left = disk / client.plane_id
        eventually(lambda: not left.exists(), "it leaves nothing")


def test_a_snapshot_for_which_there_is_no_room_is_said_and_taken_when_there_is(
    mount: ExitStack, start: Callable[..., Plane], capfd: pytest.CaptureFixture[str]
) -> None:
    disk = mount.enter_context(mounts.small(8 * MiB))
    filler = Filler(disk)
    plane = start(runtime_dir=disk, snapshot_bytes=5 * MiB // 4)
    client, journal = plane.client, plane.folders.runtime / "journal"
    keys = [f"t{number}" for number in range(20)]
    for key in keys:
        client.kv_put(key, "t", None, {"text": f"{key:>4}" * 15_000})
    filler.leave(MiB // 2)
    for number in range(20):  # now one is due
        client.kv_put("k", "t", None, {"text": "x" * 12_000, "number": number})
    said: list[str] = []

    def is_said() -> bool:
        said.append(capfd.readouterr().err)
        return "no snapshot could be taken" in "".join(said)

    eventually(is_said, "it is said", within_s=20)
    assert "No space left" in "".join(said)
    assert not list_files(journal).snapshots
    client.kv_put("k", "t", None, {"number": 1000})
    assert all(finding.is_whole for finding in verify_journal(journal))
    filler.go()
    eventually(lambda: list_files(journal).snapshots, "it is taken", within_s=30)
    client.kv_put("k", "t", None, {"number": 1001})
    killed_and_back(plane)
    listing = client.kv_list("t")
    assert sorted(listing.keys) == sorted([*keys, "k"])
    tags = dict(zip(listing.keys, listing.tags, strict=True))
    assert tags["k"]["number"] == 1001
    assert all(tags[key] == {"text": f"{key:>4}" * 15_000} for key in keys)


# -- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_for_which_there_is_no_room_leaves_the_earlier_one(
    mount: ExitStack, start: Callable[..., Plane]
) -> None:
    disk = mount.enter_context(mounts.small(8 * MiB))
    plane, path = start(), disk / "saved"
    put(plane.client, "p", ["a", "b"])
    plane.client.save_checkpoint(path)
    put(plane.client, "p", [f"k{i}" for i in range(10)], MiB)
    for _ in range(2):
        with pytest.raises(QuotaExceeded, match="the disk is full"):
            plane.client.save_checkpoint(path, overwrite=True)
    assert os.listdir(disk) == ["saved"]
    killed_and_back(plane)
    with pytest.raises(QuotaExceeded, match="the disk is full"):
        plane.client.save_checkpoint(path, overwrite=True)
    assert verify_checkpoint(path)["rows"] == 2
    plane.client.kv_clear(None, "p", where={})
    plane.client.kv_drop_partition("p")
    plane.comes_to(used_bytes=0)
    plane.client.load_checkpoint(path)
    check(plane.client, "p", ["a", "b"])


# -- folders that cannot be written --------------------------------------------------------------


@pytest.mark.parametrize("what", ["runtime_dir", "shm_dir"])
@pytest.mark.parametrize("how", ["read-only", "a file", "below a file"])
def test_a_folder_that_cannot_be_used_is_refused_by_name_with_what_to_do(
    mount: ExitStack, roots: dict[str, Path], tmp_path: Path, what: str, how: str
) -> None:
    if how == "read-only":
        path = mount.enter_context(mounts.read_only())
    else:
        path = tmp_path / "file"
        path.write_bytes(b"somebody's")
        path = path / "folder" if how == "below a file" else path
    with pytest.raises((InvalidRequest, PermissionDenied)) as refused, ExitStack() as stack:
        planes.start(stack, "unwritable", **{**roots, what: path})
    assert str(path) in str(refused.value)
    assert "set another" in str(refused.value) or "mount" in str(refused.value)
    for root in roots.values():
        assert os.listdir(root) in ([], ["lock"])
    if how != "read-only":
        assert (tmp_path / "file").read_bytes() == b"somebody's"


@pytest.mark.parametrize("how", ["read-only", "below a file"])
def test_a_checkpoint_that_cannot_be_written_there_is_refused_by_name(
    mount: ExitStack, start: Callable[..., Plane], tmp_path: Path, how: str
) -> None:
    if how == "read-only":
        path = mount.enter_context(mounts.read_only()) / "saved"
    else:
        (tmp_path / "file").write_bytes(b"somebody's")
        path = tmp_path / "file" / "folder"
    plane = start()
    put(plane.client, "p", ["a"])
    with pytest.raises((PermissionDenied, InvalidRequest)) as refused:
        plane.client.save_checkpoint(path)
    assert str(path.parent) in str(refused.value)
    check(plane.client, "p", ["a"])
