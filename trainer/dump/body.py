"""Reads rows and writes files: what runs in a thread or in an actor, beside training.

Owns the order of the two: `read` returns when the rows are read and may be cleared, and writing
goes on behind it. Errors are returned, never raised: a dump fails no step.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any, cast

import dataplane
from dataplane import Client
from trainer.dump.lines import Tokenizer, dump_lines, to_json
from trainer.dump.reading import DumpRow, read_rows
from trainer.dump.request import DumpRequest
from trainer.ranks.types import PlaneAddress

_log = logging.getLogger(__name__)

CAPACITY = 2
"""Steps that are read and not written yet, at most."""


class DumpBody:
    """The dumps of a run, one file a request."""

    def __init__(
        self,
        folder: str,
        plane: PlaneAddress,
        *,
        tokenizer_path: str | None = None,
        capacity: int = CAPACITY,
        write_wait_s: float = 30.0,
    ) -> None:
        """
        Args:
            tokenizer_path: Decodes responses of rows that have no text.
            write_wait_s: How long a read waits for the disk when `capacity` steps are unwritten.
        """
        self._folder = Path(folder)
        self._plane = plane
        self._tokenizer_path = tokenizer_path
        self._write_wait_s = write_wait_s
        self._client: Client | None = None
        self._tokenizer: Tokenizer | None = None
        self._written = threading.Condition()  # guards the next three
        self._errors: list[str] = []
        self._unwritten = 0
        self._ended = False
        self._queue: queue.Queue[tuple[DumpRequest, list[DumpRow]] | None] = queue.Queue(capacity)
        # A daemon: a disk that hangs must not keep the process.
        threading.Thread(target=self._write_all, name="dump-writer", daemon=True).start()

    def read(self, request: DumpRequest) -> list[str]:
        """Read the rows of a request and have them written; what has gone wrong since last asked.

        When it returns the rows are needed no longer.
        """
        try:
            client = self._joined()
            with client.stage("dump"):
                rows = read_rows(client, request)
        except Exception as error:
            self._failed(f"{request.file_name} could not be read", error)
            return self._told()
        with self._written:
            self._unwritten += 1
        try:
            self._queue.put((request, rows), timeout=self._write_wait_s)
        except queue.Full:
            self._done(f"{request.file_name} was given up: the disk is behind")
        return self._told()

    def finish(self, timeout_s: float) -> list[str]:
        """Let what was read be written, within so many seconds, and leave the plane; what has
        gone wrong."""
        with self._written:
            if not self._written.wait_for(lambda: not self._unwritten, timeout_s):
                self._errors.append(f"{self._unwritten} dumps were not written in time")
            elif not self._ended:
                self._ended = True
                self._queue.put(None)  # it is empty
        client, self._client = self._client, None
        if client is not None:
            client.close()
        return self._told()

    def _joined(self) -> Client:
        if self._client is None:
            plane = self._plane
            self._client = dataplane.connect(
                plane.name, address=plane.address, config={"label": "dump", **plane.settings}
            )
        return self._client

    def _write_all(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            request, rows = job
            try:
                self._write(request, rows)
            except Exception as error:
                self._failed(f"{request.file_name} could not be written", error)
            self._done()

    def _write(self, request: DumpRequest, rows: list[DumpRow]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / request.file_name
        partial = target.with_name(f".{target.name}.partial")
        try:
            with partial.open("wb") as file:
                for line in dump_lines(rows, request.kind, self._decoder):
                    file.write(to_json(line))
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def _decoder(self) -> Tokenizer | None:
        if self._tokenizer is None and self._tokenizer_path is not None:
            path, self._tokenizer_path = self._tokenizer_path, None  # tried once
            try:
                from transformers import AutoTokenizer

                self._tokenizer = cast("Any", AutoTokenizer).from_pretrained(path)
            except Exception as error:
                self._failed(f"no tokenizer for dumps in {path}", error)
        return self._tokenizer

    def _done(self, problem: str | None = None) -> None:
        with self._written:
            self._unwritten -= 1
            if problem is not None:
                self._errors.append(problem)
            self._written.notify_all()

    def _failed(self, what: str, error: Exception) -> None:
        _log.debug("%s", what, exc_info=error)
        with self._written:
            self._errors.append(f"{what}: {type(error).__name__}: {error}")

    def _told(self) -> list[str]:
        with self._written:
            told, self._errors = self._errors, []
        return told
