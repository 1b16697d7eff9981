"""Whether a journal is as it was written: each of its files, from end to end, needing no plane.

Owns what is said of every file, also where a start would stop at the first that is damaged. What
belongs together, and how, is for journal_folder.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dataplane.errors import DataplaneError, InvalidRequest, JournalDamaged
from dataplane.tags.history import History
from dataplane.tags.journal import journal_name, reading
from dataplane.tags.journal_folder import (
    Files,
    check_head,
    disk_errors,
    list_files,
    missing,
    opened_snapshot,
    replayed,
    without_collections,
)
from dataplane.tags.records import Records
from dataplane.tags.replay.replay import Replay
from dataplane.tags.snapshot.state import loaded


class Finding(NamedTuple):
    """What `verify_journal` has to say of one file."""

    path: Path
    kind: str
    """`journal` or `snapshot`."""
    nbytes: int
    records: int
    """Whole records of a journal, parts of a snapshot, as far as they are as they were written."""
    n: int
    """The revision that they lead to."""
    torn_bytes: int = 0
    """What a start would cut off its end."""
    damage: DataplaneError | None = None
    """Why a start would refuse it: JournalDamaged has the offset."""

    @property
    def is_whole(self) -> bool:
        """Whether it is as it was written."""
        return self.damage is None and not self.torn_bytes

    @property
    def text(self) -> str:
        """All of it in a line."""
        what = "records" if self.kind == "journal" else "parts"
        text = f"{self.path}: {self.records} {what} to revision {self.n}, {self.nbytes} bytes"
        if self.damage is not None:
            return f"{text}; {self.damage}"
        if self.torn_bytes:
            return (
                f"{text}; the last {self.torn_bytes} are no whole record, which nobody was told "
                f"had happened: a start cuts them off at byte {self.nbytes - self.torn_bytes}"
            )
        return f"{text}; whole"


def verify_journal(folder: Path) -> list[Finding]:
    """What a start would find in a folder, file by file, without changing anything.

    A file behind a damaged one is looked at on its own: its records may be whole and still not
    lead anywhere. InvalidRequest if there is no journal in the folder.
    """
    with disk_errors(folder), without_collections():
        files = list_files(folder)
        if not files.journals and not files.snapshots:
            raise InvalidRequest(f"there is no journal in {folder}")
        findings: list[Finding] = []
        made: Replay | None = None
        plane_id: str | None = None
        if files.snapshot:
            finding, made, plane_id = _verify_snapshot(files)
            findings.append(finding)
        last: Records | None = None
        first = files.snapshot or 1
        final = max([first, *files.journals])
        # Of several that are missing one after the other the first is named: a name can have a
        # number so high that nobody could list those before it.
        gaps = {number + 1 for number in files.journals if number < final} | {first}
        for number in sorted(number for number in gaps | files.journals.keys() if number >= first):
            path = files.journals.get(number)
            if path is None:
                path = folder / journal_name(number)
                findings.append(Finding(path, "journal", 0, 0, 0, 0, missing(path)))
                made, last = None, None
                continue
            verified = _JournalFile(path, number, is_last=number == final)
            whole = not any(finding.damage for finding in findings)
            finding = verified.check(made, plane_id, last, follows=whole)
            before = findings[-1] if findings else None
            if before is not None and getattr(finding.damage, "path", None) == str(before.path):
                # That the one before it was cut short is seen from this one.
                findings[-1] = before._replace(damage=finding.damage)
                finding = verified.check(None, plane_id, None, follows=False)
            findings.append(finding)
            made, last = verified.made, verified.records
            plane_id = plane_id or (last.head.plane_id if last is not None else None)
        return findings


def _verify_snapshot(files: Files) -> tuple[Finding, Replay | None, str | None]:
    path = files.snapshots[files.snapshot]
    nbytes, count = path.stat().st_size, 0
    plane_id = made = damage = None
    n = 0
    try:
        with opened_snapshot(files, None) as parts:
            plane_id, n = parts.head.plane_id, parts.head.n
            for _ in parts:
                count += 1
        with opened_snapshot(files, None) as parts:
            made = loaded(parts, History())
    except (JournalDamaged, InvalidRequest) as error:
        damage = error
    return Finding(path, "snapshot", nbytes, count, n, 0, damage), made, plane_id


class _JournalFile:
    """One file of a journal that is looked at."""

    def __init__(self, path: Path, number: int, *, is_last: bool) -> None:
        self.made: Replay | None = None
        """What has been made with it, unless it is damaged."""
        self.records: Records | None = None
        """Read to their end, as far as they are whole."""
        self._path = path
        self._number = number
        self._is_last = is_last

    def check(
        self, made: Replay | None, plane_id: str | None, last: Records | None, *, follows: bool
    ) -> Finding:
        """What there is to say of it. With `follows` all before it is whole: its records are
        replayed on top of what that has made."""
        nbytes = self._path.stat().st_size
        count = n = torn_bytes = 0
        damage: DataplaneError | None = None
        try:
            with reading(self._path) as records:
                check_head(records, plane_id, self._number, last)
                self.records = records
                if made is None and follows:
                    head = records.head
                    made = Replay(head.epoch, History(), open_schemas=head.open_schemas)
                n = 0 if made is None else made.store.n
                for record in records if made is None else replayed(made, records):
                    count += 1
                    n = record.n
                if records.torn is not None:
                    torn_bytes = records.torn.nbytes
                    if not self._is_last:
                        why = f"{records.torn.reason}, and it was closed"
                        raise records.damaged(records.torn.offset, why)
            self.made = made
        except (JournalDamaged, InvalidRequest) as error:
            damage = error
        return Finding(self._path, "journal", nbytes, count, n, torn_bytes, damage)
