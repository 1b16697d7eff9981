"""Segment files: backed before use, verified before mapping, mapped as long as anyone looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataplane.errors import InternalError, InvalidRequest, QuotaExceeded, Unreachable
from dataplane.values.budget import MIN_SEGMENT_BYTES, Budget, shared_memory_budget
from dataplane.values.extents import PAGE
from dataplane.values.segments import Header, Segment, create, open_segment, segment_path

MIB = 1 << 20
PLANE = "0123456789abcdef"
NONCE = bytes(range(16))
NO_CGROUP = {"cgroup_root": "/nonexistent", "membership": "/nonexistent"}


def make(folder: Path, segment_id: int = 0, size: int = MIB) -> Segment:
    return create(folder, segment_id, size, plane_id=PLANE, store_id="s0", nonce=NONCE)


def opened(path: Path, *, writable: bool = False, **changed: object):
    arguments: dict[str, object] = {"plane_id": PLANE, "nonce": NONCE, "segment_id": 0}
    return open_segment(path, writable=writable, **(arguments | changed))  # type: ignore[arg-type]


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.fixture
def small_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real tmpfs of 16 MiB, of one test: what is still mapped of another's would be missing."""
    folder = tmp_path_factory.mktemp("small")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


# -- the store's side


def test_a_segment_is_a_private_file_with_a_header(tmp_path: Path) -> None:
    segment = make(tmp_path, 7, MIB)
    path = segment_path(tmp_path, 7)
    assert segment.path == path
    assert path.stat().st_mode & 0o777 == 0o600
    assert (len(segment.view), segment.size, path.stat().st_size) == (MIB, MIB, MIB)
    assert Header.unpack(path.read_bytes()) == Header(PLANE, "s0", 7, MIB, NONCE)
    assert bytes(segment.view[:8]) == b"DPSEG1\0\0"
    assert len(Header(PLANE, "s" * 64, 7, MIB, NONCE).pack()) <= PAGE


def test_every_byte_is_backed_before_the_segment_is_handed_out(tmp_path: Path) -> None:
    make(tmp_path, size=8 * MIB)
    assert segment_path(tmp_path, 0).stat().st_blocks * 512 >= 8 * MIB


def test_sizes_are_rounded_up_to_pages(tmp_path: Path) -> None:
    assert make(tmp_path, size=MIB + 1).size == MIB + PAGE


def test_a_segment_never_replaces_a_file(tmp_path: Path) -> None:
    make(tmp_path).view[PAGE] = 7
    with pytest.raises(InternalError, match="segment-0"):
        make(tmp_path)
    assert segment_path(tmp_path, 0).read_bytes()[PAGE] == 7


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="nowhere"):
        make(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "wrong",
    [{"plane_id": "p" * 33}, {"store_id": "s" * 65}, {"store_id": "a\0b"}, {"nonce": b"short"}],
)
def test_a_header_that_does_not_fit_leaves_no_file(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    arguments: dict[str, object] = {"plane_id": PLANE, "store_id": "s", "nonce": NONCE} | wrong
    with pytest.raises(InternalError):
        create(tmp_path, 0, MIB, **arguments)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_unlinking_keeps_the_pages_of_whoever_maps_them(tmp_path: Path) -> None:
    segment = make(tmp_path)
    segment.view[PAGE : PAGE + 3] = b"abc"
    reader = opened(segment.path)
    segment.unlink()
    segment.unlink()
    segment.close()
    assert not segment.path.exists()
    assert bytes(reader.array[PAGE : PAGE + 3]) == b"abc"


def test_closing_waits_for_slices_that_are_still_being_sent(tmp_path: Path) -> None:
    segment = make(tmp_path)
    segment.view[PAGE : PAGE + 3] = b"abc"
    being_sent = segment.view[PAGE : PAGE + 3]
    segment.close()
    assert bytes(being_sent) == b"abc"
    assert is_mapped(segment.path)
    del being_sent
    assert not is_mapped(segment.path)
    with pytest.raises(InternalError, match="closed"):
        _ = segment.view


def test_making_a_segment_lets_other_threads_run(tmp_path: Path) -> None:
    """The store makes segments in an executor; its loop must go on meanwhile."""
    stop, turns = threading.Event(), 0

    def work() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1

    worker = threading.Thread(target=work)
    worker.start()
    before = turns
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    segment = make(folder, segment_id=os.getpid(), size=32 * MIB)
    during = turns - before
    stop.set()
    worker.join()
    segment.unlink()
    assert during > 10


# -- a mount that is too small


def test_a_full_mount_is_a_typed_error_and_leaves_no_file(small_mount: Path) -> None:
    first = make(small_mount, 0, 12 * MIB)
    with pytest.raises(QuotaExceeded, match=str(small_mount)) as caught:
        make(small_mount, 1, 12 * MIB)
    assert caught.value.limit_bytes == 16 * MIB
    assert caught.value.used_bytes >= 12 * MIB
    assert [path.name for path in small_mount.iterdir()] == ["segment-0"]
    # What was handed out is usable to the last byte.
    first.view[PAGE:] = b"\xff" * (12 * MIB - PAGE)
    first.close()
    first.unlink()
    assert make(small_mount, 2, 12 * MIB).size == 12 * MIB


def test_filling_a_mount_never_ends_in_a_bus_error(small_mount: Path, tmp_path: Path) -> None:
    """In a child of its own: a SIGBUS here would take the test run with it."""
    script = """
import sys
from dataplane.errors import QuotaExceeded
from dataplane.values.segments import create
segments = []
try:
    for i in range(100):
        segments.append(create(sys.argv[1], i, 3 << 20, plane_id="p", store_id="s",
                               nonce=bytes(16)))
except QuotaExceeded:
    for segment in segments:
        segment.view[4096:] = bytes(segment.size - 4096)
    print(len(segments))
"""
    child = subprocess.run(
        [sys.executable, "-c", script, str(small_mount)], capture_output=True, text=True
    )
    assert (child.returncode, child.stdout) == (0, "5\n"), child.stderr
    for path in small_mount.iterdir():
        path.unlink()


def test_a_small_mount_gives_a_small_budget(small_mount: Path) -> None:
    fifth = 16 * MIB // 5  # stays free
    assert shared_memory_budget(small_mount, None, **NO_CGROUP) == Budget(
        (16 * MIB - fifth) // PAGE * PAGE, MIN_SEGMENT_BYTES
    )
    with pytest.raises(InvalidRequest) as caught:
        shared_memory_budget(small_mount, None, 13 * MIB, **NO_CGROUP)
    assert str(small_mount) in str(caught.value)
    assert "16.8 MB free (13.6 MB of it kept for others)" in str(caught.value)
    assert "--shm-size" in str(caught.value)


# -- the client's side


def test_a_reader_sees_what_the_store_and_a_writer_write(tmp_path: Path) -> None:
    segment = make(tmp_path)
    reader, writer = opened(segment.path), opened(segment.path, writable=True)
    segment.view[PAGE] = 1
    writer.array[PAGE + 1] = 2
    assert reader.array.dtype == np.uint8
    assert reader.array.shape == (MIB,)
    assert reader.array[PAGE : PAGE + 2].tolist() == [1, 2]
    assert segment.view[PAGE + 1] == 2
    assert (reader.header.store_id, reader.writable, writer.writable) == ("s0", False, True)


def test_a_mapping_lives_until_the_last_array_over_it_is_gone(tmp_path: Path) -> None:
    segment = make(tmp_path)
    segment.view[PAGE : PAGE + 4] = b"\x01\x02\x03\x04"
    segment.close()
    for writable in (False, True):
        mapping = opened(segment.path, writable=writable)
        piece = mapping.array[PAGE : PAGE + 4].view("<u2")[1:]
        mapping.close()
        with pytest.raises(InternalError, match="closed"):
            _ = mapping.array
        del mapping
        assert piece.tolist() == [0x0403]
        assert is_mapped(segment.path)
        del piece
        assert not is_mapped(segment.path)


def test_a_read_only_array_claims_to_be_writable_and_a_write_kills(tmp_path: Path) -> None:
    segment = make(tmp_path)
    segment.view[PAGE] = 1
    assert opened(segment.path).array.flags.writeable
    script = f"""
import sys
from dataplane.values.segments import open_segment
mapping = open_segment(sys.argv[1], plane_id={PLANE!r}, nonce={NONCE!r}, segment_id=0,
                       writable=False)
print(mapping.array[4096], flush=True)
mapping.array[4096] = 9
print("survived")
"""
    child = subprocess.run(
        [sys.executable, "-c", script, str(segment.path)], capture_output=True, text=True
    )
    assert (child.returncode, child.stdout) == (-signal.SIGSEGV, "1\n"), child.stderr
    assert segment.view[PAGE] == 1


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [{"plane_id": "fedcba9876543210"}, {"nonce": bytes(16)}, {"segment_id": 1}],
    ids=["another plane", "another incarnation", "another segment"],
)
def test_a_segment_of_another_store_is_unreachable(
    tmp_path: Path, wrong: dict[str, object], writable: bool
) -> None:
    segment = make(tmp_path)
    with pytest.raises(Unreachable, match="segment"):
        opened(segment.path, writable=writable, **wrong)


def test_what_is_no_segment_is_unreachable(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(os.urandom(2 * PAGE))
    short = tmp_path / "short"
    short.write_bytes(b"DPSEG1\0\0")
    lying = tmp_path / "lying"
    lying.write_bytes(Header(PLANE, "s", 0, 1 << 62, NONCE).pack().ljust(PAGE, b"\0"))
    empty = tmp_path / "empty"
    empty.write_bytes(Header(PLANE, "s", 0, 0, NONCE).pack().ljust(PAGE, b"\0"))
    later = tmp_path / "later"
    later.write_bytes(make(tmp_path).path.read_bytes().replace(b"\x01\0\0\0", b"\x02\0\0\0", 1))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to(segment_path(tmp_path, 0))
    absent = tmp_path / "absent"
    nul = Path("/tmp/a\0b")
    for path in (garbage, short, lying, empty, later, fifo, link, absent, nul, tmp_path):
        for writable in (False, True):
            with pytest.raises(Unreachable):
                opened(path, writable=writable)


def test_mapping_leaves_no_descriptor_once_it_is_gone(tmp_path: Path) -> None:
    segment = make(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        opened(segment.path).close()
        with pytest.raises(Unreachable):
            opened(segment.path, nonce=bytes(16))
    assert len(os.listdir("/proc/self/fd")) == before
