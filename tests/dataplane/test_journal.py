"""The journal: every change is in the file before it is made, whole, or it is not made."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.client.loading import load
from dataplane.errors import InternalError, QuotaExceeded
from dataplane.server.tag_service import TagService
from dataplane.tags import journal as j
from dataplane.tags.journal import FileJournal
from dataplane.tags.store import TagStore
from dataplane.types import Quota, Retention
from dataplane.wire.messages import PutMeta
from tests.contract.planes import thread_plane
from tests.dataplane.audit import audit, put, tags_of
from tests.dataplane.changes import begin_group, drop_partition, end_group
from tests.dataplane.interleaving import clear_where
from tests.dataplane.journal_file import read
from tests.deadline import eventually

HEAD = {"plane_id": "plane", "epoch": 3, "open_schemas": False, "number": 1, "before": 0}


@contextmanager
def files_limited_to(nbytes: int) -> Iterator[None]:
    """The kernel takes no byte beyond this size of a file. Python ignores the signal of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_new_journal_says_which_plane_and_epoch_it_is_of(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, "plane", 3)
    assert read(path) == (HEAD, [])
    assert path.stat().st_mode & 0o777 == 0o600
    assert journal.nbytes == path.stat().st_size
    journal.close()


def test_a_journal_never_goes_on_in_a_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    FileJournal(path, "plane", 3).close()
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        FileJournal(path, "plane", 4)
    assert path.read_bytes() == before


def test_records_come_back_in_order_and_are_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, "plane", 3)
    changes = [
        (j.PUT, 1, 12.5, ("client", b"meta", b"\x80", "v0", (1, 2, 4096, 10, b"t", 1, b"\1"))),
        (j.PUT, 2, 12.75, ("client", b"meta", b"\x80", "", None)),
        (j.CLEAR, 3, 13.0, ("train", ["a", "b"], None)),
        (j.CLEAR, 4, 13.0, ("train", None, {"status": "done"})),
        (j.REPACK, 4, 13.5, ("v0", 1, (2, 2, 8192, 10, b"t", 1, b"\1"), [(0, 7)])),
        (j.STORE, 4, 14.0, ("v1", [None, ["10.0.0.1", 1]])),
    ]
    for number, change in enumerate(changes, 1):
        journal.append(*change)
        head, records = read(path)
        assert head == HEAD
        assert records == msgpack.unpackb(msgpack.packb(changes[:number]))
        assert journal.nbytes == path.stat().st_size
    journal.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(0, 600))
def test_a_journal_that_ran_full_ends_with_its_last_whole_record(
    tmp_path: Path, bodies: list[bytes], room: int
) -> None:
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    journal = FileJournal(path, "plane", 3)
    whole: list[bytes] = []
    with files_limited_to(journal.nbytes + room):
        for body in bodies:
            before = journal.nbytes
            try:
                journal.append(j.PUT, len(whole) + 1, 0.0, body)
            except QuotaExceeded as error:
                assert str(path) in str(error)  # noqa: PT017
                assert journal.nbytes == before
                break
            whole.append(body)
    assert read(path) == (HEAD, [[j.PUT, n, 0.0, body] for n, body in enumerate(whole, 1)])
    journal.close()


@pytest.mark.parametrize("room", [0, 1, 8, 50], ids=lambda n: f"{n} bytes left")
def test_a_change_for_which_there_is_no_room_is_tried_again_with_the_next(
    tmp_path: Path, room: int
) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, "plane", 3)
    journal.append(j.PUT, 1, 0.0, b"first")
    before = path.read_bytes()
    with files_limited_to(len(before) + room):
        for _ in range(2):
            with pytest.raises(QuotaExceeded, match="the change was not made") as error:
                journal.append(j.PUT, 2, 0.0, b"x" * 100)
            assert ("only part" in str(error.value)) == (room > 0)
            assert str(path) in str(error.value)
            assert 0 < error.value.used_bytes <= error.value.limit_bytes
            assert path.read_bytes() == before
    journal.append(j.PUT, 2, 0.0, b"second")  # there is room again
    assert read(path) == (HEAD, [[j.PUT, 1, 0.0, b"first"], [j.PUT, 2, 0.0, b"second"]])
    assert journal.nbytes == path.stat().st_size
    journal.close()


@pytest.mark.parametrize("cut_fails", [False, True])
def test_after_any_other_failure_the_journal_takes_no_further_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_fails: bool
) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, "plane", 3)
    journal.append(j.PUT, 1, 0.0, b"first")
    before = path.read_bytes()

    def broken(fd: int, _: Any) -> int:
        raise OSError(errno.ENOSPC if cut_fails else errno.EIO, "the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", broken)
        if cut_fails:
            patch.setattr(os, "ftruncate", broken)
        with pytest.raises(InternalError, match=r"change was not made.* on fire.*started again"):
            journal.append(j.PUT, 2, 0.0, b"second")
    for _ in range(2):
        with pytest.raises(InternalError, match=r"takes no more changes: .*on fire"):
            journal.append(j.PUT, 2, 0.0, b"second")
    with pytest.raises(InternalError, match=r"takes no more changes: .*on fire"):
        journal.turn()
    assert path.read_bytes() == before
    journal.close()


class Disk:
    """Counts what a process asks its disk to flush."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.flushed: list[int] = []
        """Size of the file each time."""
        self.came = threading.Event()
        self.error: OSError | None = None
        patch.setattr(os, "fdatasync", self._flush)

    def _flush(self, fd: int) -> None:
        if self.error is not None:
            self.came.set()
            raise self.error
        self.flushed.append(os.fstat(fd).st_size)
        self.came.set()


def test_nothing_is_flushed_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    journal = FileJournal(tmp_path / "journal-00000001", "plane", 3)
    journal.append(j.PUT, 1, 0.0, b"first")
    journal.turn()
    journal.close()
    assert disk.flushed == []


def test_always_flushes_a_change_before_it_is_acknowledged_or_does_not_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    path = tmp_path / "journal-00000001"
    journal = FileJournal(path, "plane", 3, sync=j.ALWAYS)
    for n in range(1, 4):
        journal.append(j.PUT, n, 0.0, b"change")
        assert disk.flushed[-1] == journal.nbytes == path.stat().st_size
    assert len(disk.flushed) == 4
    before = path.read_bytes()
    disk.error = OSError(errno.EDQUOT, "over quota")
    with pytest.raises(QuotaExceeded, match="over quota"):
        journal.append(j.PUT, 4, 0.0, b"change")
    assert path.read_bytes() == before
    disk.error = None
    journal.append(j.PUT, 4, 0.0, b"change")
    disk.error = OSError(errno.EIO, "on fire")
    with pytest.raises(InternalError, match="on fire"):
        journal.append(j.PUT, 5, 0.0, b"change")
    assert len(read(path)[1]) == 4
    journal.close()


def test_interval_flushes_within_a_second_what_has_been_written_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(j, "FLUSH_S", 0.02)
    disk = Disk(monkeypatch)
    journal = FileJournal(tmp_path / "journal-00000001", "plane", 3, sync=j.INTERVAL)
    for n in range(1, 4):
        if n == 3:
            journal.turn()  # the thread goes on with the new file
        disk.came.clear()
        journal.append(j.PUT, n, 0.0, b"change")
        assert disk.came.wait(10.0)
        assert disk.flushed[-1] == journal.path.stat().st_size
    assert disk.flushed[-2] < disk.flushed[-3]  # the header of the new file
    disk.error = OSError(errno.EIO, "on fire")
    disk.came.clear()
    journal.append(j.PUT, 4, 0.0, b"change")
    assert disk.came.wait(10.0)
    eventually(lambda: _is_broken(journal), "the journal takes no more changes")
    journal.close()
    journal.flush()  # nobody's descriptor is flushed when it comes too late


def _is_broken(journal: FileJournal) -> bool:
    try:
        journal.append(j.PUT, 5, 0.0, b"change")
    except InternalError as error:
        return "could not be flushed" in str(error)
    return False


def test_a_turn_goes_on_in_a_file_that_says_where_it_goes_on(tmp_path: Path) -> None:
    first = tmp_path / "journal-00000001"
    journal = FileJournal(first, "plane", 3, open_schemas=True)
    assert journal.turn() == 1  # there is nothing in it yet
    journal.append(j.PUT, 1, 0.0, b"first")
    size = journal.nbytes
    assert (journal.turn(), journal.turn(), journal.number) == (2, 2, 2)
    journal.append(j.PUT, 2, 0.0, b"second")
    assert first.stat().st_size == size
    head, records = read(tmp_path / "journal-00000002")
    assert head == {**HEAD, "open_schemas": True, "number": 2, "before": size}
    assert records == [[j.PUT, 2, 0.0, b"second"]]
    assert journal.nbytes == size + journal.path.stat().st_size
    journal.close()
    assert sorted(os.listdir(tmp_path)) == ["journal-00000001", "journal-00000002"]


def test_a_turn_that_fails_changes_nothing(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal-00000001", "plane", 3)
    journal.append(j.PUT, 1, 0.0, b"first")
    with files_limited_to(20), pytest.raises(QuotaExceeded, match="could not be begun"):
        journal.turn()
    (tmp_path / "journal-00000002").mkdir()
    with pytest.raises(InternalError, match="cannot go on in a new file"):
        journal.turn()
    journal.append(j.PUT, 2, 0.0, b"second")
    assert [n for _, n, _, _ in read(tmp_path / "journal-00000001")[1]] == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["journal-00000001", "journal-00000002"]
    journal.close()


def test_a_journal_knows_whether_a_load_is_under_way(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal", "plane", 3)
    for step, loading in [("begin", True), ("rows", True), ("end", False), ("begin", True),
                          ("block", True), ("abandon", False)]:  # fmt: skip
        journal.append(j.RESTORE, 1, 0.0, (step, "id"))
        assert journal.loading is loading
    journal.close()


def test_a_full_disk_is_named_and_leaves_whole_records_only(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a tmpfs: {mounted.stderr.strip()}")
    try:
        (tmp_path / "other").write_bytes(bytes(8192))
        journal = FileJournal(tmp_path / "journal", "plane", 3)
        written = 0
        with pytest.raises(QuotaExceeded, match=r"only part of a record|No space left") as error:
            for written in range(100):
                journal.append(j.PUT, written + 1, 0.0, bytes(3000))
        _, records = read(tmp_path / "journal")
        assert [record[1] for record in records] == list(range(1, written + 1))
        assert written > 10
        assert error.value.limit_bytes == 64 << 10
        assert 60 << 10 < error.value.used_bytes <= 64 << 10
        (tmp_path / "other").unlink()
        journal.append(j.PUT, written + 1, 0.0, bytes(3000))
        assert len(read(tmp_path / "journal")[1]) == written + 1
        journal.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_change_that_cannot_be_journaled_is_not_made(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal", "plane", 1)
    service = TagService(TagStore(1), journal, on_destroy=lambda: None, clock=lambda: 5.0)
    service.store.changed = None  # there is no loop here, and nobody who waits

    def put_tags(number: int, key: str) -> Any:
        meta = PutMeta("train", [key], 0, number, 0, None, None)
        return service.putting.put("c", meta.pack(), msgpack.packb({"n": number}), None, "")

    put_tags(1, "a")
    before = service.store.counts()
    with files_limited_to(journal.nbytes):
        for number, key in ((2, "a"), (3, "new")):
            with pytest.raises(QuotaExceeded):
                put_tags(number, key)
        assert service.store.counts() == before
        assert tags_of(service.store, "train", ["a", "new"]) == [{"n": 1}, {}]
        assert put_tags(1, "a").revision == (1, 1)  # what was answered is answered again
    assert put_tags(2, "a").revision == (1, 2)  # there is room again, and it had no effect before
    assert tags_of(service.store, "train", ["a"]) == [{"n": 2}]
    journal.close()


def test_the_journal_of_puts_says_what_the_store_holds(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, "plane", 1)
    service = TagService(TagStore(1), journal, on_destroy=lambda: None, clock=lambda: 5.0)
    service.store.changed = None  # there is no loop here, and nobody who waits
    for number in range(1, 20):
        meta = PutMeta("train", [f"k{number % 5}"], 0, number, number - 1, None, None)
        service.putting.put("c", meta.pack(), msgpack.packb({f"t{number % 3}": number}), None, "")
    replayed = TagStore(1)
    for kind, n, at, (client_id, packed, tags, store_id, block) in read(path)[1]:
        assert (kind, at, client_id, store_id, block) == (j.PUT, 5.0, "c", "", None)
        meta = PutMeta.unpack(packed)
        unpacked = [msgpack.unpackb(tags)]
        assert put(replayed, meta.partition_id, meta.keys, tags=unpacked, now=at) == n
    keys = [f"k{i}" for i in range(5)]
    assert tags_of(replayed, "train", keys) == tags_of(service.store, "train", keys)
    assert replayed.counts() == service.store.counts()
    journal.close()


def test_the_journal_says_all_of_groups_partitions_and_clears(
    plane_settings: dict[str, Any],
) -> None:
    """What is journaled is enough to make the same store of it, with every attempt and setting."""
    with thread_plane(plane_settings) as plane, plane.connect() as client:
        client.kv_create_partition("p", quota={"rows": 50, "bytes": 1 << 20, "group_bytes": 4096})
        client.kv_create_partition("p", schema="open", retention={"versions": 1})
        attempts = [client.begin_group(f"u{i}", "p", n=2) for i in range(5)]
        for i, attempt in enumerate(attempts):
            tags = [{"i": i, "odd": bool(i % 2)} for _ in range(2)]
            client.kv_batch_put([f"u{i}_0", f"u{i}_1"], "p", None, tags, attempt=attempt)
        client.end_group(attempts[0], "finished")
        client.end_group(attempts[1], "failure")
        client.begin_group("u2", "p", n=1, declared_bytes=9999)
        client.kv_clear(["u3_0", "absent"], "p", retire=True)
        client.kv_clear(None, "p", where={"i": 4}, retire=True)
        client.kv_clear(None, "p", where={"odd": True})
        client.kv_clear(["nothing"], "p", retire=True)  # changes nothing
        for version in (1, 2):
            client.kv_put("w", f"p@{version}", tags={})
            client.kv_seal_partition(f"p@{version}")
            client.kv_seal_partition(f"p@{version}")
        client.kv_put("k", "q", tags={"v": 1})
        client.kv_drop_partition("q")
        client.kv_put("l", "q", tags={"v": 2})
        store = plane.server.tags.store
        journal = plane.server.tags.journal
        assert isinstance(journal, FileJournal)
        records = plane.call(lambda: read(journal.path)[1])
        replayed = TagStore(store.epoch)
        for kind, n, at, body in records:
            replay(replayed, kind, n, at, body)
            assert replayed.n == n
        audit(replayed)
        expected = plane.call(lambda: described(store))
    assert described(replayed) == expected


def replay(store: TagStore, kind: int, n: int, at: float, body: Any) -> None:
    """Make one journaled change again."""
    if kind == j.PUT:
        client_id, packed, tags, _, block = body
        assert block is None
        meta = PutMeta.unpack(packed)
        unpacked = list(msgpack.Unpacker(BytesIO(tags)))
        group = None if meta.attempt is None else store.attempts[meta.attempt]
        put(store, meta.partition_id, meta.keys, tags=unpacked, now=at, client_id=client_id,
            group=group)  # fmt: skip
    elif kind == j.CLEAR:
        client_id, partition_id, keys, where, retire, *_ = body
        if where is None:
            store.apply_clear(partition_id, keys, at, by=client_id, retire=retire)
        else:
            clear_where(store, partition_id, where, now=at, retire=retire)
    elif kind == j.BEGIN:
        client_id, partition_id, uid, sessions, declared, *_ = body
        begin_group(store, partition_id, uid, sessions, declared, client_id, now=at)
    elif kind == j.END:
        client_id, attempt, status, *_ = body
        end_group(store, attempt, status, client_id, now=at)
    elif kind == j.PARTITION and body[0] == "create":
        _, partition_id, schema, quota, retention, *_ = body
        partition = store.apply_create(partition_id, at)
        partition.open_schema = schema == "open" or partition.open_schema
        partition.quota = partition.quota if quota is None else Quota(**quota)
        partition.retention = partition.retention if retention is None else Retention(**retention)
    elif kind == j.PARTITION and body[0] == "seal":
        _, partition_id, surplus, *_ = body
        store.apply_seal(store.partition(partition_id), at)
        for old in surplus:
            drop_partition(store, old, now=at)
    elif kind == j.PARTITION:
        assert body[0] == "drop"
        for old in body[1]:
            drop_partition(store, old, now=at)
    else:
        assert (kind in (j.STORE, j.ANSWER), n) == (True, store.n)


def described(store: TagStore) -> dict[str, Any]:
    """All that a store knows, as plain data."""
    partitions = {
        name: {
            "rows": {row.key: (row.tags, row.revision, row.cleared_at) for row in partition.slots},
            "groups": {
                uid: (g.attempt, g.n, g.declared_bytes, g.status, g.since, g.at, g.open,
                      g.producer.client_id, sorted(g.positions), g.held_bytes, g.held_rows)
                for uid, g in partition.groups.items()
            },
            "settings": (partition.quota, partition.retention, partition.sealed,
                         partition.open_schema, partition.born, partition.revision),
            "producers": {
                client_id: (p.rows, p.tag_bytes, p.total_bytes, p.total_rows)
                for client_id, p in partition.producers.items()
                if not p.is_empty
            },
        }
        for name, partition in store.partitions.items()
    }  # fmt: skip
    return {"n": store.n, "attempts": sorted(store.attempts), "partitions": partitions}


def test_a_load_in_place_of_rows_whose_end_cannot_be_written_changes_nothing(
    plane_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with thread_plane(plane_settings) as plane, plane.connect() as client:
        client.kv_put("new", "p", {"x": torch.arange(3)}, {"v": 1})
        client.save_checkpoint(tmp_path / "saved")
        client.kv_drop_partition("p")
        for name in ("p", "q"):
            client.kv_put("old", name, {"x": torch.arange(5)}, {"v": 2})
        append = plane.server.tags.journal.append

        def full(kind: int, n: int, at: float, body: Any) -> None:
            if (kind, body[0]) == (j.RESTORE, "end"):
                raise InternalError("the disk is full")
            append(kind, n, at, body)

        def in_place(core: Any, deadline: float) -> Any:
            return load(core, tmp_path / "saved", deadline, stay=[])

        monkeypatch.setattr(plane.server.tags.journal, "append", full)
        with pytest.raises(
            InternalError, match="disk is full; nothing was loaded, the plane is as it was"
        ):
            client.run(in_place)
        assert client.kv_list("q").tags == client.kv_list("p").tags == [{"v": 2}]
        assert client.kv_batch_get(["old"], "q").fields["x"].values().tolist() == [0, 1, 2, 3, 4]
        monkeypatch.undo()
        client.run(in_place)
        assert set(client.kv_list_partitions()) == {"p"}
        assert client.kv_list("p").keys == ["new"]
