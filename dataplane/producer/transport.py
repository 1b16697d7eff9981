"""Calls to a gateway from one event loop: numbered, repeated where that is harmless, bounded.

Owns when a call is tried again and which error it ends with. A numbered effect keeps its number
however often it travels, so it has one effect and one answer; what nobody knows of it at its
deadline is OutcomeUnknown.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc

from dataplane.client.numbers import ClaimNumbers, RequestNumbers
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    OutcomeUnknown,
    PermissionDenied,
    PlaneLost,
    RateLimited,
    Unauthenticated,
    Unreachable,
)
from dataplane.producer import rows
from dataplane.producer.access import Access, gateway_of
from dataplane.producer.channel import Channel, Failed
from dataplane.producer.retry import RetryBudget, RetryPolicy
from dataplane.protocol.cells import Cells, Shape
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb

PUTS_AT_ONCE: Final = 64
"""Puts under way at once, and as many that name an attempt."""
DESCRIBE_S: Final = 10.0
"""Deadline of one question what a gateway serves."""
MAX_ABANDONED: Final = 256
"""Claims without an answer that one claim speaks of."""

_BROKEN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""What gRPC and proxies say of a connection that broke under a call."""
_UNSETTLED: Final = (
    Unreachable,
    DeadlineExceeded,
    RateLimited,
    Unauthenticated,
    PermissionDenied,
)
"""Errors that come before anybody looks whether an earlier try had its effect."""


@dataclass(slots=True)
class Asked:
    """One numbered effect, for as long as it may have to be asked again."""

    number: int
    seen: Revision
    """The latest revision that the producer had seen when it was first asked for."""
    sent: bool = False
    """Whether a try of it may have arrived."""


class Transport:
    """A client of a gateway. Of one event loop; it connects with the first call."""

    def __init__(
        self,
        address: str,
        access: Access | None = None,
        *,
        client_id: str | None = None,
        numbers: RequestNumbers | None = None,
        plane_id: str = "",
        retry: RetryPolicy | None = None,
        options: Sequence[tuple[str, Any]] = (),
        rng: random.Random | None = None,
    ) -> None:
        """`client_id` and `numbers` are given where they go on from an earlier process, `plane_id`
        where the plane that is meant is known. `options` are of gRPC's channel.

        InvalidRequest if the address is none, or a token would travel in plain text.
        """
        self.gateway = gateway_of(address)
        access = access or Access()
        access.check(self.gateway)
        self.client_id = secrets.token_hex(16) if client_id is None else client_id
        self.numbers = RequestNumbers() if numbers is None else numbers
        self.claims = ClaimNumbers(time.time_ns() // 1000)
        self.plane_id = plane_id
        """The plane that was joined; no other is accepted. Empty before the first answer."""
        self.seen = Revision(0, 0)
        """The latest revision that an answer carried."""
        self.policy = retry or RetryPolicy()
        self.channel = Channel(self.gateway, access, options)
        self._budget = RetryBudget(self.policy, time.monotonic())
        self._random = rng or random.Random()
        self._places = asyncio.Semaphore(PUTS_AT_ONCE), asyncio.Semaphore(PUTS_AT_ONCE)
        self._about: pb.DescribeResponse | None = None
        self._describing: asyncio.Task[pb.DescribeResponse] | None = None

    # -- what it talks to --------------------------------------------------------------------

    async def describe(self, timeout: float = DESCRIBE_S) -> pb.DescribeResponse:
        """What the gateway serves and takes, asked anew.

        PlaneLost if that is another plane than this client has joined.
        """
        deadline = time.monotonic() + timeout
        about = await self._answer("Describe", pb.DescribeRequest(), deadline)
        if self.plane_id and about.plane_id != self.plane_id:
            raise PlaneLost(
                f"the gateway at {self.gateway} serves plane {about.plane_id}, and this client "
                f"belongs to {self.plane_id}: what was asked there cannot be repeated here"
            )
        self.plane_id = about.plane_id
        self.see(about.revision)
        self._about = about
        return about

    async def join(self, deadline: float, reach_s: float | None = None) -> pb.DescribeResponse:
        """The same, asked once: every effect names the plane, so that a repetition of it cannot
        reach another one. With `reach_s` it gives up earlier where nobody answers."""
        while self._about is None:
            await self.channel.reach(deadline, reach_s)
            if self._describing is None:
                # Of all who wait for it: none of them may take it away from the others.
                self._describing = asyncio.get_running_loop().create_task(self.describe())
                self._describing.add_done_callback(self._described)
            task = self._describing
            await asyncio.wait({task}, timeout=max(0.0, deadline - time.monotonic()))
            if not task.done():
                raise Unreachable(f"the gateway at {self.gateway} did not say in time what it is")
            try:
                task.result()
            except (Unreachable, DeadlineExceeded):
                if reach_s is not None or time.monotonic() >= deadline:
                    raise
        return self._about

    def _described(self, task: asyncio.Task[pb.DescribeResponse]) -> None:
        self._describing = None
        if not task.cancelled():
            task.exception()  # those who wait are told; there may be none any more

    def see(self, revision: pb.Revision) -> Revision:
        """Note a revision that an answer carried."""
        seen = Revision(revision.epoch, revision.n)
        self.seen = max(self.seen, seen)
        return seen

    # -- calls -------------------------------------------------------------------------------

    def begin(self) -> Asked:
        """A numbered effect that begins now. Whoever begins it calls `numbers.end`."""
        number, _ = self.numbers.begin()
        return Asked(number, self.seen)

    async def effect(
        self,
        rpc: str,
        message: Any,
        timeout: float,
        *,
        asked: Asked | None = None,
        reach_s: float | None = None,
    ) -> Any:
        """The answer of a numbered effect, which it has once however often it travels.

        `asked`: where it was begun before. `reach_s`: give up earlier where nobody answers.

        Raises:
            Unreachable: no try of it can have arrived.
            OutcomeUnknown: one may have, and the deadline came before an answer.
            RateLimited: the caller asks for too much at a time, and did so until the deadline.
        """
        deadline = time.monotonic() + timeout

        async def send(asked: Asked) -> Any:
            self.fill(message.request, asked)
            return await self.channel.unary(rpc, message, deadline)

        about = await self.join(deadline, reach_s)
        _check_size(rpc, message, about.limits)
        async with self._turn(rpc, message, deadline):
            return await self._settle(rpc, send, deadline, asked, reach_s)

    async def ask(self, rpc: str, message: Any, timeout: float) -> Any:
        """The answer of a call that may be repeated without harm.

        Unreachable, or DeadlineExceeded once somebody was there, if there was none in time.
        """
        deadline = time.monotonic() + timeout
        about = await self.join(deadline)
        _check_size(rpc, message, about.limits)
        return await self._answer(rpc, message, deadline)

    async def claim(self, message: pb.ClaimRequest, timeout: float) -> pb.ClaimResponse:
        """The answer of a claim. Each try has a number of its own, and gives back what those before
        it may have been granted, whose answers did not arrive. Errors as of `ask`."""
        deadline = time.monotonic() + timeout
        about = await self.join(deadline)
        message.client_id, message.plane_id = self.client_id, self.plane_id
        _check_size("Claim", message, about.limits)

        async def send() -> Any:
            number, abandoned = self.claims.begin()
            message.number = number
            message.abandoned[:] = abandoned[:MAX_ABANDONED]
            try:
                answer = await self.channel.unary("Claim", message, deadline)
            except BaseException:
                self.claims.abandon(number)
                raise
            self.claims.told(abandoned[:MAX_ABANDONED])
            return answer

        return await self._repeat(send, deadline)

    async def stream(self, rpc: str, message: Any, timeout: float) -> AsyncIterator[Any]:
        """The answers of a call as they come. It ends with the call, or with the error of that;
        whoever wants to go on asks again."""
        deadline = time.monotonic() + timeout
        await self.join(deadline)
        await self.channel.reach(deadline)
        try:
            async for answer in self.channel.answers(rpc, message, deadline):
                yield answer
        except Failed as failed:
            raise failed.error from None

    async def collect(self, rpc: str, message: Any, timeout: float) -> list[Any]:
        """All answers of a call that may be repeated without harm; one that breaks off begins
        anew. Errors as of `ask`."""
        deadline = time.monotonic() + timeout
        about = await self.join(deadline)
        _check_size(rpc, message, about.limits)

        async def receive() -> list[Any]:
            return [answer async for answer in self.channel.answers(rpc, message, deadline)]

        return await self._repeat(receive, deadline)

    async def put_rows(
        self,
        partition_id: str,
        keys: Sequence[str],
        tags: Sequence[pb.Tags] | None,
        cells: Cells | None,
        *,
        mode: pb.PutMode = pb.PUT_MODE_UNSPECIFIED,
        attempt: int = 0,
        return_tags: bool = False,
        timeout: float,
        asked: Asked | None = None,
        reach_s: float | None = None,
    ) -> pb.PutRowsResponse | pb.PutTagsResponse:
        """Put rows at one revision, all or none; with `cells` None tags alone.

        A stream that breaks goes on where the gateway has it. InvalidRequest before anything is
        sent if it is more than the gateway takes. Otherwise as `effect`.
        """
        if cells is None:
            message = pb.PutTagsRequest(
                partition_id=partition_id,
                keys=keys,
                tags=tags or (),
                mode=mode,
                attempt=attempt,
                return_tags=return_tags,
            )
            return await self.effect("PutTags", message, timeout, asked=asked, reach_s=reach_s)
        header = pb.PutRowsHeader(
            partition_id=partition_id,
            keys=keys,
            tags=tags or (),
            columns=cells.shape.to_columns(),
            total_bytes=cells.shape.nbytes,
            mode=mode,
            attempt=attempt,
            return_tags=return_tags,
        )
        return await self.put_stream(header, cells, timeout, asked=asked, reach_s=reach_s)

    async def put_stream(
        self,
        header: pb.PutRowsHeader,
        cells: rows.Chunked,
        timeout: float,
        *,
        asked: Asked | None = None,
        reach_s: float | None = None,
    ) -> pb.PutRowsResponse:
        """The same, with a header that is made already."""
        deadline = time.monotonic() + timeout
        about = await self.join(deadline, reach_s)
        rows.check_put(header, about.limits)
        upload = rows.Upload(self.channel, header, cells, about.limits, deadline)

        async def send(asked: Asked) -> Any:
            self.fill(header.request, asked)
            return await upload.send()

        async with self._turn("PutRows", header, deadline):
            return await self._settle("PutRows", send, deadline, asked, reach_s)

    async def get_rows(
        self,
        partition_id: str,
        keys: Sequence[str],
        fields: Sequence[str],
        *,
        drop_missing: bool = False,
        timeout: float,
    ) -> tuple[pb.GetRowsHeader, Shape, bytearray]:
        """Rows of one revision: what they look like, and their bytes, which are the caller's own.

        A read that breaks off begins anew.
        """
        deadline = time.monotonic() + timeout
        about = await self.join(deadline)
        message = pb.GetRowsRequest(
            partition_id=partition_id, keys=keys, fields=fields, drop_missing=drop_missing
        )
        _check_size("GetRows", message, about.limits)

        async def receive() -> tuple[pb.GetRowsHeader, Shape, bytearray]:
            answers = self.channel.answers("GetRows", message, deadline)
            return await rows.receive(answers, about.limits.max_get_bytes)

        found = await self._repeat(receive, deadline)
        self.see(found[0].revision)
        return found

    async def close(self) -> None:
        """End all calls and the connection. Repeatable."""
        describing = self._describing
        if describing is not None:
            describing.cancel()
            await asyncio.wait({describing})
        await self.channel.close()

    def __repr__(self) -> str:
        return f"Transport({self.gateway}, plane {self.plane_id or 'not known yet'})"

    # -- again -------------------------------------------------------------------------------

    def fill(self, request: pb.Request, asked: Asked) -> None:
        """Say in a message which effect it asks for."""
        request.client_id = self.client_id
        request.number = asked.number
        request.settled = self.numbers.settled(asked.number)
        request.retry = asked.sent
        request.seen.epoch, request.seen.n = asked.seen
        request.plane_id = self.plane_id

    @asynccontextmanager
    async def _turn(self, rpc: str, message: Any, deadline: float) -> AsyncGenerator[None]:
        """A place among the puts that are under way: a gateway refuses streams beyond so many of a
        connection. DeadlineExceeded if none comes free in time; nothing was sent."""
        if not rpc.startswith("Put"):
            yield
            return
        # Puts of a group never wait for room, so they do not stand behind those that do.
        places = self._places[bool(message.attempt)]
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + _left(deadline)):
                await places.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{PUTS_AT_ONCE} other puts of this producer were under way until the deadline",
                waited_s=0.0,
            ) from None
        try:
            yield
        finally:
            places.release()

    async def _answer(self, rpc: str, message: Any, deadline: float) -> Any:
        return await self._repeat(lambda: self.channel.unary(rpc, message, deadline), deadline)

    async def _settle(
        self,
        what: str,
        send: Callable[[Asked], Awaitable[Any]],
        deadline: float,
        given: Asked | None,
        reach_s: float | None,
    ) -> Any:
        """Send an effect until it is answered, or time is up."""
        asked = given or self.begin()
        try:
            response = await self._repeat(lambda: send(asked), deadline, asked, reach_s)
        except _UNSETTLED as error:
            if not asked.sent:
                raise
            if given is None:
                self.numbers.keep(asked.number)
            raise self._unknown(what, asked, error) from error
        except OutcomeUnknown:
            if given is None:
                self.numbers.keep(asked.number)
            raise
        finally:
            if given is None:
                self.numbers.end(asked.number)
        if hasattr(response, "revision"):
            self.see(response.revision)
        return response

    async def _repeat(
        self,
        send: Callable[[], Awaitable[Any]],
        deadline: float,
        asked: Asked | None = None,
        reach_s: float | None = None,
    ) -> Any:
        self._budget.called(time.monotonic())
        tries = 0
        while True:
            await self.channel.reach(deadline, reach_s)
            try:
                return await send()
            except asyncio.CancelledError:
                if asked is not None:
                    asked.sent = True
                raise
            except Failed as failed:
                tries += 1
                if asked is not None and (not failed.told or _is(failed, OutcomeUnknown)):
                    asked.sent = True
                error = failed.error
                if isinstance(error, DeadlineExceeded) and not failed.told and asked is None:
                    error = self._too_late(error)
                pause_s = self._pause_s(failed, tries, numbered=asked is not None)
            if pause_s is None:
                raise error
            now = time.monotonic()
            pause_s = max(pause_s, self._budget.wait_s(now))
            if now + pause_s >= deadline:
                raise error
            self._budget.take(now)
            await asyncio.sleep(pause_s)

    def _pause_s(self, failed: Failed, tries: int, *, numbered: bool) -> float | None:
        """How long to wait before the next try; None if there is to be none."""
        pause_s = self.policy.pause_s(tries, self._random.random())
        error = failed.error
        if not failed.told:
            return pause_s if failed.code in _BROKEN else None
        if isinstance(error, RateLimited):
            return max(pause_s, error.retry_after_s or 0.0)
        if isinstance(error, Unreachable):
            return pause_s
        if isinstance(error, OutcomeUnknown):
            # The gateway may have lost the plane for a moment, or nobody knows for good.
            return pause_s if numbered and tries == 1 else None
        if isinstance(error, Unauthenticated) and self.channel.token_changed():
            return 0.0
        return None

    def _unknown(self, what: str, asked: Asked, error: DataplaneError) -> OutcomeUnknown:
        request_id = f"{self.client_id}/{asked.number}"
        return OutcomeUnknown(
            f"{what} may have arrived at {self.gateway} and was not answered in time "
            f"({error.message}): whether it took effect, request_outcome({request_id!r}) tells",
            request_id=request_id,
        )

    def _too_late(self, error: DeadlineExceeded) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the gateway at {self.gateway} did not answer in time", waited_s=error.waited_s
        )


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _is(failed: Failed, kind: type[DataplaneError]) -> bool:
    return isinstance(failed.error, kind)


def _check_size(rpc: str, message: Any, limits: pb.Limits) -> None:
    """InvalidRequest if a message is larger than the gateway takes."""
    limit, size = limits.max_message_bytes, message.ByteSize()
    if limit and size > limit:
        raise InvalidRequest(
            f"{rpc}: a message of {size} bytes, and the gateway takes {limit}: ask for less at a "
            "time"
        )
