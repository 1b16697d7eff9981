"""Snapshots of the tag store's journal, taken by a process of their own.

The journal turns to a new file, which is the moment of the snapshot and costs the store nothing.
Then a child reads what is closed (the last snapshot and the files after it), makes the same store
of it, and writes that down; the store's own loop and memory have no part in it. A snapshot is
written aside, read back and flushed before it gets its name, and only then what it takes the place
of is removed: whoever is killed at any moment leaves what was there before.

The child is told on its standard input how far back the history reaches, and ends with it: when its
parent dies, or gives it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dataplane.errors import DataplaneError, InternalError
from dataplane.tags.history import History
from dataplane.tags.journal import NONE, FileJournal, sync_folder
from dataplane.tags.journal_folder import list_files, read_files
from dataplane.tags.snapshot.format import Parts, written
from dataplane.tags.snapshot.state import head_of, parts_of

log = logging.getLogger("dataplane.journal")

LOOK_S = 1.0
"""Time between two looks at the size of the journal."""
MAX_PAUSE_S = 300.0
"""Between two tries of a snapshot that cannot be taken; the first pause is one look."""
NICENESS = 10
_BUFFER_BYTES = 1 << 20


class Snapshots:
    """Takes snapshots of a journal, one at a time. For one running event loop."""

    def __init__(self, journal: FileJournal, snapshot_bytes: int) -> None:
        self._journal = journal
        self._snapshot_bytes = snapshot_bytes
        self._taking = asyncio.Lock()
        self.failed = 0
        """Snapshots that could not be taken."""

    @property
    def journal(self) -> FileJournal:
        """The journal that they are of."""
        return self._journal

    @property
    def due_bytes(self) -> int:
        """Size of the journal from which on a snapshot pays."""
        return max(self._snapshot_bytes, self._journal.snapshot_bytes)

    @property
    def is_due(self) -> bool:
        """Whether the journal has grown so much that a snapshot pays."""
        return self._journal.nbytes >= self.due_bytes

    async def run(self) -> None:
        """Take a snapshot whenever one is due, until cancelled. What goes wrong is logged, and
        tried again after pauses that grow: the journal alone is enough."""
        pause = LOOK_S
        while True:
            await asyncio.sleep(pause)
            if not self.is_due or self._journal.loading:
                pause = LOOK_S
                continue
            try:
                await self.take()
                pause = LOOK_S
            except (DataplaneError, OSError) as error:
                self.failed += 1
                pause = min(2 * pause, MAX_PAUSE_S)
                log.warning(
                    "no snapshot could be taken, and the journal has %d bytes; next try in %.0f s: "
                    "%s", self._journal.nbytes, pause, error, extra={"bytes": self._journal.nbytes},
                )  # fmt: skip

    async def take(self) -> int:
        """Take a snapshot of this moment; its number, or 0 where there is nothing to be taken.

        Raises:
            InternalError: the load of a checkpoint is under way, or the child could not write it;
                nothing is lost by that.
            QuotaExceeded: the disk is full.
        """
        async with self._taking:
            journal = self._journal
            if journal.loading:
                raise InternalError("there is no snapshot while a checkpoint is loaded")
            if journal.sync != NONE:
                # Nearly all of it beforehand and elsewhere: what is left takes no time.
                await asyncio.to_thread(journal.flush)
            number = journal.turn()
            if number in (1, journal.snapshot):
                return journal.snapshot  # nothing has changed since
            before = journal.closed_bytes
            nbytes = await self._write(number)
            journal.replaced(number, nbytes, before)
            await asyncio.to_thread(_remove_replaced, journal.folder)
            return number

    async def _write(self, number: int) -> int:
        """Have a child write the snapshot of the moment at which a file begins; its size."""
        child = _Child(self._journal.folder, number, self._journal.history)
        ended = asyncio.ensure_future(asyncio.to_thread(child.run))
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            child.kill()
            await asyncio.gather(ended, return_exceptions=True)
            raise


class _Child:
    """The process that writes one snapshot.

    Not asyncio's own: under uvloop that forks, which holds the loop for as long as it takes to copy
    the page tables of millions of rows.
    """

    def __init__(self, folder: Path, number: int, history: tuple[int, float]) -> None:
        self._command = [
            sys.executable, "-m", "dataplane.server.snapshotting", str(folder), str(number),
        ]  # fmt: skip
        self._aside = _aside(folder, number)
        self._history = history
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False

    def run(self) -> int:
        """The size of the snapshot, when it is there. InternalError says why there is none. For a
        thread: it takes as long as it takes."""
        pipe = subprocess.PIPE
        with self._lock:
            if self._given_up:
                raise InternalError("the snapshot was given up")
            process = self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT,
                env=_environment(),
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as stdin, process.stdout as stdout:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(json.dumps(self._history).encode() + b"\n")
                stdin.flush()
            # Its standard input stays open until then: when that closes, the child ends.
            said = stdout.read()
            process.wait()
        last = said.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        if process.returncode:
            with contextlib.suppress(OSError):  # one that was killed has left it
                self._aside.unlink()
            raise InternalError(
                f"the process that took the snapshot ended with {process.returncode}: {last}"
            )
        return int(json.loads(last)["bytes"])

    def kill(self) -> None:
        """End it now."""
        with self._lock:
            self._given_up = True
            if self._process is not None:
                self._process.kill()


def _environment() -> dict[str, str]:
    """The parent's environment, so that the child imports the same packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def _remove_replaced(folder: Path) -> None:
    for path in list_files(folder).leftovers:
        with contextlib.suppress(OSError):
            path.unlink()


def _aside(folder: Path, number: int) -> Path:
    """Where a snapshot is written until it is whole."""
    return folder / f"snapshot-{number:08d}.new"


def write_snapshot(folder: Path, number: int, history: History) -> dict[str, Any]:
    """Write the snapshot of the moment at which a file of a journal begins; its sizes.

    Raises:
        JournalDamaged: what it is made of is not as it was written.
        InternalError: the load of a checkpoint is under way at that moment.
        OSError: the disk took it not. In any case nothing of it is left.
    """
    started = time.monotonic()
    made, last = read_files(list_files(folder), None, history, until=number)
    aside = _aside(folder, number)
    path = aside.with_suffix("")
    try:
        with aside.open("wb", buffering=_BUFFER_BYTES) as file:
            os.fchmod(file.fileno(), 0o600)
            for piece in written(head_of(made, last.head.plane_id, number), parts_of(made)):
                file.write(piece)
            file.flush()
            os.fdatasync(file.fileno())
        with aside.open("rb", buffering=_BUFFER_BYTES) as file:
            parts = sum(1 for _ in Parts(file, str(aside)))  # as whoever needs it will read it
        os.rename(aside, path)
        sync_folder(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    return {
        "bytes": path.stat().st_size, "parts": parts, "seconds": time.monotonic() - started,
        "rows": sum(map(len, made.store.partitions.values())),
    }  # fmt: skip


def _end_with_parent() -> None:
    """End this process when its standard input closes, which only its parent has."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def child() -> None:
    """Entry point of the process that writes one snapshot: FOLDER NUMBER."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        # Where memory is short, the store goes on without a snapshot, and not the other way round.
        Path("/proc/self/oom_score_adj").write_text("1000")
    gc.disable()  # nothing that is made here is let go of
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 4096)
        if not piece:
            sys.exit(1)
        line += piece
    max_changes, max_age_s = json.loads(line)
    _end_with_parent()
    try:
        sizes = write_snapshot(folder, number, History(max_changes, max_age_s))
    except (DataplaneError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1)
    os.write(1, json.dumps(sizes).encode())


if __name__ == "__main__":
    child()
