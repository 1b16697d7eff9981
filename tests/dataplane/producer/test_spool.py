"""The folder of a spool: whose it is, what is in it after any end, and when it is full."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.errors import AlreadyWritten, InvalidRequest, QuotaExceeded
from dataplane.producer import spool as spool_module
from dataplane.producer.puts import Put, put_of_rows
from dataplane.producer.records import Kind, pack
from dataplane.producer.spool import Spool

ROOM = 1 << 20


def put(key: str, size: int = 10) -> Put:
    return put_of_rows(
        [key], "p", {"x": [b"x" * size]}, None, attempt=None, must_exist=False, if_absent=True,
        return_tags=False,
    )  # fmt: skip


def keys(spool: Spool) -> list[str]:
    """Keys of all that waits, in order; takes them out."""
    found: list[str] = []
    while (head := spool.head()) is not None:
        found += list(spool.read(head).message.keys)
        spool.done(head)
    return found


def fill(spool: Spool, *names: str, size: int = 10, sent: bool = False) -> None:
    for name in names:
        number, _ = spool.numbers.begin()
        spool.append(put(name, size), number, sent=sent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_what_waits_is_there_for_the_next_process_in_order(folder: Path) -> None:
    first = Spool(folder, max_bytes=ROOM)
    fill(first, "a", "b", "c")
    entry = first.head()
    assert entry is not None
    first.mark_sent(entry)
    first.close()
    again = Spool(folder, max_bytes=ROOM)
    assert again.client_id == first.client_id
    waiting = list(again._waiting)
    assert [(one.number, one.sent) for one in waiting] == [(1, True), (2, False), (3, False)]
    # No number is used twice, and what waits is not settled.
    number, settled = again.numbers.begin()
    assert number > 3
    assert settled == 0
    assert keys(again) == ["a", "b", "c"]
    assert again.numbers.begin()[1] == number - 1
    assert list(folder.glob("*.spool")) == []
    again.close()


def test_a_number_that_was_given_out_is_never_given_out_again(folder: Path) -> None:
    given: list[int] = []
    for _ in range(3):
        spool = Spool(folder, max_bytes=ROOM)
        given += [spool.numbers.begin()[0] for _ in range(3)]
        spool.close()
    assert len(set(given)) == 9
    assert given == sorted(given)


def test_a_folder_that_is_in_use_says_by_whom(folder: Path) -> None:
    spool = Spool(folder, max_bytes=ROOM)
    with pytest.raises(InvalidRequest, match=rf"in use by process {os.getpid()} on "):
        Spool(folder, max_bytes=ROOM)
    spool.close()
    Spool(folder, max_bytes=ROOM).close()


def test_a_folder_of_something_else_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match=r"no spool.*thesis"):
        Spool(folder, max_bytes=ROOM)
    assert (folder / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("text", ["", "{}", '{"client_id": 1}', '{"client_id": "x", "a": 1}', "[]"])
def test_an_identity_that_is_damaged_is_refused(folder: Path, text: str) -> None:
    Spool(folder, max_bytes=ROOM).close()
    (folder / "identity.json").write_text(text)
    with pytest.raises(InvalidRequest, match="damaged"):
        Spool(folder, max_bytes=ROOM)
    (folder / "identity.json").unlink()
    Spool(folder, max_bytes=ROOM).close()  # the failed try let go of the lock


def test_a_full_spool_says_what_to_do_and_keeps_what_it_has(folder: Path) -> None:
    spool = Spool(folder, max_bytes=2000)
    fill(spool, "a", "b", size=700)
    before = spool.used_bytes
    with pytest.raises(QuotaExceeded, match="give the spool more room") as caught:
        fill(spool, "c", size=700)
    assert (caught.value.used_bytes, caught.value.limit_bytes) == (before, 2000)
    assert keys(spool) == ["a", "b"]
    fill(spool, "c", size=700)
    assert keys(spool) == ["c"]
    assert spool.used_bytes == 0
    spool.close()


def test_a_full_disk_leaves_no_half_of_a_put(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(folder, max_bytes=ROOM)
    fill(spool, "a")
    write = os.write

    def full(file: int, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if len(view) > 500:
            write(file, view[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, view)

    monkeypatch.setattr(spool_module.os, "write", full)
    with pytest.raises(QuotaExceeded, match="disk is full"):
        fill(spool, "b", size=5000)
    monkeypatch.undo()
    fill(spool, "c")
    spool.close()
    again = Spool(folder, max_bytes=ROOM)
    assert again.damaged == 0
    assert keys(again) == ["a", "c"]
    again.close()


def test_files_go_when_what_is_in_them_has_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", 1000)
    spool = Spool(folder, max_bytes=ROOM)
    fill(spool, *"abcdef", size=900)
    assert len(list(folder.glob("*.spool"))) > 2
    for left in range(5, 0, -1):
        head = spool.head()
        assert head is not None
        spool.done(head)
        spool.close()
        spool = Spool(folder, max_bytes=ROOM)
        assert len(spool) == left
    assert keys(spool) == ["f"]
    assert list(folder.glob("*.spool")) == []
    spool.close()


def test_a_process_that_died_before_a_file_went_leaves_no_room_taken(folder: Path) -> None:
    spool = Spool(folder, max_bytes=ROOM)
    fill(spool, "a")
    (path,) = folder.glob("*.spool")
    data = path.read_bytes()
    keys(spool)
    spool.close()
    path.write_bytes(data + b"".join(pack(Kind.DONE, 1)))
    again = Spool(folder, max_bytes=ROOM)
    assert (len(again), again.used_bytes) == (0, 0)
    assert not path.exists()
    fill(again, "b")
    assert keys(again) == ["b"]
    again.close()


def test_what_is_refused_is_kept_with_the_reason(folder: Path) -> None:
    spool = Spool(folder, max_bytes=ROOM)
    fill(spool, "a", "b")
    head = spool.head()
    assert head is not None
    path = spool.reject(head, AlreadyWritten("it is there", partition_id="p", keys=["a"]))
    told = json.loads(path.with_suffix(".json").read_text())
    assert (told["type"], told["keys"]) == ("AlreadyWritten", ["a"])
    spool.close()
    again = Spool(folder, max_bytes=ROOM)
    assert again.rejected == 1
    assert again.used_bytes > path.stat().st_size
    assert keys(again) == ["b"]
    again.close()


def test_a_put_that_goes_on_under_a_new_number_keeps_its_place(folder: Path) -> None:
    spool = Spool(folder, max_bytes=ROOM)
    fill(spool, "a", "b", sent=True)
    head = spool.head()
    assert head is not None
    spool.renew(head, spool.numbers.begin()[0])
    spool.close()
    again = Spool(folder, max_bytes=ROOM)
    assert [(one.number, one.sent) for one in again._waiting] == [(3, False), (2, True)]
    assert keys(again) == ["a", "b"]
    again.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), flip=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_damage_loses_nothing_else_and_is_told(
    tmp_path_factory: pytest.TempPathFactory, cut: float, flip: float, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, max_bytes=ROOM)
    fill(spool, *"abc")
    ends = [entry.at + entry.nbytes for entry in spool._waiting]
    spool.close()
    (path,) = folder.glob("*.spool")
    data = bytearray(path.read_bytes())
    keep = int(cut * len(data))
    at = int(flip * len(data))
    data[at] ^= 1 << bit
    path.write_bytes(data[:keep])
    hit = sum(end <= at for end in ends)
    whole = [name for i, name in enumerate("abc") if ends[i] <= keep and i != hit]
    again = Spool(folder, max_bytes=ROOM)
    if again.damaged:
        assert all(entry.sent for entry in again._waiting)
        assert len(list((folder / "damaged").iterdir())) == again.damaged
    elif at < keep and ends[hit] <= keep:
        pytest.fail("damage that nobody was told of")
    fill(again, "d")
    again.close()
    once_more = Spool(folder, max_bytes=ROOM)
    assert keys(once_more) == [*whole, "d"]
    once_more.close()


def test_a_put_that_cannot_be_read_back_is_said_to_be_damaged(folder: Path) -> None:
    spool = Spool(folder, max_bytes=ROOM)
    fill(spool, "a")
    (path,) = folder.glob("*.spool")
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    head = spool.head()
    assert head is not None
    with pytest.raises(ValueError, match="damaged"):
        spool.read(head)
    spool.close()
