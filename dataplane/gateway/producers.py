"""Clients of the plane that a gateway keeps for producers outside: one for each, with its numbers.

A producer numbers its effects itself. Its client here is known to the plane by an id that follows
from the producer's name and its own id, and asks under the producer's numbers: so what is asked
again, through whichever gateway, has one effect and one answer by the tag store's own promise.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

from dataplane.client.aio import AsyncClient, stay_attached
from dataplane.client.core import ClaimNumbers, Core, Joined, RequestNumbers
from dataplane.config import Config
from dataplane.errors import InternalError, InvalidRequest, OutcomeUnknown, RateLimited
from dataplane.types import Revision

MAX_CLIENT_ID: Final = 64
MAX_ABANDONED: Final = 1024
ID_BYTES: Final = 16


class Asked(NamedTuple):
    """The effect that is asked for in this task."""

    number: int
    settled: int
    seen: Revision
    """The latest revision that the producer had seen when it first asked."""


class Claiming(NamedTuple):
    """The try to claim that is under way in this task, as its producer counts them."""

    number: int
    abandoned: tuple[int, ...]
    """Tries whose answers did not arrive."""


_asked: ContextVar[Asked | None] = ContextVar("_asked", default=None)
_claiming: ContextVar[Claiming | None] = ContextVar("_claiming", default=None)


@contextmanager
def claiming(number: int, abandoned: Sequence[int]) -> Generator[None]:
    """Claims of the block have this number, unless it is 0.

    InvalidRequest if one of them is no number.
    """
    if len(abandoned) > MAX_ABANDONED:
        raise InvalidRequest(
            f"{len(abandoned)} abandoned claims; at most {MAX_ABANDONED} at a time"
        )
    if not all(0 < each < 1 << 63 for each in (number or 1, *abandoned)):
        raise InvalidRequest("numbers of claims are from 1 on")
    token = _claiming.set(Claiming(number, tuple(abandoned)) if number else None)
    try:
        yield
    finally:
        _claiming.reset(token)


def plane_client_id(principal: str, client_id: str) -> str:
    """Who a producer is to the plane. Nobody can be taken for the client of another principal."""
    named = f"{len(principal)}:{principal}{client_id}".encode()
    return hashlib.sha256(named).hexdigest()[: 2 * ID_BYTES]


def check_client_id(client_id: str) -> None:
    """InvalidRequest unless it is one."""
    if not (0 < len(client_id) <= MAX_CLIENT_ID and client_id.isascii()) or (
        not client_id.isprintable()
    ):
        raise InvalidRequest(
            f"a client_id is 1 to {MAX_CLIENT_ID} printable ASCII characters, not "
            f"{client_id!r:.100}"
        )


class _GivenNumbers(RequestNumbers):
    """Numbers that the producer gave: it keeps track of them itself."""

    def begin(self) -> tuple[int, int]:
        asked = _asked.get()
        if asked is None:
            raise InternalError("an effect of a producer that gave no number for it")
        return asked.number, asked.settled

    def end(self, number: int) -> None:
        pass

    def keep(self, number: int) -> None:
        pass

    def told(self, number: int) -> None:
        pass


class _ClaimNumbers(ClaimNumbers):
    """Numbers that the producer gave, or, to one that gives none, such that no earlier client of
    the same producer can have used, here or elsewhere."""

    def __init__(self) -> None:
        super().__init__(time.time_ns() // 1000)

    def begin(self) -> tuple[int, list[int]]:
        number, abandoned = super().begin()
        given = _claiming.get()
        if given is None:
            return number, abandoned
        return given.number, sorted({*abandoned, *given.abandoned})


class _ProducerCore(Core):
    def __init__(self, joined: Joined, config: Config, client_id: str) -> None:
        self._known_as = client_id
        super().__init__(joined, config)

    def new_identity(self) -> None:
        super().new_identity()
        self.client_id = self._known_as
        self.numbers = _GivenNumbers()
        self.claims = _ClaimNumbers()

    def asked_at(self) -> Revision:
        asked = _asked.get()
        return self.seen if asked is None else asked.seen


class _Producer:
    """One producer's client."""

    __slots__ = ("client", "last_used", "principal", "used")

    def __init__(self, client: AsyncClient, principal: str) -> None:
        self.client = client
        self.principal = principal
        self.used = 0
        """Calls under way."""
        self.last_used = 0.0


class Producers:
    """The clients of all producers that are here. Of one event loop."""

    def __init__(
        self,
        joined: Joined,
        config: Config,
        *,
        absence_s: float,
        max_clients: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`absence_s`: a producer that has made no call for so long has left, and its leases run.
        `max_clients`: how many may be here at once."""
        self._joined = joined
        self._config = config
        self._absence_s = absence_s
        self._max_clients = max_clients
        self._clock = clock
        self._producers: dict[str, _Producer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._producers)

    def of(self, principal: str) -> int:
        """How many clients of a principal are here."""
        return sum(producer.principal == principal for producer in self._producers.values())

    @asynccontextmanager
    async def client(
        self, principal: str, client_id: str, *, max_of_principal: int | None = None
    ) -> AsyncGenerator[AsyncClient]:
        """The client of a producer, which stays as long as a call uses it, and a while longer.

        RateLimited if there are too many of this principal, or altogether.
        """
        check_client_id(client_id)
        known_as = plane_client_id(principal, client_id)
        producer = self._producers.get(known_as)
        if producer is None:
            self._check_room(principal, max_of_principal)
            core = _ProducerCore(self._joined, self._config, known_as)
            client = AsyncClient(self._joined, self._config, core=core)
            stay_attached(client)
            producer = self._producers[known_as] = _Producer(client, principal)
        producer.used += 1
        try:
            yield producer.client
        finally:
            producer.used -= 1
            producer.last_used = self._clock()

    @asynccontextmanager
    async def asking(
        self,
        principal: str,
        client_id: str,
        asked: Asked,
        *,
        max_of_principal: int | None = None,
    ) -> AsyncGenerator[AsyncClient]:
        """The same, for one numbered effect: whatever the block asks for has that number."""
        if not 0 <= asked.settled < asked.number < 1 << 63:
            raise InvalidRequest(
                f"a request's number ({asked.number}) is from 1 on, and larger than the number up "
                f"to which all are settled ({asked.settled})"
            )
        async with self.client(principal, client_id, max_of_principal=max_of_principal) as client:
            token = _asked.set(asked)
            try:
                yield client
            except OutcomeUnknown as error:
                # As the producer calls it.
                inside, outside = error.request_id, f"{client_id}/{asked.number}"
                error.message = error.message.replace(inside, outside)
                error.request_id = outside
                raise
            finally:
                _asked.reset(token)

    def close_absent(self) -> int:
        """Let those go who have been away for so long; how many."""
        before = self._clock() - self._absence_s
        absent = [
            known_as
            for known_as, producer in self._producers.items()
            if not producer.used and producer.last_used <= before
        ]
        for known_as in absent:
            self._close(self._producers.pop(known_as).client)
        return len(absent)

    async def close(self) -> None:
        """Let all of them go."""
        producers, self._producers = self._producers, {}
        for producer in producers.values():
            self._close(producer.client)
        if self._closing:
            await asyncio.wait(set(self._closing))

    def _close(self, client: AsyncClient) -> None:
        task = asyncio.get_running_loop().create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _check_room(self, principal: str, max_of_principal: int | None) -> None:
        if max_of_principal is not None and self.of(principal) >= max_of_principal:
            raise RateLimited(
                f"{max_of_principal} clients of {principal!r} are here already: one process needs "
                "one client_id, and an idle one leaves by itself",
                retry_after_s=self._absence_s,
                limit="clients",
            )
        if len(self._producers) >= self._max_clients:
            raise RateLimited(
                f"{self._max_clients} clients are here already",
                retry_after_s=self._absence_s,
                limit="clients of the gateway",
            )
