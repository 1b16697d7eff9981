"""Sends on what waits on disk, in order, when the gateway is there.

What was never sent is a new put: it begins when it arrives. What may have arrived is asked again
under its number, and judged from what the producer had seen when it was first asked for. Where the
plane's history does not reach back so far, the plane is asked what became of it: a put that had no
effect, and now never will under that number, goes on as a new one. All of them name an attempt,
which has to be open still, or take keys that do not exist; so none brings back what was cleared.

What the plane refuses is set aside with the reason, and so is what it does not remember: that may
have happened long ago, and is never done twice. What may be different later is tried later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutcomeUnknown,
    PermissionDenied,
    PlaneLost,
    QuotaExceeded,
    RateLimited,
    RequestError,
    StaleWrite,
    Unauthenticated,
    Unreachable,
    ValueLost,
)
from dataplane.producer.puts import Put
from dataplane.producer.spool import Entry, Spool
from dataplane.producer.trajectory import TrajectoryResult, results_of
from dataplane.producer.transport import Asked, Transport
from dataplane.protocol.values import from_value
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb

log = logging.getLogger("dataplane.producer")

TRY_S: Final = 60.0
"""Deadline of one try of a put that waits."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
"""Between tries while the gateway is away, or says no for now."""
MAX_FAULTS: Final = 5
"""Faults of the server that one put may meet before it is set aside."""

_LATER: Final = (Unreachable, DeadlineExceeded, RateLimited, QuotaExceeded, Unauthenticated)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A put that waited on disk and that the plane refused; or one trajectory of it."""

    keys: list[str]
    partition_id: str
    error: DataplaneError
    path: Path | None
    """Where the put is now, with the reason beside it; None where it went to quarantine."""


class Sending:
    """What sends the puts of one spool. Of one event loop."""

    def __init__(
        self,
        spool: Spool,
        transport: Transport,
        *,
        on_rejected: Callable[[Rejected], None] | None = None,
        sync_s: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        self._spool = spool
        self._transport = transport
        self._on_rejected = on_rejected
        self._sync_s = sync_s
        self._random = rng or random.Random()
        self._more = asyncio.Event()
        self._empty = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.error: DataplaneError | None = None
        """Why the put that has waited longest could not be sent last time."""
        self.stopped = False
        """It waits for another plane than the gateway serves: nothing is sent any more."""

    def start(self) -> None:
        """Send what there is, and what comes."""
        if len(self._spool):
            self._more.set()
        else:
            self._empty.set()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._send_all()), loop.create_task(self._sync())]

    async def keep(self, put: Put, asked: Asked) -> None:
        """Have a put sent when its turn comes. QuotaExceeded if there is no room for it."""
        request = put.message.request
        request.seen.epoch, request.seen.n = asked.seen
        if self._transport.plane_id:
            self._spool.join(self._transport.plane_id)
        self._spool.append(put, asked.number, sent=asked.sent)
        if not self._sync_s:
            self._spool.sync()
        self._empty.clear()
        self._more.set()

    async def drained(self, timeout: float) -> None:
        """Returns when nothing waits any more. DeadlineExceeded says how much does, and why."""
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            why = "" if self.error is None else f": {self.error}"
            raise DeadlineExceeded(
                f"{len(self._spool)} puts wait on disk still, in {str(self._spool.folder)!r}{why}",
                waited_s=timeout,
            ) from self.error

    async def close(self) -> None:
        """Send nothing any more. What waits is there for the next process."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    # -- the loop ----------------------------------------------------------------------------

    async def _send_all(self) -> None:
        tries = 0
        while True:
            entry = self._spool.head()
            if entry is None:
                self._empty.set()
                self._more.clear()
                await self._more.wait()
                continue
            try:
                await self._send(entry)
                tries, self.error = 0, None
                continue
            except PlaneLost as error:
                self.error, self.stopped = error, True
                log.error("what waits in %s cannot be sent: %s", self._spool.folder, error)
                return
            except _LATER as error:
                self.error = error
                pause_s = getattr(error, "retry_after_s", None) or 0.0
            except Exception as error:
                log.exception("what waits in %s could not be sent", self._spool.folder)
                self.error = InternalError(f"a fault of the producer: {error!r:.200}")
                pause_s = LAST_PAUSE_S
            tries += 1
            longest = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 10))
            await asyncio.sleep(max(pause_s, longest * (0.5 + 0.5 * self._random.random())))

    async def _send(self, entry: Entry) -> None:
        """Send the put that has waited longest, until it is done or set aside."""
        try:
            put = self._spool.read(entry)
        except ValueError as error:
            self._reject(entry, None, InvalidRequest(f"the put cannot be read back: {error}"))
            return
        faults = 0
        while True:
            try:
                response = await self._once(entry, put)
            except (StaleWrite, OutcomeUnknown) as error:
                if isinstance(error, StaleWrite) and not (entry.sent and _beyond_history(error)):
                    self._reject(entry, put, error)
                    return
                if isinstance(error.__cause__, _LATER):
                    raise error.__cause__ from None  # time was up, and it is asked again
                if isinstance(error.__cause__, PermissionDenied):
                    self._reject(entry, put, error)  # nobody would say what became of it, either
                    return
                if await self._settled(entry, put):
                    return
                continue
            except (RequestError, ValueLost) as error:
                if isinstance(error, Unauthenticated):
                    raise
                self._reject(entry, put, error)
                return
            except InternalError as error:
                faults += 1
                if faults >= MAX_FAULTS:
                    self._reject(entry, put, error)
                    return
                await asyncio.sleep(FIRST_PAUSE_S * 2.0**faults)
                continue
            self._answered(entry, put, response)
            return

    async def _once(self, entry: Entry, put: Put) -> Any:
        transport = self._transport
        about = await transport.join(time.monotonic() + TRY_S)
        self._spool.join(about.plane_id)
        seen = put.message.request.seen
        asked = Asked(entry.number, Revision(seen.epoch, seen.n), entry.sent)
        if not entry.sent:
            # Nothing of it left this process: it begins now.
            asked.seen = transport.seen
            put.message.request.seen.epoch, put.message.request.seen.n = asked.seen
        self._spool.mark_sent(entry)
        return await send(transport, put, TRY_S, asked=asked)

    async def _settled(self, entry: Entry, put: Put) -> bool:
        """Find out what became of a put that the plane cannot judge. False if it goes on as a new
        one: it had no effect, and now never will have one under its number."""
        transport = self._transport
        message = pb.GetOutcomeRequest(
            client_id=transport.client_id, plane_id=transport.plane_id, number=entry.number
        )
        try:
            answer = await transport.ask("GetOutcome", message, TRY_S)
        except (OutcomeUnknown, InvalidRequest, PermissionDenied) as error:
            self._reject(entry, put, error)
            return True
        if from_value(pb.Value(map_value=answer.outcome)).get("applied"):
            self._spool.done(entry)
            return True
        self._spool.renew(entry, transport.numbers.begin()[0])
        return False

    def _answered(self, entry: Entry, put: Put, response: Any) -> None:
        self._spool.done(entry)
        if isinstance(response, pb.PutTrajectoriesResponse):
            for result in results_of(response):
                if result.reason is not None:
                    self._tell(_in_quarantine(put, result))

    def _reject(self, entry: Entry, put: Put | None, error: DataplaneError) -> None:
        path = self._spool.reject(entry, error)
        if isinstance(error, StaleWrite):  # its group went on without it
            log.info("a put that waited came too late, and is in %s now: %s", path, error)
        else:
            log.warning("a put that waited was refused, and is in %s now: %s", path, error)
        keys, partition_id = (
            ([], "") if put is None else (keys_written(put), put.message.partition_id)
        )
        self._tell(Rejected(keys, partition_id, error, path))

    def _tell(self, rejected: Rejected) -> None:
        if self._on_rejected is None:
            return
        try:
            self._on_rejected(rejected)
        except Exception:
            log.exception("on_rejected failed for %s", rejected.keys[:3])

    async def _sync(self) -> None:
        while self._sync_s:
            await asyncio.sleep(self._sync_s)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._spool.sync)


async def send(
    transport: Transport,
    put: Put,
    timeout: float,
    *,
    asked: Asked | None = None,
    reach_s: float | None = None,
) -> Any:
    """Send a put; its answer. Errors are the transport's."""
    message = put.message
    if isinstance(message, pb.PutRowsHeader):
        assert put.cells is not None
        return await transport.put_stream(message, put.cells, timeout, asked=asked, reach_s=reach_s)
    return await transport.effect(put.rpc, message, timeout, asked=asked, reach_s=reach_s)


def keys_written(put: Put) -> list[str]:
    """The keys that a put writes."""
    message = put.message
    if isinstance(message, pb.PutTrajectoriesRequest):
        return [f"{one.uid}_{one.session_id}_{one.index}" for one in message.trajectories]
    return list(message.keys)


def _beyond_history(error: StaleWrite) -> bool:
    """Whether it is refused only because nobody can tell what was cleared since."""
    return error.cleared_at is None and error.attempt is None


def _in_quarantine(put: Put, result: TrajectoryResult) -> Rejected:
    reason = InvalidRequest(f"{result.reason} (it is in {result.quarantine!r})")
    return Rejected([result.key], put.message.partition_id, reason, None)
