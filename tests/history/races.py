"""Random clients on a real plane that run as fast as they can, each in a thread or a task.

Connections break under them, by a hand that does not know what they are at. Of clients that map
segments it breaks none that may hold memory: that is given back when its connection ends, which
means, on one node, that its client has stopped.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from dataplane.client.aio import AsyncClient
from dataplane.client.effects import Ask, Effect, Verb
from tests.faults.planes import Plane
from tests.history.calls import Caller, Known, Mix
from tests.history.record import History, Recorder
from tests.history.stepper import CALL_S, revision_of
from tests.history.workload import conclude, core_of, deadline_of, drop

PAUSE_S = 0.01
"""Between two connections that are broken."""


class Link:
    """What is known of the connections of one client, to say when it may have had none."""

    def __init__(self, name: str, notes: Recorder) -> None:
        self.name = name
        self._notes = notes
        self._lock = threading.Lock()
        self._cuts = 0
        self._away = False

    def cut(self, how: Callable[[], None]) -> None:
        """Break a connection."""
        with self._lock:
            if not self._away:
                self._notes.leaves(self.name)
            self._away = True
            how()
            self._cuts += 1

    def end(self) -> None:
        """All connections are about to be closed."""
        self.cut(lambda: None)

    def watched(self, verb: Verb[None]) -> Generator[Effect, Any, None]:
        """Note when the client surely has a connection again."""
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                effect = verb.send(value) if error is None else verb.throw(error)
            except StopIteration:
                return
            value, error = None, None
            cuts = self._cuts
            try:
                value = yield effect
            except BaseException as raised:
                error = raised
            else:
                if isinstance(effect, Ask):
                    self._answered(cuts)

    def _answered(self, cuts: int) -> None:
        with self._lock:
            if self._away and cuts == self._cuts:
                self._away = False
                self._notes.returns(self.name)


class _Race:
    """What all clients of one race share."""

    def __init__(self, plane: Plane, seed: int, mix: Mix) -> None:
        self.plane = plane
        self.chance = random.Random(seed)
        self.mix = mix
        self.known = Known()
        self.notes = Recorder(time.monotonic)
        self._first = revision_of(plane)

    def caller(self, name: str, client: Any) -> Caller:
        chance = random.Random(self.chance.random())
        return Caller(name, core_of(client), chance, self.mix, self.known, self.notes)

    def ends(self, caller: Caller) -> Generator[Verb[None]]:
        """Calls by which a client ends its claims, if it must not leave them behind."""
        if not self.mix.outlasts:
            return
        told = not caller.may_hold
        while not told:
            op = caller.recall()
            yield caller.call(op, deadline_of(op))
            told = op.end is not None
        while caller.held:
            claim, claimed = caller.held[0]
            settle = caller.settle(claim, claimed.keys, commit=False)
            yield caller.call(settle, deadline_of(settle))

    def history(self) -> History:
        conclude(self.plane.client, self.known, self.notes, self.mix)
        last = revision_of(self.plane)
        drop(self.plane.client, self.known)
        return self.notes.history(self._first, last)


def in_threads(plane: Plane, seed: int, mix: Mix, *, clients: int, calls: int) -> History:
    """The history of so many calls of each client, every client in a thread of its own."""
    race = _Race(plane, seed, mix)
    over = threading.Event()
    failed: list[BaseException] = []
    ready = threading.Barrier(clients)
    alive: dict[Link, Any] = {}

    def run(link: Link, client: Any, caller: Caller) -> None:
        def call(verb: Verb[None]) -> None:
            client._drive(link.watched(verb), time.monotonic() + CALL_S)

        try:
            ready.wait(10.0)
            for _ in range(calls):
                op = caller.draw()
                call(caller.call(op, deadline_of(op)))
            for verb in race.ends(caller):
                call(verb)
        except BaseException as error:
            failed.append(error)

    def cut() -> None:
        chance = random.Random(seed)
        while not over.wait(PAUSE_S * chance.random()):
            link = chance.choice(list(alive))
            client = alive[link]
            if client._core.config.same_node_reads:
                _cut_idle(link, client)
            else:
                for connection in list(client._open):
                    link.cut(partial(_shut, connection))

    threads: list[threading.Thread] = []
    for number in range(1, clients + 1):
        client = plane.another(same_node_reads=number % 2 == 0)
        link = Link(f"client {number}", race.notes)
        alive[link] = client
        caller = race.caller(link.name, client)
        threads.append(threading.Thread(target=run, args=(link, client, caller)))
    cutter = threading.Thread(target=cut)
    for thread in (*threads, cutter):
        thread.start()
    for thread in threads:
        thread.join(60.0)
    over.set()
    cutter.join(10.0)
    assert not any(thread.is_alive() for thread in (*threads, cutter))
    for link, client in alive.items():
        link.end()
        client.close()
    if failed:
        raise failed[0]
    return race.history()


def _cut_idle(link: Link, client: Any) -> None:
    for pool in list(client._idle.values()):
        try:
            connection = pool.pop()
        except IndexError:
            continue
        link.cut(partial(_shut, connection))
        pool.append(connection)


def _shut(connection: Any) -> None:
    try:
        connection._socket.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # its client has closed it meanwhile


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


def in_tasks(plane: Plane, seed: int, mix: Mix, *, clients: int, calls: int) -> History:
    """The same with asyncio clients, each of which makes two calls at a time."""
    race = _Race(plane, seed, mix)

    async def run(link: Link, client: Any, caller: Caller) -> None:
        async def call(verb: Verb[None]) -> None:
            await client._drive(link.watched(verb), time.monotonic() + CALL_S)

        for _ in range(calls):
            op = caller.draw()
            await call(caller.call(op, deadline_of(op)))
        for verb in race.ends(caller):
            await call(verb)

    async def cut(alive: dict[Link, Any]) -> None:
        chance = random.Random(seed)
        while not await _is_set(over, PAUSE_S * chance.random()):
            link = chance.choice(list(alive))
            maps = alive[link]._core.config.same_node_reads
            for mine in list(alive[link]._loops.values()):
                for (_, puts), task in mine.channels.items():
                    there = task.done() and not task.cancelled() and task.exception() is None
                    if there and (puts or not maps):
                        link.cut(task.result()._transport.abort)

    over = asyncio.Event()

    async def main() -> None:
        alive: dict[Link, Any] = {}
        for number in range(1, clients + 1):
            settings = {"same_node_reads": number % 2 == 0}
            client = AsyncClient(plane.joined, plane.config.model_copy(update=settings))
            alive[Link(f"client {number}", race.notes)] = client
        cutter = asyncio.create_task(cut(alive))
        try:
            async with asyncio.TaskGroup() as tasks:
                for link, client in alive.items():
                    for _ in range(2):
                        tasks.create_task(run(link, client, race.caller(link.name, client)))
        finally:
            over.set()
            await cutter
            for link, client in alive.items():
                link.end()
                await client.close()

    asyncio.run(main())
    return race.history()
