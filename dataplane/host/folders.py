"""The folders of a plane on one node: where they are, who owns them, and when they go.

    <root>/lock                         held while folders are made, found or given up
    <root>/<plane_id>/                  sockets, journal, plane.json, secret, ray_session, lock
    <shm_root>/dataplane-<uid>-<id>/    segments, ray_session, lock

Owns no segment and no socket. Invariant: a folder is somebody's exactly while a process holds a
flock on its `lock` file, which the kernel ends with the process. A pid says nothing: it may be
another container's, or reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PermissionDenied,
    PlaneLost,
    quote,
)

log = logging.getLogger(__name__)

_PLANE_ID = re.compile(r"[0-9a-f]{16}")
_MAX_NAME_BYTES = 255
_MAX_SOCKET_PATH_BYTES = 107  # sun_path holds 108 with its NUL
_MAX_SOCKET_NAME_BYTES = 16
RAY_SESSION = "ray_session"
"""The file that says which Ray session hosts the plane of a folder."""
KEPT = "kept"
"""The file that says why a runtime folder stays although nobody owns it."""
_MAX_FILE_BYTES = 64 << 10
_LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Folders:
    """The two folders of one plane on this node. They exist once somebody claimed them."""

    name: str
    plane_id: str
    runtime: Path
    segments: Path

    @property
    def root(self) -> Path:
        """The folder that holds the runtime folders of all planes of this user."""
        return self.runtime.parent

    def socket(self, name: str = "plane.sock") -> str:
        """The path of a unix socket in the runtime folder, short enough to be bound."""
        if len(name.encode()) > _MAX_SOCKET_NAME_BYTES:
            raise InternalError(f"socket name {name!r} is over {_MAX_SOCKET_NAME_BYTES} bytes")
        return str(self.runtime / name)


def default_root() -> Path:
    """The runtime root where none was set: one per user, on a local disk."""
    return Path(f"/tmp/dataplane-{os.geteuid()}")


def plane_folders(
    name: str,
    plane_id: str,
    runtime_root: str | os.PathLike[str] | None = None,
    shm_root: str | os.PathLike[str] = "/dev/shm",
) -> Folders:
    """Where this plane's folders are. Makes nothing.

    Raises:
        InvalidRequest: the name or the id is none, or a socket's path would be too long.
    """
    check_name(name)
    if not _PLANE_ID.fullmatch(plane_id):
        raise InvalidRequest(f"a plane id is 16 hex digits, not {quote([plane_id])}")
    root = Path(os.path.abspath(runtime_root)) if runtime_root is not None else default_root()
    runtime = root / plane_id
    length = len(os.fsencode(runtime)) + 1 + _MAX_SOCKET_NAME_BYTES
    if length > _MAX_SOCKET_PATH_BYTES:
        raise InvalidRequest(
            f"runtime root {str(root)!r} is {length - _MAX_SOCKET_PATH_BYTES} bytes too long for "
            "unix sockets in it: set a shorter one"
        )
    segments = Path(os.path.abspath(shm_root)) / f"{_segments_prefix()}{plane_id}"
    return Folders(name, plane_id, runtime, segments)


def check_name(name: str) -> None:
    """Raises InvalidRequest unless `name` can name a plane. It never becomes part of a path."""
    try:
        raw = name.encode()
    except (AttributeError, UnicodeEncodeError):  # not a str, or with lone surrogates
        raw = b""
    if not raw or len(raw) > _MAX_NAME_BYTES or not name.isprintable():
        raise InvalidRequest(
            f"a plane's name is 1 to {_MAX_NAME_BYTES} bytes of printable text, not {quote([name])}"
        )


class Ownership:
    """A share in a plane's folders: while one is held, nobody sweeps them.

    Descriptors close on exec unless asked otherwise. A forked child has copies that keep the
    lock alive after this process died, so it must call `close_in_child`.
    """

    def __init__(self, folders: Folders, fds: tuple[int, ...]) -> None:
        self.folders = folders
        self.fds = fds
        self._claimed_by = os.getpid()

    def release(self) -> None:
        """Ends this share. In a forked child it only closes: the lock is the parent's."""
        if os.getpid() == self._claimed_by:
            for fd in self.fds:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a copy in a forked child would keep it
        self.close_in_child()

    def close_in_child(self) -> None:
        """Closes the descriptors without unlocking: for an at-fork hook."""
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)


def claim(folders: Folders, *, inheritable: bool = False) -> Ownership:
    """A share in the folders, which are made if they are not there. Store and supervisor have one.

    Raises:
        PermissionDenied: a folder belongs to somebody else, or others may enter it.
        DeadlineExceeded: another process holds the lock on the root and does not let go.
    """
    with root_lock(folders.root):
        fds: list[int] = []
        try:
            for folder in (folders.runtime, folders.segments):
                fds.append(_claim_folder(folder))
                os.set_inheritable(fds[-1], inheritable)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
    return Ownership(folders, tuple(fds))


def mark_ray_session(folders: Folders, session: str) -> None:
    """Notes that Ray restarts this plane's processes: its folders wait until that session ends."""
    for folder in (folders.runtime, folders.segments):
        write_file(folder / RAY_SESSION, session.encode())


def sweep(
    root: str | os.PathLike[str] | None = None,
    shm_root: str | os.PathLike[str] = "/dev/shm",
    *,
    is_session_alive: Callable[[str], bool] | None = None,
) -> list[Path]:
    """The folders removed: those of planes that nobody owns any more.

    A plane that Ray hosts goes only when `is_session_alive` says that its session ended; without
    the callable it stays. Called while the root is locked, so it must not wait.
    """
    top = Path(root) if root is not None else default_root()
    _private_folder(top, parents=True)
    removed: list[Path] = []
    for plane_id in plane_ids(top, Path(shm_root)):
        folders = Folders("", plane_id, top / plane_id, _segments_of(shm_root, plane_id))
        try:
            removed += _remove(folders, is_session_alive)
        except DeadlineExceeded:  # a TimeoutError is an OSError; this one concerns the root
            raise
        except (InternalError, OSError) as error:
            log.warning("cannot sweep plane %s: %s", plane_id, error)
    return removed


def ray_session(folder: Path) -> str | None:
    """The Ray session that hosts the plane of a folder; None where Ray does not."""
    try:
        return read_file(folder / RAY_SESSION).decode(errors="replace")
    except PlaneLost:
        return None


def keep(folders: Folders, why: str) -> None:
    """Have the runtime folder stay when nobody owns it: somebody is to look at what is in it."""
    write_file(folders.runtime / KEPT, why.encode())


def why_kept(runtime: Path) -> str | None:
    """Why a runtime folder stays; None if it does not."""
    try:
        return read_file(runtime / KEPT).decode(errors="replace")
    except PlaneLost:
        return None


def remove_unowned(folders: Folders) -> bool:
    """Whether the folders were removed: False while somebody owns them.

    For the end of a plane. Store and supervisor both release and then call this; the last one
    removes, whichever it is.
    """
    return bool(_remove(folders, lambda _session: False))


# -- locks


@contextlib.contextmanager
def root_lock(root: Path) -> Generator[None]:
    """Holds the lock on all folders under `root`. Short: nobody does slow work under it."""
    _private_folder(root, parents=True)
    try:
        fd = _open_lock(root)
    except OSError as error:
        raise InvalidRequest(f"cannot make a file in {root}: {error}; set another root") from error
    try:
        _wait_for_lock(fd, fcntl.LOCK_EX, root)
        yield
    finally:
        _unlock(fd)


def is_owned(folder: Path) -> bool:
    """Whether somebody owns the folder now. Asked under the root lock: for a moment the question
    itself looks like an owner."""
    probe = _take_unowned(folder)
    if probe is None:
        return True
    _unlock(probe)
    return False


def _unlock(fd: int) -> None:
    # Closing is not enough: a child forked meanwhile has a copy that would keep the lock.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _open_lock(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(folder / "lock", flags, 0o600)


def _wait_for_lock(fd: int, how: int, folder: Path) -> None:
    start = time.monotonic()
    while True:
        try:
            return fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - start
        if waited > _LOCK_WAIT_S:
            raise DeadlineExceeded(
                f"another process has held the lock of {folder} for {waited:.0f} s: "
                f"see who with `fuser {folder}/lock`",
                waited_s=waited,
                explanation="it is stopped, or it is removing a large plane",
            )
        time.sleep(_LOCK_POLL_S)


def _is_current(fd: int, folder: Path) -> bool:
    """Whether this is still the folder's lock file, and not one that a sweep removed."""
    there = _status(folder / "lock")
    return there is not None and os.path.samestat(os.fstat(fd), there)


def _claim_folder(folder: Path) -> int:
    # The root lock keeps sweeps of the same root away. The loop is for the rest: sweeps of
    # another root that shares this /dev/shm, and removals that began before.
    while True:
        _private_folder(folder)
        try:
            fd = _open_lock(folder)
        except FileNotFoundError:
            continue
        try:
            _wait_for_lock(fd, fcntl.LOCK_SH, folder)
            if _is_current(fd, folder):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _take_unowned(folder: Path) -> int | None:
    """The exclusive lock of a folder that nobody owns, or None. A missing lock file is made."""
    fd = _open_lock(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if not _is_current(fd, folder):
        _unlock(fd)
        return None
    return fd


# -- folders and files


def _segments_prefix() -> str:
    return f"dataplane-{os.geteuid()}-"


def _segments_of(shm_root: str | os.PathLike[str], plane_id: str) -> Path:
    return Path(shm_root) / f"{_segments_prefix()}{plane_id}"


def plane_ids(root: Path, shm_root: Path | None) -> list[str]:
    """The planes with a folder under either root."""
    names = os.listdir(root)
    if shm_root is not None:
        prefix = _segments_prefix()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names += [n.removeprefix(prefix) for n in os.listdir(shm_root) if n.startswith(prefix)]
    return sorted({name for name in names if _PLANE_ID.fullmatch(name)})


def _is_ours(folder: Path) -> bool:
    """Whether this is a real folder of this user: a link could lead a removal anywhere."""
    status = _status(folder)
    return status is not None and _is_own_folder(status)


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_own_folder(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _private_folder(folder: Path, *, parents: bool = False) -> None:
    """Makes the folder if it is not there, and checks that it is this user's alone."""
    status = None
    while status is None:  # a sweep may remove it between these two
        try:
            if parents:
                folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            status = _status(folder)
        except OSError as error:
            raise InvalidRequest(
                f"cannot make folder {folder}: {error}; set another root"
            ) from error
    if not _is_own_folder(status):
        raise PermissionDenied(
            f"{folder} is not a folder of uid {os.geteuid()} (but of uid {status.st_uid}, or a "
            "link or file): remove it, or set another root"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionDenied(
            f"others may enter {folder} (mode {stat.S_IMODE(status.st_mode):o}): "
            f"`chmod 700 {folder}`, or set another root"
        )


def _remove(folders: Folders, is_session_alive: Callable[[str], bool] | None) -> list[Path]:
    """Removes what is there of a plane that nobody owns; the paths, or none."""
    taken: list[tuple[Path, int]] = []
    try:
        with root_lock(folders.root):
            kept = why_kept(folders.runtime) is not None
            for folder in (folders.runtime, folders.segments):
                if not _is_ours(folder) or (kept and folder == folders.runtime):
                    continue
                session = ray_session(folder)
                if session is not None and (is_session_alive is None or is_session_alive(session)):
                    return []
                try:
                    fd = _take_unowned(folder)
                except FileNotFoundError:  # a sweep of another root was faster
                    continue
                if fd is None:
                    return []
                taken.append((folder, fd))
            # Not findable from here on, although the exclusive locks look like an owner.
            (folders.runtime / "plane.json").unlink(missing_ok=True)
        # Freeing many segments takes seconds: the root is free again, the plane still locked.
        for folder, _ in taken:
            _delete(folder)
        return [folder for folder, _ in taken]
    finally:
        for _, fd in taken:
            _unlock(fd)


def _delete(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != "lock":
                os.unlink(entry.path)
    # The lock file goes last: until then a claim waits for us instead of taking half a folder.
    os.unlink(folder / "lock")
    # A claim that comes now makes a new lock file; the folder is its own then.
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def write_file(path: Path, content: bytes) -> None:
    """Puts the file there in one step, for this user only."""
    aside = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(aside, flags, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
    os.replace(aside, path)


def read_file(path: Path) -> bytes:
    """A small file of this user's. PlaneLost if it is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PlaneLost(f"{path} is not there: the plane ended, or never started") from error
    with open(fd, "rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise InternalError(f"{path} is over {_MAX_FILE_BYTES} bytes: not one of ours")
    return content
