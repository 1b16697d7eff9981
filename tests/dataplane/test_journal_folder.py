"""Starting on a journal that is there: it goes on where it ended, or is refused and left alone."""

from __future__ import annotations

import logging
import os
import random
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dataplane.cli.main import app
from dataplane.errors import (
    InvalidRequest,
    JournalDamaged,
    PermissionDenied,
    QuotaExceeded,
)
from dataplane.server.snapshotting import write_snapshot
from dataplane.tags import journal as j
from dataplane.tags.history import History
from dataplane.tags.journal import FileJournal, journal_name, reading
from dataplane.tags.journal_folder import Opened, list_files, open_journal
from dataplane.tags.journal_verify import verify_journal
from dataplane.tags.records import Records, head_bytes
from dataplane.tags.replay.replay import Replay
from dataplane.wire.messages import PutMeta
from tests.contract.planes import thread_plane
from tests.dataplane.journal_file import read
from tests.dataplane.replaying import described, differences
from tests.dataplane.test_journal import files_limited_to


def opened(folder: Path, plane_id: str = "plane", **options: Any) -> Opened:
    settings: dict[str, Any] = {"open_schemas": False, "sync": "none", "now": 50.0, **options}
    return open_journal(folder, plane_id, history=History(1000, 600.0), **settings)


def put(journal: FileJournal, n: int, key: str = "") -> None:
    meta = PutMeta("p", [key or f"k{n}"], 0, n, n - 1, None, None)
    body = ["c", meta.pack(), msgpack.packb({"n": n}), "", None]
    journal.append(j.PUT, n, float(n), body)


def values(made: Replay | None) -> dict[str, Any]:
    """What the plane holds."""
    if made is None or "p" not in made.store.partitions:
        return {}
    return {row.key: row.tags["n"] for row in made.store.partition("p").slots}


def new(folder: Path, puts: int = 3) -> None:
    """A plane that made so many puts and ended."""
    journal = opened(folder).journal
    for n in range(1, puts + 1):
        put(journal, n)
    journal.close()


def three_files(folder: Path, *, snapshot: bool = True) -> None:
    """Two puts before a snapshot, or where there is none in the first file, and then two files of
    two puts each."""
    journal = opened(folder).journal
    for n in range(1, 7):
        put(journal, n)
        if n in (2, 4):
            journal.turn()
    journal.close()
    if snapshot:
        write_snapshot(folder, 2, History(1000, 600.0))
        for path in list_files(folder).leftovers:
            path.unlink()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# -- going on ----------------------------------------------------------------------------------


def test_a_folder_without_a_journal_is_a_new_plane_of_epoch_1(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "journal"
    journal, replay = opened(folder, open_schemas=True)
    assert replay is None
    assert folder.stat().st_mode & 0o777 == 0o700
    head, records = read(folder / "journal-00000001")
    assert (head["plane_id"], head["epoch"], head["open_schemas"], records) == (
        "plane", 1, True, [],
    )  # fmt: skip
    assert (journal.history, journal.number, journal.snapshot) == ((1000, 600.0), 1, 0)
    journal.close()


def test_every_start_begins_an_epoch_and_goes_on_with_what_there_was(tmp_path: Path) -> None:
    new(tmp_path, puts=2)
    for epoch in (2, 3, 4):
        journal, replay = opened(tmp_path, open_schemas=True, now=100.0 * epoch)
        assert replay is not None
        assert replay.store.revision() == (epoch, epoch)
        assert replay.at == 100.0 * epoch
        assert replay.store.starts == {1: 0, **{e: e for e in range(2, epoch + 1)}}
        assert not replay.store.open_schemas  # it has what it began with
        assert values(replay) == {f"k{n}": n for n in range(1, epoch + 1)}
        assert journal.nbytes == journal.path.stat().st_size
        put(journal, epoch + 1)
        journal.close()
    kinds = [record[:2] for record in read(tmp_path / "journal-00000001")[1]]
    assert kinds == [[1, 1], [1, 2], [4, 2], [1, 3], [4, 3], [1, 4], [4, 4], [1, 5]]


def test_stamps_of_earlier_epochs_stay_comparable(tmp_path: Path) -> None:
    new(tmp_path, puts=3)
    journal = opened(tmp_path).journal
    put(journal, 4)
    journal.close()
    replay = opened(tmp_path).replay
    assert replay is not None
    store = replay.store
    assert store.starts == {1: 0, 2: 3, 3: 4}
    told = [(1, 2), (1, 3), (1, 9), (2, 3), (2, 4), (2, 9), (3, 4), (3, 9), (0, 5), (4, 5), (99, 1)]
    assert [store.stamp_of(revision) for revision in told] == [2, 3, 3, 3, 4, 4, 4, 9, 0, 0, 0]


def test_the_files_after_a_snapshot_go_on_from_it(tmp_path: Path) -> None:
    three_files(tmp_path)
    assert sorted(content(tmp_path)) == [
        "journal-00000002",
        "journal-00000003",
        "snapshot-00000002",
    ]
    without = tmp_path / "without"
    three_files(without, snapshot=False)
    journal, replay = opened(tmp_path)
    other, expected = opened(without)
    assert replay is not None
    assert expected is not None
    assert differences(described(replay.store), described(expected.store)) == []
    assert values(replay) == {f"k{n}": n for n in range(1, 7)}
    assert replay.store.starts == expected.store.starts == {1: 0, 2: 6}
    assert (journal.number, journal.snapshot) == (3, 2)
    assert journal.snapshot_bytes == (tmp_path / "snapshot-00000002").stat().st_size
    assert journal.nbytes == sum(
        path.stat().st_size for path in tmp_path.iterdir() if path.name.startswith("journal")
    )
    assert other.nbytes == sum(map(len, content(without).values()))
    put(journal, 7)
    assert journal.turn() == 4
    journal.close()
    other.close()


def test_what_a_snapshot_has_taken_the_place_of_and_what_was_not_finished_is_removed(
    tmp_path: Path,
) -> None:
    three_files(tmp_path, snapshot=False)
    write_snapshot(tmp_path, 2, History(1000, 600.0))
    write_snapshot(tmp_path, 3, History(1000, 600.0))
    (tmp_path / "snapshot-00000004.new").write_bytes(b"DPSN")
    (tmp_path / "journal-00000004.new").write_bytes(b"")
    (tmp_path / "notes").write_bytes(b"of an operator")
    journal, replay = opened(tmp_path)
    journal.close()
    assert values(replay) == {f"k{n}": n for n in range(1, 7)}
    assert sorted(content(tmp_path)) == ["journal-00000003", "notes", "snapshot-00000003"]


def test_a_death_at_the_first_start_leaves_a_new_plane(tmp_path: Path) -> None:
    (tmp_path / "journal-00000001.new").write_bytes(b"DPJ")
    journal, replay = opened(tmp_path)
    journal.close()
    assert replay is None
    assert list(content(tmp_path)) == ["journal-00000001"]
    journal, replay = opened(tmp_path)
    assert replay is not None
    assert replay.store.revision() == (2, 0)
    journal.close()


def test_a_load_that_was_under_way_is_known_to_be(tmp_path: Path) -> None:
    journal = opened(tmp_path).journal
    journal.append(j.RESTORE, 0, 1.0, ["begin", "load", "c", 1, 5])
    journal.close()
    journal, replay = opened(tmp_path)
    assert replay is not None
    assert replay.loads.restore_id == "load"
    assert journal.loading
    journal.close()


# -- the end of the last file ------------------------------------------------------------------


def test_a_torn_end_of_the_last_file_is_cut_off_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    three_files(tmp_path)
    last = tmp_path / "journal-00000003"
    whole = last.read_bytes()
    records = read(last)[1]
    for cut in range(len(head_bytes_of(last)), len(whole)):
        last.write_bytes(whole[:cut])
        caplog.clear()
        with caplog.at_level(logging.INFO, "dataplane.journal"):
            journal, replay = opened(tmp_path)
        journal.close()
        there = read(last)[1]
        assert there[:-1] == records[: len(there) - 1]
        assert there[-1][0] == j.START
        assert values(replay) == {f"k{n}": n for n in range(1, 4 + len(there))}
        said = [record.getMessage() for record in caplog.records]
        if len(said) == 1:
            assert str(last) in said[0]
            assert "bytes" in said[0]
        else:
            assert said == []
            assert cut in _ends_of(whole, last)


def head_bytes_of(path: Path) -> bytes:
    with reading(path) as records:
        return head_bytes(records.head)


def _ends_of(whole: bytes, path: Path) -> list[int]:
    """Where the header and each record end."""
    records = Records(BytesIO(whole), str(path))
    return [records.end, *(records.end for _ in records)]


# -- what is refused ---------------------------------------------------------------------------


def refused(folder: Path, match: str, plane_id: str = "plane") -> JournalDamaged:
    """The error of a start, which has left every file as it was; `verify` finds it, too."""
    before = content(folder)
    with pytest.raises(JournalDamaged, match=match) as error:
        opened(folder, plane_id)
    assert content(folder) == before
    assert error.value.path.startswith(str(folder))
    return error.value


def found(folder: Path) -> dict[str, Any]:
    """What `verify` has to say of files that are not whole."""
    before = content(folder)
    findings = verify_journal(folder)
    assert content(folder) == before
    return {finding.path.name: finding for finding in findings if not finding.is_whole}


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_file_that_is_missing_is_named(tmp_path: Path, snapshot: bool) -> None:
    for gone in ["journal-00000002"] + ["journal-00000001"] * (not snapshot):
        folder = tmp_path / gone
        three_files(folder, snapshot=snapshot)
        (folder / gone).unlink()
        assert refused(folder, "it is missing").path == str(folder / gone)
        assert next(iter(found(folder))) == gone


def test_a_snapshot_alone_is_no_journal(tmp_path: Path) -> None:
    three_files(tmp_path)
    for name in ("journal-00000002", "journal-00000003"):
        (tmp_path / name).unlink()
    assert refused(tmp_path, "it is missing").path.endswith("journal-00000002")
    assert list(found(tmp_path)) == ["journal-00000002"]


def test_another_planes_journal_is_refused(tmp_path: Path) -> None:
    new(tmp_path)
    refused(tmp_path, "it is of plane 'plane', and not of 'other'", plane_id="other")
    three_files(tmp_path / "a")
    refused(tmp_path / "a", "snapshot .* it is of plane 'plane', and not", plane_id="other")
    (tmp_path / "b").mkdir()
    journal = FileJournal(tmp_path / "b" / journal_name(3), "other", 1, number=3)
    put(journal, 1)
    journal.close()
    shutil.copy(tmp_path / "b" / journal_name(3), tmp_path / "a" / journal_name(3))
    error = refused(tmp_path / "a", "it is of plane 'other'")
    assert error.path.endswith("journal-00000003")
    assert list(found(tmp_path / "a")) == ["journal-00000003"]


def test_files_that_were_renamed_are_refused(tmp_path: Path) -> None:
    three_files(tmp_path)
    one, other = tmp_path / "journal-00000002", tmp_path / "journal-00000003"
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)
    refused(tmp_path, "it is file 3 of its journal, not 2")
    assert set(found(tmp_path)) == {"journal-00000002", "journal-00000003"}
    three_files(tmp_path / "a")
    (tmp_path / "a" / "snapshot-00000002").rename(tmp_path / "a" / "snapshot-00000003")
    refused(tmp_path / "a", "it is snapshot 2, not 3")


def test_a_closed_file_that_was_cut_short_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    three_files(tmp_path)
    path = tmp_path / "journal-00000002"
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        error = refused(tmp_path, "damaged")
        assert error.path == str(path)
        assert error.offset <= cut
        assert list(found(tmp_path)) == ["journal-00000002"]
    path.write_bytes(whole)
    assert found(tmp_path) == {}


def test_a_damaged_newest_snapshot_is_refused_though_older_files_are_there(tmp_path: Path) -> None:
    three_files(tmp_path, snapshot=False)
    write_snapshot(tmp_path, 2, History(1000, 600.0))
    write_snapshot(tmp_path, 3, History(1000, 600.0))
    path = tmp_path / "snapshot-00000003"
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(tmp_path, "the snapshot").path == str(path)
    assert found(tmp_path)[path.name].damage.path == str(path)


def test_a_record_that_does_not_follow_is_refused_where_it_stands(tmp_path: Path) -> None:
    new(tmp_path, puts=2)
    journal = opened(tmp_path).journal
    offset = journal.nbytes
    put(journal, 9)
    put(journal, 10)
    journal.close()
    assert refused(tmp_path, "led to revision 3").offset == offset
    finding = found(tmp_path)["journal-00000001"]
    assert (finding.damage.offset, finding.records, finding.n) == (offset, 3, 2)


def test_every_flipped_bit_is_found_and_never_served(tmp_path: Path) -> None:
    """Wherever one is, it is refused by name."""
    folder = tmp_path / "journal"
    three_files(folder)
    good = content(folder)
    picked = random.Random(1)
    for name, data in good.items():
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1 << picked.randrange(8)
            (folder / name).write_bytes(damaged)
            assert list(found(folder)) == [name], (name, at)
            with pytest.raises((JournalDamaged, InvalidRequest), match=name) as error:
                opened(folder)
            if isinstance(error.value, JournalDamaged):
                assert error.value.path == str(folder / name)
                assert error.value.offset <= at
            (folder / name).write_bytes(data)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(st.data())
def test_whatever_is_damaged_what_is_served_was_acknowledged_in_order(
    tmp_path: Path, data: Any
) -> None:
    folder = tmp_path / "journal"
    shutil.rmtree(folder, ignore_errors=True)
    three_files(folder, snapshot=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(content(folder))))
        path = folder / name
        whole = path.read_bytes()
        at = data.draw(st.integers(0, len(whole)))
        how = data.draw(st.sampled_from(["cut", "flip", "insert", "zero", "delete"]))
        if how == "cut":
            path.write_bytes(whole[:at])
        elif how == "insert":
            path.write_bytes(whole[:at] + data.draw(st.binary(min_size=1, max_size=9)) + whole[at:])
        elif how == "zero":
            path.write_bytes(whole[:at] + bytes(min(9, len(whole) - at)) + whole[at + 9 :])
        elif how == "flip" and at < len(whole):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        elif how == "delete" and name != "journal-00000003":
            path.unlink()  # that the last one was there nobody but a value store can know
    is_whole = all(finding.is_whole for finding in verify_journal(folder))
    try:
        journal, replay = opened(folder)
    except (JournalDamaged, InvalidRequest):
        assert not is_whole
        return
    journal.close()
    served = values(replay)
    assert served == {f"k{n}": n for n in range(1, len(served) + 1)}
    assert len(served) >= 4  # only of the last file an end may be missing


def test_a_folder_that_cannot_be_used_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"journal in .*file cannot be used"):
        opened(tmp_path / "file")
    with pytest.raises(InvalidRequest, match="no journal in"):
        verify_journal(tmp_path)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        verify_journal(tmp_path / "nowhere")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o000)
        with pytest.raises(PermissionDenied, match="cannot be used"):
            opened(tmp_path / "closed")


def test_a_full_disk_at_a_start_is_said_and_the_journal_left_as_it_was(tmp_path: Path) -> None:
    with files_limited_to(20), pytest.raises(QuotaExceeded, match="could not be begun"):
        opened(tmp_path)
    assert content(tmp_path) == {}
    new(tmp_path)
    before = content(tmp_path)
    size = len(before["journal-00000001"])
    with files_limited_to(size), pytest.raises(QuotaExceeded, match="was not made"):
        opened(tmp_path)
    assert content(tmp_path) == before


# -- the command -------------------------------------------------------------------------------


def test_the_command_says_of_each_file_whether_it_is_whole(tmp_path: Path) -> None:
    three_files(tmp_path / "journal")
    for path in (tmp_path, tmp_path / "journal"):
        said = CliRunner().invoke(app, ["verify", str(path)])
        assert said.exit_code == 0, said.output
        lines = said.output.splitlines()
        assert [line.split(": ")[0].rsplit("/", 1)[1] for line in lines] == [
            "snapshot-00000002", "journal-00000002", "journal-00000003",
        ]  # fmt: skip
        assert all(line.endswith("whole") for line in lines)
        assert "2 records to revision 6" in lines[-1]
    last = tmp_path / "journal" / "journal-00000003"
    last.write_bytes(last.read_bytes() + b"\0\0\0")
    said = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert said.exit_code == 1
    assert "the last 3 are no whole record" in said.output
    snapshot = tmp_path / "journal" / "snapshot-00000002"
    data = bytearray(snapshot.read_bytes())
    data[-30] ^= 1
    snapshot.write_bytes(data)
    said = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert said.exit_code == 1
    assert "the snapshot" in said.output
    assert "is damaged at byte" in said.output


def test_the_command_knows_a_checkpoint(tmp_path: Path, plane_settings: dict[str, Any]) -> None:
    saved = tmp_path / "saved"
    with thread_plane(plane_settings) as plane, plane.connect() as client:
        client.kv_put("k", "p", tags={"v": 1})
        client.save_checkpoint(saved)
    said = CliRunner().invoke(app, ["verify", str(saved)])
    assert said.exit_code == 0, said.output
    assert "whole, 1 rows" in said.output
    manifest = saved / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    said = CliRunner().invoke(app, ["verify", str(saved)])
    assert said.exit_code == 1
    assert "manifest.json" in said.output
