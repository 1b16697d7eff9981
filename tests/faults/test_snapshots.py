"""Snapshots taken by a child: whoever is killed when, a start finds all that was acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgpack
import pytest

from dataplane.errors import InternalError, JournalDamaged
from dataplane.server import snapshotting
from dataplane.server.snapshotting import Snapshots, write_snapshot
from dataplane.tags import journal as j
from dataplane.tags.history import History
from dataplane.tags.journal import FileJournal
from dataplane.tags.journal_folder import Opened, open_journal
from dataplane.tags.journal_verify import verify_journal
from dataplane.wire.messages import PutMeta
from tests.dataplane.replaying import described, differences
from tests.deadline import eventually, until

KEYS = 200


def opened(folder: Path, *, sync: str = "none") -> Opened:
    return open_journal(
        folder, "plane", open_schemas=False, sync=sync, history=History(5000, 1e6), now=50.0
    )


def put(journal: FileJournal, first: int, count: int) -> int:
    """So many puts of ten keys each; the last revision."""
    for n in range(first, first + count):
        keys = [f"k{(10 * n + i) % KEYS}" for i in range(10)]
        meta = PutMeta("p", keys, 0, n, n - 1, None, None)
        tags = b"".join(msgpack.packb({"n": n, "i": i}) for i in range(10))
        journal.append(j.PUT, n, float(n), ["c", meta.pack(), tags, "", None])
    return first + count - 1


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def assert_whole(folder: Path, n: int) -> None:
    """A start finds n puts, and nothing else is left lying about."""
    assert all(finding.is_whole for finding in verify_journal(folder))
    journal, replay = opened(folder)
    journal.close()
    assert replay is not None
    assert replay.store.n == n
    assert {row.tags["n"] for row in replay.store.partition("p").slots} == set(
        range(max(1, n - KEYS // 10 + 1), n + 1)
    )
    assert not any(name.endswith(".new") for name in names(folder))


@pytest.mark.parametrize("sync", ["none", "interval", "always"])
async def test_a_snapshot_takes_the_place_of_all_before_it(tmp_path: Path, sync: str) -> None:
    journal, _ = opened(tmp_path, sync=sync)
    snapshots = Snapshots(journal, 1 << 20)
    assert await snapshots.take() == 0  # there is nothing yet
    last = put(journal, 1, 100)
    assert await snapshots.take() == 2
    assert names(tmp_path) == ["journal-00000002", "snapshot-00000002"]
    assert (tmp_path / "snapshot-00000002").stat().st_mode & 0o777 == 0o600
    assert (journal.snapshot, journal.nbytes) == (2, journal.path.stat().st_size)
    assert journal.snapshot_bytes == (tmp_path / "snapshot-00000002").stat().st_size
    assert await snapshots.take() == 2  # nothing has changed
    taking = asyncio.ensure_future(snapshots.take())
    for _ in range(50):  # changes go on meanwhile
        last = put(journal, last + 1, 1)
        await asyncio.sleep(0)
    number = await taking
    assert names(tmp_path) == [f"journal-{number:08d}", f"snapshot-{number:08d}"]
    put(journal, last + 1, 3)
    journal.close()
    assert_whole(tmp_path, last + 3)


async def test_the_child_makes_what_the_journal_makes(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    put(journal, 1, 700)
    journal.append(j.CLEAR, 701, 701.0, ["c", "p", ["k1", "k2"], None, False, 701, 700])
    journal.close()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "journal-00000001").write_bytes(
        (tmp_path / "journal-00000001").read_bytes()
    )
    (journal, expected), (other, _) = opened(tmp_path / "copy"), opened(tmp_path)
    await Snapshots(other, 1 << 20).take()
    journal.close()
    other.close()
    journal, replay = opened(tmp_path)
    journal.close()
    assert replay is not None
    assert expected is not None
    assert journal.snapshot == 2
    replay.store.epoch = expected.store.epoch  # there was one more start
    assert replay.store.history.floor > 0  # the child was told of the bounds
    assert differences(described(replay.store), described(expected.store)) == []


async def test_snapshots_are_taken_when_the_journal_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotting, "LOOK_S", 0.01)
    journal, _ = opened(tmp_path)
    looks = 0

    class Looking(Snapshots):
        @property
        def is_due(self) -> bool:
            nonlocal looks
            looks += 1
            return super().is_due

    snapshots = Looking(journal, 20_000)
    last = put(journal, 1, 10)
    assert not snapshots.is_due
    last = put(journal, last + 1, 200)
    assert snapshots.is_due
    journal.loading = True
    running = asyncio.ensure_future(snapshots.run())
    await until(lambda: looks > 5)
    assert journal.number == 1  # while a checkpoint is loaded there is none
    with pytest.raises(InternalError, match="while a checkpoint is loaded"):
        await snapshots.take()
    journal.loading = False
    await until(lambda: journal.snapshot == 2)
    assert not snapshots.is_due
    journal.snapshot_bytes = 10**9  # a large one is not taken again for a small journal
    last = put(journal, last + 1, 200)
    assert not snapshots.is_due
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    journal.close()
    assert_whole(tmp_path, last)


async def test_a_snapshot_that_fails_is_said_and_tried_again_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshotting, "LOOK_S", 0.005)
    journal, _ = opened(tmp_path)
    last = put(journal, 1, 200)
    closed = tmp_path / "journal-00000001"
    (tmp_path / "snapshot-00000002.new").mkdir()  # in the way of the child
    running = asyncio.ensure_future(Snapshots(journal, 20_000).run())
    await until(lambda: len(caplog.records) >= 2)
    first, second = (record.getMessage() for record in caplog.records[:2])
    assert "no snapshot could be taken" in first
    assert "IsADirectoryError" in first
    assert "next try in 0 s" in second
    assert closed.exists()
    (tmp_path / "snapshot-00000002.new").rmdir()
    await until(lambda: journal.snapshot == 2)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    journal.close()
    assert_whole(tmp_path, last)


async def test_a_damaged_journal_makes_no_snapshot_and_is_named(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    put(journal, 1, 100)
    path = tmp_path / "journal-00000001"
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)
    with pytest.raises(InternalError, match=r"JournalDamaged: .*journal-00000001 is damaged"):
        await Snapshots(journal, 1 << 20).take()
    journal.close()
    assert names(tmp_path) == ["journal-00000001", "journal-00000002"]


@pytest.mark.parametrize("cut", [1, 500])
def test_a_closed_file_that_was_cut_short_makes_no_snapshot(tmp_path: Path, cut: int) -> None:
    """Taken for a torn end, all that is missing of it would be gone for good."""
    journal, _ = opened(tmp_path)
    put(journal, 1, 50)
    boundary = journal.nbytes
    put(journal, 51, 50)
    journal.turn()
    journal.close()
    path = tmp_path / "journal-00000001"
    whole = path.read_bytes()
    for end in (boundary, len(whole) - cut):
        path.write_bytes(whole[:end])
        with pytest.raises(JournalDamaged) as error:
            write_snapshot(tmp_path, 2, History())
        assert error.value.path == str(path)
    path.write_bytes(whole)
    (tmp_path / "journal-00000002").unlink()
    with pytest.raises(JournalDamaged, match="missing"):
        write_snapshot(tmp_path, 2, History())
    assert names(tmp_path) == ["journal-00000001"]


# -- killed ------------------------------------------------------------------------------------


def slow(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Have children stop when all is written but not yet whole; the file by which they say so."""
    there = folder / "there"
    stopping = folder / "stopping.py"
    stopping.write_text(textwrap.dedent(f"""
        import os, pathlib, signal, sys, time
        from dataplane.server import snapshotting
        def stop(*_):
            pathlib.Path({str(there)!r}).write_text(str(os.getpid()))
            time.sleep(60)
        snapshotting.os.rename = stop
        snapshotting.child()
    """))  # fmt: skip

    class Slow(snapshotting._Child):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._command[1:3] = [str(stopping)]

    monkeypatch.setattr(snapshotting, "_Child", Slow)
    return there


def is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


async def test_a_child_that_is_killed_leaves_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "journal"
    journal, _ = opened(folder)
    last = put(journal, 1, 100)
    there = slow(monkeypatch, tmp_path)
    snapshots = Snapshots(journal, 1 << 20)
    taking = asyncio.ensure_future(snapshots.take())
    await until(there.exists)
    await until(lambda: there.read_text() != "")
    os.kill(int(there.read_text()), signal.SIGKILL)
    with pytest.raises(InternalError, match="ended with -9"):
        await taking
    last = put(journal, last + 1, 5)
    assert names(folder) == ["journal-00000001", "journal-00000002"]
    monkeypatch.undo()
    assert await snapshots.take() == 3
    assert names(folder) == ["journal-00000003", "snapshot-00000003"]
    journal.close()
    assert_whole(folder, last)


async def test_whoever_gives_a_snapshot_up_takes_its_child_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "journal"
    journal, _ = opened(folder)
    last = put(journal, 1, 100)
    there = slow(monkeypatch, tmp_path)
    taking = asyncio.ensure_future(Snapshots(journal, 1 << 20).take())
    await until(there.exists)
    await until(lambda: there.read_text() != "")
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert not is_there(int(there.read_text()))
    assert names(folder) == ["journal-00000001", "journal-00000002"]
    journal.close()
    assert_whole(folder, last)


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal, _ = opened(folder)
    last = put(journal, 1, 100)
    journal.turn()
    journal.close()
    there = tmp_path / "there"
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(f"""
        import pathlib, pytest
        from tests.faults.test_snapshots import slow
        from dataplane.server import snapshotting
        slow(pytest.MonkeyPatch(), pathlib.Path({str(tmp_path)!r}))
        snapshotting._Child(pathlib.Path({str(folder)!r}), 2, (5000, 1e6)).run()
    """))  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        eventually(lambda: there.exists() and there.read_text(), "the child has written it")
    finally:
        parent.kill()
        parent.wait()
    child = int(there.read_text())
    eventually(lambda: not is_there(child), "the child has ended")
    assert_whole(folder, last)


STEPS = ["read_files", "fdatasync", "Parts", "rename", "sync_folder", "unlink"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_step_a_start_finds_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    """Killed just before or after a step: what is on the disk then is what a start finds."""
    journal, _ = opened(tmp_path)
    last = put(journal, 1, 60)
    journal.turn()
    last = put(journal, last + 1, 5)
    journal.close()

    class Killed(BaseException):
        pass

    owner = snapshotting if hasattr(snapshotting, step) else os
    if step == "unlink":
        owner = Path
    original = getattr(owner, step)

    def killed(*args: Any, **options: Any) -> Any:
        if after:
            original(*args, **options)
        raise Killed

    # The end of a process tidies nothing up.
    monkeypatch.setattr(owner, step, killed)
    if step != "unlink":
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    with pytest.raises(Killed):
        write_snapshot(tmp_path, 2, History(5000, 1e6))
        snapshotting._remove_replaced(tmp_path)
    monkeypatch.undo()
    assert_whole(tmp_path, last)
    assert len(names(tmp_path)) == 2
