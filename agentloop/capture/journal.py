"""Runs on disk, a file of JSON lines each, so that another process goes on with them.

Owns the folder and its lock, what a line is, and what is done about a file that is cut short or
damaged. A line is written before the agent has its answer, so what an agent has seen survives the
process; it is not synced, so it need not survive the machine. Keys are in it as hashes only.

    <run>.jsonl   {"run": …}, then {"turn": …}, {"refused": …}, {"undo": n}, {"verdict": …}
    <run>.ended   {"run": …}, {"outcome": …}: nothing but the answer is kept
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

_log = logging.getLogger(__name__)

_RUN: Final = re.compile(r"([0-9a-f]{24})\.(jsonl|ended)")

_OPEN: Final = ".jsonl"
_ENDED: Final = ".ended"


class JournalInUse(ValueError):
    """Another process writes to this folder."""


class Journal:
    """The files of all runs of one process. Its calls are short and block."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, which is made if it is not there.

        Raises:
            JournalInUse: somebody else has it.
            OSError: it cannot be made or written to.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise JournalInUse(
                f"{folder} is the journal of another capture that runs: give each its own folder"
            ) from None

    def append(self, run_id: str, line: Mapping[str, Any]) -> None:
        """Write down one more thing of a run. OSError: it is not there, or not whole."""
        self._write(run_id + _OPEN, [line], os.O_APPEND)

    def end(self, run_id: str, lines: list[Mapping[str, Any]]) -> None:
        """Keep only these lines of a run that has ended."""
        self._write(run_id + ".new", lines, os.O_TRUNC)
        (self._folder / f"{run_id}.new").replace(self._folder / (run_id + _ENDED))
        (self._folder / (run_id + _OPEN)).unlink(missing_ok=True)

    def forget(self, run_id: str) -> None:
        """Have nothing of a run."""
        for suffix in (_OPEN, _ENDED):
            (self._folder / (run_id + suffix)).unlink(missing_ok=True)

    def runs(self, max_bytes: int) -> Iterator[tuple[str, bool, list[dict[str, Any]]]]:
        """(run, whether it has ended, its lines) of each, the oldest first.

        What was being written when the process died is cut off. A file that is damaged otherwise,
        or over `max_bytes`, is put aside as `.damaged`, and said in the log.
        """
        found = [
            (path.stat().st_mtime_ns, path, match)
            for path in self._folder.iterdir()
            if (match := _RUN.fullmatch(path.name)) is not None
        ]
        for _, path, match in sorted(found, key=lambda item: item[:2]):
            ended = match[2] == "ended"
            if not ended and (self._folder / (match[1] + _ENDED)).exists():
                path.unlink()  # it was ended, and died before it was removed
                continue
            try:
                yield match[1], ended, _lines(path, max_bytes)
            except ValueError as error:
                self.put_aside(match[1], str(error))

    def put_aside(self, run_id: str, why: str) -> None:
        """Do not look at a run's file again, but keep it."""
        for suffix in (_OPEN, _ENDED):
            path = self._folder / (run_id + suffix)
            if path.exists():
                _log.error("the journal of run %s is put aside: %s", run_id, why)
                path.rename(path.with_name(path.name + ".damaged"))

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock)

    def _write(self, name: str, lines: list[Mapping[str, Any]], flag: int) -> None:
        raw = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag
        file = os.open(self._folder / name, flags, 0o600)
        try:
            size = os.fstat(file).st_size
            try:
                written = os.write(file, raw)
                while written < len(raw):
                    written += os.write(file, raw[written:])
            except OSError:
                os.ftruncate(file, size)  # half a line would spoil the next one
                raise
        finally:
            os.close(file)


def _lines(path: Path, max_bytes: int) -> list[dict[str, Any]]:
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"it has {size} bytes, over {max_bytes}")
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < size:
        os.truncate(path, whole)
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(raw[:whole].splitlines(), 1):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is no JSON: {str(error)[:100]}") from None
        if not isinstance(parsed, dict):
            raise ValueError(f"line {number} is no JSON object")
        lines.append(cast("dict[str, Any]", parsed))
    return lines
