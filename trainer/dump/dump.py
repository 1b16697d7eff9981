"""Trajectories in files to read, made beside training.

Owns what the loop does about it: begin a dump, and wait for its rows to be read just before they
are cleared. Reading overlaps training; decoding and writing come after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from trainer.dump.hosts import Host, HostKind, RayHost, ThreadHost, host_kind
from trainer.dump.request import DumpRequest, Kind
from trainer.ranks.types import PlaneAddress
from trainer.select import Group

_log = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long the rows of a batch are kept for a dump."""

PENDING = 4
"""Dumps that are begun and not read, at most."""


class TrajectoryDump:
    """Files `train_rollout_{step}.jsonl` and `eval_rollout_{step}.jsonl` of a folder.

    Nothing in here fails or holds up a step: what goes wrong is logged, and the step has no dump.

    Example:
        dump.train(step, "train", groups)
        ...                       # train
        await dump.read_done()
        await buffer.finish(sample)
    """

    def __init__(self, host: Host, *, wait_s: float = WAIT_S) -> None:
        self._host = host
        self._wait_s = wait_s
        self._reading: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: str | Path,
        plane: PlaneAddress,
        *,
        tokenizer_path: str | None = None,
        kind: HostKind | None = None,
        wait_s: float = WAIT_S,
    ) -> TrajectoryDump:
        """A dump of this plane's rows into a folder.

        Args:
            tokenizer_path: Decodes responses of rows that have no text.
            kind: Where it runs; None: in an actor where Ray is initialised, else in a thread.
            wait_s: How long `read_done` and `close` wait.
        """
        where = str(Path(folder).absolute())
        host = RayHost if (kind or host_kind()) == "ray" else ThreadHost
        return cls(
            host(lambda make: make(where, plane, tokenizer_path=tokenizer_path)), wait_s=wait_s
        )

    def train(self, step: int, partition_id: str, groups: Iterable[Group]) -> None:
        """Begin the dump of a training step: of all trajectories of these groups. Give it the
        groups that are trained."""
        self._begin("train", step, partition_id, groups)

    def evaluation(self, step: int, partition_id: str, groups: Iterable[Group]) -> None:
        """Begin the dump of an evaluation."""
        self._begin("eval", step, partition_id, groups)

    async def read_done(self) -> None:
        """Returns when the rows of all dumps that were begun may be cleared: they are read, or
        were not in time, and then there is no dump of them."""
        if not self._reading:
            return
        _, late = await asyncio.wait(self._reading, timeout=self._wait_s)
        for task in late:
            _log.warning("%s was not read in %g s: no such dump", task.get_name(), self._wait_s)
            task.cancel()
        self._reading -= late

    async def close(self) -> None:
        """Let all files be written, within the time that it waits; repeatable."""
        if self._closed:
            return
        self._closed = True
        await self.read_done()
        try:
            async with asyncio.timeout(self._wait_s + 5.0):
                _complain(await self._host.finish(self._wait_s))
        except Exception as error:
            _log.warning("dumps did not end well: %s: %s", type(error).__name__, error)

    def _begin(self, kind: Kind, step: int, partition_id: str, groups: Iterable[Group]) -> None:
        request = DumpRequest.of(kind, step, partition_id, groups)
        if self._closed or len(self._reading) >= PENDING:
            why = "closed" if self._closed else f"{PENDING} steps behind"
            _log.warning("no dump %s: dumps are %s", request.file_name, why)
            return
        task = asyncio.create_task(self._read(request), name=request.file_name)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read(self, request: DumpRequest) -> None:
        try:
            _complain(await self._host.read(request))
        except Exception as error:  # the actor died
            _log.warning("no dump %s: %s: %s", request.file_name, type(error).__name__, error)


def _complain(errors: Iterable[str]) -> None:
    for error in errors:
        _log.warning("trajectory dump: %s", error)
