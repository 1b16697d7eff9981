"""Folders of planes: owned by a lock that ends with its process, swept only when nobody owns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PermissionDenied,
    PlaneLost,
)
from dataplane.host import folders as folders_module
from dataplane.host.folders import (
    Folders,
    claim,
    mark_ray_session,
    plane_folders,
    remove_unowned,
    sweep,
)
from dataplane.host.records import (
    Record,
    find,
    read_record,
    read_secret,
    write_record,
    write_secret,
)

ONE, TWO = "0123456789abcdef", "fedcba9876543210"

OWNER = """
import sys
from dataplane.host.folders import claim, plane_folders
ownership = claim(plane_folders("default", *sys.argv[1:4]))
print("claimed", flush=True)
sys.stdin.read()
"""

FORKING_OWNER = """
import os, sys
from dataplane.host.folders import claim, plane_folders
ownership = claim(plane_folders("default", *sys.argv[1:4]))
child = os.fork()
if child == 0:
    if sys.argv[4] == "closes":
        ownership.close_in_child()
    elif sys.argv[4] == "releases":
        ownership.release()
    os.write(1, b"child %d\\n" % os.getpid())
    sys.stdin.read()
    os._exit(0)
os.write(1, b"parent %d\\n" % os.getpid())
os.waitpid(child, 0)
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's, whose names are too long for the path of a unix socket."""
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        yield Path(folder)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    shm = tmp_path / "shm"
    shm.mkdir()
    return tmp_path / "run", shm


def folders_of(roots: tuple[Path, Path], plane_id: str = ONE, name: str = "default") -> Folders:
    return plane_folders(name, plane_id, *roots)


def fill(folders: Folders) -> None:
    """What a plane leaves behind."""
    write_record(folders, Record(folders.name, folders.plane_id, folders.socket()))
    (folders.runtime / "journal").mkdir()
    (folders.runtime / "journal" / "1.log").write_bytes(b"x")
    (folders.segments / "segment-0").write_bytes(bytes(4096))


def exist(folders: Folders) -> tuple[bool, bool]:
    return folders.runtime.exists(), folders.segments.exists()


class Process:
    """A child that says on stdout when it stands, and ends when its stdin does."""

    def __init__(self, script: str, *arguments: object, lines: int = 1) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        self.lines = [self.popen.stdout.readline().split() for _ in range(lines)]

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()
        self.popen.wait()


@pytest.fixture
def start() -> Iterator[type[Process]]:
    started: list[Process] = []

    class Started(Process):
        def __init__(self, script: str, *arguments: object, lines: int = 1) -> None:
            super().__init__(script, *arguments, lines=lines)
            started.append(self)

    yield Started
    for process in started:
        process.kill()
        process.close()


# -- where they are


def test_folders_are_named_after_user_and_plane() -> None:
    folders = plane_folders("default", ONE)
    uid = os.geteuid()
    assert folders.runtime == Path(f"/tmp/dataplane-{uid}/{ONE}")
    assert folders.segments == Path(f"/dev/shm/dataplane-{uid}-{ONE}")
    assert folders.socket("tags.sock") == f"/tmp/dataplane-{uid}/{ONE}/tags.sock"


def test_claimed_folders_are_private(roots: tuple[Path, Path]) -> None:
    folders = folders_of(roots)
    ownership = claim(folders)
    for folder in (roots[0], folders.runtime, folders.segments):
        assert folder.stat().st_mode & 0o777 == 0o700
    for folder in (folders.runtime, folders.segments):
        assert (folder / "lock").stat().st_mode & 0o777 == 0o600
    assert len(ownership.fds) == 2
    ownership.release()


@pytest.mark.parametrize("plane_id", ["", "../../etc", "0123456789ABCDEF", "0" * 15, ONE + "\n"])
def test_a_plane_id_that_is_none_is_refused(plane_id: str) -> None:
    with pytest.raises(InvalidRequest, match="16 hex digits"):
        plane_folders("default", plane_id)


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x1b[31m", "n" * 256, "\ud800", None, 7])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="printable"):
        plane_folders(name, ONE)
    with pytest.raises(InvalidRequest):
        find(name)


@pytest.mark.parametrize("name", ["../../etc", "/etc", "lock", ".", "a b", "日本", '"}{', "*"])
def test_a_hostile_name_is_only_a_name(roots: tuple[Path, Path], name: str) -> None:
    folders = folders_of(roots, name=name)
    assert folders.runtime.parent == roots[0]
    ownership = claim(folders)
    write_record(folders, Record(name, ONE, folders.socket()))
    assert [record.name for record in find(name, roots[0])] == [name]
    assert find("default", roots[0]) == []
    ownership.release()


def test_a_root_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="too long for unix sockets"):
        plane_folders("default", ONE, tmp_path / ("d" * 100))
    with pytest.raises(InternalError):
        plane_folders("default", ONE).socket("s" * 17)


def test_a_root_of_somebody_else_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(theirs, 12345, -1)
    for refused in (
        lambda: claim(plane_folders("default", ONE, theirs, tmp_path)),
        lambda: sweep(theirs, tmp_path),
        lambda: find("default", theirs),
    ):
        with pytest.raises(PermissionDenied, match="uid 12345"):
            refused()


def test_a_root_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o755)
    with pytest.raises(PermissionDenied, match="chmod 700"):
        claim(plane_folders("default", ONE, loose, tmp_path))


def test_a_link_or_a_file_in_place_of_a_folder_is_refused(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folders = folders_of(roots)
    folders.segments.symlink_to(elsewhere)
    with pytest.raises(PermissionDenied):
        claim(folders)
    folders.segments.unlink()
    folders.segments.write_text("")
    with pytest.raises(PermissionDenied):
        claim(folders)
    folders.segments.unlink()
    claim(folders).release()


def test_a_missing_root_for_segments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        claim(plane_folders("default", ONE, tmp_path / "run", tmp_path / "nowhere"))


# -- who owns them


def test_a_live_plane_is_never_swept(roots: tuple[Path, Path], start: type[Process]) -> None:
    start(OWNER, ONE, *roots)
    folders = folders_of(roots)
    fill(folders)
    assert sweep(*roots) == []
    assert not remove_unowned(folders)
    assert (folders.segments / "segment-0").exists()
    assert [record.plane_id for record in find("default", roots[0])] == [ONE]


def test_a_killed_plane_is_swept(roots: tuple[Path, Path], start: type[Process]) -> None:
    process = start(OWNER, ONE, *roots)
    start(OWNER, TWO, *roots)
    folders, living = folders_of(roots), folders_of(roots, TWO)
    fill(folders)
    fill(living)
    process.kill()
    assert find("default", roots[0]) == [Record("default", TWO, living.socket())]
    assert sorted(sweep(*roots)) == sorted([folders.runtime, folders.segments])
    assert (exist(folders), exist(living)) == ((False, False), (True, True))
    assert sweep(*roots) == []


def test_store_and_supervisor_both_hold_a_share(
    roots: tuple[Path, Path], start: type[Process]
) -> None:
    store = start(OWNER, ONE, *roots)
    folders = folders_of(roots)
    supervisor = claim(folders)
    store.kill()
    assert sweep(*roots) == []
    supervisor.release()
    assert len(sweep(*roots)) == 2


def test_either_lock_keeps_both_folders(roots: tuple[Path, Path]) -> None:
    """A temporary file cleaner may take the lock file of a live plane out of /tmp."""
    folders = folders_of(roots)
    ownership = claim(folders)
    (folders.runtime / "lock").unlink()
    assert sweep(*roots) == []
    assert exist(folders) == (True, True)
    ownership.release()
    assert len(sweep(*roots)) == 2


def test_the_last_to_leave_removes(roots: tuple[Path, Path]) -> None:
    folders = folders_of(roots)
    store, supervisor = claim(folders), claim(folders)
    fill(folders)
    store.release()
    assert not remove_unowned(folders)
    supervisor.release()
    supervisor.release()
    assert remove_unowned(folders)
    assert exist(folders) == (False, False)
    assert not remove_unowned(folders)


def test_descriptors_close_on_exec_unless_asked(roots: tuple[Path, Path]) -> None:
    closing, kept = claim(folders_of(roots)), claim(folders_of(roots), inheritable=True)
    assert [os.get_inheritable(fd) for fd in closing.fds + kept.fds] == [False, False, True, True]
    closing.release()
    kept.release()


@pytest.mark.parametrize(
    ("child_does", "is_swept"), [("closes", True), ("releases", True), ("nothing", False)]
)
def test_a_forked_child_keeps_a_dead_plane_only_if_it_kept_the_descriptors(
    roots: tuple[Path, Path], start: type[Process], child_does: str, is_swept: bool
) -> None:
    process = start(FORKING_OWNER, ONE, *roots, child_does, lines=2)
    pids = {who: int(pid) for who, pid in process.lines}
    assert sweep(*roots) == []  # the parent lives: neither way of closing unlocked it
    process.kill()
    try:
        assert bool(sweep(*roots)) == is_swept
    finally:
        os.kill(pids["child"], signal.SIGKILL)


def test_release_ends_the_share_even_if_a_forked_child_has_a_copy(
    roots: tuple[Path, Path],
) -> None:
    ownership = claim(folders_of(roots))
    copies = [os.dup(fd) for fd in ownership.fds]  # what a fork makes
    ownership.release()
    assert len(sweep(*roots)) == 2
    for fd in copies:
        os.close(fd)


def test_claims_and_sweeps_at_once_never_lose_a_claimed_folder(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    """Also from another root that shares the folder of segments, as two containers may."""
    stop = threading.Event()
    problems: list[object] = []

    def sweeper(root: Path) -> None:
        while not stop.is_set():
            try:
                sweep(root, roots[1])
            except BaseException as error:
                problems.append(error)
                return

    sweepers = [
        threading.Thread(target=sweeper, args=(root,))
        for root in (roots[0], tmp_path / "other", tmp_path / "third")
    ]
    for thread in sweepers:
        thread.start()
    try:
        for i in range(150):
            folders = folders_of(roots, f"{i % 3:016x}")
            ownership = claim(folders)
            (folders.segments / "segment-0").write_bytes(b"x")
            if exist(folders) != (True, True):
                problems.append(folders)
            ownership.release()
    finally:
        stop.set()
        for thread in sweepers:
            thread.join()
    assert problems == []
    sweep(*roots)
    assert os.listdir(roots[1]) == []


def test_a_lock_file_that_was_removed_while_it_was_opened_proves_nothing(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that opened the lock file of a folder which was then removed and claimed anew."""
    folders = folders_of(roots)
    claim(folders).release()
    claimed: list[object] = []
    open_lock = folders_module._open_lock

    def open_slowly(folder: Path) -> int:
        fd = open_lock(folder)
        if folder == folders.segments and not claimed:
            claimed.append(None)  # what follows opens lock files too
            (folder / "lock").unlink()
            folder.rmdir()
            claimed[0] = claim(folders_of((roots[0].with_name("other"), roots[1])))
        return fd

    monkeypatch.setattr(folders_module, "_open_lock", open_slowly)
    assert sweep(*roots) == []
    assert folders.segments.exists()
    assert len(claimed) == 1


def test_a_lock_that_is_not_given_back_is_a_deadline_and_not_a_hang(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders_module, "_LOCK_WAIT_S", 0.05)
    with folders_module.root_lock(roots[0]):
        for waits in (
            lambda: claim(folders_of(roots)),
            lambda: find("default", roots[0]),
        ):
            with pytest.raises(DeadlineExceeded, match="fuser") as caught:
                waits()
            assert caught.value.waited_s >= 0.05
    claim(folders_of(roots)).release()
    with folders_module.root_lock(roots[0]), pytest.raises(DeadlineExceeded):
        sweep(*roots)


# -- what a sweep leaves alone


def test_folders_without_a_lock_file_are_swept(roots: tuple[Path, Path]) -> None:
    folders = folders_of(roots)
    roots[0].mkdir(mode=0o700)
    folders.runtime.mkdir(mode=0o700)
    folders.segments.mkdir(mode=0o700)
    assert len(sweep(*roots)) == 2
    assert exist(folders) == (False, False)


def test_half_a_plane_is_swept(roots: tuple[Path, Path]) -> None:
    folders = folders_of(roots)
    folders.segments.mkdir(mode=0o700)
    assert sweep(*roots) == [folders.segments]


def test_what_is_not_ours_is_left_alone(roots: tuple[Path, Path], tmp_path: Path) -> None:
    run, shm = roots
    run.mkdir(mode=0o700)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep")
    (run / ONE).symlink_to(precious)
    uid = os.geteuid()
    (shm / f"dataplane-{uid}-{ONE}").symlink_to(precious)
    (shm / f"dataplane-{uid}-{TWO}").write_text("a file")
    (shm / f"dataplane-{uid}-../{ONE}").parent.mkdir()
    (shm / f"dataplane-{uid + 1}-{ONE}").mkdir()
    (shm / "something").mkdir()
    (run / "something").mkdir()
    (run / "0123456789abcdeX").mkdir()
    before = sorted(os.listdir(run)), sorted(os.listdir(shm))
    assert sweep(*roots) == []
    assert (precious / "data").read_text() == "keep"
    run_after = sorted(name for name in os.listdir(run) if name != "lock")
    assert (run_after, sorted(os.listdir(shm))) == before


def test_links_inside_a_swept_folder_are_not_followed(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep")
    folders = folders_of(roots)
    claim(folders).release()
    (folders.runtime / "link").symlink_to(precious)
    (folders.segments / "link").symlink_to(precious / "data")
    assert len(sweep(*roots)) == 2
    assert (precious / "data").read_text() == "keep"


def test_one_folder_that_cannot_be_swept_does_not_stop_the_others(
    roots: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    stuck, plain = folders_of(roots, ONE), folders_of(roots, TWO)
    claim(plain).release()
    stuck.runtime.mkdir(mode=0o700)
    (stuck.runtime / "lock").mkdir()
    assert sorted(sweep(*roots)) == sorted([plain.runtime, plain.segments])
    assert f"cannot sweep plane {ONE}" in caplog.text


def test_a_plane_of_a_ray_session_waits_until_the_session_is_gone(
    roots: tuple[Path, Path],
) -> None:
    folders = folders_of(roots)
    ownership = claim(folders)
    mark_ray_session(folders, "session_2025-01-01")
    asked: list[str] = []

    def alive(session: str) -> bool:
        asked.append(session)
        return True

    def gone(session: str) -> bool:
        asked.append(session)
        return False

    ownership.release()
    assert sweep(*roots) == []
    assert sweep(*roots, is_session_alive=alive) == []
    assert exist(folders) == (True, True)
    assert len(sweep(*roots, is_session_alive=gone)) == 2
    assert set(asked) == {"session_2025-01-01"}


def test_a_live_plane_stays_whatever_ray_says(roots: tuple[Path, Path]) -> None:
    ownership = claim(folders_of(roots))
    mark_ray_session(ownership.folders, "session")
    assert sweep(*roots, is_session_alive=lambda _session: False) == []
    ownership.release()


def test_the_end_of_a_ray_plane_removes_its_folders(roots: tuple[Path, Path]) -> None:
    ownership = claim(folders_of(roots))
    mark_ray_session(ownership.folders, "session")
    ownership.release()
    assert remove_unowned(ownership.folders)


# -- how they are found


def test_a_record_and_a_secret_come_back_as_written(roots: tuple[Path, Path]) -> None:
    folders = folders_of(roots)
    ownership = claim(folders)
    secret = os.urandom(32)
    record = Record("default", ONE, folders.socket(), ("10.0.0.1", 4711))
    write_record(folders, Record("default", ONE, folders.socket()))
    write_record(folders, record)
    write_secret(folders, secret)
    assert read_record(folders) == record
    assert read_secret(folders) == secret
    assert json.loads((folders.runtime / "plane.json").read_text()) == {
        "name": "default", "plane_id": ONE, "unix": folders.socket(),
        "tcp": ["10.0.0.1", 4711], "format": 1,
    }  # fmt: skip
    for name in ("plane.json", "secret"):
        assert (folders.runtime / name).stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(folders.runtime)) == ["lock", "plane.json", "secret"]
    ownership.release()


def test_a_plane_that_is_not_there_is_lost(roots: tuple[Path, Path]) -> None:
    with pytest.raises(PlaneLost, match="not there"):
        read_record(folders_of(roots))
    with pytest.raises(PlaneLost):
        read_secret(folders_of(roots))


def test_finding_names_all_live_planes_of_a_name_youngest_first(
    roots: tuple[Path, Path],
) -> None:
    assert find("default", roots[0]) == []
    assert not roots[0].exists()
    ids = [f"{i:016x}" for i in (3, 1, 2)]
    ownerships = [claim(folders_of(roots, plane_id)) for plane_id in ids]
    other = claim(folders_of(roots, TWO, "other"))
    write_record(other.folders, Record("other", TWO, other.folders.socket()))
    for age, ownership in enumerate(ownerships):
        folders = ownership.folders
        write_record(folders, Record("default", folders.plane_id, folders.socket()))
        os.utime(folders.runtime / "plane.json", (1000 + age, 1000 + age))
    assert [record.plane_id for record in find("default", roots[0])] == ids[::-1]
    ownerships[1].release()
    assert [record.plane_id for record in find("default", roots[0])] == [ids[2], ids[0]]
    for ownership in (*ownerships, other):
        ownership.release()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 50_000,
        b'{"format": 2}',
        b'{"format": 1}',
        b'{"format":1,"name":7,"plane_id":"0123456789abcdef","unix":"/x","tcp":null}',
        b'{"format":1,"name":"default","plane_id":"fedcba9876543210","unix":"/x","tcp":null}',
        b'{"format":1,"name":"default","plane_id":"0123456789abcdef","unix":"/x","tcp":["h",0]}',
        b'{"format":1,"name":"default","plane_id":"0123456789abcdef","unix":"/x","tcp":["h"]}',
        b" " * 70_000,
    ],
)
def test_a_damaged_record_is_skipped_by_name_and_an_error_by_id(
    roots: tuple[Path, Path], content: bytes
) -> None:
    ownership = claim(folders_of(roots))
    (ownership.folders.runtime / "plane.json").write_bytes(content)
    assert find("default", roots[0]) == []
    with pytest.raises(InternalError, match=r"plane\.json"):
        read_record(ownership.folders)
    ownership.release()


def test_a_record_goes_only_into_its_own_folder(roots: tuple[Path, Path]) -> None:
    ownership = claim(folders_of(roots))
    with pytest.raises(InternalError):
        write_record(ownership.folders, Record("default", TWO, "/x"))
    (ownership.folders.runtime / "secret").write_text("not hex")
    with pytest.raises(InternalError, match="damaged"):
        read_secret(ownership.folders)
    ownership.release()
