"""What a client that is known may ask of a tag store: every verb, with bodies no other client has.

Whatever is asked, three things hold after it: a replay of the journal makes what the service is
(so it can be started again), all sums are what they sum up, and nothing but a refusal came back.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import Any, cast

from dataplane.errors import DataplaneError
from dataplane.server.connection import Connection
from dataplane.server.freeing import RemoteValues
from tests.dataplane.audit import audit
from tests.dataplane.histories import CLIENTS, STORE, Histories
from tests.dataplane.replaying import Caller, Live, described, differences
from tests.fuzz import trees
from tests.fuzz.target import KiB, MiB, Target
from tests.fuzz.wire import run

MAX_REQUESTS = 60
_WHO = [*CLIENTS, STORE]
_REFUSED = (DataplaneError, TypeError, ValueError, IndexError, KeyError)
"""What the connection makes a refusal of (server/connection.py)."""


class _Asker(Caller):
    """Hears answers and forgets them."""

    def __init__(self, live: Live, client_id: str) -> None:
        super().__init__(live.service, client_id, "store" if client_id == STORE else "client")
        self.wrong: list[BaseException] = []

    def reply(self, number: int, body: Any) -> None:
        pass

    def fail(self, number: int, error: DataplaneError) -> None:
        pass

    def fail_with(self, number: int, error: BaseException) -> None:
        if not isinstance(error, _REFUSED):
            self.wrong.append(error)

    async def reply_with(self, number: int, body: Any, payload: Any, nbytes: int) -> None:
        assert sum(len(memoryview(part).cast("B")) for part in payload) == nbytes

    def outlive(self, verb: str, number: int, work: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def abort(self, why: str) -> None:
        self.closed = True

    @functools.cached_property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return []


def _ask(data: bytes) -> None:
    asked = trees.value_in(data)
    if type(asked) is list:
        run(_ask_all(asked[:MAX_REQUESTS]))


async def _ask_all(asked: list[Any]) -> None:
    live = Live()
    service = live.service
    askers = {client_id: _Asker(live, client_id) for client_id in _WHO}
    for client_id in CLIENTS:
        service.attach(client_id)
    values = RemoteValues(STORE, [None, ["10.0.0.1", 1]], cast("Connection", askers[STORE]))
    service.registering.register(values)
    try:
        for number, request in enumerate(asked, 1):
            match request:
                case [int(who), str(verb), body] if verb in service.verbs and verb != "destroy":
                    asker = askers[_WHO[who % len(_WHO)]]
                case _:
                    continue
            try:
                waiting: Any = service.verbs[verb](cast("Connection", asker), number, body)
            except _REFUSED:
                continue
            if waiting is not None:
                asker.outlive(verb, number, waiting)
            for _ in range(3):
                await asyncio.sleep(0)
            live.now += 0.01
        await live.rest()
        # Whatever was written down can be replayed, and makes what the service is.
        made = live.follow()
        assert differences(described(made.store), described(live.store)) == []
        audit(live.store)
    finally:
        await _end(live, askers)
    for asker in askers.values():
        assert not asker.wrong, asker.wrong


async def _end(live: Live, askers: dict[str, _Asker]) -> None:
    live.service.checkpointing.restorer.abandon()
    await live.rest()
    wrong: list[BaseException] = []
    for asker in askers.values():
        for task in asker.tasks:
            task.cancel()
        for ended in await asyncio.gather(*asker.tasks, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, _REFUSED):
                wrong.append(ended)
    assert not wrong, wrong


@functools.cache
def _asked() -> tuple[bytes, ...]:
    """What was asked in a few random histories, in pieces that follow each other."""
    found: list[bytes] = []
    for seed in range(20, 28):

        async def play(seed: int = seed) -> None:
            live = Live()
            histories = Histories(seed, live, waits=False)
            asked: list[Any] = []
            for who, caller in enumerate([*histories.callers.values(), histories.values]):
                _listen(caller, who, asked)
            for _ in range(40):
                await histories.step()
                await live.rest()
            for future in histories.open:
                future.cancel()
            found.append(trees.packed(asked[:MAX_REQUESTS]))

        run(play())
    return tuple(found)


def _listen(caller: Caller, who: int, asked: list[Any]) -> None:
    send = caller.send

    def listening(verb: str, *body: Any) -> Any:
        asked.append([who, verb, trees.unpacked(trees.packed(list(body)))])
        return send(verb, *body)

    cast("Any", caller).send = listening


def _seeds() -> Iterator[bytes]:
    yield from _asked()
    verbs = run(_verbs())
    yield trees.packed([[0, verb, []] for verb in verbs])
    yield trees.packed([[3, verb, None] for verb in verbs])
    for body in ({}, [None] * 3, "text"):
        yield trees.packed([[0, verb, body] for verb in verbs])


async def _verbs() -> list[str]:
    return sorted(Live().service.verbs)


TARGETS = [
    Target(
        "requests", _ask, _seeds, (), mutate=trees.by_trees(), plant=trees.planted(),
        max_len=32 * KiB, limit_bytes=32 * MiB,
    ),
]  # fmt: skip
