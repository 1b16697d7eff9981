"""The folder of a journal: which files there are, what they make together, if they are whole.

    journal-<number>     records, each file going on where the one before it ended
    snapshot-<number>    the state at the moment at which that file begins, in place of all before
    *.new                what was being written when its writer died; nothing needs it

A start loads the newest snapshot and replays the files from its number on. Only the end of the last
file may be torn, by a death in the middle of a write: that is cut off, and nobody was told of it.
Anything else that is not as it was written is refused with the file and the offset, and all files
are left as they are: part of a journal is another history.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from dataplane.errors import (
    DataplaneError,
    InternalError,
    InvalidRequest,
    JournalDamaged,
    PermissionDenied,
)
from dataplane.tags.history import History
from dataplane.tags.journal import START, FileJournal, disk_full, journal_name, reading
from dataplane.tags.lineage.lineage import Lineage
from dataplane.tags.records import Head, Record, Records, damaged
from dataplane.tags.replay.replay import Replay
from dataplane.tags.snapshot.format import Parts
from dataplane.tags.snapshot.state import loaded

log = logging.getLogger("dataplane.journal")

_NAME = re.compile(r"(journal|snapshot)-(\d{8})(\.new)?")


class Opened(NamedTuple):
    """A journal that goes on."""

    journal: FileJournal
    replay: Replay | None
    """What had been written by now has made; None for a new plane, whose epoch is 1."""


class Files(NamedTuple):
    """What a folder holds of a journal."""

    folder: Path
    journals: dict[int, Path]
    """By number, ascending, those only that the newest snapshot does not take the place of."""
    snapshots: dict[int, Path]
    leftovers: list[Path]
    """What was being written, and what the newest snapshot has taken the place of."""

    @property
    def snapshot(self) -> int:
        """The number of the newest snapshot; 0 if there is none."""
        return max(self.snapshots, default=0)


def open_journal(
    folder: Path,
    plane_id: str,
    *,
    open_schemas: bool,
    sync: str,
    history: History,
    now: float,
    lineage: Lineage | None = None,
) -> Opened:
    """The journal of a plane, ready for its next change, and what its records so far have made.

    A folder that is not there is made. `open_schemas` is for a new plane; one that goes on has what
    it began with. `history` is empty and becomes that of the store. `now` is when the epoch begins.
    `lineage` keeps the last changes, those included that are read here.

    Raises:
        JournalDamaged: a file is not as it was written, is missing, or is another plane's. All are
            left as they are.
        InvalidRequest, PermissionDenied: the folder cannot be used, or another release wrote it.
        QuotaExceeded: the disk is full.
    """
    bounds = (history.max_changes, history.max_age_s)
    with disk_errors(folder):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        files = list_files(folder)
        if not files.journals and not files.snapshots:
            _remove(files.leftovers)
            path = folder / journal_name(1)
            journal = FileJournal(path, plane_id, 1, open_schemas=open_schemas, sync=sync)
            journal.history = bounds
            journal.lineage = lineage
            return Opened(journal, None)
        return _resume(files, plane_id, sync, history, now, lineage)


def _resume(
    files: Files,
    plane_id: str,
    sync: str,
    history: History,
    now: float,
    lineage: Lineage | None,
) -> Opened:
    bounds = (history.max_changes, history.max_age_s)
    made, last = read_files(files, plane_id, history, lineage=lineage)
    if last.torn is not None:
        log.info(
            "the journal %s ends in the middle of a record: %d bytes from byte %d on were never "
            "acknowledged, and are cut off (%s)",
            last.path, last.torn.nbytes, last.torn.offset, last.torn.reason,
        )  # fmt: skip
    journal = FileJournal.resumed(Path(last.path), last.head, last.end, sync)
    journal.lineage = lineage
    try:
        start = Record(START, made.store.n, now, [made.store.epoch + 1], last.end)
        journal.append(start.kind, start.n, start.at, start.body)
        made.apply(start)
    except BaseException:
        journal.close()
        raise
    journal.history = bounds
    journal.loading = made.loads.restoring is not None
    journal.closed_bytes = sum(
        path.stat().st_size for number, path in files.journals.items() if number < journal.number
    )
    if files.snapshot:
        journal.replaced(files.snapshot, files.snapshots[files.snapshot].stat().st_size, 0)
    _remove(files.leftovers)
    return Opened(journal, made)


def list_files(folder: Path) -> Files:
    """What a folder holds. InvalidRequest if it is no folder."""
    journals: dict[int, Path] = {}
    snapshots: dict[int, Path] = {}
    leftovers: list[Path] = []
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        kind, number, aside = match.groups()
        if aside:
            leftovers.append(folder / name)
        else:
            (journals if kind == "journal" else snapshots)[int(number)] = folder / name
    newest = max(snapshots, default=0)
    replaced = [path for number, path in (*journals.items(), *snapshots.items()) if number < newest]
    return Files(
        folder,
        {number: path for number, path in journals.items() if number >= newest},
        {number: path for number, path in snapshots.items() if number >= newest},
        [*leftovers, *replaced],
    )


def read_files(
    files: Files,
    plane_id: str | None,
    history: History,
    until: int | None = None,
    *,
    lineage: Lineage | None = None,
) -> tuple[Replay, Records]:
    """What the newest snapshot and the files after it have made, up to but without the file
    `until`, and the records of the last of them, read to their end.

    JournalDamaged if anything is not as it was written but the end of the last file; that, too,
    where `until` says that another one comes after it.
    """
    with without_collections():
        made = None
        if files.snapshot:
            with opened_snapshot(files, plane_id) as parts:
                made = loaded(parts, history)
                plane_id = parts.head.plane_id
            if lineage is not None:
                lineage.partial = True
        last: Records | None = None
        for number in _numbers(files, until):
            with reading(files.journals[number]) as records:
                check_head(records, plane_id, number, last)
                plane_id = records.head.plane_id
                if made is None:
                    head = records.head
                    made = Replay(head.epoch, history, open_schemas=head.open_schemas)
                for record in replayed(made, records):
                    if lineage is not None:
                        lineage.wrote(*record[:4], records.packed)
            last = records
        if made is None or last is None:
            raise InternalError(f"there is nothing of a journal before file {until}")
        if until is not None:
            if until not in files.journals:
                raise missing(files.folder / journal_name(until))
            with reading(files.journals[until]) as records:
                check_head(records, plane_id, until, last)  # it knows how long the last one was
        return made, last


# -- files that go on from each other


def _numbers(files: Files, until: int | None) -> Iterator[int]:
    """The numbers of the files to be read, in order. JournalDamaged if one is missing."""
    first = files.snapshot or 1
    for number in range(first, until or max([first, *files.journals]) + 1):
        if number not in files.journals:
            raise missing(files.folder / journal_name(number))
        yield number


def missing(path: Path) -> JournalDamaged:
    """The error of a file that is not there."""
    return damaged("journal", str(path), 0, 0, "it is missing, and others of its journal are there")


def check_head(records: Records, plane_id: str | None, number: int, last: Records | None) -> None:
    """JournalDamaged unless a file has this number in the plane's journal, and goes on where the
    last one ended, if that was read."""
    head: Head = records.head
    if plane_id is not None and head.plane_id != plane_id:
        raise records.damaged(0, f"it is of plane {head.plane_id!r:.80}, and not of {plane_id!r}")
    if head.number != number:
        raise records.damaged(0, f"it is file {head.number} of its journal, not {number}")
    if last is not None:
        if last.torn is not None:
            raise last.damaged(last.torn.offset, f"{last.torn.reason}, and another file follows")
        if last.size != head.before:
            raise last.damaged(
                last.size, f"it had {head.before} bytes when the next file was begun"
            )


def replayed(made: Replay, records: Records) -> Iterator[Record]:
    """The records, each of which has been made again when it comes out. JournalDamaged if one makes
    no sense there."""
    for record in records:
        try:
            made.apply(record)
        except InternalError as error:
            raise records.damaged(record.offset, str(error)) from error
        yield record


@contextlib.contextmanager
def opened_snapshot(files: Files, plane_id: str | None) -> Generator[Parts]:
    """The newest snapshot of a folder, which is open meanwhile; JournalDamaged if it is another's
    than this plane's."""
    path = files.snapshots[files.snapshot]
    with path.open("rb", buffering=1 << 20) as file:
        parts = Parts(file, str(path))
        head = parts.head
        if plane_id is not None and head.plane_id != plane_id:
            raise parts.damaged(f"it is of plane {head.plane_id!r:.80}, and not of {plane_id!r}")
        if head.number != files.snapshot:
            raise parts.damaged(f"it is snapshot {head.number}, not {files.snapshot}")
        yield parts


@contextlib.contextmanager
def without_collections() -> Generator[None]:
    """Millions of objects are made that stay: looking through them for garbage, again and again,
    would take longer than making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _remove(paths: list[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s is not needed any more and cannot be removed: %s", path, error)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Generator[None]:
    """What goes wrong with the disk, in our own words."""
    try:
        yield
    except DataplaneError:
        raise
    except OSError as error:
        text = f"the journal in {folder} cannot be used: {error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(folder, "the journal could not be begun", str(error)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionDenied(text) from error
        raise InvalidRequest(text) from error
